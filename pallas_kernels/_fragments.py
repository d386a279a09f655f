"""Pieces of the attention kernels and of append_kv that work on a warpgroup's registers, below what Pallas expresses.

Every function has two bodies: Mosaic GPU instructions where the kernel is compiled, and the same in jnp where jax's interpreter
runs it (`interpreted`). Columns here are the minor axis of an [M, 8] product of wgmma, whose 64-row tiles are spread over the
warps of a warpgroup: 16 rows a warp, and in a warp the rows r and r + 8 and two neighbouring columns a thread.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, nvvm, vector

COLUMNS = 8
"""Columns of a product whose second operand is one query tile: the least that wgmma computes."""

WARPS = 4

ACCUMULATOR = plgpu.Layout.WGMMA
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)
PER_ROW = plgpu.Layout.WGMMA.reduce(1)

COLUMN_SCRATCH = (WARPS, COLUMNS)
"""float32 shared memory that `reduce_columns` needs."""


def laid_out(x: jax.Array, layout: Any, interpreted: bool) -> jax.Array:
    return x if interpreted else plgpu.layout_cast(x, layout)


def filled(shape: tuple[int, ...], value: Any, dtype: Any, layout: Any, interpreted: bool) -> jax.Array:
    return laid_out(jnp.full(shape, value, dtype), layout, interpreted)


def load(ref: Any, layout: Any, interpreted: bool) -> jax.Array:
    """All of a reference, in the given layout."""
    return ref[...] if interpreted else plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]


def counted(shape: tuple[int, ...], axis: int, layout: Any, interpreted: bool) -> jax.Array:
    """int32 indices along an axis."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=None if interpreted else layout)


def across_rows(x: jax.Array, rows: int) -> jax.Array:
    """[columns] -> [rows, columns]."""
    return jax.lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


def products(
    terms: Sequence[Sequence[Callable[[], tuple[Any, Any]]]],
    shape: tuple[int, int],
    *,
    first_transposed: bool,
    release: Callable[[int], None],
    interpreted: bool,
) -> list[jax.Array]:
    """For each inner sequence the sum of its products a b^T (or a^T b^T), operands in shared memory, result in registers.

    Each term is called for its operands when its turn comes, so it may wait for them while earlier products run. `release(i)`
    is called when the i-th product of all has read its operands.
    """
    number = sum(len(inner) for inner in terms)
    if interpreted:  # the interpreter has no transposed operands

        def value(term: Callable[[], tuple[Any, Any]]) -> jax.Array:
            a, b = (operand[...] for operand in term())
            return jnp.dot(a.T if first_transposed else a, b.T, preferred_element_type=jnp.float32)

        results = [functools.reduce(jnp.add, [value(term) for term in inner]) for inner in terms]
        plgpu.commit_smem()  # wgmma reads like TMA writes; ordinary loads must be fenced off from the copies that follow
        for i in range(number):
            release(i)
        return results

    def body(*accumulators: Any) -> list[jax.Array]:
        for accumulator, inner in zip(accumulators, terms, strict=True):
            for term in inner:
                a, b = term()
                plgpu.wgmma(accumulator, a.T if first_transposed else a, b.T)
        for i in range(number):
            plgpu.wgmma_wait(number - 1 - i)
            release(i)
        return [accumulator[...] for accumulator in accumulators]

    return pl.run_scoped(body, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * len(terms))


def exclusive_sums(x: jax.Array, scratch: Any, interpreted: bool) -> jax.Array:
    """For every element of an int32 array in `striped` layout the sum of the elements before it.

    `scratch` is int32 shared memory, `(x.size // 128, WARPS)` or wider. One warpgroup barrier is passed, between writing and
    reading it.
    """
    if interpreted:
        return jnp.cumsum(x) - x
    layout = striped(x.shape[0])

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.int32, layout=layout)
    )
    def scan(_, x, scratch):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        one = ir.VectorType.get((1,), i32)
        lane, warp = _lane_and_warp()
        inclusive = []  # over the lanes of a warp, for every stripe
        for register in x.registers.flat:
            total = vector.extract(register, dynamic_position=[], static_position=[0])
            for distance in (1, 2, 4, 8, 16):
                below = nvvm.shfl_sync(
                    mgpu_utils.c(0xFFFFFFFF, i32), total, mgpu_utils.c(distance, i32), mgpu_utils.c(0, i32), nvvm.ShflKind.up
                )
                reached = arith.cmpi(arith.CmpIPredicate.uge, lane, mgpu_utils.c(distance, i32))
                total = arith.addi(total, arith.select(reached, below, mgpu_utils.c(0, i32)))
            inclusive.append(total)
        last = arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu_utils.c(31, i32))
        with mgpu_utils.when(last):
            for stripe, total in enumerate(inclusive):
                memref.store(total, scratch, [mgpu_utils.c(stripe, index), arith.index_castui(index, warp)])
        mgpu_utils.warpgroup_barrier()
        before = mgpu_utils.c(0, i32)
        registers = x.registers.copy()
        for stripe, total in enumerate(inclusive):
            mine = before
            for w in range(WARPS):
                of_warp = memref.load(scratch, [mgpu_utils.c(stripe, index), mgpu_utils.c(w, index)])
                earlier = arith.cmpi(arith.CmpIPredicate.ult, mgpu_utils.c(w, i32), warp)
                mine = arith.addi(mine, arith.select(earlier, of_warp, mgpu_utils.c(0, i32)))
                before = arith.addi(before, of_warp)
            own = vector.extract(x.registers.flat[stripe], dynamic_position=[], static_position=[0])
            registers.flat[stripe] = vector.from_elements(one, [arith.subi(arith.addi(mine, total), own)])
        return type(x)(_registers=registers, _layout=x.layout, _is_signed=x.is_signed)

    return scan(x, scratch)  # pyright: ignore[reportCallIssue] (the decorator passes its context)


def striped(size: int) -> Any:
    """Layout of a one-dimensional array of a multiple of 128 elements: element i is with thread i % 128."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


def _lane_and_warp() -> tuple[Any, Any]:
    """This thread's number in its warp, and its warp's in the warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.index_castui(i32, gpu.thread_id(gpu.Dimension.x))
    lane = arith.remui(thread, mgpu_utils.c(32, i32))
    return lane, arith.remui(arith.divui(thread, mgpu_utils.c(32, i32)), mgpu_utils.c(WARPS, i32))


def reduce_columns(x: jax.Array, scratch: Any, kind: str, interpreted: bool) -> jax.Array:
    """Maximum or sum ("max", "add") of every column of a [64, 8] float32 array.

    `scratch` (COLUMN_SCRATCH) carries the warps' results to each other. One warpgroup barrier is passed between writing and
    reading it, none after: before the same scratch is used again, all warps must have met at another barrier.
    """
    if interpreted:
        return x.max(axis=0) if kind == "max" else x.sum(axis=0)

    @plgpu.inline_mgpu(
        arg_types=(ACCUMULATOR, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((COLUMNS,), jnp.float32, layout=PER_COLUMN),
    )
    def exchange(_, x, scratch):
        combine = arith.maximumf if kind == "max" else arith.addf
        rows = [x.registers.flat[i] for i in range(x.registers.size)]  # pairs of columns
        pair = rows[0]
        for other in rows[1:]:
            pair = combine(pair, other)
        element = ir.VectorType(pair.type).element_type
        halves = [vector.extract(pair, dynamic_position=[], static_position=[i]) for i in range(2)]
        for distance in (4, 8, 16):  # lanes with equal lane % 4 hold the same columns
            halves = [combine(h, mgpu_utils.shfl_bfly(h, distance)) for h in halves]
        index = ir.IndexType.get()
        i32 = ir.IntegerType.get_signless(32)
        lane, warp = _lane_and_warp()
        column = arith.index_castui(index, arith.muli(arith.remui(lane, mgpu_utils.c(4, i32)), mgpu_utils.c(2, i32)))
        pair_type = ir.VectorType.get((2,), element)
        vector.store(vector.from_elements(pair_type, halves), scratch, [arith.index_castui(index, warp), column])
        mgpu_utils.warpgroup_barrier()
        pairs = [vector.load(pair_type, scratch, [mgpu_utils.c(w, index), column]) for w in range(WARPS)]
        total = combine(combine(pairs[0], pairs[1]), combine(pairs[2], pairs[3]))
        result = type(x).splat(mgpu_utils.c(0.0, element), (COLUMNS,), PER_COLUMN.to_mgpu())
        assert result.registers.size == 1
        registers = result.registers.copy()
        registers.flat[0] = total
        return type(x)(_registers=registers, _layout=result.layout, _is_signed=None)

    return exchange(x, scratch)  # pyright: ignore[reportCallIssue] (the decorator passes its context)


def store_transposed(ref: Any, x: jax.Array, interpreted: bool) -> None:
    """ref[8, m] = x[m, 8] transposed, in shared memory."""
    if interpreted:
        ref[...] = x.T
    else:
        ref.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)


def gather(ref: Any, rows: jax.Array, interpreted: bool) -> jax.Array:
    """ref[rows] as [M, N] in ACCUMULATOR layout; `ref` [*, N] is in device memory, `rows` int32 [M] in PER_ROW layout."""
    shape = (rows.shape[0], ref.shape[1])
    if interpreted:
        return jnp.take(ref[...], rows, axis=0)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), PER_ROW),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=ACCUMULATOR),
    )
    def load(_, ref, rows):
        index, element = ir.IndexType.get(), ir.MemRefType(ref.type).element_type
        layout = ACCUMULATOR.to_mgpu()
        empty = type(rows).splat(arith.constant(element, ir.FloatAttr.get(element, 0.0)), shape).to_layout(layout)
        rows = rows.broadcast_in_dim(shape, (0,), layout)
        registers = empty.registers.copy()
        for i, (place, row) in enumerate(zip(layout.thread_idxs(shape), rows.registers.flat, strict=True)):
            row = vector.extract(row, dynamic_position=[], static_position=[0])
            at = [arith.index_castui(index, row), place[1]]
            registers.flat[i] = vector.load(ir.VectorType.get((2,), element), ref, at)
        return type(rows)(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref, rows)  # pyright: ignore[reportCallIssue] (the decorator passes its context)


def scatter(ref: Any, rows: jax.Array, x: jax.Array, axis: int, interpreted: bool) -> None:
    """ref[rows[i]] = x[i] (axis 0) or x[:, i] (axis 1) in device memory, for every i whose row is not negative.

    x is [M, N] in ACCUMULATOR layout, `rows` int32 in the layout of x reduced to that axis.
    """
    x = x.astype(ref.dtype)
    if interpreted:

        def put(i: Any, _: Any) -> None:
            @pl.when(jax.lax.dynamic_index_in_dim(rows, i, keepdims=False) >= 0)
            def _() -> None:
                row = jax.lax.dynamic_index_in_dim(rows, i, keepdims=False)
                ref[row] = jax.lax.dynamic_index_in_dim(x, i, axis, keepdims=False)

        jax.lax.fori_loop(0, x.shape[axis], put, None)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_ROW if axis == 0 else PER_COLUMN, ACCUMULATOR))
    def store(_, ref, rows, x):
        index, zero = ir.IndexType.get(), mgpu_utils.c(0, ir.IntegerType.get_signless(32))
        rows = rows.broadcast_in_dim(x.shape, (axis,), x.layout)
        places = x.layout.thread_idxs(x.shape)
        # A register is a pair of neighbours along the minor axis: one row's when rows run along axis 0, else two rows'.
        for place, values, targets in zip(places, x.registers.flat, rows.registers.flat, strict=True):
            targets, values = [
                [vector.extract(pair, dynamic_position=[], static_position=[i]) for i in range(2)] for pair in (targets, values)
            ]
            if axis == 0:
                values = [vector.from_elements(ir.VectorType.get((2,), values[0].type), values)]
            for i, value in enumerate(values):
                column = place[1] if axis == 0 else place[0]
                with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.sge, targets[i], zero)):
                    at = [arith.index_castui(index, targets[i]), column]
                    vector.store(value, ref, at) if axis == 0 else memref.store(value, ref, at)

    store(ref, rows, x)  # pyright: ignore[reportCallIssue] (the decorator passes its context)


WIDE = 8
"""Elements that `wide_load` and `wide_store` move at once for a thread: 16 bytes of bfloat16."""


def wide_load(ref: Any, rows: jax.Array, columns: jax.Array, interpreted: bool) -> jax.Array:
    """ref[rows[i], columns[i] : columns[i] + WIDE] one behind the other, [M * WIDE]; element i's are with thread i % 128.

    `ref` [*, N] is in device memory; `rows`, `columns` are int32 [M] in `striped` layout. Rows and columns begin at multiples
    of 16 bytes.
    """
    shape = (rows.shape[0] * WIDE,)
    if interpreted:
        return ref[...][rows[:, None], columns[:, None] + jnp.arange(WIDE, dtype=jnp.int32)[None]].reshape(shape)
    layout, each = plgpu.Layout.WG_STRIDED(shape, vec_size=WIDE), striped(rows.shape[0])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), each, each), return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout)
    )
    def load(_, ref, rows, columns):
        element = ir.MemRefType(ref.type).element_type
        registers = np.empty(rows.registers.shape, dtype=object)
        for i, at in enumerate(zip(rows.registers.flat, columns.registers.flat, strict=True)):
            vector_type = ir.VectorType.get((WIDE,), element)
            registers.flat[i] = vector.load(vector_type, ref, [_index(number) for number in at], alignment=16)
        return type(rows)(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return load(ref, rows, columns)  # pyright: ignore[reportCallIssue] (the decorator passes its context)


def wide_store(ref: Any, places: Sequence[jax.Array], parts: Sequence[tuple[jax.Array, jax.Array]], interpreted: bool) -> None:
    """The counterpart of `wide_load`, for `parts` of (columns, elements) that lie in the same rows of `ref`.

    `places` index all axes but the last. Where the first of them is negative nothing is stored.
    """
    if interpreted:

        def put(i: Any, _: Any) -> None:
            place = [jax.lax.dynamic_index_in_dim(axis, i, keepdims=False) for axis in places]

            @pl.when(place[0] >= 0)
            def _() -> None:
                for columns, x in parts:
                    column = jax.lax.dynamic_index_in_dim(columns, i, keepdims=False)
                    ref[(*place, pl.ds(column, WIDE))] = jax.lax.dynamic_slice_in_dim(x, i * WIDE, WIDE)

        jax.lax.fori_loop(0, places[0].shape[0], put, None)
        return
    each = striped(places[0].shape[0])
    wide = plgpu.Layout.WG_STRIDED((places[0].shape[0] * WIDE,), vec_size=WIDE)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[each] * len(places), *[each, wide] * len(parts)))
    def store(_, ref, *arrays):
        zero = mgpu_utils.c(0, ir.IntegerType.get_signless(32))
        for registers in zip(*(array.registers.flat for array in arrays), strict=True):
            place, part = registers[: len(places)], registers[len(places) :]
            first = vector.extract(place[0], dynamic_position=[], static_position=[0])
            with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.sge, first, zero)):
                # Every axis by an index of its own: an element's offset can pass 2^31.
                for column, value in zip(part[::2], part[1::2], strict=True):
                    vector.store(value, ref, [_index(number) for number in (*place, column)], alignment=16)

    store(ref, *places, *[array for part in parts for array in part])  # pyright: ignore[reportCallIssue]


def take(ref: Any, places: jax.Array, interpreted: bool) -> jax.Array:
    """ref[places[i]] of an int32 array in device memory; `places` and the result are in `striped` layout."""
    if interpreted:
        return jnp.take(ref[...], places, axis=0)
    each = striped(places.shape[0])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), each), return_type=plgpu.ShapeDtypeStruct(places.shape, jnp.int32, layout=each)
    )
    def load(_, ref, places):
        one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        registers = np.empty(places.registers.shape, dtype=object)
        for i, place in enumerate(places.registers.flat):
            registers.flat[i] = vector.load(one, ref, [_index(place)], alignment=4)
        return type(places)(_registers=registers, _layout=places.layout, _is_signed=True)

    return load(ref, places)  # pyright: ignore[reportCallIssue] (the decorator passes its context)


def _index(register: Any) -> Any:
    """The only element of an int32 register, which is not negative, as an index."""
    number = vector.extract(register, dynamic_position=[], static_position=[0])
    return arith.index_castui(ir.IndexType.get(), number)

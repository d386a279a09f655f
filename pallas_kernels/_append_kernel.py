"""Rotary embedding and the writes of append_kv in one kernel on exactly `num_sms` SMs.

Every thread takes 16 bytes of a head's first half and the same columns of its second half, rotates the pair (not a value's),
and stores it where it belongs. It loads several such pairs before it stores the first, to have enough bytes under way.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, scf, vector

from pallas_kernels import _mosaic

_WARPGROUPS = 4
_PAIRS = 3  # of a thread, under way at once
_VECTOR = 8  # elements of 16 bytes


def append(
    qkv: Array,  # [T, K, G + 2, H], bfloat16
    cos: Array,  # [T, H / 2], float32
    sin: Array,  # [T, H / 2], float32
    slots: Array,  # [T], int32; -1 writes nothing
    k_pages: Array,  # [P, K, page_size, H]
    v_pages: Array,  # [P, K, page_size, H]
    *,
    num_sms: int,
) -> tuple[Array, Array, Array]:
    """Rotated queries [T, K, G, H], and the pages with rotated keys and with values in the tokens' slots, in place if donated.

    Raises:
      UnsupportedDeviceError: no Hopper GPU.
      ValueError: `num_sms` out of range, a head size that is no multiple of 16, or another dtype than given above.
    """
    _mosaic.require_hopper("append_kv", num_sms)
    T, K, heads, H = qkv.shape
    if H % (2 * _VECTOR):
        raise ValueError(f"append_kv: the head size {H} is no multiple of {2 * _VECTOR}")
    for name, x, dtype in (
        ("qkv", qkv, jnp.bfloat16),
        ("k_pages", k_pages, jnp.bfloat16),
        ("v_pages", v_pages, jnp.bfloat16),
        ("cos", cos, jnp.float32),
        ("sin", sin, jnp.float32),
        ("slots", slots, jnp.int32),
    ):
        if x.dtype != dtype:
            raise ValueError(f"append_kv: {name} is {x.dtype}, only {jnp.dtype(dtype)} is compiled")
    kernel = pl.kernel(
        _body,
        out_type=(),
        mesh=plgpu.Mesh(
            grid=(num_sms,), grid_names=("sm",), num_threads=_WARPGROUPS, thread_name="wg", kernel_name="append_kv"
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        name="append_kv",
    )

    def update(refs: Any) -> None:
        kernel(qkv, cos, sin, slots, *refs)

    return pl.run_state(update)((lax.empty((T, K, heads - 2, H), qkv.dtype), k_pages, v_pages))  # pyright: ignore[reportReturnType]


def _body(*refs: Any) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def run(_: Any, qkv: Any, cos: Any, sin: Any, slots: Any, *results: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        pairs = ir.MemRefType(qkv.type).shape
        total = pairs[0] * pairs[1] * pairs[2] * pairs[3] // (2 * _VECTOR)
        threads = arith.index_castui(i32, gpu.grid_dim(gpu.Dimension.x))
        threads = arith.muli(threads, mgpu_utils.c(_WARPGROUPS * _mosaic.WARPGROUP, i32))
        block = arith.index_castui(i32, gpu.block_id(gpu.Dimension.x))
        thread = arith.index_castui(i32, gpu.thread_id(gpu.Dimension.x))
        thread = arith.addi(arith.muli(block, mgpu_utils.c(_WARPGROUPS * _mosaic.WARPGROUP, i32)), thread)
        loop = scf.ForOp(thread, mgpu_utils.c(total, i32), arith.muli(threads, mgpu_utils.c(_PAIRS, i32)))
        with ir.InsertionPoint(loop.body):
            numbers = [arith.addi(loop.induction_variable, arith.muli(threads, mgpu_utils.c(i, i32))) for i in range(_PAIRS)]
            loaded = [_load(number, total, qkv, cos, sin, slots) for number in numbers]
            for number, pair in zip(numbers, loaded, strict=True):
                with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, number, mgpu_utils.c(total, i32))):
                    _store(*pair, *results)
            scf.yield_([])

    run(*refs)  # pyright: ignore[reportCallIssue] (the decorator passes its context)


def _load(number: Any, total: int, qkv: Any, cos: Any, sin: Any, slots: Any) -> tuple[Any, ...]:
    """Where pair `number` is (token, KV head, head in the group, column), its slot, its values and its cosines and sines.

    Behind the last pair, the last one's.
    """
    _, kv_heads, heads, size = ir.MemRefType(qkv.type).shape
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    number = arith.minui(number, mgpu_utils.c(total - 1, i32))
    place = []
    for extent in (size // (2 * _VECTOR), heads, kv_heads):
        place.append(arith.index_castui(index, arith.remui(number, mgpu_utils.c(extent, i32))))
        number = arith.divui(number, mgpu_utils.c(extent, i32))
    column, head, kv_head = place
    token = arith.index_castui(index, number)
    column = arith.muli(column, mgpu_utils.c(_VECTOR, index))
    second = arith.addi(column, mgpu_utils.c(size // 2, index))
    values = ir.VectorType.get((_VECTOR,), ir.BF16Type.get())
    angles = ir.VectorType.get((_VECTOR,), ir.F32Type.get())
    halves = [vector.load(values, qkv, [token, kv_head, head, c]) for c in (column, second)]
    turns = [vector.load(angles, ref, [token, column]) for ref in (cos, sin)]
    slot = vector.extract(vector.load(ir.VectorType.get((1,), i32), slots, [token]), dynamic_position=[], static_position=[0])
    return (token, kv_head, head, column, second), slot, halves, turns


def _store(place: Any, slot: Any, halves: Any, turns: Any, q: Any, k_pages: Any, v_pages: Any) -> None:
    token, kv_head, head, *columns = place
    group, page_size = ir.MemRefType(q.type).shape[2], ir.MemRefType(k_pages.type).shape[2]
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    first, second = (arith.extf(turns[0].type, half) for half in halves)
    cos, sin = turns
    rotated = (
        arith.subf(arith.mulf(first, cos), arith.mulf(second, sin)),
        arith.addf(arith.mulf(second, cos), arith.mulf(first, sin)),
    )
    rotated = [arith.truncf(half.type, r) for half, r in zip(halves, rotated, strict=True)]

    def is_head(number: int) -> Any:
        return arith.cmpi(arith.CmpIPredicate.eq, head, mgpu_utils.c(number, index))

    with mgpu_utils.when(arith.cmpi(arith.CmpIPredicate.ult, head, mgpu_utils.c(group, index))):
        for column, r in zip(columns, rotated, strict=True):
            vector.store(r, q, [token, kv_head, head, column])
    stored = arith.cmpi(arith.CmpIPredicate.sge, slot, mgpu_utils.c(0, i32))
    page = arith.index_castui(index, arith.divui(slot, mgpu_utils.c(page_size, i32)))
    offset = arith.index_castui(index, arith.remui(slot, mgpu_utils.c(page_size, i32)))
    for number, pages, values in ((group, k_pages, rotated), (group + 1, v_pages, halves)):
        with mgpu_utils.when(arith.andi(stored, is_head(number))):
            for column, v in zip(columns, values, strict=True):
                vector.store(v, pages, [page, kv_head, offset, column])

"""Sums of one tile of a GEMM that several CTAs made, each over its own steps along k, added in a fixed order.

Partial sums travel through device memory, which the L2 cache holds. Among the CTAs of a grid (`write_or_share`) one owns the
tile and waits for the others, whose part is due earlier. The CTAs of a cluster (`write_in_cluster`) end together, so each
collects and writes some blocks of the tile; they need no semaphores, hence no launch that clears any.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_kernels._gemm_pipeline import BLOCK, Segment, block, consumer_offset
from pallas_kernels._tuning import GemmConfig

# Columns of a partial sum that lie together in memory: what a warp holds of them, 8 rows of 32 bytes, is then contiguous.
_SLAB = 8
# jax before 0.11 wants an index beside the reference, from then on it warns of one.
_NO_INDEX: Any = () if jax.__version_info__ >= (0, 11) else ((),)


def partials_shape(ctas: int, halves: int, config: GemmConfig) -> jax.ShapeDtypeStruct:
    """What `ctas` CTAs leave for each other. A cluster's have two places each, in turns."""
    places = (2, ctas) if config.cluster_along == "k" else (ctas,)
    return jax.ShapeDtypeStruct((*places, halves, config.tile_n // _SLAB, config.tile_m, _SLAB), jnp.float32)


def cta_index(config: GemmConfig) -> Any:
    return lax.axis_index("sm") * config.cluster + (lax.axis_index("cta") if config.cluster > 1 else 0)


def write_or_share(
    write: Callable[..., None],
    partials: Any,  # float32 [places, halves, tile_n / 8, tile_m, 8]
    config: GemmConfig,
    interpreted: bool,
    segment: Segment,  # extra: how many places before its own have sums to add, whether its own are for later, its place
    totals: list[Array],
    staging: dict[str, Any],
    columns_at_once: int | None = None,
) -> None:
    """Leaves the sums of a partial segment to the tile's owner; an owner adds its sources' sums in order and writes.

    An owner adds `columns_at_once` of each half's sums at a time (None: all), for kernels whose registers do not hold all sums
    and what is loaded for all of them.
    """
    wg = lax.axis_index("wg")
    sources, partial, place = segment.extra
    # The interpreter runs CTAs in order of their index and has no semaphores.
    done = None if interpreted else pl.get_global(plgpu.SemaphoreType.REGULAR((partials.shape[0], config.consumers)))

    @pl.when(partial == 1)
    def _() -> None:
        for half, total in enumerate(totals):
            _store(partials.at[place, half], total, 0, 0, config)
        if done is not None:
            plgpu.commit_smem()  # one thread signals for all, whose stores must come before
            plgpu.semaphore_signal(done.at[place, wg], memory_scope="gpu")

    @pl.when(partial == 0)
    def _() -> None:
        def add(half: int, j: int, i: Array, total: Array) -> Array:
            source = place - (sources - i) * config.cluster
            if done is not None:
                plgpu.semaphore_wait(done.at[source, wg], decrement=False, memory_scope="gpu")
            return total + _load(partials.at[source, half], total.shape, 0, j // BLOCK, config, interpreted)

        # One half after the other: the registers do not hold both halves and what is loaded for both.
        def summed(half: int, total: Array) -> Array:
            width = columns_at_once or total.shape[1]
            parts = [
                lax.fori_loop(0, sources, functools.partial(add, half, j), total[:, j : j + width])
                for j in range(0, total.shape[1], width)
            ]
            return parts[0] if len(parts) == 1 else lax.concatenate(parts, 1)

        write(segment, [summed(half, total) for half, total in enumerate(totals)], staging=staging)


def write_in_cluster(
    write: Callable[..., None],
    partials: Any,  # float32 [2, num_sms, halves, tile_n / 8, tile_m, 8]
    config: GemmConfig,
    interpreted: bool,
    segment: Segment,  # extra: the number of the tile in this cluster
    totals: list[Array],
    staging: dict[str, Any],
) -> None:
    """CTA r of the cluster adds up and writes the blocks r, r + cluster, ...; the others leave it their sums of these.

    A CTA writes to a place again two tiles later. All have then passed the barrier of the tile between, and read before that.
    """
    rank, first = lax.axis_index("cta"), lax.axis_index("sm") * config.cluster
    mine = partials.at[lax.rem(segment.extra[0], 2)]
    blocks = list(np.ndindex(config.wg_m // BLOCK, config.wg_n // BLOCK))
    for index, (i, j) in enumerate(blocks):

        @pl.when(rank != index % config.cluster)
        def _(i: int = i, j: int = j) -> None:
            for half, b in enumerate(block(totals, i, j)):
                _store(mine.at[first + rank, half], b, i, j, config)

    arrived = staging["exchanged"].at[lax.axis_index("wg")]
    _order_memory(interpreted)
    plgpu.barrier_arrive(arrived)
    plgpu.barrier_wait(arrived)
    _order_memory(interpreted)

    def collect(index: int, i: int, j: int) -> list[Array]:
        own, sums = index % config.cluster, []
        for half, b in enumerate(block(totals, i, j)):
            parts = [
                b if r == own else _load(mine.at[first + r, half], b.shape, i, j, config, interpreted)
                for r in range(config.cluster)
            ]
            sums.append(sum(parts[1:], parts[0]))
        return sums

    write(segment, totals, staging=staging, collect=collect)


def _slabs(place: Any, shape: tuple[int, ...], i: int, j: int, config: GemmConfig) -> list[Any]:
    """Where a CTA's sums of `shape` lie whose first row and column are those of block (i, j) of this consumer's."""
    down, _ = consumer_offset(config)
    right = lax.axis_index("wg") * (config.wg_n // _SLAB) if config.split == "n" else 0
    first = right + j * (BLOCK // _SLAB)
    return [place.at[first + s, pl.ds(down + i * BLOCK, shape[0])] for s in range(shape[1] // _SLAB)]


def _store(place: Any, sums: Array, i: int, j: int, config: GemmConfig) -> None:
    for s, slab in enumerate(_slabs(place, sums.shape, i, j, config)):
        slab[...] = sums[:, s * _SLAB : (s + 1) * _SLAB]


def _load(place: Any, shape: tuple[int, ...], i: int, j: int, config: GemmConfig, interpreted: bool) -> Array:
    return lax.concatenate([_load_global(slab, interpreted) for slab in _slabs(place, shape, i, j, config)], 1)


def _load_global(ref: Any, interpreted: bool) -> Array:
    """Global memory to registers, where two neighbours of a row are all that a thread reads at once."""
    return ref[...] if interpreted else plgpu.load(ref, *_NO_INDEX, optimized=False)


def _order_memory(interpreted: bool) -> None:
    """What any thread of this warpgroup did to device memory comes before whatever one does after, for all of the GPU.

    A cluster's barrier alone orders accesses to shared memory.
    """
    if interpreted:
        return

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.acq_rel.gpu;", "", has_side_effects=True)
        mgpu_utils.warpgroup_barrier()
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [], "fence.acq_rel.gpu;", "", has_side_effects=True)

    fence()  # pyright: ignore[reportCallIssue] (the decorator passes its context)

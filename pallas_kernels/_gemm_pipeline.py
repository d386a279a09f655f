"""The core that the GEMMs share: one producer warpgroup streams tiles of A and B through a ring, consumers multiply.

The ring runs on across tiles, so the next tile loads while the last one is written. Which tiles a CTA multiplies, and what
becomes of the sums, is the caller's: `walk` feeds segments to both sides, `write` gets each consumer's sums.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _mosaic
from pallas_kernels._tuning import GemmConfig

BLOCK = 64
"""Rows and columns of the block that one step of an epilogue writes."""


class Segment(NamedTuple):
    """A tile of the result, or the part of it that comes from some steps along k. All are int32 scalars."""

    row: Array  # first row of the tile in A
    column: Array  # first column of the tile in B
    k_begin: Array  # first step of tile_k
    k_steps: Array
    matrix: Array | None = None  # which matrix of a stacked B
    extra: tuple[Array, ...] = ()  # for the caller's `write`


Walk = Callable[[Callable[[Segment, Array], Array]], Array]
"""Runs its argument `(segment, step) -> step` over this CTA's segments, from step 0 on; returns the last step."""


def multiply(
    walk: Walk,
    a: Any,  # [M, K]
    b: Any,  # [*stack, K, N] or, for two products at once, [*stack, K, 2, N]
    halves: int,  # 1 or 2 products
    write: Callable[..., None],  # (segment, each half's float32 sums [wg_m, wg_n], staging=staging), for each consumer
    config: GemmConfig,
    *,
    multicast: bool = False,  # the CTAs of a cluster multiply the same columns of B
    result_bytes: int = 2,  # of one element of what `staging` holds blocks of
    staging: Any,  # pytree of shared memory and barriers for `write`
) -> None:
    stages = config.stages(halves == 2, result_bytes)
    barrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("cta",)) if multicast else plgpu.Barrier
    free = barrier(num_barriers=stages, num_arrivals=config.consumers)
    # wgmma wants one swizzle for both operands.
    minor = math.gcd(a.shape[-1], b.shape[-1])

    @functools.partial(
        pl.run_scoped,
        a_smem=_mosaic.swizzled_smem((stages, config.tile_m, config.tile_k), a.dtype, global_minor=minor),
        b_smem=_mosaic.swizzled_smem((stages, halves, config.tile_k, config.tile_n), b.dtype, global_minor=minor),
        staging=staging,
        full=plgpu.Barrier(num_barriers=stages, num_arrivals=1 + halves),
        free=free,
        collective_axes="wg",
    )
    def _(a_smem: Any, b_smem: Any, staging: Any, full: Any, free: Any) -> None:
        wg = lax.axis_index("wg")

        @pl.when(wg == config.consumers)
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")
            produce(walk, a, b, a_smem, b_smem, full, free, config, multicast)

        @pl.when(wg < config.consumers)
        def _consumer() -> None:
            plgpu.set_max_registers(232, action="increase")
            consume(walk, a_smem, b_smem, full, free, functools.partial(write, staging=staging), config)
            plgpu.wait_smem_to_gmem(0)


def consumer_slices(config: GemmConfig) -> tuple[Any, Any]:
    """Rows and columns of a tile that this consumer computes."""
    wg = lax.axis_index("wg")
    if config.split == "m":
        return pl.ds(wg * config.wg_m, config.wg_m), slice(None)
    return slice(None), pl.ds(wg * config.wg_n, config.wg_n)


def consumer_offset(config: GemmConfig) -> tuple[Any, Any]:
    """First row and column of a tile that this consumer computes."""
    wg = lax.axis_index("wg")
    return (wg * config.wg_m, 0) if config.split == "m" else (0, wg * config.wg_n)


def produce(
    walk: Walk, a: Any, b: Any, a_smem: Any, b_smem: Any, full: Any, free: Any, config: GemmConfig, multicast: bool
) -> None:
    def segment(s: Segment, step: Array) -> Array:
        return load_segment(s, step, a, b, a_smem, b_smem, full, free, config, multicast)

    observe_last_releases(free, walk(segment), b_smem.shape[0])


def load_segment(
    s: Segment,
    step: Array,
    a: Any,
    b: Any,
    a_smem: Any,
    b_smem: Any,
    full: Any,
    free: Any,
    config: GemmConfig,
    multicast: bool = False,
) -> Array:
    """Loads a segment's tiles into the ring from step number `step` on; returns the number of the next."""
    stages, halves = b_smem.shape[:2]
    m, n = pl.ds(s.row, config.tile_m), pl.ds(s.column, config.tile_n)
    matrix = b if s.matrix is None else b.at[s.matrix]

    def load(i: Array, step: Array) -> Array:
        slot = lax.rem(step, stages)

        @pl.when(step >= stages)
        def _() -> None:
            plgpu.barrier_wait(free.at[slot])

        k = pl.ds((s.k_begin + i) * config.tile_k, config.tile_k)
        plgpu.copy_gmem_to_smem(a.at[m, k], a_smem.at[slot], full.at[slot])
        for half in range(halves):
            source = matrix.at[k, n] if halves == 1 else matrix.at[k, half, n]
            shared = "cta" if multicast else None
            plgpu.copy_gmem_to_smem(source, b_smem.at[slot, half], full.at[slot], collective_axes=shared)
        return step + 1

    return lax.fori_loop(0, s.k_steps, load, step)


def observe_last_releases(free: Any, steps: Array, stages: int) -> None:
    """The last release of every slot must be observed before the CTA ends."""
    for slot in range(stages):

        @pl.when(slot < steps)
        def _(slot: int = slot) -> None:
            plgpu.barrier_wait(free.at[slot])


def consume(
    walk: Walk,
    a_smem: Any,
    b_smem: Any,
    full: Any,
    free: Any,
    write: Callable[..., None],
    config: GemmConfig,
) -> None:
    stages, halves = b_smem.shape[:2]
    rows, columns = consumer_slices(config)

    def segment(s: Segment, first: Array) -> Array:
        def accumulate(*accs: Any) -> list[Array]:
            def one(_: Array, step: Array) -> Array:
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(full.at[slot])
                for half, acc in enumerate(accs):
                    plgpu.wgmma(acc, a_smem.at[slot, rows], b_smem.at[slot, half, :, columns])
                plgpu.wgmma_wait(halves)  # these products stay in flight; those before are done with their slot

                @pl.when(step > first)
                def _() -> None:
                    plgpu.barrier_arrive(free.at[lax.rem(step - 1, stages)])

                return step + 1

            last = lax.fori_loop(0, s.k_steps, one, first) - 1
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[lax.rem(last, stages)])
            return [acc[...] for acc in accs]

        write(s, pl.run_scoped(accumulate, *[plgpu.WGMMAAccumulatorRef((config.wg_m, config.wg_n), jnp.float32)] * halves))
        return first + s.k_steps

    walk(segment)


def block(totals: list[Array], i: int, j: int) -> list[Array]:
    """The 64 x 64 block at row i and column j of each half's sums."""
    return [t[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] for t in totals]


def activate(blocks: list[Array]) -> Array:
    """silu(gate) * up of two halves; one half passes."""
    return blocks[0] if len(blocks) == 1 else blocks[0] / (1 + jnp.exp(-blocks[0])) * blocks[1]

"""Rows sorted by expert, each times its expert's matrix, on exactly `num_sms` SMs of a Hopper GPU.

Group sizes are data on the device, so every warpgroup finds its tiles itself: tiles are counted expert after expert, a CTA
takes every `num_sms`-th, and since its count only grows it passes over the sizes once. TMA copies start at multiples of eight
rows, so a group's first tile starts up to seven rows early; rows of other groups are computed along and not stored. Nothing is
added across CTAs, so results repeat bit for bit.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _mosaic, _tuning
from pallas_kernels._gemm_pipeline import BLOCK, Segment, activate, block, consumer_offset, multiply
from pallas_kernels._tuning import GemmConfig

_ROWS = 8  # rows of A at whose multiples a TMA copy into swizzled shared memory may start


def grouped_gemm(
    x: Float[Array, "M K"],
    w: Float[Array, "E K *N"],
    group_sizes: Int[Array, " E"],
    *,
    swiglu: bool = False,
    num_sms: int,
    config: GemmConfig | None = None,
) -> Float[Array, "M N_out"]:
    """Each row of x times its expert's matrix, then silu(gate) * up with `swiglu` (w is [E, K, 2, N]).

    `group_sizes` counts the rows of each expert, in order; rows behind the last group are undefined. `config` replaces the
    tuned or default tiling.

    Raises:
      UnsupportedDeviceError: no Hopper GPU; `pallas_kernels.reference.grouped_gemm` runs anywhere.
      ValueError: shapes that do not fit together, a dtype that is not bfloat16 (int32 for the sizes), K or N that is not a
        multiple of 16, or `num_sms` out of range.
    """
    device = _mosaic.require_hopper("grouped_gemm", num_sms)
    if x.ndim != 2 or w.ndim < 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"grouped_gemm: x {x.shape} and w {w.shape} do not multiply")
    if swiglu and (w.ndim != 4 or w.shape[2] != 2):
        raise ValueError(f"grouped_gemm: with swiglu w must be [E, K, 2, N], not {w.shape}")
    if group_sizes.shape != w.shape[:1] or group_sizes.dtype != jnp.int32:
        raise ValueError(f"grouped_gemm: group_sizes is {group_sizes.dtype}{group_sizes.shape}, not int32{w.shape[:1]}")
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        raise ValueError(f"grouped_gemm: x is {x.dtype} and w is {w.dtype}, only bfloat16 is compiled")
    out_shape = (x.shape[0], *w.shape[3 if swiglu else 2 :])
    n, k = math.prod(out_shape[1:]), x.shape[1]
    if k % 16 or n % 16:
        raise ValueError(f"grouped_gemm: K={k} and N={n} must be multiples of 16")
    w = w if swiglu else w.reshape(*w.shape[:2], n)
    if config is None:
        experts = w.shape[0]
        config = _tuning.grouped_gemm_config(device.kind, x.shape[0], n, k, experts=experts, swiglu=swiglu, num_sms=num_sms)
    if config.cluster != 1:
        raise ValueError(f"grouped_gemm: {config} has a cluster, which is for gemm")
    out = _grouped_gemm(x, w, group_sizes, config=config, num_sms=num_sms, interpreted=device.interpreted)
    return out.reshape(out_shape)


@functools.partial(jax.jit, static_argnames=("config", "num_sms", "interpreted"), inline=True)
def _grouped_gemm(x: Array, w: Array, group_sizes: Array, *, config: GemmConfig, num_sms: int, interpreted: bool) -> Array:
    m, n, halves = x.shape[0], w.shape[-1], w.ndim - 2
    n_tiles = _mosaic.cdiv(n, config.tile_n)
    # TMA clips columns past the end of the result; the interpreter cannot.
    stored = n_tiles * config.tile_n if interpreted else n

    def body(sizes: Any, x_ref: Any, w_ref: Any, out: Any) -> None:
        k_steps = _mosaic.cdiv(x.shape[1], config.tile_k)
        walk = functools.partial(_walk, sizes, n_tiles, k_steps, num_sms, config)
        write = functools.partial(_write_rows, out, config)
        staging = {
            "blocks": _mosaic.swizzled_smem((config.consumers, BLOCK, BLOCK), x.dtype, global_minor=n),
            "rows": plgpu.SMEM((config.consumers, BLOCK, BLOCK), x.dtype),
        }
        multiply(walk, x_ref, w_ref, halves, write, config, staging=staging)

    out = _mosaic.launch(
        body,
        jax.ShapeDtypeStruct((m, stored), x.dtype),
        name="grouped_gemm",
        num_sms=num_sms,
        warpgroups=config.consumers + 1,
        approx_math=True,
    )(group_sizes, x, w)
    return out[:, :n] if interpreted else out


def _walk(
    sizes: Any, n_tiles: int, k_steps: int, num_sms: int, config: GemmConfig, body: Callable[[Segment, Array], Array]
) -> Array:
    """This CTA's tiles: numbers cta, cta + num_sms, ... in order of expert, column, row."""
    experts = sizes.shape[0]

    def tiles_high(start: Array, size: Array) -> Array:
        high = lax.div(lax.rem(start, _ROWS) + size + (config.tile_m - 1), config.tile_m)
        return jnp.where(size > 0, high, 0)

    def size_of(expert: Array) -> Array:
        return sizes[jnp.minimum(expert, experts - 1)]

    def seek(tile: Array, expert: Array, start: Array, first: Array) -> tuple[Array, Array, Array]:
        """The expert of `tile`, its first row and its first tile, from an expert at or before it."""

        def passed(state: tuple[Array, Array, Array]) -> Array:
            expert, start, first = state
            return (expert < experts) & (tile >= first + tiles_high(start, size_of(expert)) * n_tiles)

        def advance(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            expert, start, first = state
            size = size_of(expert)
            return expert + 1, start + size, first + tiles_high(start, size) * n_tiles

        return lax.while_loop(passed, advance, (expert, start, first))

    def one(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        tile, step, expert, start, first = carry
        size = size_of(expert)
        high = tiles_high(start, size)
        row = lax.div(start, _ROWS) * _ROWS + lax.rem(tile - first, high) * config.tile_m
        column = lax.div(tile - first, high) * config.tile_n
        segment = Segment(row, column, jnp.int32(0), jnp.int32(k_steps), matrix=expert, extra=(start, start + size))
        step = body(segment, step)
        return tile + num_sms, step, *seek(tile + num_sms, expert, start, first)

    zero = jnp.int32(0)
    cta = lax.axis_index("sm")
    return lax.while_loop(lambda carry: carry[2] < experts, one, (cta, zero, *seek(cta, zero, zero, zero)))[1]


def _write_rows(out: Any, config: GemmConfig, segment: Segment, totals: list[Array], staging: dict[str, Any]) -> None:
    """SwiGLU on this consumer's sums, then those rows that are the group's."""
    wg = lax.axis_index("wg")
    down, right = consumer_offset(config)
    start, end = segment.extra
    blocks_smem, rows_smem = staging["blocks"].at[wg], staging["rows"].at[wg]
    for i, j in np.ndindex(config.wg_m // BLOCK, config.wg_n // BLOCK):
        top = segment.row + down + i * BLOCK
        columns = pl.ds(segment.column + right + j * BLOCK, BLOCK)
        low, high = jnp.clip(start - top, 0, BLOCK), jnp.clip(end - top, 0, BLOCK)
        value = activate(block(totals, i, j)).astype(out.dtype)

        @pl.when(high - low == BLOCK)
        def _(value: Array = value, top: Array = top, columns: Any = columns) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            blocks_smem[...] = value
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(blocks_smem, out.at[pl.ds(top, BLOCK), columns])

        @pl.when((high - low > 0) & (high - low < BLOCK))
        def _(value: Array = value, top: Array = top, columns: Any = columns, low: Array = low, high: Array = high) -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            rows_smem[...] = value
            plgpu.commit_smem()
            # A copy's height is static: the binary digits of the count say which of these to make.
            at, count = low, high - low
            for rows in (32, 16, 8, 4, 2, 1):

                @pl.when(count & rows != 0)
                def _(at: Array = at, rows: int = rows) -> None:
                    plgpu.copy_smem_to_gmem(rows_smem.at[pl.ds(at, rows)], out.at[pl.ds(top + at, rows), columns])

                at += count & rows

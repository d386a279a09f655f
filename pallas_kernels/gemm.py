"""C = A B on exactly `num_sms` SMs of a Hopper GPU, bf16 in, float32 accumulation, with the epilogues models need.

Who does what is a table made on the host by `schedule`: it cuts the work into equal shares, wave boundary or not (stream-K),
and says whose partial sums a CTA must add. Where tiles are few, the CTAs of a cluster can share each along k instead. Sums are
added in a fixed order, so results repeat bit for bit. SwiGLU keeps two accumulators, one for the gate's columns and one for the
same columns of up, so weights need no interleaving.

How many rows are in use may be known on the device only. Then there is a table for each number of rows of tiles, and CTAs take
the one that leaves out what is padding.
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
from jaxtyping import Array, DTypeLike, Float, Int

from pallas_kernels import _mosaic, _tuning
from pallas_kernels._gemm_partials import cta_index, partials_shape, write_in_cluster, write_or_share
from pallas_kernels._gemm_pipeline import BLOCK, Segment, activate, block, consumer_offset, multiply
from pallas_kernels._gemm_schedule import K_STEPS, PARTIAL, schedule, schedules
from pallas_kernels._tuning import GemmConfig

_SLOTS = 2  # output blocks in flight per consumer


def gemm(
    a: Float[Array, "M K"],
    b: Float[Array, "K *N"],
    *,
    bias: Float[Array, "*N"] | None = None,
    residual: Float[Array, "M N_out"] | None = None,
    swiglu: bool = False,
    rows: Int[Array, ""] | None = None,
    out_dtype: DTypeLike | None = None,
    num_sms: int,
    config: GemmConfig | None = None,
) -> Float[Array, "M N_out"]:
    """a b, then bias, then silu(gate) * up (`swiglu`: b is [K, 2, N]), then the residual; float32 until the result is stored.

    Axes of b behind the first are kept without `swiglu`. `config` replaces the tuned or default tiling.

    Args:
      rows: rows of a in use, clipped to 0 .. M (None: M). Those of the result from there on are undefined; tiles of nothing
        else are not computed. What a and the residual hold there has no influence on other rows.
      out_dtype: bfloat16 (None) or float32.

    Raises:
      UnsupportedDeviceError: no Hopper GPU; `pallas_kernels.reference.gemm` runs anywhere.
      ValueError: shapes that do not fit together, an operand that is not bfloat16 (int32 for `rows`), a result that is neither
        bfloat16 nor, without a residual, float32, K or N that is not a multiple of 16 (multiples of 64 are much faster: shorter
        swizzled rows take more TMA requests), M above 8 that is not a multiple of 8, `num_sms` out of range, or a `config` with
        larger clusters than there are SMs or steps along K.
    """
    device = _mosaic.require_hopper("gemm", num_sms)
    out_shape = check_operands(a, b, bias, residual, swiglu)
    result = _result_dtype(out_dtype, residual)
    if rows is not None and (jnp.shape(rows) or jnp.result_type(rows) != jnp.int32):
        raise ValueError(f"gemm: rows is {jnp.result_type(rows)}{jnp.shape(rows)}, not an int32 scalar")
    m, k = a.shape
    n = math.prod(out_shape[1:])
    b = b if swiglu else b.reshape(k, n)
    if config is None:
        beside = num_sms < device.num_sms
        config = _tuning.gemm_config(
            device.kind, m, n, k, swiglu=swiglu, num_sms=num_sms, beside=beside, result_bytes=result.itemsize
        )
    if config.cluster > min(num_sms, _mosaic.cdiv(k, config.tile_k)):
        raise ValueError(f"gemm: {config} has clusters larger than {num_sms=} or than the steps that K={k} has")
    out = _gemm(
        a,
        b,
        None if bias is None else bias.reshape(b.shape[1:]),
        None if residual is None else residual.reshape(m, n),
        None if rows is None else jnp.reshape(rows, 1),
        out_dtype=result,
        config=config,
        num_sms=num_sms,
        interpreted=device.interpreted,
    )
    return out.reshape(out_shape)


def check_operands(a: Array, b: Array, bias: Array | None, residual: Array | None, swiglu: bool) -> tuple[int, ...]:
    """The shape of the result."""
    if a.ndim != 2 or b.ndim < 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"gemm: a {a.shape} and b {b.shape} do not multiply")
    if swiglu and (b.ndim != 3 or b.shape[1] != 2):
        raise ValueError(f"gemm: with swiglu b must be [K, 2, N], not {b.shape}")
    out_shape = (a.shape[0], *(b.shape[2:] if swiglu else b.shape[1:]))
    if bias is not None and bias.shape != b.shape[1:]:
        raise ValueError(f"gemm: bias {bias.shape} does not fit b {b.shape}")
    if residual is not None and residual.shape != out_shape:
        raise ValueError(f"gemm: residual {residual.shape} does not fit the result {out_shape}")
    for name, x in (("a", a), ("b", b), ("bias", bias), ("residual", residual)):
        if x is not None and x.dtype != jnp.bfloat16:
            raise ValueError(f"gemm: {name} is {x.dtype}, only bfloat16 is compiled")
    n = math.prod(out_shape[1:])
    if a.shape[1] % 16 or n % 16:
        raise ValueError(f"gemm: K={a.shape[1]} and N={n} must be multiples of 16")
    if a.shape[0] > 8 and a.shape[0] % 8:
        raise ValueError(f"gemm: more than 8 rows must be a multiple of 8, not {a.shape[0]}")
    return out_shape


def _result_dtype(out_dtype: DTypeLike | None, residual: Array | None) -> np.dtype:
    found = jnp.dtype(jnp.bfloat16 if out_dtype is None else out_dtype)
    if found not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"gemm: out_dtype is {found}, only bfloat16 and float32 are compiled")
    if found == jnp.float32 and residual is not None:
        raise ValueError("gemm: a residual is added to bfloat16 results only, not with out_dtype float32")
    return found


@functools.partial(jax.jit, static_argnames=("out_dtype", "config", "num_sms", "interpreted"), inline=True)
def _gemm(
    a: Array,
    b: Array,
    bias: Array | None,
    residual: Array | None,
    rows: Array | None,  # int32 [1]
    *,
    out_dtype: np.dtype,
    config: GemmConfig,
    num_sms: int,
    interpreted: bool,
) -> Array:
    m, k = a.shape
    halves, n = b.ndim - 1, b.shape[-1]
    in_cluster = config.cluster_along == "k"
    m_tiles, n_tiles = _mosaic.cdiv(m, config.segment_m), _mosaic.cdiv(n, config.tile_n)
    tables = schedule if rows is None else schedules
    table = tables(m_tiles, n_tiles, _mosaic.cdiv(k, config.tile_k), num_sms // config.cluster, config)
    # Nobody is launched for nothing. Clusters beyond those that fit on the device at once would even start after the others.
    clusters = 1 + int(np.nonzero(table[..., 0, K_STEPS])[-1].max())
    table = table[..., :clusters, :, :]
    cut = bool(table[..., PARTIAL].any())
    # TMA clips what reaches past the end of the result; the interpreter cannot, so there the result is whole tiles.
    stored = (m_tiles * config.segment_m, n_tiles * config.tile_n) if interpreted else (m, n)
    inputs = [jnp.asarray(table), a, b, *(x for x in (rows, bias, residual) if x is not None)]

    def body(table_ref: Any, a_ref: Any, b_ref: Any, *refs: Any) -> None:
        *extra, out_ref, partials_ref = refs
        if rows is not None:
            # First of all, on the way while warpgroups part: none can do anything without it.
            used = jnp.clip(extra.pop(0)[0], 0, m)
            table_ref = table_ref.at[lax.div(used + (config.segment_m - 1), config.segment_m)]
        bias_ref = None if bias is None else extra.pop(0)
        residual_ref = None if residual is None else extra.pop(0)
        write = functools.partial(write_blocks, bias_ref, residual_ref, out_ref, config)
        if cut or in_cluster:
            share = write_in_cluster if in_cluster else write_or_share
            write = functools.partial(share, write, partials_ref, config, interpreted)
        walk = functools.partial(_walk, table_ref, config)
        staging = epilogue_staging(config, out_dtype, halves, n, bias is not None, residual is not None)
        # The interpreter has no multicast: there each CTA loads all of its tile.
        multicast = config.cluster > 1 and not in_cluster and not interpreted
        result_bytes = out_dtype.itemsize
        multiply(walk, a_ref, b_ref, halves, write, config, multicast=multicast, result_bytes=result_bytes, staging=staging)

    out, _ = _mosaic.launch(
        body,
        (
            jax.ShapeDtypeStruct(stored, out_dtype),
            partials_shape(clusters * config.cluster if cut or in_cluster else 1, halves, config),
        ),
        name="gemm",
        num_sms=clusters * config.cluster,
        warpgroups=config.consumers + 1,
        cluster=config.cluster,
        approx_math=True,
    )(*inputs)
    return out[:m, :n] if interpreted else out


def epilogue_staging(config: GemmConfig, out_dtype: Any, halves: int, n: int, bias: bool, residual: bool) -> dict[str, Any]:
    return {
        "blocks": _mosaic.swizzled_smem((config.consumers, _SLOTS, BLOCK, BLOCK), out_dtype, global_minor=n),
        "bias": plgpu.SMEM((config.consumers, halves, config.wg_n), jnp.bfloat16) if bias else None,
        "landed": plgpu.Barrier(num_barriers=config.consumers) if bias or residual else None,
        "exchanged": None
        if config.cluster_along == "m"
        else plgpu.ClusterBarrier(collective_axes=("cta",), num_barriers=config.consumers),
    }


def _walk(table: Any, config: GemmConfig, body: Callable[[Segment, Array], Array]) -> Array:
    cluster = lax.axis_index("sm")
    cta = lax.axis_index("cta") if config.cluster > 1 else 0

    def read(index: Array) -> list[Array]:
        return [table[cluster, index, field].astype(jnp.int32) for field in range(table.shape[-1])]

    def one(carry: tuple[Array, Array, list[Array]]) -> tuple[Array, Array, list[Array]]:
        index, step, (m, n, k_begin, k_steps, *extra) = carry
        upcoming = read(index + 1)  # issued a segment ahead, to hide the latency of global memory
        if config.cluster_along == "k":
            begin, end = (lax.div(k_steps * r, config.cluster) for r in (cta, cta + 1))
            segment = Segment(m * config.tile_m, n * config.tile_n, begin, end - begin, extra=(index,))
        else:
            row = (m * config.cluster + cta) * config.tile_m
            segment = Segment(row, n * config.tile_n, k_begin, k_steps, extra=(*extra, cta_index(config)))
        return index + 1, body(segment, step), upcoming

    start = (jnp.int32(0), jnp.int32(0), read(jnp.int32(0)))
    return lax.while_loop(lambda carry: carry[2][K_STEPS] > 0, one, start)[1]


def write_blocks(
    bias: Any,  # [N] or [2, N] or None
    residual: Any,  # [M, N] or None
    out: Any,  # [M, N]
    config: GemmConfig,
    segment: Segment,
    totals: list[Array],
    staging: dict[str, Any],
    collect: Callable[[int, int, int], list[Array]] | None = None,
) -> None:
    """Bias, SwiGLU and residual on this consumer's sums, then out, block by block.

    With `collect` block number b is one that CTA b % cluster of a cluster writes, with the sums that this function finds.
    """
    wg = lax.axis_index("wg")
    down, right = consumer_offset(config)
    top, left = segment.row + down, segment.column + right
    blocks_smem, bias_smem = staging["blocks"].at[wg], staging["bias"]
    landed: Any = None if staging["landed"] is None else staging["landed"].at[wg]
    writers = 1 if collect is None else config.cluster
    if bias is not None:
        columns = pl.ds(left, config.wg_n)
        for half in range(len(totals)):
            source = bias.at[columns] if len(totals) == 1 else bias.at[half, columns]
            plgpu.copy_gmem_to_smem(source, bias_smem.at[wg, half], landed)
            plgpu.barrier_wait(landed)
            plgpu.commit_smem()  # all warps must have seen this copy end before the next may

    def write(index: int, i: int, j: int) -> None:
        blocks = block(totals, i, j) if collect is None else collect(index, i, j)
        if bias is not None:
            blocks = [b + _bias_rows(bias_smem, wg, half, j) for half, b in enumerate(blocks)]
        value = activate(blocks)
        m, n = pl.ds(top + i * BLOCK, BLOCK), pl.ds(left + j * BLOCK, BLOCK)
        smem = blocks_smem.at[index // writers % _SLOTS]
        # A tile may have an odd number of blocks. Its first one then follows one in the same slot, and that was long ago.
        plgpu.wait_smem_to_gmem(0 if index < writers else _SLOTS - 1, wait_read_only=True)
        if residual is not None:
            plgpu.copy_gmem_to_smem(residual.at[m, n], smem, landed)
            plgpu.barrier_wait(landed)
            value += smem[...].astype(jnp.float32)
        smem[...] = value.astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out.at[m, n])

    for index, (i, j) in enumerate(np.ndindex(config.wg_m // BLOCK, config.wg_n // BLOCK)):
        if writers == 1:
            write(index, i, j)
        else:
            pl.when(lax.axis_index("cta") == index % writers)(functools.partial(write, index, i, j))


def _bias_rows(bias_smem: Any, wg: Array, half: int, j: int) -> Array:
    row = bias_smem[wg, half, j * BLOCK : (j + 1) * BLOCK].astype(jnp.float32)
    return lax.broadcast_in_dim(row, (BLOCK, BLOCK), (1,))

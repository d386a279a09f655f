"""Causal attention of ragged prompt chunks over paged KV, on exactly `num_sms` SMs (Pallas Mosaic GPU, Hopper).

A chunk's keys and values, and those of the prefix before it, are already in the cache. Queries of one KV head's group are
packed: row r of a tile is query r % G of token r // G, so every group size fills the 64 rows of wgmma with queries that share
K and V. Two warpgroups hold half a tile each and take turns on the tensor cores, one multiplying while the other is at its
softmax, as in FlashAttention-3 (Shah et al., 2024, section 3.1); a third copies K and V by TMA, page by page, and hands out the
tiles.

Tiles of all rows of the batch and all KV heads are numbered row by row and from a chunk's last tokens, which see the most, to
its first; CTAs take them in rounds that run forth and back, and find them from `q_lens` on the device.

Limits: bfloat16; head sizes 64 and 128; at most 16 query heads a KV head; page sizes 16, 32, 64 and 128.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _mosaic
from pallas_kernels._prefill_feed import hand_out_tiles
from pallas_kernels._prefill_plan import ORDER_SLOTS, WORKERS, Plan
from pallas_kernels._prefill_plan import TuningConfig as TuningConfig
from pallas_kernels._prefill_work import work_off_tiles

PAGE_SIZES = (16, 32, 64, 128)
HEAD_SIZES = (64, 128)
MAX_GROUP = 16


def prefill_attention(
    q: Float[Array, "T K G H"],
    k_pages: Float[Array, "P K page_size H"],
    v_pages: Float[Array, "P K page_size H"],
    block_tables: Int[Array, "S pages"],
    kv_lens: Int[Array, " S"],
    q_starts: Int[Array, " S"],
    q_lens: Int[Array, " S"],
    *,
    out: Float[Array, "T K G H"] | None = None,
    num_sms: int,
    config: TuningConfig | None = None,
) -> Float[Array, "T K G H"]:
    """Attention of `q_lens[s]` tokens from `q_starts[s]` on, the last tokens of a sequence of `kv_lens[s]`, for every row s.

    Query j of row s has position kv_lens[s] - q_lens[s] + j and sees the positions up to its own; scores are scaled by H^-1/2.
    Rows with q_len 0 cost nothing. Tokens that no row covers are left as `out` has them, which is updated in place where it is
    a temporary of the surrounding computation, or undefined without. Every result is the same bits on every run and for every
    `num_sms`.

    Raises:
      UnsupportedDeviceError: the device is no Hopper GPU.
      ValueError: shapes do not fit each other, or `num_sms` is not between 1 and the device's SMs.
      NotImplementedError: dtype, head size, group or page size outside the limits in the module's docstring.
    """
    T, K, G, H = q.shape
    _check(q, k_pages, v_pages, block_tables, (kv_lens, q_starts, q_lens), out)
    device = _mosaic.require_hopper("prefill_attention", num_sms)
    if T * K * q_lens.shape[0] == 0:
        return jnp.zeros_like(q) if out is None else out
    plan = Plan(
        tokens=T,
        rows=q_lens.shape[0],
        kv_heads=K,
        group=G,
        head_dim=H,
        page_size=k_pages.shape[2],
        num_sms=num_sms,
        interpreted=device.interpreted,
        config=config or TuningConfig(),
    )
    return _run(q, k_pages, v_pages, block_tables, kv_lens, q_starts, q_lens, out, plan=plan)


# Jitted so that every layer's call is the same traced kernel, which is lowered and compiled once; inlined because XLA cannot
# place a call within a call on a stream.
@functools.partial(jax.jit, static_argnames="plan", inline=True)
def _run(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    kv_lens: Array,
    q_starts: Array,
    q_lens: Array,
    out: Array | None,
    *,
    plan: Plan,
) -> Array:
    k_flat, v_flat = (pages.reshape(-1, *pages.shape[2:]) for pages in (k_pages, v_pages))
    whole = jnp.pad(q_lens, (0, -q_lens.shape[0] % _mosaic.WARPGROUP))
    rows = q.reshape(-1, plan.head_dim)
    inputs = rows, k_flat, v_flat, block_tables, kv_lens, q_starts, whole
    if out is None:
        result = _launch(plan, jax.ShapeDtypeStruct(rows.shape, rows.dtype))(*inputs)
    else:
        result = _mosaic.update(out.reshape(rows.shape), functools.partial(_launch(plan, ()), *inputs), plan.interpreted)
    return result.reshape(q.shape)


def _check(
    q: Array, k_pages: Array, v_pages: Array, block_tables: Array, per_row: tuple[Array, ...], out: Array | None
) -> None:
    _, K, G, H = q.shape
    if k_pages.shape != v_pages.shape or k_pages.shape[1] != K or k_pages.shape[3] != H:
        raise ValueError(f"{k_pages.shape=} and {v_pages.shape=} do not fit {q.shape=}")
    if any(x.shape != block_tables.shape[:1] for x in per_row):
        raise ValueError(f"{block_tables.shape=} does not fit the {[x.shape for x in per_row]} of kv_lens, q_starts and q_lens")
    if out is not None and (out.shape, out.dtype) != (q.shape, q.dtype):
        raise ValueError(f"{out.shape=}, {out.dtype=} are not those of {q.shape=}, {q.dtype=}")
    if not q.dtype == k_pages.dtype == v_pages.dtype == jnp.bfloat16:
        raise NotImplementedError(f"prefill_attention is for bfloat16, not {q.dtype=}, {k_pages.dtype=}, {v_pages.dtype=}")
    if H not in HEAD_SIZES or k_pages.shape[2] not in PAGE_SIZES or not 1 <= G <= MAX_GROUP:
        raise NotImplementedError(
            f"prefill_attention has head sizes {HEAD_SIZES}, page sizes {PAGE_SIZES} and groups up to {MAX_GROUP}, "
            f"not head size {H}, page size {k_pages.shape[2]}, group {G}"
        )


def _launch(plan: Plan, out_type: Any) -> Any:
    """The kernel, which takes a reference to the result as last argument where `out_type` is ()."""
    c, H = plan.config, plan.head_dim
    ring = (c.stages, c.kv_tile, H)
    scratch = {
        "queries": _mosaic.swizzled_smem((WORKERS, c.rows, H), jnp.bfloat16),
        "keys": _mosaic.swizzled_smem(ring, jnp.bfloat16),
        "values": _mosaic.swizzled_smem(ring, jnp.bfloat16),
        # Orders, and behind them the scratch of a scan, in one: every allocation takes up whole kilobytes.
        "orders": plgpu.SMEM((ORDER_SLOTS + _mosaic.cdiv(plan.rows, _mosaic.WARPGROUP), 8), jnp.int32),
        "ordered": plgpu.Barrier(num_barriers=ORDER_SLOTS),
        "order_done": plgpu.Barrier(num_barriers=ORDER_SLOTS, num_arrivals=WORKERS),
        "keys_filled": plgpu.Barrier(num_barriers=c.stages, num_arrivals=plan.copies),
        "keys_freed": plgpu.Barrier(num_barriers=c.stages, num_arrivals=WORKERS),
        "values_filled": plgpu.Barrier(num_barriers=c.stages, num_arrivals=plan.copies),
        "values_freed": plgpu.Barrier(num_barriers=c.stages, num_arrivals=WORKERS),
        "turns": plgpu.Barrier(num_barriers=WORKERS),
    }

    def body(*refs: Any) -> None:
        pl.run_scoped(functools.partial(_prefill_kernel, *refs, plan=plan), collective_axes="wg", **scratch)

    return pl.kernel(
        body,
        out_type=out_type,
        mesh=plgpu.Mesh(
            grid=(plan.num_sms,),
            grid_names=("sm",),
            num_threads=WORKERS + 1,
            thread_name="wg",
            kernel_name="prefill_attention",
        ),
        name="prefill_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,  # the kernel orders shared memory by its own barriers
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            reduction_scratch_bytes=512,  # for single integers; the default would leave no room for a third stage
        ),
    )


def _prefill_kernel(
    q_gmem: Any,  # [T * K * G, H]
    k_gmem: Any,  # [P * K, page_size, H]
    v_gmem: Any,
    tables_gmem: Any,  # [S, pages]
    kv_lens_gmem: Any,  # [S]
    q_starts_gmem: Any,  # [S]
    q_lens_gmem: Any,  # [S rounded up to 128]
    out_gmem: Any,  # [T * K * G, H]
    *,
    plan: Plan,
    **scratch: Any,
) -> None:
    wg = lax.axis_index("wg")

    @pl.when(wg == WORKERS)
    def _feed() -> None:
        if not plan.interpreted:
            plgpu.set_max_registers(72, action="decrease")
        hand_out_tiles(k_gmem, v_gmem, tables_gmem, kv_lens_gmem, q_starts_gmem, q_lens_gmem, plan=plan, **scratch)

    @pl.when(wg < WORKERS)
    def _work() -> None:
        if not plan.interpreted:
            plgpu.set_max_registers(216, action="increase")
        work_off_tiles(wg, q_gmem, out_gmem, plan=plan, **scratch)

"""Attention of one query token per row over paged KV, on exactly `num_sms` SMs (Pallas Mosaic GPU, Hopper).

*Shape of the arithmetic.* A KV head has at most eight queries, far fewer than the 64 rows that a wgmma needs. So the tokens of
the cache are the rows and the queries the columns: S^T = K Q^T is [64 tokens, 8] and O^T = V^T P^T is [H, 8]. Every byte of K
and V is read once from device memory and once from shared memory, and the softmax keeps four scores a thread in place of 32.

*Work.* The cache of a (row, KV head) pair, an item, is cut into tiles of 64 tokens. All items laid end to end make a line of
tiles, and every compute warpgroup on the chip, a worker, gets an equal stretch of that line: balance is by tokens, whatever the
lengths, and one long sequence is spread over all SMs. A worker finds its place from `kv_lens` on the device. Where a border
cuts an item, the workers leave partial results (maximum, sum, unscaled output) and a second, short kernel adds them up in the
order of the workers, so the result does not depend on timing.

*Feed.* The fourth warpgroup does no arithmetic: each of its warps keeps the ring of one worker full with TMA copies, K and V
tiles in turn, a tile being one page, several, or part of one. The rings hold about 200 KB, because HBM answers so late
that each SM must have that much under way to draw its share from few SMs.

Limits: bfloat16; head sizes 64 and 128; at most 8 query heads a KV head; page sizes 16, 32, 64 and 128.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _fragments as fragments
from pallas_kernels import _mosaic
from pallas_kernels._decode_feed import feed_rings
from pallas_kernels._decode_plan import QUERY_SLOTS, TILE, Plan
from pallas_kernels._decode_plan import TuningConfig as TuningConfig
from pallas_kernels._decode_work import combine_parts, work_off_orders

PAGE_SIZES = (16, 32, 64, 128)
HEAD_SIZES = (64, 128)

_COLUMNS = fragments.COLUMNS


def decode_attention(
    q: Float[Array, "B K G H"],
    k_pages: Float[Array, "P K page_size H"],
    v_pages: Float[Array, "P K page_size H"],
    block_tables: Int[Array, "B pages"],
    kv_lens: Int[Array, " B"],
    *,
    num_sms: int,
    config: TuningConfig | None = None,
) -> Float[Array, "B K G H"]:
    """Attention of one query token per row over the first `kv_lens[row]` tokens of its pages; scores are scaled by H^-1/2.

    Rows with kv_len 0 return zeros and cost nothing, wherever they are. Results are the same bits on every run, and differ
    between values of `num_sms` only by rounding. Groups of 3, 5, 6 or 7 queries cost a copy of q.

    Raises:
      UnsupportedDeviceError: the device is no Hopper GPU.
      ValueError: shapes do not fit each other, or `num_sms` is not between 1 and the device's SMs.
      NotImplementedError: dtype, head size, group or page size outside the limits in the module's docstring.
    """
    B, K, G, H = q.shape
    _check(q, k_pages, v_pages, block_tables, kv_lens)
    device = _mosaic.require_hopper("decode_attention", num_sms)
    plan = Plan(
        rows=B,
        kv_heads=K,
        group=G,
        columns_per_head=1 << (G - 1).bit_length(),
        head_dim=H,
        page_size=k_pages.shape[2],
        num_sms=num_sms,
        interpreted=device.interpreted,
        config=config or TuningConfig(slots=4 * 128 // H),
    )
    if B * K == 0:
        return jnp.zeros_like(q)
    return _run(q, k_pages, v_pages, block_tables, kv_lens, plan=plan)


# Jitted so that every layer's call is the same traced kernel, which is lowered and compiled once; inlined because XLA cannot
# place a call within a call on a stream.
@functools.partial(jax.jit, static_argnames="plan", inline=True)
def _run(q: Array, k_pages: Array, v_pages: Array, block_tables: Array, kv_lens: Array, *, plan: Plan) -> Array:
    out, splits, maxima, sums, parts = _attend(plan)(
        _query_tiles(q, plan), _by_page_and_head(k_pages), _by_page_and_head(v_pages), block_tables, _padded(kv_lens)
    )
    return _update(out, functools.partial(_combine(plan), kv_lens, splits, maxima, sums, parts), plan).reshape(q.shape)


def _update(x: Array, f: Callable[[Any], Any], plan: Plan) -> Array:
    """`x` after f(reference to it), in place."""
    if plan.interpreted:  # up to jax 0.10 the interpreter wants to be told the memory space, which run_state cannot do
        reference = jax.new_ref(x, memory_space=plgpu.GMEM)
        f(reference)
        return jax.freeze(reference)
    # Leaves no reference behind that would keep the call from being placed on a stream.
    return pl.run_state(f)(x)


def _check(q: Array, k_pages: Array, v_pages: Array, block_tables: Array, kv_lens: Array) -> None:
    B, K, G, H = q.shape
    if k_pages.shape != v_pages.shape or k_pages.shape[1] != K or k_pages.shape[3] != H:
        raise ValueError(f"{k_pages.shape=} and {v_pages.shape=} do not fit {q.shape=}")
    if block_tables.shape[0] != B or kv_lens.shape != (B,):
        raise ValueError(f"{block_tables.shape=} and {kv_lens.shape=} do not fit {q.shape=}")
    if not q.dtype == k_pages.dtype == v_pages.dtype == jnp.bfloat16:
        raise NotImplementedError(f"decode_attention is for bfloat16, not {q.dtype=}, {k_pages.dtype=}, {v_pages.dtype=}")
    if H not in HEAD_SIZES or k_pages.shape[2] not in PAGE_SIZES or not 1 <= G <= _COLUMNS:
        raise NotImplementedError(
            f"decode_attention has head sizes {HEAD_SIZES}, page sizes {PAGE_SIZES} and groups up to {_COLUMNS}, "
            f"not head size {H}, page size {k_pages.shape[2]}, group {G}"
        )


def _query_tiles(q: Array, plan: Plan) -> Array:
    """[tiles, 8, H]: all queries in order, eight to a tile, so that a TMA copy brings them as a wgmma operand.

    A tile holds the queries of one head or of several whole heads. The columns of other heads are computed along and dropped.
    """
    q = jnp.pad(q, ((0, 0), (0, 0), (0, plan.columns_per_head - plan.group), (0, 0))).reshape(-1, plan.head_dim)
    return jnp.pad(q, ((0, -q.shape[0] % _COLUMNS), (0, 0))).reshape(-1, _COLUMNS, plan.head_dim)


def _by_page_and_head(pages: Array) -> Array:
    """[P * K, page_size, H], without a copy; a TMA descriptor has five axes, and the swizzled tiles need two of them."""
    return pages.reshape(-1, *pages.shape[2:])


def _padded(kv_lens: Array) -> Array:
    """Whole warpgroups of lengths, which the kernel keeps in registers."""
    return jnp.pad(kv_lens, (0, -kv_lens.shape[0] % _mosaic.WARPGROUP))


def _mesh(plan: Plan, warpgroups: int, name: str) -> dict[str, Any]:
    return {
        "mesh": plgpu.Mesh(
            grid=(plan.num_sms,), grid_names=("sm",), num_threads=warpgroups, thread_name="wg", kernel_name=name
        ),
        "compiler_params": plgpu.CompilerParams(
            approx_math=True,
            # The kernels order shared memory by their own barriers; see reduce_columns.
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        "name": name,
    }


def _attend(plan: Plan) -> Any:
    workers, items = plan.num_workers, plan.rows * plan.kv_heads
    c = plan.config
    block = (c.workers, c.slots, TILE, plan.head_dim)
    scratch = {
        "queries": _mosaic.swizzled_smem((c.workers, QUERY_SLOTS, _COLUMNS, plan.head_dim), jnp.bfloat16),
        "ring": _mosaic.swizzled_smem(block, jnp.bfloat16),
        "weights": _mosaic.swizzled_smem((c.workers, c.tiles_per_step, _COLUMNS, TILE), jnp.bfloat16),
        "column_scratch": plgpu.SMEM((c.workers, 2, *fragments.COLUMN_SCRATCH), jnp.float32),
        "scan_scratch": plgpu.SMEM((_mosaic.cdiv(plan.rows, _mosaic.WARPGROUP), fragments.WARPS), jnp.int32),
        "orders": plgpu.SMEM((c.workers, QUERY_SLOTS, 4), jnp.int32),
        # An order and its queries, which come by TMA.
        "ordered": plgpu.Barrier(num_barriers=c.workers * QUERY_SLOTS, num_arrivals=2),
        "order_done": plgpu.Barrier(num_barriers=c.workers * QUERY_SLOTS),
        "filled": plgpu.Barrier(num_barriers=c.workers * c.slots, num_arrivals=plan.pages_per_tile),
        "freed": plgpu.Barrier(num_barriers=c.workers * c.slots),
    }

    def body(*refs: Any) -> None:
        pl.run_scoped(functools.partial(_attend_kernel, *refs, plan=plan), collective_axes="wg", **scratch)

    return pl.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((items * plan.group, plan.head_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((workers, 2), jnp.int32),
            jax.ShapeDtypeStruct((2 * workers, _COLUMNS), jnp.float32),
            jax.ShapeDtypeStruct((2 * workers, _COLUMNS), jnp.float32),
            jax.ShapeDtypeStruct((2 * workers, plan.head_dim, _COLUMNS), jnp.float32),
        ),
        **_mesh(plan, c.workers + 1, "decode_attention"),
    )


def _combine(plan: Plan) -> Any:
    return pl.kernel(
        functools.partial(combine_parts, plan=plan),
        out_type=(),
        **_mesh(plan, plan.config.workers, "decode_attention_combine"),
    )


def _attend_kernel(
    queries_gmem: Any,  # [query tiles, 8, H]
    k_gmem: Any,  # [P * K, page_size, H]
    v_gmem: Any,
    tables_gmem: Any,  # [B, pages]
    lens_gmem: Any,  # [B rounded up to 128]
    out_gmem: Any,  # [B * K * G, H]
    splits_gmem: Any,  # [workers, 2]: the item whose parts this worker's comes first of, or -1; the worker with the last part
    maxima_gmem: Any,  # [2 * workers, 8]: of the part at a worker's start and of the part at its end
    sums_gmem: Any,
    parts_gmem: Any,  # [2 * workers, H, 8]
    *,
    plan: Plan,
    **scratch: Any,
) -> None:
    wg = lax.axis_index("wg")

    @pl.when(wg == plan.config.workers)
    def _feed() -> None:
        feed_rings(queries_gmem, k_gmem, v_gmem, tables_gmem, lens_gmem, splits_gmem, plan=plan, **scratch)

    @pl.when(wg < plan.config.workers)
    def _work() -> None:
        work_off_orders(wg, out_gmem, maxima_gmem, sums_gmem, parts_gmem, plan=plan, **scratch)

    # Late, so that the next kernel's CTAs do not sit on SMs that others could use.
    @pl.when(wg == 0)
    def _() -> None:
        if not plan.interpreted:
            plgpu.griddepcontrol_launch_dependents()

"""The pieces from which a launch of decode attention is put together: operands, results, scratch, and what one CTA does."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import _fragments as fragments
from pallas_kernels import _mosaic
from pallas_kernels._decode_feed import feed_rings
from pallas_kernels._decode_plan import QUERY_SLOTS, TILE, Plan
from pallas_kernels._decode_work import combine_parts, work_off_orders

_COLUMNS = fragments.COLUMNS

COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True,
    # The kernels order shared memory by their own barriers; see reduce_columns.
    unsafe_no_auto_barriers=True,
    lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
)


def operands(
    q: Array, k_pages: Array, v_pages: Array, block_tables: Array, kv_lens: Array, plan: Plan
) -> tuple[Array, Array, Array, Array, Array]:
    """What `attend` reads."""
    k_flat, v_flat = _by_page_and_head(k_pages), _by_page_and_head(v_pages)
    return _query_tiles(q, plan), k_flat, v_flat, block_tables, _padded(kv_lens)


def _query_tiles(q: Array, plan: Plan) -> Array:
    """[tiles, 8, H]: all queries in order, eight to a tile, so that a TMA copy brings them as a wgmma operand.

    A tile holds the queries of one head or of several whole heads. The columns of other heads are computed along and dropped.
    """
    q = _pad(q[: plan.rows], 2, plan.columns_per_head - plan.group).reshape(-1, plan.head_dim)
    return _pad(q, 0, -q.shape[0] % _COLUMNS).reshape(-1, _COLUMNS, plan.head_dim)


def _by_page_and_head(pages: Array) -> Array:
    """[P * K, page_size, H], without a copy; a TMA descriptor has five axes, and the swizzled tiles need two of them."""
    return pages.reshape(-1, *pages.shape[2:])


def _padded(kv_lens: Array) -> Array:
    """Whole warpgroups of lengths, which the kernel keeps in registers."""
    return _pad(kv_lens, 0, -kv_lens.shape[0] % _mosaic.WARPGROUP)


def _pad(x: Array, axis: int, count: int) -> Array:
    """`count` zeros behind an axis. Not jnp.pad, a jitted function: XLA cannot place a call within a call on a stream."""
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, count if i == axis else 0, 0) for i in range(x.ndim)])


def results(plan: Plan) -> tuple[jax.ShapeDtypeStruct, ...]:
    """What `attend` writes: the output but for items that were cut and tokens of no row, and the parts of those items."""
    workers = plan.num_workers
    return (
        jax.ShapeDtypeStruct((plan.tokens * plan.kv_heads * plan.group, plan.head_dim), jnp.bfloat16),
        jax.ShapeDtypeStruct((workers, 2), jnp.int32),
        jax.ShapeDtypeStruct((2 * workers, _COLUMNS), jnp.float32),
        jax.ShapeDtypeStruct((2 * workers, _COLUMNS), jnp.float32),
        jax.ShapeDtypeStruct((2 * workers, plan.head_dim, _COLUMNS), jnp.float32),
    )


def barriers(plan: Plan) -> dict[str, Any]:
    """What `attend` needs of barriers, for a run_scoped around all that a CTA does.

    Barriers of a scope that has ended are used again by later ones, but every thread counts only the phases it waited for.
    """
    c = plan.config
    return {
        # An order and its queries, which come by TMA.
        "ordered": plgpu.Barrier(num_barriers=c.workers * QUERY_SLOTS, num_arrivals=2),
        "order_done": plgpu.Barrier(num_barriers=c.workers * QUERY_SLOTS),
        "filled": plgpu.Barrier(num_barriers=c.workers * c.slots, num_arrivals=plan.pages_per_tile),
        "freed": plgpu.Barrier(num_barriers=c.workers * c.slots),
    }


def attend(*refs: Any, plan: Plan, first_sm: int = 0, **barriers: Any) -> None:
    """The work of one of the `plan.num_sms` CTAs from `first_sm` on, all of its warpgroups; the CTAs before do nothing.

    `refs` are `operands`, then `results`.
    """
    c = plan.config
    block = (c.workers, c.slots, TILE, plan.head_dim)
    scratch = {
        "queries": _mosaic.swizzled_smem((c.workers, QUERY_SLOTS, _COLUMNS, plan.head_dim), jnp.bfloat16),
        "ring": _mosaic.swizzled_smem(block, jnp.bfloat16),
        "weights": _mosaic.swizzled_smem((c.workers, c.tiles_per_step, _COLUMNS, TILE), jnp.bfloat16),
        "column_scratch": plgpu.SMEM((c.workers, 2, *fragments.COLUMN_SCRATCH), jnp.float32),
        "scan_scratch": plgpu.SMEM((_mosaic.cdiv(plan.rows, _mosaic.WARPGROUP), fragments.WARPS), jnp.int32),
        "orders": plgpu.SMEM((c.workers, QUERY_SLOTS, 4), jnp.int32),
    }
    body = functools.partial(_attend, *refs, plan=plan, first_sm=first_sm, **barriers)
    pl.run_scoped(body, collective_axes="wg", **scratch)


def _attend(
    queries_gmem: Any,  # [query tiles, 8, H]
    k_gmem: Any,  # [P * K, page_size, H]
    v_gmem: Any,
    tables_gmem: Any,  # [B, pages]
    lens_gmem: Any,  # [B rounded up to 128]
    out_gmem: Any,  # [T * K * G, H]
    splits_gmem: Any,  # [workers, 2]: the item whose parts this worker's comes first of, or -1; the worker with the last part
    maxima_gmem: Any,  # [2 * workers, 8]: of the part at a worker's start and of the part at its end
    sums_gmem: Any,
    parts_gmem: Any,  # [2 * workers, H, 8]
    *,
    plan: Plan,
    first_sm: int,
    **scratch: Any,
) -> None:
    wg, sm = lax.axis_index("wg"), lax.axis_index("sm") - first_sm

    @pl.when((wg == plan.config.workers) & (sm >= 0))
    def _feed() -> None:
        feed_rings(sm, queries_gmem, k_gmem, v_gmem, tables_gmem, lens_gmem, splits_gmem, plan=plan, **scratch)

    @pl.when((wg < plan.config.workers) & (sm >= 0))
    def _work() -> None:
        work_off_orders(wg, out_gmem, maxima_gmem, sums_gmem, parts_gmem, plan=plan, **scratch)


def combine(kv_lens: Array, out: Array, *parts: Array, plan: Plan) -> Array:
    """`out` once the parts of cut items are added up and rows without tokens are zero; `out`, `parts` are the `results`."""
    kernel = pl.kernel(
        functools.partial(combine_parts, plan=plan),
        out_type=(),
        mesh=plgpu.Mesh(
            grid=(plan.num_sms,),
            grid_names=("sm",),
            num_threads=plan.config.workers,
            thread_name="wg",
            kernel_name="decode_attention_combine",
        ),
        compiler_params=COMPILER_PARAMS,
        name="decode_attention_combine",
    )
    return _mosaic.update(out, functools.partial(kernel, kv_lens, *parts), plan.interpreted)


def launch_combine_early(plan: Plan) -> None:
    """Lets `combine` be launched; late in a CTA, so that the next kernel's CTAs do not sit on SMs that others could use."""

    @pl.when(lax.axis_index("wg") == 0)
    def _() -> None:
        if not plan.interpreted:
            plgpu.griddepcontrol_launch_dependents()

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
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _decode_launch as launch
from pallas_kernels import _mosaic
from pallas_kernels._decode_plan import Plan
from pallas_kernels._decode_plan import TuningConfig as TuningConfig
from pallas_kernels._fragments import COLUMNS

PAGE_SIZES = (16, 32, 64, 128)
HEAD_SIZES = (64, 128)


def decode_attention(
    q: Float[Array, "T K G H"],
    k_pages: Float[Array, "P K page_size H"],
    v_pages: Float[Array, "P K page_size H"],
    block_tables: Int[Array, "B pages"],
    kv_lens: Int[Array, " B"],
    *,
    num_sms: int,
    config: TuningConfig | None = None,
) -> Float[Array, "T K G H"]:
    """Attention of one query token per row over the first `kv_lens[row]` tokens of its pages; scores are scaled by H^-1/2.

    Token i is row i's; tokens behind the B rows are left undefined. Rows with kv_len 0 return zeros and cost nothing, wherever
    they are. Results are the same bits on every run, and differ between values of `num_sms` only by rounding. Groups of 3, 5, 6
    or 7 queries cost a copy of q.

    Raises:
      UnsupportedDeviceError: the device is no Hopper GPU.
      ValueError: shapes do not fit each other, or `num_sms` is not between 1 and the device's SMs.
      NotImplementedError: dtype, head size, group or page size outside the limits in the module's docstring.
    """
    plan = make_plan("decode_attention", q, k_pages, v_pages, block_tables, kv_lens, num_sms=num_sms, config=config)
    if q.size * plan.rows == 0:
        return jnp.zeros_like(q)
    return _run(q, k_pages, v_pages, block_tables, kv_lens, plan=plan)


# Jitted so that every layer's call is the same traced kernel, which is lowered and compiled once; inlined because XLA cannot
# place a call within a call on a stream.
@functools.partial(jax.jit, static_argnames="plan", inline=True)
def _run(q: Array, k_pages: Array, v_pages: Array, block_tables: Array, kv_lens: Array, *, plan: Plan) -> Array:
    def body(*refs: Array) -> None:
        attend = functools.partial(launch.attend, *refs, plan=plan)
        pl.run_scoped(attend, collective_axes="wg", **launch.barriers(plan))
        launch.launch_combine_early(plan)

    kernel: Any = pl.kernel(
        body,
        out_type=launch.results(plan),
        mesh=plgpu.Mesh(
            grid=(plan.num_sms,),
            grid_names=("sm",),
            num_threads=plan.config.workers + 1,
            thread_name="wg",
            kernel_name="decode_attention",
        ),
        compiler_params=launch.COMPILER_PARAMS,
        name="decode_attention",
    )
    results = kernel(*launch.operands(q, k_pages, v_pages, block_tables, kv_lens, plan))
    return launch.combine(kv_lens, *results, plan=plan).reshape(q.shape)


def make_plan(
    kernel: str,
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    kv_lens: Array,
    *,
    num_sms: int,
    config: TuningConfig | None = None,
) -> Plan:
    """What is static about attention to these arrays on `num_sms` SMs in `kernel`; raises as `decode_attention`."""
    _check(q, k_pages, v_pages, block_tables, kv_lens)
    device = _mosaic.require_hopper(kernel, num_sms)
    T, K, G, H = q.shape
    return Plan(
        tokens=T,
        rows=kv_lens.shape[0],
        kv_heads=K,
        group=G,
        columns_per_head=1 << (G - 1).bit_length(),
        head_dim=H,
        page_size=k_pages.shape[2],
        num_sms=num_sms,
        interpreted=device.interpreted,
        config=config or TuningConfig(slots=4 * 128 // H),
    )


def _check(q: Array, k_pages: Array, v_pages: Array, block_tables: Array, kv_lens: Array) -> None:
    T, K, G, H = q.shape
    if k_pages.shape != v_pages.shape or k_pages.shape[1] != K or k_pages.shape[3] != H:
        raise ValueError(f"{k_pages.shape=} and {v_pages.shape=} do not fit {q.shape=}")
    if kv_lens.shape != block_tables.shape[:1] or kv_lens.shape[0] > T:
        raise ValueError(f"{block_tables.shape=} and {kv_lens.shape=} do not fit {q.shape=}")
    if not q.dtype == k_pages.dtype == v_pages.dtype == jnp.bfloat16:
        raise NotImplementedError(f"decode_attention is for bfloat16, not {q.dtype=}, {k_pages.dtype=}, {v_pages.dtype=}")
    if H not in HEAD_SIZES or k_pages.shape[2] not in PAGE_SIZES or not 1 <= G <= COLUMNS:
        raise NotImplementedError(
            f"decode_attention has head sizes {HEAD_SIZES}, page sizes {PAGE_SIZES} and groups up to {COLUMNS}, "
            f"not head size {H}, page size {k_pages.shape[2]}, group {G}"
        )

"""A GEMM and decode attention in one kernel: compute-bound and memory-bound work on different SMs at the same time.

Of the kernel's CTAs, one an SM, `gemm_sms` multiply from the first moment and `attention_sms` attend first. The product is a
line of tiles, the last ones cut along k, that all CTAs claim from one counter in order; so a CTA that is done with its share
of attention goes on with whatever the GEMM has left, and all SMs end at nearly the same time, however long the sequences are.
Beside two kernels on two streams this saves a launch, needs no stream, and wastes no SM once the shorter of the two is done.

Attention is that of `decode_attention` on `attention_sms` SMs, bit for bit. The GEMM's tiles are those of `gemm`, and so are
the bits of a result whose tiles are all computed whole; who computes a tile changes nothing.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _decode_launch as attention
from pallas_kernels import _fused_schedule as schedule
from pallas_kernels import _mosaic, _tuning
from pallas_kernels._decode_plan import Plan
from pallas_kernels._decode_plan import TuningConfig as AttentionConfig
from pallas_kernels._fused_gemm import Claims, multiply_claimed, warpgroups
from pallas_kernels._gemm_config import GemmConfig
from pallas_kernels._gemm_partials import partials_shape, write_or_share
from pallas_kernels._gemm_pipeline import BLOCK
from pallas_kernels.decode_attention import make_plan
from pallas_kernels.gemm import check_operands, epilogue_staging, gemm, write_blocks

_NAME = "gemm_with_decode_attention"


def gemm_with_decode_attention(
    a: Float[Array, "M K_a"],
    b: Float[Array, "K_a *N"],
    q: Float[Array, "B K G H"],
    k_pages: Float[Array, "P K page_size H"],
    v_pages: Float[Array, "P K page_size H"],
    block_tables: Int[Array, "B pages"],
    kv_lens: Int[Array, " B"],
    *,
    gemm_sms: int,
    attention_sms: int,
    bias: Float[Array, "*N"] | None = None,
    residual: Float[Array, "M N_out"] | None = None,
    swiglu: bool = False,
    gemm_config: GemmConfig | None = None,
    attention_config: AttentionConfig | None = None,
) -> tuple[Float[Array, "M N_out"], Float[Array, "B K G H"]]:
    """(`gemm(a, b, ...)`, `decode_attention(q, ...)`), computed side by side on `gemm_sms + attention_sms` SMs.

    Arguments are those of the two functions. The configurations replace the tuned or default ones; clusters are not used.
    Results are the same bits on every run.

    Raises:
      UnsupportedDeviceError: the device is no Hopper GPU.
      ValueError: what either function refuses, `gemm_sms` or `attention_sms` below 1, or more SMs together than the device has.
      NotImplementedError: dtype, head size, group or page size that `decode_attention` does not have.
    """
    if min(gemm_sms, attention_sms) < 1:
        raise ValueError(f"{_NAME}: {gemm_sms=} and {attention_sms=} must both be positive")
    device = _mosaic.require_hopper(_NAME, gemm_sms + attention_sms)
    out_shape = check_operands(a, b, bias, residual, swiglu)
    if attention_config is None:
        attention_config = AttentionConfig(workers=2, slots=6 * 128 // q.shape[-1])
    plan = make_plan(_NAME, q, k_pages, v_pages, block_tables, kv_lens, num_sms=attention_sms, config=attention_config)
    if q.size == 0:
        c = gemm(a, b, bias=bias, residual=residual, swiglu=swiglu, num_sms=gemm_sms + attention_sms, config=gemm_config)
        return c, jnp.zeros_like(q)
    m, k = a.shape
    n = math.prod(out_shape[1:])
    b = b if swiglu else b.reshape(k, n)
    if gemm_config is None:
        # Whether whole waves would do depends on how many SMs there are, which here nobody knows before. So tiles may be cut,
        # and are not chosen as beside another kernel, where whole ones are preferred.
        tuned = _tuning.gemm_config(device.kind, m, n, k, swiglu=swiglu, num_sms=gemm_sms)
        gemm_config = dataclasses.replace(tuned, stream_k=True)
    c, attended = _run(
        a,
        b,
        None if bias is None else bias.reshape(b.shape[1:]),
        None if residual is None else residual.reshape(m, n),
        q,
        k_pages,
        v_pages,
        block_tables,
        kv_lens,
        config=dataclasses.replace(gemm_config, cluster=1, cluster_along="m"),
        plan=plan,
        gemm_sms=gemm_sms,
    )
    return c.reshape(out_shape), attended


# Jitted so that every layer's call is the same traced kernel, which is lowered and compiled once; inlined because XLA cannot
# place a call within a call on a stream.
@functools.partial(jax.jit, static_argnames=("config", "plan", "gemm_sms"), inline=True)
def _run(
    a: Array,
    b: Array,
    bias: Array | None,
    residual: Array | None,
    q: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    kv_lens: Array,
    *,
    config: GemmConfig,
    plan: Plan,
    gemm_sms: int,
) -> tuple[Array, Array]:
    (m, k), halves, n = a.shape, b.ndim - 1, b.shape[-1]
    num_ctas = gemm_sms + plan.num_sms
    m_tiles, n_tiles = _mosaic.cdiv(m, config.tile_m), _mosaic.cdiv(n, config.tile_n)
    table = schedule.segments(m_tiles, n_tiles, _mosaic.cdiv(k, config.tile_k), num_ctas, config)
    places = int(table[:, schedule.PARTIAL].sum())
    num_warpgroups = max(warpgroups(config), plan.config.workers + 1)
    # TMA clips what reaches past the end of the result; the interpreter cannot, so there the result is whole tiles.
    stored = (m_tiles * config.tile_m, n_tiles * config.tile_n) if plan.interpreted else (m, n)
    product = [jnp.asarray(table), a, b, *(x for x in (bias, residual) if x is not None)]
    attended = attention.operands(q, k_pages, v_pages, block_tables, kv_lens, plan)

    def body(*refs: Any) -> None:
        # Around both roles: see `barriers`.
        pl.run_scoped(functools.partial(roles, *refs), collective_axes="wg", **attention.barriers(plan))
        attention.launch_combine_early(plan)

    def roles(*refs: Any, **barriers: Any) -> None:
        table_ref, a_ref, b_ref, *extra = refs[: len(product)]
        attention_in = refs[len(product) : -(2 + _RESULTS)]
        out_ref, partials_ref, *attention_out = refs[-(2 + _RESULTS) :]
        bias_ref = None if bias is None else extra.pop(0)
        residual_ref = None if residual is None else extra.pop(0)

        attention.attend(*attention_in, *attention_out, plan=plan, first_sm=gemm_sms, **barriers)
        plgpu.commit_smem()  # TMA copies will overwrite what ordinary stores wrote

        write = functools.partial(write_blocks, bias_ref, residual_ref, out_ref, config)
        if places:
            write = functools.partial(write_or_share, write, partials_ref, config, plan.interpreted, columns_at_once=BLOCK)
        counter = None if plan.interpreted else pl.get_global(plgpu.SemaphoreType.REGULAR((1,)))
        multiply_claimed(
            Claims(table_ref, counter, num_ctas),
            a_ref,
            b_ref,
            halves,
            write,
            config,
            staging=epilogue_staging(config, a.dtype, halves, n, bias is not None, residual is not None),
            num_warpgroups=num_warpgroups,
        )

    kernel: Any = pl.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(stored, a.dtype),
            partials_shape(max(1, places), halves, config),
            *attention.results(plan),
        ),
        mesh=plgpu.Mesh(grid=(num_ctas,), grid_names=("sm",), num_threads=num_warpgroups, thread_name="wg", kernel_name=_NAME),
        compiler_params=attention.COMPILER_PARAMS,
        name=_NAME,
    )
    out, _, *results = kernel(*product, *attended)
    c = out[:m, :n] if plan.interpreted else out
    return c, attention.combine(kv_lens, *results, plan=plan).reshape(q.shape)


_RESULTS = 5
"""Arrays in `attention.results`."""

"""gate_up of Llama-3-8B beside decode attention: in one kernel, in two kernels on two streams, and one after the other.

2048 rows times 4096 x (2 x 14336), beside 512 sequences of 1024 tokens, on one whole device that the two share in several ways.
Every variant is one compiled program without CUDA graphs, which would put the streams one behind the other. The baseline of all
is the faster of the two ways to do one after the other: with this package's GEMM, and with cuBLAS.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._decode_plan import TuningConfig
from pallas_kernels.bench import timing
from pallas_kernels.bench.attention import DECODE, Decode, normal, paged
from pallas_kernels.bench.gemm import PROJECTIONS, Projection
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.fused_gemm_attention import gemm_with_decode_attention
from pallas_kernels.gemm import gemm
from pallas_kernels.streams import COMPUTE_STREAM, MEMORY_STREAM, on_stream

ROWS = 2048
ATTENTION_SHARES = (24, 28, 32, 48)
"""SMs for attention, of all the device has; the rest multiply."""

# On one split only: what the compute warpgroups of attention could be besides.
_CONFIGS = {"3 workers": TuningConfig(), "3 tiles a step": TuningConfig(workers=2, tiles_per_step=3, slots=6)}
_OPTIONS = {"xla_gpu_enable_command_buffer": "", "xla_gpu_enable_triton_gemm": False}

Pair = Callable[..., tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Variant:
    case: str
    num_sms: int
    pair: Pair


def benchmark(kernel: str, num_sms: Sequence[int], *, sustained: bool = False) -> Iterator[timing.Row]:
    """Rows for the first of `num_sms`, the SMs that all variants share."""
    projection, decode, total = PROJECTIONS[0], DECODE[0], num_sms[0]
    input_sets = [_inputs(projection, decode)]
    variants = [*_sequential(total), *_side_by_side(total)]
    lowered = {v.case: functools.partial(timing.lower_chain, v.pair, input_sets) for v in variants}
    compiled = timing.compile_side_by_side(lowered, _OPTIONS)
    chains = {case: timing.Chain(program, 8) for case, program in compiled.items()}
    seconds = timing.take_turns(chains, input_sets)
    fastest = min(_sequential(total), key=lambda v: seconds[v.case])
    for v in variants:
        yield timing.Row(
            kernel=kernel,
            case=v.case,
            num_sms=v.num_sms,
            seconds=seconds[v.case],
            flops=projection.flops(ROWS),
            hbm_bytes=4.0 * decode.kv_heads * decode.head_dim * float(decode.kv_lens().sum()),
            baseline=fastest.case,
            baseline_seconds=seconds[fastest.case],
            sustained=timing.sustained_chain(chains[v.case], input_sets) if sustained else None,
        )


def _inputs(projection: Projection, decode: Decode) -> timing.Inputs:
    kv_lens = decode.kv_lens()
    q = normal(0, (decode.rows, decode.kv_heads, decode.group, decode.head_dim))
    attention = (q, *paged(kv_lens, decode.kv_heads, decode.page_size, decode.head_dim), jnp.asarray(kv_lens))
    return normal(6, (ROWS, projection.k)), normal(7, projection.weight_shape), *attention


def _sequential(total: int) -> list[Variant]:
    def one_after_the_other(multiply: Callable[..., jax.Array], a: Any, b: Any, *attention: Any) -> Any:
        c = multiply(a, b)
        attention, c = lax.optimization_barrier((attention, c))
        return c, decode_attention(*attention, num_sms=total)

    return [
        Variant("sequential", total, functools.partial(one_after_the_other, _multiply(total))),
        Variant("sequential, cuBLAS", total, functools.partial(one_after_the_other, _xla_swiglu)),
    ]


def _side_by_side(total: int) -> list[Variant]:
    variants = []
    for attention_sms in ATTENTION_SHARES:
        gemm_sms = total - attention_sms
        share = f"{gemm_sms}+{attention_sms}"
        fused = functools.partial(gemm_with_decode_attention, swiglu=True, gemm_sms=gemm_sms, attention_sms=attention_sms)
        variants += [
            Variant(f"{share} streams", total, functools.partial(_on_streams, gemm_sms, attention_sms)),
            Variant(f"{share} fused", total, fused),
        ]
        if attention_sms == 28:
            variants += [
                Variant(f"{share} fused, {name}", total, functools.partial(fused, attention_config=config))
                for name, config in _CONFIGS.items()
            ]
    return variants


def _on_streams(gemm_sms: int, attention_sms: int, a: Any, b: Any, *attention: Any) -> Any:
    """Both start together and are waited for together, as in a phase of a pipeline. Needs jax 0.11 or newer."""
    (a, b), attention = lax.optimization_barrier(((a, b), attention))
    c = on_stream(COMPUTE_STREAM, _multiply(gemm_sms))(a, b)
    out = on_stream(MEMORY_STREAM, functools.partial(decode_attention, num_sms=attention_sms))(*attention)
    return lax.optimization_barrier((c, out))


def _multiply(num_sms: int) -> Callable[..., jax.Array]:
    return functools.partial(gemm, swiglu=True, num_sms=num_sms)


def _xla_swiglu(a: jax.Array, b: jax.Array) -> jax.Array:
    """XLA's GEMM and then its fusion for the activation, stored between the two."""
    both = lax.dot_general(a, b, (((1,), (0,)), ((), ())))
    gate, up = both[:, 0].astype(jnp.float32), both[:, 1].astype(jnp.float32)
    return (gate * lax.logistic(gate) * up).astype(a.dtype)

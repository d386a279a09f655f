"""Sets of kernels with one signature each: what operations are made of on a given device.

`REFERENCE` runs anywhere. `mosaic(num_sms)` keeps to that many SMs of a Hopper GPU; with `mosaic_peers(num_sms)` a GEMM and the
all-reduce behind it are one kernel. `cublas(num_sms)` takes XLA's own GEMM, which claims the whole chip, beside Mosaic
attention: the best sequential execution where cuBLAS is the faster GEMM.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

import pallas_kernels
from nanoflow_jax.parallel import TP, all_reduce
from pallas_kernels import reference
from pallas_kernels.cuda_driver import signal_each_other
from pallas_kernels.gemm_all_reduce import gemm_all_reduce

KernelChoice = Literal["reference", "mosaic", "mosaic_peers", "cublas"]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """One implementation of each kernel, with the signatures of `pallas_kernels.reference`.

    `gemm_with_decode_attention` also takes `attention_sms`, SMs beside those of the set; None where the GEMM cannot be fused.
    `gemm_all_reduce(a, b, residual)` is a b summed over the ranks of mesh axis `tp`, and the residual.

    Attributes:
      reduces_in_gemm: `gemm_all_reduce` is one kernel; sequential execution takes it in the place of a GEMM and a collective.
    """

    gemm: Callable[..., Array]
    grouped_gemm: Callable[..., Array]
    append_kv: Callable[..., tuple[Array, Array, Array, Array]]
    decode_attention: Callable[..., Array]
    prefill_attention: Callable[..., Array]
    gemm_all_reduce: Callable[[Array, Array, Array], Array]
    gemm_with_decode_attention: Callable[..., tuple[Array, Array]] | None = None
    reduces_in_gemm: bool = False


def _reference_pair(*operands: Array, attention_sms: int, **epilogue: Any) -> tuple[Array, Array]:
    del attention_sms  # nothing here has a budget
    return reference.gemm_with_decode_attention(*operands, **epilogue)


def _in_two_steps(gemm: Callable[..., Array]) -> Callable[[Array, Array, Array], Array]:
    """GEMM and all-reduce by two kernels."""
    return lambda a, b, residual: all_reduce(gemm(a, b)) + residual


REFERENCE = Kernels(
    gemm=reference.gemm,
    grouped_gemm=reference.grouped_gemm,
    append_kv=reference.append_kv,
    decode_attention=reference.decode_attention,
    prefill_attention=reference.prefill_attention,
    gemm_all_reduce=_in_two_steps(reference.gemm),
    gemm_with_decode_attention=_reference_pair,
)


def mosaic(num_sms: int) -> Kernels:
    """Persistent Mosaic GPU kernels that hold exactly `num_sms` SMs; they take bfloat16."""
    gemm = functools.partial(pallas_kernels.gemm, num_sms=num_sms)
    return Kernels(
        gemm=gemm,
        grouped_gemm=functools.partial(pallas_kernels.grouped_gemm, num_sms=num_sms),
        append_kv=functools.partial(pallas_kernels.append_kv, num_sms=num_sms),
        decode_attention=functools.partial(pallas_kernels.decode_attention, num_sms=num_sms),
        prefill_attention=functools.partial(pallas_kernels.prefill_attention, num_sms=num_sms),
        gemm_all_reduce=_in_two_steps(gemm),
        gemm_with_decode_attention=functools.partial(pallas_kernels.gemm_with_decode_attention, gemm_sms=num_sms),
    )


def mosaic_peers(num_sms: int) -> Kernels:
    """As `mosaic`; a GEMM sums over the ranks itself, in memory that NVLink must reach (docs/kernels-collectives.md)."""

    def reduced(a: Array, b: Array, residual: Array) -> Array:
        return gemm_all_reduce(a, b, axis=TP, residual=residual, num_sms=num_sms)

    return dataclasses.replace(mosaic(num_sms), gemm_all_reduce=reduced, reduces_in_gemm=True)


def cublas(num_sms: int) -> Kernels:
    """As `mosaic`, but for XLA's GEMM."""
    return dataclasses.replace(
        mosaic(num_sms), gemm=_xla_gemm, gemm_all_reduce=_in_two_steps(_xla_gemm), gemm_with_decode_attention=None
    )


def kernels_for(choice: KernelChoice) -> Callable[[int], Kernels]:
    """num_sms -> kernels.

    Raises:
      ValueError: no such choice.
    """
    sets: dict[str, Callable[[int], Kernels]] = {
        "reference": lambda _: REFERENCE,
        "mosaic": mosaic,
        "mosaic_peers": mosaic_peers,
        "cublas": cublas,
    }
    if choice not in sets:
        raise ValueError(f"kernels={choice!r} is not one of {', '.join(sets)}")
    return sets[choice]


def best_choice(devices: Sequence[Any]) -> KernelChoice:
    """What to take on the devices of all ranks unless told otherwise: the reference on CPUs, Mosaic kernels on GPUs.

    XLA's GEMM is as fast by itself; ours adds the residual and applies SwiGLU before it stores, and keeps to SM budgets. On two
    ranks with NVLink a GEMM and its all-reduce are faster as one kernel (docs/kernels-collectives.md). So they are in a large
    layer on four (docs/performance.md), where no engine has run with them yet; on more that was not measured.

    Raises:
      CudaDriverError: two GPUs, and the driver does not say how they are connected.
    """
    if devices[0].platform == "cpu":
        return "reference"
    return "mosaic_peers" if len(devices) == 2 and signal_each_other(devices) else "mosaic"


def check_choice(choice: KernelChoice, devices: Sequence[Any]) -> None:
    """Whether the kernels can run on the devices of all ranks; where peers are out of reach they could wait forever.

    Raises:
      ValueError: they cannot.
      CudaDriverError: the driver does not say how GPUs are connected.
    """
    if choice != "mosaic_peers":
        return
    if len(devices) == 1:
        raise ValueError("kernels='mosaic_peers' sum over ranks, of which there is one: take 'mosaic'")
    if devices[0].platform == "gpu" and not signal_each_other(devices):
        raise ValueError(
            f"kernels='mosaic_peers' need NVLink between all of {', '.join(map(str, devices))}: take 'mosaic', which leaves "
            "sums over the ranks to NCCL"
        )


def _xla_gemm(
    a: Float[Array, "M K"],
    b: Float[Array, "K *N"],
    *,
    bias: Float[Array, "*N"] | None = None,
    residual: Float[Array, "M N_out"] | None = None,
    swiglu: bool = False,
    rows: Int[Array, ""] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "M N_out"]:
    """As `reference.gemm`, but stored in the result's dtype before the epilogue: what cuBLAS does at full speed.

    It multiplies all rows: its sizes are static.
    """
    del rows
    out = lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=out_dtype)
    if bias is not None:
        out = out + bias[None]
    if swiglu:
        gate, up = out[:, 0].astype(jnp.float32), out[:, 1].astype(jnp.float32)
        # Not jax.nn.silu, a jitted function: XLA cannot place a call within a call on a stream.
        out = (gate * lax.logistic(gate) * up).astype(a.dtype)
    return out if residual is None else out + residual

"""Decode attention and a GEMM beside it as one kernel whose CTAs take roles, in the place of two kernels on two streams."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from nanoflow_jax.executor.phases import Phase, Placed
from nanoflow_jax.kernels import Kernels

GEMMS = frozenset({"qkv_proj", "o_proj", "gate_up_proj", "down_proj"})
"""Operations of a plan that are one GEMM and what little goes before and behind it."""

Apply = Callable[[Kernels], dict[str, Array]]
"""Runs a nano-operation with the given kernels; returns what it wrote."""


def partners(phase: Phase) -> dict[int, int]:
    """Index of each decode attention in the phase that has a GEMM beside it -> index of that GEMM.

    Of the GEMMs that the plan runs beside an attention it is the one with the longest time in common; each has one partner.
    """
    found: dict[int, int] = {}
    for index, placed in enumerate(phase):
        if placed.nano.operation != "decode_attention":
            continue
        beside = {
            other: _common_us(placed, gemm)
            for other, gemm in enumerate(phase)
            if gemm.nano.operation in GEMMS and other not in found.values()
        }
        longest = max(beside, key=lambda other: beside[other], default=None)
        if longest is not None and beside[longest] > 0:
            found[index] = longest
    return found


def _common_us(a: Placed, b: Placed) -> float:
    return min(a.end_us, b.end_us) - max(a.start_us, b.start_us)


def gemm_share(gemm: Placed, attention: Placed, num_sms: int) -> int:
    """SMs that multiply from the start: the plan's, as far as attention leaves them of the device's `num_sms`.

    A plan's numbers are each nano-operation's largest over its time, so two that meet may come to more than there are.
    """
    return max(1, min(gemm.nano.num_sms, num_sms - attention.nano.num_sms))


def needs_streams(phase: Phase, pairs: Mapping[int, int]) -> bool:
    """Whether work is left for other streams. Without, a phase is one chain, and streams would only add waits between them."""
    resources = {placed.nano.resource for index, placed in enumerate(phase) if index not in pairs}
    return len(resources) > 1


def run_pair(
    gemm: Apply, attention: Apply, gemm_kernels: Kernels, attention_kernels: Kernels, attention_sms: int
) -> tuple[dict[str, Array], dict[str, Array]]:
    """What both wrote. All that the operations do beside the two kernels happens as without the fusion, in front or behind.

    The attention runs twice: first to see what it gives its kernel, then with the result of the fused kernel for it.
    """
    pair_kernel = gemm_kernels.gemm_with_decode_attention
    assert pair_kernel is not None
    arguments: list[tuple[Any, ...]] = []
    results: list[Array] = []

    def see(*operands: Any) -> Array:
        arguments.append(operands)
        return jnp.zeros_like(operands[0])

    def multiply(a: Array, b: Array, **epilogue: Any) -> Array:
        c, attended = pair_kernel(a, b, *arguments[0], attention_sms=attention_sms, **epilogue)
        results.append(attended)
        return c

    attention(dataclasses.replace(attention_kernels, decode_attention=see))
    if not arguments:  # no row of these tokens can decode
        return gemm(gemm_kernels), attention(attention_kernels)
    written = gemm(dataclasses.replace(gemm_kernels, gemm=multiply))
    (attended,) = results
    return written, attention(dataclasses.replace(attention_kernels, decode_attention=lambda *_: attended))

"""Decode attention and the GEMMs beside it as kernels whose CTAs take roles, in the place of kernels on two streams.

A plan lets one attention run beside a chain of GEMMs. Each GEMM of the chain takes a part of the attention's rows along, as
large as the part of the attention's time that the plan has the two side by side.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from nanoflow_jax.executor.phases import Phase, Placed
from nanoflow_jax.kernels import Kernels
from nanoflow_jax.plan import PipelinePlan, reduced_in_gemm

_GEMMS = frozenset({"qkv_proj", "o_proj", "gate_up_proj", "down_proj"})

Apply = Callable[[Kernels], dict[str, Array]]
"""Runs a nano-operation with the given kernels; returns what it wrote."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Of the decode attention at index `attention` of a phase, the rows from this fraction of them to that."""

    attention: int
    first: float
    last: float


def gemms(plan: PipelinePlan) -> frozenset[str]:
    """Operations of the plan that are one GEMM, which sums over no ranks, and what little goes before and behind it."""
    return _GEMMS - reduced_in_gemm(plan.partition)


def beside(phase: Phase, gemms: Set[str]) -> dict[int, tuple[Part, ...]]:
    """Index of each of `gemms` in the phase that the plan runs beside decode attention -> what of it goes with that GEMM.

    A kernel reads one layer's pages. Where a GEMM meets attention of two layers it takes the one that it meets longer.
    """
    attentions = [i for i, placed in enumerate(phase) if placed.nano.operation == "decode_attention"]
    meetings: dict[int, dict[int, float]] = {}
    for index, gemm in enumerate(phase):
        times = {i: _common_us(phase[i], gemm) for i in attentions} if gemm.nano.operation in gemms else {}
        times = {i: time_us for i, time_us in times.items() if time_us > 0}
        if times:
            layer = phase[max(times, key=lambda i: times[i])].layer
            meetings[index] = {i: time_us for i, time_us in times.items() if phase[i].layer == layer}
    total_us = {i: sum(times.get(i, 0.0) for times in meetings.values()) for i in attentions}
    done_us = dict.fromkeys(attentions, 0.0)
    found = {}
    for index, times in meetings.items():
        found[index] = tuple(Part(i, done_us[i] / total_us[i], (done_us[i] + us) / total_us[i]) for i, us in times.items())
        for i, us in times.items():
            done_us[i] += us
    return found


def _common_us(a: Placed, b: Placed) -> float:
    return min(a.end_us, b.end_us) - max(a.start_us, b.start_us)


def gemm_share(gemm: Placed, attention: Placed, num_sms: int) -> int:
    """SMs that multiply from the start: the plan's, as far as attention leaves them of the device's `num_sms`.

    A plan's numbers are each nano-operation's largest over its time, so two that meet may come to more than there are.
    """
    return max(1, min(gemm.nano.num_sms, num_sms - attention.nano.num_sms))


def needs_streams(phase: Phase, parts: Mapping[int, Sequence[Part]]) -> bool:
    """Whether work is left for other streams. Without, a phase is one chain, and streams would only add waits between them."""
    fused = {part.attention for of_gemm in parts.values() for part in of_gemm}
    return len({placed.nano.resource for index, placed in enumerate(phase) if index not in fused}) > 1


class SplitAttention:
    """One decode attention whose rows are computed in pieces, by the kernels of several GEMMs."""

    def __init__(self, apply: Apply, kernels: Kernels):
        """`apply` runs twice: here, to see what it gives its kernel, and in `result` with what the kernels made of it."""
        self._apply, self._kernels = apply, kernels
        self._operands: tuple[Array, ...] = ()
        self._pieces: list[Array] = []

        def see(*operands: Array) -> Array:
            self._operands = operands
            return jnp.zeros_like(operands[0])

        apply(dataclasses.replace(kernels, decode_attention=see))

    def rows(self, part: Part) -> tuple[Array, ...]:
        """The kernel's operands for a part's rows; empty if it has none, as where no row of these tokens can decode."""
        if not self._operands:
            return ()
        q, k_pages, v_pages, block_tables, kv_lens = self._operands
        rows = slice(round(part.first * kv_lens.shape[0]), round(part.last * kv_lens.shape[0]))
        return (q[rows], k_pages, v_pages, block_tables[rows], kv_lens[rows]) if rows.start < rows.stop else ()

    def take(self, attended: Array) -> None:
        """The result for the next rows."""
        self._pieces.append(attended)

    def result(self) -> dict[str, Array]:
        """What the nano-operation writes, once all rows are computed."""
        if not self._operands:
            return self._apply(self._kernels)
        q, *_, kv_lens = self._operands
        of_no_row = [jnp.zeros_like(q[kv_lens.shape[0] :])] if kv_lens.shape[0] < q.shape[0] else []
        attended = _joined([*self._pieces, *of_no_row])
        return self._apply(dataclasses.replace(self._kernels, decode_attention=lambda *_: attended))


def run_gemm(
    gemm: Apply, kernels: Kernels, attentions: Sequence[tuple[SplitAttention, Part]], attention_sms: int
) -> dict[str, Array]:
    """What the GEMM's nano-operation writes; its kernel also computes the parts of attention, all of one layer.

    All that the operations do beside the two kernels happens as without the fusion, in front or behind. The kernel of both
    multiplies all rows, those of padding too: its CTAs claim tiles from one line, which is made when it is compiled.
    """
    pair_kernel = kernels.gemm_with_decode_attention
    assert pair_kernel is not None
    parts = [(split, rows) for split, part in attentions if (rows := split.rows(part))]
    if not parts:
        return gemm(kernels)
    q, block_tables, kv_lens = (_joined([rows[field] for _, rows in parts]) for field in (0, 3, 4))
    _, k_pages, v_pages, *_ = parts[0][1]

    def multiply(a: Array, b: Array, *, rows: Array | None = None, **epilogue: Any) -> Array:
        del rows
        operands = (a, b, q, k_pages, v_pages, block_tables, kv_lens)
        c, attended = pair_kernel(*operands, attention_sms=attention_sms, **epilogue)
        start = 0
        for split, (queries, *_) in parts:
            split.take(attended[start : start + queries.shape[0]])
            start += queries.shape[0]
        return c

    return gemm(dataclasses.replace(kernels, gemm=multiply))


def _joined(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)

"""A pipeline by hand, to hold against what the search finds: two nano-batches, two phases a layer, as few cuts as can be.

    phase 1   memory    decode attention of the first nano-batch
              compute   prompt attention, o, feed-forward of the second, and its qkv of the next layer
    phase 2   memory    decode attention of the second, if the border leaves it any
              compute   prompt attention (if any), o, feed-forward of the first, and its qkv of the next layer

Under tensor parallelism o and down sum over the ranks themselves, so there are no collectives to place.

Every weight is read twice, everything else once, and GEMMs never run on part of the chip while the rest idles, but for what
the durations of a phase's two chains differ.
"""

import dataclasses
from collections.abc import Sequence

from nanoflow_jax.plan import NanoBatch, Operation, PipelinePlan, Prediction, Resource, token_range
from nanoflow_jax.plan_files import validate
from search.assemble import Placed, Segment, fold
from search.build_plan import intensity
from search.interference import performance, share_of_sms
from search.problem import GROUP_OF, Costing, build_problem
from search.schedule import Node

# Loads are summed in whole ticks: fine ones, so that rounding does not lift a bound above a plan that reaches it.
_BOUND_TICK_US = 1e-3
PARTITIONS = ("none", "gemm_all_reduce")
_AFTER_ATTENTION = ("prefill_attention", "o_proj", "gate_up_proj", "down_proj")


def hand_pipeline(costing: Costing, border: int, attention_sms: int) -> PipelinePlan:
    """The pipeline of each GPU with nano-batches [0, border) and [border, b_dense), attention on `attention_sms`.

    Times are the costing's; kernels beside each other slow down as its interference map says of so many SMs, and all of them
    alike where the power model says that the cap would not let them run so fast.

    Raises:
      ValueError: collectives, experts, no decoding tokens, or a border or number of SMs out of range.
      PlanError: the border is no multiple of a tile.
    """
    mix, table = costing.mix, costing.table
    if costing.partition not in PARTITIONS or costing.model.is_moe or mix.decode_tokens == 0:
        raise ValueError(
            f"{costing.partition}, {costing.model.name} and decode_tokens={mix.decode_tokens}: a hand pipeline is for "
            f"partitions {' and '.join(PARTITIONS)}, dense models and batches that decode"
        )
    if not 0 < border < mix.b_dense or not 0 < attention_sms < table.num_sms:
        raise ValueError(f"{border=} must lie in (0, {mix.b_dense}) and {attention_sms=} in (0, {table.num_sms})")
    halves = (NanoBatch(start=0, stop=border), NanoBatch(start=border, stop=mix.b_dense))
    batches = _nano_batches(costing, halves)
    lane = _Lane(costing, batches, attention_sms)
    chains = [[*lane.present(_AFTER_ATTENTION, halves[i]), ("qkv_proj", i)] for i in (1, 0)]
    lane.slowdown = max(1.0, lane.least_time_us() / sum(lane.phase_us(*phase) for phase in zip(halves, chains, strict=True)))
    beside = [lane.attention_us(half) for half in halves]
    lengths = [lane.phase_us(*phase) for phase in zip(halves, chains, strict=True)]
    period = sum(lengths)
    # In the layer's own time its window begins one period in: both qkv come in the window before.
    starts = [period, lengths[0]]
    for half, start in zip(halves, starts, strict=True):
        lane.place_attention(half, start)
    lane.place_compute(chains[0], period, beside[0], wrapped=period)
    lane.place_compute(chains[1], period + lengths[0], beside[1], wrapped=period)

    power = table.power
    nanos, phases = fold(lane.placed, period, power.idle_w if power else 0.0)
    plan = PipelinePlan(
        model=costing.model.name, device=table.device, tp=table.tp, moe=False, partition=costing.partition, b_dense=mix.b_dense,
        decode_tokens=mix.decode_tokens, decode_context=mix.decode_context, num_sms=table.num_sms, shares="constant",
        period_us=period, nano_batches=batches,
        nano_operations=nanos, phases=phases,
        prediction=_prediction(
            costing, batches, lane, ideal_us=sum(lane.ideal_us(*phase) for phase in zip(halves, chains, strict=True)),
            mean_power_w=sum(p.power_w * p.duration_us for p in phases) / period,
        ),
    )  # fmt: skip
    validate(plan)
    return plan


def _prediction(
    costing: Costing, batches: dict[str, tuple[NanoBatch, ...]], lane: "_Lane", *, ideal_us: float, mean_power_w: float
) -> Prediction:
    """Bounds as the search states them: of any schedule with so many nano-batches, and of any plan at all."""
    problem = build_problem(dataclasses.replace(costing, tick_us=_BOUND_TICK_US))
    of_group = {GROUP_OF[name]: len(parts) for name, parts in batches.items()}
    counts = [of_group[group.name] for group in problem.groups]
    bound_us = problem.load_bound(counts) * problem.tick_us
    return Prediction(
        sequential_us=costing.sequential_us(), nano_us=sum(p.best_us for p in lane.placed), ideal_us=ideal_us,
        ideal_bound_us=bound_us,
        bound_counts=f"{costing.partition} " + " ".join(f"{g.name}={n}" for g, n in zip(problem.groups, counts, strict=True)),
        gap=max(0.0, 1 - bound_us / ideal_us),
        lower_bound_us=max(problem.load_bound() * problem.tick_us, lane.least_time_us()), estimated=True,
        mean_power_w=mean_power_w,
    )  # fmt: skip


def _nano_batches(costing: Costing, halves: Sequence[NanoBatch]) -> dict[str, tuple[NanoBatch, ...]]:
    batches = {}
    for op in costing.graph():
        covered = token_range(op.tokens, costing.mix.b_dense, costing.mix.decode_tokens)
        parts = [_overlap(covered, half) for half in halves]
        batches[op.name] = tuple(part for part in parts if part is not None)
    return batches


def _overlap(a: NanoBatch, b: NanoBatch) -> NanoBatch | None:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return NanoBatch(start=start, stop=stop) if start < stop else None


class _Lane:
    """Times of nano-operations, and where they were placed.

    Attributes:
      placed: in the layer's own time.
      slowdown: of everything, for want of power.
    """

    def __init__(self, costing: Costing, batches: dict[str, tuple[NanoBatch, ...]], attention_sms: int) -> None:
        self.placed: list[Placed] = []
        self.slowdown = 1.0
        self._costing, self._batches = costing, batches
        self._operations: dict[str, Operation] = {op.name: op for op in costing.graph()}
        self._num_sms, self._attention_sms = costing.table.num_sms, attention_sms
        curve = costing.table.interference
        self._attention_share = share_of_sms(curve, Resource.MEMORY, attention_sms, self._num_sms)
        self._attention_speed = performance(curve, Resource.MEMORY, self._attention_share)

    def present(self, names: Sequence[str], half: NanoBatch) -> list[tuple[str, int]]:
        """(operation, nano-batch) of those that have tokens in `half`."""
        return [
            (name, i)
            for name in names
            for i, batch in enumerate(self._batches.get(name, ()))
            if half.start <= batch.start < half.stop
        ]

    def least_time_us(self) -> float:
        """The shortest time in which the power cap lets everything run; 0 without a power model."""
        power = self._costing.table.power
        if power is None:
            return 0.0
        every = [(name, i) for name, parts in self._batches.items() for i in range(len(parts))]
        return power.least_time_us(sum(self._node(name, i, Resource.COMPUTE).energy_j or 0.0 for name, i in every))

    def phase_us(self, half: NanoBatch, chain: Sequence[tuple[str, int]]) -> float:
        """How long the attention of `half` and the chain beside it take."""
        beside_us = self.attention_us(half)
        return max(beside_us, self.compute_us(chain, beside_us))

    def ideal_us(self, half: NanoBatch, chain: Sequence[tuple[str, int]]) -> float:
        """How long the same phase would take if kernels did not slow each other down and power were no limit."""
        lanes = self.present(("decode_attention",), half), chain
        return max(sum(self._best_us(name, i) for name, i in nanos) for nanos in lanes)

    def attention_us(self, half: NanoBatch) -> float:
        best_us = sum(self._best_us(name, i) for name, i in self.present(("decode_attention",), half))
        return best_us * self.slowdown / self._attention_speed

    def compute_us(self, chain: Sequence[tuple[str, int]], beside_us: float) -> float:
        """How long a chain takes when attention runs beside it for its first `beside_us`."""
        clock = 0.0
        for name, i in chain:
            clock += self._best_us(name, i) * self.slowdown / self._share(clock, beside_us)
        return clock

    def place_attention(self, half: NanoBatch, start_us: float) -> None:
        for name, i in self.present(("decode_attention",), half):
            best = self._best_us(name, i)
            speed = self._attention_speed / self.slowdown
            self._place(
                name, i, Resource.MEMORY, best, start_us, best / speed, self._attention_share, self._attention_sms, speed
            )

    def place_compute(self, chain: Sequence[tuple[str, int]], start_us: float, beside_us: float, wrapped: float) -> None:
        """Places a chain from `start_us` on; its qkv belongs to the layer after, which is a period, `wrapped`, earlier."""
        clock = 0.0
        for name, i in chain:
            share = self._share(clock, beside_us)
            best = self._best_us(name, i)
            start = start_us + clock - (wrapped if name == "qkv_proj" else 0.0)
            sms = self._num_sms if share == 1 else self._num_sms - self._attention_sms
            speed = share / self.slowdown
            self._place(name, i, Resource.COMPUTE, best, start, best / speed, share, sms, speed)
            clock += best / speed

    def _share(self, clock: float, beside_us: float) -> float:
        return 1.0 if clock >= beside_us else 1 - self._attention_share

    def _best_us(self, name: str, index: int) -> float:
        return self._costing.timing(self._operations[name], self._batches[name][index].tokens).time_us

    def _place(
        self, name: str, index: int, resource: Resource, best: float, start: float, length: float, share: float, sms: int,
        speed: float,
    ) -> None:  # fmt: skip
        node = self._node(name, index, resource)
        segment = Segment(start_us=start, stop_us=start + length, share=share, num_sms=sms, performance=speed)
        self.placed.append(
            Placed(
                operation=name, nano_batch=index, resource=resource, best_us=best, segments=(segment,),
                intensity=intensity(self._costing, node),
            )
        )  # fmt: skip

    def _node(self, name: str, index: int, resource: Resource) -> Node:
        batch = self._batches[name][index]
        return Node(
            operation=name, nano_batch=index, batch=batch, resource=resource, best_us=self._best_us(name, index),
            energy_j=self._costing.energy_of(name, batch.tokens), estimated=True,
        )  # fmt: skip

"""Turns a schedule in a layer's own time into a plan: the window modulo the period, phases, utilisation.

Also plans made by hand, for tests of executors and for reading.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import msgspec

from nanoflow_jax.plan import (
    TILE,
    NanoBatch,
    NanoOperation,
    Partition,
    Phase,
    PipelinePlan,
    PlanError,
    Prediction,
    Resource,
    Running,
    depends,
    layer_graph,
    present_operations,
    validate,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intensity:
    """How much of the device an operation uses while it runs alone: fractions of peak, and watts above idle."""

    compute: float = 0.0
    memory: float = 0.0
    network: float = 0.0
    power_w: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch [start, stop) of a nano-operation's life, in microseconds of its layer's time, at constant share."""

    start_us: float
    stop_us: float
    share: float
    num_sms: int
    performance: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed:
    """A nano-operation with its place in its layer's time (0 is the start of the layer's window; may exceed the period)."""

    operation: str
    nano_batch: int
    resource: Resource
    best_us: float
    segments: tuple[Segment, ...]
    intensity: Intensity

    @property
    def start_us(self) -> float:
        return self.segments[0].start_us

    @property
    def stop_us(self) -> float:
        return self.segments[-1].stop_us


class _Clock:
    """Times modulo the period; times that differ by rounding alone become one border."""

    def __init__(self, times: Sequence[float], period_us: float) -> None:
        self.period_us = period_us
        self.eps = 1e-7 * period_us
        folded = sorted({0.0} | {t % period_us for t in times})
        self.borders = [0.0]
        for t in folded:
            if t - self.borders[-1] > self.eps and period_us - t > self.eps:
                self.borders.append(t)

    def locate(self, time_us: float) -> tuple[int, int]:
        """(window, index of the border) of a time that was among those given."""
        window, rest = divmod(time_us, self.period_us)
        if self.period_us - rest <= self.eps:
            return int(window) + 1, 0
        nearest = min(range(len(self.borders)), key=lambda i: abs(self.borders[i] - rest))
        return int(window), nearest

    def phase(self, index: int) -> tuple[float, float]:
        ends = [*self.borders[1:], self.period_us]
        return self.borders[index], ends[index] - self.borders[index]


def fold(placed: Sequence[Placed], period_us: float, idle_w: float) -> tuple[tuple[NanoOperation, ...], tuple[Phase, ...]]:
    """The window of a schedule that repeats every `period_us`: nano-operations in order of start, and the phases."""
    clock = _Clock([t for p in placed for s in p.segments for t in (s.start_us, s.stop_us)], period_us)
    num_phases = len(clock.borders)
    ordered = sorted(placed, key=lambda p: (clock.locate(p.start_us)[1], p.resource, p.operation, p.nano_batch))
    running: list[list[tuple[Running, Intensity]]] = [[] for _ in range(num_phases)]
    nanos = []
    for index, p in enumerate(ordered):
        offset, first = clock.locate(p.start_us)
        duration = 0.0
        for s in p.segments:
            begin, end = (w * num_phases + i for w, i in (clock.locate(s.start_us), clock.locate(s.stop_us)))
            for i in range(begin, end):
                held = Running(nano_operation=index, share=s.share, num_sms=s.num_sms, performance=s.performance)
                running[i % num_phases].append((held, p.intensity))
                duration += clock.phase(i % num_phases)[1]
        nanos.append(
            NanoOperation(
                operation=p.operation,
                nano_batch=p.nano_batch,
                resource=p.resource,
                layer_offset=offset,
                start_us=clock.borders[first],
                duration_us=duration,
                best_us=p.best_us,
                phase=first,
                share=max(s.share for s in p.segments),
                num_sms=max(s.num_sms for s in p.segments),
            )
        )
    phases = tuple(_phase(*clock.phase(i), running[i], idle_w) for i in range(num_phases))
    return tuple(nanos), phases


def _phase(start_us: float, duration_us: float, running: Sequence[tuple[Running, Intensity]], idle_w: float) -> Phase:
    def total(what: str) -> float:
        return sum(r.performance * getattr(i, what) for r, i in running)

    return Phase(
        start_us=start_us,
        duration_us=duration_us,
        running=tuple(r for r, _ in running),
        compute=total("compute"),
        memory=total("memory"),
        network=total("network"),
        power_w=idle_w + total("power_w"),
    )


def mean_utilization(plan: PipelinePlan) -> dict[str, float]:
    """Time-weighted means over the window: fractions of compute, memory and network peak, and watts."""
    names = ("compute", "memory", "network", "power_w")
    return {n: sum(getattr(p, n) * p.duration_us for p in plan.phases) / plan.period_us for n in names}


def rotate(plan: PipelinePlan, first: int) -> PipelinePlan:
    """The same schedule with the window beginning at phase `first`; layer offsets follow.

    Raises:
      PlanError: there is no such phase.
    """
    if not 0 <= first < len(plan.phases):
        raise PlanError(f"phase {first} does not exist, the plan has {len(plan.phases)}")
    shift = plan.phases[first].start_us
    borders = list(itertools.accumulate((p.duration_us for p in plan.phases[first:] + plan.phases[:first]), initial=0.0))
    nanos = [
        msgspec.structs.replace(
            n,
            start_us=borders[(n.phase - first) % len(plan.phases)],
            layer_offset=n.layer_offset - (n.start_us < shift),
            phase=(n.phase - first) % len(plan.phases),
        )
        for n in plan.nano_operations
    ]
    order = sorted(range(len(nanos)), key=lambda i: nanos[i].phase)
    rank = {old: new for new, old in enumerate(order)}
    least = min(n.layer_offset for n in nanos)
    phases = tuple(
        msgspec.structs.replace(
            p,
            start_us=border,
            running=tuple(msgspec.structs.replace(r, nano_operation=rank[r.nano_operation]) for r in p.running),
        )
        for p, border in zip(plan.phases[first:] + plan.phases[:first], borders, strict=False)
    )
    placed = tuple(msgspec.structs.replace(nanos[i], layer_offset=nanos[i].layer_offset - least) for i in order)
    return msgspec.structs.replace(plan, nano_operations=placed, phases=phases)


def scale_down(plan: PipelinePlan, tile: int) -> PipelinePlan:
    """The same plan over tiles of `tile` tokens, so that tests can execute a real plan on few tokens; times stay as they are.

    Raises:
      PlanError: decode and prompts meet inside a tile, and a tile of one token has no inside.
    """
    whole, inside = divmod(plan.decode_tokens, plan.tile)
    if inside and tile < 2:
        raise PlanError(f"decode_tokens={plan.decode_tokens} is inside a tile of {plan.tile}, which tile={tile} cannot hold")
    border = whole * tile + (min(max(round(inside * tile / plan.tile), 1), tile - 1) if inside else 0)

    def scaled(token: int) -> int:
        return border if token == plan.decode_tokens else token // plan.tile * tile

    batches = {
        name: tuple(NanoBatch(start=scaled(b.start), stop=scaled(b.stop)) for b in row)
        for name, row in plan.nano_batches.items()
    }
    small = msgspec.structs.replace(
        plan, tile=tile, b_dense=plan.b_dense // plan.tile * tile, decode_tokens=border, nano_batches=batches
    )
    validate(small)
    return small


def hand_plan(
    *,
    nano_batches: Mapping[str, Sequence[tuple[int, int]]],
    priority: Sequence[tuple[str, int]] = (),
    partition: Partition = "none",
    tp: int = 1,
    moe: bool = False,
    tile: int = TILE,
    num_sms: int = 8,
    model: str = "hand-made",
    durations_us: Mapping[str, float] | None = None,
) -> PipelinePlan:
    """A valid plan from nano-batches alone: list scheduling in the order of `priority`, one layer after another.

    `nano_batches` gives (start, stop) per operation of the layer; `priority` orders (operation, nano-batch) pairs, those left
    out come last. Every nano-operation takes `durations_us[operation]`, by default 1. SMs are halved between compute and
    the two other lanes. Use `rotate` for a plan whose window holds several layers.

    Raises:
      PlanError: the nano-batches are not those of a layer.
    """
    batches = {name: tuple(NanoBatch(start=a, stop=b) for a, b in ranges) for name, ranges in nano_batches.items()}
    whole = max(batches.get("qkv_proj", ()), key=lambda b: b.stop, default=NanoBatch(start=0, stop=0)).stop
    decode_tokens = max((b.stop for b in batches.get("decode_attention", ())), default=0)
    graph = present_operations(layer_graph(moe=moe, partition=partition), whole, decode_tokens)
    if set(batches) != {op.name for op in graph}:
        raise PlanError(f"nano-batches of {sorted(batches)}, the layer has {sorted(op.name for op in graph)}")
    sms = {Resource.COMPUTE: num_sms // 2, Resource.MEMORY: num_sms // 4, Resource.NETWORK: num_sms // 4}
    rank = {pair: i for i, pair in enumerate(priority)}
    waiting = [(op, i) for op in graph for i in range(len(batches[op.name]))]
    ends: dict[tuple[str, int], float] = {}
    free = dict.fromkeys(Resource, 0.0)
    placed = []
    while waiting:
        ready = []
        for op, i in waiting:
            needs = [
                (d.producer, j)
                for d in op.inputs
                if not d.previous_layer
                for j, b in enumerate(batches[d.producer])
                if depends(d, batches[op.name][i], b, decode_tokens)
            ]
            if all(n in ends for n in needs):
                ready.append((rank.get((op.name, i), math.inf), op, i, max((ends[n] for n in needs), default=0.0)))
        _, op, i, earliest = min(ready, key=lambda r: r[0])
        waiting.remove((op, i))
        duration = (durations_us or {}).get(op.name, 1.0)
        start = max(earliest, free[op.resource])
        ends[op.name, i] = free[op.resource] = start + duration
        share = max(sms[op.resource], 1) / num_sms
        segment = Segment(
            start_us=start, stop_us=start + duration, share=share, num_sms=max(sms[op.resource], 1), performance=share
        )
        placed.append(
            Placed(
                operation=op.name, nano_batch=i, resource=op.resource, best_us=duration * share, segments=(segment,),
                intensity=Intensity(**{op.resource.value: 1.0}),
            )
        )  # fmt: skip
    period = max(ends.values())
    nanos, phases = fold(placed, period, idle_w=0.0)
    alone = sum(p.best_us for p in placed)
    prediction = Prediction(
        sequential_us=alone, nano_us=alone, ideal_us=period, ideal_bound_us=0.0, bound_counts="none", gap=1.0,
        lower_bound_us=0.0, mean_power_w=0.0, estimated=True,
    )  # fmt: skip
    plan = PipelinePlan(
        model=model, device="none", tp=tp, moe=moe, partition=partition, b_dense=whole, decode_tokens=decode_tokens, tile=tile,
        num_sms=num_sms, shares="constant", period_us=period, nano_batches=batches, nano_operations=nanos, phases=phases,
        prediction=prediction,
    )  # fmt: skip
    validate(plan)
    return plan

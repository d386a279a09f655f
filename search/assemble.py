"""Turns a schedule in a layer's own time into a plan: the window modulo the period, phases, utilisation."""

import dataclasses
from collections.abc import Sequence

from nanoflow_jax.plan import (
    NanoOperation,
    Phase,
    PipelinePlan,
    Resource,
    Running,
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

"""Stage II: resource shares for a fixed order, with interference; the form in which shares may change; and power.

Everything that runs together holds shares R with a sum of at most 1 and works at the speed P(R) of the interference map.

`phased` lets shares change whenever a nano-operation starts or ends in the stage I schedule. Between two such borders (a phase)
the same nano-operations run; x[f][r] >= 0 is the time that phase f spends under share pattern r. Minimise sum x such that
for each nano-operation the sum of x[f][r] P(its share in r) over its phases is at least its time alone.
Phases keep their order, so all dependencies hold by construction. It is a linear program, exact for this order of borders.

The constant form, one share for a nano-operation's whole life, is in constant.py.

Neither form knows of power: `slowed` stretches what they find, as a lower clock does, until the mean power is at most the cap.
So of allocations that are equally long at the cap it is still known which is faster without it.

Source: NanoFlow paper, section 4.1.3, which has the constant form; power and the phased form are ours.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

from ortools.linear_solver import pywraplp

from nanoflow_jax.plan import Resource
from search.hardware import PowerModel
from search.interference import Interference, performance, sms_of_share, useful_shares
from search.schedule import Schedule

SHARE_STEP = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What stage II needs to know of the machine."""

    num_sms: int
    interference: Interference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grant:
    """Node `node` holds `share` over [start_us, stop_us) of its layer's time and works at speed `performance`."""

    node: int
    start_us: float
    stop_us: float
    share: float
    performance: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation:
    """Shares over time: the grants of each node in order of time, the period, and a proven bound of it for this order."""

    schedule: Schedule
    grants: tuple[Grant, ...]
    period_us: float
    bound_us: float
    work: float = 0.0

    def durations(self) -> list[float]:
        """How long each node takes."""
        spans: dict[int, tuple[float, float]] = {}
        for g in self.grants:
            start, stop = spans.get(g.node, (g.start_us, g.stop_us))
            spans[g.node] = (min(start, g.start_us), max(stop, g.stop_us))
        return [spans[v][1] - spans[v][0] for v in range(len(self.schedule.nodes))]

    def mean_shares(self) -> list[float]:
        """Each node's share, averaged over its time."""
        held, time_us = [0.0] * len(self.schedule.nodes), [0.0] * len(self.schedule.nodes)
        for g in self.grants:
            held[g.node] += g.share * (g.stop_us - g.start_us)
            time_us[g.node] += g.stop_us - g.start_us
        return [h / t for h, t in zip(held, time_us, strict=True)]


def energy_floor_us(schedule: Schedule, power: PowerModel | None) -> float:
    """The least period under the power cap; 0 if the device's power is not known."""
    if power is None:
        return 0.0
    return power.least_time_us(sum(n.energy_j or 0.0 for n in schedule.nodes))


def slowed(allocation: Allocation, power: PowerModel | None) -> Allocation:
    """The allocation at the power cap: all of it slower by one factor, if it would draw more on average, until it does not."""
    floor = energy_floor_us(allocation.schedule, power)
    if allocation.period_us >= floor:
        return allocation
    factor = floor / allocation.period_us
    grants = tuple(
        dataclasses.replace(g, start_us=factor * g.start_us, stop_us=factor * g.stop_us, performance=g.performance / factor)
        for g in allocation.grants
    )
    return dataclasses.replace(allocation, grants=grants, period_us=floor, bound_us=floor)


def ideal(schedule: Schedule) -> Allocation:
    """No interference: everything at full speed whatever runs beside it."""
    grants = tuple(
        Grant(node=v, start_us=s, stop_us=s + d, share=1.0, performance=1.0)
        for v, (s, d) in enumerate(zip(schedule.starts, schedule.durations, strict=True))
    )
    return Allocation(schedule=schedule, grants=grants, period_us=schedule.period_us, bound_us=schedule.period_us)


def serial(schedule: Schedule) -> Allocation:
    """One nano-operation after another in the order of the window, each with the whole device."""
    windows = [math.floor(s / schedule.period_us + 1e-9) for s in schedule.starts]
    order = sorted(range(len(windows)), key=lambda v: (schedule.starts[v] - windows[v] * schedule.period_us, v))
    period = sum(n.best_us for n in schedule.nodes)
    grants, clock = [], 0.0
    for v in order:
        start = windows[v] * period + clock
        best = schedule.nodes[v].best_us
        grants.append(Grant(node=v, start_us=start, stop_us=start + best, share=1.0, performance=1.0))
        clock += best
    return Allocation(schedule=schedule, grants=tuple(grants), period_us=period, bound_us=period)


def slowdowns(loads: Mapping[Resource, float], device: Device) -> dict[Resource, float]:
    """How much longer each resource's kernels take than alone when everything overlaps, given each resource's total time.

    Memory and network kernels are taken to hold the share with most speed per share; compute loses what they then take from it,
    on average.
    """
    slower, taken = {}, 0.0
    for resource in (Resource.MEMORY, Resource.NETWORK):
        shares = useful_shares(device.interference, resource, device.num_sms, SHARE_STEP)
        share = max(shares, key=lambda s: performance(device.interference, resource, s) / s)
        slower[resource] = 1 / performance(device.interference, resource, share)
        taken += share * slower[resource] * loads.get(resource, 0.0)
    slower[Resource.COMPUTE] = 1 + taken / loads[Resource.COMPUTE]
    return slower


def operating_durations(schedule: Schedule, device: Device) -> list[float]:
    """Times of the nodes under `slowdowns`."""
    loads = {r: sum(n.best_us for n in schedule.nodes if n.resource is r) for r in Resource}
    slower = slowdowns(loads, device)
    return [n.best_us * slower[n.resource] for n in schedule.nodes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Phase:
    """Nodes that run between two borders of the ideal schedule, and of which window each is (its layer's offset)."""

    nodes: tuple[int, ...]
    windows: tuple[int, ...]


def _phases(schedule: Schedule) -> list[_Phase]:
    period, eps = schedule.period_us, 1e-7 * schedule.period_us
    ends = [s + d for s, d in zip(schedule.starts, schedule.durations, strict=True)]
    borders = [0.0]
    for t in sorted(t % period for t in (*schedule.starts, *ends)):
        if t - borders[-1] > eps and period - t > eps:
            borders.append(t)
    phases = []
    for begin, end in itertools.pairwise([*borders, period]):
        middle = (begin + end) / 2
        inside = []
        for v, (s, e) in enumerate(zip(schedule.starts, ends, strict=True)):
            window = math.floor((s - middle) / period) + 1
            if window * period + middle < e:
                inside.append((v, window))
        if inside:
            phases.append(_Phase(nodes=tuple(v for v, _ in inside), windows=tuple(w for _, w in inside)))
    return phases


@functools.lru_cache(maxsize=32)
def share_patterns(resources: tuple[Resource, ...], device: Device) -> list[tuple[float, ...]]:
    """Shares worth giving to kernels that run together, one per resource: compute takes what the others leave."""
    others = [r for r in resources if r is not Resource.COMPUTE]
    choices = [useful_shares(device.interference, r, device.num_sms, SHARE_STEP) for r in others]
    patterns = []
    for shares in itertools.product(*choices):
        rest = 1.0 - sum(shares)
        sms = sum(sms_of_share(device.interference, r, s, device.num_sms) for r, s in zip(others, shares, strict=True))
        if Resource.COMPUTE not in resources:
            if rest > -1e-9 and sms <= device.num_sms:
                patterns.append(shares)
        elif rest > 1e-6 and sms < device.num_sms:
            given = dict(zip(others, shares, strict=True))
            patterns.append(tuple(given.get(r, rest) for r in resources))
    return patterns


def phased(schedule: Schedule, device: Device) -> Allocation:
    """The linear program of the phased form; `schedule` is stage I's, in real time."""
    phases = _phases(schedule)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    work = [solver.Constraint(n.best_us, solver.infinity()) for n in schedule.nodes]
    patterns, variables = [], []
    for phase in phases:
        resources = tuple(schedule.nodes[v].resource for v in phase.nodes)
        patterns.append(share_patterns(resources, device))
        variables.append([])
        for shares in patterns[-1]:
            x = solver.NumVar(0.0, solver.infinity(), "")
            solver.Objective().SetCoefficient(x, 1.0)
            for v, resource, share in zip(phase.nodes, resources, shares, strict=True):
                work[v].SetCoefficient(x, performance(device.interference, resource, share))
            variables[-1].append(x)
    solver.Objective().SetMinimization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise AssertionError("the phase program always has a solution: give every phase enough time")
    times = [[x.solution_value() for x in row] for row in variables]
    return _phased_allocation(schedule, device, phases, patterns, times)


def _phased_allocation(schedule, device, phases, patterns, times) -> Allocation:
    """Lays the phases end to end. A node with more time than its work needs is slowed down evenly, so that it ends in time.

    Slivers are dropped. If that leaves a node short of work, all phases are lengthened by the few millionths that it lacks.
    """
    clock, stretches = 0.0, []
    for phase, shares, row in zip(phases, patterns, times, strict=True):
        for pattern, time_us in zip(shares, row, strict=True):
            if time_us > 1e-6 * schedule.period_us:
                stretches.append((phase, pattern, clock, clock + time_us))
                clock += time_us
    period = clock
    grants: list[Grant] = []
    for phase, pattern, begin, end in stretches:
        for v, window, share in zip(phase.nodes, phase.windows, pattern, strict=True):
            speed = performance(device.interference, schedule.nodes[v].resource, share)
            start, stop = window * period + begin, window * period + end
            grants.append(Grant(node=v, start_us=start, stop_us=stop, share=share, performance=speed))
    done = [0.0] * len(schedule.nodes)
    for g in grants:
        done[g.node] += (g.stop_us - g.start_us) * g.performance
    needed = [node.best_us / had for node, had in zip(schedule.nodes, done, strict=True)]
    longer = max(1.0, *needed)
    fixed = [
        dataclasses.replace(
            g, start_us=g.start_us * longer, stop_us=g.stop_us * longer, performance=g.performance * needed[g.node] / longer
        )
        for g in grants
    ]
    fixed.sort(key=lambda g: (g.node, g.start_us))
    return Allocation(schedule=schedule, grants=tuple(fixed), period_us=period * longer, bound_us=period)

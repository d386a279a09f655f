"""Stage II: resource shares for a fixed order, with interference and power, in two forms.

Everything that runs together holds shares R with a sum of at most 1 and works at the speed P(R) of the interference map.

`phased` lets shares change whenever a nano-operation starts or ends in the stage I schedule. Between two such borders (a phase)
the same nano-operations run; x[f][r] >= 0 is the time that phase f spends under share pattern r. Minimise sum x subject to
 (1) for each nano-operation, the sum of x[f][r] P(its share in r) over its phases is at least its time alone;
 (2) sum x >= energy / (cap - idle): on average the power cap holds.
Phases keep their order, so all dependencies hold by construction. It is a linear program, exact for this order of borders.

`constant` gives each nano-operation one share for its whole life: choose share index q[v], start s[v] and period T. Minimise T
subject to
 (1) duration is the table's entry time alone / P(share);
 (2) dependencies and the lane order of stage I: s[head] >= s[tail] + duration[tail] - layers T;
 (3) at every instant the shares sum to at most 1: one cumulative constraint over copies at s, s + T, s + 2 T ...;
 (4) T >= energy / (cap - idle).

Source: NanoFlow paper, section 4.1.3, which has the constant form; power and the phased form are ours.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from ortools.linear_solver import pywraplp
from ortools.sat.python import cp_model

from nanoflow_jax.plan import Resource
from search.hardware import PowerModel
from search.interference import Interference, performance, sms_of_share, useful_shares
from search.schedule import Arc, Schedule, lane_arcs, retime

SHARE_STEP = 0.1
_PERMILLE = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What stage II needs to know of the machine."""

    num_sms: int
    interference: Interference
    power: PowerModel | None


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


def operating_durations(schedule: Schedule, device: Device) -> list[float]:
    """Times at the share with most speed per share; compute is slowed by what the others then take from it, on average."""
    nodes, useful = schedule.nodes, {Resource.COMPUTE: 1.0}
    for resource in (Resource.MEMORY, Resource.NETWORK):
        shares = useful_shares(device.interference, resource, SHARE_STEP)
        useful[resource] = max(shares, key=lambda s: performance(device.interference, resource, s) / s)
    durations = [n.best_us / performance(device.interference, n.resource, useful[n.resource]) for n in nodes]
    taken = sum(useful[n.resource] * d for n, d in zip(nodes, durations, strict=True) if n.resource is not Resource.COMPUTE)
    compute = sum(n.best_us for n in nodes if n.resource is Resource.COMPUTE)
    slower = 1 + taken / compute
    return [d * slower if n.resource is Resource.COMPUTE else d for n, d in zip(nodes, durations, strict=True)]


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


def share_patterns(resources: Sequence[Resource], device: Device) -> list[tuple[float, ...]]:
    """Shares worth giving to kernels that run together, one per resource: compute takes what the others leave."""
    others = [r for r in resources if r is not Resource.COMPUTE]
    choices = [useful_shares(device.interference, r, SHARE_STEP) for r in others]
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
    work = [solver.Constraint(n.best_us, solver.infinity()) for n in schedule.nodes]  # (1)
    total = solver.Constraint(energy_floor_us(schedule, device.power), solver.infinity())  # (2)
    patterns, variables = [], []
    for phase in phases:
        resources = [schedule.nodes[v].resource for v in phase.nodes]
        patterns.append(share_patterns(resources, device))
        variables.append([])
        for shares in patterns[-1]:
            x = solver.NumVar(0.0, solver.infinity(), "")
            solver.Objective().SetCoefficient(x, 1.0)
            total.SetCoefficient(x, 1.0)
            for v, resource, share in zip(phase.nodes, resources, shares, strict=True):
                work[v].SetCoefficient(x, performance(device.interference, resource, share))
            variables[-1].append(x)
    solver.Objective().SetMinimization()
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        raise AssertionError("the phase program always has a solution: give every phase enough time")
    times = [[x.solution_value() for x in row] for row in variables]
    return _phased_allocation(schedule, device, phases, patterns, times)


def _phased_allocation(schedule, device, phases, patterns, times) -> Allocation:
    """Lays the phases end to end. A node with more time than its work needs is slowed down evenly, so that it ends in time."""
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
    # Dropped slivers may leave a node a millionth short; speeds then come out that much above the map.
    fixed = [dataclasses.replace(g, performance=g.performance * schedule.nodes[g.node].best_us / done[g.node]) for g in grants]
    fixed.sort(key=lambda g: (g.node, g.start_us))
    return Allocation(schedule=schedule, grants=tuple(fixed), period_us=period, bound_us=period)


def constant(
    schedule: Schedule,
    dependencies: Sequence[Arc],
    device: Device,
    *,
    work_limit: float,
    time_limit_s: float,
    seed: int = 0,
    hint: Sequence[float] | None = None,
    at_most_us: float | None = None,
) -> Allocation | None:
    """The integer program of the constant form; None if nothing of at most `at_most_us` was found within the limits.

    `hint` gives a share per node to start from. Limits as in stage I: deterministic work first, wall-clock as a safety net.
    """
    tick = schedule.period_us / 1500
    arcs = [*dependencies, *lane_arcs(schedule)]
    cp = cp_model.CpModel()
    floor = max(energy_floor_us(schedule, device.power), schedule.period_us)
    upper = math.ceil((at_most_us or sum(n.best_us for n in schedule.nodes)) / tick)
    if math.floor(floor / tick) > upper:
        return None
    period = cp.new_int_var(math.floor(floor / tick), upper, "T")
    starts, durations, demands, options = [], [], [], []
    for v, node in enumerate(schedule.nodes):
        shares = [s for s in useful_shares(device.interference, node.resource, SHARE_STEP)]
        table = [math.ceil(node.best_us / performance(device.interference, node.resource, s) / tick) for s in shares]
        pick = cp.new_int_var(0, len(shares) - 1, f"q{v}")
        duration = cp.new_int_var(min(table), max(table), f"d{v}")
        demand = cp.new_int_var(1, _PERMILLE, f"r{v}")
        cp.add_element(pick, table, duration)  # (1)
        cp.add_element(pick, [math.floor(s * _PERMILLE + 1e-6) for s in shares], demand)
        starts.append(cp.new_int_var(0, 4 * upper, f"s{v}"))
        durations.append(duration)
        demands.append(demand)
        options.append((pick, shares))
    for a in arcs:
        cp.add(starts[a.head] >= starts[a.tail] + durations[a.tail] - a.layers * period)  # (2)
    cp.add(starts[0] == 0)
    windows = [math.floor(s / schedule.period_us + 1e-9) for s in schedule.starts]
    _add_shares(cp, starts, durations, demands, period, windows, upper)
    cp.minimize(period)
    if hint is not None:
        for (pick, shares), share in zip(options, hint, strict=True):
            cp.add_hint(pick, min(range(len(shares)), key=lambda i: abs(shares[i] - share)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = work_limit
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(cp)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    chosen = [shares[solver.value(pick)] for pick, shares in options]
    at = [solver.value(s) for s in starts]
    allocation = _constant_allocation(schedule, arcs, device, chosen, at, solver.value(period), tick)
    bound = max(solver.best_objective_bound * tick - tick * len(schedule.nodes), floor)
    return dataclasses.replace(allocation, bound_us=bound, work=solver.response_proto.deterministic_time)


def _add_shares(cp, starts, durations, demands, period, windows, upper) -> None:
    """(3): two nodes run together in some layers if their windows differ by at most the number of copies made."""
    copies = max(windows) - min(windows) + 2
    intervals, heights = [], []
    for v, (s, d, r) in enumerate(zip(starts, durations, demands, strict=True)):
        for copy in range(copies):
            begin, end = s, cp.new_int_var(0, (6 + copies) * upper, f"e{v}_{copy}")
            if copy:
                begin = cp.new_int_var(0, (6 + copies) * upper, f"b{v}_{copy}")
                cp.add(begin == s + copy * period)
            intervals.append(cp.new_interval_var(begin, d, end, f"i{v}_{copy}"))
            heights.append(r)
    cp.add_cumulative(intervals, heights, _PERMILLE)


def _constant_allocation(schedule, arcs, device, shares, at, period, tick) -> Allocation:
    """The solver's order at exact times.

    Of two nodes that may not run together, the one that ends first goes first. If three that may in pairs then meet with too
    large a sum, every pair keeps the solver's order.
    """
    nodes = schedule.nodes
    speed = [performance(device.interference, n.resource, s) for n, s in zip(nodes, shares, strict=True)]
    exact = [n.best_us / p for n, p in zip(nodes, speed, strict=True)]
    ticks = [math.ceil(d / tick) for d in exact]

    def ordered(least_sum: float) -> Schedule:
        order = list(arcs)
        for u, v in itertools.permutations(range(len(nodes)), 2):
            if shares[u] + shares[v] > least_sum:
                # v starts after u of `k` layers later has ended (k may be negative): keep that.
                k = (at[v] - at[u] - ticks[u]) // period
                order.append(Arc(tail=u, head=v, layers=-k))
        return retime(schedule, exact, order)

    placed = ordered(1 + 1e-9)
    if _most_shares(placed, shares) > 1 + 1e-9:
        placed = ordered(0.0)
    grants = tuple(
        Grant(node=v, start_us=s, stop_us=s + exact[v], share=shares[v], performance=speed[v])
        for v, s in enumerate(placed.starts)
    )
    return Allocation(schedule=schedule, grants=grants, period_us=placed.period_us, bound_us=0.0)


def _most_shares(schedule: Schedule, shares: Sequence[float]) -> float:
    """The largest sum of shares in flight; it is reached where a node starts."""
    period, eps = schedule.period_us, 1e-9 * schedule.period_us
    most = 0.0
    for at in schedule.starts:
        held = 0.0
        for s, d, share in zip(schedule.starts, schedule.durations, shares, strict=True):
            into = (at - s + eps) % period
            held += share * ((into < d - eps) + (into + period < d - eps))
        most = max(most, held)
    return most

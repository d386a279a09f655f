"""Stage II with one share for each nano-operation's whole life: what kernels with a fixed SM budget run.

The order of lanes is given. Choose share index q[v], start s[v] and period T. Minimise T
subject to
 (1) duration is the table's entry time alone / P(share);
 (2) dependencies and the lane order of stage I: s[head] >= s[tail] + duration[tail] - layers T;
 (3) starts stay in their windows of stage I, and at every instant the shares sum to at most 1: one cumulative constraint over
     copies at s, s + T, s + 2 T ..., as many as windows can differ.

A schedule to start from comes from issuing nano-operations in the window's order, each as soon as it may run, with shares found
by coordinate descent; the integer program then only has to beat it.
Source: NanoFlow paper, section 4.1.3.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from ortools.sat.python import cp_model

from nanoflow_jax.plan import Resource
from search.interference import performance, useful_shares
from search.resources import SHARE_STEP, Allocation, Device, Grant
from search.schedule import Arc, Schedule, lane_arcs, retime

_PERMILLE = 1000
WARM_UP_WINDOWS = 14
PASSES = 4


def levels(schedule: Schedule, device: Device) -> list[list[float]]:
    """The shares each node may hold."""
    beside_network = any(n.resource is Resource.NETWORK for n in schedule.nodes)
    shares = {
        r: useful_shares(device.interference, r, device.num_sms, SHARE_STEP, beside_network=beside_network) for r in Resource
    }
    return [shares[n.resource] for n in schedule.nodes]


def issue_in_order(schedule: Schedule, arcs: Sequence[Arc], shares: Sequence[float], device: Device) -> Schedule | None:
    """The steady state when nano-operations are issued in the window's order; None if it does not repeat every layer.

    Each starts once what it waits for has ended, its lane and enough share are free, and the one issued before it has started.
    """
    nodes = schedule.nodes
    durations = [n.best_us / performance(device.interference, n.resource, s) for n, s in zip(nodes, shares, strict=True)]
    windows = [math.floor(s / schedule.period_us + 1e-9) for s in schedule.starts]
    order = sorted(range(len(nodes)), key=lambda v: (schedule.starts[v] - windows[v] * schedule.period_us, v))
    waits: list[list[tuple[int, int]]] = [[] for _ in nodes]
    for a in arcs:
        # In windows: the tail's instance that the head of this window waits for is so many windows back.
        waits[a.head].append((a.tail, a.layers + windows[a.head] - windows[a.tail]))
    starts: list[list[float]] = []
    running: list[tuple[float, float]] = []
    clock = 0.0
    for w in range(WARM_UP_WINDOWS):
        starts.append([math.inf] * len(nodes))
        for v in order:
            for tail, back in waits[v]:
                if 0 <= w - back <= w and starts[w - back][tail] < math.inf:
                    clock = max(clock, starts[w - back][tail] + durations[tail])
            running = sorted(r for r in running if r[0] > clock + 1e-9)
            while running and sum(s for _, s in running) + shares[v] > 1 + 1e-9:
                clock = max(clock, running.pop(0)[0])
            running.append((clock + durations[v], shares[v]))
            starts[w][v] = clock
    steps = [b - a for a, b in zip(starts[-2], starts[-1], strict=True)]
    period = steps[0]
    if max(steps) - min(steps) > 1e-9 * starts[-1][0]:
        return None
    origin = starts[-1][order[0]]
    at = tuple(s - origin + windows[v] * period for v, s in enumerate(starts[-1]))
    return dataclasses.replace(schedule, starts=at, durations=tuple(durations), period_us=period)


def descend(
    schedule: Schedule, arcs: Sequence[Arc], first: Sequence[float], device: Device
) -> tuple[Schedule, list[float]] | None:
    """Coordinate descent over shares on the period of `issue_in_order`, from about `first` and from the whole device."""
    found = [_descend(schedule, arcs, f, device) for f in (first, [1.0] * len(first))]
    return min((f for f in found if f is not None), key=lambda f: f[0].period_us, default=None)


def _descend(
    schedule: Schedule, arcs: Sequence[Arc], first: Sequence[float], device: Device
) -> tuple[Schedule, list[float]] | None:
    choices = levels(schedule, device)
    pick = [min(range(len(c)), key=lambda i: abs(c[i] - share)) for c, share in zip(choices, first, strict=True)]

    def run(p: Sequence[int]) -> Schedule | None:
        return issue_in_order(schedule, arcs, [c[i] for c, i in zip(choices, p, strict=True)], device)

    best = run(pick)
    for _ in range(PASSES):
        before = best
        for v, step in itertools.product(range(len(pick)), (-2, -1, 1, 2)):
            if not 0 <= pick[v] + step < len(choices[v]):
                continue
            trial = [i + step * (u == v) for u, i in enumerate(pick)]
            found = run(trial)
            if found is not None and (best is None or found.period_us < best.period_us * (1 - 1e-6)):
                best, pick = found, trial
        if best is before:
            break
    return None if best is None else (best, [c[i] for c, i in zip(choices, pick, strict=True)])


def constant(
    schedule: Schedule,
    dependencies: Sequence[Arc],
    device: Device,
    *,
    work_limit: float,
    time_limit_s: float,
    seed: int = 0,
    first: Sequence[float],
) -> Allocation | None:
    """The best allocation of constant shares that is found within the limits, or None.

    `first` gives a share per node to start from. Limits as in stage I: deterministic work first, wall-clock as a safety net.
    """
    arcs = [*dependencies, *lane_arcs(schedule)]
    tick = schedule.period_us / 1500
    start = descend(schedule, arcs, first, device)
    incumbent = None if start is None else _granted(*start, device)
    longest = incumbent.period_us if incumbent else sum(n.best_us for n in schedule.nodes)
    upper = math.ceil(longest / tick)
    cp = cp_model.CpModel()
    period = cp.new_int_var(0, upper, "T")
    starts, durations, demands, options = [], [], [], []
    for v, (node, shares) in enumerate(zip(schedule.nodes, levels(schedule, device), strict=True)):
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
    for s, w in zip(starts, windows, strict=True):
        cp.add(s >= w * period)  # (3)
        cp.add(s <= (w + 1) * period)
    _add_shares(cp, starts, durations, demands, period, windows, upper)
    cp.minimize(period)
    for (pick, shares), share in zip(options, start[1] if start else first, strict=True):
        cp.add_hint(pick, min(range(len(shares)), key=lambda i: abs(shares[i] - share)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.max_deterministic_time = work_limit
    solver.parameters.max_time_in_seconds = time_limit_s
    status = solver.solve(cp)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return incumbent
    chosen = [shares[solver.value(pick)] for pick, shares in options]
    at = [solver.value(s) for s in starts]
    allocation = _constant_allocation(schedule, arcs, device, chosen, at, solver.value(period), tick)
    bound = max(0.0, solver.best_objective_bound * tick - tick * len(schedule.nodes))
    if incumbent is not None and incumbent.period_us <= allocation.period_us:
        allocation = incumbent
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
    return _granted(placed, shares, device)


def _granted(schedule: Schedule, shares: Sequence[float], device: Device) -> Allocation:
    grants = tuple(
        Grant(
            node=v, start_us=s, stop_us=s + d, share=shares[v],
            performance=performance(device.interference, schedule.nodes[v].resource, shares[v]),
        )
        for v, (s, d) in enumerate(zip(schedule.starts, schedule.durations, strict=True))
    )  # fmt: skip
    return Allocation(schedule=schedule, grants=grants, period_us=schedule.period_us, bound_us=0.0)


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

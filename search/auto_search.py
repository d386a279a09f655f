"""The whole search: both partitions through stage I, the pool of structures through stage II, the best as a plan."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Mapping, Sequence

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import TILE, NanoBatch, Partition, PipelinePlan, Shares
from nanoflow_jax.workload import BatchMix
from search.build_plan import build_plan
from search.constant import constant
from search.problem import GROUP_OF, Costing, build_problem
from search.profile_table import ProfileTable
from search.resources import Allocation, Device, ideal, operating_durations, phased, serial
from search.schedule import CyclicOrderError, Node, Schedule, as_solved, dependency_arcs, lane_arcs, retime, tighten
from search.stage_one import Limits, Report, StageOne, search_structure
from search.structure import Structure

STAGE_ONE_WORK = 14.0
STAGE_TWO_WORK = 1.5
CONSTANT_CANDIDATES = 6
REFINEMENTS = 4
CLIMBERS = 4
CLIMBS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """`work` scales the deterministic limits; `time_limit_s` is the wall-clock safety net. Two threads are used."""

    shares: Shares = "constant"
    seed: int = 0
    work: float = 1.0
    time_limit_s: float = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The plan asked for, those of the other forms of shares that were solved, and stage I's outcome for each partition."""

    plan: PipelinePlan
    plans: dict[Shares, PipelinePlan]
    costings: dict[Partition, Costing]
    stage_one: dict[Partition, StageOne]
    solve_s: float
    cpu_s: float
    timed_out: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Candidate:
    costing: Costing
    allocation: Allocation


def auto_search(
    model: ModelConfig,
    table: ProfileTable,
    mix: BatchMix,
    options: Options | None = None,
    report: Report | None = None,
) -> Outcome:
    """Finds the plan of one batch mix on the device and the ranks of `table`.

    There is always an answer: at worst, when time runs out at once, an even split run one nano-operation after another.
    `report` is called with (what is being solved, incumbent, bound), in microseconds, from the solver's threads.

    Raises:
      ProfileError: the table does not cover the model's kernels at this batch.
    """
    options = options or Options()
    begun, cpu = time.monotonic(), time.process_time()
    partitions: tuple[Partition, ...] = ("none",) if table.tp == 1 else ("all_gather", "all_reduce")
    costings: dict[Partition, Costing] = {p: Costing(model=model, table=table, mix=mix, partition=p) for p in partitions}
    device = Device(num_sms=table.num_sms, interference=table.interference, power=table.power)
    # Stage I may use most of the time, not all: stage II must still run.
    limits = Limits(work=options.work * STAGE_ONE_WORK, deadline=begun + 0.7 * options.time_limit_s, seed=options.seed)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        stage_one = _first_stage(costings, limits, threads, report)
        met: list[tuple[Partition, Structure]] = [(p, s) for p in costings for s in stage_one[p].pool]
        found = _second_stage(costings, met, device, options, begun + options.time_limit_s, threads)
    plans: dict[Shares, PipelinePlan] = {
        form: build_plan(c.costing, c.allocation, form, device, stage_one, costings) for form, c in found.items()
    }
    return Outcome(
        plan=plans[options.shares],
        plans=plans,
        costings=costings,
        stage_one=stage_one,
        solve_s=time.monotonic() - begun,
        cpu_s=time.process_time() - cpu,
        timed_out=time.monotonic() >= begun + options.time_limit_s or any(s.timed_out for s in stage_one.values()),
    )


def _first_stage(
    costings: Mapping[Partition, Costing], limits: Limits, threads: concurrent.futures.Executor, report: Report | None
) -> dict[Partition, StageOne]:
    """Stage I of each partition, side by side."""

    def search(p: Partition) -> StageOne:
        problem = build_problem(costings[p])

        def say(label: str, incumbent: float, bound: float) -> None:
            if report is not None:
                report(f"{p} {label}", incumbent * problem.tick_us, bound * problem.tick_us)

        return search_structure(problem, limits, say)

    return dict(zip(costings, threads.map(search, costings), strict=True))


def _second_stage(
    costings: Mapping[Partition, Costing],
    met: Sequence[tuple[Partition, Structure]],
    device: Device,
    options: Options,
    deadline: float,
    threads: concurrent.futures.Executor,
) -> dict[Shares, _Candidate]:
    """The best allocation of each form: phased over all structures met, constant over the few that are best phased."""
    schedules = []
    for p, s in met:
        costing = costings[p]
        schedules.append((costing, tighten(as_solved(s, costing), costing)))
    best_ideal = min(schedules, key=lambda x: x[1].period_us)
    ranked = sorted((_refined(c, s, device) for c, s in schedules), key=lambda x: x.allocation.period_us)
    # Constant shares need the rest of the time.
    climbing = deadline - 0.2 * options.time_limit_s
    rounds = max(1, round(CLIMBS * options.work))
    climbed = list(threads.map(lambda c: _climbed(c, device, rounds, climbing), _distinct(ranked)[:CLIMBERS]))
    ranked = sorted((*climbed, *ranked), key=lambda x: x.allocation.period_us)
    found: dict[Shares, _Candidate] = {
        "ideal": _Candidate(costing=best_ideal[0], allocation=ideal(best_ideal[1])),
        "phased": ranked[0],
    }
    if options.shares == "constant":
        work = options.work * STAGE_TWO_WORK
        few = _distinct(ranked)[:CONSTANT_CANDIDATES]
        solved = threads.map(lambda c: _constant(c, work, deadline, options.seed, device), few)
        found["constant"] = min(solved, key=lambda c: c.allocation.period_us)
    return found


def _refined(costing: Costing, schedule: Schedule, device: Device) -> _Candidate:
    """Phased shares for one order of lanes.

    The order of borders, which the program takes as given, comes from times without interference; it is also tried with the
    times that nano-operations take at their most useful shares, and then with those of the best allocation so far.
    """
    arcs = [*dependency_arcs(schedule.nodes, costing), *lane_arcs(schedule)]
    best = phased(schedule, device)
    durations: Sequence[float] = operating_durations(schedule, device)
    for _ in range(REFINEMENTS):
        allocation = phased(retime(schedule, durations, arcs), device)
        if allocation.period_us >= best.period_us * (1 - 1e-4) and best.schedule is not schedule:
            break
        if allocation.period_us < best.period_us:
            best = allocation
        durations = best.durations()
    return _Candidate(costing=costing, allocation=best)


def _moved(schedule: Schedule, costing: Costing, groups: frozenset[str], at: int, to: int) -> Schedule:
    """The cut at token `at` of the named groups moved to token `to`, with the times that follow."""

    def moved(n: Node) -> Node:
        if GROUP_OF[n.operation] not in groups or at not in (n.batch.start, n.batch.stop):
            return n
        start, stop = (to if t == at else t for t in (n.batch.start, n.batch.stop))
        batch = NanoBatch(start=start, stop=stop)
        best_us, energy_j = costing.time_of(n.operation, batch.tokens), costing.energy_of(n.operation, batch.tokens)
        return dataclasses.replace(n, batch=batch, best_us=best_us, energy_j=energy_j)

    return dataclasses.replace(schedule, nodes=tuple(moved(n) for n in schedule.nodes))


def _moves(schedule: Schedule) -> list[tuple[frozenset[str], int, int]]:
    """(groups, cut, new place): every cut by one tile either way, alone and together with those of other groups beside it."""
    cuts: dict[int, set[str]] = {}
    room: dict[str, tuple[int, ...]] = {}
    for n in schedule.nodes:
        group = GROUP_OF[n.operation]
        room[group] = tuple(sorted({*room.get(group, ()), n.batch.start, n.batch.stop}))
    for group, ends in room.items():
        for cut in ends[1:-1]:
            cuts.setdefault(cut, set()).add(group)
    moves = []
    for cut, owners in cuts.items():
        sets = {frozenset({g}) for g in owners} | {frozenset(owners)}
        for to in (cut - TILE, cut + TILE):
            for groups in sorted(sets, key=sorted):
                neighbours = [(e[i - 1], e[i + 1]) for e in (room[g] for g in groups) for i in [e.index(cut)]]
                if all(low < to < high for low, high in neighbours):
                    moves.append((groups, cut, to))
    return moves


def _climbed(candidate: _Candidate, device: Device, rounds: int, deadline: float) -> _Candidate:
    """Moves cuts by a tile as long as the phased period gets shorter, the order of lanes kept."""
    best = candidate
    for _ in range(rounds):
        better = best
        schedule = best.allocation.schedule
        lanes = lane_arcs(schedule)
        for move in _moves(schedule):
            if time.monotonic() >= deadline:
                return better
            trial = _moved(schedule, best.costing, *move)
            arcs = [*dependency_arcs(trial.nodes, best.costing), *lanes]
            try:
                allocation = phased(retime(trial, operating_durations(trial, device), arcs), device)
            except CyclicOrderError:
                continue
            if allocation.period_us < better.allocation.period_us * (1 - 1e-4):
                better = dataclasses.replace(best, allocation=allocation)
        if better is best:
            break
        best = _refined(better.costing, better.allocation.schedule, device)
    return best


def _distinct(ranked: Sequence[_Candidate]) -> list[_Candidate]:
    """Without those that repeat an earlier one's cuts and lane order."""
    seen, kept = set(), []
    for c in ranked:
        s = c.allocation.schedule
        key = (c.costing.partition, tuple((n.operation, n.batch.start, n.batch.stop) for n in s.nodes))
        key = (*key, tuple((a.tail, a.head, a.layers) for a in lane_arcs(s)))
        if key not in seen:
            seen.add(key)
            kept.append(c)
    return kept


def _constant(candidate: _Candidate, work: float, deadline: float, seed: int, device: Device) -> _Candidate:
    """The constant form on one structure, started from the phased shares' means; at worst everything one after another."""
    schedule = candidate.allocation.schedule
    fallback = serial(schedule)
    allocation = constant(
        schedule, dependency_arcs(schedule.nodes, candidate.costing), device, work_limit=work, seed=seed,
        time_limit_s=max(deadline - time.monotonic(), 0.01), first=candidate.allocation.mean_shares(),
    )  # fmt: skip
    better = allocation if allocation is not None and allocation.period_us < fallback.period_us else fallback
    return dataclasses.replace(candidate, allocation=better)

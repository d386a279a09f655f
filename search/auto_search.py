"""The whole search: both partitions through stage I, the pool of structures through stage II, the best as a plan.

Power is no part of either stage: it sets a floor to every period (`resources.slowed`). Where that is the limit, many structures
end at the same period, and the search goes on among them, for the one that is fastest without it (`_Candidate`).
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping, Sequence

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import TILE, NanoBatch, Partition, PipelinePlan, Shares
from nanoflow_jax.workload import BatchMix
from search.build_plan import build_plan
from search.constant import constant
from search.problem import GROUP_OF, Costing, build_problem
from search.profile_table import ProfileTable
from search.resources import Allocation, Device, energy_floor_us, ideal, operating_durations, phased, serial, slowed
from search.schedule import CyclicOrderError, Node, Schedule, as_solved, dependency_arcs, lane_arcs, retime, tighten
from search.stage_one import Limits, Report, StageOne, add_shared_cuts, search_structure
from search.structure import Structure

STAGE_ONE_WORK = 14.0
STAGE_TWO_WORK = 1.5
CONSTANT_CANDIDATES = 6
REFINEMENTS = 4
CLIMBERS = 4
CLIMBS = 8
ROUNDING = 1e-4

LAUNCH_US = 5.0
"""What a nano-operation costs beyond its time when candidates that power makes equal are ranked: about the gap that a launch
leaves on a stream. It ranks only, and is in no predicted period."""

TIED = 1e-3
"""Periods that power limits are equal if they differ by less, relative to the best: below a tick of the constant form's solver
(1/1500 of a period) and an order of magnitude below what interpolated times are good for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """`work` scales the deterministic limits; `time_limit_s` is the wall-clock safety net. Two threads are used."""

    shares: Shares = "constant"
    seed: int = 0
    work: float = 1.0
    time_limit_s: float = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The plan asked for, those of the other forms of shares that were solved, and stage I's outcome for each partition.

    `unlimited_us` are the periods that the plans would have if power were no limit.
    """

    plan: PipelinePlan
    plans: dict[Shares, PipelinePlan]
    unlimited_us: dict[Shares, float]
    costings: dict[Partition, Costing]
    stage_one: dict[Partition, StageOne]
    solve_s: float
    cpu_s: float
    timed_out: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Candidate:
    """An allocation as found, before power slows it down."""

    costing: Costing
    allocation: Allocation

    @functools.cached_property
    def floor_us(self) -> float:
        return energy_floor_us(self.allocation.schedule, self.costing.table.power)

    @property
    def period_us(self) -> float:
        """Under the power cap."""
        return max(self.allocation.period_us, self.floor_us)


def _tied_us(candidates: Sequence[_Candidate]) -> float:
    """The period up to which candidates are equal because power limits the best of them; 0 if it does not."""
    tied_us = min(c.period_us for c in candidates) * (1 + TIED)
    limited = any(c.allocation.period_us < c.floor_us <= tied_us for c in candidates)
    return tied_us if limited else 0.0


def _rank(candidate: _Candidate, tied_us: float) -> tuple[float, float]:
    """By period; of those that power makes equal, by period without its limit and number of launches."""
    if candidate.period_us > tied_us:
        return candidate.period_us, 0.0
    return tied_us, candidate.allocation.period_us + LAUNCH_US * len(candidate.allocation.schedule.nodes)


def _ranked(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Best first, those of equal rank in the order given."""
    tied_us = _tied_us(candidates)
    return sorted(candidates, key=lambda c: _rank(c, tied_us))


def _improves(new: _Candidate, old: _Candidate) -> bool:
    """Whether `new` ranks before `old` by more than rounding."""
    tied_us = _tied_us((new, old))
    (period, unlimited), (old_period, old_unlimited) = _rank(new, tied_us), _rank(old, tied_us)
    if period == old_period:
        return unlimited < old_unlimited * (1 - ROUNDING)
    return period < old_period * (1 - ROUNDING)


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
    device = Device(num_sms=table.num_sms, interference=table.interference)
    # Stage I may use most of the time, not all: stage II must still run.
    limits = Limits(work=options.work * STAGE_ONE_WORK, deadline=begun + 0.7 * options.time_limit_s, seed=options.seed)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        stage_one = _first_stage(costings, limits, threads, report)
        stage_one, found = _second_stage(costings, stage_one, device, options, limits, begun + options.time_limit_s, threads)
    plans: dict[Shares, PipelinePlan] = {}
    for form, c in found.items():
        allocation = c.allocation if form == "ideal" else slowed(c.allocation, table.power)
        plans[form] = build_plan(c.costing, allocation, form, device, stage_one, costings)
    return Outcome(
        plan=plans[options.shares],
        plans=plans,
        unlimited_us={form: c.allocation.period_us for form, c in found.items()},
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
    stage_one: Mapping[Partition, StageOne],
    device: Device,
    options: Options,
    limits: Limits,
    deadline: float,
    threads: concurrent.futures.Executor,
) -> tuple[dict[Partition, StageOne], dict[Shares, _Candidate]]:
    """The best allocation of each form: phased over all structures met, constant over the few that are best phased.

    Where power limits the best of them, once more with structures of shared cuts; constant shares are then tried for the few
    best of either kind, as these need fewer changes of shares. Returns stage I's outcome with all structures, too.
    """
    # Constant shares need the rest of the time.
    climbing = deadline - 0.2 * options.time_limit_s
    rounds = max(1, round(CLIMBS * options.work))

    def phased_of(pool: Sequence[_Candidate]) -> list[_Candidate]:
        refined = _ranked([_refined(c.costing, c.allocation.schedule, device) for c in pool])
        climbed = threads.map(lambda c: _climbed(c, device, rounds, climbing), _distinct(refined)[:CLIMBERS])
        return _ranked([*climbed, *refined])

    stages: dict[Partition, StageOne] = dict(stage_one)
    ideals = [_ideal(costings[p], s) for p in costings for s in stages[p].pool]
    kinds = [phased_of(ideals)]
    if _tied_us(kinds[0]):
        stages.update({p: add_shared_cuts(s, limits) for p, s in stage_one.items()})
        more = [_ideal(costings[p], s) for p in costings for s in stages[p].pool[len(stage_one[p].pool) :]]
        ideals += more
        kinds.append(phased_of(more))
    found: dict[Shares, _Candidate] = {
        "ideal": min(ideals, key=lambda c: c.allocation.period_us),
        "phased": _ranked(list(itertools.chain(*kinds)))[0],
    }
    if options.shares == "constant":
        work = options.work * STAGE_TWO_WORK
        few = [c for ranked in kinds for c in _distinct(ranked)[:CONSTANT_CANDIDATES]]
        solved = threads.map(lambda c: _constant(c, work, deadline, options.seed, device), few)
        found["constant"] = _ranked(list(solved))[0]
    return stages, found


def _ideal(costing: Costing, structure: Structure) -> _Candidate:
    return _Candidate(costing=costing, allocation=ideal(tighten(as_solved(structure, costing), costing)))


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
        if allocation.period_us >= best.period_us * (1 - ROUNDING) and best.schedule is not schedule:
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
    """Moves cuts by a tile as long as the phased allocation improves, the order of lanes kept."""
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
            moved = _Candidate(costing=best.costing, allocation=allocation)
            if _improves(moved, better):
                better = moved
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
    return _Candidate(costing=candidate.costing, allocation=better)

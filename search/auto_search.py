"""The whole search: both partitions through stage I, the pool of structures through stage II, the best as a plan."""

import concurrent.futures
import dataclasses
import time
from collections.abc import Sequence

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import Partition, PipelinePlan, Shares
from search.build_plan import build_plan, operation_energy
from search.problem import Costing, build_problem
from search.profile_table import ProfileTable
from search.resources import Allocation, Device, constant, ideal, operating_durations, phased, serial
from search.schedule import Schedule, as_solved, dependency_arcs, lane_arcs, retime, tighten
from search.stage_one import Limits, Report, StageOne, search_structure
from search.workload import BatchMix

STAGE_ONE_WORK = 14.0
STAGE_TWO_WORK = 1.5
CONSTANT_CANDIDATES = 6
REFINEMENTS = 4


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
    costings = {p: Costing(model=model, table=table, mix=mix, partition=p) for p in partitions}
    # Stage I may use most of the time, not all: stage II must still run.
    limits = Limits(work=options.work * STAGE_ONE_WORK, deadline=begun + 0.7 * options.time_limit_s, seed=options.seed)

    def first_stage(p: Partition) -> StageOne:
        problem = build_problem(costings[p])

        def say(label: str, incumbent: float, bound: float) -> None:
            if report is not None:
                report(f"{p} {label}", incumbent * problem.tick_us, bound * problem.tick_us)

        return search_structure(problem, limits, say)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        stage_one = dict(zip(partitions, threads.map(first_stage, partitions), strict=True))
        device = Device(num_sms=table.num_sms, interference=table.interference, power=table.power)
        pool = [(costings[p], tighten(as_solved(s, costings[p]), costings[p])) for p in partitions for s in stage_one[p].pool]
        pool = [(c, _with_energy(s, c)) for c, s in pool]
        best_ideal = min(pool, key=lambda x: x[1].period_us)
        ranked = sorted((_refined(c, s, device) for c, s in pool), key=lambda x: x.allocation.period_us)
        deadline = begun + options.time_limit_s
        found: dict[Shares, _Candidate] = {
            "ideal": _Candidate(costing=best_ideal[0], allocation=ideal(best_ideal[1])),
            "phased": ranked[0],
        }
        if options.shares == "constant":
            work = options.work * STAGE_TWO_WORK
            jobs = [(c, work, deadline, options.seed, device) for c in _distinct(ranked)[:CONSTANT_CANDIDATES]]
            solved = list(threads.map(lambda job: _constant(*job), jobs))
            found["constant"] = min(solved, key=lambda c: c.allocation.period_us)
    plans = {form: build_plan(c.costing, c.allocation, form, device, stage_one, costings) for form, c in found.items()}
    return Outcome(
        plan=plans[options.shares],
        plans=plans,
        costings=costings,
        stage_one=stage_one,
        solve_s=time.monotonic() - begun,
        cpu_s=time.process_time() - cpu,
        timed_out=any(s.timed_out for s in stage_one.values()) or time.monotonic() >= deadline,
    )


def _with_energy(schedule: Schedule, costing: Costing) -> Schedule:
    """Nodes whose energy the profile does not know get the power model's."""
    nodes = tuple(
        n if n.energy_j is not None else dataclasses.replace(n, energy_j=operation_energy(costing, n)) for n in schedule.nodes
    )
    return dataclasses.replace(schedule, nodes=nodes)


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
        time_limit_s=max(deadline - time.monotonic(), 0.01), hint=candidate.allocation.mean_shares(),
    )  # fmt: skip
    better = allocation if allocation is not None and allocation.period_us < fallback.period_us else fallback
    return dataclasses.replace(candidate, allocation=better)

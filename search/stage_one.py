"""How many nano-batches: the loop around the integer program, with its seeds, its bound and the pool of structures it met.

Starts with two nano-batches per group (one for prompt attention, which is short), first with the same cut for all groups, then
with every cut free. Then, while the busiest lane has bubbles, groups next to a bubble get one nano-batch more; a count is
kept if the period gets shorter. Each step has a deterministic work limit, so the result repeats for a seed.
Where power turns out to be the limit, structures that only stage II can tell from others are wanted as well: `add_shared_cuts`.
Source: NanoFlow paper, section 4.1.2.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence

from nanoflow_jax.plan import Resource
from search.problem import Problem
from search.structure import Objective, Structure, solve

MAX_PARTS = 4
WORTHWHILE = 0.003  # relative gain for which another nano-batch is accepted
POOL_SLACK = 0.2  # structures up to this much slower than the best stay in the pool, for stage II may prefer them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Deterministic work (solver units, about a CPU second each) and, as a safety net, a wall-clock deadline (monotonic)."""

    work: float
    deadline: float
    seed: int

    def seconds_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageOne:
    """Outcome for one partition of the weights.

    `bound` (ticks) is proven for exactly the counts of `best`. `base` is the best structure at the starting counts with
    `base_bound`. `any_bound` holds for every choice of counts. `pool` is what was met, best first, then what was added to it.
    `tried` lists (counts, period or None, bound).
    """

    best: Structure
    bound: int
    base: Structure
    base_bound: int
    any_bound: int
    pool: tuple[Structure, ...]
    tried: tuple[tuple[tuple[int, ...], int | None, int], ...]
    work: float
    timed_out: bool


Report = Callable[[str, float, float], None]


def base_counts(problem: Problem) -> tuple[int, ...]:
    """Two nano-batches per group, one for prompt attention and for groups of a single tile."""
    return tuple(1 if g.name == "prefill" or g.tiles < 2 else 2 for g in problem.groups)


def search_structure(
    problem: Problem, limits: Limits, report: Report | None = None, objective: Objective = "period"
) -> StageOne:
    """Runs the loop for one partition."""
    run = _Run(problem, limits, report, objective)
    seed = run.seed()
    run.keep([seed])
    base = run.step(base_counts(problem), seed.period, hint=seed, share=0.3)
    best, base_bound = (base or seed), run.tried[-1][2]
    first, bound = best, base_bound
    while True:
        better = None
        for counts in candidate_counts(best):
            if run.exhausted() or counts in [t[0] for t in run.tried]:
                continue
            better = run.step(counts, int(best.period * (1 - WORTHWHILE)), share=0.15)
            if better is not None:
                best, bound = better, run.tried[-1][2]
                break
        if better is None:
            break
    kept = sorted(run.pool.values(), key=lambda s: s.period)
    return StageOne(
        best=best,
        bound=bound,
        base=first,
        base_bound=base_bound,
        any_bound=problem.load_bound(),
        pool=tuple(s for s in kept if s.period <= best.period * (1 + POOL_SLACK)),
        tried=tuple(run.tried),
        work=run.work,
        timed_out=limits.seconds_left() <= 0,
    )


class _Run:
    """Work spent, structures met and counts tried so far."""

    def __init__(self, problem: Problem, limits: Limits, report: Report | None, objective: Objective) -> None:
        self.problem, self.limits, self.report = problem, limits, report
        self.objective: Objective = objective
        self.work = 0.0
        self.pool: dict[tuple, Structure] = {}
        self.tried: list[tuple[tuple[int, ...], int | None, int]] = []

    def exhausted(self) -> bool:
        return self.work >= self.limits.work or self.limits.seconds_left() <= 0

    def keep(self, structures: Sequence[Structure]) -> None:
        for s in structures:
            self.pool.setdefault((s.cuts, lane_orders(s)), s)

    def seed(self) -> Structure:
        """The best of all single cuts shared by every group; always ends with something, be it the sequential order."""
        best = sequential_structure(self.problem)
        for cut in range(1, self.problem.groups[0].stop):
            if self.exhausted():
                break
            cuts = [
                (g.first, min(max(cut, g.first + 1), g.stop - 1), g.stop) if n == 2 else (g.first, g.stop)
                for g, n in zip(self.problem.groups, base_counts(self.problem), strict=True)
            ]
            solved = solve(
                self.problem, base_counts(self.problem), cuts=cuts, work_limit=0.02 * self.limits.work,
                time_limit_s=self.limits.seconds_left(), seed=self.limits.seed, at_most=best.period, objective=self.objective,
            )  # fmt: skip
            self.work += solved.work
            self.keep(solved.pool)
            best = solved.best or best
        return best

    def step(self, counts: tuple[int, ...], at_most: int, *, hint: Structure | None = None, share: float) -> Structure | None:
        """The best structure of at most `at_most` ticks with these counts, all cuts free, if one is found in time."""
        report, label = self.report, "/".join(map(str, counts))
        progress = None if report is None else lambda t, b: report(label, t, b)
        solved = solve(
            self.problem, counts, at_most=at_most, hint=hint, work_limit=share * self.limits.work,
            time_limit_s=self.limits.seconds_left(), seed=self.limits.seed, progress=progress, objective=self.objective,
        )  # fmt: skip
        self.work += solved.work
        self.keep(solved.pool)
        self.tried.append((counts, solved.best.period if solved.best else None, solved.bound))
        return solved.best


def add_shared_cuts(stage: StageOne, limits: Limits) -> StageOne:
    """`stage` with more structures at the end of its pool: for every tile border the best whose groups are all cut there.

    Groups that lie on one side of the border stay whole, so these have fewest nano-operations. Without interference and power
    that seldom gains anything, which is why the loop above does not ask for it.
    """
    problem = stage.best.problem
    added, work = list(stage.pool), stage.work
    for border in range(1, problem.groups[0].stop):
        cuts = [(g.first, border, g.stop) if g.first < border < g.stop else (g.first, g.stop) for g in problem.groups]
        solved = solve(
            problem, [len(c) - 1 for c in cuts], cuts=cuts, work_limit=0.02 * limits.work, time_limit_s=limits.seconds_left(),
            seed=limits.seed, at_most=int(stage.best.period * (1 + POOL_SLACK)),
        )  # fmt: skip
        added += solved.pool
        work += solved.work
    best = min(added, key=lambda s: s.period)
    if best.period == stage.best.period:
        return dataclasses.replace(stage, pool=tuple(added), work=work)
    return dataclasses.replace(stage, best=best, bound=problem.load_bound(best.counts), pool=tuple(added), work=work)


def sequential_structure(problem: Problem) -> Structure:
    """Base counts, all cuts in the middle, one block after another: feasible always, so that there is always an answer."""
    counts = base_counts(problem)
    cuts = tuple(
        (g.first, g.first + g.tiles // 2, g.stop) if n == 2 else (g.first, g.stop)
        for g, n in zip(problem.groups, counts, strict=True)
    )
    starts, clock = [], 0
    for block in problem.blocks:
        row = []
        for a, b in itertools.pairwise(cuts[block.group]):
            row.append(clock)
            clock += block.duration(problem.groups[block.group], a, b)
        starts.append(tuple(row))
    return Structure(problem=problem, cuts=cuts, starts=tuple(starts), period=clock)


def lane_orders(structure: Structure) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Per resource (block, nano-batch, window) in order of start within the period: what tells two structures apart."""
    orders = []
    for resource in Resource:
        lane = [
            (start % structure.period, b, i, start // structure.period)
            for b, block in enumerate(structure.problem.blocks)
            if block.resource is resource
            for i, start in enumerate(structure.starts[b])
        ]
        orders.append(tuple((b, i, k) for _, b, i, k in sorted(lane)))
    return tuple(orders)


def bubbles(structure: Structure) -> dict[int, int]:
    """Idle ticks of the busiest lane, booked on the groups beside them: what starts next, and what runs elsewhere meanwhile."""
    problem, period = structure.problem, structure.period
    spans = [
        (start % period, structure.duration(b, i), b)
        for b in range(len(problem.blocks))
        for i, start in enumerate(structure.starts[b])
    ]
    load = {r: sum(d for _, d, b in spans if problem.blocks[b].resource is r) for r in Resource}
    busiest = max(load, key=lambda r: load[r])
    lane = sorted(s for s in spans if problem.blocks[s[2]].resource is busiest)
    idle: dict[int, int] = {}
    for (start, duration, _), (after, _, b) in zip(lane, lane[1:] + lane[:1], strict=True):
        begin = start + duration
        gap = (after - begin) % period
        if gap == 0 or load[busiest] == period:
            continue
        beside = {problem.blocks[b].group}
        for s, d, other in spans:
            if problem.blocks[other].resource is not busiest and ((s - begin) % period < gap or (begin - s) % period < d):
                beside.add(problem.blocks[other].group)
        for g in beside:
            idle[g] = idle.get(g, 0) + gap
    return idle


def candidate_counts(structure: Structure) -> list[tuple[int, ...]]:
    """Counts to try next: one more for each group at a bubble, largest bubbles first, then for attention groups together."""
    problem, counts = structure.problem, structure.counts
    idle = bubbles(structure)
    names = [g.name for g in problem.groups]

    def raised(groups: Sequence[int]) -> tuple[int, ...] | None:
        new = [c + (g in groups) for g, c in enumerate(counts)]
        fits = all(n <= min(MAX_PARTS, group.tiles) for n, group in zip(new, problem.groups, strict=True))
        return tuple(new) if fits else None

    singles = [raised([g]) for g in sorted(idle, key=lambda g: -idle[g])]
    sides = [
        [g for g, n in enumerate(names) if n in side] for side in (("qkv", "o"), ("qkv", "decode", "o"), ("qkv", "decode"))
    ]
    joint = [raised(side) for side in sides if any(g in idle for g in side)]
    return [c for c in dict.fromkeys([*singles, *joint]) if c is not None]

"""Stage I against a hand-worked instance, brute force, the MILP, and its own bound."""

import itertools
import random
import time
from collections.abc import Iterator

import pytest

from nanoflow_jax.config import preset
from nanoflow_jax.plan import TILE, Resource
from nanoflow_jax.workload import parse_workload, steady_mix
from search.analytic import analytic_profile
from search.hardware import hardware
from search.problem import Block, Costing, Edge, Group, Problem, build_problem
from search.stage_one import Limits, base_counts, candidate_counts, search_structure, sequential_structure
from search.structure import Structure, solve
from tests.search.milp import solve_milp

C, M, N = Resource.COMPUTE, Resource.MEMORY, Resource.NETWORK


def _problem(groups: list[tuple[int, int]], blocks: list[tuple[Resource, int, list[int]]], edges: list[tuple]) -> Problem:
    """Groups over tiles (first, stop); blocks (resource, group, ticks by size); edges (producer, consumer, back, causal)."""

    def table(group: tuple[int, int], by_size: list[int]) -> tuple[tuple[int, ...], ...]:
        span = range(group[0], group[1] + 1)
        return tuple(tuple(by_size[b - a - 1] if a < b else 0 for b in span) for a in span)

    return Problem(
        tick_us=1.0,
        partition="none",
        groups=tuple(Group(name=f"g{i}", first=a, stop=b, start=a * TILE, end=b * TILE) for i, (a, b) in enumerate(groups)),
        blocks=tuple(
            Block(name=f"b{i}", operations=(f"b{i}",), resource=r, group=g, ticks=table(groups[g], t))
            for i, (r, g, t) in enumerate(blocks)
        ),
        edges=tuple(Edge(producer=p, consumer=c, previous_layer=back, causal_first=first) for p, c, back, first in edges),
    )


def _solve(problem: Problem, counts: tuple[int, ...], **options):
    return solve(problem, counts, work_limit=5.0, time_limit_s=30.0, **options)


# A compute block (2 ticks per tile, 3 for both: a wave is shared) feeds a memory block (2 per tile, 4 for both), which feeds
# the next layer's compute block.
#   unsplit          C = 3, then M = 4, nothing overlaps:                                period 7
#   split, one layer C0 0-2, C1 2-4, M0 2-4, M1 4-6:                                     makespan 6
#   split, periodic  M1 at 4-6 runs beside the next layer's C0, which only needs M0:     period 4
# 4 is optimal for two nano-batches: the compute lane is full. The near miss keeps layers apart and stays at 6.
TWO_LANES = _problem([(0, 2), (0, 2)], [(C, 0, [2, 3]), (M, 1, [2, 4])], [(0, 1, False, None), (1, 0, True, None)])


def test_hand_worked_instance() -> None:
    split = _solve(TWO_LANES, (2, 2))
    assert split.best is not None
    assert (split.best.period, split.bound) == (4, 4)
    assert split.best.cuts == ((0, 1, 2), (0, 1, 2))
    starts = split.best.starts
    assert starts[1][0] >= starts[0][0] + 2
    assert starts[1][1] >= starts[0][1] + 2
    unsplit = _solve(TWO_LANES, (1, 1))
    assert unsplit.best is not None
    assert unsplit.best.period == 7
    near_miss = _solve(TWO_LANES, (2, 2), objective="makespan")
    assert near_miss.best is not None
    assert near_miss.best.period == 6
    assert _solve(TWO_LANES, (2, 2), at_most=3).pool == ()


def test_a_bubble_asks_for_more_nano_batches() -> None:
    unsplit = _solve(TWO_LANES, (1, 1)).best
    assert unsplit is not None
    assert (2, 1) in candidate_counts(unsplit)


def test_causal_edges_wait_for_all_prompt_tiles_before() -> None:
    """Three prompt tiles in two nano-batches: attention on the second waits for both parts of the producer."""
    table = [1, 2, 3]
    edges = [(0, 1, False, None), (1, 0, True, None)]
    plain = _problem([(0, 3), (0, 3)], [(C, 0, table), (N, 1, table)], edges)
    causal = _problem([(0, 3), (0, 3)], [(C, 0, table), (N, 1, table)], [(0, 1, False, 0), edges[1]])
    for problem in (plain, causal):
        best = _solve(problem, (2, 2), cuts=[(0, 1, 3), (0, 1, 3)]).best
        assert best is not None
        if problem is causal:
            ready = max(s + d for s, d in zip(best.starts[0], (1, 2), strict=True))
            assert best.starts[1][1] >= ready


def test_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be cut into 3"):
        _solve(TWO_LANES, (3, 1))


def _random_problem(seed: int) -> tuple[Problem, tuple[int, ...]]:
    """A chain of two or three blocks on random lanes and groups, closed by an edge to the next layer."""
    r = random.Random(seed)
    tiles = r.choice([2, 2, 3])
    num_blocks = r.choice([2, 2, 3])
    num_groups = min(num_blocks, r.choice([1, 2, 2, 3]))
    groups = [(0, tiles)] * num_groups
    if num_groups > 1 and r.random() < 0.3:
        groups[1] = (0, tiles - 1)
    counts = [2] + [r.choice([1, 2]) for _ in groups[1:]]
    counts = [min(n, b - a) for n, (a, b) in zip(counts, groups, strict=True)]
    owner = [min(i, num_groups - 1) for i in range(num_blocks)]
    blocks = []
    for g in owner:
        table = list(itertools.accumulate((r.randint(0, 2) for _ in range(tiles)), initial=r.randint(1, 2)))[:tiles]
        blocks.append((r.choice([C, M, N]), g, table))
    edges = [(i, i + 1, False, None) for i in range(num_blocks - 1)] + [(num_blocks - 1, 0, True, None)]
    if r.random() < 0.3 and owner[0] != owner[1]:
        edges[0] = (0, 1, False, r.randint(0, 1))
    return _problem(groups, blocks, edges), tuple(counts)


def _all_cuts(problem: Problem, counts: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    per_group = [
        [(g.first, *inner, g.stop) for inner in itertools.combinations(range(g.first + 1, g.stop), n - 1)]
        for g, n in zip(problem.groups, counts, strict=True)
    ]
    return itertools.product(*per_group)


def _fits(problem: Problem, cuts: tuple[tuple[int, ...], ...], period: int) -> bool:
    """Depth-first search over all integer starts in [0, 3 period), no window assumed for any block."""
    jobs = [
        (b, i, block.duration(problem.groups[block.group], cuts[block.group][i], cuts[block.group][i + 1]))
        for b, block in enumerate(problem.blocks)
        for i in range(len(cuts[block.group]) - 1)
    ]
    if any(d > period for *_, d in jobs):
        return False

    def tiles(b: int, i: int) -> tuple[int, int]:
        row = cuts[problem.blocks[b].group]
        return row[i], row[i + 1]

    waits = [
        (p, c, period if e.previous_layer else 0)
        for e in problem.edges
        for p in jobs
        for c in jobs
        if (p[0], c[0]) == (e.producer, e.consumer)
        and (
            p[1] == c[1]
            if problem.blocks[e.producer].group == problem.blocks[e.consumer].group
            else problem.intersect(e, tiles(*p[:2]), tiles(*c[:2]))
        )
    ]
    placed: dict[tuple[int, int, int], int] = {}

    def ok(job: tuple[int, int, int], start: int) -> bool:
        for other, at in placed.items():
            if problem.blocks[other[0]].resource is problem.blocks[job[0]].resource and other != job:
                gap = (at - start) % period
                if gap < job[2] or period - gap < other[2] or (gap == 0):
                    return False
        known = placed | {job: start}
        return all(known[p] + p[2] <= known[c] + back for p, c, back in waits if p in known and c in known)

    def place(k: int) -> bool:
        if k == len(jobs):
            return True
        job = jobs[k]
        for start in range(1 if k == 0 else 3 * period):
            if ok(job, start):
                placed[job] = start
                if place(k + 1):
                    return True
                del placed[job]
        return False

    return place(0)


def _brute_force(problem: Problem, counts: tuple[int, ...]) -> int:
    every = list(_all_cuts(problem, counts))
    return next(t for t in itertools.count(1) if any(_fits(problem, cuts, t) for cuts in every))


@pytest.mark.parametrize("block", range(10))
def test_brute_force_agrees_on_200_random_instances(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        problem, counts = _random_problem(seed)
        solved = _solve(problem, counts)
        assert solved.best is not None
        exact = _brute_force(problem, counts)
        assert (solved.best.period, solved.bound) == (exact, exact), f"{seed=}"
        assert problem.load_bound(counts) <= exact
        assert problem.load_bound() <= problem.load_bound(counts)


@pytest.mark.parametrize("seed", range(200, 212))
def test_the_milp_agrees(seed: int) -> None:
    problem, counts = _random_problem(seed)
    solved = _solve(problem, counts)
    assert solved.best is not None
    found, bound = solve_milp(problem, counts, upper=problem.sequential_ticks * 2, time_limit_s=30)
    assert found is not None
    assert found.period == solved.best.period
    assert bound == pytest.approx(found.period)


def test_composition_bound_is_the_cheapest_split() -> None:
    """Six tiles at 5, 6, 7, 9, 11, 12 ticks by size: the bound is the cheapest of all cuts; uncut, 12."""
    by_size = [5, 6, 7, 9, 11, 12]
    problem = _problem([(0, 6)], [(C, 0, by_size)], [(0, 0, True, None)])
    splits = {
        n: min(sum(by_size[b - a - 1] for a, b in itertools.pairwise(cut[0])) for cut in _all_cuts(problem, (n,)))
        for n in (1, 2, 3)
    }
    assert {n: problem.load_bound((n,)) for n in (1, 2, 3)} == splits
    assert problem.load_bound() == 12


def test_search_repeats_for_a_seed_and_never_ends_empty() -> None:
    problem, _ = _random_problem(7)
    limits = Limits(work=2.0, deadline=time.monotonic() + 60, seed=3)
    one, two = (search_structure(problem, limits) for _ in range(2))
    assert (one.best, one.tried, one.work) == (two.best, two.tried, two.work)
    late = search_structure(problem, Limits(work=2.0, deadline=time.monotonic() - 1, seed=3))
    assert late.timed_out
    assert late.best.period <= sequential_structure(problem).period


def test_hint_keeps_the_incumbent() -> None:
    first = _solve(TWO_LANES, (2, 2)).best
    assert isinstance(first, Structure)
    again = _solve(TWO_LANES, (2, 2), hint=first, at_most=first.period).best
    assert again is not None
    assert again.period == first.period


def test_the_milp_agrees_on_a_real_layer() -> None:
    """Llama-3-8B on one A100, 1024 tokens, at the starting counts: both programs close."""
    model, mix = preset("llama3-8b"), steady_mix(parse_workload("512:512"), 1024)
    table = analytic_profile(model, hardware("a100-80g"), 1, [mix])
    problem = build_problem(Costing(model=model, table=table, mix=mix, partition="none"))
    counts = base_counts(problem)
    solved = _solve(problem, counts)
    assert solved.best is not None
    found, bound = solve_milp(problem, counts, upper=problem.sequential_ticks, time_limit_s=60)
    assert found is not None
    assert found.period == solved.best.period == solved.bound
    assert bound == pytest.approx(found.period, abs=1e-3)

"""Stage I as a mixed-integer linear program, to cross-check the constraint program of search/structure.py where it closes.

The same data, variables and rules as there. Differences of form: y[g][i][z] = 1 picks size z of nano-batch i, so that durations
are sums over y; every either-or is a pair of big-M rows; instead of copies in a no-overlap, any two nano-operations of a lane
and any shift k in -2 .. 2 of the second by k periods get an either-or of their own. M is the horizon of the rows' sides:
starts lie below 2 U and periods below U (an upper bound of T), so no side exceeds M = 6 U + the longest duration.
Source: NanoFlow paper, section 4.1.2.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from ortools.linear_solver import pywraplp

from nanoflow_jax.plan import Resource
from search.problem import Problem
from search.structure import Structure

SHIFTS = (-2, -1, 0, 1, 2)


def solve_milp(problem: Problem, counts: Sequence[int], *, upper: int, time_limit_s: float) -> tuple[Structure | None, float]:
    """The best structure of at most `upper` ticks (None if none was found in time) and the proven lower bound of the period."""
    solver: Any = pywraplp.Solver.CreateSolver("SCIP")
    solver.SetTimeLimit(int(1000 * time_limit_s))
    big = 6 * upper + max(b.duration(g := problem.groups[b.group], g.first, g.stop) for b in problem.blocks)
    period = solver.NumVar(problem.load_bound(counts), upper, "T")
    cuts, pick = _sizes(solver, problem, counts)
    starts, durations = [], []
    for b, block in enumerate(problem.blocks):
        n = counts[block.group]
        starts.append([solver.NumVar(0, 2 * upper, f"s{b}_{i}") for i in range(n)])
        durations.append([_duration(problem, block, pick[block.group][i], i, n) for i in range(n)])
    solver.Add(starts[0][0] == 0)  # (8)
    for start in starts[0]:
        solver.Add(start <= period)
    disjoint: dict[tuple[int, ...], Any] = {}

    def before(left, right, key):
        """1 implies left <= right; tiles are whole, so one binary decides."""
        if key not in disjoint:
            disjoint[key] = solver.BoolVar(f"o{key}")
            tiles = max(g.stop for g in problem.groups) + 1
            solver.Add(left <= right + tiles * (1 - disjoint[key]))
        return disjoint[key]

    for edge in problem.edges:
        p, q = problem.blocks[edge.producer].group, problem.blocks[edge.consumer].group
        shift = period if edge.previous_layer else 0
        for i, j in itertools.product(range(counts[p]), range(counts[q])):
            ready, begins = starts[edge.producer][i] + durations[edge.producer][i], starts[edge.consumer][j] + shift
            if p == q:
                if i == j:
                    solver.Add(ready <= begins)  # (3)
                continue
            first = cuts[q][j] if edge.causal_first is None else edge.causal_first
            key = (p, i + 1, q, j) if edge.causal_first is None else (p, i + 1, -1, edge.causal_first)
            either = before(cuts[p][i + 1], first, key) + before(cuts[q][j + 1], cuts[p][i], (q, j + 1, p, i))
            solver.Add(ready <= begins + big * either)  # (4), (5)
    for resource in Resource:
        lane = [
            (b, i) for b, block in enumerate(problem.blocks) if block.resource is resource for i in range(counts[block.group])
        ]
        for (b, i), (c, j) in itertools.combinations(lane, 2):
            for k in SHIFTS:
                first = solver.BoolVar(f"l{b}_{i}_{c}_{j}_{k}")
                shifted = starts[c][j] + k * period
                solver.Add(starts[b][i] + durations[b][i] <= shifted + big * (1 - first))  # (6)
                solver.Add(shifted + durations[c][j] <= starts[b][i] + big * first)
        if lane:
            solver.Add(period >= sum(durations[b][i] for b, i in lane))  # (7)
    solver.Minimize(period)
    status = solver.Solve()
    bound = solver.Objective().BestBound()
    if status not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
        return None, bound
    found = Structure(
        problem=problem,
        cuts=tuple(tuple(round(_value(c)) for c in row) for row in cuts),
        starts=tuple(tuple(round(s.solution_value()) for s in row) for row in starts),
        period=round(period.solution_value()),
    )
    return found, bound


def _value(x) -> float:
    return x if isinstance(x, int) else x.solution_value()


def _sizes(solver, problem: Problem, counts: Sequence[int]):
    """(1), (2): cut positions, and for each nano-batch one binary per size."""
    cuts, pick = [], []
    for g, group in enumerate(problem.groups):
        n = counts[g]
        rows = []
        position: list = [group.first]
        for i in range(n):
            sizes = range(1, group.tiles - n + 2) if n > 1 else (group.tiles,)
            row = {z: solver.BoolVar(f"y{g}_{i}_{z}") for z in sizes}
            solver.Add(sum(row.values()) == 1)
            rows.append(row)
            position.append(position[-1] + sum(z * y for z, y in row.items()))
        solver.Add(position[-1] == group.stop)
        cuts.append([*position[:-1], group.stop])
        pick.append(rows)
    return cuts, pick


def _duration(problem: Problem, block, row, i: int, n: int):
    group = problem.groups[block.group]
    if n == 1:
        return block.duration(group, group.first, group.stop)

    def ticks(z: int) -> int:
        if i == n - 1:
            return block.duration(group, group.stop - z, group.stop)
        begin = group.first + (i > 0)
        return block.duration(group, begin, min(begin + z, group.stop))

    return sum(ticks(z) * y for z, y in row.items())

"""Stage I: nano-batches, order and start times that minimise the period of a layer in steady state, without interference.

Data. Groups g of operations cut together over tiles [first, stop); blocks of a group on one resource with durations by size;
edges between blocks (problem.py). n_g nano-batches per group are given; `stage_one.py` raises them.

Variables.  c[g][i]: cut positions in tiles, c[g][0] = first, c[g][n] = stop;  d[b][i], s[b][i]: duration and start of block b
on nano-batch i, in ticks;  T: the period. Layer l runs the same schedule at s + l T.

Minimise T (or, for comparison, the end of one layer alone) subject to
 (1) cuts rise by at least one tile;
 (2) d[b][i] is the table's entry for the tiles between its cuts;
 (3) along an edge of one group, nano-batch i waits for nano-batch i;
 (4) along an edge of two groups, j waits for i, or i ends before j begins, or j ends before i begins (in tokens); a causal edge
     replaces the beginning of j by that of the prompt tokens;
 (5) along an edge from the previous layer the waiting side starts T later;
 (6) blocks of one resource do not overlap, in any layer: one no-overlap over the copies at s, s + T and s + 2 T. Every token's
     chain of blocks is at most one period long, because the next layer's begins with it; starts of the first group lie in
     [0, T], so all starts lie in [0, 2 T] and two blocks in flight together are at most two layers apart;
 (7) T is at least the load of every resource, and at least the cheapest composition of each group (dynamic programming):
     implied, but without the second the solver's own relaxation of (2) is 20 to 90 % too low;
 (8) the first block's first nano-batch starts at 0: the schedule may be shifted.

Everything is integer, so a solution is exact. Source: NanoFlow paper, section 4.1.2, which minimises the makespan of a layer by
MILP; the periodic form is ours.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

from ortools.sat.python import cp_model

from nanoflow_jax.plan import Resource
from search.problem import Edge, Problem

Objective = Literal["period", "makespan"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Structure:
    """A schedule: `cuts[g]` in tiles, `starts[b]` in ticks per nano-batch, and the period (or makespan) in ticks."""

    problem: Problem
    cuts: tuple[tuple[int, ...], ...]
    starts: tuple[tuple[int, ...], ...]
    period: int

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(c) - 1 for c in self.cuts)

    def duration(self, b: int, i: int) -> int:
        block = self.problem.blocks[b]
        cuts = self.cuts[block.group]
        return block.duration(self.problem.groups[block.group], cuts[i], cuts[i + 1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solved:
    """What a solve came to: structures found, best first (none if there is none in time, or none at all below the limit asked
    for), the proven lower bound of the period in ticks, and the deterministic time spent."""

    pool: tuple[Structure, ...]
    bound: int
    work: float

    @property
    def best(self) -> Structure | None:
        return self.pool[0] if self.pool else None


Progress = Callable[[int, int], None]


def solve(
    problem: Problem,
    counts: Sequence[int],
    *,
    work_limit: float,
    time_limit_s: float,
    seed: int = 0,
    hint: Structure | None = None,
    cuts: Sequence[Sequence[int]] | None = None,
    objective: Objective = "period",
    at_most: int | None = None,
    progress: Progress | None = None,
) -> Solved:
    """Solves the program above for `counts` nano-batches per group, with the `cuts` given or free, for T <= `at_most`.

    Stops after `work_limit` units of the solver's deterministic time, which repeat exactly for a seed, or, as a safety net that
    does not repeat, after `time_limit_s` seconds. One thread: on these small models it proves optima 10 to 60 times sooner than
    an interleaved portfolio, and it repeats. `progress` is called with (incumbent, bound) in ticks.

    Raises:
      ValueError: a count does not fit its group.
    """
    for count, group in zip(counts, problem.groups, strict=True):
        if not 1 <= count <= group.tiles:
            raise ValueError(f"group {group.name!r} of {group.tiles} tiles cannot be cut into {count} nano-batches")
    floor = problem.load_bound(counts)
    upper = at_most if at_most is not None else 2 * problem.sequential_ticks
    if floor > upper:
        return Solved(pool=(), bound=floor, work=0.0)
    model = _Model(problem, counts, objective, cuts, floor, upper)
    if hint is not None and hint.counts == tuple(counts):
        model.add_hint(hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = work_limit
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.random_seed = seed
    recorder = _Recorder(model, progress)
    status = solver.solve(model.cp, recorder)
    if status == cp_model.MODEL_INVALID:
        raise AssertionError(f"stage I model is invalid: {model.cp.validate()}")
    bound = upper + 1 if status == cp_model.INFEASIBLE else max(int(solver.best_objective_bound), floor)
    pool = tuple(sorted(recorder.found, key=lambda s: s.period))
    return Solved(pool=pool, bound=bound, work=solver.response_proto.deterministic_time)


class _Model:
    """The variables of the program and how to read them back."""

    def __init__(
        self,
        problem: Problem,
        counts: Sequence[int],
        objective: Objective,
        cuts: Sequence[Sequence[int]] | None,
        floor: int,
        upper: int,
    ) -> None:
        self.problem, self.counts = problem, counts
        self.cp = cp_model.CpModel()
        self.period = self.cp.new_int_var(floor, upper, "T")
        free = range(len(problem.groups)) if cuts is None else ()
        self.cuts: list[list[cp_model.IntVar | int]] = [self._cuts(g) for g in free] or [list(c) for c in cuts or ()]
        horizon = 2 * upper
        self.starts, self.durations = [], []
        for b, block in enumerate(problem.blocks):
            n = counts[block.group]
            self.starts.append([self.cp.new_int_var(0, horizon, f"s{b}_{i}") for i in range(n)])
            self.durations.append([self._duration(b, i) for i in range(n)])
        self._disjoint_literals: dict[tuple[int, int, int, int], cp_model.IntVar] = {}
        for edge in problem.edges:
            if objective == "period" or not edge.previous_layer:
                self._add_edge(edge)
        for resource in Resource:
            self._add_lane(resource, objective)
        if objective == "makespan":
            for b in range(len(problem.blocks)):
                for s, d in zip(self.starts[b], self.durations[b], strict=True):
                    self.cp.add(s + d <= self.period)
        else:
            for start in self.starts[0]:
                self.cp.add(start <= self.period)
        self.cp.add(self.starts[0][0] == 0)  # (8)
        self.cp.minimize(self.period)

    def _cuts(self, g: int) -> list[cp_model.IntVar | int]:
        group, n = self.problem.groups[g], self.counts[g]
        inner = [self.cp.new_int_var(group.first + i, group.stop - n + i, f"c{g}_{i}") for i in range(1, n)]
        cuts = [group.first, *inner, group.stop]
        for a, b in itertools.pairwise(inner):
            self.cp.add(b - a >= 1)  # (1)
        return cuts

    def _duration(self, b: int, i: int) -> cp_model.LinearExprT:
        """(2): durations depend on the size alone but for nano-batches that end at the border between decode and prompts."""
        block = self.problem.blocks[b]
        group, n = self.problem.groups[block.group], self.counts[block.group]
        cuts = self.cuts[block.group]
        begin, end = cuts[i], cuts[i + 1]
        if isinstance(begin, int) and isinstance(end, int):
            return block.duration(group, begin, end)
        most = group.tiles - n + 1
        if i == n - 1:
            table = [block.duration(group, group.stop - size, group.stop) for size in range(1, most + 1)]
        else:
            first = group.first if i == 0 else group.first + 1
            table = [block.duration(group, first, min(first + size, group.stop)) for size in range(1, most + 1)]
        d = self.cp.new_int_var(min(table), max(table), f"d{b}_{i}")
        index = self.cp.new_int_var(0, most - 1, f"z{b}_{i}")
        self.cp.add(index + 1 + begin == end)
        self.cp.add_element(index, table, d)
        return d

    def _add_edge(self, edge: Edge) -> None:
        producer, consumer = self.problem.blocks[edge.producer], self.problem.blocks[edge.consumer]
        shift = self.period if edge.previous_layer else 0
        for i in range(self.counts[producer.group]):
            ready = self.starts[edge.producer][i] + self.durations[edge.producer][i]
            for j in range(self.counts[consumer.group]):
                begins = self.starts[edge.consumer][j] + shift
                if producer.group == consumer.group:
                    if i == j:
                        self.cp.add(ready <= begins)  # (3)
                    continue
                first = (consumer.group, j) if edge.causal_first is None else (-1, edge.causal_first)
                escape = [
                    self._before((producer.group, i + 1), first),
                    self._before((consumer.group, j + 1), (producer.group, i)),
                ]
                escape = [e for e in escape if e is not False]
                if any(e is True for e in escape):
                    continue
                self.cp.add(ready <= begins).only_enforce_if([~e for e in escape])  # (4), (5)

    def _before(self, a: tuple[int, int], b: tuple[int, int]):
        """Literal implying cut a <= cut b; True or False where both are known. Group -1 stands for a constant tile."""

        def cut(key: tuple[int, int]):
            return key[1] if key[0] < 0 else self.cuts[key[0]][key[1]]

        left, right = cut(a), cut(b)
        if isinstance(left, int) and isinstance(right, int):
            return left <= right
        key = (*a, *b)
        if key not in self._disjoint_literals:
            literal = self.cp.new_bool_var(f"before{key}")
            self.cp.add(left <= right).only_enforce_if(literal)
            self.cp.add(left >= right + 1).only_enforce_if(~literal)
            self._disjoint_literals[key] = literal
        return self._disjoint_literals[key]

    def _add_lane(self, resource: Resource, objective: Objective) -> None:
        members = [b for b, block in enumerate(self.problem.blocks) if block.resource is resource]
        intervals, load = [], []
        horizon = 8 * self.problem.sequential_ticks
        for b in members:
            for i, (s, d) in enumerate(zip(self.starts[b], self.durations[b], strict=True)):
                load.append(d)
                for copy in range(3 if objective == "period" else 1):
                    begin = s if copy == 0 else self.cp.new_int_var(0, horizon, f"s{b}_{i}_{copy}")
                    if copy:
                        self.cp.add(begin == s + copy * self.period)
                    end = self.cp.new_int_var(0, horizon, f"e{b}_{i}_{copy}")
                    intervals.append(self.cp.new_interval_var(begin, d, end, f"i{b}_{i}_{copy}"))
        if intervals:
            self.cp.add_no_overlap(intervals)  # (6)
            self.cp.add(self.period >= sum(load))  # (7)

    def add_hint(self, structure: Structure) -> None:
        self.cp.add_hint(self.period, structure.period)
        for mine, theirs in zip(self.cuts, structure.cuts, strict=True):
            for var, value in zip(mine, theirs, strict=True):
                if not isinstance(var, int):
                    self.cp.add_hint(var, value)
        for mine, theirs in zip(self.starts, structure.starts, strict=True):
            for var, value in zip(mine, theirs, strict=True):
                self.cp.add_hint(var, value)

    def structure(self, value: Callable[[cp_model.LinearExprT], int]) -> Structure:
        return Structure(
            problem=self.problem,
            cuts=tuple(tuple(c if isinstance(c, int) else value(c) for c in cuts) for cuts in self.cuts),
            starts=tuple(tuple(value(s) for s in starts) for starts in self.starts),
            period=value(self.period),
        )


class _Recorder(cp_model.CpSolverSolutionCallback):
    """Keeps the improving solutions and reports progress."""

    def __init__(self, model: _Model, progress: Progress | None) -> None:
        super().__init__()
        self.model, self.progress = model, progress
        self.found: list[Structure] = []

    def on_solution_callback(self) -> None:
        self.found.append(self.model.structure(self.value))
        if self.progress is not None:
            self.progress(int(self.objective_value), int(self.best_objective_bound))

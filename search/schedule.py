"""Periodic schedules in real time: nano-operations, the precedence between them, and the shortest period that it allows.

A schedule is decided by an order: who waits for whom, and how many layers later. The shortest period of such a system is the
largest ratio, over its cycles, of time around the cycle to layers advanced; starts then follow by longest paths. So a solver's
integer times only have to carry the order over to real time.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from nanoflow_jax.plan import NanoBatch, Resource, depends
from search.problem import Costing
from search.structure import Structure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    """A nano-operation: its time alone, what it does to the device meanwhile, and its energy above idle (None if unknown)."""

    operation: str
    nano_batch: int
    batch: NanoBatch
    resource: Resource
    best_us: float
    energy_j: float | None
    estimated: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arc:
    """start[head] >= start[tail] + (time of tail) - layers x period; `layers` may be negative."""

    tail: int
    head: int
    layers: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Nodes with starts in their layer's time; the layer after starts `period_us` later. Durations as they were scheduled."""

    nodes: tuple[Node, ...]
    starts: tuple[float, ...]
    durations: tuple[float, ...]
    period_us: float


class CyclicOrderError(ValueError):
    """An order in which something waits for itself within one layer."""


def nodes_of(structure: Structure, costing: Costing) -> tuple[Node, ...]:
    """The nano-operations of a structure with their times, operation by operation in the layer's order."""
    problem = structure.problem
    ops = {op.name: op for op in costing.graph()}
    nodes = []
    for block in problem.blocks:
        group, cuts = problem.groups[block.group], structure.cuts[block.group]
        for i in range(len(cuts) - 1):
            batch = group.tokens(cuts[i], cuts[i + 1])
            for name in block.operations:
                timing = costing.timing(ops[name], batch.tokens)
                nodes.append(
                    Node(
                        operation=name, nano_batch=i, batch=batch, resource=block.resource, best_us=timing.time_us,
                        energy_j=timing.energy_j, estimated=timing.estimated,
                    )
                )  # fmt: skip
    return tuple(nodes)


def as_solved(structure: Structure, costing: Costing) -> Schedule:
    """The structure at the solver's own starts; if `costing` rounds to the problem's ticks, with the solver's durations."""
    nodes = nodes_of(structure, costing)
    tick = structure.problem.tick_us
    starts, index = [], 0
    for b, block in enumerate(structure.problem.blocks):
        for i in range(len(structure.starts[b])):
            clock = structure.starts[b][i] * tick
            for _ in block.operations:
                starts.append(clock)
                clock += nodes[index].best_us
                index += 1
    durations = tuple(n.best_us for n in nodes)
    return Schedule(nodes=nodes, starts=tuple(starts), durations=durations, period_us=structure.period * tick)


def dependency_arcs(nodes: Sequence[Node], costing: Costing) -> list[Arc]:
    """Who waits for whom by the layer's graph, where token ranges intersect."""
    arcs = []
    for op in costing.graph():
        for dependency in op.inputs:
            for head, consumer in enumerate(nodes):
                if consumer.operation != op.name:
                    continue
                for tail, producer in enumerate(nodes):
                    if producer.operation == dependency.producer and depends(
                        dependency, consumer.batch, producer.batch, costing.mix.decode_tokens
                    ):
                        arcs.append(Arc(tail=tail, head=head, layers=int(dependency.previous_layer)))
    return arcs


def lane_arcs(schedule: Schedule) -> list[Arc]:
    """Keeps the cyclic order of each resource's lane, each node followed by the next; k, m are their windows."""
    arcs = []
    for resource in Resource:
        placed = [(*_fold(schedule, v), v) for v, n in enumerate(schedule.nodes) if n.resource is resource]
        lane = sorted(placed, key=lambda p: p[1])
        for (k, _, u), (m, _, v) in itertools.pairwise(lane):
            arcs.append(Arc(tail=u, head=v, layers=k - m))
        if lane:
            (m, _, first), (k, _, last) = lane[0], lane[-1]
            arcs.append(Arc(tail=last, head=first, layers=k - m + 1))
    return arcs


def _fold(schedule: Schedule, v: int) -> tuple[int, float]:
    window = math.floor(schedule.starts[v] / schedule.period_us + 1e-9)
    return window, schedule.starts[v] - window * schedule.period_us


def shortest_period(durations: Sequence[float], arcs: Sequence[Arc]) -> tuple[float, list[float]]:
    """The least period that all arcs allow, and the earliest starts at it; the first node starts at 0.

    Raises the period from cycle to cycle: while longest paths do not converge, some cycle needs more, and its ratio of time to
    layers is the next period to try. Ends at the largest such ratio, exactly but for rounding.

    Raises:
      CyclicOrderError: a cycle takes time but advances no layer.
    """
    period = max(durations)
    while True:
        starts, cycle = _longest_paths(durations, arcs, period)
        if cycle is None:
            break
        layers = sum(a.layers for a in cycle)
        if layers <= 0:
            raise CyclicOrderError(f"the order waits for itself around nodes {[a.tail for a in cycle]}")
        period = sum(durations[a.tail] for a in cycle) / layers
    shift = starts[0]
    return period, [s - shift for s in starts]


def _longest_paths(durations: Sequence[float], arcs: Sequence[Arc], period: float) -> tuple[list[float], list[Arc] | None]:
    """Bellman-Ford from all nodes at once; returns a cycle of positive length if there is one."""
    count = len(durations)
    starts = [0.0] * count
    via: list[Arc | None] = [None] * count
    eps = 1e-9 * period
    moved = None
    for _ in range(count):
        moved = None
        for a in arcs:
            earliest = starts[a.tail] + durations[a.tail] - a.layers * period
            if earliest > starts[a.head] + eps:
                starts[a.head], via[a.head], moved = earliest, a, a.head
        if moved is None:
            return starts, None
    # Walking back `count` times from a node that still moves ends on the cycle.
    assert moved is not None
    v = moved
    for _ in range(count):
        arc = via[v]
        assert arc is not None
        v = arc.tail
    cycle, u = [], v
    while not cycle or u != v:
        arc = via[u]
        assert arc is not None
        cycle.append(arc)
        u = arc.tail
    return starts, cycle


def retime(schedule: Schedule, durations: Sequence[float], arcs: Sequence[Arc]) -> Schedule:
    """The same nodes with other durations: the shortest period that `arcs` allow, everything as early as possible."""
    period, starts = shortest_period(durations, arcs)
    least = min(math.floor(s / period + 1e-9) for s in starts)
    shifted = tuple(s - least * period for s in starts)
    return dataclasses.replace(schedule, starts=shifted, durations=tuple(durations), period_us=period)


def tighten(schedule: Schedule, costing: Costing) -> Schedule:
    """The same order at the exact times of `costing` and the shortest period, everything as early as possible."""
    nodes = tuple(dataclasses.replace(n, best_us=costing.time_of(n.operation, n.batch.tokens)) for n in schedule.nodes)
    arcs = dependency_arcs(nodes, costing) + lane_arcs(schedule)
    return retime(dataclasses.replace(schedule, nodes=nodes), [n.best_us for n in nodes], arcs)

"""The stage I problem: groups of operations that share their cuts, blocks with durations by size, and who waits for whom.

A *group* is a run of operations that are split at the same tokens (a collective is split as its GEMM is). A *block* is one
or more operations of a group that run back to back on one resource and are placed as one: `gate_up_proj` and `down_proj`.
Sizes are counted in tiles of 128 tokens, times in integer ticks, so that an integer solver and a replay agree exactly.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import TILE, NanoBatch, Operation, Partition, Resource, layer_graph, present_operations, reduced_in_gemm
from nanoflow_jax.workload import BatchMix
from search.analytic import kernel_energy_j
from search.profile_table import ProfileTable, Timing, kernel_of, lookup

TICKS_PER_LAYER = 2500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Operations cut together: over tiles [first, stop), which hold tokens [start, end) (the border may fall inside a tile)."""

    name: str
    first: int
    stop: int
    start: int
    end: int

    @property
    def tiles(self) -> int:
        return self.stop - self.first

    def tokens(self, a: int, b: int) -> NanoBatch:
        """The tokens of tiles [a, b) that belong to the group."""
        return NanoBatch(start=max(a * TILE, self.start), stop=min(b * TILE, self.end))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Operations placed as one. `ticks[a - first][b - first]` is the duration on tiles [a, b) of the group."""

    name: str
    operations: tuple[str, ...]
    resource: Resource
    group: int
    ticks: tuple[tuple[int, ...], ...]

    def duration(self, group: Group, a: int, b: int) -> int:
        return self.ticks[a - group.first][b - group.first]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edge:
    """Block `consumer` waits for block `producer` where ranges intersect; from `causal_first` (a tile) on if that is set."""

    producer: int
    consumer: int
    previous_layer: bool
    causal_first: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that stage I decides on. `tick_us` converts its integer times."""

    tick_us: float
    partition: Partition
    groups: tuple[Group, ...]
    blocks: tuple[Block, ...]
    edges: tuple[Edge, ...]

    def intersect(self, edge: Edge, producer: tuple[int, int], consumer: tuple[int, int]) -> bool:
        """Whether a consumer on tiles [a, b) waits for a producer on the other tiles."""
        first = consumer[0] if edge.causal_first is None else edge.causal_first
        return first < producer[1] and producer[0] < consumer[1]

    @functools.cached_property
    def sequential_ticks(self) -> int:
        """A layer unsplit, one block after another."""
        return sum(b.duration(g := self.groups[b.group], g.first, g.stop) for b in self.blocks)

    def load_bound(self, counts: Sequence[int] | None = None) -> int:
        """The busiest resource's least load over all cuts: a lower bound of the period.

        With `counts`, over all cuts into exactly that many nano-batches per group; without, into any number. Per group the
        cheapest composition of its tiles is found by dynamic programming over the cut positions.
        """
        loads = []
        for resource in Resource:
            load = 0
            for g, group in enumerate(self.groups):
                blocks = [b for b in self.blocks if b.group == g and b.resource is resource]
                load += _cheapest(group, blocks, counts[g] if counts else None)
            loads.append(load)
        return max(loads)


def _cheapest(group: Group, blocks: Sequence[Block], count: int | None) -> int:
    if not blocks:
        return 0

    def cost(a: int, b: int) -> int:
        return sum(block.duration(group, a, b) for block in blocks)

    most = count or group.tiles
    best = {group.first: 0}
    whole = math.inf
    for _ in range(most):
        best = {b: min(t + cost(a, b) for a, t in best.items() if a < b) for b in range(min(best) + 1, group.stop + 1)}
        whole = best.get(group.stop, math.inf) if count else min(whole, best.get(group.stop, math.inf))
        best.pop(group.stop, None)
        if not best:
            break
    return int(whole)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costing:
    """Reads times of a layer's operations from a profile, for one batch mix; with `tick_us` rounded to whole ticks."""

    model: ModelConfig
    table: ProfileTable
    mix: BatchMix
    partition: Partition
    tick_us: float | None = None

    def graph(self) -> tuple[Operation, ...]:
        return present_operations(
            layer_graph(moe=self.model.is_moe, partition=self.partition), self.mix.b_dense, self.mix.decode_tokens
        )

    def context(self, op: Operation) -> float:
        return {"decode": self.mix.decode_context, "prefill": self.mix.prefill_context, "all": 0.0}[op.tokens]

    def timing(self, op: Operation, tokens: int, num_sms: int | None = None) -> Timing:
        """Time and energy. Energy is the power model's, where there is one: kernels were measured alone, at other clocks than
        they have beside each other, and at a few sizes only.

        A GEMM that sums over the ranks takes the root of the sum of the squares of its own and the all-reduce's time: on two
        H200s that was at most 9 % off (docs/kernels-collectives.md).
        """
        kernel, context = kernel_of(self.model, self.table.tp, self.partition, op.name), self.context(op)
        timing = lookup(self.table, kernel, tokens, num_sms=num_sms, context=context)
        if self.table.power is not None:
            timing = dataclasses.replace(timing, energy_j=kernel_energy_j(self.table.power, kernel, tokens, context))
        if op.name in reduced_in_gemm(self.partition):
            timing = self._with_all_reduce(timing, tokens)
        if self.tick_us is None:
            return timing
        return dataclasses.replace(timing, time_us=max(1, round(timing.time_us / self.tick_us)) * self.tick_us)

    def _with_all_reduce(self, gemm: Timing, tokens: int) -> Timing:
        kernel = kernel_of(self.model, self.table.tp, self.partition, "o_all_reduce")
        together_us = math.hypot(gemm.time_us, lookup(self.table, kernel, tokens).time_us)
        if self.table.power is None or gemm.energy_j is None:
            return dataclasses.replace(gemm, time_us=together_us)
        energy_j = gemm.energy_j + kernel_energy_j(self.table.power, kernel, tokens, 0.0)
        return dataclasses.replace(gemm, time_us=together_us, energy_j=energy_j)

    def time_of(self, operation: str, tokens: int) -> float:
        """Microseconds of an operation alone on the whole device."""
        key = operation, tokens
        if key not in self._times:
            self._times[key] = self.timing(self.operation(operation), tokens).time_us
        return self._times[key]

    def energy_of(self, operation: str, tokens: int) -> float | None:
        """Joules above idle of an operation."""
        return self.timing(self.operation(operation), tokens).energy_j

    def operation(self, name: str) -> Operation:
        return next(op for op in self.graph() if op.name == name)

    @functools.cached_property
    def _times(self) -> dict[tuple[str, int], float]:
        """Times read so far: the search asks for the same ones many times."""
        return {}

    def sequential_us(self) -> float:
        """One layer, every operation on the whole batch and the whole device, one after another."""
        whole = {"all": self.mix.b_dense, "decode": self.mix.decode_tokens, "prefill": self.mix.prefill_tokens}
        return sum(self.timing(op, whole[op.tokens]).time_us for op in self.graph())


GROUP_OF = {
    "qkv_proj": "qkv", "decode_attention": "decode", "prefill_attention": "prefill",
    "attention_all_gather": "o", "o_proj": "o", "o_all_gather": "o", "o_all_reduce": "o",
    "gate_up_proj": "ffn", "down_proj": "ffn", "experts": "ffn", "ffn_all_reduce": "ffn",
}  # fmt: skip


def build_problem(costing: Costing) -> Problem:
    """The stage I problem of one batch mix and partition, in the costing's ticks or, without, 2500 to a sequential layer."""
    tick_us = costing.tick_us or costing.sequential_us() / TICKS_PER_LAYER
    mix = costing.mix
    border = mix.decode_tokens
    tiles = mix.b_dense // TILE
    spans = {"decode": (0, -(-border // TILE), 0, border), "prefill": (border // TILE, tiles, border, mix.b_dense)}
    groups: list[Group] = []
    blocks: list[Block] = []
    block_of: dict[str, int] = {}
    graph = costing.graph()
    for op in graph:
        name = GROUP_OF[op.name]
        if name not in [g.name for g in groups]:
            first, stop, start, end = spans.get(name, (0, tiles, 0, mix.b_dense))
            groups.append(Group(name=name, first=first, stop=stop, start=start, end=end))
        g = [g.name for g in groups].index(name)
        ticks = _ticks(costing, op, groups[g], tick_us)
        if op.name == "down_proj":
            up = blocks[-1]
            ticks = tuple(tuple(a + b for a, b in zip(r, s, strict=True)) for r, s in zip(up.ticks, ticks, strict=True))
            blocks[-1] = dataclasses.replace(up, name="ffn", operations=(*up.operations, op.name), ticks=ticks)
        else:
            blocks.append(Block(name=op.name, operations=(op.name,), resource=op.resource, group=g, ticks=ticks))
        block_of[op.name] = len(blocks) - 1
    edges = [
        Edge(
            producer=block_of[d.producer], consumer=block_of[op.name], previous_layer=d.previous_layer,
            causal_first=border // TILE if d.causal else None,
        )
        for op in graph for d in op.inputs if block_of[d.producer] != block_of[op.name]
    ]  # fmt: skip
    return Problem(tick_us=tick_us, partition=costing.partition, groups=tuple(groups), blocks=tuple(blocks), edges=tuple(edges))


def _ticks(costing: Costing, op: Operation, group: Group, tick_us: float) -> tuple[tuple[int, ...], ...]:
    @functools.cache
    def ticks(tokens: int) -> int:
        return max(1, round(costing.timing(op, tokens).time_us / tick_us))

    span = range(group.first, group.stop + 1)
    return tuple(tuple(ticks(group.tokens(a, b).tokens) if a < b else 0 for b in span) for a in span)

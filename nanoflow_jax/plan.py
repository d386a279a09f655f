"""Plans as data: the graph of a layer, nano-batches, nano-operations in time, and the set of plans that a runtime chooses from.

A plan describes one *window* of the steady state of repeated layers: a stretch of `period_us` in which every nano-operation
of a layer starts exactly once. Nano-operations of neighbouring layers overlap, so those of one window need not belong to one
layer: in window w, a nano-operation with `layer_offset` k works on layer w - k. A model of L layers takes the windows
0 .. L - 1 + K, K the largest offset; where w - k is no layer (prologue and epilogue) the nano-operation is skipped. `unroll`
spells this out.

Token ranges follow the batch: decoding tokens [0, decode_tokens), prompt tokens behind them. A batch fits a plan when it has at
most that many decoding and at most `b_dense - decode_tokens` prompt tokens; the rest of either range is padding.

This module imports no jax. Files, and the checks of a whole plan that loading applies, are in `plan_files`.
"""

import enum
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

FORMAT_VERSION = 1
TILE = 128
ROWS_PER_WEIGHT_READ = 256
"""Rows that a GEMM multiplies while it reads its weights, which it does whatever its rows: fewer take no less time.

About the ratio of bf16 operations to bytes of HBM per second (206 on an H200), rounded up to whole tiles.
"""
ROWS_PER_LAUNCH = 96
"""What a GEMM takes besides its rows, in rows: launch, first loads, last stores, a last wave that is partly empty.

A layer of Llama-3-8B executed sequentially on an H200 takes 63 us and 0.66 us for each of its tokens, by a fit to its profile.
"""
Partition = Literal["none", "all_reduce", "all_gather", "gemm_all_reduce"]
TokenKind = Literal["all", "decode", "prefill"]
Shares = Literal["ideal", "constant", "phased"]


class PlanError(ValueError):
    """A plan that breaks a rule of this module; the message names the rule and the values."""


class Resource(enum.StrEnum):
    """What bounds an operation, and the lane on which its nano-operations follow one another."""

    COMPUTE = "compute"
    MEMORY = "memory"
    NETWORK = "network"


class Dependency(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An operation needs the result of `producer`: at its own tokens, or, if `causal`, at every prompt token up to its last.

    Causal is prompt attention reading keys of the same step: where requests begin is not known when a plan is made, so a
    nano-batch of prompt tokens waits for the keys of all prompt tokens before it.
    """

    producer: str
    previous_layer: bool = False
    causal: bool = False


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A node of the layer's graph.

    `runs` lists the entries of `nanoflow_jax.operations.OPERATIONS` that one nano-operation of this node performs, in order:
    small ones travel with a large neighbour. The residual is added where the complete result of `o_proj` and of the
    feed-forward first exists: with the GEMM when there is no collective behind it, else with the collective.
    """

    name: str
    runs: tuple[str, ...]
    resource: Resource
    tokens: TokenKind
    inputs: tuple[Dependency, ...]


class NanoBatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Tokens [start, stop) of the dense batch."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class NanoOperation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One operation on one nano-batch, placed in the window.

    `start_us` lies in [0, period); a nano-operation may run on past the window's end, into the next window. `phase` is the
    phase it starts in. `best_us` is its time alone on the whole device, `share` the resource share R it holds (the largest,
    if it changes between phases) and `num_sms` the SMs of that share; for a network operation the NCCL channels, each of which
    holds an SM.
    """

    operation: str
    nano_batch: int
    resource: Resource
    layer_offset: int
    start_us: float
    duration_us: float
    best_us: float
    phase: int
    share: float
    num_sms: int


class Running(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a nano-operation holds during one phase: share R, SMs or channels, and its speed P relative to running alone."""

    nano_operation: int
    share: float
    num_sms: int
    performance: float


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A stretch of the window in which the same nano-operations run; utilisations are fractions of the device, power in W."""

    start_us: float
    duration_us: float
    running: tuple[Running, ...]
    compute: float
    memory: float
    network: float
    power_w: float


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the search promises, per layer.

    `ideal_us` is the period without interference (stage I) and `ideal_bound_us` a proven lower bound of it at `bound_counts`
    nano-batches per group; `gap` is their relative distance. `lower_bound_us` is the larger of the unsplit loads of compute,
    memory and network and of the energy divided by the power cap: no plan is faster. `nano_us` is the plan's split executed one
    nano-operation after another. `estimated` says that times were interpolated between measurements or are analytic.
    """

    sequential_us: float
    nano_us: float
    ideal_us: float
    ideal_bound_us: float
    bound_counts: str
    gap: float
    lower_bound_us: float
    mean_power_w: float
    estimated: bool


class PipelinePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The search's output for one batch mix; the only input that decides split, order, streams and budgets.

    `partition` is the way `o_proj` is divided over the ranks and with it the layer's collectives: "all_reduce" divides its
    rows, "all_gather" its columns, "none" is one rank. With "gemm_all_reduce" rows are divided and the GEMM itself sums over
    the ranks, in one kernel: a layer of dense models then has no collectives of its own. `shares` says how SMs are budgeted:
    "constant" through a nano-operation's life, "phased" with a change at phase borders, "ideal" not at all (stage I, in which
    nothing interferes).
    `decode_context` is how many tokens the plan takes a decoding sequence to have in the cache, None if that was not recorded.
    """

    format_version: int = FORMAT_VERSION
    model: str
    device: str
    tp: int
    moe: bool
    partition: Partition
    b_dense: int
    decode_tokens: int
    decode_context: float | None = None
    tile: int = TILE
    num_sms: int
    shares: Shares
    period_us: float
    nano_batches: dict[str, tuple[NanoBatch, ...]]
    nano_operations: tuple[NanoOperation, ...]
    phases: tuple[Phase, ...]
    prediction: Prediction

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise PlanError(f"plan has format_version={self.format_version}, this program reads {FORMAT_VERSION}")

    @property
    def speedup(self) -> float:
        return self.prediction.sequential_us / self.period_us

    @property
    def max_layer_offset(self) -> int:
        return max(n.layer_offset for n in self.nano_operations)

    def batch_of(self, nano: NanoOperation) -> NanoBatch:
        return self.nano_batches[nano.operation][nano.nano_batch]


def layer_graph(*, moe: bool, partition: Partition) -> tuple[Operation, ...]:
    """The operations of one decoder layer in an order that respects their dependencies.

    Source: NanoFlow paper, section 4.1.2 (all-gather and all-reduce alternatives move the same bytes). Experts have no kernel
    that sums over the ranks, so a collective follows them in "gemm_all_reduce", too.
    """
    nodes: list[Operation] = []

    def add(name: str, resource: Resource, inputs: Sequence[Dependency | str], *runs: str, tokens: TokenKind = "all") -> str:
        deps = tuple(d if isinstance(d, Dependency) else Dependency(producer=d) for d in inputs)
        nodes.append(Operation(name=name, runs=runs or (name,), resource=resource, tokens=tokens, inputs=deps))
        return name

    compute, memory, network = Resource.COMPUTE, Resource.MEMORY, Resource.NETWORK
    feed_forward = "experts" if moe else "down_proj"
    alone = partition == "none"
    reduced_apart = not alone and feed_forward not in reduced_in_gemm(partition)
    last = "ffn_all_reduce" if reduced_apart else feed_forward
    complete = {"none": "_residual", "gemm_all_reduce": "_all_reduce"}.get(partition, "")
    qkv = Dependency(producer=last, previous_layer=True)
    add("qkv_proj", compute, [qkv], "attention_norm", "qkv_proj", "append_kv")
    add("decode_attention", memory, ["qkv_proj"], tokens="decode")
    add("prefill_attention", compute, [Dependency(producer="qkv_proj", causal=True)], tokens="prefill")
    x: Sequence[str] = ("decode_attention", "prefill_attention")
    if partition == "all_gather":
        x = (add("attention_all_gather", network, x),)
    x = (add("o_proj", compute, x, f"o_proj{complete}"),)
    if partition == "all_gather":
        x = (add("o_all_gather", network, x, "o_all_gather", "attention_residual"),)
    elif partition == "all_reduce":
        x = (add("o_all_reduce", network, x, "o_all_reduce", "attention_residual"),)
    if moe:
        x = (add("experts", compute, x, "ffn_norm", "router", "experts", *(["ffn_residual"] if alone else [])),)
    else:
        x = (add("gate_up_proj", compute, x, "ffn_norm", "gate_up_proj"),)
        x = (add("down_proj", compute, x, f"down_proj{complete}"),)
    if reduced_apart:
        add("ffn_all_reduce", network, x, "ffn_all_reduce", "ffn_residual")
    return tuple(nodes)


def reduced_in_gemm(partition: Partition) -> frozenset[str]:
    """The operations that sum over the ranks themselves."""
    return frozenset({"o_proj", "down_proj"} if partition == "gemm_all_reduce" else ())


def token_range(tokens: TokenKind, b_dense: int, decode_tokens: int) -> NanoBatch:
    """The tokens an operation covers; empty when the batch has none of its kind."""
    start, stop = {"all": (0, b_dense), "decode": (0, decode_tokens), "prefill": (decode_tokens, b_dense)}[tokens]
    return NanoBatch(start=start, stop=stop)


def present_operations(graph: Sequence[Operation], b_dense: int, decode_tokens: int) -> tuple[Operation, ...]:
    """`graph` without the operations that have no token in this batch, nor the dependencies on them."""
    kept = {op.name for op in graph if token_range(op.tokens, b_dense, decode_tokens).tokens}
    return tuple(
        msgspec.structs.replace(op, inputs=tuple(d for d in op.inputs if d.producer in kept)) for op in graph if op.name in kept
    )


def reads(dependency: Dependency, batch: NanoBatch, decode_tokens: int) -> NanoBatch:
    """The tokens of the producer that a nano-operation on `batch` needs."""
    return NanoBatch(start=decode_tokens, stop=batch.stop) if dependency.causal else batch


def depends(dependency: Dependency, batch: NanoBatch, producer_batch: NanoBatch, decode_tokens: int) -> bool:
    """Whether the ranges intersect, which is when a nano-operation waits for one of its parent's producer."""
    needed = reads(dependency, batch, decode_tokens)
    return needed.start < producer_batch.stop and producer_batch.start < needed.stop


def plan_graph(plan: PipelinePlan) -> tuple[Operation, ...]:
    """The operations that the plan must place."""
    return present_operations(layer_graph(moe=plan.moe, partition=plan.partition), plan.b_dense, plan.decode_tokens)


def edges(plan: PipelinePlan) -> Iterator[tuple[NanoOperation, NanoOperation, bool]]:
    """Every pair (producer, consumer, producer is of the previous layer) of nano-operations that must run in this order."""
    of: dict[str, list[NanoOperation]] = {}
    for nano in plan.nano_operations:
        of.setdefault(nano.operation, []).append(nano)
    for op in plan_graph(plan):
        for dependency in op.inputs:
            for consumer in of.get(op.name, ()):
                for producer in of.get(dependency.producer, ()):
                    if depends(dependency, plan.batch_of(consumer), plan.batch_of(producer), plan.decode_tokens):
                        yield producer, consumer, dependency.previous_layer


def unroll(plan: PipelinePlan, num_layers: int) -> Iterator[tuple[int, int, NanoOperation]]:
    """(window, layer, nano-operation) for a model of `num_layers`, in order of start: prologue, steady windows, epilogue.

    The order respects every dependency, so executing it one by one is correct.
    """
    ordered = sorted(plan.nano_operations, key=lambda n: n.start_us)
    for window in range(num_layers + plan.max_layer_offset):
        for nano in ordered:
            if 0 <= window - nano.layer_offset < num_layers:
                yield window, window - nano.layer_offset, nano


def period_of_batch_us(
    plan: PipelinePlan, decode_tokens: int, prefill_tokens: int, decode_context: float | None = None
) -> float:
    """Predicted period of the plan for a batch that fills its places in part; `period_us` for one that fills them all.

    Each phase lasts as long as the nano-operation in it that has most of its work left: what ran beside it has no more SMs when
    it is done sooner. GEMMs leave out padding behind the last token of their nano-batch that is in use (ours do, but for fused
    ones), down to ROWS_PER_WEIGHT_READ if there is any, and take ROWS_PER_LAUNCH more; attention has no more to do than there
    are tokens; collectives send padding, too.

    Args:
      decode_context: tokens in the cache of a decoding sequence, on average; attention takes so much longer, or shorter, than
        with those of the plan. None is the plan's.

    Raises:
      ValueError: the batch does not fit.
    """
    if not (0 <= decode_tokens <= plan.decode_tokens and 0 <= prefill_tokens <= plan.b_dense - plan.decode_tokens):
        places = f"{plan.decode_tokens} decoding and {plan.b_dense - plan.decode_tokens} prompt tokens"
        raise ValueError(f"{decode_tokens=} and {prefill_tokens=} do not fit a plan for {places}")
    longer = decode_context / plan.decode_context if decode_context and plan.decode_context else 1.0
    left = [
        _work_left(plan, nano, decode_tokens, prefill_tokens) * (longer if nano.operation == "decode_attention" else 1.0)
        for nano in plan.nano_operations
    ]
    full_us = sum(phase.duration_us for phase in plan.phases)
    part_us = sum(
        phase.duration_us * max((left[r.nano_operation] for r in phase.running), default=1.0) for phase in plan.phases
    )
    return plan.period_us * part_us / full_us


def _work_left(plan: PipelinePlan, nano: NanoOperation, decode_tokens: int, prefill_tokens: int) -> float:
    """Part of a nano-operation's time that a batch needs of it."""
    tokens = plan.batch_of(nano)
    if nano.resource is Resource.NETWORK:
        return 1.0
    used = _used_tokens(plan, tokens, decode_tokens, prefill_tokens)
    if nano.operation in ("decode_attention", "prefill_attention"):
        return used / tokens.tokens
    multiplied = max(used, min(tokens.tokens, ROWS_PER_WEIGHT_READ)) if used else 0
    return (multiplied + ROWS_PER_LAUNCH) / (tokens.tokens + ROWS_PER_LAUNCH)


def _used_tokens(plan: PipelinePlan, tokens: NanoBatch, decode_tokens: int, prefill_tokens: int) -> int:
    """Tokens of the range up to the last that is no padding."""
    end = plan.decode_tokens + prefill_tokens
    if not prefill_tokens or tokens.stop <= plan.decode_tokens or end <= tokens.start:
        end = decode_tokens
    return min(max(end - tokens.start, 0), tokens.tokens)


class SequentialTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Predicted time of one layer executed operation after operation on the whole device; `decode_context` as a plan's."""

    b_dense: int
    decode_tokens: int
    layer_us: float
    decode_context: float | None = None


def sequential_time_of(plan: PipelinePlan) -> SequentialTime:
    """What the plan itself predicts for its mix without splitting."""
    return SequentialTime(
        b_dense=plan.b_dense, decode_tokens=plan.decode_tokens, layer_us=plan.prediction.sequential_us,
        decode_context=plan.decode_context,
    )  # fmt: skip


class PlanSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Plans of one model on one machine for several batch mixes, and the sequential times they compete with.

    `crossover_tokens` is the smallest batch for which a plan beats sequential execution in the search's prediction; smaller
    plans are not executed. It is None when no plan wins anywhere.
    """

    format_version: int = FORMAT_VERSION
    model: str
    device: str
    tp: int
    plans: tuple[PipelinePlan, ...]
    sequential: tuple[SequentialTime, ...]
    crossover_tokens: int | None

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise PlanError(f"plan set has format_version={self.format_version}, this program reads {FORMAT_VERSION}")

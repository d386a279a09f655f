"""Plans as data: the graph of a layer, nano-batches, nano-operations in time, and the set of plans that a runtime chooses from.

A plan describes one *window* of the steady state of repeated layers: a stretch of `period_us` in which every nano-operation
of a layer starts exactly once. Nano-operations of neighbouring layers overlap, so those of one window need not belong to one
layer: in window w, a nano-operation with `layer_offset` k works on layer w - k. A model of L layers takes the windows
0 .. L - 1 + K, K the largest offset; where w - k is no layer (prologue and epilogue) the nano-operation is skipped. `unroll`
spells this out.

Token ranges follow the batch: decoding tokens [0, decode_tokens), prompt tokens behind them. A batch fits a plan when it has at
most that many decoding and at most `b_dense - decode_tokens` prompt tokens; the rest of either range is padding.

This module imports no jax. Checks of a whole plan are in `validate`, which loading applies.
"""

import enum
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

FORMAT_VERSION = 1
TILE = 128
Partition = Literal["none", "all_reduce", "all_gather"]
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
    rows, "all_gather" its columns, "none" is one rank. `shares` says how SMs are budgeted: "constant" through a
    nano-operation's life, "phased" with a change at phase borders, "ideal" not at all (stage I, in which nothing interferes).
    """

    format_version: int = FORMAT_VERSION
    model: str
    device: str
    tp: int
    moe: bool
    partition: Partition
    b_dense: int
    decode_tokens: int
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

    Source: NanoFlow paper, section 4.1.2 (all-gather and all-reduce alternatives move the same bytes).
    """
    nodes: list[Operation] = []

    def add(name: str, resource: Resource, inputs: Sequence[Dependency | str], *runs: str, tokens: TokenKind = "all") -> str:
        deps = tuple(d if isinstance(d, Dependency) else Dependency(producer=d) for d in inputs)
        nodes.append(Operation(name=name, runs=runs or (name,), resource=resource, tokens=tokens, inputs=deps))
        return name

    compute, memory, network = Resource.COMPUTE, Resource.MEMORY, Resource.NETWORK
    feed_forward = "experts" if moe else "down_proj"
    last = feed_forward if partition == "none" else "ffn_all_reduce"
    qkv = Dependency(producer=last, previous_layer=True)
    add("qkv_proj", compute, [qkv], "attention_norm", "qkv_proj", "append_kv")
    add("decode_attention", memory, ["qkv_proj"], tokens="decode")
    add("prefill_attention", compute, [Dependency(producer="qkv_proj", causal=True)], tokens="prefill")
    x: Sequence[str] = ("decode_attention", "prefill_attention")
    if partition == "all_gather":
        x = (add("attention_all_gather", network, x),)
    alone = partition == "none"
    x = (add("o_proj", compute, x, "o_proj_residual" if alone else "o_proj"),)
    if partition == "all_gather":
        x = (add("o_all_gather", network, x, "o_all_gather", "attention_residual"),)
    elif partition == "all_reduce":
        x = (add("o_all_reduce", network, x, "o_all_reduce", "attention_residual"),)
    if moe:
        x = (add("experts", compute, x, "ffn_norm", "router", "experts", *(["ffn_residual"] if alone else [])),)
    else:
        x = (add("gate_up_proj", compute, x, "ffn_norm", "gate_up_proj"),)
        x = (add("down_proj", compute, x, "down_proj_residual" if alone else "down_proj"),)
    if partition != "none":
        add("ffn_all_reduce", network, x, "ffn_all_reduce", "ffn_residual")
    return tuple(nodes)


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


class SequentialTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Predicted time of one layer executed operation after operation on the whole device."""

    b_dense: int
    decode_tokens: int
    layer_us: float


class PlanSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Plans of one model on one machine for several batch mixes, and the sequential times they compete with.

    `crossover_tokens` is the smallest batch for which a plan beats sequential execution in the search's prediction; below it
    every step is sequential. It is None when no plan wins anywhere.
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


def encode(record: PipelinePlan | PlanSet) -> bytes:
    """JSON of a plan or a plan set."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def decode_plan(text: bytes) -> PipelinePlan:
    """A validated plan from JSON.

    Raises:
      PlanError: not JSON of a plan of this format version, or a rule is broken.
    """
    plan = _decode(text, PipelinePlan)
    validate(plan)
    return plan


def decode_plan_set(text: bytes) -> PlanSet:
    """A plan set from JSON, every plan validated. Raises as `decode_plan` does."""
    plans = _decode(text, PlanSet)
    for plan in plans.plans:
        if (plan.model, plan.device, plan.tp) != (plans.model, plans.device, plans.tp):
            raise PlanError(
                f"plan for {plan.model}/{plan.device}/tp{plan.tp} in a set for {plans.model}/{plans.device}/tp{plans.tp}"
            )
        validate(plan)
    return plans


def _decode(text: bytes, kind):
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise PlanError(f"not a {kind.__name__} of format version {FORMAT_VERSION}: {error}") from error


def validate(plan: PipelinePlan) -> None:
    """Checks sizes, coverage, dependencies, lanes, phases and budgets.

    Raises:
      PlanError: naming the rule and the values that break it.
    """
    _check_sizes(plan)
    graph = plan_graph(plan)
    _check_coverage(plan, graph)
    _check_dependencies(plan)
    _check_lanes(plan)
    _check_phases(plan)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)


def _slack_us(plan: PipelinePlan) -> float:
    """Rounding allowed between times that should be equal."""
    return 1e-6 * plan.period_us


def _check_sizes(plan: PipelinePlan) -> None:
    _require(plan.tile > 0 and plan.b_dense > 0, f"tile={plan.tile} and b_dense={plan.b_dense} must be positive")
    _require(plan.b_dense % plan.tile == 0, f"b_dense={plan.b_dense} is not a multiple of tile={plan.tile}")
    _require(0 <= plan.decode_tokens <= plan.b_dense, f"decode_tokens={plan.decode_tokens} is not in [0, {plan.b_dense}]")
    _require((plan.partition == "none") == (plan.tp == 1), f"partition={plan.partition!r} does not fit tp={plan.tp}")
    _require(plan.num_sms > 0, f"num_sms={plan.num_sms} must be positive")
    _require(math.isfinite(plan.period_us) and plan.period_us > 0, f"period_us={plan.period_us} must be positive and finite")
    for n in plan.nano_operations:
        name = f"{n.operation}[{n.nano_batch}]"
        _require(0 <= n.start_us < plan.period_us, f"{name}: start_us={n.start_us} is not in [0, {plan.period_us})")
        _require(
            0 < n.duration_us <= plan.period_us + _slack_us(plan), f"{name}: {n.duration_us=} is not in (0, {plan.period_us}]"
        )
        _require(0 < n.best_us <= n.duration_us + _slack_us(plan), f"{name}: best_us={n.best_us} exceeds {n.duration_us=}")
        _require(n.layer_offset >= 0, f"{name}: layer_offset={n.layer_offset} is negative")
        _require(0 < n.num_sms <= plan.num_sms, f"{name}: num_sms={n.num_sms} is not in [1, {plan.num_sms}]")
        _require(0 < n.share <= 1, f"{name}: share={n.share} is not in (0, 1]")


def _check_coverage(plan: PipelinePlan, graph: Sequence[Operation]) -> None:
    names = {op.name for op in graph}
    _require(set(plan.nano_batches) == names, f"nano_batches of {sorted(plan.nano_batches)}, the layer has {sorted(names)}")
    for op in graph:
        covered = token_range(op.tokens, plan.b_dense, plan.decode_tokens)
        batches = plan.nano_batches[op.name]
        stop = covered.start
        for b in batches:
            _require(
                b.start == stop and b.stop > b.start, f"{op.name}: nano-batch [{b.start}, {b.stop}) does not continue at {stop}"
            )
            stop = b.stop
            _require(
                stop % plan.tile == 0 or stop == covered.stop, f"{op.name}: cut at {stop} is not a multiple of tile={plan.tile}"
            )
        _require(stop == covered.stop, f"{op.name}: nano-batches end at {stop}, the operation at {covered.stop}")
        placed = sorted(n.nano_batch for n in plan.nano_operations if n.operation == op.name)
        _require(placed == list(range(len(batches))), f"{op.name}: nano-batches {placed} placed, there are {len(batches)}")
        wrong = {n.resource for n in plan.nano_operations if n.operation == op.name} - {op.resource}
        _require(not wrong, f"{op.name}: placed on {wrong}, its resource is {op.resource}")
    unknown = {n.operation for n in plan.nano_operations} - names
    _require(not unknown, f"nano-operations of {sorted(unknown)}, which this layer does not have")


def _check_dependencies(plan: PipelinePlan) -> None:
    for producer, consumer, previous_layer in edges(plan):
        ready = producer.start_us + producer.duration_us + producer.layer_offset * plan.period_us
        begins = consumer.start_us + (consumer.layer_offset + previous_layer) * plan.period_us
        _require(
            ready <= begins + _slack_us(plan),
            f"dependency: {consumer.operation}[{consumer.nano_batch}] starts {ready - begins:.6g} us before "
            f"{producer.operation}[{producer.nano_batch}] ends",
        )


def _check_lanes(plan: PipelinePlan) -> None:
    """Nano-operations of one resource follow one another, around the window's end too."""
    for resource in Resource:
        lane = sorted((n for n in plan.nano_operations if n.resource == resource), key=lambda n: n.start_us)
        for n, after in zip(lane, lane[1:] + lane[:1], strict=True):
            begins = after.start_us + (plan.period_us if after is lane[0] else 0.0)
            _require(
                n.start_us + n.duration_us <= begins + _slack_us(plan),
                f"overlap on {resource}: {n.operation}[{n.nano_batch}] runs into {after.operation}[{after.nano_batch}]",
            )


def _check_phases(plan: PipelinePlan) -> None:
    clock = 0.0
    slack = _slack_us(plan) + 1e-6
    for index, phase in enumerate(plan.phases):
        _require(
            abs(phase.start_us - clock) <= slack, f"phase {index} starts at {phase.start_us}, the one before ends at {clock}"
        )
        _require(phase.duration_us > 0, f"phase {index}: duration_us={phase.duration_us} must be positive")
        clock = phase.start_us + phase.duration_us
        sms = sum(r.num_sms for r in phase.running)
        shares = sum(r.share for r in phase.running)
        _require(
            plan.shares == "ideal" or sms <= plan.num_sms, f"phase {index}: {sms} SMs in use, the device has {plan.num_sms}"
        )
        _require(plan.shares == "ideal" or shares <= 1 + 1e-9, f"phase {index}: resource shares sum to {shares:.6g}")
    _require(abs(clock - plan.period_us) <= slack, f"phases end at {clock}, the period is {plan.period_us}")
    for index, n in enumerate(plan.nano_operations):
        name = f"{n.operation}[{n.nano_batch}]"
        held = [p for p in plan.phases if any(r.nano_operation == index for r in p.running)]
        in_phases = sum(p.duration_us for p in held)
        _require(abs(in_phases - n.duration_us) <= slack, f"{name}: runs {in_phases} us in phases, its {n.duration_us=}")
        _require(0 <= n.phase < len(plan.phases), f"{name}: phase={n.phase} does not exist")
        _require(abs(plan.phases[n.phase].start_us - n.start_us) <= slack, f"{name}: does not start with its phase {n.phase}")
        done = sum(p.duration_us * r.performance for p in held for r in p.running if r.nano_operation == index)
        _require(abs(done - n.best_us) <= 1e-6 * n.best_us + slack, f"{name}: does {done} us of its work, best_us={n.best_us}")

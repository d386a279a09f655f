"""Plans and plan sets as JSON, and the rules that every plan keeps."""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nanoflow_jax.plan import (
    FORMAT_VERSION,
    Operation,
    PipelinePlan,
    PlanError,
    PlanSet,
    Resource,
    edges,
    plan_graph,
    sequential_time_of,
    token_range,
)


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


def read_plans(path: Path) -> PlanSet:
    """A plan set, or a single plan made into one, from a file that `python -m search` wrote.

    Raises:
      PlanError: the file holds neither, or a plan breaks a rule.
      OSError: it cannot be read.
    """
    text = path.read_bytes()
    try:
        return decode_plan_set(text)
    except PlanError as not_a_set:
        try:
            plan = decode_plan(text)
        except PlanError as error:
            raise PlanError(f"{path}: neither a plan set ({not_a_set}) nor a plan ({error})") from None
    sequential = sequential_time_of(plan)
    return PlanSet(
        model=plan.model,
        device=plan.device,
        tp=plan.tp,
        plans=(plan,),
        sequential=(sequential,),
        crossover_tokens=plan.b_dense,
    )


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
    _require(plan.decode_context is None or plan.decode_context > 0, f"decode_context={plan.decode_context} must be positive")
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

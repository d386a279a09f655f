"""Replays a plan on a profile with an event loop of its own, and refuses what a device could not run.

Nothing of the solver is used: times, speeds and energies are read from the profile again, ranges and waits from the plan's
nano-batches. A plan with constant shares is replayed as streams would run it: nano-operations are issued in the plan's order of
start, each as soon as what it waits for has ended, its lane is free and its share is left. A phased plan is replayed phase by
phase, each ending when the work planned for it is done. The period is measured between layers once the pipeline is full.
"""

import dataclasses
from collections.abc import Sequence

from nanoflow_jax.plan import NanoOperation, PipelinePlan, PlanError, Resource, edges
from nanoflow_jax.plan_files import validate
from nanoflow_jax.workload import BatchMix, Workload, steady_mix
from search.interference import performance
from search.problem import Costing

LAYERS = 40
_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """The measured period, when each layer ended, and the mean power (None if the profile knows no power)."""

    period_us: float
    layer_ends_us: tuple[float, ...]
    mean_power_w: float | None


def mix_of(plan: PipelinePlan, workloads: Sequence[Workload]) -> BatchMix:
    """The batch that `plan` was made for, as far as the plan records it; the rest is a workload's.

    A plan does not record the context of its prompt tokens, nor do old ones that of decoding tokens. Of several workloads the
    plan's is one with its decoding context, and among these the one whose share of decoding tokens is nearest.

    Raises:
      PlanError: something is not recorded, and no workload has the plan's decoding context.
    """
    decode_tokens, context = plan.decode_tokens, plan.decode_context
    if decode_tokens == plan.b_dense and context is not None:
        return BatchMix(b_dense=plan.b_dense, decode_tokens=decode_tokens, decode_context=context, prefill_context=0.0)
    fitting = [w for w in workloads if context is None or context == w.decode_context]
    if not fitting:
        given = ", ".join(f"{w} has {w.decode_context}" for w in workloads) or "none is given"
        raise PlanError(
            f"a plan for {plan.b_dense} tokens, {decode_tokens} decoding at decode_context={context}, does not record all its "
            f"contexts: a workload with this decode_context must say the rest; {given}"
        )
    steady = [steady_mix(w, plan.b_dense) for w in fitting]
    nearest = min(steady, key=lambda mix: abs(mix.decode_tokens - decode_tokens))
    return dataclasses.replace(nearest, decode_tokens=decode_tokens)


def simulate(plan: PipelinePlan, costing: Costing, layers: int = LAYERS) -> Replay:
    """Runs `layers` layers of `plan`.

    Raises:
      PlanError: the plan breaks a rule of its own format, was made for another batch or other times, works faster than the
        interference map allows, exceeds the power cap, or takes longer than it says.
    """
    validate(plan)
    _check_times(plan, costing)
    ends = _run_phases(plan, costing, layers) if plan.shares == "phased" else _run_streams(plan, layers)
    # The last layers run without successors beside them and are faster.
    period = _steady_period(ends[: layers - plan.max_layer_offset - 1])
    if period > plan.period_us * (1 + _TOLERANCE):
        raise PlanError(f"the replay takes {period:.9g} us per layer, the plan says {plan.period_us:.9g}")
    return Replay(period_us=period, layer_ends_us=tuple(ends), mean_power_w=_check_power(plan, costing))


def _key(n: NanoOperation) -> tuple[str, int]:
    return n.operation, n.nano_batch


def _check_times(plan: PipelinePlan, costing: Costing) -> None:
    mix = costing.mix
    if (plan.b_dense, plan.decode_tokens, plan.partition) != (mix.b_dense, mix.decode_tokens, costing.partition):
        raise PlanError(
            f"plan for (b_dense, decode_tokens, partition) = {(plan.b_dense, plan.decode_tokens, plan.partition)}, "
            f"replayed with {(mix.b_dense, mix.decode_tokens, costing.partition)}"
        )
    for index, n in enumerate(plan.nano_operations):
        best = costing.time_of(n.operation, plan.batch_of(n).tokens)
        if abs(best - n.best_us) > _TOLERANCE * best:
            raise PlanError(f"{_key(n)}: best_us={n.best_us}, the profile says {best} for {plan.batch_of(n)}")
        if plan.shares == "ideal":
            continue
        for phase in plan.phases:
            for r in phase.running:
                fastest = performance(costing.table.interference, n.resource, r.share)
                if r.nano_operation == index and r.performance > fastest * (1 + 1e-4):
                    raise PlanError(f"{_key(n)}: performance={r.performance} at share={r.share}, the profile allows {fastest}")


def _check_power(plan: PipelinePlan, costing: Costing) -> float | None:
    power = costing.table.power
    if power is None:
        return None
    joules = sum(costing.energy_of(n.operation, plan.batch_of(n).tokens) or 0.0 for n in plan.nano_operations)
    watts = power.idle_w + 1e6 * joules / plan.period_us
    if plan.shares != "ideal" and watts > power.cap_w * (1 + _TOLERANCE):
        raise PlanError(f"the plan draws {watts:.1f} W on average, the cap is {power.cap_w} W")
    return watts


def _waits(plan: PipelinePlan) -> dict[tuple[str, int], list[tuple[tuple[str, int], int]]]:
    """For each nano-operation, what it waits for and how many layers earlier."""
    waits: dict[tuple[str, int], list[tuple[tuple[str, int], int]]] = {_key(n): [] for n in plan.nano_operations}
    for producer, consumer, previous_layer in edges(plan):
        waits[_key(consumer)].append((_key(producer), int(previous_layer)))
    return waits


def _run_streams(plan: PipelinePlan, layers: int) -> list[float]:
    waits = _waits(plan)
    instances = sorted(
        ((w * plan.period_us + n.start_us, w - n.layer_offset, i) for w in range(layers + plan.max_layer_offset)
         for i, n in enumerate(plan.nano_operations) if 0 <= w - n.layer_offset < layers)
    )  # fmt: skip
    ended: dict[tuple[int, str, int], float] = {}
    lane_free = dict.fromkeys(Resource, 0.0)
    running: list[tuple[float, float]] = []
    clock = 0.0
    for _, layer, index in instances:
        n = plan.nano_operations[index]
        for operation, back in waits[_key(n)]:
            if layer - back >= 0:
                if (layer - back, *operation) not in ended:
                    raise PlanError(f"dependency: {_key(n)} of layer {layer} is issued before {operation}")
                clock = max(clock, ended[(layer - back, *operation)])
        clock = max(clock, lane_free[n.resource])
        if plan.shares != "ideal":
            # Shares that end exactly now are free; rounding must not keep them.
            running = sorted(r for r in running if r[0] > clock * (1 + 1e-12) + 1e-9)
            while running and sum(share for _, share in running) + n.share > 1 + 1e-9:
                clock = max(clock, running.pop(0)[0])
            running.append((clock + n.duration_us, n.share))
        ended[(layer, *_key(n))] = lane_free[n.resource] = clock + n.duration_us
    return [max(end for (layer, *_), end in ended.items() if layer == wanted) for wanted in range(layers)]


def _run_phases(plan: PipelinePlan, costing: Costing, layers: int) -> list[float]:
    waits = _waits(plan)
    left: dict[tuple[int, str, int], float] = {}
    ended: dict[tuple[int, str, int], float] = {}
    clock = 0.0
    for window in range(layers + plan.max_layer_offset + 1):
        for number, phase in enumerate(plan.phases):
            work = {}
            for r in phase.running:
                n = plan.nano_operations[r.nano_operation]
                # A phase before the one it starts in belongs to the nano-operation of the window before.
                layer = window - n.layer_offset - (number < n.phase)
                if 0 <= layer < layers:
                    work[(layer, *_key(n))] = (n, r)
            for (layer, *_), (n, _) in work.items():
                if (layer, *_key(n)) in left:
                    continue
                left[(layer, *_key(n))] = n.best_us
                for operation, back in waits[_key(n)]:
                    if layer - back >= 0 and (layer - back, *operation) not in ended:
                        raise PlanError(f"dependency: {_key(n)} of layer {layer} starts before {operation} has ended")
            if sum(r.share for _, r in work.values()) > 1 + 1e-9:
                raise PlanError(f"phase {number}: shares sum to more than 1")
            # The phase lasts until the slowest has done what the plan gives it to do here, at the speed of its share.
            speeds = {
                k: min(r.performance, performance(costing.table.interference, n.resource, r.share))
                for k, (n, r) in work.items()
            }
            lasts = max(
                (phase.duration_us * r.performance / speeds[k] for k, (_, r) in work.items()), default=phase.duration_us
            )
            clock += lasts
            for key, (n, r) in work.items():
                left[key] -= phase.duration_us * r.performance
                if left[key] <= 1e-6 * n.best_us:
                    ended.setdefault(key, clock)
    undone = [key for key in left if key not in ended]
    if undone:
        raise PlanError(f"nano-operations left undone: {undone[:3]}")
    return [max(end for (layer, *_), end in ended.items() if layer == wanted) for wanted in range(layers)]


def _steady_period(ends: list[float]) -> float:
    """The mean period over the shortest repetition that the last layers show, else over their whole second half."""
    for k in range(1, 9):
        spans = [b - a for a, b in zip(ends[-2 * k - 1 : -k], ends[-k - 1 :], strict=True)]
        if max(spans) - min(spans) <= 1e-9 * ends[-1]:
            return spans[-1] / k
    half = len(ends) // 2
    return (ends[-1] - ends[half]) / (len(ends) - 1 - half)

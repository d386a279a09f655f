"""Plans made without a search: `hand_plan` schedules given nano-batches, `rotate` moves the window over several layers."""

import itertools
import math
from collections.abc import Mapping, Sequence

import msgspec

from nanoflow_jax.plan import (
    TILE,
    NanoBatch,
    Operation,
    Partition,
    PipelinePlan,
    PlanError,
    Prediction,
    Resource,
    depends,
    layer_graph,
    present_operations,
)
from nanoflow_jax.plan_files import validate
from search.assemble import Intensity, Placed, Segment, fold


def rotate(plan: PipelinePlan, first: int) -> PipelinePlan:
    """The same schedule with the window beginning at phase `first`; layer offsets follow.

    Raises:
      PlanError: there is no such phase.
    """
    if not 0 <= first < len(plan.phases):
        raise PlanError(f"phase {first} does not exist, the plan has {len(plan.phases)}")
    shift = plan.phases[first].start_us
    borders = list(itertools.accumulate((p.duration_us for p in plan.phases[first:] + plan.phases[:first]), initial=0.0))
    nanos = [
        msgspec.structs.replace(
            n,
            start_us=borders[(n.phase - first) % len(plan.phases)],
            layer_offset=n.layer_offset - (n.start_us < shift),
            phase=(n.phase - first) % len(plan.phases),
        )
        for n in plan.nano_operations
    ]
    order = sorted(range(len(nanos)), key=lambda i: nanos[i].phase)
    rank = {old: new for new, old in enumerate(order)}
    least = min(n.layer_offset for n in nanos)
    phases = tuple(
        msgspec.structs.replace(
            p,
            start_us=border,
            running=tuple(msgspec.structs.replace(r, nano_operation=rank[r.nano_operation]) for r in p.running),
        )
        for p, border in zip(plan.phases[first:] + plan.phases[:first], borders, strict=False)
    )
    placed = tuple(msgspec.structs.replace(nanos[i], layer_offset=nanos[i].layer_offset - least) for i in order)
    return msgspec.structs.replace(plan, nano_operations=placed, phases=phases)


def hand_plan(
    *,
    nano_batches: Mapping[str, Sequence[tuple[int, int]]],
    priority: Sequence[tuple[str, int]] = (),
    partition: Partition = "none",
    tp: int = 1,
    moe: bool = False,
    tile: int = TILE,
    num_sms: int = 8,
    model: str = "hand-made",
    durations_us: Mapping[str, float] | None = None,
) -> PipelinePlan:
    """A valid plan from nano-batches alone: list scheduling in the order of `priority`, one layer after another.

    `nano_batches` gives (start, stop) per operation of the layer; `priority` orders (operation, nano-batch) pairs, those left
    out come last. Every nano-operation takes `durations_us[operation]`, by default 1. SMs are halved between compute and
    the two other lanes. Use `rotate` for a plan whose window holds several layers.

    Raises:
      PlanError: the nano-batches are not those of a layer, or there are fewer than 3 SMs.
    """
    if num_sms < 3:
        raise PlanError(f"num_sms={num_sms}: three lanes need at least 3")
    batches = {name: tuple(NanoBatch(start=a, stop=b) for a, b in ranges) for name, ranges in nano_batches.items()}
    whole = max(batches.get("qkv_proj", ()), key=lambda b: b.stop, default=NanoBatch(start=0, stop=0)).stop
    decode_tokens = max((b.stop for b in batches.get("decode_attention", ())), default=0)
    graph = present_operations(layer_graph(moe=moe, partition=partition), whole, decode_tokens)
    if set(batches) != {op.name for op in graph}:
        raise PlanError(f"nano-batches of {sorted(batches)}, the layer has {sorted(op.name for op in graph)}")
    placed = _list_schedule(graph, batches, decode_tokens, priority, durations_us or {}, num_sms)
    period = max(p.stop_us for p in placed)
    nanos, phases = fold(placed, period, idle_w=0.0)
    alone = sum(p.best_us for p in placed)
    prediction = Prediction(
        sequential_us=alone, nano_us=alone, ideal_us=period, ideal_bound_us=0.0, bound_counts="none", gap=1.0,
        lower_bound_us=0.0, mean_power_w=0.0, estimated=True,
    )  # fmt: skip
    plan = PipelinePlan(
        model=model, device="none", tp=tp, moe=moe, partition=partition, b_dense=whole, decode_tokens=decode_tokens, tile=tile,
        num_sms=num_sms, shares="constant", period_us=period, nano_batches=batches, nano_operations=nanos, phases=phases,
        prediction=prediction,
    )  # fmt: skip
    validate(plan)
    return plan


def _list_schedule(
    graph: Sequence[Operation],
    batches: Mapping[str, Sequence[NanoBatch]],
    decode_tokens: int,
    priority: Sequence[tuple[str, int]],
    durations_us: Mapping[str, float],
    num_sms: int,
) -> list[Placed]:
    """Of the nano-operations that wait for nothing unplaced, the first in `priority` goes next, as early as its lane allows."""
    sms = {Resource.COMPUTE: num_sms // 2, Resource.MEMORY: max(num_sms // 4, 1), Resource.NETWORK: max(num_sms // 4, 1)}
    rank = {pair: i for i, pair in enumerate(priority)}
    waiting = [(op, i) for op in graph for i in range(len(batches[op.name]))]
    ends: dict[tuple[str, int], float] = {}
    free = dict.fromkeys(Resource, 0.0)
    placed = []

    def needs(op: Operation, i: int) -> list[tuple[str, int]]:
        return [
            (d.producer, j)
            for d in op.inputs
            if not d.previous_layer
            for j, b in enumerate(batches[d.producer])
            if depends(d, batches[op.name][i], b, decode_tokens)
        ]

    while waiting:
        ready = [(op, i) for op, i in waiting if all(n in ends for n in needs(op, i))]
        op, i = min(ready, key=lambda pair: rank.get((pair[0].name, pair[1]), math.inf))
        waiting.remove((op, i))
        duration = durations_us.get(op.name, 1.0)
        start = max([free[op.resource], *(ends[n] for n in needs(op, i))])
        ends[op.name, i] = free[op.resource] = start + duration
        share = sms[op.resource] / num_sms
        segment = Segment(start_us=start, stop_us=start + duration, share=share, num_sms=sms[op.resource], performance=share)
        placed.append(
            Placed(
                operation=op.name, nano_batch=i, resource=op.resource, best_us=duration * share, segments=(segment,),
                intensity=Intensity(**{op.resource.value: 1.0}),
            )
        )  # fmt: skip
    return placed

"""Random valid plans at any scale: random splits, durations and orders, placed greedily in a window that wraps around."""

import itertools

import numpy as np

from nanoflow_jax.plan import (
    NanoBatch,
    NanoOperation,
    Partition,
    Phase,
    PipelinePlan,
    Prediction,
    Resource,
    Running,
    depends,
    layer_graph,
    present_operations,
    token_range,
)
from nanoflow_jax.plan_files import validate


def random_plan(
    rng: np.random.Generator,
    *,
    tp: int,
    moe: bool,
    partition: Partition,
    b_dense: int,
    decode_tokens: int,
    tile: int,
    model: str = "random",
) -> PipelinePlan:
    """Operations in topological order, each at the earliest place of its lane, modulo a period that grows until all fit."""
    graph = present_operations(layer_graph(moe=moe, partition=partition), b_dense, decode_tokens)
    batches = {op.name: _cuts(rng, token_range(op.tokens, b_dense, decode_tokens), tile) for op in graph}
    pairs = [(op, i) for op in graph for i in range(len(batches[op.name]))]
    durations = {(op.name, i): float(rng.integers(1, 9)) for op, i in pairs}
    lanes = [sum(durations[op.name, i] for op, i in pairs if op.resource == resource) for resource in Resource]
    period = max(lanes) + float(rng.integers(0, 12))
    while (starts := _place(rng, graph, batches, durations, decode_tokens, period)) is None:
        period += 1.0
    # Turning the window moves some nano-operations into the next one, as a search does to overlap layers.
    turn = float(rng.integers(0, int(period)))
    starts = {key: start + turn for key, start in starts.items()}
    nano = [
        NanoOperation(
            operation=op.name,
            nano_batch=i,
            resource=op.resource,
            layer_offset=int(starts[op.name, i] // period),
            start_us=starts[op.name, i] % period,
            duration_us=durations[op.name, i],
            best_us=durations[op.name, i],
            phase=0,
            share=1.0,
            num_sms=1,
        )
        for op, i in pairs
    ]
    nano, phases = _phases(nano, period)
    total = sum(durations.values())
    plan = PipelinePlan(
        model=model,
        device="none",
        tp=tp,
        moe=moe,
        partition=partition,
        b_dense=b_dense,
        decode_tokens=decode_tokens,
        tile=tile,
        num_sms=1,
        shares="ideal",
        period_us=period,
        nano_batches=batches,
        nano_operations=tuple(nano),
        phases=phases,
        prediction=Prediction(
            sequential_us=total, nano_us=total, ideal_us=period, ideal_bound_us=max(lanes), bound_counts="", gap=0.0,
            lower_bound_us=max(lanes), mean_power_w=0.0, estimated=True,
        ),
    )  # fmt: skip
    validate(plan)
    return plan


def _cuts(rng: np.random.Generator, tokens: NanoBatch, tile: int) -> tuple[NanoBatch, ...]:
    inner = [t for t in range(tokens.start + 1, tokens.stop) if t % tile == 0]
    chosen = sorted(rng.choice(inner, size=min(len(inner), int(rng.integers(0, 4))), replace=False).tolist()) if inner else []
    edges = [tokens.start, *chosen, tokens.stop]
    return tuple(NanoBatch(start=a, stop=b) for a, b in itertools.pairwise(edges))


def _place(rng, graph, batches, durations, decode_tokens, period) -> dict[tuple[str, int], float] | None:
    """Start of every nano-operation of one layer, or None where the next layer would begin too early."""
    starts: dict[tuple[str, int], float] = {}
    for op in graph:
        for i in rng.permutation(len(batches[op.name])).tolist():
            ready = 0.0
            for dep in op.inputs:
                for j, producer in enumerate(batches[dep.producer]):
                    if not dep.previous_layer and depends(dep, batches[op.name][i], producer, decode_tokens):
                        ready = max(ready, starts[dep.producer, j] + durations[dep.producer, j])
            lane = [key for key in starts if next(o for o in graph if o.name == key[0]).resource == op.resource]
            candidates = [ready + float(rng.integers(0, 3))] + [ready + k for k in range(int(period) + 1)]
            for start in candidates:
                if all(_apart(start, durations[op.name, i], starts[key], durations[key], period) for key in lane):
                    starts[op.name, i] = start
                    break
            else:
                return None
    for op in graph:
        for dep in op.inputs:
            for i, batch in enumerate(batches[op.name]):
                for j, producer in enumerate(batches[dep.producer]):
                    late = starts[dep.producer, j] + durations[dep.producer, j] > starts[op.name, i] + period
                    if dep.previous_layer and depends(dep, batch, producer, decode_tokens) and late:
                        return None
    return starts


def _apart(start: float, duration: float, other: float, other_duration: float, period: float) -> bool:
    gap = (start - other) % period
    return gap >= other_duration and period - gap >= duration


def _phases(nano: list[NanoOperation], period: float) -> tuple[list[NanoOperation], tuple[Phase, ...]]:
    cuts = sorted({0.0, *(n.start_us for n in nano), *((n.start_us + n.duration_us) % period for n in nano)})
    phases, placed = [], []
    for start, stop in zip(cuts, [*cuts[1:], period], strict=True):
        middle = (start + stop) / 2
        running = [i for i, n in enumerate(nano) if (middle - n.start_us) % period < n.duration_us]
        phases.append(
            Phase(
                start_us=start, duration_us=stop - start, compute=0.0, memory=0.0, network=0.0, power_w=0.0,
                running=tuple(Running(nano_operation=i, share=1.0, num_sms=1, performance=1.0) for i in running),
            )
        )  # fmt: skip
    for n in nano:
        placed.append(
            NanoOperation(**{f: getattr(n, f) for f in n.__struct_fields__ if f != "phase"}, phase=cuts.index(n.start_us))
        )
    return placed, tuple(phases)

"""From an allocation of shares to the plan that executors read: SM counts, nano-batches, phases, predictions."""

from collections.abc import Mapping, Sequence

from nanoflow_jax.plan import NanoBatch, Partition, Phase, PipelinePlan, Prediction, Resource, Shares, token_range
from nanoflow_jax.plan_files import validate
from search.analytic import kernel_work
from search.assemble import Intensity, Placed, Segment, fold
from search.hardware import hardware
from search.interference import sms_of_share
from search.problem import Costing, build_problem
from search.profile_table import kernel_of
from search.resources import Allocation, Device, Grant, energy_floor_us
from search.schedule import Node
from search.stage_one import StageOne


def intensity(costing: Costing, node: Node) -> Intensity:
    """Fractions of the datasheet's rates that a nano-operation reaches alone, and its watts above idle."""
    device = hardware(costing.table.device)
    kernel = kernel_of(costing.model, costing.table.tp, costing.partition, node.operation)
    flops, moved, sent = kernel_work(kernel, node.batch.tokens, costing.context(costing.operation(node.operation)))
    seconds = 1e-6 * node.best_us
    return Intensity(
        compute=flops / seconds / device.peak_flops,
        memory=moved / seconds / device.memory_bandwidth,
        network=sent / seconds / device.network_bandwidth,
        power_w=(node.energy_j or 0.0) / seconds,
    )


def place(costing: Costing, allocation: Allocation, device: Device) -> list[Placed]:
    """Nano-operations with SM counts: memory and network kernels by their share, GEMMs what those beside them leave."""
    nodes, period = allocation.schedule.nodes, allocation.period_us
    own = {
        i: sms_of_share(device.interference, nodes[g.node].resource, g.share, device.num_sms)
        for i, g in enumerate(allocation.grants)
        if nodes[g.node].resource is not Resource.COMPUTE
    }
    segments: list[list[Segment]] = [[] for _ in nodes]
    for i, g in enumerate(allocation.grants):
        sms = own.get(i)
        if sms is None:
            sms = device.num_sms - (_most_beside(g, allocation.grants, own, period) if g.share < 1 else 0)
        segments[g.node].append(
            Segment(start_us=g.start_us, stop_us=g.stop_us, share=g.share, num_sms=sms, performance=g.performance)
        )
    return [
        Placed(
            operation=n.operation, nano_batch=n.nano_batch, resource=n.resource, best_us=n.best_us,
            segments=tuple(sorted(s, key=lambda x: x.start_us)), intensity=intensity(costing, n),
        )
        for n, s in zip(nodes, segments, strict=True)
    ]  # fmt: skip


def _most_beside(grant: Grant, grants: Sequence[Grant], own: Mapping[int, int], period_us: float) -> int:
    """The most SMs that memory and network kernels hold at any instant of `grant`, in any layer."""
    length = grant.stop_us - grant.start_us
    eps = 1e-7 * period_us
    spans = [
        ((grants[i].start_us - grant.start_us) % period_us, grants[i].stop_us - grants[i].start_us, n) for i, n in own.items()
    ]
    spans = [(s - period_us if period_us - s < eps else s, d, n) for s, d, n in spans]
    # What runs at the beginning has started up to a period before; anything else starts inside.
    instants = [0.0, *(s for s, _, _ in spans if 0 <= s < length - eps)]

    def held(t: float) -> int:
        return sum(n for s, d, n in spans if s <= t + eps < s + d or s - period_us <= t + eps < s - period_us + d)

    return max(held(t) for t in instants)


def build_plan(
    costing: Costing,
    allocation: Allocation,
    shares: Shares,
    device: Device,
    stage_one: Mapping[Partition, StageOne],
    costings: Mapping[Partition, Costing],
) -> PipelinePlan:
    """The validated plan of an allocation, with stage I's bounds from all partitions."""
    nodes = allocation.schedule.nodes
    batches: dict[str, tuple[NanoBatch, ...]] = {}
    for n in sorted(nodes, key=lambda n: n.nano_batch):
        batches[n.operation] = (*batches.get(n.operation, ()), n.batch)
    power = costing.table.power
    nanos, phases = fold(place(costing, allocation, device), allocation.period_us, power.idle_w if power else 0.0)
    best_partition = min(stage_one, key=lambda p: stage_one[p].best.period * stage_one[p].best.problem.tick_us)
    best = stage_one[best_partition]
    tick = best.best.problem.tick_us
    loads = [build_problem(costings[p]).load_bound() * stage_one[p].best.problem.tick_us for p in stage_one]
    prediction = Prediction(
        sequential_us=min(c.sequential_us() for c in costings.values()),
        nano_us=sum(n.best_us for n in nodes),
        ideal_us=best.best.period * tick,
        ideal_bound_us=best.bound * tick,
        bound_counts=f"{best_partition} " + " ".join(
            f"{g.name}={n}" for g, n in zip(best.best.problem.groups, best.best.counts, strict=True)
        ),
        gap=max(0.0, 1 - best.bound / best.best.period),
        lower_bound_us=max(min(loads), energy_floor_us(allocation.schedule, power)),
        mean_power_w=sum(p.power_w * p.duration_us for p in phases) / allocation.period_us,
        estimated=costing.table.source == "analytic" or any(n.estimated for n in nodes),
    )  # fmt: skip
    plan = PipelinePlan(
        model=costing.model.name, device=costing.table.device, tp=costing.table.tp, moe=costing.model.is_moe,
        partition=costing.partition, b_dense=costing.mix.b_dense, decode_tokens=costing.mix.decode_tokens,
        decode_context=costing.mix.decode_context or None, num_sms=device.num_sms, shares=shares,
        period_us=allocation.period_us, nano_batches=batches,
        nano_operations=nanos, phases=phases, prediction=prediction,
    )  # fmt: skip
    validate(plan)
    return plan


def sequential_phases(costing: Costing) -> tuple[tuple[str, Phase], ...]:
    """One layer without splits or overlap: (operation, its stretch with utilisations), to compare a plan with."""
    power = costing.table.power
    clock, phases = 0.0, []
    for op in costing.graph():
        batch = token_range(op.tokens, costing.mix.b_dense, costing.mix.decode_tokens)
        timing = costing.timing(op, batch.tokens)
        node = Node(
            operation=op.name, nano_batch=0, batch=batch, resource=op.resource, best_us=timing.time_us,
            energy_j=timing.energy_j, estimated=timing.estimated,
        )  # fmt: skip
        use = intensity(costing, node)
        phases.append(
            (op.name, Phase(
                start_us=clock, duration_us=timing.time_us, running=(), compute=use.compute, memory=use.memory,
                network=use.network, power_w=use.power_w + (power.idle_w if power else 0.0),
            ))
        )  # fmt: skip
        clock += timing.time_us
    return tuple(phases)

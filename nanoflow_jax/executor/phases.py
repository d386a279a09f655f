"""A plan as a sequence of phases: what runs side by side between two barriers.

XLA starts asynchronous work and waits for it in whatever order its scheduler likes; only a barrier in front of everything that
should run together, and one behind it, keeps the pieces in flight together. Within a phase each resource works off a chain of
nano-operations on its own stream, so nothing in a chain may need a result of another chain of the same phase.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from nanoflow_jax.plan import NanoOperation, PipelinePlan, Resource, edges, unroll

# Kernels drain and new ones start at a phase's end.
BARRIER_US = 3.0
_ROUNDING_US = 1e-3


@dataclasses.dataclass(frozen=True)
class Placed:
    """A nano-operation of a layer, with the time it starts in the plan's unrolled schedule."""

    layer: int
    nano: NanoOperation
    start_us: float

    @property
    def end_us(self) -> float:
        return self.start_us + self.nano.duration_us

    @property
    def key(self) -> tuple[int, str, int]:
        return self.layer, self.nano.operation, self.nano.nano_batch


Phase = tuple[Placed, ...]


def in_order(plan: PipelinePlan, num_layers: int) -> Iterator[Placed]:
    """Every nano-operation of a model, in an order that respects dependencies."""
    for window, layer, nano in unroll(plan, num_layers):
        yield Placed(layer, nano, window * plan.period_us + nano.start_us)


def group(plan: PipelinePlan, num_layers: int) -> list[Phase]:
    """Phases in order; operations within a phase in the plan's order.

    A phase must not hold an operation that needs a result of another resource's chain in it, or keys and values that it writes
    (the pool is written at a phase's end); nor attention or a collective that the plan starts when a GEMM has ended whose SMs
    it needs, for side by side either waits for the other. A GEMM that comes after them may be in their phase: its CTAs start as
    SMs become free. Of all ways to cut the plan's order into such phases, this is one in which they take the least time
    altogether, each as long as its longest chain and BARRIER_US.
    """
    order = list(in_order(plan, num_layers))
    blockers = _last_blockers(order, _needs(plan), plan.num_sms)
    best: list[tuple[float, int]] = [(0.0, 0)]  # of the first n operations: time, start of the last phase
    for stop in range(1, len(order) + 1):
        chains = dict.fromkeys(Resource, 0.0)
        choices = []
        earliest = 0
        for start in range(stop - 1, -1, -1):
            earliest = max(earliest, blockers[start] + 1)
            if start < earliest:
                break
            chains[order[start].nano.resource] += order[start].nano.duration_us
            choices.append((best[start][0] + max(chains.values()) + BARRIER_US, start))
        best.append(min(choices))
    cuts = [len(order)]
    while cuts[-1] > 0:
        cuts.append(best[cuts[-1]][1])
    return [tuple(order[start:stop]) for stop, start in reversed(list(itertools.pairwise(cuts)))]


Needs = dict[tuple[str, int], list[tuple[tuple[str, int], bool]]]


def _needs(plan: PipelinePlan) -> Needs:
    """(operation, nano-batch) -> the ones it needs, and whether those are of the layer before."""
    needs: Needs = {}
    for producer, consumer, previous_layer in edges(plan):
        wanted = needs.setdefault((consumer.operation, consumer.nano_batch), [])
        wanted.append(((producer.operation, producer.nano_batch), previous_layer))
    return needs


def _last_blockers(order: Sequence[Placed], needs: Needs, num_sms: int) -> list[int]:
    """For each operation, the index of the last one before it that it cannot share a phase with; -1 if there is none."""
    index_of = {placed.key: index for index, placed in enumerate(order)}
    blockers = []
    for placed in order:
        wanted = needs.get((placed.nano.operation, placed.nano.nano_batch), ())
        indices = [index_of.get((placed.layer - previous_layer, *producer), -1) for producer, previous_layer in wanted]
        needed = max((i for i in indices if i >= 0 and _blocks(order[i], placed)), default=-1)
        since = range(len(blockers) - 1, needed, -1)
        blockers.append(next((i for i in since if _wants_sms_of(placed, order[i], num_sms)), needed))
    return blockers


def _blocks(producer: Placed, consumer: Placed) -> bool:
    return producer.nano.resource != consumer.nano.resource or producer.nano.operation == "qkv_proj"


def _wants_sms_of(placed: Placed, before: Placed, num_sms: int) -> bool:
    """Whether the plan lets `placed` start when the GEMM `before` has ended, and both do not fit the device."""
    if placed.nano.resource is Resource.COMPUTE or before.nano.resource is not Resource.COMPUTE:
        return False
    too_many = placed.nano.num_sms + before.nano.num_sms > num_sms
    return too_many and before.end_us <= placed.start_us + _ROUNDING_US

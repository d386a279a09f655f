"""A plan as a sequence of phases: what runs side by side between two barriers.

XLA starts asynchronous work and waits for it in whatever order its scheduler likes; only a barrier in front of everything that
should run together, and one behind it, keeps the pieces in flight together. Within a phase each resource works off a chain of
nano-operations on its own stream, so nothing in a chain may need a result of another chain of the same phase.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from nanoflow_jax.plan import NanoOperation, PipelinePlan, Resource, edges, unroll


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

    A phase grows until an operation needs a result from another resource's chain in it, or keys and values that it writes
    (the pool is written at a phase's end). The cut is then made where the chains in front of it end at most alike.
    """
    needs = _needs(plan)
    phases: list[Phase] = []
    current: list[Placed] = []
    for placed in in_order(plan, num_layers):
        while (blocker := _last_blocker(current, placed, needs)) is not None:
            cut = _best_cut(current, blocker)
            phases.append(tuple(current[:cut]))
            current = current[cut:]
        current.append(placed)
    return [*phases, tuple(current)] if current else phases


Needs = dict[tuple[str, int], list[tuple[tuple[str, int], bool]]]


def _needs(plan: PipelinePlan) -> Needs:
    """(operation, nano-batch) -> the ones it needs, and whether those are of the layer before."""
    needs: Needs = {}
    for producer, consumer, previous_layer in edges(plan):
        wanted = needs.setdefault((consumer.operation, consumer.nano_batch), [])
        wanted.append(((producer.operation, producer.nano_batch), previous_layer))
    return needs


def _last_blocker(current: Sequence[Placed], placed: Placed, needs: Needs) -> int | None:
    """Index of the last member of the phase that `placed` cannot share it with; None if there is none."""
    wanted = {
        (placed.layer - previous_layer, *producer)
        for producer, previous_layer in needs.get((placed.nano.operation, placed.nano.nano_batch), ())
    }
    for index in range(len(current) - 1, -1, -1):
        member = current[index]
        if member.key in wanted and (member.nano.resource != placed.nano.resource or member.nano.operation == "qkv_proj"):
            return index
    return None


def _best_cut(current: Sequence[Placed], blocker: int) -> int:
    """Where to end the phase, behind `blocker` at the earliest: where its chains idle least before they meet.

    Members behind a cut go to the next phase. They cannot be needed by anything in front of it, being later in the plan.
    """

    def idle_us(cut: int) -> float:
        busy_us = dict.fromkeys(Resource, 0.0)
        for member in current[:cut]:
            busy_us[member.nano.resource] += member.nano.duration_us
        used = [us for us in busy_us.values() if us > 0]
        return len(used) * max(used) - sum(used)

    return min(range(blocker + 1, len(current) + 1), key=lambda cut: (idle_us(cut), -cut))

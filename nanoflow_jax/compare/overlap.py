"""How much of each resource's time passes under another's, per layer, and why a pair has none."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from nanoflow_jax.compare.schedule import Schedule
from nanoflow_jax.compare.trace import Event, busy, by_device, intersection, length, merged, resources
from nanoflow_jax.executor.phases import Phase
from nanoflow_jax.plan import Resource

PAIRS = tuple(itertools.combinations(Resource, 2))
# Less than this share of the shorter resource's time counts as no overlap and is explained.
_NOTHING = 0.01


@dataclasses.dataclass(frozen=True)
class Busy:
    """Microseconds of one step on a mean device: each resource, each pair at once, and the network under anything else."""

    alone: dict[Resource, float]
    both: dict[tuple[Resource, Resource], float]
    hidden: float

    def per_layer(self, shallower: "Busy", layers: int) -> "Busy":
        """What `layers` more layers add, divided by their number: embedding and logits cancel."""
        return Busy(
            {r: (us - shallower.alone[r]) / layers for r, us in self.alone.items()},
            {p: (us - shallower.both[p]) / layers for p, us in self.both.items()},
            (self.hidden - shallower.hidden) / layers,
        )


def measure(events: Sequence[Event], steps: int) -> Busy:
    """The trace of `steps` steps, averaged over them and over devices.

    Raises:
      ValueError: no events.
    """
    devices = by_device(events)
    if not devices:
        raise ValueError("no events to measure")
    scale = 1e-3 / (steps * len(devices))
    alone = dict.fromkeys(Resource, 0.0)
    both = dict.fromkeys(PAIRS, 0.0)
    hidden = 0.0
    for of_device in devices.values():
        when = {resource: busy(of_device, resource) for resource in Resource}
        for resource, intervals in when.items():
            alone[resource] += scale * length(intervals)
        for a, b in PAIRS:
            both[a, b] += scale * length(intersection(when[a], when[b]))
        beside = merged([*when[Resource.COMPUTE], *when[Resource.MEMORY]])
        hidden += scale * length(intersection(when[Resource.NETWORK], beside))
    return Busy(alone, both, hidden)


def record(
    layer: Busy, events: Sequence[Event], *, phases: Sequence[Phase] | None, schedule: Schedule | None, num_sms: int
) -> dict[str, Any]:
    """The overlap of a mode as plain data: us per layer, percent of the shorter resource, and reasons where there is none."""
    pairs = {}
    for a, b in PAIRS:
        shorter = min(layer.alone[a], layer.alone[b])
        us = layer.both[a, b]
        pairs[f"{a}+{b}"] = {"us": round(us, 2), "percent": round(100 * us / shorter, 1) if shorter > 0 else None}
        if shorter <= 0 or us <= _NOTHING * shorter:
            pairs[f"{a}+{b}"]["why_none"] = why_none(events, a, b, phases=phases, schedule=schedule, num_sms=num_sms)
    network = layer.alone[Resource.NETWORK]
    return {
        "busy_us": {str(resource): round(us, 2) for resource, us in layer.alone.items()},
        "pairs": pairs,
        "network_hidden_percent": round(100 * layer.hidden / network, 1) if network > 0 else None,
    }


def why_none(
    events: Sequence[Event],
    a: Resource,
    b: Resource,
    *,
    phases: Sequence[Phase] | None,
    schedule: Schedule | None,
    num_sms: int,
) -> str:
    """What keeps two resources apart in this trace, from the first cause that applies.

    Args:
      phases: what the mode meant to run side by side; None where it leaves that to XLA or runs one after another.
      schedule: XLA's; None if it could not be read.
    """
    of = {resource: [event for event in events if resource in resources(event.name)] for resource in (a, b)}
    absent = [str(resource) for resource in (a, b) if not of[resource]]
    if absent:
        return f"none of the {len(events)} kernels traced is of {' or '.join(absent)}"
    streams = {resource: sorted({event.stream for event in of[resource]}) for resource in (a, b)}
    if streams[a] == streams[b] and len(streams[a]) == 1:
        return f"all {len(of[a])} {a} and {len(of[b])} {b} kernels ran on one stream, {streams[a][0]}"
    planned = None if phases is None else sum({a, b} <= {placed.nano.resource for placed in phase} for phase in phases)
    if phases is not None and planned == 0:
        return f"none of the plan's {len(phases)} phases holds {a} beside {b}"
    found = [f"the plan holds them together in {planned} of {len(phases)} phases"] if phases is not None else []
    if schedule is not None:
        found += schedule.apart(a, b)
    return "; ".join([*found, _nearest(of[a], of[b], a, b, streams, num_sms)])


def _nearest(
    first: Sequence[Event],
    second: Sequence[Event],
    a: Resource,
    b: Resource,
    streams: Mapping[Resource, Sequence[str]],
    num_sms: int,
) -> str:
    """How close kernels of two resources came on one device, and whether the SMs of both fit."""
    gaps = []
    others = by_device(second)
    for device, events in by_device(first).items():
        for event, other in itertools.product(events, others.get(device, ())):
            gap = max(other.start_ns - event.end_ns, event.start_ns - other.end_ns)
            gaps.append((gap, event, other))
    if not gaps:
        return f"{a} and {b} kernels ran on different devices only"
    gap, event, other = min(gaps, key=lambda found: found[0])
    text = f"{a} on {', '.join(streams[a])} and {b} on {', '.join(streams[b])} came within {max(0.0, gap) / 1e3:.1f} us"
    if event.ctas is not None and other.ctas is not None:
        held = f"{event.ctas} and {other.ctas} CTAs"
        fits = "more than" if event.ctas + other.ctas > num_sms else "within"
        text += f", with {held}, {fits} the {num_sms} SMs"
    return text

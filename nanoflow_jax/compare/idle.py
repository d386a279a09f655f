"""How long GPUs have nothing to do while an engine steps, from a profiler trace."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence

from nanoflow_jax.compare.trace import Event, by_device, length, merged

# Kernels of one step follow each other within a few microseconds; a longer gap is the host's, mostly between steps.
_LONG_GAP_NS = 10_000.0
_KINDS_NAMED = 3
# CUPTI's names of copies and fills.
_COPIES = ("Memcpy", "Memset")


@dataclasses.dataclass(frozen=True)
class Gaps:
    """Long gaps between the same two kernels: how many on all GPUs, and their seconds together."""

    before: str
    after: str
    count: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Idle:
    """Of the time from the first kernel traced to the end of the last, mean over GPUs with kernels.

    Copies before the first kernel do not count. A step that was launched before the trace began is not in it, and may go on
    while the batch of the step after it is already copied.

    Attributes:
      seconds: that time.
      idle: share in which no kernel and no copy ran.
      between_steps: share that lies in gaps of 10 us and more.
      gaps: what most of those lie between.
    """

    seconds: float
    idle: float
    between_steps: float
    gaps: tuple[Gaps, ...]


def idle_time(events: Sequence[Event]) -> Idle:
    """Raises ValueError: there are no kernels."""
    spans, idle, long_gaps = [], [], []
    kinds: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for of_device in by_device(events).values():
        begin = min((event.start_ns for event in of_device if not event.name.startswith(_COPIES)), default=None)
        own = [event for event in of_device if begin is not None and event.start_ns >= begin]
        if not own:
            continue
        busy = merged((event.start_ns, event.end_ns) for event in own)
        starting, ending = {event.start_ns: event.name for event in own}, {event.end_ns: event.name for event in own}
        span = busy[-1][1] - busy[0][0]
        spans.append(span)
        idle.append(1 - length(busy) / span)
        gaps = [(before[1], after[0]) for before, after in itertools.pairwise(busy) if after[0] - before[1] >= _LONG_GAP_NS]
        long_gaps.append(length(gaps) / span)
        for start, end in gaps:
            kinds[ending[start], starting[end]].append(1e-9 * (end - start))
    if not spans:
        raise ValueError("no kernels to look at")
    count = len(spans)
    named = sorted((Gaps(*pair, len(each), sum(each)) for pair, each in kinds.items()), key=lambda kind: -kind.seconds)
    return Idle(1e-9 * sum(spans) / count, sum(idle) / count, sum(long_gaps) / count, tuple(named[:_KINDS_NAMED]))

"""How long GPUs have nothing to do while an engine steps, from a profiler trace."""

import dataclasses
import itertools
from collections.abc import Sequence

from nanoflow_jax.compare.trace import Event, by_device, length, merged

# Kernels of one step follow each other within a few microseconds; a longer gap is the host's, mostly between steps.
_LONG_GAP_NS = 10_000.0


@dataclasses.dataclass(frozen=True)
class Idle:
    """Of the time from the first kernel traced to the end of the last, mean over GPUs.

    Attributes:
      seconds: that time.
      idle: share in which no kernel and no copy ran.
      between_steps: share that lies in gaps of 10 us and more.
    """

    seconds: float
    idle: float
    between_steps: float


def idle_time(events: Sequence[Event]) -> Idle:
    """Raises ValueError: there are no events."""
    spans, idle, long_gaps = [], [], []
    for own in by_device(events).values():
        busy = merged((event.start_ns, event.end_ns) for event in own)
        gaps = [after[0] - before[1] for before, after in itertools.pairwise(busy)]
        span = busy[-1][1] - busy[0][0]
        spans.append(span)
        idle.append(1 - length(busy) / span)
        long_gaps.append(sum(gap for gap in gaps if gap >= _LONG_GAP_NS) / span)
    if not spans:
        raise ValueError("no events to look at")
    count = len(spans)
    return Idle(1e-9 * sum(spans) / count, sum(idle) / count, sum(long_gaps) / count)

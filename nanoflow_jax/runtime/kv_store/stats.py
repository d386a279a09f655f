"""Counters of a tier and the measured rate of loads."""

import dataclasses
import time


@dataclasses.dataclass
class TierStats:
    """What a tier did since it was opened; everything counts pages unless the name says otherwise.

    Attributes:
      capacity: pages that fit.
      pages: held now.
      hits, misses: asked for and found, or not. A page that could not be read or was damaged is a miss.
      bytes_in, bytes_out: stored in the tier; handed out by it.
      evictions: pages that had to go for others (on SSD, a segment at a time).
      dropped: pages that were offered and not kept, because a queue was full, a write failed or no slot was free.
      load_s, store_s: seconds spent on bytes_out and bytes_in.
    """

    capacity: int = 0
    pages: int = 0
    hits: int = 0
    misses: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    evictions: int = 0
    dropped: int = 0
    load_s: float = 0.0
    store_s: float = 0.0

    def add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)


class Rate:
    """Bytes per second of recent transfers; old ones lose weight, and after `memory_s` without any it is unknown again.

    Forgetting matters: whoever avoids a disk because it was slow would otherwise never learn that it no longer is.
    """

    _DECAY = 0.8

    def __init__(self, memory_s: float = 60.0) -> None:
        self._memory_s = memory_s
        self._bytes = 0.0
        self._seconds = 0.0
        self._last_s = float("-inf")

    def add(self, num_bytes: int, seconds: float) -> None:
        self._bytes = self._DECAY * self._bytes + num_bytes
        self._seconds = self._DECAY * self._seconds + seconds
        self._last_s = time.monotonic()

    def bytes_per_s(self) -> float | None:
        if time.monotonic() - self._last_s > self._memory_s or self._seconds == 0.0:
            return None
        return self._bytes / self._seconds

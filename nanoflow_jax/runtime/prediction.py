"""How many pages the running requests will need at their peak, and how long an output is likely to become.

Source: the paper admits a request only when the predicted peak of memory fits (section on the global batch scheduler).
"""

import numpy as np


def peak_pages(lengths: np.ndarray, delays: np.ndarray, remaining: np.ndarray, page_size: int) -> int:
    """An upper bound on the pages in use at any time, when nobody else is admitted.

    Sequence j holds `lengths[j]` tokens, grows by one per step from step `delays[j]` on (when its prompt is done), and gives
    everything back after `remaining[j]` tokens more. The sum only falls when a sequence ends, so its maxima are at the ends
    e_j = delays_j + remaining_j. At time t the tokens held are

        sum of lengths over {e >= t}  +  sum of (t - delays) over {delays <= t}  -  sum of (t - delays) over {e < t}

    and n sequences waste at most page_size - 1 slots each. O(n log n).
    """
    if lengths.size == 0:
        return 0
    ends = delays + remaining
    by_end = np.argsort(ends)
    times = ends[by_end]
    ended = np.searchsorted(times, times, side="left")
    started = np.searchsorted(sorted_delays := np.sort(delays), times, side="right")
    tokens = (
        lengths.sum() - _prefix_sums(lengths[by_end])[ended]
        + started * times - _prefix_sums(sorted_delays)[started]
        - ended * times + _prefix_sums(delays[by_end])[ended]
    )  # fmt: skip
    alive = lengths.size - ended
    return int(((tokens + alive * (page_size - 1)) // page_size).max())


def _prefix_sums(values: np.ndarray) -> np.ndarray:
    """int64[n + 1]: sums of the first 0 .. n values."""
    return np.concatenate(([0], np.cumsum(values, dtype=np.int64)))


class OutputLengths:
    """Output lengths of the latest finished requests, and what they say about the unfinished ones."""

    def __init__(self, window: int = 256, least: int = 16) -> None:
        """Remembers `window` lengths; answers "unknown" before it has seen `least`."""
        self._ring = np.zeros(window, np.int64)
        self._count = 0
        self._least = least
        self._sorted = np.zeros(0, np.int64)
        self._tail_sums = np.zeros(1, np.int64)

    def record(self, num_tokens: int) -> None:
        self._ring[self._count % self._ring.size] = num_tokens
        self._count += 1
        self._sorted = np.sort(self._ring[: min(self._count, self._ring.size)])
        self._tail_sums = np.concatenate((np.cumsum(self._sorted[::-1])[::-1], [0]))

    def expected_total(self, num_so_far: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """int64: the mean of the remembered lengths above `num_so_far`, at most the limit; the limit when there are none."""
        if self._count < self._least:
            return limits
        first = np.searchsorted(self._sorted, num_so_far, side="right")
        longer = self._sorted.size - first
        mean = -(-self._tail_sums[first] // np.maximum(longer, 1))
        return np.where(longer > 0, np.minimum(mean, limits), limits)

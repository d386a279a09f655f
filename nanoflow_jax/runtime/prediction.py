"""How many pages the running requests will need at their peak, and how long an output is likely to become.

Source: the paper admits a request only when the predicted peak of memory fits (section on the global batch scheduler).
"""

import numpy as np


def peak_pages(lengths: np.ndarray, delays: np.ndarray, remaining: np.ndarray, page_size: int) -> int:
    """The most pages in use at any time, when nobody else is admitted and everybody grows as expected.

    Sequence j holds `lengths[j]` tokens, grows by one per step from step `delays[j]` on (when its prompt is done), and gives
    everything back after `remaining[j]` tokens more. Use only falls when a sequence ends, so its maxima are at the ends
    delays_j + remaining_j. At such a time t

        pages = sum of f_j(t) over {delay <= t}  -  sum of f_j(t) over {end < t}  +  sum of ceil(length_j / p) over {delay > t}

    with f_j(t) = floor((y_j + t) / p), y_j = length_j - delay_j + p - 1, for page size p. With y_j = p a_j + b_j and
    t = p c + e this is a_j + c + [b_j + e >= p], so each sum is a prefix sum and a count by remainder: O(n (p + log n)).
    """
    if lengths.size == 0:
        return 0
    ends = delays + remaining
    by_end = np.argsort(ends)
    times = ends[by_end]
    ended = np.searchsorted(times, times, side="left")
    by_delay = np.argsort(delays)
    started = np.searchsorted(delays[by_delay], times, side="right")
    growing = lengths - delays + page_size - 1
    unstarted = _prefix_sums(-(-lengths[by_delay] // page_size))
    pages = (
        _pages_of_first(started, growing[by_delay], times, page_size)
        - _pages_of_first(ended, growing[by_end], times, page_size)
        + unstarted[-1]
        - unstarted[started]
    )
    return int(pages.max())


def pages_counted_elsewhere(pages: np.ndarray, ends: np.ndarray, num_pages: int) -> np.ndarray:
    """int64[n]: how many of each sequence's pages another one, which ends later, holds too.

    A page is in use as long as any of its holders runs, so counting it with the one that ends last (any one of those that end
    together) counts it once, at all times. As whole pages that a sequence needs no more, they can be taken off its length.

    Args:
      pages: int[n, w], pages that may be held by several, 0 for none.
      ends: int[n], when each sequence gives its pages back.
      num_pages: of the pool.
    """
    if not pages.shape[1]:
        return np.zeros(ends.size, np.int64)
    by_end = np.argsort(ends)
    rank = np.repeat(np.arange(ends.size), pages.shape[1])
    held = pages[by_end].ravel()
    latest = np.zeros(num_pages, np.int64)
    latest[held] = rank  # of several values for one page, the last stays
    elsewhere = (latest[held] != rank) & (held > 0)
    counts = np.empty(ends.size, np.int64)
    counts[by_end] = elsewhere.reshape(pages.shape).sum(axis=1)
    return counts


def _pages_of_first(counts: np.ndarray, growing: np.ndarray, times: np.ndarray, page_size: int) -> np.ndarray:
    """int64 over times: the sum of floor((growing_j + t) / page_size) over the first `counts` sequences, one count per time."""
    whole, rest = np.divmod(growing, page_size)
    time_whole, time_rest = np.divmod(times, page_size)
    carries = np.zeros((growing.size + 1, page_size), np.int32)
    np.cumsum(rest[:, None] + np.arange(page_size) >= page_size, axis=0, out=carries[1:])
    return _prefix_sums(whole)[counts] + counts * time_whole + carries[counts, time_rest]


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

"""Who is admitted, with which pages: prefixes that the pool or the memory tiers hold already, and new ones for the rest.

Requests are admitted in order of arrival, as long as the step at hand can begin them and the predicted peak of page use fits
the pool. One that waits for pages from the memory tiers does not hold up those behind it.
"""

import bisect
import dataclasses
import itertools
import time
from collections import deque

import numpy as np

from nanoflow_jax.runtime.kv_load import Load, Loads
from nanoflow_jax.runtime.prediction import OutputLengths, pages_counted_elsewhere, peak_pages
from nanoflow_jax.runtime.prefix_cache import PrefixCache
from nanoflow_jax.runtime.sequences import Phase, Sequence, SequenceTable

# Requests at the head of the queue for which pages are fetched ahead of their admission.
_FETCHED_AHEAD = 8
# What a load was to continue may be evicted while it runs. After so many, a request is computed.
_MAX_LOADS = 2


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A request that could be admitted. `cached` are device pages of its tokens; the next `num_fetched` are in host memory."""

    sequence: Sequence
    cached: np.ndarray
    num_fetched: int

    @property
    def num_reused(self) -> int:
        return self.cached.size + self.num_fetched


class Admission:
    """The queue, and its way into the table.

    Attributes:
      waiting: requests that have no row, in order.
      held: nobody is admitted until a sequence ends.
    """

    def __init__(
        self,
        table: SequenceTable,
        cache: PrefixCache,
        *,
        b_dense: int,
        page_size: int,
        reuses_prefixes: bool,
        loads: Loads | None,
    ) -> None:
        assert reuses_prefixes or loads is None, "what is loaded is found as a prefix"
        self.table = table
        self.cache = cache
        self.loads = loads
        self.b_dense = b_dense
        self.page_size = page_size
        self.reuses_prefixes = reuses_prefixes
        self.waiting: deque[Sequence] = deque()
        self.output_lengths = OutputLengths()
        self.held = False
        self.num_prefix_hits = 0
        self.num_prefix_misses = 0
        self.num_reused_tokens = 0

    def remove(self, sequence: Sequence) -> None:
        """Takes a request out of the queue."""
        self.waiting.remove(sequence)
        self.drop_load(sequence)

    def drop_load(self, sequence: Sequence) -> None:
        """Ends the sequence's load, if it has one."""
        if sequence.load is not None and self.loads is not None:
            self.loads.cancel(sequence.load)
        sequence.load = None

    def advance_loads(self) -> None:
        """Lets rows prefill whose pages have arrived, and fetches pages for the head of the queue."""
        if self.loads is None:
            return
        ended = {id(load) for load in self.loads.advance()}
        for row in np.flatnonzero(self.table.phase == Phase.LOADING).tolist():
            sequence: Sequence = self.table.sequences[row]  # pyright: ignore[reportAssignmentType]
            assert sequence.load is not None
            if id(sequence.load) in ended:
                self.table.kv_len[row] += sequence.load.num_loaded * self.page_size
                self.table.phase[row] = Phase.PREFILL
                self.num_reused_tokens += sequence.load.num_loaded * self.page_size
                if sequence.preemptions == 0:
                    sequence.cached_tokens += sequence.load.num_loaded * self.page_size
                sequence.load = None
        for sequence in itertools.islice(self.waiting, _FETCHED_AHEAD):
            self._fetch(sequence)

    def room(self, budget: int) -> tuple[int, int]:
        """(tokens, rows) that a step has for new requests when decoding leaves it `budget` tokens; zeros if it has none."""
        if not self.waiting or self.held:
            return 0, 0
        filling = self.table.phase == Phase.PREFILL
        budget -= int((self.table.target[filling] - self.table.kv_len[filling]).sum())
        rows = int(np.count_nonzero(self.table.phase == Phase.FREE))
        return (budget, rows) if budget > 0 and rows else (0, 0)

    def admit(self, budget: int, num_rows: int) -> None:
        """Moves requests from the queue to at most `num_rows` rows, as `room` found them."""
        candidates = self._candidates(budget, num_rows)
        if not candidates:
            return
        admitted = self._count_that_fits(candidates)
        if admitted == 0 and self.table.num_running == 0:
            admitted = 1  # whatever is predicted, a request alone fits: its output is limited to the pool
        for candidate in candidates[:admitted]:
            self.cache.acquire(candidate.cached)  # all of them before new pages are taken, which may evict what nobody holds
        for candidate in candidates[:admitted]:
            sequence, num_cached = candidate.sequence, candidate.cached.size
            self.waiting.remove(sequence)
            self._note_admission(candidate)
            own = self.cache.allocate(-(-sequence.tokens.size // self.page_size) - num_cached)
            row = self.table.place(sequence, np.concatenate((candidate.cached, own)), num_cached, self.page_size)
            if candidate.num_fetched:
                self._begin_copy(sequence.load, row, own[: candidate.num_fetched])
            else:
                self.drop_load(sequence)

    def _begin_copy(self, load: Load | None, row: int, pages: np.ndarray) -> None:
        assert load is not None
        assert self.loads is not None
        self.table.phase[row] = Phase.LOADING
        self.loads.begin_copy(load, int(self.table.num_shared[row]) - load.first_page, pages)

    def _note_admission(self, candidate: Candidate) -> None:
        sequence, num_tokens = candidate.sequence, candidate.cached.size * self.page_size
        if sequence.admitted_s is None:
            sequence.admitted_s = time.perf_counter()
            sequence.cached_tokens = num_tokens
        if sequence.session is not None:
            self.cache.forget_session(sequence.session)
        self.num_prefix_hits += candidate.num_reused > 0
        self.num_prefix_misses += candidate.num_reused == 0 and self.reuses_prefixes
        self.num_reused_tokens += num_tokens

    def _candidates(self, budget: int, num_rows: int) -> list[Candidate]:
        """The head of the queue, up to what `budget` tokens can begin and `num_rows` can hold; not those that are fetching."""
        candidates = []
        for sequence in self.waiting:
            if budget <= 0 or len(candidates) == num_rows:
                break
            cached, _ = self._find_prefix(sequence)
            num_fetched = 0
            if self._fetch(sequence) is not None:
                num_fetched = self._num_fetched(sequence, cached.size)
                if num_fetched is None:
                    continue
            candidates.append(Candidate(sequence, cached, num_fetched))
            budget -= sequence.tokens.size - candidates[-1].num_reused * self.page_size
        return candidates

    def _find_prefix(self, sequence: Sequence) -> tuple[np.ndarray, list[bytes]]:
        """Cached pages of a waiting sequence's tokens, and the names of all that could be. Its last token is not among them:
        computing that one gives the next token."""
        num_pages = (sequence.tokens.size - 1) // self.page_size * self.reuses_prefixes
        names = sequence.page_digests(sequence.tokens, self.page_size, num_pages)
        return self.cache.find(names), names

    def _fetch(self, sequence: Sequence) -> Load | None:
        """The waiting sequence's load, begun now if it has none and the memory tiers have more of it than the device."""
        if self.loads is None:
            return None
        load = sequence.load
        if load is None and sequence.load_attempts < _MAX_LOADS:
            cached, names = self._find_prefix(sequence)
            sequence.load = self.loads.find(names[cached.size :], cached.size)
            sequence.load_attempts += sequence.load is not None
        elif load is not None and self.loads.overdue(load):
            self.loads.num_failed += 1
            self.drop_load(sequence)
            sequence.load_attempts = _MAX_LOADS
        return sequence.load

    def _num_fetched(self, sequence: Sequence, num_cached: int) -> int | None:
        """Pages of the sequence's load that continue its `num_cached` device pages; None if it must wait for them."""
        load = sequence.load
        assert load is not None
        if not load.fetched:
            return None
        usable = load.first_page + load.num_pages - num_cached if num_cached >= load.first_page else 0
        if usable > 0:
            return usable
        self.drop_load(sequence)
        # Either the device has it all by now, or it has lost what came before.
        return None if num_cached < load.first_page and self._fetch(sequence) is not None else 0

    def _count_that_fits(self, candidates: list[Candidate]) -> int:
        """How many of the candidates, from the first, fit beside those running at the predicted peak.

        They fit now, too: until the first of all ends, everybody holds its present pages at least, and every decoding row takes
        a step more, for which the batcher has given it the page. Pages that several sequences hold count once.
        """
        table = self.table
        # An ending row has given its pages back. Oldest first; candidates are younger than whoever runs, but for those that
        # others overtook while their pages were fetched.
        running = np.flatnonzero((table.phase != Phase.FREE) & (table.phase != Phase.ENDING))
        running = running[np.argsort(table.arrival[running])]
        sequences, found = [c.sequence for c in candidates], [c.cached for c in candidates]
        new_lengths = np.array([s.tokens.size for s in sequences])
        lengths = np.concatenate((np.maximum(table.kv_len[running], table.target[running]), new_lengths))
        prompts = np.concatenate((table.prompt_len[running], [s.num_prompt_tokens for s in sequences]))
        finals = np.concatenate((table.final_len[running], [s.final_length for s in sequences]))
        exact = np.concatenate((table.exact[running], [s.exact for s in sequences]))
        reused = np.array([c.num_reused for c in candidates])
        unfilled = lengths - np.concatenate((table.kv_len[running], reused * self.page_size))

        # Prompts are filled in this order, with what decoding leaves of each step.
        steps_to_fill = -(-np.cumsum(unfilled) // max(1, self.b_dense - lengths.size))
        delays = np.where(unfilled > 0, steps_to_fill, 0)
        expected = prompts + self.output_lengths.expected_total(lengths + 1 - prompts, finals - prompts)
        # The last token of an output never enters the cache.
        remaining = np.maximum(np.where(exact, finals, expected) - 1 - lengths, 0)
        shared = self._shared_columns(running, found)

        def exceeds(count: int) -> bool:
            n = running.size + count
            elsewhere = pages_counted_elsewhere(shared[:n], delays[:n] + remaining[:n], self.cache.num_pages)
            counted = lengths[:n] - elsewhere * self.page_size
            return peak_pages(counted, delays[:n], remaining[:n], self.page_size) > self.cache.num_pages - 1

        # The peak grows with every candidate.
        return bisect.bisect_left(range(1, len(candidates) + 1), True, key=exceeds)

    def _shared_columns(self, running: np.ndarray, found: list[np.ndarray]) -> np.ndarray:
        """int32[n, w]: the pages of running rows and then candidates that several may hold, 0 where there is none.

        A page has the same place in everybody's block table, so all that are shared are in the first w columns, w being the
        longest prefix that anybody found.
        """
        table = self.table
        width = max(table.num_shared[running].max(initial=0), max(pages.size for pages in found))
        shared = np.zeros((running.size + len(found), width), np.int32)
        shared[: running.size] = table.block_tables[running, :width]
        shared[: running.size][np.arange(width) >= table.num_pages[running, None]] = 0
        for row, pages in zip(shared[running.size :], found, strict=True):
            row[: pages.size] = pages
        return shared

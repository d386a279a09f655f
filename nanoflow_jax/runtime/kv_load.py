"""From the store back to the device: loads of pages for requests that wait, and whether they are worth it.

A load has two parts. While its request waits in the queue, the store brings the pages to host memory, from SSD if need be. Once
the request has device pages, the pages are copied to the device in chunks on a thread here, and each chunk that has arrived is
written to the pool by a launch among the steps. Neither part makes anybody else wait.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np

from nanoflow_jax.executor.kv_transfer import MAX_STAGED_BYTES
from nanoflow_jax.runtime.kv_store import CachedPrefix, Fault, KVStore, LoadedPages
from nanoflow_jax.runtime.kv_store.host import runs_of
from nanoflow_jax.runtime.kv_store.stats import Rate
from nanoflow_jax.runtime.kv_store.workers import Workers

# A store that does not answer is given up after so many times the expected cost of computing, within these bounds.
_PATIENCE = 3.0
_LEAST_PATIENCE_S = 0.05
_MOST_PATIENCE_S = 10.0


class PageTarget(Protocol):
    """What loads need of the runner; see `executor.runner.ModelRunner`."""

    def transfer_memory(self, num_bytes: int) -> np.ndarray: ...

    def stage_pages(self, pages: np.ndarray) -> Any: ...

    def write_pages(self, staged: Any, page_ids: np.ndarray) -> None: ...


WorthLoading = Callable[[float, float], bool]


def is_faster(load_s: float, compute_s: float) -> bool:
    """Expected seconds of a load against those of computing the same tokens; what is unknown costs nothing."""
    return load_s <= compute_s


@dataclasses.dataclass(eq=False)
class _Chunk:
    """Pages [first, first + page_ids.size) of a load. `staged` is set, or `failed`, when the copy has ended."""

    first: int
    page_ids: np.ndarray
    staged: Any = None
    failed: bool = False


@dataclasses.dataclass(eq=False)
class Load:
    """Pages `first_page ..` of a sequence on their way. Belongs to the engine's thread, but for what the lock guards.

    Attributes:
      num_wanted: how many the store had when it was asked.
      give_up_s: when to stop waiting for the store.
      failed: a copy to the device failed; the pages from there on are not loaded.
      num_loaded: pages, from the first copied one on, that are in the pool.
    """

    first_page: int
    num_wanted: int
    future: "Future[LoadedPages]"
    give_up_s: float
    begin_s: float = 0.0
    pages: LoadedPages | None = None
    waiting: list[_Chunk] = dataclasses.field(default_factory=list)
    copying: list[_Chunk] = dataclasses.field(default_factory=list)
    cancelled: bool = False
    failed: bool = False
    num_loaded: int = 0

    @property
    def fetched(self) -> bool:
        """The store has answered."""
        return self.future.done()

    @property
    def num_pages(self) -> int:
        """How many pages the store gave; it must have answered."""
        return len(self.future.result())


class Loads:
    """All loads of an engine.

    Attributes:
      num_started, num_failed, num_declined: loads begun, those that brought fewer pages than expected, and those not begun
        because computing is expected to be faster.
      num_pages: pages that loads brought to the device; `device_s`: how long they took for that, from host memory on.
    """

    def __init__(
        self, target: PageTarget, store: KVStore, *, page_size: int, chunk_sizes: tuple[int, ...], worth: WorthLoading
    ) -> None:
        self.num_started = self.num_failed = self.num_declined = self.num_pages = 0
        self.device_s = 0.0
        self._target = target
        self._store = store
        self._page_size = page_size
        self._chunk_sizes = chunk_sizes
        self._worth = worth
        # Used by one copy after the other, each of which waits for the device.
        self._buffer = target.transfer_memory(chunk_sizes[-1] * store.page_bytes).reshape(-1, store.page_bytes)
        self._window = max(1, MAX_STAGED_BYTES // (chunk_sizes[-1] * store.page_bytes))
        self._in_flight = 0
        self._active: list[Load] = []
        self._workers = Workers("kv-load", 1, max_waiting=1 << 30, faults=store.faults)
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._copies = Rate()
        self._prefill = Rate()

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step with prompt tokens took that long: what computing costs."""
        self._prefill.add(num_tokens, seconds)

    def find(self, digests: list[bytes], first_page: int) -> Load | None:
        """Begins to fetch what the store has of pages `first_page ..`, named by `digests`; None if nothing or not worth it."""
        found = self._store.cached_prefix(digests)
        if not found.num_pages:
            return None
        compute_s = self._compute_s(found.num_pages)
        if not self._worth(self._load_s(found), float("inf") if compute_s is None else compute_s):
            self.num_declined += 1
            return None
        patience = _MOST_PATIENCE_S if compute_s is None else _PATIENCE * compute_s
        load = Load(
            first_page,
            found.num_pages,
            self._store.get_many(digests[: found.num_pages]),
            time.monotonic() + min(max(patience, _LEAST_PATIENCE_S), _MOST_PATIENCE_S),
        )
        load.future.add_done_callback(lambda _: self._changed.set())
        self.num_started += 1
        return load

    def overdue(self, load: Load) -> bool:
        """The store has not answered for so long that computing would have been better."""
        return not load.fetched and time.monotonic() > load.give_up_s

    def begin_copy(self, load: Load, skip: int, page_ids: np.ndarray) -> None:
        """Copies the fetched pages behind the first `skip` to device pages `page_ids`, which the caller has allocated."""
        load.pages, load.begin_s = load.future.result(), time.perf_counter()
        self.num_failed += len(load.pages) < load.num_wanted
        start, largest = 0, self._chunk_sizes[-1]
        while start < page_ids.size:
            load.waiting.append(_Chunk(skip + start, page_ids[start : start + largest]))
            start += largest
        self._active.append(load)
        self._start_chunks()

    def advance(self) -> list[Load]:
        """Launches the writes of chunks that have arrived; returns the loads that have ended since."""
        self._changed.clear()
        ended = []
        for load in self._active:
            self._write_arrived(load)
            if not load.waiting and not load.copying:
                ended.append(load)
        self._active = [load for load in self._active if load.waiting or load.copying]
        for load in ended:
            self._end(load)
        self._start_chunks()
        return ended

    def cancel(self, load: Load) -> None:
        """Ends a load wherever it is; what it holds comes back at once, or when the copy under way is done."""
        if load.pages is None:
            if not load.future.cancel():
                load.future.add_done_callback(lambda future: future.exception() or future.result().release())
            return
        if load in self._active:
            self._active.remove(load)
        with self._lock:
            load.cancelled = True
            load.waiting.clear()
            self._in_flight -= len(load.copying)
            idle = all(chunk.staged is not None or chunk.failed for chunk in load.copying)
        if idle:
            load.pages.release()

    def wait(self, timeout_s: float) -> None:
        """Sleeps until a load makes progress."""
        self._changed.wait(timeout_s)

    def stop(self, timeout_s: float) -> bool:
        return self._workers.stop(timeout_s)

    def _compute_s(self, num_pages: int) -> float | None:
        rate = self._prefill.bytes_per_s()
        return num_pages * self._page_size / rate if rate else None

    def _load_s(self, found: CachedPrefix) -> float:
        rate = self._copies.bytes_per_s()
        return (self._store.load_seconds(found) or 0.0) + (found.num_pages * self._store.page_bytes / rate if rate else 0.0)

    def _start_chunks(self) -> None:
        for load in self._active:
            while load.waiting and self._in_flight < self._window:
                chunk = load.waiting.pop(0)
                load.copying.append(chunk)
                self._in_flight += 1
                self._workers.submit(lambda load=load, chunk=chunk: self._copy(load, chunk))

    def _write_arrived(self, load: Load) -> None:
        """Chunks arrive in order, so those that have are the first."""
        while load.copying and (load.copying[0].staged is not None or load.copying[0].failed):
            chunk = load.copying.pop(0)
            self._in_flight -= 1
            if chunk.failed:
                load.failed = True
                load.waiting.clear()
            if not load.failed:
                self._target.write_pages(chunk.staged, chunk.page_ids)
                load.num_loaded += chunk.page_ids.size

    def _end(self, load: Load) -> None:
        assert load.pages is not None
        load.pages.release()
        self.num_failed += load.failed
        self.num_pages += load.num_loaded
        seconds = time.perf_counter() - load.begin_s
        self.device_s += seconds
        if load.num_loaded:
            self._copies.add(load.num_loaded * self._store.page_bytes, seconds)

    # On the worker's thread

    def _in_one_piece(self, slots: tuple[int, ...]) -> np.ndarray:
        """uint8[chunk size, page_bytes] that begins with these host pages: they themselves, if they lie as they must."""
        size = next(size for size in self._chunk_sizes if size >= len(slots))
        if len(slots) == size and slots[-1] - slots[0] == size - 1 and len(runs_of(slots)) == 1:
            return self._store.host_pages[slots[0] : slots[0] + size]
        pages = self._buffer[:size]
        np.take(self._store.host_pages, slots, axis=0, out=pages[: len(slots)])
        return pages

    def _copy(self, load: Load, chunk: _Chunk) -> None:
        """Brings a chunk to the device and waits for it."""
        try:
            if not (load.cancelled or load.failed):
                assert load.pages is not None
                slots = load.pages.slots[chunk.first : chunk.first + chunk.page_ids.size]
                staged = self._target.stage_pages(self._in_one_piece(slots))
                staged.block_until_ready()
                chunk.staged = staged
        except Exception as error:
            self._store.faults.count(Fault.INTERNAL, error)
        finally:
            with self._lock:
                chunk.failed = chunk.staged is None
                last = load.cancelled and all(c.staged is not None or c.failed for c in load.copying)
            if last and load.pages is not None:
                load.pages.release()
            self._changed.set()

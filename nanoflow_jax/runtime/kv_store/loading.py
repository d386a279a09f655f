"""Loads from SSD into host slots, and what callers hold of pages in host slots."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from nanoflow_jax.runtime.kv_store.faults import Fault, FaultLog
from nanoflow_jax.runtime.kv_store.host import HostTier, runs_of
from nanoflow_jax.runtime.kv_store.segment import Record
from nanoflow_jax.runtime.kv_store.ssd import SsdTier
from nanoflow_jax.runtime.kv_store.stats import Rate
from nanoflow_jax.runtime.kv_store.workers import Workers

# Loads and their parts that may wait for a reader.
_MAX_WAITING = 256


class LoadedPages:
    """Pages that are in host slots and stay there until `release`, or the end of a `with`.

    Attributes:
      slots: rows of the host tier's array, in the order of the digests.
    """

    def __init__(self, host: HostTier, slots: Sequence[int]) -> None:
        self._host = host
        self.slots = tuple(slots)
        self._held = True

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def runs(self) -> list[np.ndarray]:
        """Views uint8[n, page_bytes] of the pages in order, as few as possible: pages stored together often lie together."""
        return [self._host.pages[start : start + count] for start, count in runs_of(self.slots)]

    def copy_to(self, out: np.ndarray) -> None:
        """Copies the pages to uint8[len(self), page_bytes]."""
        begin, row = time.perf_counter(), 0
        for run in self.runs:
            out[row : row + len(run)] = run
            row += len(run)
        self._host.count(load_s=time.perf_counter() - begin)

    def release(self) -> None:
        """Lets the slots be used for other pages. Whoever copies from them asynchronously calls this when the copy is done."""
        if self._held:
            self._held = False
            self._host.unpin(self.slots)

    def __enter__(self) -> "LoadedPages":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def resolve(future: "Future[LoadedPages]", host: HostTier, slots: Sequence[int]) -> None:
    """Hands pinned slots over, or unpins them if nobody waits for them any more."""
    if future.set_running_or_notify_cancel():
        host.count(bytes_out=len(slots) * host.page_bytes)
        future.set_result(LoadedPages(host, slots))
    else:
        host.unpin(slots)


@dataclasses.dataclass(eq=False)
class _Load:
    """Slots >= 0 are pinned, those at `reading` positions being filled; the result ends at the first `failed` position."""

    digests: Sequence[bytes]
    slots: list[int]
    future: "Future[LoadedPages]"
    begin_s: float
    reading: list[int] = dataclasses.field(default_factory=list)
    failed: list[int] = dataclasses.field(default_factory=list)
    chunks_left: int = 0


class Loader:
    """Reads on a few threads; a long load is shared among them."""

    def __init__(
        self,
        host: HostTier,
        ssd: SsdTier,
        *,
        reserve: Callable[[int], list[int]],
        settle: Callable[[], None],
        chunk_pages: int,
        num_threads: int,
        stall_s: float,
        faults: FaultLog,
    ) -> None:
        """`reserve` gives host slots to fill, `settle` is called when some were filled."""
        self._host = host
        self._ssd = ssd
        self._reserve = reserve
        self._settle = settle
        self._chunk_pages = chunk_pages
        self._stall_s = stall_s
        self._stalled = False
        self._faults = faults
        self._lock = threading.Lock()
        self._rate = Rate()
        self._readers = Workers("kv-read", num_threads, max_waiting=_MAX_WAITING, faults=faults)

    def start(self, digests: Sequence[bytes], slots: list[int], future: "Future[LoadedPages]") -> bool:
        """Takes over pinned `slots`, -1 where the page must be read, and resolves the future later. False if too much waits."""
        load = _Load(digests, slots, future, time.perf_counter())

        def work() -> None:
            try:
                self._begin(load)
            except Exception:
                if not load.future.done():
                    resolve(load.future, self._host, [])  # whoever waits gets an answer
                raise

        return self._readers.submit(work)

    def bytes_per_s(self) -> float | None:
        """Of recent loads, from the call to the last page in place; None if there were none."""
        with self._lock:
            return self._rate.bytes_per_s()

    def stalled(self) -> bool:
        """Whether the disk owes an answer for longer than it should. Counted once each time it begins."""
        stalled = self._readers.longest_running_s() > self._stall_s
        if stalled and not self._stalled:
            self._faults.count(Fault.STALLED, f"a read takes longer than {self._stall_s} s; the SSD tier is not used meanwhile")
        self._stalled = stalled
        return stalled

    def drain(self, timeout_s: float) -> bool:
        return self._readers.drain(timeout_s)

    def stop(self, timeout_s: float) -> bool:
        return self._readers.stop(timeout_s)

    # On the readers' threads

    def _begin(self, load: _Load) -> None:
        absent = [i for i, slot in enumerate(load.slots) if slot < 0]
        if load.future.cancelled():
            load.failed = absent
            self._end(load)
            return
        # Another load may have brought some meanwhile.
        for i, slot in zip(absent, self._host.pin([load.digests[i] for i in absent], counted=False), strict=True):
            load.slots[i] = slot
        tasks = self._plan(load, [i for i in absent if load.slots[i] < 0])
        chunks = [tasks[start : start + self._chunk_pages] for start in range(0, len(tasks), self._chunk_pages)]
        load.chunks_left = len(chunks)
        for chunk in chunks[1:]:
            if not self._readers.submit(lambda chunk=chunk: self._read(load, chunk), follow_up=True):
                self._read(load, chunk)
        if chunks:
            self._read(load, chunks[0])
        else:
            self._end(load)

    def _plan(self, load: _Load, absent: Sequence[int]) -> list[tuple[int, Record]]:
        """Reserves slots for absent pages; (position, record) in the order on disk. Positions without either have failed."""
        slots = self._reserve(len(absent))
        tasks = []
        for i, slot, record in zip(absent, slots, self._ssd.locate([load.digests[i] for i in absent]), strict=False):
            if record is None:
                self._host.abandon([slot])
            else:
                load.slots[i] = slot
                tasks.append((i, record))
        load.failed = [i for i in absent if load.slots[i] < 0]
        load.reading = [i for i, _ in tasks]
        self._ssd.count(misses=len(load.failed))
        return sorted(tasks, key=lambda task: (task[1].segment.segment_id, task[1].index))

    def _read(self, load: _Load, chunk: Sequence[tuple[int, Record]]) -> None:
        failed = [i for i, _ in chunk]
        try:
            pages = [self._host.pages[load.slots[i]] for i in failed]
            intact = self._ssd.read([record for _, record in chunk], pages)
            failed = [i for i, good in zip(failed, intact, strict=True) if not good]
        finally:
            with self._lock:
                load.failed += failed
                load.chunks_left -= 1
                last = load.chunks_left == 0
            if last:
                self._end(load)

    def _end(self, load: _Load) -> None:
        """Makes what was read resident and hands out the pages before the first that failed."""
        failed = set(load.failed)
        good = [i for i in load.reading if i not in failed]
        self._host.abandon([load.slots[i] for i in load.reading if i in failed])
        committed = self._host.commit([load.slots[i] for i in good], [load.digests[i] for i in good])
        for i, slot in zip(good, committed, strict=True):
            load.slots[i] = slot
        if load.reading:
            with self._lock:
                self._rate.add(len(good) * self._host.page_bytes, time.perf_counter() - load.begin_s)
        count = min(failed, default=len(load.slots))
        self._host.unpin([slot for i, slot in enumerate(load.slots) if i > count and i not in failed])
        self._settle()
        resolve(load.future, self._host, load.slots[:count])

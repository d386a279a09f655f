"""Host memory and SSD as one store of KV pages.

Whoever has pages writes them straight into slots of the host tier: `reserve`, fill, `commit`. Those least recently used move on
to the SSD tier ahead of need, and from there to nothing. A load brings pages back to host slots. The store moves bytes on
background threads only: no public method but `close` and `drain` waits for a disk, and none but the constructor raises because
of one.
"""

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from nanoflow_jax.runtime.kv_store.faults import FaultLog
from nanoflow_jax.runtime.kv_store.files import MAX_BUFFERS, Files
from nanoflow_jax.runtime.kv_store.fingerprint import FINGERPRINT_BYTES
from nanoflow_jax.runtime.kv_store.host import HostTier
from nanoflow_jax.runtime.kv_store.loading import LoadedPages, Loader, resolve
from nanoflow_jax.runtime.kv_store.segment import MAX_DIGEST_BYTES, MIN_DIGEST_BYTES
from nanoflow_jax.runtime.kv_store.ssd import SsdTier
from nanoflow_jax.runtime.kv_store.stats import TierStats

# One read or write covers at most this much, so that the readers share a long load.
_CHUNK_BYTES = 16 * 2**20
# What may wait for the SSD writer by default, if it is more than 64 pages: a few steps' worth.
_QUEUE_BYTES = 512 * 2**20


@dataclasses.dataclass(frozen=True)
class CachedPrefix:
    """Pages from the first digest on that the store holds: so many of them in host memory, the others on SSD."""

    num_pages: int
    host_pages: int

    @property
    def ssd_pages(self) -> int:
        return self.num_pages - self.host_pages


@dataclasses.dataclass(frozen=True)
class StoreStats:
    """Per tier, and counts of faults by kind (`Fault`)."""

    host: TierStats
    ssd: TierStats
    faults: dict[str, int]


class KVStore:
    """Thread-safe. Digests are 16 to 32 bytes, and name a page together with all tokens before it."""

    def __init__(
        self,
        fingerprint: bytes,
        page_bytes: int,
        *,
        host_bytes: int,
        host_buffer: Any = None,
        ssd_directory: str | None = None,
        ssd_bytes: int = 0,
        num_readers: int = 4,
        queue_pages: int | None = None,
        stall_s: float = 10.0,
        files: Files | None = None,
    ) -> None:
        """Opens the store.

        Args:
          fingerprint: of `fingerprint()`; what is on SSD under another one is not read.
          page_bytes: K and V of one page, all layers.
          host_bytes: size of the host tier; below one page, nothing is kept.
          host_buffer: memory for it; see HostTier.
          ssd_directory, ssd_bytes: the SSD tier, off without a directory or with 0 bytes.
          num_readers: threads that read from SSD.
          queue_pages: pages that may wait for the SSD writer, of the host tier's own; by default a quarter of it, at most 64 or
            512 MiB.
          stall_s: an answer that the disk owes for longer makes the SSD tier invisible until it comes.
          files: calls to the operating system.

        Raises:
          ValueError: a size that makes no sense; the message names it.
          DirectoryInUseError: the directory is open elsewhere.
          OSError: the directory cannot be used.
        """
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"the fingerprint has {len(fingerprint)} bytes, not {FINGERPRINT_BYTES}")
        for name, value, least in (
            ("page_bytes", page_bytes, 1), ("host_bytes", host_bytes, 0), ("ssd_bytes", ssd_bytes, 0),
            ("num_readers", num_readers, 1), ("queue_pages", 1 if queue_pages is None else queue_pages, 1),
        ):  # fmt: skip
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        num_slots = host_bytes // page_bytes
        self.page_bytes = page_bytes
        self.faults = FaultLog()
        self._chunk_pages = max(1, min(_CHUNK_BYTES // page_bytes, MAX_BUFFERS))
        self._ssd: SsdTier | None = None
        self._loader: Loader | None = None
        self._queue_pages = 0
        self._host = HostTier(page_bytes, num_slots, buffer=host_buffer)
        if ssd_directory is not None and ssd_bytes > 0:
            if num_slots < 2:
                raise ValueError(f"{host_bytes=} must hold two pages of {page_bytes} bytes: the SSD tier is filled through it")
            self._queue_pages = min(queue_pages or min(max(64, _QUEUE_BYTES // page_bytes), num_slots // 4), num_slots - 1) or 1
            self._ssd = SsdTier(
                ssd_directory, ssd_bytes, page_bytes, fingerprint,
                queue_pages=self._queue_pages, files=files, faults=self.faults,
            )  # fmt: skip
            self._loader = Loader(
                self._host, self._ssd, reserve=self._reserve, settle=lambda: self._spill(self._queue_pages),
                chunk_pages=self._chunk_pages, num_threads=num_readers, stall_s=stall_s, faults=self.faults,
            )  # fmt: skip
        self._closed = False

    @property
    def host_pages(self) -> np.ndarray:
        """uint8[num_slots, page_bytes]: the host tier's memory, which `reserve` and `LoadedPages.slots` index."""
        return self._host.pages

    def __contains__(self, digest: bytes) -> bool:
        return self.cached_prefix([digest]).num_pages == 1

    def cached_prefix(self, digests: Sequence[bytes]) -> CachedPrefix:
        """How many pages from the first on are here. Takes no notice of use."""
        ssd = self._visible_ssd()
        host_pages = num_pages = 0
        for digest in digests:
            if digest in self._host:
                host_pages += 1
            elif ssd is None or digest not in ssd:
                break
            num_pages += 1
        return CachedPrefix(num_pages, host_pages)

    def load_seconds(self, prefix: CachedPrefix) -> float | None:
        """Expected time until `get_many` has the pages in host memory, from recent loads; None while there were none.

        The rate counts whole loads, waiting included, so it falls when many run at once.
        """
        if prefix.ssd_pages == 0:
            return 0.0
        rate = self._loader.bytes_per_s() if self._loader else None
        if rate is None:
            return None
        return prefix.ssd_pages * self.page_bytes / rate if rate > 0 else float("inf")

    def get_many(self, digests: Sequence[bytes]) -> "Future[LoadedPages]":
        """The longest prefix of `digests` that can be had; pages that fail to load end it. Never blocks.

        Done at once if no page is on SSD. The pages stay put until they are released. A future that is not done can be
        cancelled at any time, and then releases what it holds by itself.
        """
        digests = _checked(digests)
        future: Future[LoadedPages] = Future()
        slots = self._host.pin(digests)
        ssd = None if -1 not in slots else self._visible_ssd()
        count = 0
        while count < len(slots) and (slots[count] >= 0 or (ssd is not None and digests[count] in ssd)):
            count += 1
        if ssd is not None:
            ssd.count(misses=sum(slot < 0 and digest not in ssd for slot, digest in zip(slots, digests, strict=True)))
        taken = slots[:count]
        if -1 in taken:
            assert self._loader is not None
            if self._loader.start(digests[:count], taken, future):
                self._host.unpin([slot for slot in slots[count:] if slot >= 0])
                return future
            count = slots.index(-1)
        self._host.unpin([slot for slot in slots[count:] if slot >= 0])
        resolve(future, self._host, slots[:count])
        return future

    def touch(self, digests: Sequence[bytes]) -> list[bool]:
        """True where the page is in host memory, which then counts as used: it need not be stored again."""
        return self._host.touch(digests)

    def reserve(self, count: int, *, at_most: int | None = None) -> list[int]:
        """Slots of `host_pages` for `count` new pages, consecutive if possible; the pages least recently used go for them.

        Nobody else reads or writes a slot until it is given to `commit` or `abandon`, which the caller owes. There are fewer
        when all others are held, beyond `at_most`, or after `close`; pages left without one count as dropped.
        """
        slots = [] if self._closed else self._reserve(count if at_most is None else min(count, at_most))
        if len(slots) < count:
            self._host.count(dropped=count - len(slots))
        self._spill(self._queue_pages)  # the disk writes what comes next while these are filled
        return slots

    def commit(self, slots: Sequence[int], digests: Sequence[bytes], *, seconds: float = 0.0) -> None:
        """Makes filled slots findable; where a page is here already, its new slot is free again. The first pages of a batch
        count as used last. `seconds` is what filling took, for the statistics."""
        if len(slots) != len(digests):
            raise ValueError(f"{len(slots)} slots cannot hold pages of {len(digests)} digests")
        self._host.unpin(self._host.commit(slots, _checked(digests)))
        self._host.count(store_s=seconds)
        self._spill(self._queue_pages)

    def abandon(self, slots: Sequence[int]) -> None:
        """Gives reserved slots back without a page."""
        self._host.abandon(slots)

    @property
    def num_pinned(self) -> int:
        """Host slots that someone reads or fills; 0 once everything is drained and released."""
        return self._host.num_pinned

    def stats(self) -> StoreStats:
        return StoreStats(self._host.stats(), self._ssd.stats() if self._ssd else TierStats(), self.faults.snapshot())

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything loaded or on its way to SSD has arrived; False if that takes longer."""
        deadline = time.monotonic() + timeout_s
        parts = [part for part in (self._loader, self._ssd) if part is not None]
        return all([part.drain(max(0.0, deadline - time.monotonic())) for part in parts])

    def clear(self) -> None:
        """Forgets every page of both tiers, those on their way too. Pages that are held stay readable until released."""
        self._host.clear()
        if self._ssd:
            self._ssd.clear()

    def close(self, timeout_s: float = 30.0, *, keep_host_pages: bool = True) -> bool:
        """Takes nothing more, finishes what is under way, writes host pages to SSD (or not), and frees the directory.

        False if the disk did not answer in time: what was not written is lost, and the directory stays locked until the
        process ends. Pages that are held stay readable. Safe to call twice.
        """
        self._closed = True
        deadline = time.monotonic() + timeout_s

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        if self._ssd is None or self._loader is None:
            return True
        finished = self._loader.stop(left())
        remaining = self._host.stats().pages if keep_host_pages else 0
        while remaining and self._ssd.drain(left()):
            self._spill(len(self.host_pages))
            idle = self._ssd.num_waiting == 0
            before, remaining = remaining, self._host.stats().pages
            if remaining == before and idle:
                break  # the rest is held, or the directory is lost
        return self._ssd.close(left()) and finished

    def _visible_ssd(self) -> SsdTier | None:
        """The SSD tier, unless it is off or owes an answer for too long."""
        return None if self._loader is None or self._loader.stalled() else self._ssd

    def _reserve(self, count: int) -> list[int]:
        slots, evicted = self._host.reserve(count)
        if self._ssd is not None and evicted:
            # These had to go before they were on SSD, unless they were there already.
            self._ssd.count(dropped=sum(digest not in self._ssd for digest in evicted))
        return slots

    def _spill(self, spare: int) -> None:
        """Sends the least recently used host pages on their way to SSD, until `spare` slots are free or will be."""
        ssd = self._ssd
        if ssd is None:
            return
        on_ssd, to_write = [], []
        for slot, digest in self._host.begin_spill(spare, self._queue_pages):
            (on_ssd if digest in ssd else to_write).append((slot, digest))
        self._host.end_spill([slot for slot, _ in on_ssd])
        # In portions, whose slots are free while the next ones are written.
        for start in range(0, len(to_write), self._chunk_pages):
            portion = to_write[start : start + self._chunk_pages]
            slots = [slot for slot, _ in portion]
            pages = [(digest, self._host.pages[slot]) for slot, digest in portion]
            if not ssd.write(pages, lambda slots=slots: self._host.end_spill(slots)):
                self._host.cancel_spill([slot for slot, _ in to_write[start:]])
                break


def _checked(digests: Sequence[bytes]) -> list[bytes]:
    for digest in digests:
        if not MIN_DIGEST_BYTES <= len(digest) <= MAX_DIGEST_BYTES:
            raise ValueError(f"a digest has {len(digest)} bytes, not {MIN_DIGEST_BYTES} to {MAX_DIGEST_BYTES}")
    return list(digests)

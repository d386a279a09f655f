"""The host tier: page slots in one array of memory, least recently used pages evicted first.

A slot is *free*, *reserved* (being filled by its owner), *resident* (holds a page that can be found), or an *orphan* (its page
can no longer be found, but someone still reads it). Pins count who reads or fills a slot; a pinned slot is never reused, so no
copy from or to it can meet another. The lock guards bookkeeping only, no bytes are moved under it.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanoflow_jax.runtime.kv_store.stats import TierStats


class HostTier:
    """Thread-safe. Every slot that a call hands out is pinned, and the caller owes one `unpin`.

    Attributes:
      pages: uint8[num_slots, page_bytes].
    """

    def __init__(self, page_bytes: int, num_slots: int, *, buffer: Any = None) -> None:
        """`buffer` is memory to use instead of fresh one, such as pinned memory: writable, `num_slots * page_bytes` or more.

        Fresh memory is mapped when it is first touched.

        Raises:
          ValueError: the buffer is too small or read-only.
        """
        wanted = num_slots * page_bytes
        memory = np.empty(wanted, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
        if memory.size < wanted or not memory.flags.writeable:
            raise ValueError(f"the buffer has {memory.size} bytes (writable: {memory.flags.writeable}), {wanted} are needed")
        self.pages = memory[:wanted].reshape(num_slots, page_bytes)
        self.page_bytes = page_bytes
        self._lock = threading.Lock()
        self._free = np.ones(num_slots, bool)
        self._num_free = num_slots
        self._pins = [0] * num_slots
        self._digests: list[bytes | None] = [None] * num_slots
        self._generations = [0] * num_slots
        self._generation = 0
        self._resident: dict[bytes, int] = {}
        self._unpinned: OrderedDict[int, None] = OrderedDict()  # resident slots, least recently used first
        self._leaving: set[int] = set()
        self._stats = TierStats(capacity=num_slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._resident

    def pin(self, digests: Sequence[bytes], *, counted: bool = True) -> list[int]:
        """The slot of each page, pinned, or -1 where the page is not here; counted as hits and misses or not."""
        with self._lock:
            slots = [self._resident.get(digest, -1) for digest in digests]
            for slot in slots:
                if slot >= 0:
                    self._pin(slot)
            if counted:
                found = sum(slot >= 0 for slot in slots)
                self._stats.add(hits=found, misses=len(slots) - found)
            return slots

    def unpin(self, slots: Sequence[int]) -> None:
        """Gives pins back. The first of `slots` count as used last: of a sequence, the beginning is worth most."""
        with self._lock:
            for slot in reversed(slots):
                self._unpin(slot)

    def touch(self, digests: Sequence[bytes]) -> list[bool]:
        """Marks pages as used; True where the page is here."""
        with self._lock:
            slots = [self._resident.get(digest, -1) for digest in digests]
            for slot in reversed(slots):
                self._leaving.discard(slot)
                if slot in self._unpinned:
                    self._unpinned.move_to_end(slot)
            return [slot >= 0 for slot in slots]

    def reserve(self, count: int) -> tuple[list[int], list[bytes]]:
        """Up to `count` slots to fill, consecutive if possible, and the digests of pages evicted for them.

        Fewer slots than wanted when the others are pinned. Fill them, then `commit` or `abandon`.
        """
        with self._lock:
            evicted = []
            while self._num_free < count and self._unpinned:
                slot, _ = self._unpinned.popitem(last=False)
                evicted.append(self._remove(slot))
                self._release(slot)
            self._stats.evictions += len(evicted)
            slots = _consecutive(self._free, min(count, self._num_free))
            self._free[slots] = False
            self._num_free -= len(slots)
            for slot in slots:
                self._pins[slot] = 1
                self._generations[slot] = self._generation
            return slots, evicted

    def commit(self, slots: Sequence[int], digests: Sequence[bytes]) -> list[int]:
        """Makes filled slots resident. Returns the slots that hold the pages, each pinned once: others, where a page is here
        already, in which case the new slot is freed."""
        with self._lock:
            self._stats.bytes_in += len(slots) * self.page_bytes
            return [self._commit(slot, digest) for slot, digest in zip(slots, digests, strict=True)]

    def abandon(self, slots: Sequence[int]) -> None:
        """Gives reserved slots back."""
        with self._lock:
            for slot in slots:
                self._unpin(slot)

    def begin_spill(self, spare: int, at_most: int) -> list[tuple[int, bytes]]:
        """Pins the least recently used pages, as (slot, digest): up to `at_most`, until `spare` slots are free or leaving.

        They can be found until `end_spill`, and stay if they are used before.
        """
        with self._lock:
            batch = []
            while self._unpinned and len(batch) < at_most and self._num_free + len(self._leaving) < spare:
                slot, _ = self._unpinned.popitem(last=False)
                self._pins[slot] += 1
                self._leaving.add(slot)
                digest = self._digests[slot]
                assert digest is not None
                batch.append((slot, digest))
            return batch

    def end_spill(self, slots: Sequence[int]) -> None:
        """Frees the slots that `begin_spill` gave, except those used since."""
        with self._lock:
            for slot in slots:
                if slot in self._leaving:
                    self._remove(slot)
                    self._stats.evictions += 1
                self._unpin(slot)

    def cancel_spill(self, slots: Sequence[int]) -> None:
        """Takes `begin_spill` back: the pages stay, as the least recently used."""
        with self._lock:
            for slot in reversed(slots):
                self._leaving.discard(slot)
                self._unpin(slot)
                if slot in self._unpinned:
                    self._unpinned.move_to_end(slot, last=False)

    def clear(self) -> None:
        """Forgets every page, and those being filled now: they can be read by who holds them, and found by nobody."""
        with self._lock:
            self._generation += 1
            for slot in list(self._resident.values()):
                self._remove(slot)
                if self._pins[slot] == 0:
                    self._release(slot)
            self._unpinned.clear()

    def count(self, **amounts: float) -> None:
        """Adds to fields of the statistics."""
        with self._lock:
            self._stats.add(**amounts)

    def stats(self) -> TierStats:
        with self._lock:
            return dataclasses.replace(self._stats, pages=len(self._resident))

    @property
    def num_pinned(self) -> int:
        """Slots that someone reads or fills; 0 at rest."""
        with self._lock:
            return sum(pins > 0 for pins in self._pins)

    def check_integrity(self) -> None:
        """Checks that the books agree.

        Raises:
          AssertionError: they do not.
        """
        with self._lock:
            free = set(np.flatnonzero(self._free).tolist())
            resident = set(self._resident.values())
            pinned = {slot for slot, pins in enumerate(self._pins) if pins}
            assert min(self._pins, default=0) >= 0 and len(free) == self._num_free
            assert len(resident) == len(self._resident), "two pages in a slot"
            assert not free & (resident | pinned), "a free slot is in use"
            assert free | resident | pinned == set(range(len(self._pins))), "a slot is lost"
            assert set(self._unpinned) == resident - pinned
            assert self._leaving <= resident and all(self._pins[slot] == 1 for slot in self._leaving)
            assert all(self._digests[slot] == digest for digest, slot in self._resident.items())

    # The lock is held in all that follows.

    def _pin(self, slot: int) -> None:
        self._pins[slot] += 1
        self._unpinned.pop(slot, None)
        self._leaving.discard(slot)

    def _unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        assert self._pins[slot] >= 0, f"{slot=} is not pinned"
        if self._pins[slot] == 0:
            if self._digests[slot] is None:
                self._release(slot)
            else:
                self._unpinned[slot] = None

    def _commit(self, slot: int, digest: bytes) -> int:
        assert self._digests[slot] is None and self._pins[slot] == 1, f"{slot=} is not reserved"
        there = self._resident.get(digest)
        if there is not None:
            self._unpin(slot)
            self._pin(there)
            return there
        if self._generations[slot] == self._generation:
            self._digests[slot] = digest
            self._resident[digest] = slot
        return slot

    def _remove(self, slot: int) -> bytes:
        """A resident slot becomes an orphan."""
        digest = self._digests[slot]
        assert digest is not None
        del self._resident[digest]
        self._digests[slot] = None
        self._leaving.discard(slot)
        return digest

    def _release(self, slot: int) -> None:
        self._free[slot] = True
        self._num_free += 1


def _consecutive(free: np.ndarray, count: int) -> list[int]:
    """`count` of the free slots: the shortest run that holds them all, or else the longest runs first."""
    if count == 0:
        return []
    slots = np.flatnonzero(free)
    starts = np.flatnonzero(np.diff(slots, prepend=-2) != 1)
    lengths = np.diff(starts, append=slots.size)
    holding = np.flatnonzero(lengths >= count)
    if holding.size:
        start = starts[holding[np.argmin(lengths[holding])]]
        return slots[start : start + count].tolist()
    chosen: list[int] = []
    for run in np.argsort(-lengths, kind="stable"):
        chosen += slots[starts[run] : starts[run] + lengths[run]].tolist()
        if len(chosen) >= count:
            break
    return chosen[:count]


def runs_of(slots: Sequence[int]) -> list[tuple[int, int]]:
    """(first slot, count) of each run of consecutive slots, in order."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and slot == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((slot, 1))
    return runs

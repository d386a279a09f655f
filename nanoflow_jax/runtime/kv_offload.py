"""From steps to the store: K and V of each step's tokens, as they leave the device, become pages of the memory tiers.

Every byte is copied once, from where the step left it to its place in the host tier. A page may take many steps to fill, so it
has its slot there from its first token on. A table row, a running sequence, has one such unfinished page at most; with the last
token it gets its name and can be found. One thread decides, step after step, with numpy over a step's pages, and copies, and a
few others help it: for long stretches without the interpreter's lock, which the engine's thread needs.

An unfinished page is given up, and its slot back, when tokens come for its row that do not continue it, when its sequence has
no more tokens there, and by `drain` and `stop`. Such pages hold half of the slots at most, so that they never keep others out.

The names of pages come from the engine's thread: when a step's successor has been consumed, and not before, the ids of all its
tokens are known.
"""

import dataclasses
import itertools
import os
import time
from collections.abc import Sequence as Sized
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from nanoflow_jax.runtime.batcher import FormedStep
from nanoflow_jax.runtime.kv_store import KVStore
from nanoflow_jax.runtime.kv_store.workers import Workers
from nanoflow_jax.runtime.sequences import Phase, SequenceTable

# Copies of steps that may exist at once. More would only hide for longer that the host cannot keep up.
IN_FLIGHT_BYTES = 1 << 30
# One core copies 10 GB/s, half of what the fastest steps bring; four come close to what the memory of a server gives.
_COPY_THREADS = min(4, os.cpu_count() or 1)
# Each of them has at least this much to copy: handing it over costs some 50 microseconds.
_MIN_COPY_BYTES = 1 << 20
# Tokens that do not lie together, which is rare, are gathered first, so many bytes at a time.
_GATHER_BYTES = 1 << 23


@dataclasses.dataclass(frozen=True)
class StepTokens:
    """What a step computed, as n stretches of consecutive tokens, one per row of its batch.

    Attributes:
      arrays: `[T, ...]` per group of layers, on their way from the device.
      rows: table rows; `owners` tells one owner of a row from the next.
      positions, lengths: of the stretches, in their sequences; `places` in the step.
      names: stretch -> digests of the pages that it completes.
      running: the owner of every table row, -1 where no tokens of one will follow this step.
    """

    arrays: Sized[Any]
    rows: np.ndarray
    owners: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    places: np.ndarray
    names: dict[int, list[bytes]]
    running: np.ndarray


class Pieces:
    """A step's stretches cut at the ends of pages: arrays over all pieces, in order.

    Attributes:
      stretch: which one it belongs to; `heads` are the pieces that stretches begin with.
      offset, count: tokens of the page that it covers; `place` of the first in the step.
      ending: with it, the page is complete.
      names: digests of pages that are complete and known by name, else None.
      slots: of the host tier, -1 where the page is not kept.
    """

    def __init__(self, step: StepTokens, page_size: int) -> None:
        ends = step.positions + step.lengths
        first = step.positions // page_size
        counts = -(-ends // page_size) - first
        self.heads = np.cumsum(counts) - counts
        self.stretch = np.repeat(np.arange(counts.size), counts)
        page = _ranges(first, counts)
        begin = np.maximum(page * page_size, step.positions[self.stretch])
        self.count = np.minimum((page + 1) * page_size, ends[self.stretch]) - begin
        self.offset = begin % page_size
        self.place = step.places[self.stretch] + begin - step.positions[self.stretch]
        self.ending = self.offset + self.count == page_size
        self.names: list[bytes | None] = [None] * page.size
        for i, digests in step.names.items():
            self.names[self.heads[i] : self.heads[i] + len(digests)] = digests
        self.slots = np.full(page.size, -1)

    def complete(self) -> np.ndarray:
        """Indices of pieces that complete a page with a name."""
        return np.array([i for i in np.flatnonzero(self.ending).tolist() if self.names[i] is not None], np.int64)


class Offload:
    """Takes steps on the engine's thread and never blocks it: a step that is one too many is dropped, and counted.

    Attributes:
      num_tokens: tokens taken; `num_dropped` were not, and pages with such a token are not stored.
    """

    def __init__(self, store: KVStore, *, num_rows: int, page_size: int, num_groups: int) -> None:
        self.num_tokens = 0
        self.num_dropped = 0
        self._store = store
        self._page_size = page_size
        self._num_groups = num_groups
        # [slots, groups, page_size] of tokens, flat.
        self._memory = store.host_pages.reshape(-1, store.page_bytes // (num_groups * page_size))
        self._workers = Workers("kv-offload", 1, max_waiting=IN_FLIGHT_BYTES, faults=store.faults)
        self._copiers = ThreadPoolExecutor(max(1, _COPY_THREADS - 1), "kv-copy")  # beside the worker
        # Of each row: the slot of its unfinished page, -1 if none is kept; whose tokens it has, all up to which position.
        self._slots = np.full(num_rows, -1)
        self._owners = np.full(num_rows, -1, np.int64)
        self._next = np.zeros(num_rows, np.int64)

    def take(self, step: FormedStep, arrays: Sized[Any], table: SequenceTable) -> None:
        """Begins to store what `step` computes. To be called once the ids of all its tokens are on the host.

        Args:
          arrays: `new_kv` of the launched step.
        """
        assert len(arrays) == self._num_groups, f"{len(arrays)} arrays for {self._num_groups} groups of layers"
        num_bytes, waiting = sum(array.nbytes for array in arrays), self._workers.waiting
        if waiting and waiting + num_bytes > IN_FLIGHT_BYTES:
            self.num_dropped += step.num_tokens
            return
        for array in arrays:
            array.copy_to_host_async()
        self.num_tokens += step.num_tokens
        count = step.members.size
        ends, lengths = step.batch.kv_lens[:count], step.batch.q_lens[:count]
        tokens = StepTokens(
            arrays=arrays,
            rows=step.member_rows,
            owners=np.fromiter((sequence.arrival for sequence in step.members), np.int64, count),
            positions=ends - lengths,
            lengths=lengths,
            places=step.batch.q_starts[:count],
            names=self._names(step, ends, lengths, table),
            running=np.where((table.phase == Phase.FREE) | (table.phase == Phase.ENDING), -1, table.arrival),
        )
        self._workers.submit(lambda: self._store_step(tokens), weight=num_bytes)

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything taken is in the store, and gives up unfinished pages; False if that takes longer."""
        self._workers.submit(self._give_up_all, follow_up=True)
        return self._workers.drain(timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Drains and ends the threads; False if that takes longer."""
        self._workers.submit(self._give_up_all, follow_up=True)
        stopped = self._workers.stop(timeout_s)
        if stopped:
            self._copiers.shutdown()
        return stopped

    def _names(self, step: FormedStep, ends: np.ndarray, lengths: np.ndarray, table: SequenceTable) -> dict[int, list[bytes]]:
        first, last = (ends - lengths) // self._page_size, ends // self._page_size
        names = {}
        for i in np.flatnonzero(last > first).tolist():
            sequence = step.members[i]
            ids = table.tokens[sequence.row] if sequence.row >= 0 else sequence.tokens
            known = table.known[sequence.row] if sequence.row >= 0 else sequence.tokens.size
            num_pages = min(int(last[i]), int(known) // self._page_size)
            names[i] = sequence.page_digests(ids, self._page_size, num_pages)[first[i] :]
        return names

    # On the worker's thread

    def _store_step(self, step: StepTokens) -> None:
        pieces = Pieces(step, self._page_size)
        self._place(step, pieces)
        try:
            seconds = self._copy(step.arrays, pieces)
        except BaseException:
            self._store.abandon(pieces.slots[pieces.slots >= 0].tolist())
            raise
        complete = pieces.complete()
        complete = complete[pieces.slots[complete] >= 0]
        self._store.commit(pieces.slots[complete].tolist(), [pieces.names[i] for i in complete.tolist()], seconds=seconds)
        pieces.slots[complete] = -1
        self._store.abandon(pieces.slots[pieces.ending & (pieces.slots >= 0)].tolist())  # complete, and nobody knows its name
        unfinished = np.flatnonzero(~pieces.ending)
        self._slots[step.rows[pieces.stretch[unfinished]]] = pieces.slots[unfinished]
        self._owners[step.rows] = step.owners
        self._next[step.rows] = step.positions + step.lengths
        self._give_up(np.flatnonzero(self._owners != step.running))

    def _place(self, step: StepTokens, pieces: Pieces) -> None:
        """Finds slots for pieces: those of the pages that they continue, and new ones, first for pages that are complete now.

        The slots of the step's rows move to its pieces.
        """
        continued = (self._owners[step.rows] == step.owners) & (self._next[step.rows] == step.positions)
        self._give_up(step.rows[~continued])
        pieces.slots[pieces.heads] = self._slots[step.rows]
        self._slots[step.rows] = -1
        new = pieces.offset == 0
        whole = pieces.complete()
        whole = whole[new[whole]]
        whole = whole[~np.array(self._store.touch([pieces.names[i] for i in whole.tolist()]), bool)]
        begun = np.flatnonzero(new & ~pieces.ending)
        num_unfinished = int((self._slots >= 0).sum() + ((pieces.slots >= 0) & ~pieces.ending).sum())
        room = max(0, len(self._store.host_pages) // 2 - num_unfinished)
        wanted = np.concatenate((whole, begun))
        slots = self._store.reserve(wanted.size, at_most=whole.size + room)
        pieces.slots[wanted[: len(slots)]] = slots

    def _copy(self, arrays: Sized[Any], pieces: Pieces) -> float:
        """Waits for a step's arrays and copies their tokens to their slots; returns the threads' seconds.

        Few and long copies: each time a thread comes back from one, it may have to wait for the interpreter's lock.
        """
        groups = [_token_bytes(np.asarray(array)) for array in arrays]
        kept = pieces.slots >= 0
        sources = _ranges(pieces.place[kept], pieces.count[kept])
        first = pieces.slots[kept] * (self._num_groups * self._page_size) + pieces.offset[kept]
        targets, count = _ranges(first, pieces.count[kept]), sources.size
        if count == 0:
            return 0.0

        def copy(start: int, stop: int) -> float:
            """A part of all groups' tokens, one group after the other."""
            begin = time.perf_counter()
            for group in range(start // count, -(-stop // count)):
                part = slice(max(0, start - group * count), min(count, stop - group * count))
                _copy_rows(self._memory, targets[part] + group * self._page_size, groups[group], sources[part])
            return time.perf_counter() - begin

        total = count * self._num_groups
        num_parts = max(1, min(_COPY_THREADS, total * self._memory.shape[1] // _MIN_COPY_BYTES))
        bounds = [total * i // num_parts for i in range(num_parts + 1)]
        others = [self._copiers.submit(copy, a, b) for a, b in itertools.pairwise(bounds[1:])]
        try:
            seconds = copy(0, bounds[1])
        finally:
            wait(others)  # they write to slots
        return seconds + sum(other.result() for other in others)

    def _give_up(self, rows: np.ndarray) -> None:
        """Gives back the slots of unfinished pages of `rows`."""
        slots = self._slots[rows]
        self._store.abandon(slots[slots >= 0].tolist())
        self._slots[rows] = -1

    def _give_up_all(self) -> None:
        self._give_up(np.arange(self._slots.size))


def _ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ..., `counts[0]` numbers, and so on, in one array."""
    ends = np.cumsum(counts)
    return np.repeat(first - (ends - counts), counts) + np.arange(ends[-1] if ends.size else 0)


def _token_bytes(array: np.ndarray) -> np.ndarray:
    """uint8[T, bytes per token], without a copy."""
    return array.reshape(len(array), -1).view(np.uint8)


def _copy_rows(memory: np.ndarray, targets: np.ndarray, rows: np.ndarray, sources: np.ndarray) -> None:
    """memory[targets] = rows[sources], `sources` ascending. numpy does not hold the interpreter's lock while it copies."""
    count = targets.size
    if sources[-1] - sources[0] == count - 1:
        memory[targets] = rows[sources[0] : sources[0] + count]
        return
    portion = max(1, _GATHER_BYTES // memory.shape[1])
    for start in range(0, count, portion):
        chosen = slice(start, start + portion)
        memory[targets[chosen]] = rows[sources[chosen]]

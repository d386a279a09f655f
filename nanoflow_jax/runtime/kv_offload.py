"""From steps to the store: K and V of each step's tokens, as they leave the device, become pages of the memory tiers.

A page may take many steps to fill. Its tokens gather in the staging area, which has room for one unfinished page per table row,
a running sequence having no more; pages that one step fills are stored from where the step's copy lies. All of that happens on
one thread, step after step, so what a row's next owner stages cannot meet what the last one left.

The names of pages come from the engine's thread: when a step's successor has been consumed, and not before, the ids of all its
tokens are known.
"""

import dataclasses
from collections.abc import Sequence as Sized
from concurrent.futures import Future
from typing import Any

import numpy as np

from nanoflow_jax.runtime.batcher import FormedStep
from nanoflow_jax.runtime.kv_store import KVStore
from nanoflow_jax.runtime.kv_store.workers import Workers
from nanoflow_jax.runtime.sequences import SequenceTable

# Copies of steps that may exist at once. More would only hide for longer that the host cannot keep up.
IN_FLIGHT_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class StepTokens:
    """What a step computed, as n stretches of consecutive tokens, one per row of its batch.

    Attributes:
      arrays: `[T, ...]` per group of layers, on their way from the device.
      rows: table rows; `owners` tells one owner of a row from the next.
      positions, lengths: of the stretches, in their sequences; `places` in the step.
      names: stretch -> digests of the pages that it completes.
    """

    arrays: Sized[Any]
    rows: np.ndarray
    owners: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    places: np.ndarray
    names: dict[int, list[bytes]]


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
        self._workers = Workers("kv-offload", 1, max_waiting=IN_FLIGHT_BYTES, faults=store.faults)
        token_bytes = store.page_bytes // (page_size * num_groups)
        # Untouched memory is not mapped.
        self._staged = [np.empty((num_rows, page_size, token_bytes), np.uint8) for _ in range(num_groups)]
        # Whose tokens a row's staged page holds, all up to which position; -1: nobody's.
        self._owner = np.full(num_rows, -1, np.int64)
        self._next = np.zeros(num_rows, np.int64)

    def take(self, step: FormedStep, arrays: Sized[Any], table: SequenceTable) -> None:
        """Begins to store what `step` computes. To be called once the ids of all its tokens are on the host.

        Args:
          arrays: `new_kv` of the launched step.
        """
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
        )
        self._workers.submit(lambda: self._store_step(tokens), weight=num_bytes)

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything taken has been given to the store; False if that takes longer."""
        return self._workers.drain(timeout_s)

    def stop(self, timeout_s: float) -> bool:
        return self._workers.stop(timeout_s)

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

    def _store_step(self, tokens: StepTokens) -> None:
        arrays = [np.asarray(array) for array in tokens.arrays]  # waits for the copies
        rows = [array.reshape(len(array), -1).view(np.uint8) for array in arrays]
        offsets = tokens.positions % self._page_size
        continued = (self._owner[tokens.rows] == tokens.owners) & (self._next[tokens.rows] == tokens.positions)
        whole = continued | (offsets == 0)
        single = whole & (tokens.lengths == 1)
        for staged, group in zip(self._staged, rows, strict=True):
            staged[tokens.rows[single], offsets[single]] = group[tokens.places[single]]
        puts: list[Future[int]] = []
        for i in np.flatnonzero(single & (offsets == self._page_size - 1)).tolist():
            puts += self._put_staged(int(tokens.rows[i]), tokens.names.get(i, []))
        for i in np.flatnonzero(~single).tolist():
            puts += self._store_stretch(tokens, i, rows, bool(whole[i]))
        self._owner[tokens.rows] = np.where(whole | (offsets + tokens.lengths >= self._page_size), tokens.owners, -1)
        self._next[tokens.rows] = tokens.positions + tokens.lengths
        for put in puts:
            put.result()  # staged rows and the step's arrays are used until then

    def _store_stretch(self, tokens: StepTokens, i: int, rows: list[np.ndarray], whole: bool) -> list["Future[int]"]:
        """Stores what tokens of one row complete and stages the rest. Not `whole`: its first page misses earlier tokens."""
        size, row, names = self._page_size, int(tokens.rows[i]), tokens.names.get(i, [])
        place, offset = int(tokens.places[i]), int(tokens.positions[i]) % size
        stop, puts = place + int(tokens.lengths[i]), []
        if offset:
            count = min(size - offset, stop - place)
            self._stage(row, offset, rows, place, count)
            place += count
            if offset + count == size:
                if whole:
                    puts += self._put_staged(row, names, copied=True)
                names = names[1:]
        num_pages = (stop - place) // size
        if num_pages:
            end = place + num_pages * size
            pages = _joined([group[place:end].reshape(num_pages, -1) for group in rows])
            puts.append(self._store.put_many(names[:num_pages], pages[: len(names)]))
            place = end
        if place < stop:
            self._stage(row, 0, rows, place, stop - place)
        return puts

    def _stage(self, row: int, offset: int, rows: list[np.ndarray], place: int, count: int) -> None:
        for staged, group in zip(self._staged, rows, strict=True):
            staged[row, offset : offset + count] = group[place : place + count]

    def _put_staged(self, row: int, names: list[bytes], *, copied: bool = False) -> list["Future[int]"]:
        """Stores a row's staged page under the first of `names`; `copied`, so that the row can be staged to at once."""
        page = _joined([staged[row].reshape(1, -1) for staged in self._staged])
        return [self._store.put_many(names[:1], page.copy() if copied else page)] if names else []


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """Parts of pages side by side; not copied if there is one."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

"""The SSD tier: segment files in one directory, an index of them in memory, and one thread that writes.

Whole segments are evicted, the least recently used first. Files are opened for each batch and never held open, so that a file
that has gone is noticed at once and nothing depends on the number of segments. Nothing is ever synced: a page that a power cut
tears is found by its checksum, and whatever a killed process has written is kept by the system.
"""

import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from nanoflow_jax.runtime.kv_store.directory import DirectoryLock
from nanoflow_jax.runtime.kv_store.faults import Fault, FaultLog, kind_of_write_error
from nanoflow_jax.runtime.kv_store.files import Files, OsFiles, read_into, write_all
from nanoflow_jax.runtime.kv_store.segment import (
    Header,
    Layout,
    Record,
    Segment,
    layout_for,
    pack_entry,
    page_checksum,
    runs_of_records,
    scan,
)
from nanoflow_jax.runtime.kv_store.stats import TierStats
from nanoflow_jax.runtime.kv_store.workers import Workers

_NAME = re.compile(r"segment-([0-9a-f]{16})\.kv")


class SsdTier:
    """Thread-safe. `write` queues and returns; `read` blocks and belongs on a thread of its own. Faults never raise."""

    def __init__(
        self,
        directory: str,
        size_bytes: int,
        page_bytes: int,
        fingerprint: bytes,
        *,
        queue_pages: int,
        files: Files | None = None,
        faults: FaultLog,
    ) -> None:
        """Locks the directory (created if need be) and recovers what it holds.

        Raises:
          ValueError: `size_bytes` holds not even one page.
          DirectoryInUseError: another process, or this one, has the directory open.
          OSError: the directory cannot be made, locked or listed.
        """
        self._layout = layout_for(size_bytes, page_bytes)
        self._directory = directory
        self._size_bytes = size_bytes
        self._fingerprint = fingerprint
        self._files = files or OsFiles()
        self._faults = faults
        self._lock = threading.Lock()
        self._index: dict[bytes, Record] = {}
        self._segments: dict[int, Segment] = {}
        self._active: Segment | None = None
        self._clock = 0
        self._newest_id = 0
        self._generation = 0
        self._lost = False
        per_segment = self._layout.page_offset(self._layout.capacity)
        self._stats = TierStats(capacity=size_bytes // per_segment * self._layout.capacity)
        self._directory_lock = DirectoryLock(directory)
        try:
            self._recover()
        except BaseException:
            self._directory_lock.release()
            raise
        self._writer = Workers("kv-ssd-writer", 1, max_waiting=queue_pages, faults=faults)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    def locate(self, digests: Sequence[bytes]) -> list[Record | None]:
        with self._lock:
            return [self._index.get(digest) for digest in digests]

    def read(self, records: Sequence[Record], pages: Sequence[Any]) -> list[bool]:
        """Reads each record into its page (a writable buffer of page_bytes); True where the page is there and intact."""
        begin = time.perf_counter()
        intact = [False] * len(records)
        order = sorted(range(len(records)), key=lambda i: (records[i].segment.segment_id, records[i].index))
        for run in runs_of_records(order, records):
            self._read_run(run, records, pages, intact)
        good = sum(intact)
        self.count(
            hits=good,
            misses=len(records) - good,
            bytes_out=good * self._layout.page_bytes,
            load_s=time.perf_counter() - begin,
        )
        return intact

    def count(self, **amounts: float) -> None:
        """Adds to fields of the statistics."""
        with self._lock:
            self._stats.add(**amounts)

    def write(self, pages: Sequence[tuple[bytes, Any]], done: Callable[[], None]) -> bool:
        """Queues (digest, page) pairs; `done` is called once the pages are no longer read, whatever became of them.

        False, and `done` is not called, when too much waits already or the directory is lost. Never blocks.
        """
        generation = self._generation

        def work() -> None:
            try:
                self._write(pages, generation)
            finally:
                done()

        return not self._lost and self._writer.submit(work, weight=len(pages))

    @property
    def num_waiting(self) -> int:
        """Pages queued or being written."""
        return self._writer.waiting

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is queued."""
        return self._writer.drain(timeout_s)

    def clear(self) -> None:
        """Removes every segment, those of other models too, and forgets what is queued."""
        with self._lock:
            self._generation += 1
            segments = list(self._segments.values())
            for segment in segments:
                self._detach(segment)
        for segment in segments:
            self._unlink(segment)

    def close(self, timeout_s: float) -> bool:
        """Writes what is queued and releases the directory. False, and it stays locked, if the disk does not answer in time."""
        if not self._writer.stop(timeout_s):
            return False
        self._directory_lock.release()
        return True

    def stats(self) -> TierStats:
        with self._lock:
            return dataclasses.replace(self._stats, pages=len(self._index))

    # Recovery

    def _recover(self) -> None:
        names = sorted(name for name in self._files.names(self._directory) if _NAME.fullmatch(name))
        for name in names:
            self._recover_segment(os.path.join(self._directory, name), int(name[8:24], 16))
        self._clock = self._newest_id
        last = max((s for s in self._segments.values() if s.digests), key=lambda s: s.segment_id, default=None)
        if last and last.layout == self._layout and last.next_index < last.layout.capacity:
            last.counted_bytes = last.layout.page_offset(last.layout.capacity)
            self._active = last
        self._make_room(0)

    def _recover_segment(self, path: str, segment_id: int) -> None:
        try:
            found = scan(self._files, path, self._fingerprint, self._layout.page_bytes, self._faults)
        except OSError as error:
            self._faults.count(Fault.READ_ERROR, error)
            found = None
        else:
            if found is None:
                self._faults.count(Fault.BAD_HEADER, path)
        segment = Segment(segment_id, path, self._layout, self._layout.page_offset(self._layout.capacity), 0, [])
        if found is not None:
            layout = Layout(found.header.page_bytes, found.header.capacity)
            ours = found.header.fingerprint == self._fingerprint
            next_index = found.entries[-1][0] + 1 if found.entries else 0
            digests = [digest for _, digest, _ in found.entries]
            segment = Segment(segment_id, path, layout, found.file_bytes, next_index, digests, segment_id if ours else 0)
        self._newest_id = max(self._newest_id, segment_id)
        self._segments[segment_id] = segment
        if found is None or (not found.entries and found.header.fingerprint == self._fingerprint):
            self._detach(segment)
            self._unlink(segment)
            return
        for index, digest, checksum in found.entries:
            self._index[digest] = Record(digest, segment, index, checksum)

    # Reading

    def _read_run(self, run: list[int], records: Sequence[Record], pages: Sequence[Any], intact: list[bool]) -> None:
        """Reads records of consecutive pages of one segment."""
        first = records[run[0]]
        segment = first.segment
        page_bytes = segment.layout.page_bytes
        try:
            fd = self._files.open(segment.path, os.O_RDONLY)
            try:
                read = read_into(self._files, fd, [pages[i] for i in run], segment.layout.page_offset(first.index))
            finally:
                self._files.close(fd)
        except FileNotFoundError as error:
            self._lose(segment, error)
            return
        except OSError as error:
            self._faults.count(Fault.READ_ERROR, error, times=len(run))
            self._forget([records[i] for i in run])
            return
        for position, i in enumerate(run):
            record = records[i]
            if read < (position + 1) * page_bytes:
                self._faults.count(Fault.TRUNCATED, f"{segment.path}: page {record.index}")
            elif page_checksum(self._fingerprint, record.digest, pages[i]) != record.checksum:
                self._faults.count(Fault.CHECKSUM, f"{segment.path}: page {record.index}")
            else:
                intact[i] = True
        self._forget([records[i] for i in run if not intact[i]])
        with self._lock:
            self._clock += 1
            segment.last_used = self._clock

    def _forget(self, records: Sequence[Record]) -> None:
        with self._lock:
            for record in records:
                if self._index.get(record.digest) is record:
                    del self._index[record.digest]

    def _lose(self, segment: Segment, error: OSError) -> None:
        """The file is not there; no fault if it was evicted meanwhile."""
        with self._lock:
            evicted = segment.gone
            self._detach(segment)
        if not evicted:
            self._faults.count(Fault.SEGMENT_LOST, error)

    def _detach(self, segment: Segment) -> int:
        """Forgets a segment and its pages; returns how many. The lock is held."""
        segment.gone = True
        self._segments.pop(segment.segment_id, None)
        held = [d for d in segment.digests if (record := self._index.get(d)) is not None and record.segment is segment]
        for digest in held:
            del self._index[digest]
        return len(held)

    # Writing; on the writer's thread, and in the constructor

    def _write(self, pages: Sequence[tuple[bytes, Any]], generation: int) -> None:
        begin = time.perf_counter()
        todo = [(digest, page) for digest, page in pages if digest not in self._index]
        written = 0
        while written < len(todo) and generation == self._generation:
            try:
                segment = self._segment_with_room()
                if segment is None:
                    break
                batch = todo[written : written + segment.layout.capacity - segment.next_index]
                self._append(segment, batch, generation)
            except OSError as error:
                self._write_failed(error)
                break
            written += len(batch)
        self.count(
            dropped=len(todo) - written,
            bytes_in=written * self._layout.page_bytes,
            store_s=time.perf_counter() - begin,
        )

    def _append(self, segment: Segment, batch: Sequence[tuple[bytes, Any]], generation: int) -> None:
        layout, first = segment.layout, segment.next_index
        checksums = [page_checksum(self._fingerprint, digest, page) for digest, page in batch]
        table = b"".join(pack_entry(digest, checksum) for (digest, _), checksum in zip(batch, checksums, strict=True))
        fd = self._files.open(segment.path, os.O_RDWR)
        try:
            # A page before its entry: what a killed process leaves is found by its entries.
            write_all(self._files, fd, [page for _, page in batch], layout.page_offset(first))
            write_all(self._files, fd, [table], layout.entry_offset(first))
        finally:
            self._files.close(fd)
        with self._lock:
            stale = segment.gone or generation != self._generation
            if stale:
                self._detach(segment)
            else:
                self._publish(segment, batch, checksums)
        if stale:
            self._unlink(segment)

    def _publish(self, segment: Segment, batch: Sequence[tuple[bytes, Any]], checksums: Sequence[int]) -> None:
        """Makes appended pages readable. The lock is held."""
        self._clock += 1
        segment.last_used = self._clock
        for (digest, _), checksum in zip(batch, checksums, strict=True):
            self._index[digest] = Record(digest, segment, segment.next_index, checksum)
            segment.digests.append(digest)
            segment.next_index += 1

    def _write_failed(self, error: OSError) -> None:
        kind = kind_of_write_error(error)
        if kind is Fault.SEGMENT_LOST and self._active is not None and not self._active.gone:
            self._lose(self._active, error)
        else:
            self._faults.count(kind, error)

    def _segment_with_room(self) -> Segment | None:
        """The segment to append to, a new one if need be. None where the directory is lost or no room can be made.

        Raises:
          OSError: the file cannot be created.
        """
        segment = self._active
        if segment is not None and not segment.gone and segment.next_index < segment.layout.capacity:
            return segment
        self._active = None
        full_bytes = self._layout.page_offset(self._layout.capacity)
        if not self._directory_lock.holds():
            self._lost = True
            self._faults.count(Fault.DIRECTORY_LOST, f"{self._directory} was removed or replaced; nothing more is written")
            return None
        if not self._make_room(full_bytes):
            return None
        self._newest_id += 1
        segment_id = self._newest_id
        path = os.path.join(self._directory, f"segment-{segment_id:016x}.kv")
        header = Header(segment_id, self._layout.page_bytes, self._layout.capacity, self._fingerprint)
        fd = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        segment = Segment(segment_id, path, self._layout, full_bytes, 0, [])
        try:
            write_all(self._files, fd, [header.pack()], 0)
        except OSError:
            self._unlink(segment)
            raise
        finally:
            self._files.close(fd)
        with self._lock:
            self._segments[segment_id] = segment
        self._active = segment
        return segment

    def _make_room(self, wanted_bytes: int) -> bool:
        """Evicts the least recently used segments until `wanted_bytes` more fit; those of other models go first."""
        while True:
            with self._lock:
                used = sum(segment.counted_bytes for segment in self._segments.values())
                if used + wanted_bytes <= self._size_bytes:
                    return True
                oldest = min(self._segments.values(), key=lambda s: (s.last_used, s.segment_id))
                self._stats.evictions += self._detach(oldest)
            if not self._unlink(oldest):
                with self._lock:
                    # Empty, but it still takes room; the next turn is another's.
                    self._segments[oldest.segment_id] = oldest
                    oldest.last_used = self._clock
                return False

    def _unlink(self, segment: Segment) -> bool:
        try:
            self._files.unlink(segment.path)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._faults.count(Fault.WRITE_ERROR, error)
            return False
        return True

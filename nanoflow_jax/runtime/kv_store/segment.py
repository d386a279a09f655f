"""The format of a segment file: a header, a table with an entry per page, and the pages, all at fixed offsets.

    0                       header, padded to 4096 bytes
    4096                    `capacity` entries of 64 bytes, padded to a multiple of 4096
    layout.data_offset      `capacity` pages of `page_bytes` each

Pages and entries are written once, in order, an entry after its page. A file is as long as its pages reach. Entries carry the
page's checksum, so a page is trusted only when it reads back as what was written. Integers are little-endian.
"""

import dataclasses
import os
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from nanoflow_jax.runtime.kv_store.faults import Fault, FaultLog
from nanoflow_jax.runtime.kv_store.files import Files, read_into
from nanoflow_jax.runtime.kv_store.fingerprint import FINGERPRINT_BYTES, FORMAT_VERSION

HEADER_BYTES = 4096
ENTRY_BYTES = 64
MIN_DIGEST_BYTES = 16
MAX_DIGEST_BYTES = 32
# The granularity of eviction, as a fraction of the tier.
_SEGMENTS_PER_TIER = 32
_MAGIC = b"NFKVSEG\n"
# magic, format version, segment id, page bytes, capacity, fingerprint; the CRC of these follows.
_HEADER = struct.Struct(f"<8sIQQQ{FINGERPRINT_BYTES}s")
# digest padded with zeros, its length, CRC of the page; the CRC of these follows.
_ENTRY = struct.Struct(f"<{MAX_DIGEST_BYTES}sBI")
_CRC = struct.Struct("<I")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Offsets of one segment file, in bytes."""

    page_bytes: int
    capacity: int

    @property
    def data_offset(self) -> int:
        table = self.capacity * ENTRY_BYTES
        return HEADER_BYTES + -(-table // 4096) * 4096

    def entry_offset(self, index: int) -> int:
        return HEADER_BYTES + index * ENTRY_BYTES

    def page_offset(self, index: int) -> int:
        return self.data_offset + index * self.page_bytes


@dataclasses.dataclass(frozen=True)
class Header:
    segment_id: int
    page_bytes: int
    capacity: int
    fingerprint: bytes
    version: int = FORMAT_VERSION

    def pack(self) -> bytes:
        facts = _HEADER.pack(_MAGIC, self.version, self.segment_id, self.page_bytes, self.capacity, self.fingerprint)
        return (facts + _CRC.pack(zlib.crc32(facts))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def parse(cls, data: bytes) -> "Header | None":
        """The header in `data`, or None where there is none or it is damaged."""
        if len(data) < _HEADER.size + _CRC.size:
            return None
        magic, version, segment_id, page_bytes, capacity, fingerprint = _HEADER.unpack_from(data)
        if magic != _MAGIC or _CRC.unpack_from(data, _HEADER.size)[0] != zlib.crc32(data[: _HEADER.size]):
            return None
        return cls(segment_id, page_bytes, capacity, fingerprint, version)


@dataclasses.dataclass(eq=False)
class Segment:
    """A segment file. `counted_bytes` is what it may grow to; `gone` once it is evicted, cleared or lost."""

    segment_id: int
    path: str
    layout: Layout
    counted_bytes: int
    next_index: int
    digests: list[bytes]
    last_used: int = 0
    gone: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """Where a page is."""

    digest: bytes
    segment: Segment
    index: int
    checksum: int


def page_checksum(fingerprint: bytes, digest: bytes, page: Any) -> int:
    """CRC-32 of a page (buffer of bytes) and of what it is filed under: a page in the wrong place does not match either."""
    return zlib.crc32(page, zlib.crc32(digest, zlib.crc32(fingerprint)))


def pack_entry(digest: bytes, checksum: int) -> bytes:
    facts = _ENTRY.pack(digest, len(digest), checksum)
    return (facts + _CRC.pack(zlib.crc32(facts))).ljust(ENTRY_BYTES, b"\0")


def parse_entry(data: bytes) -> tuple[bytes, int] | None:
    """(digest, page checksum), or None where the entry was never written or is damaged."""
    digest, length, checksum = _ENTRY.unpack_from(data)
    if _CRC.unpack_from(data, _ENTRY.size)[0] != zlib.crc32(data[: _ENTRY.size]):
        return None
    if not MIN_DIGEST_BYTES <= length <= MAX_DIGEST_BYTES:
        return None
    return digest[:length], checksum


@dataclasses.dataclass
class Scan:
    """What a segment file holds.

    Attributes:
      header: as read.
      entries: (index, digest, page checksum) of the pages that can be read.
      file_bytes: length of the file after a torn tail was cut.
    """

    header: Header
    entries: list[tuple[int, bytes, int]]
    file_bytes: int


def scan(files: Files, path: str, fingerprint: bytes, page_bytes: int, faults: FaultLog) -> Scan | None:
    """Reads a segment's table; entries of another fingerprint are not looked at. None where the header is damaged.

    Raises:
      OSError: the file cannot be read.
    """
    fd = files.open(path, os.O_RDWR)
    try:
        size = files.size(fd)
        data = bytearray(HEADER_BYTES)
        read = read_into(files, fd, [data], 0)
        header = Header.parse(bytes(data[:read]))
        if header is None:
            return None
        if (header.fingerprint, header.version, header.page_bytes) != (fingerprint, FORMAT_VERSION, page_bytes):
            return Scan(header, [], size)
        layout = Layout(page_bytes, header.capacity)
        table = np.zeros(min(header.capacity * ENTRY_BYTES, max(0, size - HEADER_BYTES)), np.uint8)
        read_into(files, fd, [table], HEADER_BYTES)
        entries = _readable(table.tobytes(), layout, size, path, faults)
        end = layout.page_offset(entries[-1][0] + 1) if entries else HEADER_BYTES
        if size > end:
            faults.count(Fault.TRUNCATED, f"{path}: {size - end} bytes of unfinished pages were cut")
            files.truncate(fd, end)
        return Scan(header, entries, end)
    finally:
        files.close(fd)


def _readable(table: bytes, layout: Layout, size: int, path: str, faults: FaultLog) -> list[tuple[int, bytes, int]]:
    """The entries of a table that are whole and whose pages lie within the file."""
    entries = []
    for index in range(len(table) // ENTRY_BYTES):
        data = table[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]
        if data.count(0) == ENTRY_BYTES:
            continue
        entry = parse_entry(data)
        if entry is None:
            faults.count(Fault.BAD_ENTRY, f"{path}: entry {index}")
        elif layout.page_offset(index + 1) > size:
            faults.count(Fault.TRUNCATED, f"{path}: page {index} ends at {layout.page_offset(index + 1)}, the file at {size}")
        else:
            entries.append((index, *entry))
    return entries


def layout_for(size_bytes: int, page_bytes: int) -> Layout:
    """Of the segments of a tier.

    Raises:
      ValueError: the tier would hold not even one page.
    """
    smallest = Layout(page_bytes, 1)
    if smallest.page_offset(1) > size_bytes:
        raise ValueError(f"an SSD tier of {size_bytes} bytes holds not even one page of {page_bytes} and its headers")
    segment_bytes = size_bytes // _SEGMENTS_PER_TIER
    capacity = max(1, (segment_bytes - smallest.data_offset) // (page_bytes + 64))
    return Layout(page_bytes, capacity)


def runs_of_records(order: Sequence[int], records: Sequence[Record]) -> list[list[int]]:
    """Splits positions, sorted by place, where pages are not consecutive pages of one segment."""
    runs: list[list[int]] = []
    for i in order:
        before = records[runs[-1][-1]] if runs else None
        if before is not None and before.segment is records[i].segment and before.index + 1 == records[i].index:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs

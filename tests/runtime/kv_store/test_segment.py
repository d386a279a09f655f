import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoflow_jax.runtime.kv_store.faults import Fault, FaultLog
from nanoflow_jax.runtime.kv_store.files import OsFiles, read_into, write_all
from nanoflow_jax.runtime.kv_store.segment import (
    ENTRY_BYTES,
    Header,
    Layout,
    layout_for,
    pack_entry,
    page_checksum,
    parse_entry,
    scan,
)
from tests.runtime.kv_store.helpers import FINGERPRINT, PAGE_BYTES, ShortFiles, digest, page

BITS = st.integers(0, 2**20)


def flipped(data: bytes, bit: int) -> bytes:
    bit %= 8 * len(data)
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(st.binary(min_size=16, max_size=32), st.integers(0, 2**32 - 1), BITS)
def test_an_entry_reads_back_or_not_at_all(name, checksum, bit):
    entry = pack_entry(name, checksum)
    assert len(entry) == ENTRY_BYTES and parse_entry(entry) == (name, checksum)
    # Flips in the padding change nothing, those in the facts are noticed.
    assert parse_entry(flipped(entry, bit)) in (None, (name, checksum))
    assert parse_entry(flipped(entry, bit % (8 * 41))) is None


@given(BITS)
def test_a_header_reads_back_or_not_at_all(bit):
    header = Header(7, PAGE_BYTES, 5, FINGERPRINT)
    assert Header.parse(header.pack()) == header
    assert Header.parse(flipped(header.pack(), bit % (8 * 72))) is None
    assert Header.parse(header.pack()[:20]) is None


@given(BITS)
def test_the_checksum_of_a_page_knows_its_bytes_its_digest_and_its_model(bit):
    data = page(1).tobytes()
    right = page_checksum(FINGERPRINT, digest(1), data)
    assert page_checksum(FINGERPRINT, digest(1), flipped(data, bit)) != right
    assert page_checksum(FINGERPRINT, digest(2), data) != right
    assert page_checksum(flipped(FINGERPRINT, bit), digest(1), data) != right


@given(st.integers(1, 2**22), st.integers(0, 2**40))
def test_segments_fit_a_tier_many_times_or_once(page_bytes, size):
    smallest = Layout(page_bytes, 1).page_offset(1)
    if size < smallest:
        with pytest.raises(ValueError, match=f"{size} bytes"):
            layout_for(size, page_bytes)
        return
    layout = layout_for(size, page_bytes)
    assert layout.capacity == 1 or layout.page_offset(layout.capacity) <= size // 32


def write_segment(path: str, keys, capacity=8, files=None) -> Layout:
    layout, files = Layout(PAGE_BYTES, capacity), files or OsFiles()
    fd = files.open(path, os.O_RDWR | os.O_CREAT)
    write_all(files, fd, [Header(1, PAGE_BYTES, capacity, FINGERPRINT).pack()], 0)
    for index, key in enumerate(keys):
        write_all(files, fd, [page(key)], layout.page_offset(index))
        entry = pack_entry(digest(key), page_checksum(FINGERPRINT, digest(key), page(key)))
        write_all(files, fd, [entry], layout.entry_offset(index))
    files.close(fd)
    return layout


@settings(max_examples=100)
@given(count=st.integers(0, 8), cut=st.integers(0, 8192 + 8 * PAGE_BYTES))
def test_a_cut_file_gives_the_pages_that_are_whole(tmp_path_factory, count, cut):
    path = str(tmp_path_factory.mktemp("s") / "segment")
    layout = write_segment(path, range(count))
    size = os.path.getsize(path)
    os.truncate(path, min(cut, size))
    faults = FaultLog()
    found = scan(OsFiles(), path, FINGERPRINT, PAGE_BYTES, faults)
    if cut < 72:
        assert found is None
        return
    whole = min(count, max(0, (min(cut, size) - layout.data_offset) // PAGE_BYTES))
    assert [(i, d) for i, d, _ in found.entries] == [(i, digest(i)) for i in range(whole)]
    assert os.path.getsize(path) <= size and (whole == 0 or os.path.getsize(path) == layout.page_offset(whole))
    # An entry that lies beyond the cut was never seen, one before it points at a page that is gone.
    seen = min(count, max(0, (cut - 4096) // ENTRY_BYTES))
    assert faults.snapshot().get(Fault.TRUNCATED, 0) >= (seen > whole)


def test_a_damaged_entry_costs_its_page_only(tmp_path):
    path = str(tmp_path / "segment")
    layout = write_segment(path, range(5))
    with open(path, "r+b") as file:
        file.seek(layout.entry_offset(2) + 3)
        file.write(b"\xff\xff")
    faults = FaultLog()
    found = scan(OsFiles(), path, FINGERPRINT, PAGE_BYTES, faults)
    assert [i for i, _, _ in found.entries] == [0, 1, 3, 4]
    assert faults.snapshot() == {Fault.BAD_ENTRY: 1}


def test_bytes_after_the_last_page_are_cut(tmp_path):
    path = str(tmp_path / "segment")
    layout = write_segment(path, range(3))
    with open(path, "ab") as file:
        file.write(b"half a page")
    faults = FaultLog()
    found = scan(OsFiles(), path, FINGERPRINT, PAGE_BYTES, faults)
    assert len(found.entries) == 3 and os.path.getsize(path) == found.file_bytes == layout.page_offset(3)
    assert faults.snapshot() == {Fault.TRUNCATED: 1}


def test_pages_of_another_model_are_not_looked_at(tmp_path):
    path = str(tmp_path / "segment")
    write_segment(path, range(3))
    for fingerprint, page_bytes in ((bytes(32), PAGE_BYTES), (FINGERPRINT, PAGE_BYTES + 1)):
        found = scan(OsFiles(), path, fingerprint, page_bytes, FaultLog())
        assert found.entries == [] and found.file_bytes == os.path.getsize(path)


def test_short_reads_and_writes_are_continued(tmp_path):
    path = str(tmp_path / "segment")
    write_segment(path, range(4), files=ShortFiles())
    found = scan(ShortFiles(), path, FINGERPRINT, PAGE_BYTES, FaultLog())
    assert [d for _, d, _ in found.entries] == [digest(i) for i in range(4)]
    first, second = bytearray(10), bytearray(9000)
    fd = os.open(path, os.O_RDONLY)
    size = os.path.getsize(path)
    assert read_into(ShortFiles(), fd, [first, second], size - 15) == 15
    os.close(fd)
    with open(path, "rb") as file:
        assert file.read()[-15:] == bytes(first + second[:5])

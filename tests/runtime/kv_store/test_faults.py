"""Each fault: the answer is a miss or right, the fault is counted and logged once, nothing raises and nothing hangs."""

import errno
import logging
import os
import pathlib
import shutil
import tempfile
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nanoflow_jax.runtime.kv_store import Fault, KVStore
from nanoflow_jax.runtime.kv_store.segment import ENTRY_BYTES, HEADER_BYTES
from tests.runtime.kv_store.helpers import (
    FINGERPRINT,
    PAGE_BYTES,
    FaultyFiles,
    Gate,
    at_rest,
    digest,
    digests,
    failing,
    loaded,
    pages,
    put_pages,
)

ON_SSD = list(range(8))


def open_store(directory, **options) -> KVStore:
    options = {"host_bytes": 16 * PAGE_BYTES, "ssd_bytes": 1 << 20, "queue_pages": 8, "fingerprint": FINGERPRINT, **options}
    return KVStore(page_bytes=PAGE_BYTES, ssd_directory=str(directory), **options)


def put(store, keys) -> None:
    for start in range(0, len(keys), 4):
        put_pages(store, digests(keys[start : start + 4]), pages(keys[start : start + 4]))
        assert store.drain(20.0)


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def store(tmp_path, files, caplog):
    """A store in which pages ON_SSD are on SSD only."""
    store = open_store(tmp_path, files=files)
    put(store, ON_SSD + list(range(100, 124)))
    found = store.cached_prefix(digests(ON_SSD))
    assert (found.num_pages, found.host_pages) == (len(ON_SSD), 0)
    assert store.stats().faults == {} and not caplog.records
    yield store
    at_rest(store)
    assert store.close(20.0)


def segment_of(tmp_path) -> str:
    (name,) = [name for name in os.listdir(tmp_path) if name.endswith(".kv")]
    return str(tmp_path / name)


def overwrite(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def logged(caplog, kind: Fault) -> int:
    return sum(record.levelno == logging.WARNING and kind.value in record.getMessage() for record in caplog.records)


def faults_of(store) -> dict[str, int]:
    return store.stats().faults


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full(store, files, caplog, code):
    before = store.stats().ssd.pages
    files.before["pwritev"] = failing(code)
    put(store, list(range(200, 240)))
    assert store.stats().ssd.pages == before and store.stats().ssd.dropped >= 24
    assert faults_of(store)[Fault.DISK_FULL] > 1 and logged(caplog, Fault.DISK_FULL) == 1
    assert loaded(store, ON_SSD) == len(ON_SSD), "what is there can still be read"
    files.before.clear()
    put(store, list(range(300, 340)))
    assert loaded(store, [300]) == 1, "and writing goes on once there is room"


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_read_error(store, files, caplog, call):
    files.before[call] = failing(errno.EIO)
    assert loaded(store, ON_SSD) == 0
    assert faults_of(store) == {Fault.READ_ERROR: len(ON_SSD)} and logged(caplog, Fault.READ_ERROR) == 1
    files.before.clear()
    assert store.cached_prefix(digests(ON_SSD)).num_pages == 0, "pages that could not be read are forgotten"
    put(store, ON_SSD + list(range(400, 424)))
    assert loaded(store, ON_SSD) == len(ON_SSD)


def test_damage_in_the_middle_gives_the_pages_before(store, tmp_path):
    record = store._ssd.locate([digest(5)])[0]
    overwrite(segment_of(tmp_path), record.segment.layout.page_offset(record.index), b"\0\0\0\0")
    assert loaded(store, ON_SSD) == 5
    assert faults_of(store) == {Fault.CHECKSUM: 1}
    assert store.cached_prefix(digests([6, 7])).host_pages == 2, "those behind it were read all the same"
    assert store.stats().ssd.misses == 1


@pytest.mark.parametrize("bit", [0, 13, 8 * PAGE_BYTES - 1])
def test_bit_flip(store, tmp_path, caplog, bit):
    records = store._ssd.locate(digests(ON_SSD))
    for record in records:
        offset = record.segment.layout.page_offset(record.index) + bit // 8
        with open(record.segment.path, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1 << bit % 8]))
    assert loaded(store, ON_SSD) == 0
    assert faults_of(store) == {Fault.CHECKSUM: len(ON_SSD)} and logged(caplog, Fault.CHECKSUM) == 1


def test_truncated_segment(store, tmp_path, caplog):
    records = store._ssd.locate(digests(ON_SSD))
    cut = records[5]
    os.truncate(cut.segment.path, cut.segment.layout.page_offset(cut.index) + 10)
    gone = [key for key, record in zip(ON_SSD, records, strict=True) if record.index >= cut.index]
    assert loaded(store, ON_SSD) == min(gone)
    assert faults_of(store) == {Fault.TRUNCATED: len(gone)} and logged(caplog, Fault.TRUNCATED) == 1
    assert min(gone) > 0 and len(gone) < len(ON_SSD)


def test_slow_writes_block_nobody(store, files):
    gate = Gate()
    files.before["pwritev"] = gate
    begin = time.monotonic()
    for start in range(200, 300, 4):
        put_pages(store, digests(range(start, start + 4)), pages(range(start, start + 4)))
    assert loaded(store, [299]) == 1
    assert time.monotonic() - begin < 5.0
    assert gate.entered.wait(5.0) and store._ssd.num_waiting <= 8 and store.stats().ssd.dropped > 0
    assert not store.drain(0.01)
    files.before.clear()
    gate.open()


def test_slow_reads_make_the_tier_invisible(tmp_path, caplog):
    files, gate = FaultyFiles(), Gate()
    store = open_store(tmp_path, files=files, stall_s=0.05, num_readers=2, host_bytes=32 * PAGE_BYTES)
    put(store, ON_SSD + list(range(100, 140)))
    files.before["preadv"] = gate
    waiting = store.get_many(digests(ON_SSD))
    given_up = store.get_many(digests(ON_SSD))
    assert gate.entered.wait(5.0) and not waiting.done() and given_up.cancel()
    time.sleep(0.1)
    assert store.cached_prefix(digests(ON_SSD)).num_pages == 0 and digest(0) not in store
    assert len(store.get_many(digests(ON_SSD)).result(5.0)) == 0
    assert loaded(store, [139]) == 1, "host memory answers as ever"
    assert faults_of(store) == {Fault.STALLED: 1} and logged(caplog, Fault.STALLED) == 1
    files.before.clear()
    gate.open()
    with waiting.result(5.0) as got:
        assert len(got) == len(ON_SSD)
    at_rest(store)
    assert store.cached_prefix(digests(ON_SSD)).num_pages == len(ON_SSD)
    assert store.close(20.0)


def test_a_load_cancelled_in_the_queue_reads_nothing(tmp_path):
    files, gate = FaultyFiles(), Gate()
    store = open_store(tmp_path, files=files, num_readers=1)
    put(store, ON_SSD + list(range(100, 124)))
    files.before["preadv"] = gate
    first, second = store.get_many(digests(ON_SSD[:2])), store.get_many(digests(ON_SSD[4:]))
    assert gate.entered.wait(5.0) and second.cancel()
    gate.open()
    with first.result(5.0) as got:
        assert len(got) == 2
    at_rest(store)
    assert store.stats().ssd.hits == 2
    assert store.close(20.0)


def test_a_hung_disk_does_not_keep_close_waiting(tmp_path):
    files, gate = FaultyFiles(), Gate()
    store = open_store(tmp_path, files=files)
    files.before["pwritev"] = gate
    for start in range(0, 40, 4):
        put_pages(store, digests(range(start, start + 4)), pages(range(start, start + 4)))
    assert gate.entered.wait(5.0)
    begin = time.monotonic()
    assert not store.close(0.2)
    assert time.monotonic() - begin < 3.0
    with pytest.raises(RuntimeError, match="in use"):
        open_store(tmp_path)
    files.before.clear()
    gate.open()
    assert store.close(20.0)


def test_directory_removed(store, tmp_path, caplog):
    shutil.rmtree(tmp_path)
    assert loaded(store, ON_SSD) == 0
    put(store, list(range(200, 232)))
    assert loaded(store, [231]) == 1
    counts = faults_of(store)
    assert counts == {Fault.SEGMENT_LOST: 1, Fault.DIRECTORY_LOST: 1}
    assert logged(caplog, Fault.SEGMENT_LOST) == logged(caplog, Fault.DIRECTORY_LOST) == 1
    put(store, list(range(300, 332)))
    assert faults_of(store) == counts and not tmp_path.exists()
    store.clear()


def test_directory_replaced_by_another_servers(store, tmp_path):
    shutil.rmtree(tmp_path)
    other = open_store(tmp_path, fingerprint=bytes(32))
    put(store, list(range(200, 232)))
    assert faults_of(store) == {Fault.SEGMENT_LOST: 1, Fault.DIRECTORY_LOST: 1}
    put(other, list(range(40)))
    assert loaded(other, [0, 1]) == 2 and faults_of(other) == {}
    assert other.close(20.0)


def test_files_that_cannot_be_removed_stop_writing(tmp_path):
    files = FaultyFiles(unlink=failing(errno.EPERM))
    limit = 6 * (8192 + 160)
    store = open_store(tmp_path, files=files, ssd_bytes=limit)
    put(store, list(range(60)))
    assert faults_of(store)[Fault.WRITE_ERROR] > 0
    names = [name for name in os.listdir(tmp_path) if name.endswith(".kv")]
    assert 0 < sum(os.path.getsize(tmp_path / name) for name in names) <= limit
    files.before.clear()
    put(store, list(range(100, 140)))
    assert loaded(store, [100]) in (0, 1) and store.stats().ssd.pages > 0
    assert store.close(20.0)


@pytest.mark.parametrize("call", ["open", "pwritev"])
def test_other_write_errors(store, files, caplog, call):
    held = store.stats().ssd.pages
    files.before[call] = failing(errno.EIO)
    put(store, list(range(1000, 1040)))
    assert faults_of(store)[Fault.WRITE_ERROR] > 1 and logged(caplog, Fault.WRITE_ERROR) == 1
    assert store.stats().ssd.pages == held
    files.before.clear()
    put(store, list(range(2000, 2040)))
    assert store.stats().ssd.pages > held


def test_corrupted_index(store, tmp_path, caplog):
    records = store._ssd.locate(digests(ON_SSD))
    assert store.close(20.0)
    overwrite(segment_of(tmp_path), HEADER_BYTES + 2 * ENTRY_BYTES, os.urandom(3 * ENTRY_BYTES))
    again = open_store(tmp_path)
    assert faults_of(again) == {Fault.BAD_ENTRY: 3} and logged(caplog, Fault.BAD_ENTRY) == 1
    assert [loaded(again, [key]) for key in ON_SSD] == [record.index not in (2, 3, 4) for record in records]
    at_rest(again)
    assert again.close(20.0)


def test_damaged_and_foreign_files(store, tmp_path, caplog):
    assert store.close(20.0)
    path = segment_of(tmp_path)
    overwrite(path, 20, b"\xff")
    for number, data in enumerate((b"", b"garbage", os.urandom(20000), b"\0" * 20000)):
        (tmp_path / f"segment-{number + 100:016x}.kv").write_bytes(data)
    (tmp_path / f"segment-{200:016x}.kv").mkdir()
    (tmp_path / "notes.txt").write_text("not ours")
    again = open_store(tmp_path)
    assert again.stats().ssd.pages == 0
    assert faults_of(again)[Fault.BAD_HEADER] == 5 and logged(caplog, Fault.BAD_HEADER) == 1
    put(again, list(range(24)))
    assert loaded(again, [0, 1]) == 2
    assert (tmp_path / "notes.txt").read_text() == "not ours"
    assert again.close(20.0)


def test_wrong_fingerprint(store, tmp_path):
    assert store.close(20.0)
    other = open_store(tmp_path, fingerprint=bytes(32))
    assert loaded(other, ON_SSD) == 0 and faults_of(other) == {}
    assert other.close(20.0)
    again = open_store(tmp_path)
    assert loaded(again, ON_SSD) == len(ON_SSD), "its own pages were left alone"
    assert again.close(20.0)


def test_a_segment_of_another_model_under_our_name_is_not_believed(store, tmp_path):
    """Someone copies a segment over ours while it is open: digests and sizes agree, the model and so the pages do not."""
    with tempfile.TemporaryDirectory() as elsewhere:
        other = open_store(elsewhere, fingerprint=bytes(32))
        put_pages(other, digests(ON_SSD), pages([key + 1000 for key in ON_SSD]))
        other.close(20.0)
        shutil.copy(segment_of(pathlib.Path(elsewhere)), segment_of(tmp_path))
    assert loaded(store, ON_SSD) == 0
    assert faults_of(store) == {Fault.CHECKSUM: len(ON_SSD)}


def test_an_error_of_our_own_is_a_miss_too(store, files, caplog):
    def broken():
        raise RuntimeError("a bug")

    files.before = {"preadv": broken, "pwritev": broken}
    held = store.stats().ssd.pages
    put(store, list(range(200, 240)))
    assert loaded(store, ON_SSD) == 0
    assert set(faults_of(store)) == {Fault.INTERNAL} and logged(caplog, Fault.INTERNAL) == 1
    files.before.clear()
    put(store, list(range(300, 340)))
    assert loaded(store, [300]) == 1 and store.stats().ssd.pages > held


def test_an_error_before_the_disk_is_asked_answers_whoever_waits(store, monkeypatch):
    monkeypatch.setattr(store._loader, "_plan", lambda *_: 1 / 0)
    assert len(store.get_many(digests(ON_SSD)).result(5.0)) == 0
    assert faults_of(store) == {Fault.INTERNAL: 1}


CALLS = ("open", "preadv", "pwritev", "unlink")
CODES = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.ENOENT)


class FaultMachine(RuleBasedStateMachine):
    """Any call failing at any time, files damaged, restarts: what is given is right, and the books agree."""

    @initialize(seed=st.integers(0, 2**32 - 1))
    def create(self, seed):
        self.rng = np.random.default_rng(seed)
        self.directory = tempfile.mkdtemp()
        self.files = FaultyFiles(**{call: self.maybe_fail for call in CALLS})
        self.probability = 0.0
        self.open()

    def open(self):
        self.store = open_store(self.directory, files=self.files, ssd_bytes=8 * (8192 + 160), queue_pages=4)

    def maybe_fail(self):
        if self.rng.random() < self.probability:
            failing(CODES[self.rng.integers(len(CODES))])()

    @rule(probability=st.sampled_from([0.0, 0.1, 0.5]))
    def mood(self, probability):
        self.probability = probability

    @rule(keys=st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True))
    def put(self, keys):
        put_pages(self.store, digests(keys), pages(keys))
        assert self.store.drain(20.0)

    @rule(keys=st.lists(st.integers(0, 50), min_size=1, max_size=6, unique=True))
    def get(self, keys):
        loaded(self.store, keys)

    # What is drawn must not depend on the files there are, which depends on how threads took turns.
    @rule(which=st.integers(0, 1000), at=st.integers(0, 10**6), cut=st.booleans())
    def damage(self, which, at, cut):
        names = sorted(name for name in os.listdir(self.directory) if name.endswith(".kv"))
        if names:
            path = os.path.join(self.directory, names[which % len(names)])
            size = os.path.getsize(path)
            if cut:
                os.truncate(path, at % (size + 1))
            elif size:
                overwrite(path, at % size, b"\x5a")

    @rule()
    def restart(self):
        assert self.store.close(20.0)
        self.open()

    @invariant()
    def adds_up(self):
        if hasattr(self, "store"):
            at_rest(self.store)
            assert Fault.INTERNAL not in faults_of(self.store)

    def teardown(self):
        if hasattr(self, "store"):
            assert self.store.close(20.0)
            shutil.rmtree(self.directory)


TestFaults = FaultMachine.TestCase
TestFaults.settings = settings(max_examples=40, stateful_step_count=25)

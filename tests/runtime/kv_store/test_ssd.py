import os
import shutil
import tempfile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nanoflow_jax.runtime.kv_store import DirectoryInUseError
from nanoflow_jax.runtime.kv_store.faults import FaultLog
from nanoflow_jax.runtime.kv_store.segment import Layout
from nanoflow_jax.runtime.kv_store.ssd import SsdTier
from tests.runtime.kv_store.helpers import FINGERPRINT, PAGE_BYTES, digest, digests, page, pages

KEYS = st.integers(0, 150)
KEY_LISTS = st.lists(KEYS, min_size=1, max_size=3, unique=True) | st.lists(KEYS, min_size=10, max_size=40, unique=True)


def open_tier(directory, size_bytes=1 << 20, fingerprint=FINGERPRINT, **options) -> SsdTier:
    options.setdefault("faults", FaultLog())
    return SsdTier(str(directory), size_bytes, PAGE_BYTES, fingerprint, queue_pages=64, **options)


def write(tier: SsdTier, keys) -> None:
    done = []
    assert tier.write([(digest(key), page(key)) for key in keys], lambda: done.append(1))
    assert tier.drain(20.0) and done == [1]


def read(tier: SsdTier, keys) -> list[int]:
    """The keys whose pages came back, each compared."""
    records = [record for record in tier.locate(digests(keys)) if record is not None]
    names = [record.digest for record in records]
    out = pages(keys[: len(records)]) * 0
    intact = tier.read(records, list(out))
    got = [next(key for key in keys if digest(key) == name) for name in names]
    for key, row, good in zip(got, out, intact, strict=True):
        assert not good or (row == page(key)).all()
    return [key for key, good in zip(got, intact, strict=True) if good]


def bytes_on_disk(directory) -> int:
    return sum(os.path.getsize(os.path.join(directory, name)) for name in os.listdir(directory) if name.endswith(".kv"))


class SsdMachine(RuleBasedStateMachine):
    """Any order of writes, reads, restarts and clears: against segments as lists of keys, evicted by last use.

    Few segments of one page each, or 32 of a few pages, so that they come and go often.
    """

    @initialize(size=st.sampled_from([1, 2, 5, 32]), extra=st.integers(0, 8191), per_segment=st.integers(1, 4))
    def create(self, size, extra, per_segment):
        self.directory = tempfile.mkdtemp()
        per_segment = per_segment if size == 32 else 1
        self.layout = Layout(PAGE_BYTES, per_segment)
        self.limit = size * (8192 + per_segment * (PAGE_BYTES + 64)) + extra % 512
        self.segments: list[list[int]] = []  # least recently used first
        self.active: list[int] | None = None
        self.born: list[list[int]] = []
        self.tier = open_tier(self.directory, self.limit)

    def use(self, segment):
        self.segments.remove(segment)
        self.segments.append(segment)

    @property
    def held(self):
        return {key for segment in self.segments for key in segment}

    @rule(keys=KEY_LISTS)
    def write(self, keys):
        write(self.tier, keys)
        todo = [key for key in keys if key not in self.held]
        full = self.layout.page_offset(self.layout.capacity)
        while todo:
            if self.active is None or self.active not in self.segments or len(self.active) == self.layout.capacity:
                while self.segments and (len(self.segments) + 1) * full > self.limit:
                    self.segments.pop(0)
                self.active = []
                self.segments.append(self.active)
                self.born.append(self.active)
            room = self.layout.capacity - len(self.active)
            self.active += todo[:room]
            todo = todo[room:]
            self.use(self.active)

    @rule(keys=KEY_LISTS)
    def read(self, keys):
        assert set(read(self.tier, keys)) == set(keys) & self.held
        # The tier reads in the order of age.
        for segment in [s for s in self.born if s in self.segments and set(s) & set(keys)]:
            self.use(segment)

    @rule()
    def restart(self):
        assert self.tier.close(20.0)
        self.tier = open_tier(self.directory, self.limit)
        self.born = [segment for segment in self.born if segment in self.segments]
        self.segments = list(self.born)  # by age, until they are used again
        self.active = self.born[-1] if self.born else None

    @rule()
    def clear(self):
        self.tier.clear()
        assert bytes_on_disk(self.directory) == 0
        self.segments, self.active, self.born = [], None, []

    @invariant()
    def agrees(self):
        if hasattr(self, "tier"):
            assert {key for key in range(151) if digest(key) in self.tier} == self.held
            assert self.tier.stats().pages == len(self.held)
            assert bytes_on_disk(self.directory) <= self.limit

    def teardown(self):
        if hasattr(self, "tier"):
            held = self.held
            assert self.tier.close(20.0)
            again = open_tier(self.directory, self.limit)
            assert {key for key in range(151) if digest(key) in again} == held == set(read(again, sorted(held)))
            assert again.close(20.0)
            shutil.rmtree(self.directory)


# Lists compare by contents; segments are told apart by their keys, and two never hold the same.
TestSsd = SsdMachine.TestCase
TestSsd.settings = settings(max_examples=30, stateful_step_count=20)


def test_reading_a_segment_keeps_it(tmp_path):
    tier = open_tier(tmp_path, 4 * (8192 + 160))  # four segments of one page
    write(tier, range(4))
    assert read(tier, [0]) == [0]
    write(tier, [10, 11])
    assert [key for key in (0, 1, 2, 3, 10, 11) if digest(key) in tier] == [0, 3, 10, 11]
    tier.close(20.0)


def test_eviction_between_finding_and_reading_is_a_plain_miss(tmp_path):
    faults = FaultLog()
    tier = open_tier(tmp_path, 4 * (8192 + 160), faults=faults)
    write(tier, [0])
    found = tier.locate(digests([0]))
    write(tier, range(10, 16))
    assert tier.read(found, list(pages([0]))) == [False]
    assert faults.snapshot() == {} and tier.stats().misses == 1
    tier.close(20.0)


def test_restarts_append_to_the_last_segment(tmp_path):
    for turn in range(12):
        tier = open_tier(tmp_path)
        assert all(digest(key) in tier for key in range(turn))
        write(tier, [turn])
        assert tier.close(20.0)
    assert len([name for name in os.listdir(tmp_path) if name.endswith(".kv")]) == 1
    tier = open_tier(tmp_path)
    assert read(tier, list(range(12))) == list(range(12))
    tier.close(20.0)


def test_a_smaller_size_after_a_restart_is_kept(tmp_path):
    tier = open_tier(tmp_path, 1 << 20)
    for start in range(0, 4000, 50):
        write(tier, range(start, start + 50))
    before = bytes_on_disk(tmp_path)
    tier.close(20.0)
    tier = open_tier(tmp_path, 1 << 17)
    assert bytes_on_disk(tmp_path) <= 1 << 17 < before
    assert digest(3999) in tier and digest(0) not in tier
    tier.close(20.0)


def test_another_model_is_not_read_and_makes_room_first(tmp_path):
    tier = open_tier(tmp_path, 1 << 18)
    write(tier, range(40))
    tier.close(20.0)
    other = open_tier(tmp_path, 1 << 18, fingerprint=bytes(32))
    assert other.stats().pages == 0 and other.locate(digests(range(40))) == [None] * 40
    old = [name for name in os.listdir(tmp_path) if name.endswith(".kv")]
    written = 0
    while set(old) <= set(os.listdir(tmp_path)):
        write(other, [1000 + written])
        written += 1
    assert other.stats().evictions == 0 and other.stats().pages == written
    other.close(20.0)


def test_another_models_pages_go_before_older_ones_of_our_own(tmp_path):
    size = 4 * (8192 + 160)  # four segments of one page
    for fingerprint, keys in ((FINGERPRINT, [0, 1]), (bytes(32), [0, 1])):
        tier = open_tier(tmp_path, size, fingerprint=fingerprint)
        write(tier, keys)
        tier.close(20.0)
    tier = open_tier(tmp_path, size)
    write(tier, [2, 3])
    assert read(tier, [0, 1, 2, 3]) == [0, 1, 2, 3]
    tier.close(20.0)


def test_one_server_per_directory(tmp_path):
    tier = open_tier(tmp_path)
    with pytest.raises(DirectoryInUseError, match=f"{tmp_path} is in use by process {os.getpid()}"):
        open_tier(tmp_path)
    write(tier, [1])
    tier.close(20.0)
    again = open_tier(tmp_path)
    assert read(again, [1]) == [1]
    again.close(20.0)


def test_sizes_that_hold_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="100 bytes"):
        open_tier(tmp_path, 100)


def test_a_directory_that_cannot_be_made_is_an_error_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        open_tier(tmp_path / "file")

import shutil
import tempfile
import threading
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoflow_jax.runtime.kv_store import CachedPrefix, KVStore
from tests.runtime.kv_store.helpers import (
    FINGERPRINT,
    PAGE_BYTES,
    FaultyFiles,
    Gate,
    at_rest,
    digest,
    digests,
    loaded,
    page,
    pages,
    put_pages,
)

BATCHES = st.lists(st.integers(0, 60), min_size=1, max_size=4, unique=True)


def open_store(directory=None, *, slots=24, queue_pages=8, ssd_bytes=1 << 20, **options) -> KVStore:
    return KVStore(
        FINGERPRINT, PAGE_BYTES, host_bytes=slots * PAGE_BYTES, ssd_directory=directory and str(directory),
        ssd_bytes=ssd_bytes if directory else 0, queue_pages=queue_pages if directory else None, **options,
    )  # fmt: skip


def put(store, keys, timeout_s=20.0) -> int:
    stored = put_pages(store, digests(keys), pages(keys, store.page_bytes))
    assert store.drain(timeout_s)
    return stored


class StoreMachine(RuleBasedStateMachine):
    """A store that is given time is a dict: whatever was put comes back, from whichever tier, over restarts."""

    @initialize()
    def create(self):
        self.directory = tempfile.mkdtemp()
        self.store = open_store(self.directory)
        self.put_keys: set[int] = set()
        self.held: list[tuple] = []

    @rule(keys=BATCHES)
    def put(self, keys):
        assert put(self.store, keys) == len(keys)
        self.put_keys.update(keys)

    @rule(keys=BATCHES, hold=st.booleans())
    def get(self, keys, hold):
        expected = next((i for i, key in enumerate(keys) if key not in self.put_keys), len(keys))
        found = self.store.cached_prefix(digests(keys))
        assert found.num_pages == expected
        got = self.store.get_many(digests(keys)).result(20.0)
        assert len(got) == expected
        if hold and len(self.held) < 2:
            self.held.append((got, keys[:expected]))
        else:
            self.check(got, keys[:expected])

    def check(self, got, keys):
        out = np.zeros((len(got), PAGE_BYTES), np.uint8)
        got.copy_to(out)
        assert (out == pages(keys)).all()
        assert (np.concatenate([*got.runs, out[:0]]) == out).all()
        got.release()
        got.release()

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self):
        self.check(*self.held.pop(0))

    @rule()
    def restart(self):
        while self.held:
            self.let_go()
        assert self.store.close(20.0)
        self.store = open_store(self.directory)

    @rule()
    def clear(self):
        self.store.clear()
        self.put_keys.clear()

    @invariant()
    def agrees(self):
        if not hasattr(self, "store"):
            return
        assert self.store.drain(20.0)
        self.store._host.check_integrity()
        assert {key for key in range(61) if digest(key) in self.store} == self.put_keys
        stats = self.store.stats()
        assert stats.faults == {} and stats.ssd.dropped == stats.host.dropped == 0

    def teardown(self):
        if hasattr(self, "store"):
            while self.held:
                self.let_go()
            at_rest(self.store)
            assert self.store.close(20.0)
            shutil.rmtree(self.directory)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=100, stateful_step_count=40)


def test_threads_with_a_small_ssd_and_a_moody_disk(tmp_path):
    """Puts, gets, held pages and cancelled loads from several threads: right bytes or a miss, and nothing left pinned."""
    rng = np.random.default_rng(0)
    files = FaultyFiles(preadv=lambda: time.sleep(rng.random() * 2e-3), pwritev=lambda: time.sleep(rng.random() * 2e-3))
    store = open_store(tmp_path, slots=32, ssd_bytes=20 * 8288, files=files)
    errors: list[BaseException] = []
    cancelled = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for turn in range(100):
                start = int(rng.integers(0, 80))
                keys = list(range(start, start + int(rng.integers(1, 7))))
                if rng.random() < 0.5:
                    slots = store.reserve(len(keys))
                    store.host_pages[slots] = pages(keys[: len(slots)])
                    if rng.random() < 0.8:
                        store.commit(slots, digests(keys[: len(slots)]))
                        store.drain(5e-3)
                    else:
                        store.abandon(slots)
                elif rng.random() < 0.3:
                    future = store.get_many(digests(keys))
                    if future.cancel():
                        cancelled.append(turn)
                    else:
                        future.result().release()
                else:
                    loaded(store, keys)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    at_rest(store)
    stats = store.stats()
    assert stats.faults == {} and stats.ssd.hits > 0 and stats.ssd.evictions > 0 and cancelled
    assert store.close(20.0)


def test_held_pages_survive_any_number_of_puts(tmp_path):
    store = open_store(tmp_path, slots=12, queue_pages=3)
    put(store, range(4))
    got = store.get_many(digests(range(4))).result(5.0)
    assert len(got) == 4
    for start in range(100, 200, 3):
        put(store, range(start, start + 3))
        assert (np.concatenate(got.runs) == pages(range(4))).all()
    got.release()
    at_rest(store)
    store.close(20.0)


def test_slots_are_not_reused_while_they_are_written_to_ssd(tmp_path):
    gate = Gate()
    files = FaultyFiles()
    store = open_store(tmp_path, slots=16, queue_pages=6, files=files)
    put(store, range(10))
    files.before["pwritev"] = gate
    for start in range(100, 160, 4):  # many times what fits
        put_pages(store, digests(range(start, start + 4)), pages(range(start, start + 4)))
    assert gate.entered.wait(5.0) and store.stats().ssd.dropped > 0
    files.before.clear()
    gate.open()
    at_rest(store)
    found = [key for key in range(160) if loaded(store, [key])]
    assert found and store.stats().faults == {}
    store.close(20.0)


def test_a_load_that_is_cancelled_gives_everything_back(tmp_path):
    """Before it begins, while it reads, and after: 200 times."""
    store = open_store(tmp_path, slots=16, queue_pages=4, num_readers=1)
    put(store, range(4))
    for start in range(100, 140, 2):
        put(store, range(start, start + 2))
    keys, cancelled = list(range(4)), 0
    for turn in range(200):
        # Others push them out of host memory again, so that each turn reads.
        futures = [store.get_many(digests(keys)) for _ in range(3)]
        for future in futures[turn % 3 :]:
            if future.cancel():
                cancelled += 1
            else:
                future.result().release()
        for future in futures[: turn % 3]:
            with future.result(5.0) as got:
                assert len(got) == 4
        for start in range(100, 140, 2):
            loaded(store, range(start, start + 2))
    assert cancelled > 100
    at_rest(store)
    store.close(20.0)


def test_slots_being_filled_are_nobody_elses_and_cannot_be_found():
    store = open_store(slots=8)
    filling = store.reserve(3)
    store.host_pages[filling] = pages([1, 2, 3])
    for start in range(100, 160, 4):
        put(store, range(start, start + 4))
    assert store.num_pinned == 3
    assert (store.host_pages[filling] == pages([1, 2, 3])).all()
    assert not any(digest(key) in store for key in (1, 2, 3))
    store.commit(filling[:2], digests([1, 2]))
    store.abandon(filling[2:])
    assert loaded(store, [1, 2]) == 2 and digest(3) not in store
    at_rest(store)
    assert store.stats().host.dropped == 0
    store.close()


def test_a_page_that_is_here_already_frees_the_new_slot():
    store = open_store(slots=4)
    first, second = store.reserve(1), store.reserve(2)
    store.host_pages[[*first, *second]] = pages([1, 1, 2])
    store.commit(first, digests([1]))
    store.commit(second, digests([1, 2]), seconds=0.5)
    assert loaded(store, [1, 2]) == 2 and store.stats().host.pages == 2 and store.stats().host.store_s == 0.5
    at_rest(store)
    store.close()


def test_pages_without_a_slot_are_counted():
    store = open_store(slots=8)
    held = store.reserve(5)
    assert store.reserve(4, at_most=2) == [5, 6] and store.stats().host.dropped == 2
    assert len(store.reserve(9)) == 1 and store.stats().host.dropped == 10
    store.abandon(held)
    assert sorted(store.reserve(5)) == held
    store.close()
    assert store.reserve(1) == []


def test_more_than_fits_is_stored_as_far_as_it_fits():
    store = open_store(slots=8)
    held = put_pages(store, digests(range(6)), pages(range(6)))
    got = store.get_many(digests(range(6))).result(5.0)
    assert held == len(got) == 6
    assert put(store, range(10, 15)) == 2
    assert loaded(store, range(10, 15)) == 2
    assert store.stats().host.dropped == 3
    got.release()
    store.close()


def test_a_batch_lies_together_so_that_a_load_is_one_copy(tmp_path):
    store = open_store(tmp_path, slots=64, queue_pages=16)
    for start in range(0, 200, 8):
        put(store, range(start, start + 8))
    for start in (192, 0):  # from host memory, and from SSD
        with store.get_many(digests(range(start, start + 8))).result(5.0) as got:
            assert len(got) == 8 and len(got.runs) == 1
    store.close(20.0)


def test_where_a_prefix_is_and_how_long_it_takes(tmp_path):
    store = open_store(tmp_path, slots=12, queue_pages=4)
    assert store.load_seconds(CachedPrefix(3, 3)) == 0.0
    for start in range(0, 20, 2):
        put(store, range(start, start + 2))
    keys = [0, 1, 19, 2, 99, 3]
    assert store.cached_prefix(digests(keys)) == CachedPrefix(4, 1)
    assert store.load_seconds(CachedPrefix(4, 1)) is None, "nothing was loaded yet"
    before = store.stats()
    assert loaded(store, keys) == 4
    after = store.stats()
    assert after.host.hits - before.host.hits == 1 and after.host.misses - before.host.misses == 5
    assert after.ssd.hits - before.ssd.hits == 3 and after.ssd.misses - before.ssd.misses == 1
    assert after.ssd.bytes_out - before.ssd.bytes_out == 3 * PAGE_BYTES and after.ssd.load_s > 0
    assert after.host.bytes_out - before.host.bytes_out == 4 * PAGE_BYTES
    one, two = store.load_seconds(CachedPrefix(1, 0)), store.load_seconds(CachedPrefix(2, 0))
    assert one is not None and two == pytest.approx(2 * one) and one > 0
    store.close(20.0)


def test_clear_reaches_what_is_on_its_way(tmp_path):
    gate = Gate()
    files = FaultyFiles()
    store = open_store(tmp_path, slots=16, queue_pages=4, files=files)
    files.before["pwritev"] = gate
    for start in range(0, 40, 2):
        put_pages(store, digests(range(start, start + 2)), pages(range(start, start + 2)))
    filling = store.reserve(1)
    assert gate.entered.wait(5.0)
    store.clear()
    files.before.clear()
    gate.open()
    store.commit(filling, digests([50]))
    at_rest(store)
    assert not any(digest(key) in store for key in range(51))
    store.close(20.0)
    store = open_store(tmp_path)
    assert not any(digest(key) in store for key in range(40))
    store.close(20.0)


def test_clear_while_loads_are_under_way(tmp_path):
    """One that reads already keeps what it gets; one that waits finds nothing; no slot is lost."""
    gate, files = Gate(), FaultyFiles()
    store = open_store(tmp_path, slots=16, queue_pages=4, files=files, num_readers=1)
    for start in range(0, 40, 2):
        put(store, range(start, start + 2))
    files.before["preadv"] = gate
    first, second = store.get_many(digests([0, 1])), store.get_many(digests([2, 3]))
    assert gate.entered.wait(5.0)
    store.clear()
    gate.open()
    with first.result(5.0) as got:
        assert (np.concatenate(got.runs) == pages([0, 1])).all()
    assert len(second.result(5.0)) == 0
    assert store.cached_prefix(digests([0])).num_pages == 0 and store.stats().host.pages == 0
    at_rest(store)
    store.close(20.0)


def test_after_close_it_is_empty_handed_and_quiet(tmp_path):
    store = open_store(tmp_path)
    put(store, range(4))
    got = store.get_many(digests([1])).result(5.0)
    assert store.close(20.0) and store.close(20.0)
    assert (got.runs[0] == page(1)).all(), "held pages stay readable"
    assert put_pages(store, digests([9]), pages([9])) == 0
    assert len(store.get_many(digests([9])).result(5.0)) == 0
    got.release()


def test_close_without_keeping_leaves_only_what_was_on_ssd(tmp_path):
    store = open_store(tmp_path)
    put(store, range(4))
    store.close(20.0, keep_host_pages=False)
    store = open_store(tmp_path)
    assert store.cached_prefix(digests(range(4))).num_pages == 0
    store.close(20.0)


def test_bad_arguments_name_the_value(tmp_path):
    store = open_store()
    with pytest.raises(ValueError, match="15 bytes, not 16 to 32"):
        store.get_many([bytes(15)])
    slots = store.reserve(2)
    with pytest.raises(ValueError, match="2 slots cannot hold pages of 1 digests"):
        store.commit(slots, digests([1]))
    with pytest.raises(ValueError, match="15 bytes, not 16 to 32"):
        store.commit(slots, [*digests([1]), bytes(15)])
    store.abandon(slots)
    store.close()
    for options, message in (
        ({"host_bytes": -1}, "host_bytes=-1"),
        ({"host_bytes": 100, "ssd_directory": str(tmp_path), "ssd_bytes": 1 << 20}, "host_bytes=100 must hold two pages"),
        ({"host_bytes": 1000, "num_readers": 0}, "num_readers=0"),
        ({"host_bytes": 1000, "host_buffer": bytearray(10)}, "10 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            KVStore(FINGERPRINT, PAGE_BYTES, **options)
    with pytest.raises(ValueError, match="3 bytes, not 32"):
        KVStore(b"abc", PAGE_BYTES, host_bytes=0)


def test_without_room_everything_is_a_miss(tmp_path):
    for options in ({}, {"ssd_directory": str(tmp_path), "ssd_bytes": 0}):
        store = KVStore(FINGERPRINT, PAGE_BYTES, host_bytes=0, **options)
        assert put_pages(store, digests([1]), pages([1])) == 0
        assert loaded(store, [1]) == 0 and store.cached_prefix(digests([1])) == CachedPrefix(0, 0)
        assert store.stats().host.misses == 1
        store.clear()
        assert store.close()

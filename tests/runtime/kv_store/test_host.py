import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoflow_jax.runtime.kv_store.host import HostTier, _consecutive, runs_of
from tests.runtime.kv_store.helpers import PAGE_BYTES, digest, digests, page

KEYS = st.integers(0, 15)
KEY_LISTS = st.lists(KEYS, min_size=1, max_size=6, unique=True)


class HostMachine(RuleBasedStateMachine):
    """Any order of calls, against a list of keys in order of use and a list of holders.

    A holder is a list of (slot, key) that someone reads, or fills; what a held slot contains may never change.
    """

    @initialize(num_slots=st.integers(1, 10))
    def create(self, num_slots):
        self.tier = HostTier(PAGE_BYTES, num_slots)
        self.num_slots = num_slots
        self.unpinned: list[int] = []
        self.where: dict[int, int] = {}
        self.pins = [0] * num_slots
        self.readers: list[list[tuple[int, int]]] = []
        self.fillers: list[tuple[int, list[tuple[int, int]]]] = []
        self.spills: list[list[tuple[int, int]]] = []
        self.leaving: set[int] = set()
        self.generation = 0

    def pin(self, key):
        self.pins[self.where[key]] += 1
        self.leaving.discard(self.where[key])
        if key in self.unpinned:
            self.unpinned.remove(key)

    def unpin(self, slot, key):
        self.pins[slot] -= 1
        if self.pins[slot] == 0 and self.where.get(key) == slot:
            self.unpinned.append(key)

    @property
    def num_free(self):
        return sum(pins == 0 for pins in self.pins) - len(self.unpinned)

    @rule(keys=KEY_LISTS)
    def reserve_and_fill(self, keys):
        keys = [key for key in keys if key not in self.where]
        slots, evicted = self.tier.reserve(len(keys))
        expected = self.unpinned[: max(0, len(keys) - self.num_free)]
        assert evicted == digests(expected)
        for key in expected:
            self.unpinned.remove(key)
            del self.where[key]
        assert len(slots) == min(len(keys), self.num_free)
        filling = list(zip(slots, keys, strict=False))
        for slot, key in filling:
            assert self.pins[slot] == 0 and slot not in self.where.values()
            self.pins[slot] = 1
            self.tier.pages[slot] = page(key)
        self.fillers.append((self.generation, filling))

    @rule(keys=KEY_LISTS)
    def put(self, keys):
        self.reserve_and_fill(keys)
        self.commit_or_abandon(len(self.fillers) - 1, give_up=False)
        self.unpin_some(len(self.readers) - 1)

    @precondition(lambda self: self.fillers)
    @rule(data=st.data(), give_up=st.booleans())
    def end_filling(self, data, give_up):
        self.commit_or_abandon(data.draw(st.integers(0, len(self.fillers) - 1)), give_up)

    def commit_or_abandon(self, which, give_up):
        generation, filling = self.fillers.pop(which)
        slots, keys = [slot for slot, _ in filling], [key for _, key in filling]
        if give_up:
            self.tier.abandon(slots)
            for slot in slots:
                self.pins[slot] -= 1
            return
        got = self.tier.commit(slots, digests(keys))
        for slot, key, given_slot in zip(slots, keys, got, strict=True):
            if key in self.where:
                assert given_slot == self.where[key]
                self.pins[slot] -= 1
                self.pin(key)
            else:
                assert given_slot == slot
                if generation == self.generation:
                    self.where[key] = slot
        self.readers.append(list(zip(got, keys, strict=True)))

    @rule(keys=KEY_LISTS)
    def pin_some(self, keys):
        slots = self.tier.pin(digests(keys))
        assert slots == [self.where.get(key, -1) for key in keys]
        for key in keys:
            if key in self.where:
                self.pin(key)
        self.readers.append([(slot, key) for slot, key in zip(slots, keys, strict=True) if slot >= 0])

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def end_reading(self, data):
        self.unpin_some(data.draw(st.integers(0, len(self.readers) - 1)))

    def unpin_some(self, which):
        held = self.readers.pop(which)
        self.tier.unpin([slot for slot, _ in held])
        for slot, key in reversed(held):
            self.unpin(slot, key)

    @rule(keys=KEY_LISTS)
    def touch(self, keys):
        assert self.tier.touch(digests(keys)) == [key in self.where for key in keys]
        for key in reversed(keys):
            self.leaving.discard(self.where.get(key, -1))
            if key in self.unpinned:
                self.unpinned.remove(key)
                self.unpinned.append(key)

    @rule(spare=st.integers(0, 8), at_most=st.integers(0, 8))
    def begin_spill(self, spare, at_most):
        count = min(at_most, len(self.unpinned), max(0, spare - self.num_free - len(self.leaving)))
        expected = self.unpinned[:count]
        batch = self.tier.begin_spill(spare, at_most)
        assert [d for _, d in batch] == digests(expected)
        for key in expected:
            self.pin(key)
        self.leaving.update(slot for slot, _ in batch)
        self.spills.append([(slot, key) for (slot, _), key in zip(batch, expected, strict=True)])

    @precondition(lambda self: self.spills)
    @rule(data=st.data(), cancel=st.booleans())
    def end_spill(self, data, cancel):
        batch = self.spills.pop(data.draw(st.integers(0, len(self.spills) - 1)))
        slots = [slot for slot, _ in batch]
        if cancel:
            self.tier.cancel_spill(slots)
        else:
            self.tier.end_spill(slots)
        for slot, key in reversed(batch) if cancel else batch:
            if not cancel and slot in self.leaving:
                del self.where[key]
            self.leaving.discard(slot)
            self.unpin(slot, key)
            if cancel and key in self.unpinned and self.where[key] == slot:
                self.unpinned.remove(key)
                self.unpinned.insert(0, key)

    @rule()
    def clear(self):
        self.tier.clear()
        self.where.clear()
        self.unpinned.clear()
        self.leaving.clear()
        self.generation += 1

    @invariant()
    def agrees(self):
        if not hasattr(self, "tier"):
            return
        self.tier.check_integrity()
        for key in range(16):
            assert (digest(key) in self.tier) == (key in self.where)
        held = [pair for holder in (*self.readers, *(f for _, f in self.fillers), *self.spills) for pair in holder]
        for slot, key in [*held, *((slot, key) for key, slot in self.where.items())]:
            assert (self.tier.pages[slot] == page(key)).all(), "a page was overwritten while it was held"
        stats = self.tier.stats()
        assert stats.pages == len(self.where) and stats.capacity == self.num_slots


TestHost = HostMachine.TestCase
TestHost.settings = settings(max_examples=120, stateful_step_count=40)


def filled(keys, num_slots) -> HostTier:
    """Keys in order of use, least recently used first."""
    tier = HostTier(PAGE_BYTES, num_slots)
    slots, _ = tier.reserve(len(keys))
    tier.unpin(tier.commit(slots, digests(keys[::-1])))
    return tier


@pytest.mark.parametrize("use", ["pin", "touch", None])
def test_a_page_that_is_used_while_it_leaves_stays(use):
    tier = filled([1, 2, 3], 3)
    batch = tier.begin_spill(2, 2)
    assert [d for _, d in batch] == digests([1, 2]) and digest(1) in tier
    held = tier.pin(digests([1])) if use == "pin" else []
    if use == "touch":
        tier.touch(digests([1]))
    tier.check_integrity()
    tier.end_spill([slot for slot, _ in batch])
    tier.unpin(held)
    assert [digest(key) in tier for key in (1, 2, 3)] == [use is not None, False, True]
    tier.check_integrity()


def test_a_spill_taken_back_leaves_the_order_as_it_was():
    tier = filled([1, 2, 3, 4], 4)
    tier.cancel_spill([slot for slot, _ in tier.begin_spill(2, 4)])
    tier.check_integrity()
    assert tier.reserve(3)[1] == digests([1, 2, 3])


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_slots_are_consecutive_where_they_can_be(free, data):
    free = np.array(free)
    count = data.draw(st.integers(0, int(free.sum())))
    slots = _consecutive(free, count)
    assert len(set(slots)) == len(slots) == count and free[slots].all()
    longest = max((n for _, n in runs_of(np.flatnonzero(free).tolist())), default=0)
    if 0 < count <= longest:
        assert len(runs_of(slots)) == 1


def test_a_batch_put_into_an_empty_tier_is_one_run_even_after_others_came_and_went():
    tier = HostTier(PAGE_BYTES, 8)
    for turn in range(10):
        keys = list(range(4 * turn, 4 * turn + 4))
        slots, _ = tier.reserve(4)
        assert len(runs_of(slots)) == 1
        tier.unpin(tier.commit(slots, digests(keys)))


def test_a_buffer_of_the_caller_is_used_and_checked():
    buffer = bytearray(4 * PAGE_BYTES + 5)
    tier = HostTier(PAGE_BYTES, 4, buffer=buffer)
    tier.pages[3] = 7
    assert buffer[4 * PAGE_BYTES - 1] == 7 and buffer[4 * PAGE_BYTES] == 0
    with pytest.raises(ValueError, match="480 are needed"):
        HostTier(PAGE_BYTES, 5, buffer=buffer)
    with pytest.raises(ValueError, match="writable: False"):
        HostTier(PAGE_BYTES, 1, buffer=bytes(buffer))


def test_threads_never_see_a_page_of_another():
    """Writers and readers on few slots, each reader looking at its pages for a while."""
    tier = HostTier(4096, 12)
    errors: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(300):
            keys = rng.choice(30, size=rng.integers(1, 5), replace=False).tolist()
            if rng.random() < 0.5:
                missing = [key for key, here in zip(keys, tier.touch(digests(keys)), strict=True) if not here]
                slots, _ = tier.reserve(len(missing))
                for slot, key in zip(slots, missing, strict=False):
                    tier.pages[slot] = key
                tier.unpin(tier.commit(slots, digests(missing[: len(slots)])))
            else:
                slots = tier.pin(digests(keys))
                held = [(slot, key) for slot, key in zip(slots, keys, strict=True) if slot >= 0]
                errors.extend(f"{key} in {slot}" for slot, key in held if not (tier.pages[slot] == key).all())
                tier.unpin([slot for slot, _ in held])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    tier.check_integrity()
    assert tier.num_pinned == 0

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoflow_jax.runtime.page_allocator import PageAllocator


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of allocating, sharing and releasing, against a plain count of holders per page."""

    @initialize(num_pages=st.integers(2, 40))
    def create(self, num_pages):
        self.allocator = PageAllocator(num_pages)
        self.held: list[np.ndarray] = []

    @rule(count=st.integers(0, 12))
    def allocate(self, count):
        free = self.allocator.num_free
        if count > free:
            with pytest.raises(MemoryError):
                self.allocator.allocate(count)
            assert self.allocator.num_free == free
            return
        pages = self.allocator.allocate(count)
        assert np.unique(pages).size == count
        assert not np.isin(pages, np.concatenate([*self.held, [0]])).any()
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.sampled_from(self.held))
        self.allocator.share(pages)
        self.held.append(pages.copy())

    @precondition(lambda self: self.held)
    @rule(data=st.data(), together=st.integers(1, 3))
    def release(self, data, together):
        """Several holders at once, which may hold the same page."""
        chosen = [self.held.pop(data.draw(st.integers(0, len(self.held) - 1))) for _ in range(min(together, len(self.held)))]
        self.allocator.release(np.concatenate(chosen))

    @invariant()
    def adds_up(self):
        if hasattr(self, "allocator"):
            held = np.concatenate([*self.held, np.zeros(0, np.int32)]).astype(np.int64)
            self.allocator.check_integrity(held)
            assert self.allocator.num_free == self.allocator.num_pages - 1 - np.unique(held).size


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=30)


def test_check_integrity_finds_lost_and_unknown_pages():
    allocator = PageAllocator(8)
    pages = allocator.allocate(3)
    allocator.check_integrity(pages)
    with pytest.raises(AssertionError):
        allocator.check_integrity(pages[:2])
    with pytest.raises(AssertionError):
        allocator.check_integrity(np.append(pages, 7))


def test_releasing_twice_is_refused():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        allocator.release(pages)


def test_a_pool_without_a_usable_page_is_refused():
    with pytest.raises(ValueError, match="num_pages=1"):
        PageAllocator(1)

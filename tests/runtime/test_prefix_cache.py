"""The index of cached pages by itself: any order of use against a record of what each page really holds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nanoflow_jax.runtime.prediction import pages_counted_elsewhere
from nanoflow_jax.runtime.prefix_cache import PrefixCache, extend_digests

PAGE_SIZE = 2
SALTS = st.sampled_from([None, "a", "b"])
SESSIONS = st.sampled_from([None, (None, "x"), (None, "y"), ("a", "x")])
# Few different pages, so that sequences meet in the same prefixes.
PROMPTS = st.lists(st.sampled_from([(1, 2), (1, 3), (2, 1)]), min_size=1, max_size=6)


def names(tokens: list[int], salt: str | None = None) -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, salt, np.array(tokens, np.int32), PAGE_SIZE, len(tokens) // PAGE_SIZE)
    return digests


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, share what they find, offer their pages, and leave; pages carry the prefix that was written to them."""

    @initialize(num_pages=st.integers(2, 16))
    def create(self, num_pages):
        self.cache = PrefixCache(num_pages)
        self.running: list[tuple[np.ndarray, list[bytes]]] = []
        self.written: dict[int, bytes] = {}

    @rule(prompt=PROMPTS, salt=SALTS, offers=st.booleans())
    def start(self, prompt, salt, offers):
        digests = names([token for page in prompt for token in page], salt)
        found = self.cache.find(digests)
        assert [self.written[page] for page in found.tolist()] == digests[: found.size], "a page with other contents was found"
        self.cache.acquire(found)
        missing = len(digests) - found.size
        if missing > self.cache.num_available:
            with pytest.raises(MemoryError):
                self.cache.allocate(missing)
            self.cache.release(found, digests)
            return
        own = self.cache.allocate(missing)
        assert self.cache.are_private(own)
        self.written |= dict(zip(own.tolist(), digests[found.size :], strict=True))
        pages = np.concatenate((found, own))
        if offers:
            self.cache.index(pages.tolist(), digests)
            assert self.cache.find(digests).size == len(digests)
        self.running.append((pages, digests))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), session=SESSIONS)
    def finish(self, data, session):
        pages, digests = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.cache.release(pages, digests, session)

    @rule(session=SESSIONS)
    def forget(self, session):
        if session is not None:
            self.cache.forget_session(session)

    @rule(count=st.integers(0, 8))
    def crowd_out(self, count):
        count = min(count, self.cache.num_available)
        available = self.cache.num_available
        pages = self.cache.allocate(count)
        for page in pages.tolist():
            self.written.pop(page, None)
        assert self.cache.num_available == available - count
        self.cache.release(pages, [])

    @rule()
    def clear(self):
        self.cache.clear()

    @invariant()
    def adds_up(self):
        if hasattr(self, "cache"):
            held = np.concatenate([*(pages for pages, _ in self.running), np.zeros(0, np.int32)]).astype(np.int64)
            self.cache.check_integrity(held, self.written)
            assert self.cache.num_available == self.cache.num_pages - 1 - np.unique(held).size

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for pages, digests in self.running:
            self.cache.release(pages, digests)
        self.cache.clear()
        assert (self.cache.num_cached, self.cache.num_sessions) == (0, 0)
        assert self.cache.num_available == self.cache.num_pages - 1
        self.cache.check_integrity(np.zeros(0, np.int64), {})


TestPrefixCache = CacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=80, stateful_step_count=30)


def _run(cache: PrefixCache, tokens: list[int], session=None) -> np.ndarray:
    """A sequence that finds, computes, offers and releases; its pages."""
    digests = names(tokens)
    found = cache.find(digests)
    cache.acquire(found)
    pages = np.concatenate((found, cache.allocate(len(digests) - found.size)))
    cache.index(pages.tolist(), digests)
    cache.release(pages, digests, session)
    return pages


def test_a_name_depends_on_every_token_before_it_and_on_the_salt():
    base = names([1, 2, 3, 4, 5, 6])
    assert len(set(base)) == 3
    assert names([1, 2, 3, 4, 9, 6])[:2] == base[:2]
    assert not set(names([9, 2, 3, 4, 5, 6])) & set(base)
    assert not set(names([3, 4])) & set(base), "the same page elsewhere has another name"
    for salt in ("", "a", "b"):
        assert not set(names([1, 2, 3, 4, 5, 6], salt)) & set(base)
    assert not set(names([1, 2], "a")) & set(names([1, 2], "b"))


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), st.integers(0, 10))
def test_names_grow_with_the_tokens(tokens, first):
    array = np.array(tokens, np.int32)
    whole = len(tokens) // PAGE_SIZE
    digests: list[bytes] = []
    for count in (min(first, whole), whole, 0):
        extend_digests(digests, "s", array, PAGE_SIZE, count)
    assert digests == names(tokens, "s")


def test_the_least_recently_used_goes_first_and_of_a_sequence_its_end():
    cache = PrefixCache(7)
    old, new = _run(cache, [1, 1, 2, 2, 3, 3]), _run(cache, [4, 4, 5, 5, 6, 6])
    _run(cache, [1, 1, 2, 2])  # used again
    evicted = [int(cache.allocate(1)[0]) for _ in range(5)]
    assert evicted == [old[2], new[2], new[1], new[0], old[1]]
    assert cache.find(names([1, 1, 2, 2, 3, 3])).tolist() == old[:1].tolist()
    assert cache.num_evicted == 5


def test_a_copy_that_cannot_be_found_makes_the_one_that_can_count_as_used():
    cache = PrefixCache(5)
    digests = names([1, 1, 2, 2])
    first, second = cache.allocate(1), cache.allocate(2)
    cache.index(first.tolist(), digests[:1])
    cache.index(second.tolist(), digests)
    cache.release(first, digests[:1])
    other = _run(cache, [3, 3])
    cache.release(second, digests)
    assert other[0] in cache.allocate(2), "it is older than the two that were just used"
    assert cache.find(digests).tolist() == [int(first[0]), int(second[1])]


def test_what_a_session_keeps_goes_last_until_its_next_request():
    cache = PrefixCache(9)
    kept = _run(cache, [1, 1, 2, 2], (None, "s"))
    also = _run(cache, [7, 7], (None, "t"))
    loose = _run(cache, [3, 3, 4, 4, 5, 5])
    assert cache.num_sessions == 2
    assert set(cache.allocate(5).tolist()) >= set(loose.tolist())
    assert cache.find(names([1, 1, 2, 2])).tolist() == kept.tolist()
    cache.forget_session((None, "s"))
    assert set(cache.allocate(2).tolist()) == set(kept.tolist()), "older or not, it is not kept any more"
    assert cache.find(names([7, 7])).tolist() == also.tolist()
    cache.allocate(1)
    assert cache.num_sessions == 0
    assert cache.num_available == 0


def test_a_session_keeps_a_prefix_that_somebody_else_has_computed():
    """Two compute the same first page at once; only one copy can be found, and the session's pages need it."""
    cache = PrefixCache(8)
    digests = names([1, 1, 2, 2])
    first, second = cache.allocate(1), cache.allocate(2)
    cache.index(first.tolist(), digests[:1])
    cache.index(second.tolist(), digests)
    cache.release(first, digests[:1])
    cache.release(second, digests, (None, "s"))
    found = [int(first[0]), int(second[1])]
    assert cache.find(digests).tolist() == found
    assert not set(cache.allocate(5).tolist()) & set(found)
    assert cache.find(digests).tolist() == found


def test_pages_in_use_are_never_evicted():
    cache = PrefixCache(5)
    digests = names([1, 1, 2, 2])
    pages = cache.allocate(2)
    cache.index(pages.tolist(), digests)
    assert cache.num_available == 2
    with pytest.raises(MemoryError, match="3 pages wanted, 2 available"):
        cache.allocate(3)
    cache.clear()
    assert cache.find(digests).tolist() == pages.tolist()


def test_check_integrity_finds_wrong_names_and_lost_references():
    cache = PrefixCache(6)
    digests = names([1, 1, 2, 2])
    pages = cache.allocate(2)
    cache.index(pages.tolist(), digests)
    named = dict(zip(pages.tolist(), digests, strict=True))
    cache.check_integrity(pages, named)
    with pytest.raises(AssertionError, match="wrong name"):
        cache.check_integrity(pages, named | {int(pages[0]): digests[1]})
    with pytest.raises(AssertionError, match="reference counts"):
        cache.check_integrity(pages[:1], named)
    with pytest.raises(AssertionError, match="reference counts"):
        cache.check_integrity(np.concatenate((pages, pages[:1])), named)


_holdings = st.lists(st.tuples(st.lists(st.integers(0, 8), min_size=3, max_size=3), st.integers(0, 12)), min_size=1, max_size=8)


@settings(max_examples=200)
@given(_holdings)
def test_counting_with_the_last_holder_counts_each_page_once_at_all_times(holdings):
    """A sequence holds a page once; the model is a set of pages per point in time."""
    pages = np.array([[p if p not in row[:i] else 0 for i, p in enumerate(row)] for row, _ in holdings])
    ends = np.array([end for _, end in holdings])
    elsewhere = pages_counted_elsewhere(pages, ends, 9)
    for t in range(13):
        alive = ends >= t
        distinct = len({*pages[alive].ravel().tolist()} - {0})
        assert ((pages > 0).sum(axis=1) - elsewhere)[alive].sum() == distinct

"""Which pages hold which tokens: prefixes found by content, shared by reference count, given up when the pool needs pages.

K and V of a token depend on it and the tokens before it, and on nothing else. A full page is therefore named by the digest of
all tokens up to its end, chained page by page:

    digest_i = BLAKE2b(digest_{i-1} | token ids of page i),    digest_{-1} = BLAKE2b(cache salt)

The digest is cryptographic because a collision would hand one prompt's cache to another: with 256 bits nobody can make one, so
equal names mean equal prefixes and ids need not be compared. Only full pages have names, so the page that a sequence writes
next is always its own.
"""

import hashlib
from collections import OrderedDict

import numpy as np

from nanoflow_jax.runtime.page_allocator import PageAllocator

_DIGEST_BYTES = 32
# Cache salt and session id: sessions of different tenants are different, whatever they call them.
SessionKey = tuple[str | None, str]


def root_digest(cache_salt: str | None) -> bytes:
    """The name of the empty prefix. Requests of different salts have no name in common."""
    kind, salt = (b"", b"") if cache_salt is None else (b"salted", cache_salt.encode())
    return hashlib.blake2b(salt, digest_size=_DIGEST_BYTES, person=kind).digest()


def extend_digests(digests: list[bytes], cache_salt: str | None, tokens: np.ndarray, page_size: int, num_pages: int) -> None:
    """Appends the names of the pages after those in `digests`, up to `num_pages`, of a sequence that begins with `tokens`."""
    first = len(digests)
    if num_pages <= first:
        return
    parent = digests[-1] if digests else root_digest(cache_salt)
    ids = tokens[first * page_size : num_pages * page_size].tobytes()
    size = 4 * page_size  # of int32 ids
    assert len(ids) == (num_pages - first) * size, "a page that is not full has no name"
    for start in range(0, len(ids), size):
        parent = hashlib.blake2b(parent + ids[start : start + size], digest_size=_DIGEST_BYTES).digest()
        digests.append(parent)


class PrefixCache:
    """The page pool with an index of full pages by digest. Page 0 is the dummy page.

    The index holds a reference of its own on each of its pages, so a page is *unused* when that is the only one left. Unused
    pages are as good as free: `allocate` evicts them when it needs them, the least recently used first. Those that a session
    keeps go last. Of one sequence the last page goes first, for no page can be found without the ones before it.

    Attributes:
      num_evicted: pages that lost their contents to somebody else.
    """

    def __init__(self, num_pages: int) -> None:
        self._allocator = PageAllocator(num_pages)
        self._page_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._indexed = np.zeros(num_pages, bool)
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._unused_kept: OrderedDict[int, None] = OrderedDict()
        self._keeper: dict[int, SessionKey] = {}
        self._kept_by: dict[SessionKey, set[int]] = {}
        self.num_evicted = 0

    @property
    def num_pages(self) -> int:
        return self._allocator.num_pages

    @property
    def num_available(self) -> int:
        """Pages that no sequence holds: free or unused."""
        return self._allocator.num_free + len(self._unused) + len(self._unused_kept)

    @property
    def num_cached(self) -> int:
        """Pages in the index, whether a sequence holds them or not."""
        return len(self._page_of)

    @property
    def num_sessions(self) -> int:
        """Sessions that keep a page."""
        return len(self._kept_by)

    def allocate(self, count: int) -> np.ndarray:
        """int32[count]: pages with one reference each, whose contents are nobody's.

        Raises:
          MemoryError: fewer than `count` pages are available; none is taken.
        """
        if count > self.num_available:
            raise MemoryError(f"{count} pages wanted, {self.num_available} available")
        self._evict(count - self._allocator.num_free)
        return self._allocator.allocate(count)

    def release(self, pages: np.ndarray, digests: list[bytes], session: SessionKey | None = None) -> None:
        """Drops a sequence's references to its `pages`.

        Args:
          digests: names of its full pages, of all those at least that are in the index. The pages that the index has for them,
            whoever computed them, count as used now.
          session: keeps those pages, in place of what it kept before.
        """
        assert np.count_nonzero(self._indexed[pages]) <= len(digests), "a page in the index is given back without its name"
        self._allocator.release(pages)
        prefix = [page for digest in digests if (page := self._page_of.get(digest)) is not None]
        if session is not None:
            self.forget_session(session)
            for page in prefix:
                self._keep(page, session)
        for page in reversed(prefix):
            if self._allocator.references[page] == 1:
                self._queue_of(page)[page] = None
                self._queue_of(page).move_to_end(page)

    def find(self, digests: list[bytes]) -> np.ndarray:
        """int32: the pages of the longest indexed prefix. Nobody holds them for the caller yet: `acquire` does."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return np.array(pages, np.int32)

    def acquire(self, pages: np.ndarray) -> None:
        """Adds a sequence's reference to each of the distinct indexed `pages`."""
        assert self._indexed[pages].all(), f"not in the index: {pages}"
        self._allocator.share(pages)
        for page in pages.tolist():
            self._queue_of(page).pop(page, None)

    def index(self, pages: list[int], digests: list[bytes]) -> None:
        """Lets full pages be found by name. A page whose contents another page has already stays its owner's alone."""
        added = []
        for page, digest in zip(pages, digests, strict=True):
            if digest not in self._page_of:
                self._page_of[digest] = page
                self._digest_of[page] = digest
                added.append(page)
        self._indexed[added] = True
        self._allocator.share(np.array(added, np.int32))

    def are_private(self, pages: np.ndarray) -> bool:
        """Each of `pages` has one holder and cannot be found, so its holder may write it."""
        return bool((self._allocator.references[pages] == 1).all() and not self._indexed[pages].any())

    def forget_session(self, session: SessionKey) -> None:
        """What the session kept is evicted like any other page from now on."""
        for page in list(self._kept_by.get(session, ())):
            self._drop_keeper(page)
            if page in self._unused_kept:
                del self._unused_kept[page]
                self._unused[page] = None

    def clear(self) -> None:
        """Forgets every page that no sequence holds."""
        self._evict(len(self._unused) + len(self._unused_kept))

    def check_integrity(self, held: np.ndarray, named: dict[int, bytes]) -> None:
        """Checks references, index, queues and sessions against each other.

        Args:
          held: every page of every sequence, once for each that holds it.
          named: what the held pages must be called if they are in the index.

        Raises:
          AssertionError: they do not add up.
        """
        indexed = np.flatnonzero(self._indexed)
        self._allocator.check_integrity(np.concatenate((held, indexed)))
        assert sorted(self._digest_of) == indexed.tolist(), "the index and its mask differ"
        assert {page: digest for digest, page in self._page_of.items()} == self._digest_of, "the index is no bijection"
        unused = {*self._unused, *self._unused_kept}
        assert unused == {*indexed.tolist()} - {*held.tolist()}, "unused pages are those that only the index holds"
        assert len(unused) == len(self._unused) + len(self._unused_kept), "a page is in both queues"
        assert unused & self._keeper.keys() == {*self._unused_kept}, "kept pages are in the other queue"
        assert self._keeper == {page: key for key, pages in self._kept_by.items() for page in pages}, "sessions disagree"
        assert all(self._kept_by.values()), "a session without a page is remembered"
        assert self._keeper.keys() <= self._digest_of.keys(), "a session keeps a page that cannot be found"
        for page, digest in self._digest_of.items():
            assert named.get(page, digest) == digest, f"{page=} is found under a wrong name"

    def _queue_of(self, page: int) -> OrderedDict[int, None]:
        return self._unused_kept if page in self._keeper else self._unused

    def _keep(self, page: int, session: SessionKey) -> None:
        """Makes `session` the page's keeper; a page has one, the latest."""
        self._drop_keeper(page)
        self._keeper[page] = session
        self._kept_by.setdefault(session, set()).add(page)
        if page in self._unused:
            del self._unused[page]
            self._unused_kept[page] = None

    def _drop_keeper(self, page: int) -> None:
        session = self._keeper.pop(page, None)
        if session is not None:
            self._kept_by[session].discard(page)
            if not self._kept_by[session]:
                del self._kept_by[session]

    def _evict(self, count: int) -> None:
        """Makes `count` unused pages free."""
        pages = []
        while len(pages) < count:
            page, _ = (self._unused or self._unused_kept).popitem(last=False)
            del self._page_of[self._digest_of.pop(page)]
            self._drop_keeper(page)
            pages.append(page)
        self._indexed[pages] = False
        self._allocator.release(np.array(pages, np.int32))
        self.num_evicted += len(pages)

"""Which pages of the KV pool are free, and how many hold each of the others."""

import numpy as np


class PageAllocator:
    """A stack of free pages with a reference count per page. Page 0 is the dummy page and is never handed out.

    Attributes:
      references: int32[num_pages], how many hold each page; for reading only.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"{num_pages=} must be at least 2: the dummy page and one to use")
        self.num_pages = num_pages
        # Popped from the end, so the lowest ids go first and the most recently freed (warm in the device's caches) next.
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._num_free = num_pages - 1
        self.references = np.zeros(num_pages, np.int32)

    @property
    def num_free(self) -> int:
        return self._num_free

    def allocate(self, count: int) -> np.ndarray:
        """int32[count]: pages with one reference each.

        Raises:
          MemoryError: fewer than `count` pages are free; none is taken.
        """
        if count > self._num_free:
            raise MemoryError(f"{count} pages wanted, {self._num_free} free")
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count].copy()
        self.references[pages] = 1
        return pages

    def share(self, pages: np.ndarray) -> None:
        """Adds a reference to each of the distinct `pages`, which must be in use."""
        assert (self.references[pages] > 0).all(), f"sharing a free page: {pages}"
        self.references[pages] += 1

    def release(self, pages: np.ndarray) -> None:
        """Drops a reference per entry of `pages` (a page held twice may be listed twice); those without any become free."""
        np.subtract.at(self.references, pages, 1)
        assert (self.references[pages] >= 0).all(), f"released more often than held: {pages}"
        freed = np.unique(pages[self.references[pages] == 0])
        self._free[self._num_free : self._num_free + freed.size] = freed
        self._num_free += freed.size

    def check_integrity(self, held: np.ndarray) -> None:
        """Checks that every page but the dummy is either free once or held as often as `held` lists it.

        Raises:
          AssertionError: a page is lost, free twice, both free and held, or counted wrongly.
        """
        free = self._free[: self._num_free]
        assert np.unique(free).size == free.size, "a page is in the free list twice"
        assert not (free == 0).any(), "the dummy page is in the free list"
        counts = np.bincount(held, minlength=self.num_pages)
        assert counts[0] == 0, "the dummy page is held"
        assert (counts == self.references).all(), f"reference counts are wrong: {np.flatnonzero(counts != self.references)}"
        assert (self.references[free] == 0).all(), "a free page is held"
        assert free.size + np.count_nonzero(counts) == self.num_pages - 1, "a page is lost"

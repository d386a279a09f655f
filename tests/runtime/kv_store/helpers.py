"""Pages that say who they are, and a file system that fails on demand."""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np

from nanoflow_jax.runtime.kv_store.files import OsFiles

FINGERPRINT = bytes(range(32))
PAGE_BYTES = 96


def digest(key: int) -> bytes:
    return hashlib.blake2b(key.to_bytes(8, "little"), digest_size=16).digest()


def digests(keys: Sequence[int]) -> list[bytes]:
    return [digest(key) for key in keys]


def page(key: int, page_bytes: int = PAGE_BYTES) -> np.ndarray:
    """uint8[page_bytes] that differ from key to key."""
    return np.frombuffer(hashlib.shake_128(b"page" + digest(key)).digest(page_bytes), np.uint8)


def pages(keys: Sequence[int], page_bytes: int = PAGE_BYTES) -> np.ndarray:
    return np.array([page(key, page_bytes) for key in keys], np.uint8).reshape(len(keys), page_bytes)


def put_pages(store, names: Sequence[bytes], contents: np.ndarray) -> int:
    """Stores pages as far as there are slots; returns how many are in host memory then."""
    here = store.touch(names)
    new = [i for i, is_here in enumerate(here) if not is_here]
    slots = store.reserve(len(new))
    new = new[: len(slots)]
    store.host_pages[slots] = contents[new]
    store.commit(slots, [names[i] for i in new])
    return sum(here) + len(slots)


def loaded(store, keys: Sequence[int], timeout_s: float = 20.0) -> int:
    """How many pages of `keys` the store gives; fails if one is not what was put under its digest."""
    with store.get_many(digests(keys)).result(timeout_s) as got:
        out = np.zeros((len(got), store.page_bytes), np.uint8)
        got.copy_to(out)
        assert (out == pages(keys[: len(got)], store.page_bytes)).all()
        return len(got)


def at_rest(store) -> None:
    """Nothing is pinned or lost once everything has settled."""
    assert store.drain(20.0)
    store._host.check_integrity()
    assert store.num_pinned == 0


class FaultyFiles(OsFiles):
    """Calls `before[name]()` before a call of that name, which may raise an OSError or wait; counts calls."""

    def __init__(self, **before: Callable[[], None]) -> None:
        self.before = dict(before)
        self.calls: dict[str, int] = {}

    def _enter(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.before.get(name, lambda: None)()

    def open(self, path, flags):
        self._enter("open")
        return super().open(path, flags)

    def preadv(self, fd, buffers, offset):
        self._enter("preadv")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        self._enter("pwritev")
        return super().pwritev(fd, buffers, offset)

    def unlink(self, path):
        self._enter("unlink")
        super().unlink(path)


class ShortFiles(OsFiles):
    """Moves at most 7 bytes per call, as the system may."""

    def preadv(self, fd, buffers, offset):
        return os.preadv(fd, [memoryview(buffers[0])[:7]], offset)

    def pwritev(self, fd, buffers, offset):
        return os.pwritev(fd, [memoryview(buffers[0])[:7]], offset)


def failing(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


class Gate:
    """A call that waits until the gate opens."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self._open.wait(30.0)

    def open(self) -> None:
        self._open.set()

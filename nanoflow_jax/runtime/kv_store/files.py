"""The calls to the operating system that the SSD tier makes: a seam for tests that inject faults and delays."""

import os
from collections.abc import Sequence
from typing import Any, Protocol

# Anything with the buffer interface: bytes, bytearray, a uint8 array.
Buffers = Sequence[Any]

# Linux takes at most IOV_MAX = 1024 buffers per call.
MAX_BUFFERS = 512


class Files(Protocol):
    """Each call may raise OSError and may be slow. Reads and writes may be short."""

    def open(self, path: str, flags: int) -> int: ...
    def close(self, fd: int) -> None: ...
    def size(self, fd: int) -> int: ...
    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int: ...
    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int: ...
    def truncate(self, fd: int, size: int) -> None: ...
    def unlink(self, path: str) -> None: ...
    def names(self, directory: str) -> list[str]: ...


class OsFiles:
    """The real ones."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def preadv(self, fd: int, buffers: Buffers, offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Buffers, offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def names(self, directory: str) -> list[str]:
        return os.listdir(directory)


def read_into(files: Files, fd: int, buffers: Buffers, offset: int) -> int:
    """Fills `buffers` from `offset` on; returns the bytes read, fewer than asked only at the end of the file."""
    return _transfer(files.preadv, fd, buffers, offset)


def write_all(files: Files, fd: int, buffers: Buffers, offset: int) -> None:
    """Writes all of `buffers` at `offset`.

    Raises:
      OSError: not everything could be written; a part may have been.
    """
    wanted = sum(memoryview(buffer).nbytes for buffer in buffers)
    written = _transfer(files.pwritev, fd, buffers, offset)
    if written != wanted:
        raise OSError(f"wrote {written} of {wanted} bytes")


def _transfer(call: Any, fd: int, buffers: Buffers, offset: int) -> int:
    """Repeats a scattered read or write until all bytes have moved or none do."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    total = 0
    while views:
        moved = call(fd, views[:MAX_BUFFERS], offset + total)
        if moved == 0:
            break
        total += moved
        while views and moved >= views[0].nbytes:
            moved -= views.pop(0).nbytes
        if moved:
            views[0] = views[0][moved:]
    return total


def sync_files(directory: str) -> None:
    """Writes the directory's files out to the disk; for measurements."""
    for name in os.listdir(directory):
        fd = os.open(os.path.join(directory, name), os.O_RDWR)
        os.fdatasync(fd)
        os.close(fd)


def drop_from_cache(directory: str) -> None:
    """Asks the system to forget the directory's files, which are on the disk; it may keep some. For measurements."""
    for name in os.listdir(directory):
        fd = os.open(os.path.join(directory, name), os.O_RDWR)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

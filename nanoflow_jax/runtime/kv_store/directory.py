"""The lock of a store's directory."""

import fcntl
import os


class DirectoryInUseError(RuntimeError):
    """Another store, of this process or another, has the directory open."""


class DirectoryLock:
    """Held until released or until the process dies, however it dies: the kernel drops it, so no lock is ever stale."""

    def __init__(self, directory: str) -> None:
        """Makes the directory if need be.

        Raises:
          DirectoryInUseError: the lock is taken; the message names the owner.
          OSError: the directory cannot be made or written.
        """
        os.makedirs(directory, mode=0o700, exist_ok=True)  # K and V tell what users wrote
        self._path = os.path.join(directory, "lock")
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            owner = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            raise DirectoryInUseError(f"the KV store's directory {directory} is in use by process {owner}") from None
        except OSError:
            self.release()
            raise

    def holds(self) -> bool:
        """Whether the file that is locked is still the directory's; a directory made anew may belong to another server."""
        try:
            there, held = os.stat(self._path), os.fstat(self._fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

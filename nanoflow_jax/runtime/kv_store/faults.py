"""Faults of the storage: counted by kind, logged once per kind, never raised at whoever computes."""

import enum
import errno
import logging
import threading
from collections import Counter

_log = logging.getLogger(__name__)


class Fault(enum.StrEnum):
    """Kinds of faults; each ends as a miss or as a page that is not kept."""

    DISK_FULL = "disk full"
    READ_ERROR = "read error"
    WRITE_ERROR = "write error"
    TRUNCATED = "truncated segment"
    CHECKSUM = "checksum mismatch"
    BAD_HEADER = "bad segment header"
    BAD_ENTRY = "bad index entry"
    SEGMENT_LOST = "segment file lost"
    DIRECTORY_LOST = "directory lost"
    STALLED = "disk stalled"
    INTERNAL = "internal error"


class FaultLog:
    """Thread-safe counts by kind. The first fault of a kind is logged as a warning, later ones are only counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, kind: Fault, detail: object, *, times: int = 1) -> None:
        with self._lock:
            first = self._counts[kind.value] == 0
            self._counts[kind.value] += times
        if first:
            traceback = detail if kind is Fault.INTERNAL and isinstance(detail, BaseException) else None
            _log.warning("KV store: %s: %s (further ones are only counted)", kind.value, detail, exc_info=traceback)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


def kind_of_write_error(error: OSError) -> Fault:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Fault.DISK_FULL
    return Fault.SEGMENT_LOST if error.errno in (errno.ENOENT, errno.ENOTDIR) else Fault.WRITE_ERROR

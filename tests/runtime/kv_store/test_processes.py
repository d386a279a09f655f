"""Real disks and real processes: killed while writing, two on one directory, a file size limit as a full disk."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from nanoflow_jax.runtime.kv_store import DirectoryInUseError, Fault, KVStore
from nanoflow_jax.runtime.kv_store.faults import kind_of_write_error
from tests.runtime.kv_store.helpers import FINGERPRINT, at_rest, digest, digests, loaded, pages, put_pages

PAGE_BYTES = 40_000

# Puts page after page until it is killed; says when a reader may expect the first 40 on SSD.
WRITER = """
import sys
from tests.runtime.kv_store.helpers import digests, pages, put_pages
from tests.runtime.kv_store.test_processes import PAGE_BYTES, open_store
store = open_store(sys.argv[1])
print("open", flush=True)
for start in range(0, 100_000, 4):
    keys = range(start, start + 4)
    put_pages(store, digests(keys), pages(keys, PAGE_BYTES))
    if start < 64:
        store.drain(20.0)
    if start == 64:
        print("go", flush=True)
"""


def open_store(directory) -> KVStore:
    return KVStore(
        FINGERPRINT, PAGE_BYTES, host_bytes=16 * PAGE_BYTES, ssd_directory=str(directory), ssd_bytes=1 << 28, queue_pages=8
    )


def start_writer(directory) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


@pytest.mark.parametrize("delay_s", [0.0, 0.013, 0.05, 0.21])
def test_killed_while_writing_and_restarted(tmp_path, delay_s):
    process = start_writer(tmp_path)
    assert process.stdout.readline() == "go\n"
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    store = open_store(tmp_path)
    assert set(store.stats().faults) <= {Fault.TRUNCATED}, "a kill leaves at most a torn end"
    found = [key for key in range(2000) if digest(key) in store]
    assert set(range(40)) <= set(found)
    for key in found:
        assert loaded(store, [key]) == 1
    assert set(store.stats().faults) <= {Fault.TRUNCATED}
    put_pages(store, digests([10**6]), pages([10**6], PAGE_BYTES))
    at_rest(store)
    assert store.close(20.0)


def test_two_processes_on_one_directory(tmp_path):
    process = start_writer(tmp_path)
    with pytest.raises(DirectoryInUseError, match=re.escape(f"{tmp_path} is in use by process {process.pid}")):
        open_store(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    store = open_store(tmp_path)  # the lock of a dead process blocks nobody
    assert store.close(20.0)


LIMITED = """
import resource, sys
from tests.runtime.kv_store.helpers import FINGERPRINT, at_rest, digest, digests, loaded, pages, put_pages
from tests.runtime.kv_store.test_processes import PAGE_BYTES, open_store
from nanoflow_jax.runtime.kv_store import Fault
store = open_store(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (10 * PAGE_BYTES, resource.RLIM_INFINITY))
for start in range(0, 80, 4):
    keys = range(start, start + 4)
    assert put_pages(store, digests(keys), pages(keys, PAGE_BYTES)) == 4
    assert store.drain(20.0)
found = [key for key in range(80) if loaded(store, [key])]
stats = store.stats()
assert stats.faults[Fault.DISK_FULL] > 1 and stats.ssd.dropped > 20, stats
assert stats.ssd.pages > 0 and len(found) >= 8 + stats.ssd.pages - 8, (found, stats)
at_rest(store)
assert store.close(20.0)
"""


def test_a_file_that_may_not_grow(tmp_path):
    """Writes end short in the middle of a page, as on a disk that has just become full."""
    subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], check=True, timeout=60)
    store = open_store(tmp_path)
    found = [key for key in range(80) if digest(key) in store]
    assert found and all(loaded(store, [key]) == 1 for key in found)
    assert store.close(20.0)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_the_error_of_a_full_disk_is_told_apart():
    fd = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError) as caught:
        os.write(fd, b"x")
    os.close(fd)
    assert kind_of_write_error(caught.value) is Fault.DISK_FULL

"""Bandwidth of the memory tiers: `python -m nanoflow_jax.runtime.kv_store.bench --directory /mnt/ssd`.

Each figure stands beside what the machine does with the same bytes in the same run: a plain copy in memory, or a plain file
written and read by one thread. "Cold" reads follow a request to the system to drop the files from its cache; it may keep some.
Of several repetitions the fastest is shown, since what else runs on the machine only slows them down. The last line is one JSON
object.
"""

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable

import numpy as np

from nanoflow_jax.runtime.kv_store import KVStore
from nanoflow_jax.runtime.kv_store.files import OsFiles, drop_from_cache, read_into, sync_files, write_all

_FINGERPRINT = bytes(32)
_TIMEOUT_S = 600.0


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _put(store: KVStore, digests: list[bytes], pages: np.ndarray) -> None:
    slots = store.reserve(len(digests))
    store.host_pages[slots] = pages
    store.commit(slots, digests)


def measure_host(digests: list[bytes], pages: np.ndarray) -> dict[str, float]:
    """Seconds of putting and getting all pages in host memory, and of copying as many bytes."""
    out = np.zeros_like(pages)
    store = KVStore(_FINGERPRINT, pages.shape[1], host_bytes=pages.nbytes)
    store.host_pages[:] = 0  # mapped, as they are once the tier has filled

    def get() -> None:
        with store.get_many(digests).result(_TIMEOUT_S) as got:
            got.copy_to(out)

    seconds = {
        "memcpy": _seconds(lambda: np.copyto(out, pages)),
        "host put": _seconds(lambda: _put(store, digests, pages)),
        "host get": _seconds(get),
    }
    assert (out == pages).all()
    store.close()
    return seconds


def measure_calls(digests: list[bytes], pages: np.ndarray) -> dict[str, float]:
    """Seconds that calls take for all pages when no byte has to be moved."""
    store = KVStore(_FINGERPRINT, pages.shape[1], host_bytes=pages.nbytes)
    seconds = {
        "reserve, commit": _seconds(lambda: store.commit(store.reserve(len(digests)), digests)),
        "cached_prefix": _seconds(lambda: store.cached_prefix(digests)),
        "get_many, release": _seconds(lambda: store.get_many(digests).result().release()),
    }
    store.close()
    return seconds


def measure_ssd(directory: str, digests: list[bytes], pages: np.ndarray, num_readers: int) -> dict[str, float]:
    """Seconds of writing all pages to SSD and of reading them back cold and warm."""
    count, page_bytes = pages.shape
    host_bytes = (count + 64) * page_bytes

    def opened() -> KVStore:
        store = KVStore(
            _FINGERPRINT, page_bytes, host_bytes=host_bytes, ssd_directory=directory, ssd_bytes=2 * pages.nbytes + 2**24,
            num_readers=num_readers,
        )  # fmt: skip
        store.host_pages[:] = 0
        return store

    store = opened()
    _put(store, digests, pages)
    seconds = {"ssd put": _seconds(lambda: (store.close(_TIMEOUT_S), sync_files(directory)))}
    for name in ("ssd get, cold", "ssd get, warm"):
        if name.endswith("cold"):
            drop_from_cache(directory)
        store = opened()
        begin = time.perf_counter()
        with store.get_many(digests).result(_TIMEOUT_S) as got:
            seconds[name] = time.perf_counter() - begin
            assert len(got) == count and (np.concatenate(got.runs) == pages).all()
        store.close(keep_host_pages=False)
    return seconds


def measure_file(directory: str, pages: np.ndarray) -> dict[str, float]:
    """Seconds of writing (and syncing) one plain file of all pages, and of reading it."""
    path, files, out = os.path.join(directory, "plain"), OsFiles(), np.zeros_like(pages)

    def transfer(flags: int, call: Callable[[int], object]) -> float:
        def work() -> None:
            fd = os.open(path, flags, 0o600)
            call(fd)
            os.close(fd)

        return _seconds(work)

    seconds = {
        "file write": transfer(os.O_RDWR | os.O_CREAT, lambda fd: (write_all(files, fd, [pages], 0), os.fdatasync(fd))),
    }
    drop_from_cache(directory)
    for name in ("file read, cold", "file read, warm"):
        seconds[name] = transfer(os.O_RDONLY, lambda fd: read_into(files, fd, [out], 0))
    assert (out == pages).all()
    return seconds


_BESIDE = {
    "host put": "memcpy",
    "host get": "memcpy",
    "ssd put": "file write",
    "ssd get, cold": "file read, cold",
    "ssd get, warm": "file read, warm",
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m nanoflow_jax.runtime.kv_store.bench", description=__doc__)
    parser.add_argument("--directory", default=None, help="on the SSD to measure (default: the system's temporary directory)")
    parser.add_argument("--page-kib", type=int, default=2048, help="KiB of K and V per page, all layers (default %(default)s)")
    parser.add_argument("--pages", type=int, default=256, help="moved per repetition (default %(default)s)")
    parser.add_argument("--readers", type=int, default=4, help="threads that read from SSD (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="repetitions (default %(default)s)")
    args = parser.parse_args(argv)
    for name in ("page_kib", "pages", "readers", "repeat"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    pages = np.random.default_rng(0).integers(0, 256, (args.pages, args.page_kib * 1024), np.uint8)
    digests = [hashlib.blake2b(i.to_bytes(8, "little"), digest_size=16).digest() for i in range(args.pages)]
    samples: dict[str, list[float]] = {}
    calls: dict[str, list[float]] = {}
    for _ in range(args.repeat):
        for name, value in measure_calls(digests, pages).items():
            calls.setdefault(name, []).append(value)
        with tempfile.TemporaryDirectory(dir=args.directory) as ours, tempfile.TemporaryDirectory(dir=args.directory) as plain:
            for part in (
                measure_host(digests, pages),
                measure_file(plain, pages),
                measure_ssd(ours, digests, pages, args.readers),
            ):
                for name, value in part.items():
                    samples.setdefault(name, []).append(value)
    rates = {name: pages.nbytes / min(values) / 1e9 for name, values in samples.items()}
    print(f"{args.pages} pages of {args.page_kib} KiB, {pages.nbytes / 1e6:.0f} MB")
    print(f"{'':<16}{'GB/s':>8}  {'beside':<16}{'GB/s':>8}{'ratio':>8}")
    for name, beside in _BESIDE.items():
        print(f"{name:<16}{rates[name]:>8.2f}  {beside:<16}{rates[beside]:>8.2f}{rates[name] / rates[beside]:>8.2f}")
    caller_us = {name: 1e6 * min(values) / args.pages for name, values in calls.items()}
    print("microseconds of calls per page: " + "; ".join(f"{name} {us:.2f}" for name, us in caller_us.items()))
    rounded = {name: round(rate, 3) for name, rate in rates.items()}
    print(json.dumps({**vars(args), "gb_per_s": rounded, "caller_us_per_page": caller_us}))


if __name__ == "__main__":
    main()

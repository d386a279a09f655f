"""Executables, compiled or found on disk: a start that finds all of them neither traces nor lowers anything.

XLA's own cache (`jax_compilation_cache_dir`) spares XLA's part, but its key is the lowered program, and lowering a step of many
layers of kernels takes seconds of Python. Here the key says what the program is made from: the sources, the versions of what
translates them, the devices, and the arguments. Whatever cannot be loaded is compiled again and replaced, with a warning.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

_log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]

# Source trees that programs are traced from: Python, and the tables that kernels are chosen by.
_SOURCES = tuple(Path(__file__).parents[2] / package for package in ("nanoflow_jax", "pallas_kernels"))
_SOURCE_PATTERNS = ("**/*.py", "**/*.json")
# What takes part in translation, or is called by number (cuBLAS and cuDNN algorithms) from the result.
_TRANSLATORS = re.compile(r"(jax|flax|numpy|ml[-_]dtypes|nvidia|triton)", re.IGNORECASE)
_VARIABLES = re.compile(r"XLA_FLAGS|TF_XLA_|MOSAIC_|NVIDIA_TF32_OVERRIDE")
_SUFFIX, _UNFINISHED = ".executable", ".tmp"
_MAGIC = b"nanoflow-jax executable 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
# Of one directory; a step of 32 layers takes 10 MB.
_MAX_BYTES = 8 << 30


def sources_digest(folders: Iterable[Path] = _SOURCES) -> str:
    """Names the contents and paths of all Python files and tables below `folders`."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for pattern in _SOURCE_PATTERNS for path in folder.glob(pattern)):
            content = path.read_bytes()
            digest.update(f"{folder.name}/{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


# A process may live on while files are edited: what is on disk then is not what it runs.
_IMPORTED_SOURCES = sources_digest()


def describe_arrays(tree: Any) -> str:
    """Structure, shapes, dtypes and shardings of a tree of arrays, or of what stands for them."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    lines = [f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {leaf.sharding}" for path, leaf in leaves]
    return "\n".join([str(structure), *lines])


def describe_environment(devices: Sequence[Any]) -> str:
    """Everything outside a program's own sources and arguments that its executable depends on."""
    versions = {
        (distribution.name, distribution.version)
        for distribution in importlib.metadata.distributions()
        if _TRANSLATORS.match(str(distribution.name))  # a broken one has no name
    }
    described = [(d.id, d.platform, d.device_kind, d.client.platform_version, getattr(d, "core_count", None)) for d in devices]
    parts = {
        "python": sys.version_info[:2],
        "packages": sorted(versions),
        "devices": described,
        "machine": (platform.system(), platform.machine(), _cpu_features() if devices[0].platform == "cpu" else ()),
        "jax": sorted((name, repr(value)) for name, value in jax.config.values.items() if "cache" not in name),
        "variables": sorted((name, value) for name, value in os.environ.items() if _VARIABLES.match(name)),
    }
    return repr(parts)


def _cpu_features() -> tuple[str, ...]:
    """Of the host, where the system tells; XLA compiles for all that it finds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    return tuple(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


class ExecutableStore:
    """Compiled executables in a directory, each under a digest of what it was made from.

    Threads may share a store and processes a directory: a file appears complete. Loading unpickles, which can run any code: the
    directory must be as trustworthy as the program.
    """

    def __init__(self, directory: Path, devices: Sequence[Any], context: str) -> None:
        """Opens a directory, and makes it if it can be made.

        Args:
          devices: what executables run on.
          context: what all executables are made from, beside the sources and the environment.
        """
        self._directory = directory
        self._devices = list(devices)
        self._context = "\n".join([_IMPORTED_SOURCES, describe_environment(devices), context])
        self._usable = sources_digest() == _IMPORTED_SOURCES
        self._writable = self._usable
        if not self._usable:
            _log.warning("sources have changed since this process began: executables are neither loaded nor kept")
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            probe = self._unfinished("probe")
            probe.touch(exist_ok=False)
            probe.unlink()
        except OSError as error:
            self._not_kept(error)

    def load(self, kind: str, source: str) -> jax.stages.Compiled | None:
        """What `keep` was given for the same kind and source, or None. Logs why a file that is there is of no use."""
        if not self._usable:
            return None
        path, digest = self._path(kind, source)
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            _log.warning("%s cannot be read and is compiled again: %s", path, error)
            return None
        header, payload = content[: len(_MAGIC) + _DIGEST_BYTES], content[len(_MAGIC) + _DIGEST_BYTES :]
        if header != _MAGIC + _checksum(digest, payload):
            _log.warning("%s is damaged and is compiled again", path)
            return None
        try:
            parts = pickle.loads(payload)
            compiled = serialize_executable.deserialize_and_load(
                *parts, backend=self._devices[0].client, execution_devices=self._devices
            )
        except Exception as error:  # unpickling and XLA raise anything
            _log.warning("%s cannot be loaded and is compiled again: %s: %s", path, type(error).__name__, error)
            return None
        with contextlib.suppress(OSError):  # a directory to read from only
            os.utime(path)
        return compiled

    def keep(self, kind: str, source: str, compiled: jax.stages.Compiled) -> None:
        """Writes an executable; logs why one cannot be written. After an error of the file system nothing more is written."""
        if not self._writable:
            return
        path, digest = self._path(kind, source)
        try:
            payload = pickle.dumps(serialize_executable.serialize(compiled))
        except Exception as error:  # pickling and XLA raise anything
            _log.warning("%s cannot be kept on disk: %s: %s", kind, type(error).__name__, error)
            return
        unfinished = self._unfinished(path.name)
        try:
            with unfinished.open("xb") as file:
                file.write(_MAGIC + _checksum(digest, payload))
                file.write(payload)
            os.replace(unfinished, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            self._not_kept(error)

    def trim(self, max_bytes: int = _MAX_BYTES) -> None:
        """Removes the files that were not loaded for longest, until those left take at most `max_bytes`."""
        if not self._writable:
            return
        found = []
        for path in self._directory.iterdir():
            if path.suffix in (_SUFFIX, _UNFINISHED):
                with contextlib.suppress(FileNotFoundError):  # removed by another process
                    status = path.stat()
                    found.append((status.st_mtime_ns, status.st_size, path))
        surplus = sum(size for _, size, _ in found) - max_bytes
        for _, size, path in sorted(found):
            if surplus <= 0:
                break
            path.unlink(missing_ok=True)
            surplus -= size

    def _path(self, kind: str, source: str) -> tuple[Path, bytes]:
        digest = hashlib.sha256(f"{self._context}\n{kind}\n{source}".encode())
        return self._directory / f"{kind}-{digest.hexdigest()}{_SUFFIX}", digest.digest()

    def _unfinished(self, name: str) -> Path:
        return self._directory / f"{name}.{secrets.token_hex(8)}{_UNFINISHED}"

    def _not_kept(self, error: OSError) -> None:
        self._writable = False
        _log.warning("executables cannot be kept in %s, the next start compiles them again: %s", self._directory, error)


def _checksum(digest: bytes, payload: bytes) -> bytes:
    """Binds contents to the name they are found under."""
    return hashlib.sha256(digest + payload).digest()


@dataclasses.dataclass(frozen=True)
class Job:
    """An executable to get. `lower` is a partial of a function; its name and its arguments, by `repr`, say what it will lower,
    together with the store's context."""

    name: str
    lower: functools.partial

    @property
    def kind(self) -> str:
        return self.lower.func.__name__.removeprefix("_lower_")

    @property
    def source(self) -> str:
        return repr((self.lower.args, self.lower.keywords))


def obtain(
    jobs: Sequence[Job], store: ExecutableStore | None, progress: Progress | None = None
) -> tuple[list[jax.stages.Compiled], int]:
    """The executable of every job, in their order, and how many of them were loaded.

    Args:
      store: where to look first, and to keep what had to be compiled.
      progress: called with (what is done or under way, done, total); lowering and compiling count one each.
    """
    begun = time.perf_counter()
    report, done, total = progress or (lambda *_: None), 0, 2 * len(jobs)
    executables: dict[int, jax.stages.Compiled] = {}
    # Each compilation has threads of its own; lowering, which is Python, should not have to wait for a core.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        loads = pool.map(lambda job: store.load(job.kind, job.source), jobs) if store else ()
        for index, (job, loaded) in enumerate(zip(jobs, loads, strict=False)):
            if loaded is not None:
                executables[index] = loaded
                report(f"loaded: {job.name}", done, total)
                done += 2
        num_loaded = len(executables)
        # Lowering is Python and takes turns; XLA compiles beside it.
        compiling: dict[Future[jax.stages.Compiled], int] = {}
        for index, job in enumerate(jobs):
            if index not in executables:
                report(f"lowering: {job.name}", done, total)
                compiling[pool.submit(_compile, job, job.lower(), store)] = index
                done += 1
        for finished in as_completed(compiling):
            index = compiling[finished]
            executables[index] = finished.result()
            report(f"compiled: {jobs[index].name}", done, total)
            done += 1
    if store and compiling:
        store.trim()
    _log.info("%d executables loaded, %d compiled, %.1f s", num_loaded, len(compiling), time.perf_counter() - begun)
    report("ready", total, total)
    return [executables[index] for index in range(len(jobs))], num_loaded


def _compile(job: Job, lowered: jax.stages.Lowered, store: ExecutableStore | None) -> jax.stages.Compiled:
    compiled = lowered.compile()
    if store:
        store.keep(job.kind, job.source, compiled)
    return compiled

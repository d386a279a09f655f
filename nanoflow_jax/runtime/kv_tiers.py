"""The memory tiers behind an engine: what it does with the store, in one place. docs/kv-offload.md has the picture."""

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any, Protocol

import msgspec

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.runtime.batcher import FormedStep
from nanoflow_jax.runtime.kv_load import Loads, PageTarget, WorthLoading, is_faster
from nanoflow_jax.runtime.kv_offload import Offload
from nanoflow_jax.runtime.kv_store import DirectoryInUseError as DirectoryInUseError
from nanoflow_jax.runtime.kv_store import KVStore, TierStats, fingerprint
from nanoflow_jax.runtime.sequences import SequenceTable

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierOptions:
    """Sizes of the memory tiers.

    Attributes:
      host_bytes: of host memory; beside a GPU all of it is provided, and pinned, at the start.
      ssd_directory, ssd_bytes: second tier, off without them; the directory belongs to one engine.

    Raises:
      ValueError: no host memory, or only one of directory and size.
    """

    host_bytes: int
    ssd_directory: Path | None = None
    ssd_bytes: int = 0

    def __post_init__(self) -> None:
        if self.host_bytes <= 0:
            raise ValueError(
                f"TierOptions: host_bytes={self.host_bytes} must be positive: every page passes through host memory"
            )
        if self.ssd_bytes < 0 or (self.ssd_directory is None) != (self.ssd_bytes == 0):
            raise ValueError(f"TierOptions: {self.ssd_directory=} and {self.ssd_bytes=} go together")


def add_tier_arguments(group: Any) -> None:
    """The options of the memory tiers, for an argparse parser or group."""
    group.add_argument(
        "--kv-host-gb",
        type=float,
        default=0.0,
        metavar="G",
        help="GiB of host memory for K and V that leave the pool (default: none)",
    )
    group.add_argument("--kv-ssd-dir", type=Path, help="directory on an SSD for K and V that leave host memory")
    group.add_argument("--kv-ssd-gb", type=float, default=0.0, metavar="G", help="GiB to use there")


def tier_options(args: Any) -> TierOptions | None:
    """What the options ask for, None if nothing.

    Raises:
      ValueError: they contradict each other.
    """
    for name in ("kv_host_gb", "kv_ssd_gb"):
        if not 0 <= getattr(args, name) < 1 << 20:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} is not a size in GiB")
    if (args.kv_ssd_dir is None) != (args.kv_ssd_gb == 0):
        raise ValueError("--kv-ssd-dir and --kv-ssd-gb go together")
    if args.kv_ssd_dir is not None and args.kv_host_gb == 0:
        raise ValueError("--kv-ssd-dir needs --kv-host-gb: pages reach the SSD through host memory")
    if args.kv_host_gb == 0:
        return None
    host_bytes, ssd_bytes = int(args.kv_host_gb * 2**30), int(args.kv_ssd_gb * 2**30)
    return TierOptions(host_bytes=host_bytes, ssd_directory=args.kv_ssd_dir, ssd_bytes=ssd_bytes)


class OffloadingRunner(PageTarget, Protocol):
    """What the tiers need of the runner besides loading; see `executor.runner.ModelRunner`."""

    config: ModelConfig
    page_size: int
    max_sequences: int
    page_format: Any

    def weights_checksum(self) -> str: ...


def open_store(runner: OffloadingRunner, options: TierOptions) -> KVStore:
    """The store for a runner's pages.

    Raises:
      ValueError: the host tier does not hold a few pages.
      DirectoryInUseError: another engine has the directory.
      OSError: the directory cannot be used.
      MemoryError: there is not so much host memory, or so much cannot be pinned.
    """
    form = runner.page_format
    if options.host_bytes < 2 * form.page_bytes:
        raise ValueError(f"a host tier of {options.host_bytes} bytes does not hold two pages of {form.page_bytes}")
    if options.host_bytes < 2 * form.page_bytes * runner.max_sequences:
        _log.warning(
            "a host tier of %.2f GiB holds %d pages; %d running sequences fill one each and want as many to keep",
            options.host_bytes / 2**30, options.host_bytes // form.page_bytes, runner.max_sequences,
        )  # fmt: skip
    identity = fingerprint(
        runner.config,
        weights=runner.weights_checksum(),
        dtype=str(form.dtype),
        page_size=runner.page_size,
        page_layout=form.describe(),
    )
    return KVStore(
        identity,
        form.page_bytes,
        host_bytes=options.host_bytes,
        host_buffer=runner.transfer_memory(options.host_bytes),
        ssd_directory=None if options.ssd_directory is None else str(options.ssd_directory),
        ssd_bytes=options.ssd_bytes,
    )


class KVTierStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the memory tiers did since the start.

    Attributes:
      host, ssd: pages and bytes of each tier.
      faults: of the storage, by kind; each was a miss or a page that was not kept.
      offloaded_tokens: tokens whose K and V were taken from steps; `dropped_tokens` came while too many steps were under way.
      loads: begun for requests; `failed_loads` brought fewer pages than the store had promised, or were given up because it did
        not answer; `declined_loads` were not begun because computing was expected to be faster.
      loaded_pages: pages brought back to the device; `load_s` is what that took, from host memory to the pool.
    """

    host: TierStats
    ssd: TierStats
    faults: dict[str, int]
    offloaded_tokens: int
    dropped_tokens: int
    loads: int
    failed_loads: int
    declined_loads: int
    loaded_pages: int
    load_s: float


class KVTiers:
    """One engine's use of a store, which it owns from then on.

    Attributes:
      loads: for the batcher.
    """

    def __init__(self, runner: Any, store: KVStore, *, num_rows: int, worth: WorthLoading = is_faster) -> None:
        form = runner.page_format
        assert form is not None, "the runner was compiled without offload"
        self.store = store
        self.loads = Loads(runner, store, page_size=runner.page_size, chunk_sizes=form.chunk_sizes, worth=worth)
        self._offload = Offload(store, num_rows=num_rows, page_size=runner.page_size, num_groups=form.num_groups)

    def take(self, step: FormedStep, new_kv: tuple[Any, ...], table: SequenceTable) -> None:
        """Stores what a launched step computes; see `Offload.take`."""
        self._offload.take(step, new_kv, table)

    def drain(self, timeout_s: float) -> bool:
        """Waits until everything taken is where it is going; False if that takes longer."""
        deadline = time.monotonic() + timeout_s
        return self._offload.drain(timeout_s) and self.store.drain(max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float) -> bool:
        """Stores what is under way, writes host pages to SSD and frees the directory; False if the disk took longer."""
        deadline = time.monotonic() + timeout_s
        finished = self._offload.stop(timeout_s)
        finished = self.loads.stop(max(0.0, deadline - time.monotonic())) and finished
        return self.store.close(max(0.0, deadline - time.monotonic())) and finished

    def stats(self) -> KVTierStats:
        stored, loads = self.store.stats(), self.loads
        return KVTierStats(
            host=stored.host,
            ssd=stored.ssd,
            faults=stored.faults,
            offloaded_tokens=self._offload.num_tokens,
            dropped_tokens=self._offload.num_dropped,
            loads=loads.num_started,
            failed_loads=loads.num_failed,
            declined_loads=loads.num_declined,
            loaded_pages=loads.num_pages,
            load_s=loads.device_s,
        )

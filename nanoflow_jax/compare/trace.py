"""Kernels of a profiler trace: read from an xplane file, classified by resource, and intersected in time."""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nanoflow_jax.plan import Resource

Intervals = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel or copy on a device's stream; times in ns on the device's clock.

    Attributes:
      op: the HLO instruction that launched it; empty if unknown.
      ctas: CTAs of its grid; None for copies and where the profiler does not say.
    """

    device: int
    stream: str
    name: str
    start_ns: float
    duration_ns: float
    op: str = ""
    ctas: int | None = None

    @property
    def end_ns(self) -> float:
        return self.start_ns + self.duration_ns


class NoDeviceTraceError(RuntimeError):
    """The profile holds no GPU streams; the message says what it does hold."""


def read_events(folder: Path) -> list[Event]:
    """Everything that ran on GPU streams in the xplane file under `folder`, by device and start.

    Raises:
      NoDeviceTraceError: there is no such file, or it holds host events only.
    """
    import jax.profiler

    paths = sorted(folder.rglob("*.xplane.pb"))
    if len(paths) != 1:
        raise NoDeviceTraceError(f"the profiler left {len(paths)} xplane files")
    planes = list(jax.profiler.ProfileData.from_file(str(paths[0])).planes)
    return device_events(planes)


def device_events(planes: Iterable[Any]) -> list[Event]:
    """As `read_events`, from planes with lines with events, as `jax.profiler.ProfileData` has them."""
    planes = list(planes)
    events = []
    for plane in planes:
        device = re.fullmatch(r"/device:GPU:(\d+)", plane.name)
        if device is None:
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            stream = line.name.partition("(")[0].strip()
            events += [_event(int(device[1]), stream, event) for event in line.events]
    if not events:
        raise NoDeviceTraceError(
            f"the profile holds no GPU streams, only {', '.join(sorted(p.name for p in planes)) or 'nothing'}"
        )
    return sorted(events, key=lambda event: (event.device, event.start_ns))


def _event(device: int, stream: str, event: Any) -> Event:
    stats = {str(name): value for name, value in event.stats}
    grid = re.search(r"grid:\s*(\d+),(\d+),(\d+)", str(stats.get("kernel_details", "")))
    ctas = int(grid[1]) * int(grid[2]) * int(grid[3]) if grid else None
    return Event(device, stream, event.name, event.start_ns, event.duration_ns, str(stats.get("hlo_op", "")), ctas)


# What a kernel's name contains when it keeps a resource busy: ours are called after the operation, cuBLAS's nvjet, cutlass or
# after their instruction. Helpers of a GEMM that only clear or add up its parts are none of them.
_HELPERS = re.compile(r"split_?k_?reduce|broadcast")
_SIGNS = {
    Resource.COMPUTE: re.compile(r"gemm|nvjet|cutlass|cublas|xmma|_dot|prefill_attention"),
    Resource.MEMORY: re.compile(r"(?<!prefill_)attention"),
    Resource.NETWORK: re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter"),
}
_KINDS = ("decode_attention_combine", "decode_attention", "prefill_attention", "grouped_gemm")


def resources(name: str) -> tuple[Resource, ...]:
    """The resources that a kernel keeps busy, by its name: none for small ones, several for fused ones."""
    lowered = name.lower()
    if _HELPERS.search(lowered):
        return ()
    return tuple(resource for resource, sign in _SIGNS.items() if sign.search(lowered))


def kind(name: str) -> str:
    """What a kernel does, by its name: an attention operation, "gemm", "grouped_gemm", "collective", "fused" or "other"."""
    held = resources(name)
    if len(held) != 1:
        return "fused" if held else "other"
    general = {Resource.COMPUTE: "gemm", Resource.MEMORY: "decode_attention", Resource.NETWORK: "collective"}
    return next((each for each in _KINDS if each in name.lower()), general[held[0]])


def merged(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The union as disjoint intervals in order; those that touch become one, empty ones vanish."""
    union: Intervals = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], stop))
        else:
            union.append((start, stop))
    return union


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Where both are; either must be as `merged` returns it, and the result is."""
    found: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            found.append((start, stop))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Intervals) -> float:
    return sum(stop - start for start, stop in intervals)


def busy(events: Sequence[Event], resource: Resource) -> Intervals:
    """When any kernel of a resource ran. `events` are of one device."""
    return merged((event.start_ns, event.end_ns) for event in events if resource in resources(event.name))


def by_device(events: Iterable[Event]) -> dict[int, list[Event]]:
    devices: dict[int, list[Event]] = {}
    for event in events:
        devices.setdefault(event.device, []).append(event)
    return devices

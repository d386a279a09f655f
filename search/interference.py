"""How much a kernel slows down beside a GEMM: the map from resource share R to performance P.

R is measured by the GEMM: the share that a memory or network kernel holds is what the GEMM beside it lost, as a fraction of its
speed alone. P is the other kernel's speed as a fraction of its speed alone. For the GEMM itself P = R. Pairwise maps are taken
to hold when three kernels run together. Source: NanoFlow paper, section 4.1.1 and Table 3.
"""

import bisect
import functools
import itertools
from collections.abc import Sequence
from importlib import resources

import msgspec

from nanoflow_jax.plan import Resource

MAX_CHANNELS = 32


class InterferencePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """At `share` the kernel runs at `performance` (standard deviation `spread`); `num_sms` it held, where SMs were budgeted."""

    share: float
    performance: float
    spread: float | None = None
    num_sms: int | None = None


class Interference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The maps of one device, rising in share; between the points, and to (0, 0) and (1, 1), they are read off linearly."""

    name: str
    source: str
    memory: tuple[InterferencePoint, ...]
    network: tuple[InterferencePoint, ...]

    def __post_init__(self) -> None:
        for lane in ("memory", "network"):
            points = getattr(self, lane)
            for a, b in itertools.pairwise(points):
                if not (a.share < b.share and a.performance <= b.performance):
                    raise ValueError(f"interference {self.name!r}: {lane} points must rise, got {a} before {b}")
            for p in points:
                if not (0 < p.share <= 1 and 0 < p.performance <= 1):
                    raise ValueError(f"interference {self.name!r}: {lane} share and performance must lie in (0, 1], got {p}")


class _Maps(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format_version: int
    maps: tuple[Interference, ...]


@functools.cache
def shipped_maps() -> dict[str, Interference]:
    """The maps that come with this package, by name."""
    text = resources.files("search").joinpath("data/interference.json").read_bytes()
    return {m.name: m for m in msgspec.json.decode(text, type=_Maps).maps}


def _points(interference: Interference, resource: Resource) -> tuple[InterferencePoint, ...]:
    return interference.memory if resource is Resource.MEMORY else interference.network


def _read(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    i = min(max(bisect.bisect_left(xs, x), 1), len(xs) - 1)
    weight = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + weight * (ys[i] - ys[i - 1])


def _curve(interference: Interference, resource: Resource) -> tuple[list[float], list[float]]:
    points = [p for p in _points(interference, resource) if p.share < 1]
    return [0.0, *(p.share for p in points), 1.0], [0.0, *(p.performance for p in points), 1.0]


@functools.lru_cache(maxsize=4096)
def performance(interference: Interference, resource: Resource, share: float) -> float:
    """P of a kernel that holds `share` in [0, 1]."""
    if resource is Resource.COMPUTE:
        return share
    return _read(*_curve(interference, resource), share)


def sms_of_share(interference: Interference, resource: Resource, share: float, num_sms: int) -> int:
    """SMs (or NCCL channels) of a memory or network kernel that holds `share` of a device with `num_sms`.

    Measured counts are interpolated; without them SMs are taken in proportion to the share. At least 1; all of them at share 1,
    but a collective never has more than 32 channels.
    """
    if resource is Resource.NETWORK:
        num_sms = min(num_sms, MAX_CHANNELS)
    if share >= 1:
        return num_sms
    shares, counts = _counts(interference, resource, num_sms)
    return max(1, int(_read(shares, counts, share) + 1e-9))


def share_of_sms(interference: Interference, resource: Resource, sms: int, num_sms: int) -> float:
    """The share of a memory or network kernel that holds `sms` of a device with `num_sms`: what a GEMM beside it loses."""
    shares, counts = _counts(interference, resource, num_sms)
    return _read(counts, shares, sms)


def _counts(interference: Interference, resource: Resource, num_sms: int) -> tuple[list[float], list[float]]:
    """(shares, SMs) from nothing to the whole device, ascending; in proportion where nothing was measured."""
    measured = [(p.share, float(p.num_sms)) for p in _points(interference, resource) if p.num_sms is not None]
    whole = [] if measured and measured[-1][0] >= 1 else [(1.0, float(num_sms))]
    shares, counts = zip((0.0, 0.0), *measured, *whole, strict=True)
    return list(shares), list(counts)


def useful_shares(
    interference: Interference, resource: Resource, num_sms: int, step: float, *, beside_network: bool = True
) -> list[float]:
    """Shares worth choosing from, rising to 1, without those that gain nothing.

    Multiples of `step` and the measured points. But where memory kernels were measured on so many SMs each, they choose among
    these numbers and the whole device, and GEMMs among exactly what these leave: what lies between was not measured, and GEMMs
    run on pairs of SMs. With collectives beside them GEMMs also have the multiples of `step`.
    """
    grid = {round(step * i, 6) for i in range(1, round(1 / step))}
    budgets = {share_of_sms(interference, Resource.MEMORY, p.num_sms, num_sms) for p in interference.memory if p.num_sms}
    if resource is Resource.COMPUTE and budgets:
        left = {1.0 - share for share in budgets}
        grid = grid | left if beside_network else left
    elif resource is Resource.MEMORY and budgets:
        grid = budgets
    elif resource is not Resource.COMPUTE:
        grid |= {p.share for p in _points(interference, resource)}
    kept: list[float] = []
    for share in sorted(grid | {1.0}):
        if not kept or performance(interference, resource, share) > performance(interference, resource, kept[-1]) + 1e-9:
            kept.append(share)
    return kept

"""What the profiler measures: programs and how much they are given, and from times of pairs to the interference maps."""

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from nanoflow_jax.plan import Resource
from search.interference import Interference, InterferencePoint
from search.profile_table import Kernel, Pair, ProfileError

# A GEMM that loses nothing still gives up something for what runs beside it.
_LEAST_SHARE = 0.005


def is_collective(kernel: Kernel) -> bool:
    return kernel.name in ("all_reduce", "all_gather")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alone:
    """A program of one kernel on `tokens` rows and `num_sms` SMs (nominal channels for collectives).

    `max_context` bounds the keys of a row of attention; how many there are is data.
    """

    kernel: Kernel
    tokens: int
    num_sms: int
    max_context: int = 0

    @property
    def ranks(self) -> int:
        """GPUs that run the program."""
        return self.kernel.shape[0] if is_collective(self.kernel) else 1

    def __str__(self) -> str:
        return f"{self.kernel} of {self.tokens} tokens on {self.num_sms} SMs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Together:
    """A program of phases: in each, `calls` GEMMs one after another beside one call of the other kernel."""

    gemm: Alone
    calls: int
    other: Alone

    @property
    def ranks(self) -> int:
        return self.other.ranks

    def __str__(self) -> str:
        return f"{self.calls} x {self.gemm} beside {self.other}"


Program = Alone | Together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Load:
    """What a program's data hold: keys per token of attention, and how many rows of decode attention have any (None: all)."""

    context: float = 0.0
    rows: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """Sustained time of a call or phase; after a rest, and energy above idle, where asked for."""

    time_us: float
    burst_us: float | None = None
    energy_j: float | None = None


def lane(pair: Pair) -> Resource:
    """What the GEMM's partner is bound by."""
    return Resource.NETWORK if is_collective(pair.other) else Resource.MEMORY


def share_and_performance(pair: Pair) -> tuple[float, float]:
    """(R, P) of a pair: what GEMMs lost of their speed alone on the whole device, and what the other kernel kept of its own.

    With t the time until both have ended, R = 1 - (GEMMs alone) / t and P = (other alone) / t, each between 0 and 1. Source:
    NanoFlow paper, section 4.1.1.
    """
    return min(max(1 - pair.gemm_us / pair.time_us, _LEAST_SHARE), 1.0), min(pair.other_us / pair.time_us, 1.0)


def interference_points(pairs: Sequence[Pair]) -> tuple[InterferencePoint, ...]:
    """The map of one lane: mean share and performance over the GEMMs for each number of SMs that these left.

    A number of SMs that another beats, with no larger share and no smaller performance, is left out: nobody should choose it.
    """
    found: list[InterferencePoint] = []
    by_sms = sorted(pairs, key=lambda p: p.other_sms)
    for sms, group in itertools.groupby(by_sms, key=lambda p: p.other_sms):
        both = [share_and_performance(p) for p in group]
        share, performance = (statistics.fmean(values) for values in zip(*both, strict=True))
        spread = statistics.pstdev(p for _, p in both)
        found.append(InterferencePoint(share=share, performance=performance, spread=spread, num_sms=sms))
    kept: list[InterferencePoint] = []
    for point in sorted(found, key=lambda p: (p.share, -p.performance)):
        if not kept or (point.share > kept[-1].share and point.performance > kept[-1].performance):
            kept.append(point)
    return tuple(kept)


def measured_maps(name: str, source: str, pairs: Sequence[Pair], otherwise: Interference) -> Interference:
    """The maps from pairs; a lane without any keeps its points of `otherwise`, and the source says so.

    `otherwise` itself where there are no pairs at all.
    """
    if not pairs:
        return otherwise
    lanes = {r: interference_points([p for p in pairs if lane(p) is r]) for r in (Resource.MEMORY, Resource.NETWORK)}
    borrowed = [r.value for r, points in lanes.items() if not points]
    if borrowed:
        source = f"{source}; {' and '.join(borrowed)} from {otherwise.name}"
    return Interference(
        name=name, source=source,
        memory=lanes[Resource.MEMORY] or otherwise.memory, network=lanes[Resource.NETWORK] or otherwise.network,
    )  # fmt: skip


def together(program: Together, load: Load, time_us: float, gemm_us: float, other_us: float) -> Pair:
    """The record of one measured pair.

    Raises:
      ProfileError: a time is not positive.
    """
    if min(time_us, gemm_us, other_us) <= 0:
        raise ProfileError(f"{program}: impossible times {time_us}, {gemm_us}, {other_us} us")
    return Pair(
        gemm=program.gemm.kernel, gemm_tokens=program.gemm.tokens, gemm_sms=program.gemm.num_sms, calls=program.calls,
        other=program.other.kernel, other_tokens=program.other.tokens if load.rows is None else load.rows,
        other_sms=program.other.num_sms, context=load.context, time_us=time_us, gemm_us=gemm_us, other_us=other_us,
    )  # fmt: skip

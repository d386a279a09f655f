"""Device time, power and the table that every benchmark here prints.

A measurement runs a *chain*: one compiled program that calls the function `calls` times in a row, each call on the next of
several input sets (together larger than the L2 cache, so weights and pages come from HBM) and each after the one before. Chains
are launched back to back, several deep, and the time of a call is the whole time divided by all calls: it holds everything a
call launches, memory clearing and gaps included, and of the host only the first launch, some 0.1 ms of a turn. Functions
under comparison take turns, so that clock and temperature drift hit all of them. The host must be idle otherwise, or it falls
behind the device.
"""

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax import lax

from pallas_kernels import programs
from pallas_kernels.power import PowerMeter

PEAK_FLOPS = 989e12
PEAK_BYTES_PER_S = 4.8e12
"""Data-sheet peaks of one H200: dense bf16 FLOP/s and HBM bytes/s."""

Inputs = tuple[Any, ...]
Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sustained:
    """Means over a run of a second or more, in which the power limit sets the clock."""

    seconds: float
    watts: float
    sm_mhz: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a benchmark: `seconds` of `kernel` on `num_sms` SMs beside those of `baseline` in the same run."""

    kernel: str
    case: str
    num_sms: int
    seconds: float
    flops: float = 0.0
    hbm_bytes: float = 0.0
    baseline: str = ""
    baseline_seconds: float = math.nan
    sustained: Sustained | None = None
    note: str = ""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else a benchmark found, for its JSON line."""

    @property
    def roofline(self) -> float:
        """Fraction of the speed that the data sheet's peaks allow; the larger of the two bounds counts."""
        return max(self.flops / PEAK_FLOPS, self.hbm_bytes / PEAK_BYTES_PER_S) / self.seconds

    @property
    def speedup(self) -> float:
        """Baseline time over kernel time: above 1 the kernel is faster."""
        return self.baseline_seconds / self.seconds


def copies_beyond_l2(set_bytes: float) -> int:
    """Input sets of `set_bytes` each that make a rotation miss the L2 cache."""
    return programs.copies_beyond_l2(set_bytes, most=16)


@dataclasses.dataclass(frozen=True)
class Chain:
    """A compiled program that calls a function `calls` times, one after the other, on several input sets in turn."""

    run: Callable[[Sequence[Inputs]], Any]
    calls: int

    def seconds(self, input_sets: Sequence[Inputs], launches: int) -> float:
        """Mean seconds per call of `launches` runs back to back."""
        start = time.perf_counter()
        programs.run_back_to_back(lambda: self.run(input_sets), lambda launched: launched < launches)
        return (time.perf_counter() - start) / (self.calls * launches)


def chain(
    f: Callable[..., Any], input_sets: Sequence[Inputs], *, calls: int = 8, compiler_options: Mapping[str, Any] | None = None
) -> Chain:
    """Compiles the chain of `calls` calls of `f`; shapes suffice as `input_sets`."""
    return Chain(lower_chain(f, input_sets, calls=calls).compile(dict(compiler_options or {})), calls)


def lower_chain(f: Callable[..., Any], input_sets: Sequence[Inputs], *, calls: int = 8) -> jax.stages.Lowered:
    """The program of a chain, for who compiles several at once."""
    once = jax.jit(f)  # lowered once, however often the chain calls it

    def run(input_sets: Sequence[Inputs]) -> list[Any]:
        outs: list[Any] = []
        for i in range(calls):
            args = input_sets[i % len(input_sets)]
            if outs:
                # Orders the calls, and makes their inputs different values so that XLA cannot merge equal calls.
                args, outs[-1] = lax.optimization_barrier((args, outs[-1]))
            outs.append(once(*args))
        return outs  # all of them: what nobody needs is not computed

    return jax.jit(run).lower(input_sets)


def compile_side_by_side(
    lowered: Mapping[Key, Callable[[], jax.stages.Lowered]], compiler_options: Mapping[str, Any]
) -> dict[Key, jax.stages.Compiled]:
    """Executables of all programs: a benchmark without one of them compares nothing, so the first error is raised."""
    ready, errors = programs.compile_side_by_side(lowered, dict(compiler_options))
    for error in errors.values():
        raise error
    return ready


def steady_seconds(c: Chain, input_sets: Sequence[Inputs], *, settle: float = 0.05, measure: float = 0.1) -> float:
    """Mean seconds per call over `measure` seconds, after `settle` seconds of the same, in which the clock finds its place."""
    c.seconds(input_sets, 2)  # first use
    launch = c.seconds(input_sets, 3) * c.calls
    c.seconds(input_sets, max(3, round(settle / launch)))
    return c.seconds(input_sets, max(3, round(measure / launch)))


def take_turns(
    chains: Mapping[str, Chain], input_sets: Sequence[Inputs], *, rep_seconds: float = 12e-3, reps: int = 5
) -> dict[str, float]:
    """Median over `reps` of the seconds per call of each chain, all on the same inputs, one after the other in each rep."""
    launches = {}
    for name, c in chains.items():
        c.seconds(input_sets, 2)  # first use
        launches[name] = max(3, round(rep_seconds / (c.seconds(input_sets, 4) * c.calls)))
    times: dict[str, list[float]] = {name: [] for name in chains}
    for _ in range(reps):
        for name, c in chains.items():
            times[name].append(c.seconds(input_sets, launches[name]))
    return {name: statistics.median(t) for name, t in times.items()}


def device_seconds(
    functions: Mapping[str, Callable[..., Any]], input_sets: Sequence[Inputs], *, calls: int = 8, reps: int = 5
) -> dict[str, float]:
    """Median seconds per call of each function, all on the same inputs, the functions taking turns."""
    return take_turns({name: chain(f, input_sets, calls=calls) for name, f in functions.items()}, input_sets, reps=reps)


def sustained(f: Callable[..., Any], input_sets: Sequence[Inputs], *, seconds: float = 1.8, calls: int = 8) -> Sustained:
    """Runs `f` for `seconds` without a pause and looks at the last two thirds: mean time, board power and SM clock.

    Raises:
      PowerError: NVML has no energy counter for the GPU, or it moved less than twice.
    """
    return sustained_chain(chain(f, input_sets, calls=calls), input_sets, seconds=seconds)


def sustained_chain(c: Chain, input_sets: Sequence[Inputs], *, seconds: float = 1.8) -> Sustained:
    """`sustained` of a chain that is compiled already."""
    c.seconds(input_sets, 2)
    launches = max(6, round(seconds / (c.seconds(input_sets, 4) * c.calls)))
    warm_up = launches // 3
    with PowerMeter(jax.devices()[:1]) as meter:
        c.seconds(input_sets, warm_up)
        start = time.perf_counter()
        per_call = c.seconds(input_sets, launches - warm_up)
        end = time.perf_counter()
    (mean,) = meter.means(start, end)
    return Sustained(seconds=per_call, watts=mean.watts, sm_mhz=mean.sm_mhz)


def header() -> str:
    return (
        f"{'kernel':20s} {'case':38s} {'SMs':>3s} {'us':>8s} {'TFLOP/s':>7s} {'TB/s':>5s} {'roof':>5s}"
        f" {'baseline':>23s} {'ratio':>5s} sustained"
    )


def line(r: Row) -> str:
    """A row for people: microseconds, the rate in both units, percent of the roofline, the baseline and energy."""
    rate = f"{r.flops / r.seconds / 1e12:7.0f} {r.hbm_bytes / r.seconds / 1e12:5.2f} {100 * r.roofline:4.0f}%"
    beside = f"{r.baseline:>14s} {1e6 * r.baseline_seconds:8.1f} {r.speedup:5.2f}" if r.baseline else " " * 29
    return f"{r.kernel:20s} {r.case:38s} {r.num_sms:3d} {1e6 * r.seconds:8.1f} {rate} {beside} {_energy(r)} {r.note}".rstrip()


def _energy(r: Row) -> str:
    if r.sustained is None:
        return ""
    s = r.sustained
    joules = s.watts * s.seconds
    per = (
        f"{1e12 * joules / r.flops:.2f} pJ/FLOP"
        if r.flops / PEAK_FLOPS > r.hbm_bytes / PEAK_BYTES_PER_S
        else (f"{1e12 * joules / r.hbm_bytes:.0f} pJ/B")
    )
    return f"{1e6 * s.seconds:8.1f} us {s.watts:3.0f} W {s.sm_mhz:4.0f} MHz {per}"


def json_line(rows: Sequence[Row], **facts: Any) -> str:
    """The rows as one JSON object, with device, versions and whatever `facts` the benchmark states."""
    device = jax.devices()[0]
    return json.dumps(
        {
            "device": device.device_kind,
            "num_sms": getattr(device, "core_count", None),
            "versions": programs.versions(),
            **facts,
            "rows": [dataclasses.asdict(r) for r in rows],
        }
    )

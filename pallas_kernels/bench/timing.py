"""Device time, power and the table that every benchmark here prints.

A measurement runs a *chain*: one compiled program that calls the function `calls` times in a row, each call on the next of
several input sets (together larger than the L2 cache, so weights and pages come from HBM) and each after the one before. The
time of a call is the time of the chain divided by its length: it holds everything the call launches and the gaps between, and
no host time. Functions under comparison take turns, so that clock and temperature drift hit all of them.
"""

import dataclasses
import functools
import json
import math
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import jax
from jax import lax

L2_BYTES = 60e6
"""Upper bound of the L2 cache of a Hopper GPU."""

PEAK_FLOPS = 989e12
PEAK_BYTES_PER_S = 4.8e12
"""Data-sheet peaks of one H200: dense bf16 FLOP/s and HBM bytes/s."""

Inputs = tuple[Any, ...]


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
    return min(16, max(2, math.ceil(3 * L2_BYTES / set_bytes)))


def chain(f: Callable[..., Any], calls: int) -> Callable[[Sequence[Inputs]], Any]:
    """A compiled program that calls `f` `calls` times, one after the other, on the given input sets in turn."""
    once = jax.jit(f)  # lowered once, however often the chain calls it

    def run(input_sets: Sequence[Inputs]) -> Any:
        out = None
        for i in range(calls):
            args = input_sets[i % len(input_sets)]
            if out is not None:
                # Orders the calls, and makes their inputs different values so that XLA cannot merge equal calls.
                args, out = lax.optimization_barrier((args, out))
            out = once(*args)
        return out

    return jax.jit(run)


def device_seconds(
    functions: Mapping[str, Callable[..., Any]], input_sets: Sequence[Inputs], *, chain_seconds: float = 2e-3, reps: int = 7
) -> dict[str, float]:
    """Median seconds per call of each function, all on the same inputs, the functions taking turns."""
    calls = {name: 4 for name in functions}
    chains = {name: chain(f, calls[name]) for name, f in functions.items()}
    for name, run in chains.items():
        jax.block_until_ready(run(input_sets))
        rough = min(_wall(run, input_sets) for _ in range(3)) / calls[name]
        calls[name] = min(64, max(4, round(chain_seconds / rough)))
        if calls[name] != 4:
            chains[name] = chain(functions[name], calls[name])
            jax.block_until_ready(chains[name](input_sets))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(reps):
        for name, run in chains.items():
            times[name].append(_wall(run, input_sets) / calls[name])
    return {name: statistics.median(t) for name, t in times.items()}


def _wall(run: Callable[[Sequence[Inputs]], Any], input_sets: Sequence[Inputs]) -> float:
    jax.block_until_ready(run(input_sets))  # raises the clock, and hides the first launch behind running work
    start = time.perf_counter()
    jax.block_until_ready(run(input_sets))
    return time.perf_counter() - start


def sustained(f: Callable[..., Any], input_sets: Sequence[Inputs], *, seconds: float = 1.5, calls: int = 32) -> Sustained:
    """Runs `f` for `seconds` without a pause; mean time, board power and SM clock of the last two thirds.

    Raises:
      RuntimeError: nvidia-smi gave no reading.
    """
    run = chain(f, calls)
    per_chain = _wall(run, input_sets)
    chains = max(3, round(seconds / per_chain))
    warm = max(1, chains // 3)
    _run_back_to_back(run, input_sets, warm)
    readings: list[tuple[float, float]] = []
    with _nvidia_smi(readings):
        start = time.perf_counter()
        _run_back_to_back(run, input_sets, chains - warm)
        elapsed = time.perf_counter() - start
    if not readings:
        raise RuntimeError("nvidia-smi gave no power reading during the run")
    watts, mhz = (statistics.mean(column) for column in zip(*readings, strict=True))
    return Sustained(seconds=elapsed / ((chains - warm) * calls), watts=watts, sm_mhz=mhz)


def _run_back_to_back(run: Callable[[Sequence[Inputs]], Any], input_sets: Sequence[Inputs], count: int) -> None:
    """Keeps two chains in flight: the device never idles and the host's queue stays short."""
    previous = out = None
    for _ in range(count):
        previous, out = out, run(input_sets)
        jax.block_until_ready(previous)
    jax.block_until_ready(out)


class _nvidia_smi:  # noqa: N801 (a context manager reads as a function)
    """Appends (watts, SM MHz) of the first GPU to `readings` every 50 ms inside the context."""

    def __init__(self, readings: list[tuple[float, float]]) -> None:
        self.readings = readings

    def __enter__(self) -> None:
        query = "nvidia-smi -i 0 --query-gpu=power.draw.instant,clocks.sm --format=csv,noheader,nounits -lms 50"
        self.process = subprocess.Popen(query.split(), stdout=subprocess.PIPE, text=True)
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            watts, mhz = (float(field) for field in line.split(","))
            self.readings.append((watts, mhz))

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()
        self.thread.join()


@functools.cache
def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin")
    found = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return {name: found[name] for name in names if name in found}


def table(rows: Sequence[Row]) -> str:
    """The rows for people: microseconds, the rate in both units, percent of the roofline, the baseline and energy."""
    lines = [
        f"{'kernel':16s} {'case':38s} {'SMs':>3s} {'us':>8s} {'TFLOP/s':>7s} {'TB/s':>5s} {'roof':>5s}"
        f" {'baseline':>22s} {'ratio':>5s} {'sustained':>34s}"
    ]
    for r in rows:
        rate = f"{r.flops / r.seconds / 1e12:7.0f} {r.hbm_bytes / r.seconds / 1e12:5.2f} {100 * r.roofline:4.0f}%"
        beside = f"{r.baseline:>13s} {1e6 * r.baseline_seconds:8.1f} {r.speedup:5.2f}" if r.baseline else " " * 28
        lines.append(f"{r.kernel:16s} {r.case:38s} {r.num_sms:3d} {1e6 * r.seconds:8.1f} {rate} {beside} {_energy(r)} {r.note}")
    return "\n".join(line.rstrip() for line in lines)


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
            "versions": versions(),
            **facts,
            "rows": [dataclasses.asdict(r) for r in rows],
        }
    )

"""Times single kernels and pairs on the GPUs at hand. Programs are lowered in turn and compiled side by side."""

import functools
import hashlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels
from nanoflow_jax.parallel import make_mesh
from pallas_kernels.power import PowerError, PowerMeter, driver_version, idle_watts
from pallas_kernels.programs import IN_FLIGHT, compile_side_by_side, run_back_to_back, versions
from search.measurement import Load, Program, Reading
from search.profile_table import ProfileError
from search.profiler_programs import Inputs, Workbench, repeats

SETTLE_S, MEASURE_S = 0.1, 0.15  # steady running before a measurement, in which the clock settles, and during it
REST_S, BURST_S = 0.1, 0.006
ENERGY_S = 0.3  # the energy counter moves every 20 to 100 ms
CONDITIONS = (
    f"sustained: mean of {MEASURE_S} s after {SETTLE_S} s of the same, random normal inputs, weights and pages from HBM; "
    f"burst_us: {1e3 * BURST_S:.0f} ms after {REST_S} s of rest; energy above idle of the first GPU over {ENERGY_S} s or more"
)
_KERNELS = pathlib.Path(pallas_kernels.__file__).parent


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def steady(run: Callable[[], Any], seconds: float, after_each: Callable[[], bool] = lambda: False) -> tuple[int, float]:
    """Runs of a program back to back, a few in flight, and the seconds they took; `after_each` ends it when it returns True."""
    begun = time.perf_counter()

    def more(launched: int) -> bool:
        if launched and after_each():
            return False
        return launched < IN_FLIGHT or time.perf_counter() - begun < seconds

    count = run_back_to_back(run, more)
    return count, time.perf_counter() - begun


def watts_of(run: Callable[[], Any], device: Any, label: str) -> float | None:
    """Mean power of steady running over ENERGY_S or more between steps of the GPU's energy counter.

    None where there is none after three times that, and a line on stderr says why.
    """
    with PowerMeter([device]) as meter:
        begun = time.perf_counter()
        steady(run, 3 * ENERGY_S, lambda: meter.spans(ENERGY_S, begun))
        end = time.perf_counter()
    try:
        return meter.means(begun, end)[0].watts
    except PowerError as error:
        print(f"no energy of {label}: {error}", file=sys.stderr, flush=True)
        return None


class GpuMachine:
    """The GPUs that jax sees; collectives span the first `tp`.

    Args:
      idle_w: above which energy counts, the power model's; measured where there is none.
    """

    conditions = CONDITIONS

    def __init__(self, tp: int, idle_w: float | None) -> None:
        devices = jax.devices()
        if devices[0].platform != "gpu" or len(devices) < tp:
            raise ProfileError(f"profiling needs {tp} GPU(s), jax sees {[d.platform for d in devices]}")
        if jax.__version_info__ < (0, 11):
            raise ProfileError(f"pairs of kernels need jax 0.11 or newer, this is {jax.__version__}")
        self.num_sms = int(devices[0].core_count)
        self._bench = Workbench(make_mesh(tp))
        self._inputs = Inputs(self._bench.mesh)
        self._ready: dict[Program, Any] = {}
        jax.block_until_ready(jnp.zeros(1))  # the context draws power too, so idle is measured with it
        self._first = devices[0]
        try:
            self._driver, self._idle_w = driver_version(), idle_watts(self._first) if idle_w is None else idle_w
        except PowerError as error:
            raise ProfileError(f"profiling needs the GPU's energy: {error}") from error

    def libraries(self) -> dict[str, str]:
        """Versions of jax and the driver, a digest of the kernels and their tuned tables, and NCCL's settings."""
        nccl = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")}
        return {**dict(sorted(versions().items())), "driver": self._driver, "kernels": kernels_digest(_KERNELS), **nccl}

    def compile(self, programs: Sequence[Program]) -> dict[Program, str]:
        """Makes programs ready; returns what went wrong with those that are not."""
        missing = [p for p in dict.fromkeys(programs) if p not in self._ready]
        ready, errors = compile_side_by_side({p: functools.partial(self._lower, p) for p in missing})
        self._ready |= ready
        return {p: describe(error) for p, error in errors.items()}

    def _lower(self, program: Program) -> jax.stages.Lowered:
        return self._bench.trace(program).lower()

    def time(self, program: Program, load: Load, *, burst: bool = False, energy: bool = False) -> Reading:
        """Sustained microseconds of one call (of a pair: one phase); `burst` and `energy` take some tenths of a second more."""
        compiled, arguments = self._ready[program], self._inputs.arguments(program, load)
        calls = repeats(program)

        def run() -> Any:
            return compiled(*arguments)

        jax.block_until_ready(run())
        burst_us = None
        if burst:
            time.sleep(REST_S)
            count, seconds = steady(run, BURST_S)
            burst_us = 1e6 * seconds / (count * calls)
        steady(run, SETTLE_S)
        count, seconds = steady(run, MEASURE_S)
        per_call = seconds / (count * calls)
        joules = None
        if energy:
            watts = watts_of(run, self._first, str(program))
            joules = None if watts is None else max(watts - self._idle_w, 0.0) * per_call
        return Reading(time_us=1e6 * per_call, burst_us=burst_us, energy_j=joules)


def kernels_digest(package: pathlib.Path) -> str:
    """Of the kernels' sources and tuned tables in the folder `package`: times of other kernels do not compare."""
    digest = hashlib.sha256()
    for path in sorted([*package.glob("*.py"), *package.glob("tunings/*.json")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]

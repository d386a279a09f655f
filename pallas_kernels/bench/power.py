"""Energy of the GPU from NVML's counter, which adds up millijoules since the driver was loaded, and the clock of its SMs.

The counter moves in steps of some 20 to 100 ms, so the power over a run is taken between two of its steps, not between the
run's ends. Readings are taken by a thread beside the run; NVML is the driver's own library.
"""

import ctypes
import statistics
import threading
import time
from typing import Any, Self

import jax

_SM_CLOCK = 1  # NVML_CLOCK_SM
_PERIOD = 4e-3


class PowerError(RuntimeError):
    """NVML is not here or gives no reading of energy."""


class Readings:
    """Reads the first GPU's energy and SM clock every few milliseconds inside the context."""

    def __init__(self) -> None:
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise PowerError(f"no NVML, so no energy: {error}") from error
        self._call("nvmlInit_v2")
        self._gpu = ctypes.c_void_p()
        index = ctypes.c_uint(getattr(jax.devices()[0], "local_hardware_id", None) or 0)
        self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(self._gpu))
        self._steps: list[tuple[float, float]] = []  # (seconds, joules) where the counter moved
        self._clocks: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._nvml, name)(*arguments):
            raise PowerError(f"{name} failed with NVML error {code}")

    def __enter__(self) -> Self:
        self._joules()  # an error belongs to the caller, not to the thread
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._gpu, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def _read(self) -> None:
        mhz = ctypes.c_uint()
        last = self._joules()
        while not self._stop.wait(_PERIOD):
            joules, now = self._joules(), time.monotonic()
            if joules != last:
                self._steps.append((now, joules))
                last = joules
                self._call("nvmlDeviceGetClockInfo", self._gpu, _SM_CLOCK, ctypes.byref(mhz))
                self._clocks.append((now, mhz.value))

    def means(self, start: float, end: float) -> tuple[float, float]:
        """Watts and SM MHz between two moments of `time.monotonic`.

        Raises:
          PowerError: the counter moved less than twice between them.
        """
        return mean_power([s for s in self._steps if start <= s[0] <= end]), statistics.mean(
            mhz for now, mhz in self._clocks if start <= now <= end
        )


def mean_power(steps: list[tuple[float, float]]) -> float:
    """Watts between the first and the last of some (seconds, joules).

    Raises:
      PowerError: there are fewer than two.
    """
    if len(steps) < 2:
        raise PowerError(f"the energy counter moved {len(steps)} times during the run, too few for a mean")
    (first, before), (last, after) = steps[0], steps[-1]
    return (after - before) / (last - first)


def idle_watts(seconds: float = 1.5) -> float:
    """Mean power of the GPU while this process leaves it alone.

    Raises:
      PowerError: as `Readings`.
    """
    with Readings() as readings:
        time.sleep(0.3)
        start = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
    return readings.means(start, end)[0]

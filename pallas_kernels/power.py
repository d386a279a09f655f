"""Power of GPUs from NVML's energy counters, which add up millijoules since the driver was loaded, and the clocks of their SMs.

A counter moves in steps of some 20 to 100 ms: read at the ends of a run of 0.3 s, it may be wrong by a third. So power is
taken between the first and the last step that fall into the run, whose moments are known to a few milliseconds. A thread
beside the run reads the counters.
"""

import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from pallas_kernels.cuda_driver import CudaDriverError, pci_bus_id

_PERIOD_S = 2e-3
_SM_CLOCK = 1  # NVML_CLOCK_SM


class PowerError(RuntimeError):
    """NVML is not here, or its counter of a GPU gives no power."""


class Step(NamedTuple):
    """A move of a counter: the moment by `time.perf_counter`, the joules that it moved to, and the SM clock then."""

    seconds: float
    joules: float
    sm_mhz: int


class Mean(NamedTuple):
    """Over the time between two steps of a GPU's counter."""

    watts: float
    sm_mhz: float


class PowerMeter:
    """Reads the counters of jax's GPUs `devices` every few milliseconds inside the context; without devices it needs no NVML.

    What NVML refuses is raised by `means`, not by the context: a run keeps its time where it has no power.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self._devices = devices
        self._handles: list[Any] = []
        self._steps: list[list[Step]] = [[] for _ in devices]
        self._error: PowerError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="power meter")

    def __enter__(self) -> Self:
        try:  # here, not in the thread: the first import of NVML's binding would disturb the run
            self._handles = [_handle(device) for device in self._devices]
        except PowerError as error:
            self._error = error
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def spans(self, seconds: float, since: float) -> bool:
        """Whether every counter has two steps after `since` (by `time.perf_counter`) that lie `seconds` or more apart.

        Never so for a counter that stands still or is not there: who waits for this needs a limit.
        """
        return all(
            (after := [s.seconds for s in steps if s.seconds >= since]) and after[-1] - after[0] >= seconds
            for steps in self._steps
        )

    def means(self, start: float, end: float) -> list[Mean]:
        """Of each GPU between two moments by `time.perf_counter`.

        Raises:
          PowerError: NVML is missing or failed, or a counter moved less than twice between them.
        """
        if self._error is not None:
            raise self._error
        return [mean_power([s for s in steps if start <= s.seconds <= end]) for steps in self._steps]

    def _read(self) -> None:
        try:
            last = [_joules(handle) for handle in self._handles]
            while not self._stop.wait(_PERIOD_S):
                for i, handle in enumerate(self._handles):
                    now, joules = time.perf_counter(), _joules(handle)
                    if joules != last[i]:
                        self._steps[i].append(Step(now, joules, _nvml("nvmlDeviceGetClockInfo", handle, _SM_CLOCK)))
                        last[i] = joules
        except PowerError as error:
            self._error = error


def mean_power(steps: Sequence[Step]) -> Mean:
    """Between the first and the last step of a counter.

    Raises:
      PowerError: there are fewer than two.
    """
    if len(steps) < 2:
        raise PowerError(f"the energy counter moved {len(steps)} times during the run, too few for a mean")
    first, last = steps[0], steps[-1]
    watts = (last.joules - first.joules) / (last.seconds - first.seconds)
    return Mean(watts, statistics.mean(step.sm_mhz for step in steps))


def idle_watts(device: Any, *, rest: float = 1.0, seconds: float = 1.5) -> float:
    """Mean power of a GPU of jax over `seconds` after a `rest`, in which this process leaves it alone.

    Raises:
      PowerError: as `PowerMeter.means`.
    """
    with PowerMeter([device]) as meter:
        time.sleep(rest)
        start = time.perf_counter()
        time.sleep(seconds)
        end = time.perf_counter()
    return meter.means(start, end)[0].watts


def driver_version() -> str:
    """Of the GPU's driver.

    Raises:
      PowerError: NVML is missing or failed.
    """
    _nvml("nvmlInit")
    return _nvml("nvmlSystemGetDriverVersion")


def _handle(device: Any) -> Any:
    if device.platform != "gpu":
        raise PowerError(f"NVML knows no power of {device}, which is no GPU")
    _nvml("nvmlInit")
    try:  # NVML counts all GPUs of the machine, CUDA those that the process sees
        bus_id = pci_bus_id(device)
    except CudaDriverError as error:
        raise PowerError(f"NVML is not asked, as it is not known which GPU {device} is: {error}") from error
    return _nvml("nvmlDeviceGetHandleByPciBusId", bus_id)


def _joules(handle: Any) -> float:
    return _nvml("nvmlDeviceGetTotalEnergyConsumption", handle) / 1e3


def _nvml(name: str, *arguments: Any) -> Any:
    """What the function `name` of NVML returns.

    Raises:
      PowerError: NVML or its binding is missing, or the function failed.
    """
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  # nvidia-ml-py, of the extras cuda12 and cuda13
    except ImportError as error:
        raise PowerError("no power without the package nvidia-ml-py, which the extras cuda12 and cuda13 install") from error
    try:
        return getattr(pynvml, name)(*arguments)
    except pynvml.NVMLError as error:
        raise PowerError(f"{name}: {error}") from error

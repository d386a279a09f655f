"""Power between the steps of energy counters, on a pretended NVML whose clock moves with its reads: no real time decides."""

import bisect
import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import power
from pallas_kernels.cuda_driver import CudaDriverError
from pallas_kernels.power import Mean, PowerError, PowerMeter, Step

IDLE_W = 100.0
GPUS: Any = [SimpleNamespace(platform="gpu", local_hardware_id=i) for i in range(2)]


class Pretended:
    """NVML of a GPU per entry of `watts`, drawn while `busy`, IDLE_W else; counters move after each of `step_s` in turn."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM = 1

    def __init__(self, watts: list[float], step_s: list[float], read_s: list[float], busy: tuple[float, float]) -> None:
        self.now, self._busy, self._watts = 0.0, busy, watts
        self._moves = list(itertools.accumulate(itertools.islice(itertools.cycle(step_s), 1000)))
        self._read_s = itertools.cycle(read_s)
        self.initialised = False

    def nvmlInit(self) -> None:  # noqa: N802
        self.initialised = True

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        assert self.initialised
        return "580.1"

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> int:  # noqa: N802
        assert self.initialised
        return int(bus_id.removeprefix("bus "))

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        self.now += next(self._read_s)
        past = bisect.bisect(self._moves, self.now)
        moved = self._moves[past - 1] if past else 0.0
        begun, end = self._busy
        busy = min(max(moved - begun, 0.0), end - begun)
        return round(1e3 * (IDLE_W * (moved - busy) + self._watts[handle] * busy)) + 10**9 * handle

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        assert kind == self.NVML_CLOCK_SM
        return 1500 + handle

    def wait(self, until: Callable[[], bool]) -> None:
        limit = time.monotonic() + 60
        while not until():
            assert time.monotonic() < limit, "the meter does not read"
            time.sleep(1e-4)

    def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        self.wait(lambda: self.now >= end)


@contextlib.contextmanager
def installed(nvml: Any) -> Iterator[None]:
    """`nvml` is what the meter imports, its clock the meter's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", nvml)
        patch.setattr(power, "_PERIOD_S", 0.0)
        patch.setattr(power, "pci_bus_id", lambda gpu: f"bus {gpu.local_hardware_id}")
        if nvml is not None:
            patch.setattr(power, "time", SimpleNamespace(perf_counter=lambda: nvml.now, sleep=nvml.sleep))
        yield


@given(
    watts=st.lists(st.floats(150, 700), min_size=1, max_size=2),
    step_s=st.lists(st.floats(0.02, 0.1), min_size=1, max_size=5),
    read_s=st.lists(st.floats(1e-4, 2e-3), min_size=1, max_size=3),
    begun=st.floats(0.0, 0.3),
    length=st.floats(0.5, 1.0),
)
def test_power_of_a_window_however_the_counter_steps(watts, step_s, read_s, begun, length) -> None:
    """What was drawn before and after the window enters the counter inside it, or would, were it read at the ends."""
    end = begun + length
    nvml = Pretended(watts, step_s, read_s, (begun, end))
    with installed(nvml), PowerMeter(GPUS[: len(watts)]) as meter:
        nvml.wait(lambda: nvml.now > end + 0.2)
    means = meter.means(begun, end)
    assert [mean.watts for mean in means] == pytest.approx(watts, rel=0.03)
    assert [mean.sm_mhz for mean in means] == [1500 + i for i in range(len(watts))]


def test_a_window_may_end_when_the_steps_in_it_span_enough() -> None:
    nvml = Pretended([600.0, 300.0], [0.07], [1e-3], (0.0, 60.0))
    with installed(nvml), PowerMeter(GPUS) as meter:
        assert not meter.spans(0.3, since=1e6)
        nvml.wait(lambda: meter.spans(0.3, since=0.5))
        end = nvml.now
    assert end > 0.8
    last = min(steps[-1].seconds for steps in meter._steps)  # the meter may have read on until it was left
    assert not meter.spans(0.3, since=last - 0.29)
    assert [mean.watts for mean in meter.means(0.5, end)] == pytest.approx([600, 300], rel=0.02)


def test_a_counter_that_stands_still_is_said_and_holds_nothing_up() -> None:
    nvml = Pretended([600.0], [1e9], [1e-3], (0.0, 60.0))
    with installed(nvml), PowerMeter(GPUS[:1]) as meter:
        nvml.wait(lambda: nvml.now > 1.0)
        assert not meter.spans(0.0, since=0.0)
    with pytest.raises(PowerError, match="moved 0 times"):
        meter.means(0.0, 1.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "power meter"]


def test_idle_power_and_driver() -> None:
    nvml = Pretended([600.0], [0.03, 0.1], [1e-3], (0.0, 0.9))
    with installed(nvml):
        assert power.driver_version() == "580.1"
        assert power.idle_watts(GPUS[0]) == pytest.approx(IDLE_W, rel=0.02)
    assert nvml.now > 2.5


def test_a_window_without_two_steps_has_no_power() -> None:
    steps = [Step(1.0, 500.0, 1400), Step(1.1, 560.0, 1500), Step(1.5, 800.0, 1600)]
    assert power.mean_power(steps) == Mean(pytest.approx(600.0), 1500)
    for few in range(2):
        with pytest.raises(PowerError, match=f"moved {few} times"):
            power.mean_power(steps[:few])


def test_of_no_devices_nothing_is_read() -> None:
    with installed(None), PowerMeter([]) as meter:
        pass
    assert meter.means(0.0, 1.0) == []


def refusing(name: str, after: int = 0) -> Pretended:
    """NVML whose function `name` fails from its call number `after` on."""
    nvml = Pretended([600.0], [0.05], [1e-3], (0.0, 60.0))
    works, calls = getattr(nvml, name), itertools.count()

    def fail(*arguments: Any) -> Any:
        if next(calls) >= after:
            raise nvml.NVMLError("Not Supported")
        return works(*arguments)

    setattr(nvml, name, fail)
    return nvml


def test_a_gpu_that_cannot_be_told_from_others_has_no_power() -> None:
    def lost(_: Any) -> str:
        raise CudaDriverError("no CUDA driver: x")

    with installed(Pretended([600.0], [0.05], [1e-3], (0.0, 60.0))), pytest.MonkeyPatch.context() as patch:
        patch.setattr(power, "pci_bus_id", lost)
        with PowerMeter(GPUS[:1]) as meter:
            pass
    with pytest.raises(PowerError, match=r"not known which GPU .* is: no CUDA driver: x"):
        meter.means(0.0, 1.0)


@pytest.mark.parametrize(
    ("nvml", "gpu", "message"),
    [
        (None, GPUS[0], "without the package nvidia-ml-py"),
        (refusing("nvmlInit"), GPUS[0], "nvmlInit: Not Supported"),
        (refusing("nvmlDeviceGetTotalEnergyConsumption"), GPUS[0], "nvmlDeviceGetTotalEnergyConsumption: Not Supported"),
        (refusing("nvmlDeviceGetTotalEnergyConsumption", 300), GPUS[0], "nvmlDeviceGetTotalEnergyConsumption: Not Supported"),
        (refusing("nvmlDeviceGetClockInfo", 2), GPUS[0], "nvmlDeviceGetClockInfo: Not Supported"),
        (refusing("nvmlInit"), SimpleNamespace(platform="cpu"), "no power of .*, which is no GPU"),
    ],
    ids=["no binding", "no NVML", "no counter", "counter lost", "no clock", "CPU"],
)
def test_what_is_missing_is_told_after_the_run(nvml: Any, gpu: Any, message: str) -> None:
    ran = False
    with installed(nvml), PowerMeter([gpu]) as meter:
        ran = True
        if nvml is not None and meter._thread.ident is not None:
            meter._thread.join(60)
    assert ran
    with pytest.raises(PowerError, match=message):
        meter.means(0.0, 0.25)

"""Energy of a GPU by NVML's counter, which moves in steps of some 20 to 100 ms: power is taken between two of its steps."""

import time
from collections.abc import Callable


class EnergyCounter:
    """Joules of GPU number `index`, and its watts at rest."""

    def __init__(self, index: int) -> None:
        import pynvml  # pyright: ignore[reportMissingImports]  # of the cuda extras

        pynvml.nvmlInit()
        self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)
        driver = pynvml.nvmlSystemGetDriverVersion()
        self.driver = driver.decode() if isinstance(driver, bytes) else driver
        time.sleep(1.0)
        joules, begun = self._joules(), time.perf_counter()
        time.sleep(1.5)
        self.idle_w = (self._joules() - joules) / (time.perf_counter() - begun)

    def _joules(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3

    def watts(self, work: Callable[[float, Callable[[], bool]], object], seconds: float) -> float | None:
        """Mean power while `work(at most so many seconds, enough)` runs, over `seconds` or more between steps of the counter.

        `work` calls `enough` often and ends when it returns True. None if the counter moves less than twice in three times that
        time.
        """
        return mean_watts(self._joules, work, seconds)


def mean_watts(
    joules: Callable[[], float], work: Callable[[float, Callable[[], bool]], object], seconds: float
) -> float | None:  # fmt: skip
    """`EnergyCounter.watts` by any counter."""
    last = joules()
    steps: list[tuple[float, float]] = []

    def enough() -> bool:
        nonlocal last
        now, total = time.perf_counter(), joules()
        if total != last:
            steps.append((now, total))
            last = total
        return len(steps) > 1 and steps[-1][0] - steps[0][0] >= seconds

    work(3 * seconds, enough)
    if len(steps) < 2:
        return None
    (first, before), (end, after) = steps[0], steps[-1]
    return (after - before) / (end - first)

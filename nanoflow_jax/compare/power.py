"""What GPUs draw, by NVML's energy counters."""

import time
from collections.abc import Sequence
from typing import Any


class PowerMeter:
    """Mean watts of each GPU over a with-block; `watts` is empty where there are no GPUs."""

    def __init__(self, devices: Sequence[Any]):
        self.watts: list[float] = []
        self._handles: list[Any] = []
        if devices[0].platform == "gpu":
            import pynvml  # pyright: ignore[reportMissingImports]

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(device.local_hardware_id) for device in devices]

    def __enter__(self) -> "PowerMeter":
        self._before, self._begun = self._joules(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._begun
        self.watts = [(now - before) / seconds for now, before in zip(self._joules(), self._before, strict=True)]

    def _joules(self) -> list[float]:
        return [self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3 for handle in self._handles]

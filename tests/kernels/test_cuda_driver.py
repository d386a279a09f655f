"""Questions to the CUDA driver, answered by one that is made up: four GPUs, of which two pairs have NVLink."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from pallas_kernels import cuda_driver
from pallas_kernels.cuda_driver import CudaDriverError, pci_bus_id, signal_each_other

INVALID_DEVICE = 101


def gpus(*numbers: int) -> list[Any]:
    return [SimpleNamespace(platform="gpu", local_hardware_id=number) for number in numbers]


class Pretended:
    """Handles are not the numbers, so that one cannot stand for the other."""

    def __init__(self, atomic: set[frozenset[int]], accessible: set[frozenset[int]]) -> None:
        self._answers = {2: accessible, 3: atomic}

    def cuDeviceGet(self, handle: Any, number: int) -> int:  # noqa: N802
        handle._obj.value = 10 + number
        return 0 if 0 <= number < 4 else INVALID_DEVICE

    def cuDeviceGetPCIBusId(self, text: Any, size: int, handle: int) -> int:  # noqa: N802
        text.value = f"0000:{handle:02X}:00.0".encode()
        return 0 if ctypes.sizeof(text) == size else 1

    def cuDeviceGetP2PAttribute(self, value: Any, attribute: int, source: int, target: int) -> int:  # noqa: N802
        value._obj.value = frozenset({source - 10, target - 10}) in self._answers[attribute]
        return 0 if source != target else INVALID_DEVICE


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    linked = {frozenset({0, 1}), frozenset({2, 3})}
    behind_one_switch = linked | {frozenset({1, 2})}
    monkeypatch.setattr(cuda_driver, "_driver", lambda: Pretended(linked, behind_one_switch))


@pytest.mark.parametrize(
    ("numbers", "reach"),
    [((0,), True), ((0, 1), True), ((3, 2), True), ((0, 2), False), ((1, 2), False), ((0, 1, 2, 3), False)],
)
def test_gpus_signal_each_other_where_every_pair_has_access_and_atomics(
    driver: None, numbers: tuple[int, ...], reach: bool
) -> None:
    assert signal_each_other(gpus(*numbers)) == reach


def test_a_device_is_where_the_driver_says(driver: None) -> None:
    assert pci_bus_id(gpus(3)[0]) == "0000:0D:00.0"


def test_what_the_driver_refuses_is_said(driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CudaDriverError, match="cuDeviceGet: CUDA error 101"):
        pci_bus_id(gpus(7)[0])
    monkeypatch.undo()
    monkeypatch.setattr(cuda_driver, "_LIBRARY", "no-such-library.so")
    cuda_driver._driver.cache_clear()
    with pytest.raises(CudaDriverError, match=r"no CUDA driver: no-such-library\.so"):
        pci_bus_id(gpus(0)[0])

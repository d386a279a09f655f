"""What the CUDA driver knows of jax's GPUs: where one is, and whether kernels may signal in the memory of another.

A device of jax has the number that CUDA gives it in this process, whatever devices are visible.
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import Any

_LIBRARY = "libcuda.so.1"
_BUS_ID_BYTES = 32
# CUdevice_P2PAttribute
_ACCESS_SUPPORTED, _NATIVE_ATOMIC_SUPPORTED = 2, 3


class CudaDriverError(OSError):
    """The driver is not here, or refused a question."""


def pci_bus_id(device: Any) -> str:
    """Of a GPU of jax, such as 0000:3B:00.0.

    Raises:
      CudaDriverError: the driver is missing or failed.
    """
    text = ctypes.create_string_buffer(_BUS_ID_BYTES)
    _ask("cuDeviceGetPCIBusId", text, _BUS_ID_BYTES, _number(device))
    return text.value.decode()


def signal_each_other(devices: Sequence[Any]) -> bool:
    """Whether kernels of each of jax's GPUs `devices` may access all others' memory, atomically: over NVLink, not over PCIe.

    Raises:
      CudaDriverError: the driver is missing or failed.
    """
    numbers = [_number(device) for device in devices]
    return all(
        _peer_attribute(attribute, source, target)
        for source, target in itertools.permutations(numbers, 2)
        for attribute in (_ACCESS_SUPPORTED, _NATIVE_ATOMIC_SUPPORTED)
    )


def _peer_attribute(attribute: int, source: int, target: int) -> bool:
    value = ctypes.c_int()
    _ask("cuDeviceGetP2PAttribute", ctypes.byref(value), attribute, source, target)
    return bool(value.value)


def _number(device: Any) -> int:
    """The driver's handle of a device."""
    handle = ctypes.c_int()
    _ask("cuDeviceGet", ctypes.byref(handle), device.local_hardware_id)
    return handle.value


def _ask(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise CudaDriverError(f"{name}: CUDA error {status}")


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise CudaDriverError(f"no CUDA driver: {error}") from error
    if status := driver.cuInit(0):
        raise CudaDriverError(f"cuInit: CUDA error {status}")
    return driver

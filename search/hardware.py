"""Accelerators: datasheet figures with their sources, and what was measured on them."""

import functools
from importlib import resources

import msgspec


class HardwareError(ValueError):
    """An unknown device."""


class PowerModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Watts a device draws: idle plus energy per FLOP and per byte of device memory, up to the cap."""

    cap_w: float
    idle_w: float
    pj_per_flop: float
    pj_per_byte: float
    pj_per_attention_byte: float

    def energy_j(self, flops: float, bytes_moved: float, *, attention: bool) -> float:
        """Joules above idle of an operation; decode attention costs more per byte than a bare stream."""
        per_byte = self.pj_per_attention_byte if attention else self.pj_per_byte
        return 1e-12 * (self.pj_per_flop * flops + per_byte * bytes_moved)


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One device, rates per second, dense 16-bit FLOPs, network in one direction.

    `gemm_flops` is a measured rate of large GEMMs and None where we know none. `streaming_bandwidth` and `attention_bandwidth`
    are measured bytes per second of a bare read and of decode attention, `attention_sms` the SMs that reach it.
    """

    name: str
    memory_bytes: float
    memory_bandwidth: float
    peak_flops: float
    network_bandwidth: float
    num_sms: int
    source: str
    gemm_flops: float | None = None
    gemm_source: str | None = None
    streaming_bandwidth: float | None = None
    attention_bandwidth: float | None = None
    attention_sms: int | None = None
    power: PowerModel | None = None

    @property
    def flops_per_byte(self) -> float:
        """Compute / MemBW, the paper's Table 1."""
        return self.peak_flops / self.memory_bandwidth


class _Devices(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    format_version: int
    devices: tuple[Hardware, ...]


@functools.cache
def devices() -> dict[str, Hardware]:
    """All known devices by name."""
    text = resources.files("search").joinpath("data/hardware.json").read_bytes()
    return {d.name: d for d in msgspec.json.decode(text, type=_Devices).devices}


def hardware(name: str) -> Hardware:
    """The device called `name`.

    Raises:
      HardwareError: no such device; the message lists those there are.
    """
    known = devices()
    if name not in known:
        raise HardwareError(f"unknown hardware {name!r}; known: {', '.join(sorted(known))}")
    return known[name]

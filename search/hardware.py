"""Accelerators: datasheet figures with their sources, and what was measured on them."""

import functools
from importlib import resources

import msgspec


class HardwareError(ValueError):
    """An unknown device."""


class PowerModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Watts a device draws: idle plus energy per FLOP of a GEMM (its memory traffic included) and per byte, up to the cap.

    Decode attention costs more per byte than a bare stream. The cap holds on average over a layer, not at every instant.
    """

    cap_w: float
    idle_w: float
    pj_per_flop: float
    pj_per_byte: float
    pj_per_attention_byte: float
    source: str

    def least_time_us(self, energy_j: float) -> float:
        """The shortest time in which `energy_j` above idle can be spent under the cap."""
        return 1e6 * energy_j / (self.cap_w - self.idle_w)


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One device, rates per second, dense 16-bit FLOPs, network in one direction.

    `gemm_flops` is a measured rate of large GEMMs and None where we know none. `streaming_bandwidth` and `attention_bandwidth`
    are measured bytes per second of a bare read and of decode attention, `attention_sms` the SMs that reach it.
    `network_efficiency` and `network_latency_us` describe collectives (measured on H200, assumed elsewhere). `interference`
    names the shipped map that analytic profiles use; elsewhere than on A100 and H200 it is the A100's, for want of a better.
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
    network_efficiency: float = 0.7
    network_latency_us: float = 20.0
    interference: str
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

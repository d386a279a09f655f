"""Tile configurations of the GEMMs: tuned ones by device and shape from `tunings/*.json`, and a rule for all other shapes."""

import functools
import json
from importlib import resources
from typing import Any

from pallas_kernels import _gemm_cost
from pallas_kernels._gemm_config import GemmConfig

TABLES = {"NVIDIA H200": "h200.json"}
"""Tuned tables by device kind."""


def gemm_config(device_kind: str, m: int, n: int, k: int, *, swiglu: bool, num_sms: int) -> GemmConfig:
    """The configuration tuned for this N, K and number of SMs and the nearest M that is no smaller, else the largest.

    For other shapes and numbers of SMs the one that should be fastest by `_gemm_cost`. That one has no clusters: with other
    kernels on the remaining SMs, the free ones need not lie together in the groups that clusters want, and a cluster that finds
    no place runs after all the others.
    """
    return _tuned("gemm", device_kind, m, n, k, swiglu, num_sms) or _gemm_cost.fastest(m, n, k, swiglu=swiglu, num_sms=num_sms)


def grouped_gemm_config(device_kind: str, m: int, n: int, k: int, *, experts: int, swiglu: bool, num_sms: int) -> GemmConfig:
    """As `gemm_config` among those tuned for grouped products, on any number of SMs; else a rule for the mean group."""
    return _tuned("grouped_gemm", device_kind, m, n, k, swiglu, None) or _grouped_rule(max(1, m // experts), swiglu=swiglu)


def _grouped_rule(rows: int, *, swiglu: bool) -> GemmConfig:
    """A tile as high as the group, up to 256 rows (128 with two products), 128 columns wide."""
    if rows <= 128:
        return GemmConfig(tile_m=64, tile_n=128, split="n")
    if rows <= 1024 or swiglu:
        return GemmConfig(tile_m=128, tile_n=128)
    return GemmConfig(tile_m=256, tile_n=128)


def _tuned(kernel: str, device_kind: str, m: int, n: int, k: int, swiglu: bool, num_sms: int | None) -> GemmConfig | None:
    shape = (n, k, swiglu)
    entries = [
        e
        for e in load(device_kind).get(kernel, ())
        if (e["n"], e["k"], e["swiglu"]) == shape and num_sms in (None, e["num_sms"])
    ]
    if not entries:
        return None
    nearest = min(entries, key=lambda e: (e["m"] < m, abs(e["m"] - m)))
    return GemmConfig(**nearest["config"])


@functools.cache
def load(device_kind: str) -> dict[str, Any]:
    """The tuned table of a device: for each kernel entries {m, n, k, swiglu, num_sms, config} and times; {} without one."""
    if device_kind not in TABLES:
        return {}
    return json.loads(resources.files("pallas_kernels").joinpath("tunings", TABLES[device_kind]).read_text())

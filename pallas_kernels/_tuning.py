"""Tile configurations of the GEMMs: tuned ones by device and shape from `tunings/*.json`, and a rule for all other shapes."""

import functools
import json
from importlib import resources
from typing import Any

from pallas_kernels import _gemm_cost
from pallas_kernels._gemm_config import GemmConfig

TABLES = {"NVIDIA H200": "h200.json"}
"""Tuned tables by device kind."""
# A configuration that timing has chosen somewhere is preferred to one by arithmetic unless that says so much more.
_TRUSTED = 1.02
_TUNED_RESULT_BYTES = 2  # what `TABLES` holds was timed with bfloat16 results


@functools.cache
def gemm_config(
    device_kind: str,
    m: int,
    n: int,
    k: int,
    *,
    swiglu: bool,
    num_sms: int,
    beside: bool = False,
    result_bytes: int = _TUNED_RESULT_BYTES,
) -> GemmConfig:
    """The configuration tuned for this shape and number of SMs; else the one that should be fastest by `_gemm_cost`.

    That is chosen among those tuned for other M of the shape and all without clusters: with other kernels on the remaining SMs,
    the free ones need not lie together in the groups that clusters want, and a cluster that finds no place runs after all the
    others. A configuration tuned for the next M will not do unseen: what fills waves there may leave half of one empty here.

    Args:
      beside: something else runs on the device's other SMs.
      result_bytes: of one element of the result.
    """
    entries = _entries("gemm", device_kind, n, k, swiglu, num_sms) if result_bytes == _TUNED_RESULT_BYTES else []
    tuned = {e["m"]: GemmConfig(**e["config"]) for e in entries}
    if m in tuned:
        return tuned[m]
    given = {"m": m, "n": n, "k": k, "swiglu": swiglu, "num_sms": num_sms, "beside": beside, "result_bytes": result_bytes}
    seconds = functools.partial(_gemm_cost.predicted_seconds, **given)
    untuned = _gemm_cost.fastest(**given)
    best = min(tuned.values(), key=seconds, default=untuned)
    return best if seconds(best) < _TRUSTED * seconds(untuned) else untuned


def grouped_gemm_config(device_kind: str, m: int, n: int, k: int, *, experts: int, swiglu: bool, num_sms: int) -> GemmConfig:
    """Of those tuned for the grouped product of this N and K, on any number of SMs, the one for the nearest M that is no
    smaller, else for the largest; without any a rule for the mean group."""
    entries = _entries("grouped_gemm", device_kind, n, k, swiglu, None)
    if not entries:
        return _grouped_rule(max(1, m // experts), swiglu=swiglu)
    return GemmConfig(**min(entries, key=lambda e: (e["m"] < m, abs(e["m"] - m)))["config"])


def _grouped_rule(rows: int, *, swiglu: bool) -> GemmConfig:
    """A tile as high as the group, up to 256 rows (128 with two products), 128 columns wide."""
    if rows <= 128:
        return GemmConfig(tile_m=64, tile_n=128, split="n")
    if rows <= 1024 or swiglu:
        return GemmConfig(tile_m=128, tile_n=128)
    return GemmConfig(tile_m=256, tile_n=128)


def _entries(kernel: str, device_kind: str, n: int, k: int, swiglu: bool, num_sms: int | None) -> list[dict[str, Any]]:
    """The device's table for one shape and, unless it is None, one number of SMs."""
    shape = (n, k, swiglu)
    table = load(device_kind).get(kernel, ())
    return [e for e in table if (e["n"], e["k"], e["swiglu"]) == shape and num_sms in (None, e["num_sms"])]


@functools.cache
def load(device_kind: str) -> dict[str, Any]:
    """The tuned table of a device: for each kernel entries {m, n, k, swiglu, num_sms, config} and times; {} without one."""
    if device_kind not in TABLES:
        return {}
    return json.loads(resources.files("pallas_kernels").joinpath("tunings", TABLES[device_kind]).read_text())

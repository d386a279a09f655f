"""Tile configurations of the GEMMs: tuned ones by device and shape from `tunings/*.json`, and one rule for all other shapes."""

import dataclasses
import functools
import json
from collections.abc import Callable
from importlib import resources
from typing import Any, Literal

from pallas_kernels import _mosaic

TABLES = {"NVIDIA H200": "h200.json"}
"""Tuned tables by device kind."""

_STAGING_BYTES = 2 * 2 * 64 * 64 * 2  # see gemm: two output blocks per consumer warpgroup
_RESERVED_BYTES = 2048  # barriers and the bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """How a GEMM is cut. `tile_n` counts columns of the result; with SwiGLU a tile loads as many gate and as many up columns.

    With a `cluster` along m of two, CTAs whose tiles lie above each other take steps together, and each loads half of B's
    columns for both. CTAs of a `cluster` along k share a tile: each multiplies an equal part of the steps and adds up a part of
    the tile; nothing else is cut then. `split` says along which side of the tile the `consumers` (warpgroups that multiply) share it, `group_rows` how many
    rows high the columns of tiles are that CTAs walk together. With `stream_k`, the tiles that do not fill a wave and
    `shared_waves` waves more are cut along K when that saves over `fixup_steps` steps (of `tile_k`) of the slowest CTA; pieces
    have at least `min_steps` steps.
    """

    tile_m: int
    tile_n: int
    tile_k: int = 64
    cluster: int = 1
    cluster_along: Literal["m", "k"] = "m"
    consumers: int = 2
    split: Literal["m", "n"] = "m"
    group_rows: int = 2048
    stream_k: bool = True
    shared_waves: int = 1
    fixup_steps: int = 8
    min_steps: int = 2

    def __post_init__(self) -> None:
        if self.wg_m % 64 or self.wg_n % 64:
            raise ValueError(f"{self}: a consumer's {self.wg_m} x {self.wg_n} is not made of 64 x 64 blocks")
        if self.cluster == 1 and self.cluster_along == "k":
            raise ValueError(f"{self}: a single CTA shares nothing along k")

    @property
    def segment_m(self) -> int:
        """Rows of the result that the CTAs of a cluster make together."""
        return self.tile_m * (self.cluster if self.cluster_along == "m" else 1)

    @property
    def group_m(self) -> int:
        return max(1, self.group_rows // self.segment_m)

    @property
    def wg_m(self) -> int:
        return self.tile_m // self.consumers if self.split == "m" else self.tile_m

    @property
    def wg_n(self) -> int:
        return self.tile_n // self.consumers if self.split == "n" else self.tile_n

    def stages(self, swiglu: bool) -> int:
        """As many stages of A and B as fit into shared memory.

        Raises:
          ValueError: not even two fit.
        """
        stage = (self.tile_m + self.tile_n * (2 if swiglu else 1)) * self.tile_k * 2
        stages = min(16, (_mosaic.SMEM_LIMIT_BYTES - _STAGING_BYTES - _RESERVED_BYTES) // stage)
        if stages < 2:
            raise ValueError(f"{self}: two stages of {stage} bytes do not fit into shared memory")
        return stages


def gemm_config(device_kind: str, m: int, n: int, k: int, *, swiglu: bool, num_sms: int) -> GemmConfig:
    """The configuration tuned for this N and K, the nearest M that is no smaller (else the largest) and, of these, the nearest
    number of SMs; else the rule's.

    Clusters count only for the number of SMs they were tuned for: on fewer, with other kernels on the rest, the free SMs need
    not lie together in the groups that clusters want, and one that finds no place runs after all the others.
    """

    def usable(entry: dict[str, Any]) -> bool:
        return entry["num_sms"] == num_sms or GemmConfig(**entry["config"]).cluster == 1

    return _tuned("gemm", device_kind, m, n, k, swiglu, num_sms, usable) or default_config(m, swiglu=swiglu)


def grouped_gemm_config(device_kind: str, m: int, n: int, k: int, *, experts: int, swiglu: bool, num_sms: int) -> GemmConfig:
    """As `gemm_config` among those tuned for grouped products; the rule looks at the mean group."""
    tuned = _tuned("grouped_gemm", device_kind, m, n, k, swiglu, num_sms, lambda entry: True)
    return tuned or default_config(max(1, m // experts), swiglu=swiglu)


def default_config(m: int, *, swiglu: bool) -> GemmConfig:
    """The rule for shapes that nobody tuned: a tile as high as M, up to 256 rows (128 with two products), 128 columns wide."""
    if m <= 128:
        return GemmConfig(tile_m=64, tile_n=128, split="n")
    if m <= 1024 or swiglu:
        return GemmConfig(tile_m=128, tile_n=128)
    return GemmConfig(tile_m=256, tile_n=128)


def _tuned(
    kernel: str,
    device_kind: str,
    m: int,
    n: int,
    k: int,
    swiglu: bool,
    num_sms: int,
    usable: Callable[[dict[str, Any]], bool],
) -> GemmConfig | None:
    shape = (n, k, swiglu)
    entries = [e for e in load(device_kind).get(kernel, ()) if (e["n"], e["k"], e["swiglu"]) == shape and usable(e)]
    if not entries:
        return None
    nearest = min(entries, key=lambda e: (e["m"] < m, abs(e["m"] - m), abs(e["num_sms"] - num_sms)))
    return GemmConfig(**nearest["config"])


@functools.cache
def load(device_kind: str) -> dict[str, Any]:
    """The tuned table of a device: for each kernel entries {m, n, k, swiglu, num_sms, config} and what was measured; {} without one."""
    if device_kind not in TABLES:
        return {}
    return json.loads(resources.files("pallas_kernels").joinpath("tunings", TABLES[device_kind]).read_text())

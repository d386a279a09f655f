"""Tile configurations of the GEMMs: tuned ones by device and shape from `tunings/*.json`, and one rule for every other shape."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Literal

from pallas_kernels import _mosaic

_STAGING_BYTES = 2 * 2 * 64 * 64 * 2  # see gemm: two output blocks per consumer warpgroup
_RESERVED_BYTES = 2048  # barriers and the bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """How a GEMM is cut. `tile_n` counts columns of the result; with SwiGLU a tile loads as many gate and as many up columns.

    `split` says along which side of the tile the two consumer warpgroups share it, `group_m` how many tiles high the columns of
    tiles are that CTAs walk together. With `stream_k`, tiles are cut along K when that saves more than `fixup_steps` steps (of
    `tile_k`) of the slowest CTA; pieces have at least `min_steps` steps.
    """

    tile_m: int
    tile_n: int
    tile_k: int = 64
    split: Literal["m", "n"] = "m"
    group_m: int = 8
    stream_k: bool = True
    fixup_steps: int = 8
    min_steps: int = 2

    def __post_init__(self) -> None:
        if self.wg_m % 64 or self.wg_n % 64:
            raise ValueError(f"{self}: a consumer's {self.wg_m} x {self.wg_n} is not made of 64 x 64 blocks")

    @property
    def wg_m(self) -> int:
        return self.tile_m // 2 if self.split == "m" else self.tile_m

    @property
    def wg_n(self) -> int:
        return self.tile_n // 2 if self.split == "n" else self.tile_n

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
    """The tuned configuration of the nearest tuned M for this N and K, else `default_gemm_config`."""
    return default_gemm_config(m, n, swiglu=swiglu)


def default_gemm_config(m: int, n: int, *, swiglu: bool) -> GemmConfig:
    """The rule for shapes that nobody tuned: the tile as high as M allows up to 256 rows, 128 x 256 elements at most."""
    if m <= 64:
        return GemmConfig(tile_m=64, tile_n=128, split="n")
    if m <= 128 or swiglu:
        return GemmConfig(tile_m=128, tile_n=128)
    return GemmConfig(tile_m=256, tile_n=128)


def grouped_gemm_config(device_kind: str, m: int, n: int, k: int, *, experts: int, swiglu: bool) -> GemmConfig:
    """As `gemm_config`, for the mean group."""
    return default_gemm_config(max(1, m // experts), n, swiglu=swiglu)

"""How a GEMM is cut into tiles and work."""

import dataclasses
from typing import Literal

from pallas_kernels import _mosaic

_STAGED = 2 * 2 * 64 * 64  # see gemm: results in two output blocks per consumer warpgroup
_RESERVED_BYTES = 2048  # barriers and the bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """How a GEMM is cut. `tile_n` counts columns of the result; with SwiGLU a tile loads as many gate and as many up columns.

    With a `cluster` along m of two, CTAs whose tiles lie above each other take steps together, and each loads half of B's
    columns for both. CTAs of a `cluster` along k share a tile: each multiplies an equal part of the steps and adds up a part of
    the tile; nothing else is cut then. `split` says along which side of the tile the `consumers` (warpgroups that multiply)
    share it, `group_rows` how many rows high the columns of tiles are that CTAs walk together. With `stream_k`, the tiles that
    do not fill a wave and `shared_waves` waves more are cut along K when that saves over `fixup_steps` steps (of `tile_k`) of
    the slowest CTA; pieces have at least `min_steps` steps.
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

    def stages(self, swiglu: bool, result_bytes: int = 2) -> int:
        """As many stages of A and B as fit into shared memory beside blocks of results of `result_bytes` each.

        Raises:
          ValueError: not even two fit.
        """
        stage = (self.tile_m + self.tile_n * (2 if swiglu else 1)) * self.tile_k * 2
        stages = min(16, (_mosaic.SMEM_LIMIT_BYTES - _STAGED * result_bytes - _RESERVED_BYTES) // stage)
        if stages < 2:
            raise ValueError(f"{self}: two stages of {stage} bytes do not fit into shared memory")
        return stages

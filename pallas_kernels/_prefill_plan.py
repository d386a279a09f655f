"""What is static about one launch of prefill_attention."""

import dataclasses

WORKERS = 2
"""Computing warpgroups of a CTA, half a tile of queries each."""

ORDER_SLOTS = 2

STOP = 0
"""In place of an order's number of tokens: no more tiles."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    rows: int = 64
    """Packed query rows of a warpgroup, a multiple of 64."""
    kv_tile: int = 128
    """Tokens of K and V in one step, a multiple of 64."""
    stages: int = 3
    """K tiles, and as many V tiles, that shared memory holds."""

    def __post_init__(self) -> None:
        if self.rows % 64 or self.kv_tile % 64:
            raise ValueError(f"{self}: rows and kv_tile are multiples of 64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything static about one launch."""

    tokens: int
    rows: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    num_sms: int
    interpreted: bool
    config: TuningConfig

    @property
    def tokens_per_worker(self) -> int:
        return self.config.rows // self.group

    @property
    def tokens_per_tile(self) -> int:
        return WORKERS * self.tokens_per_worker

    @property
    def copy_rows(self) -> int:
        """Tokens of one TMA copy of K or V."""
        return min(self.page_size, self.config.kv_tile)

    @property
    def copies(self) -> int:
        return self.config.kv_tile // self.copy_rows

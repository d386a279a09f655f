"""What is static about one launch of decode_attention, and the arithmetic of its line of tiles."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import _fragments as fragments

TILE = 64
"""Tokens of a tile: the rows of one wgmma."""

QUERY_SLOTS = 2
"""Orders that a worker has before it, the one in hand included."""

STOP = 0
"""In place of an order's number of tokens: no more orders."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    workers: int = 3
    """Compute warpgroups of a CTA; 1 to 4."""
    tiles_per_step: int = 2
    """Tiles under one softmax step: more of them share its reductions, fewer leave room for small rings."""
    slots: int = 4
    """Tiles of K or V that a worker's ring holds; at least 2 * tiles_per_step."""
    item_overhead: int = 1
    """What an item costs beside its tiles, in tiles, when work is divided."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= fragments.WARPS:
            raise ValueError(f"workers={self.workers} is not between 1 and {fragments.WARPS}: each has one feeding warp")
        if self.slots < 2 * self.tiles_per_step:
            raise ValueError(f"slots={self.slots} hold no whole step of 2 * {self.tiles_per_step} tiles")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything static about one launch."""

    tokens: int
    """Of queries and result; token i is row i's, and those behind the last row's are left alone."""
    rows: int
    kv_heads: int
    group: int
    columns_per_head: int
    """Columns from one head's first query to the next head's in the query tiles; `group` rounded up to a power of two."""
    head_dim: int
    page_size: int
    num_sms: int
    interpreted: bool
    config: TuningConfig

    @property
    def num_workers(self) -> int:
        return self.num_sms * self.config.workers

    @property
    def pages_per_tile(self) -> int:
        return max(1, TILE // self.page_size)


def tiles_of(tokens: Any) -> Any:
    return lax.div(tokens + (TILE - 1), TILE)


def item_cost(kv_len: Any, plan: Plan) -> Any:
    """Tiles of one (row, KV head) pair with its overhead; 0 for an unused row."""
    return jnp.where(kv_len > 0, tiles_of(kv_len) + plan.config.item_overhead, 0)

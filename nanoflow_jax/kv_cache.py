"""The paged KV cache: arrays, slot arithmetic, and how many pages fit."""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.parallel import TP, ParallelLayout

DUMMY_PAGE = 0
KV_PARTITION = PartitionSpec(None, TP)
# Leading bits of the number of pages that fit which count; the rest, at most 0.2 %, stays free.
_POOL_BITS = 10


@dataclasses.dataclass
class KVCache:
    """K and V pages of every layer, `[num_pages, K, page_size, H]` each, K divided over ranks. A pytree; donated by each step.

    One array per layer and kind keeps element offsets far below those of a stacked pool and lets XLA update each in place.
    """

    k_pages: list[jax.Array]
    v_pages: list[jax.Array]


jax.tree_util.register_dataclass(KVCache, ["k_pages", "v_pages"], [])


def page_bytes(config: ModelConfig, layout: ParallelLayout, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one page on one rank, K and V, all layers."""
    per_token = 2 * config.num_layers * layout.kv_heads_per_rank * config.head_dim * jnp.dtype(dtype).itemsize
    return per_token * page_size


def create_kv_cache(
    config: ModelConfig, layout: ParallelLayout, mesh: jax.sharding.Mesh, *, num_pages: int, page_size: int, dtype: jnp.dtype
) -> KVCache:
    """A zeroed pool on the mesh; page 0 is the dummy page that no sequence owns.

    Raises:
      ValueError: fewer than two pages, or so many that a slot index would not fit in int32.
    """
    if num_pages < 2:
        raise ValueError(f"{num_pages=}: the pool needs the dummy page and at least one more")
    if num_pages * page_size > np.iinfo(np.int32).max:
        raise ValueError(f"{num_pages=} x {page_size=} slots do not fit in int32")
    shape = (num_pages, layout.num_kv_heads, page_size, config.head_dim)
    sharding = NamedSharding(mesh, KV_PARTITION)
    zeros = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
    return KVCache([zeros() for _ in range(config.num_layers)], [zeros() for _ in range(config.num_layers)])


def claimed_memory(tp_size: int) -> float:
    """Share of a GPU's memory that servers and benchmarks let jax have; the rest is for the driver, programs and NCCL.

    Driver, kernels and CUDA graphs of 31 programs of an 8B model took 0.8 GB of an H200 (`nvidia-smi` beside the allocator's
    limit): 2 % are enough for that from 80 GB on, which is what GPUs with our kernels have. What NCCL's buffers take has not
    been measured.
    """
    return 0.98 if tp_size == 1 else 0.95


def claim_device_memory(tp_size: int) -> None:
    """Lets jax have `claimed_memory`, unless the environment says otherwise; jax's own default leaves a quarter.

    Process-wide, and without effect once jax has touched a device.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(claimed_memory(tp_size)))


def free_device_bytes(device: Any) -> int | None:
    """Bytes that the allocator of `device` can still hand out, or None where the platform does not say (CPU)."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def step_bytes(config: ModelConfig, layout: ParallelLayout, *, b_dense: int, num_rows: int, greedy_only: bool) -> int:
    """An upper estimate of what the largest step needs on one rank beside weights and pool.

    Logits in float32 of two steps, of the one that is sampled and of the one after it; as much again for the parts that ranks
    gather, and three times the logits of a step for sampling them with filters (what XLA allocates for an H200); and of a layer
    four of the widest activations in float32.
    """
    logits = 4 * num_rows * layout.padded_vocab_size
    copies = 2 + (2 if layout.tp_size > 1 else 0) + (0 if greedy_only else 3)
    widest = max(2 * layout.padded_d_ff * max(1, config.experts_per_token), 4 * config.d_model)
    return copies * logits + 4 * 4 * b_dense * widest


def rounded_pages(pages: int) -> int:
    """At most `pages`, of which only the leading bits count.

    Free memory is not the same to the byte in every start; the pool's size should be, or no program on disk fits it.
    """
    unit = max(0, pages.bit_length() - _POOL_BITS)
    return pages >> unit << unit


def pages_that_fit(free_bytes: int, bytes_per_page: int, *, reserve_bytes: int) -> int:
    """Pages that fit in `free_bytes` once `reserve_bytes` are left for activations.

    Raises:
      ValueError: not even two pages fit.
    """
    pages = (free_bytes - reserve_bytes) // bytes_per_page
    if pages < 2:
        raise ValueError(
            f"the KV cache does not fit: {free_bytes / 2**30:.2f} GiB free, {reserve_bytes / 2**30:.2f} GiB kept for "
            f"steps, one page takes {bytes_per_page / 2**20:.2f} MiB"
        )
    return pages

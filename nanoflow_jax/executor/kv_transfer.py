"""K and V on their way out of a step, and pages on their way back into the pool.

Out: a step with offload returns K and V of its tokens, one array `[T, L_group, K, 2, H]` per group of consecutive layers, taken
from what `append_kv` has just rotated: nothing is gathered from pages. On a GPU the arrays lie in pinned host memory, and a
group's copy runs on a stream of its own beside the feed-forward and the layers that follow, up to the next group's; after steps
that have streams of their own, it is launched behind the step. On a CPU they are ordinary results.

Back: pages in the layout below are copied to the device as one array and scattered there, by an executable per chunk size, into
the donated pool. It is launched like a step and runs in the order of launches.

A page's bytes are `[groups, page_size, L_group, K, 2, H]`: what a step returns for consecutive tokens is, group by group, a
stretch of the page. K counts the heads of all ranks.
"""

import dataclasses
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.kv_cache import KV_PARTITION, KVCache
from nanoflow_jax.parallel import TP, ParallelLayout

# Of what a step returns and of a chunk of pages; heads are divided over ranks.
NEW_KV_PARTITION = PartitionSpec(None, None, TP)
_CHUNK_PARTITION = PartitionSpec(None, None, None, None, TP)
# A copy from pinned memory is at full speed from some MB on; a chunk also takes that much of the device for a while.
_CHUNK_BYTES = 64 << 20
_MAX_CHUNK_PAGES = 64
# Of pages that are on the device, or on their way there, before they are in the pool.
MAX_STAGED_BYTES = 512 << 20
# The last group's copy has one feed-forward and the logits to hide behind, so it should be small.
_MAX_GROUPS = 8


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """How the bytes of a page in host memory are to be read."""

    num_groups: int
    layers_per_group: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.num_groups, self.page_size, self.layers_per_group, self.num_kv_heads, 2, self.head_dim

    @property
    def page_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Of one token in one group."""
        return self.page_bytes // (self.num_groups * self.page_size)

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Numbers of pages that travel together, ascending; a load is made of such chunks, the last one filled up."""
        largest = max(1, min(_MAX_CHUNK_PAGES, _CHUNK_BYTES // self.page_bytes))
        return tuple(sorted({max(1, largest >> shift) for shift in (0, 2, 4)}))

    def describe(self) -> str:
        """Names the layout, for fingerprints."""
        return f"{self.num_groups} groups of layers; token layer head(of {self.num_kv_heads}) kv dim"


def page_format(config: ModelConfig, layout: ParallelLayout, page_size: int, dtype: Any, *, on_gpu: bool) -> PageFormat:
    """Several groups where copies overlap the rest of the step (GPUs), the most up to 8 that divide the layers; else one."""
    groups = max(n for n in range(1, _MAX_GROUPS + 1) if config.num_layers % n == 0) if on_gpu else 1
    return PageFormat(
        groups, config.num_layers // groups, page_size, layout.num_kv_heads, config.head_dim, np.dtype(jnp.dtype(dtype))
    )


class LeavingKV:
    """Takes `[T, K, 2, H]` of each layer in order and makes a group of every so many. Used while a step is traced.

    Left alone, XLA would start all copies at the end of the step. So what the step computes after a group is complete is made
    to wait for the group, whose copy can start then, and for the end of the copy before it.

    Attributes:
      groups: `[T, L_group, K, 2, H]` each; in pinned host memory with `to_host`.
    """

    def __init__(self, num_layers: int, num_groups: int, *, to_host: bool) -> None:
        self.groups: list[Array] = []
        self._layers: list[Array] = []
        self._layers_per_group = num_layers // num_groups
        self._to_host = to_host

    def take(self, kv: Float[Array, "T K 2 H"]) -> list[Array]:
        """Takes a layer's; returns what later computation has to wait for."""
        self._layers.append(kv)
        if len(self._layers) < self._layers_per_group:
            return []
        group, before = jnp.stack(self._layers, axis=1), self.groups[-1:]
        self._layers = []
        self.groups.append(jax.device_put(group, jax.memory.Space.Host) if self._to_host else group)
        return [group, *before] if self._to_host else []

    def leave(self, kv: Float[Array, "T K 2 H"], x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Takes a layer's; returns x, available when it has to be waited for no longer."""
        awaited = self.take(kv)
        return jax.lax.optimization_barrier((x, awaited))[0] if awaited else x


def leaving_sharding(mesh: jax.sharding.Mesh, *, to_host: bool) -> NamedSharding:
    """Of a group that leaves a step: in pinned host memory, or where the device keeps its results."""
    return NamedSharding(mesh, NEW_KV_PARTITION, memory_kind="pinned_host" if to_host else None)


def transfer_memory(num_bytes: int, mesh: jax.sharding.Mesh) -> np.ndarray:
    """uint8[num_bytes] of host memory that GPUs copy from directly; plain memory for CPUs.

    Copies from other memory first go through a buffer of the runtime's, at the speed of one core. Mapping such memory for the
    GPU also makes the system provide all of it now. It is unmapped when the array goes.

    Raises:
      MemoryError: there is not so much, or the system lets nobody pin so much.
    """
    memory = np.empty(num_bytes, np.uint8)
    device = mesh.devices.flat[0]
    if device.platform == "gpu" and num_bytes:
        client, address = device.client, memory.ctypes.data
        try:
            client.dma_map(address, num_bytes)
        except jax.errors.JaxRuntimeError as error:
            raise MemoryError(f"{num_bytes / 2**30:.2f} GiB of host memory cannot be mapped for the GPU: {error}") from error
        weakref.finalize(memory, client.dma_unmap, address).atexit = False
    return memory


def stage_pages(pages: np.ndarray, form: PageFormat, mesh: jax.sharding.Mesh) -> jax.Array:
    """Starts copying `uint8[n, page_bytes]` to the devices; n is a chunk size. The array must not change before the result is
    ready, and may afterwards."""
    elements = pages.reshape(-1).view(form.dtype).reshape(len(pages), *form.shape)
    return jax.device_put(elements, NamedSharding(mesh, _CHUNK_PARTITION), may_alias=False)


def lower_write_pages(form: PageFormat, num_pages: int, cache: KVCache, mesh: jax.sharding.Mesh) -> Any:
    """The lowered (cache, staged pages, int32[num_pages] page ids) -> cache; the cache is donated. Ids out of range are
    dropped."""
    replicated = PartitionSpec()
    write = jax.shard_map(
        _write_pages, mesh=mesh, in_specs=(KV_PARTITION, _CHUNK_PARTITION, replicated), out_specs=KV_PARTITION, check_vma=False
    )
    staged = jax.ShapeDtypeStruct((num_pages, *form.shape), form.dtype, sharding=NamedSharding(mesh, _CHUNK_PARTITION))
    ids = jax.ShapeDtypeStruct((num_pages,), jnp.int32, sharding=NamedSharding(mesh, replicated))
    return jax.jit(write, donate_argnums=0).lower(cache, staged, ids)


def _write_pages(cache: KVCache, staged: Float[Array, "n groups page_size L K 2 H"], page_ids: Array) -> KVCache:
    layers_per_group = staged.shape[3]

    def written(pages: Array, layer: int, kind: int) -> Array:
        group, index = divmod(layer, layers_per_group)
        tokens_last = jnp.swapaxes(staged[:, group, :, index, :, kind], 1, 2)
        return pages.at[page_ids].set(tokens_last, mode="drop", unique_indices=True)

    return KVCache(
        [written(pages, layer, 0) for layer, pages in enumerate(cache.k_pages)],
        [written(pages, layer, 1) for layer, pages in enumerate(cache.v_pages)],
    )


def weights_checksum(weights: Any) -> str:
    """Names parameters by their bits: two wrapped sums per array, the second weighted by position, with the array's path."""
    leaves = jax.tree_util.tree_flatten_with_path(weights)[0]
    sums = jax.device_get([_sums(array) for _, array in leaves])
    return ";".join(
        f"{jax.tree_util.keystr(path)}{array.shape}{array.dtype}:{plain:08x}{weighted:08x}"
        for (path, array), (plain, weighted) in zip(leaves, sums, strict=True)
    )


@jax.jit
def _sums(array: Array) -> tuple[Array, Array]:
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[array.dtype.itemsize]
    words = jax.lax.bitcast_convert_type(array, bits).astype(jnp.uint32)
    # Odd multiples of a constant that has no structure; wraps by definition.
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    weight = place * jnp.uint32(0x9E3779B1) | jnp.uint32(1)
    return words.sum(dtype=jnp.uint32), (words * weight).sum(dtype=jnp.uint32)

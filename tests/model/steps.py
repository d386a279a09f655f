"""A minimal host for model tests: tiny models on a mesh, pages handed out in a shuffled order, batches from token lists."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from nanoflow_jax.batch import Batch, BatchShape, empty_batch, pack, unpack
from nanoflow_jax.checkpoints import load_model
from nanoflow_jax.checkpoints.layout import Tensor, recipes
from nanoflow_jax.checkpoints.placing import place_parameters
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.executor import sequential
from nanoflow_jax.kv_cache import KV_PARTITION, KVCache, create_kv_cache
from nanoflow_jax.models.decoder import Decoder, build_decoder, decoder_partition
from nanoflow_jax.parallel import ParallelLayout, make_mesh, parallel_layout

TINY = pathlib.Path(__file__).parent.parent / "data" / "tiny"
TINY_NAMES = ("llama2-tiny", "llama3-tiny", "qwen2-tiny", "mixtral-tiny", "mixtral-tiny-1l")


@dataclasses.dataclass(frozen=True)
class Model:
    config: ModelConfig
    layout: ParallelLayout
    mesh: jax.sharding.Mesh
    decoder: Decoder


@functools.cache
def tiny_model(name: str, tp_size: int = 1) -> Model:
    mesh = make_mesh(tp_size)
    loaded = load_model(str(TINY / name), mesh=mesh, dtype=jnp.float32)
    return Model(loaded.config, loaded.layout, mesh, loaded.decoder)


def golden(name: str) -> Mapping[str, np.ndarray]:
    with np.load(TINY / name / "golden.npz") as arrays:
        return dict(arrays)


def random_model(config: ModelConfig, tp_size: int, seed: int = 0, gathered_o_proj: bool = False) -> Model:
    """The same random checkpoint whatever the tp_size: tensors are drawn as Hugging Face stores them, then divided."""
    layout = dataclasses.replace(parallel_layout(config, tp_size), gathered_o_proj=gathered_o_proj)
    mesh = make_mesh(tp_size)
    rng = np.random.default_rng(seed)
    shapes = {n: s for recipe in recipes(config, parallel_layout(config, 1)).values() for n, s in recipe.sources.items()}
    tensors = {}
    for name, shape in shapes.items():
        value = rng.standard_normal(shape, np.float32) * (1.0 if len(shape) == 1 else shape[-1] ** -0.5)
        tensors[name] = Tensor(shape, functools.partial(np.asarray, value))
    arrays = place_parameters(config, layout, mesh, jnp.float32, tensors)
    return Model(config, layout, mesh, build_decoder(config, layout, arrays))


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens of one sequence in a step. `decode` asks for the decode path, which takes exactly one token."""

    sequence: int
    token_ids: Sequence[int]
    start: int
    decode: bool = False


class Host:
    """Sequences with pages in shuffled order over a poisoned pool: a read of a page nobody owns makes NaN."""

    def __init__(self, model: Model, shape: BatchShape, *, page_size: int, num_pages: int, seed: int = 0):
        self.model, self.shape, self.page_size = model, shape, page_size
        self.free = list(np.random.default_rng(seed).permutation(np.arange(1, num_pages)))
        self.pages: dict[int, list[int]] = {}
        self.cache = poisoned_cache(model, num_pages=num_pages, page_size=page_size)
        self.last_tokens = jnp.zeros(8, jnp.int32)
        self._forward = forward_jit(model, shape)

    def batch(self, chunks: Sequence[Chunk]) -> Batch:
        """Decoding chunks first, as the engine orders them."""
        batch = empty_batch(self.shape)
        at = 0
        for row, chunk in enumerate(chunks):
            n, kv_len = len(chunk.token_ids), chunk.start + len(chunk.token_ids)
            pages = self.pages.setdefault(chunk.sequence, [])
            while len(pages) * self.page_size < kv_len:
                pages.append(self.free.pop())
            positions = np.arange(chunk.start, kv_len)
            tokens = slice(at, at + n)
            batch.token_ids[tokens] = chunk.token_ids
            batch.positions[tokens] = positions
            batch.slots[tokens] = np.array(pages)[positions // self.page_size] * self.page_size + positions % self.page_size
            batch.kv_lens[row], batch.q_starts[row], batch.q_lens[row] = kv_len, at, n
            batch.block_tables[row, : len(pages)] = pages
            at += n
        batch.num_decode = np.int32(sum(chunk.decode for chunk in chunks))
        return batch

    def step(self, chunks: Sequence[Chunk]) -> np.ndarray:
        """float32[len(chunks), V]: logits behind each chunk's last token."""
        weights = nnx.state(self.model.decoder)
        row_logits, self.cache = self._forward(weights, self.cache, self.last_tokens, pack(self.batch(chunks)))
        return np.asarray(row_logits)[: len(chunks), : self.model.config.vocab_size]


def poisoned_cache(model: Model, *, num_pages: int, page_size: int) -> KVCache:
    """A pool of NaN, but for the dummy page."""
    options = {"num_pages": num_pages, "page_size": page_size, "dtype": jnp.float32}
    cache = create_kv_cache(model.config, model.layout, model.mesh, **options)
    return jax.tree.map(lambda pages: pages.at[1:].set(jnp.nan), cache)


@functools.cache
def forward_jit(model: Model, shape: BatchShape, probe_names: tuple[str, ...] = ()):
    """jit of the sequential forward; with `probe_names` it also returns {(layer, operation): values it wrote into x or h}."""
    graph = nnx.graphdef(model.decoder)

    def forward(weights, cache, last_tokens, packed):
        seen = {}

        def probe(layer: int, name: str, values: dict) -> None:
            if name in probe_names:
                seen[f"{layer}.{name}"] = values["x"]

        decoder = nnx.merge(graph, weights)
        out = sequential.forward(model.config, model.layout, decoder, cache, last_tokens, unpack(packed, shape), probe)
        return (*out, seen) if probe_names else out

    replicated = PartitionSpec()
    out_specs = (replicated, KV_PARTITION, replicated) if probe_names else (replicated, KV_PARTITION)
    in_specs = (decoder_partition(model.config, model.layout), KV_PARTITION, replicated, replicated)
    mapped = jax.shard_map(forward, mesh=model.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped)

"""The reference executor: the whole dense batch through one operation after another. Every other executor must match it."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from nanoflow_jax.batch import Batch
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.executor.kv_transfer import LeavingKV
from nanoflow_jax.kernels import REFERENCE, Kernels
from nanoflow_jax.kv_cache import KVCache
from nanoflow_jax.models.decoder import Decoder
from nanoflow_jax.operations import OPERATIONS, embed, layer_operations, logits, step_inputs
from nanoflow_jax.parallel import ParallelLayout

# The operations with which x has the attention's part of a layer.
_ATTENTION_ADDED = {"attention_residual", "o_proj_residual", "o_proj_all_reduce"}
Probe = Callable[[int, str, dict[str, Array]], None]


def forward(
    config: ModelConfig,
    layout: ParallelLayout,
    decoder: Decoder,
    cache: KVCache,
    last_tokens: Array,
    batch: Batch,
    probe: Probe | None = None,
    *,
    kernels: Kernels = REFERENCE,
    new_kv: LeavingKV | None = None,
) -> tuple[Float[Array, "S V"], KVCache]:
    """Logits of each row's last token, and the cache with this step's keys and values. Runs under shard_map.

    Logits of rows that are not in use are undefined.

    Args:
      last_tokens: int32[max_sequences], the token sampled last for each sequence row.
      probe: called after each operation with (layer index, operation, values by name); for comparing executors.
      new_kv: takes what the step's tokens add to the cache.
    """
    step = step_inputs(config, batch, kernels=kernels, with_kv=new_kv is not None)
    x = embed(decoder, input_tokens(batch, last_tokens))
    names = layer_operations(config, layout, reduce_in_gemm=kernels.reduces_in_gemm)
    k_pages, v_pages = list(cache.k_pages), list(cache.v_pages)
    for i, layer in enumerate(decoder.layers):
        values = {"x": x, "k_pages": k_pages[i], "v_pages": v_pages[i]}
        for name in names:
            operation = OPERATIONS[name]
            written = operation.apply(config, step, layer, *(values[read] for read in operation.reads))
            values.update(zip(operation.writes, written, strict=True))
            # Here, so that the copy runs beside the feed-forward.
            if new_kv is not None and name in _ATTENTION_ADDED:
                values["x"] = new_kv.leave(values["kv"], values["x"])
            if probe is not None:
                probe(i, name, values)
        x, k_pages[i], v_pages[i] = values["x"], values["k_pages"], values["v_pages"]
    row_logits = logits(config, decoder, last_of_rows(batch, x), batch.q_lens > 0, kernels)
    return row_logits, KVCache(k_pages, v_pages)


def input_tokens(batch: Batch, last_tokens: Array) -> Array:
    """int32[T]: token ids from the host, or from the device where the host has not seen them yet."""
    fed_back = last_tokens[jnp.maximum(batch.token_rows, 0)]
    return jnp.where(batch.token_rows >= 0, fed_back, batch.token_ids)


def last_of_rows(batch: Batch, x: Float[Array, "T D"]) -> Float[Array, "S D"]:
    """Hidden state of each row's last token; of token 0 for unused rows."""
    return x[jnp.maximum(batch.q_starts + batch.q_lens - 1, 0)]

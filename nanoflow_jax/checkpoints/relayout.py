"""From the plain layout, which no number of ranks shaped, to that of `ParallelLayout`, on the device.

Plain: the model's own KV heads and query groups, and vocabulary and feed-forward width without padding. Folders written by
`nanoflow_jax.convert` and random weights are plain, so that they are the same model on any mesh.
"""

import dataclasses

import jax
import jax.numpy as jnp

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.models.decoder import ParameterSpec, parameter_specs
from nanoflow_jax.parallel import ParallelLayout, parallel_layout

_VOCAB_AXIS = {"embed": 0, "lm_head": 1}
_D_FF_AXIS = {"gate_up_proj": 2, "down_proj": 0, "experts_gate_up": 3, "experts_down": 1}


def plain_layout(config: ModelConfig) -> ParallelLayout:
    return dataclasses.replace(parallel_layout(config, 1), padded_vocab_size=config.vocab_size, padded_d_ff=config.d_ff)


def plain_specs(config: ModelConfig) -> dict[str, ParameterSpec]:
    """`parameter_specs` of the plain layout."""
    return parameter_specs(config, plain_layout(config))


def relayout(attribute: str, plain: jax.Array, layout: ParallelLayout) -> jax.Array:
    """The parameter `attribute` (`qkv_proj`, `embed`, ...) in `layout`, from its plain form."""
    for axes, size in ((_VOCAB_AXIS, layout.padded_vocab_size), (_D_FF_AXIS, layout.padded_d_ff)):
        if attribute in axes:
            missing = size - plain.shape[axes[attribute]]
            return jnp.pad(plain, [(0, missing if i == axes[attribute] else 0) for i in range(plain.ndim)])
    if attribute in ("qkv_proj", "qkv_bias"):
        return replicate_kv_heads(plain, layout.kv_replicas)
    return plain


def replicate_kv_heads(qkv: jax.Array, replicas: int) -> jax.Array:
    """`[..., K, G + 2, H]` -> `[..., K r, G / r + 2, H]`: each head's queries divided among r copies of its key and value."""
    if replicas == 1:
        return qkv
    *rest, K, rows, H = qkv.shape
    queries = qkv[..., :-2, :].reshape(*rest, K * replicas, (rows - 2) // replicas, H)
    keys_values = jnp.repeat(qkv[..., -2:, :], replicas, axis=-3)
    return jnp.concatenate([queries, keys_values], axis=-2)

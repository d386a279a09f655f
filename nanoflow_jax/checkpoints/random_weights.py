"""Random weights for benchmarks, made on the devices that hold them and never on the host."""

import math
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from nanoflow_jax.checkpoints.relayout import plain_specs, relayout
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.models.decoder import parameter_specs
from nanoflow_jax.parallel import ParallelLayout

_NORMS = ("attn_norm", "ffn_norm", "final_norm")
_BIAS_STD = 0.1


def random_parameters(
    config: ModelConfig,
    layout: ParallelLayout,
    mesh: jax.sharding.Mesh,
    dtype: jnp.dtype,
    seed: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, jax.Array]:
    """Parameter path -> sharded array. The same seed gives the same model whatever the number of ranks.

    Normal values of standard deviation 1 / sqrt(fan-in) keep every projection of a normalised input at unit scale: attention
    scores then have unit variance, so attention is neither uniform nor a copy of one token. What is added to the residual
    stream is divided by sqrt(2 layers), so that the stream stays at unit scale, too.
    """
    specs = parameter_specs(config, layout)
    plain = plain_specs(config)
    key = jax.random.key(seed)
    makers: dict[str, Callable[[jax.Array], jax.Array]] = {}
    arrays = {}
    for done, (path, spec) in enumerate(specs.items(), start=1):
        attribute = path.rsplit(".", 1)[-1]
        if attribute in _NORMS:
            arrays[path] = jax.device_put(np.ones(spec.shape, dtype), spec.sharding(mesh))
        else:
            if attribute not in makers:
                make = _maker(attribute, _std(config, attribute), plain[path].shape, layout, dtype)
                makers[attribute] = jax.jit(make, out_shardings=spec.sharding(mesh))
            arrays[path] = makers[attribute](jax.random.fold_in(key, zlib.crc32(path.encode())))
        if progress:
            progress(path, done, len(specs))
    return arrays


def _std(config: ModelConfig, attribute: str) -> float:
    residual = math.sqrt(2 * config.num_layers)
    return {
        # A tied embedding is the output projection as well.
        "embed": 1 / math.sqrt(config.d_model) if config.tie_embeddings else 1.0,
        "qkv_bias": _BIAS_STD,
        "o_proj": 1 / math.sqrt(config.q_dim) / residual,
        "down_proj": 1 / math.sqrt(config.d_ff) / residual,
        "experts_down": 1 / math.sqrt(config.d_ff) / residual,
    }.get(attribute, 1 / math.sqrt(config.d_model))


def _maker(
    attribute: str, std: float, shape: tuple[int, ...], layout: ParallelLayout, dtype: jnp.dtype
) -> Callable[[jax.Array], jax.Array]:
    def make(key: jax.Array) -> jax.Array:
        return relayout(attribute, jax.random.normal(key, shape, dtype) * jnp.asarray(std, dtype), layout)

    return make

"""The parameters of the decoder family (Llama, Qwen2, DeepSeek, Mixtral, SmolLM2) as Flax NNX modules.

What is computed with them is in `nanoflow_jax.operations`. The table `parameter_specs` says which parameters a model has, their
shapes and how they are divided over ranks; loaders fill it, `build_decoder` makes the module from it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.parallel import TP, ParallelLayout


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """Shape of a parameter over all ranks, and its division: one mesh axis name or None per dimension."""

    shape: tuple[int, ...]
    partition: tuple[str | None, ...]

    def sharding(self, mesh: jax.sharding.Mesh) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*self.partition))


def layer_parameter_specs(config: ModelConfig, layout: ParallelLayout) -> dict[str, ParameterSpec]:
    """Attribute of `DecoderLayer` -> spec. D d_model, K KV heads, G queries of each, H head_dim, F padded d_ff, E experts."""
    D, F, E, H = config.d_model, layout.padded_d_ff, config.num_experts, config.head_dim
    K, G = layout.num_kv_heads, layout.group_size
    specs = {
        "attn_norm": ParameterSpec((D,), (None,)),
        "qkv_proj": ParameterSpec((D, K, G + 2, H), (None, TP, None, None)),
        "o_proj": ParameterSpec((K * G * H, D), (None, TP) if layout.gathered_o_proj else (TP, None)),
        "ffn_norm": ParameterSpec((D,), (None,)),
    }
    if config.qkv_bias:
        specs["qkv_bias"] = ParameterSpec((K, G + 2, H), (TP, None, None))
    if config.is_moe:
        specs["router"] = ParameterSpec((D, E), (None, None))
        specs["experts_gate_up"] = ParameterSpec((E, D, 2, F), (None, None, None, TP))
        specs["experts_down"] = ParameterSpec((E, F, D), (None, TP, None))
    else:
        specs["gate_up_proj"] = ParameterSpec((D, 2, F), (None, None, TP))
        specs["down_proj"] = ParameterSpec((F, D), (TP, None))
    return specs


def parameter_specs(config: ModelConfig, layout: ParallelLayout) -> dict[str, ParameterSpec]:
    """Path -> spec of every parameter of the model; a layer's paths are `layers.<index>.<attribute>`."""
    V, D = layout.padded_vocab_size, config.d_model
    specs = {"embed": ParameterSpec((V, D), (TP, None))}
    for i in range(config.num_layers):
        specs.update({f"layers.{i}.{name}": spec for name, spec in layer_parameter_specs(config, layout).items()})
    specs["final_norm"] = ParameterSpec((D,), (None,))
    if not config.tie_embeddings:
        specs["lm_head"] = ParameterSpec((D, V), (None, TP))
    return specs


# A parameter, or what stands for it in its place: jax.Array, jax.ShapeDtypeStruct, PartitionSpec.
Leaf = Any


class DecoderLayer(nnx.Module):
    """One layer's parameters; those that the model lacks are None. Shapes are in `layer_parameter_specs`."""

    def __init__(self, arrays: Mapping[str, Leaf]):
        def param(name: str) -> Any:
            return nnx.Param(arrays[name]) if name in arrays else None

        self.attn_norm = param("attn_norm")
        self.qkv_proj = param("qkv_proj")
        self.qkv_bias = param("qkv_bias")
        self.o_proj = param("o_proj")
        self.ffn_norm = param("ffn_norm")
        self.gate_up_proj = param("gate_up_proj")
        self.down_proj = param("down_proj")
        self.router = param("router")
        self.experts_gate_up = param("experts_gate_up")
        self.experts_down = param("experts_down")


class Decoder(nnx.Module):
    """All parameters of a model. `lm_head` is None where the embedding serves as the output projection (tied)."""

    def __init__(self, config: ModelConfig, arrays: Mapping[str, Leaf]):
        self.embed = nnx.Param(arrays["embed"])
        self.layers = nnx.List(
            DecoderLayer(
                {
                    path.removeprefix(prefix): array
                    for path, array in arrays.items()
                    if path.startswith(prefix := f"layers.{i}.")
                }
            )
            for i in range(config.num_layers)
        )
        self.final_norm = nnx.Param(arrays["final_norm"])
        self.lm_head = None if config.tie_embeddings else nnx.Param(arrays["lm_head"])


def build_decoder(config: ModelConfig, layout: ParallelLayout, arrays: Mapping[str, jax.Array]) -> Decoder:
    """A decoder that owns `arrays`, path -> array as in `parameter_specs`.

    Raises:
      ValueError: a path is missing or unknown, or an array has another shape; the message names them all.
    """
    specs = parameter_specs(config, layout)
    faults = [f"missing {path}" for path in sorted(specs.keys() - arrays.keys())]
    faults += [f"unknown {path}" for path in sorted(arrays.keys() - specs.keys())]
    faults += [
        f"{path} has shape {tuple(arrays[path].shape)}, expected {specs[path].shape}"
        for path in sorted(specs.keys() & arrays.keys())
        if tuple(arrays[path].shape) != specs[path].shape
    ]
    if faults:
        raise ValueError(f"{config.name}: parameters do not fit the model: {'; '.join(faults)}")
    return Decoder(config, arrays)


def abstract_decoder(config: ModelConfig, layout: ParallelLayout, mesh: jax.sharding.Mesh, dtype: jnp.dtype) -> Decoder:
    """A decoder of `jax.ShapeDtypeStruct`s with shardings, for restoring and for compiling without weights."""
    structs = {
        path: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=spec.sharding(mesh))
        for path, spec in parameter_specs(config, layout).items()
    }
    return Decoder(config, structs)


def decoder_partition(config: ModelConfig, layout: ParallelLayout) -> nnx.State:
    """The `PartitionSpec` of every parameter, in the tree form of `nnx.state(decoder)`, for shard_map's in_specs."""
    specs = parameter_specs(config, layout)
    return nnx.state(Decoder(config, {path: PartitionSpec(*spec.partition) for path, spec in specs.items()}))

"""A model in a GGUF file, read as a Hugging Face checkpoint: config, names, and rows in rotate-half order."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanoflow_jax.checkpoints.gguf_format import GgufFile, GgufTensor
from nanoflow_jax.checkpoints.layout import CheckpointError, Tensor
from nanoflow_jax.config import ModelConfig, RopeScaling

_ARCHITECTURES = ("llama", "qwen2")
# Keys below the architecture that we read, and those that do not change the result.
_READ = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "expert_count", "expert_used_count",
})  # fmt: skip
_INERT = frozenset({"rope.scaling.finetuned", "rope.scaling.original_context_length"})

_ROPE_FACTORS = "rope_freqs.weight"
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "block_sparse_moe.gate",
}  # fmt: skip
_EXPERT_NAMES = {"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ONE_EXPERT = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_down|ffn_up)\.(\d+)\.weight")
_ALL_EXPERTS = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_down|ffn_up)_exps\.weight")


def model_config(file: GgufFile, name: str) -> ModelConfig:
    """The config in the file's metadata.

    Raises:
      CheckpointError: the architecture, a key of it, or its rotary scaling is not handled, or a value is missing or
        malformed; the message names it.
    """
    arch = file.metadata.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise CheckpointError(f"{name}: general.architecture={arch!r} is not handled, only {', '.join(_ARCHITECTURES)}")
    if file.metadata.get("split.count", 1) != 1:
        raise CheckpointError(f"{name}: split.count={file.metadata['split.count']!r}: files in parts must be merged first")
    values = {k.removeprefix(f"{arch}."): v for k, v in file.metadata.items() if k.startswith(f"{arch}.")}
    unknown = sorted(values.keys() - _READ - _INERT)
    if unknown:
        raise CheckpointError(f"{name}: metadata not handled: {', '.join(f'{arch}.{k}={values[k]!r:.80}' for k in unknown)}")
    if values.get("rope.scaling.type", "none") != "none":
        raise CheckpointError(f"{name}: {arch}.rope.scaling.type={values['rope.scaling.type']!r} is not handled")
    return _config(_Values(name, arch, values), file)


class _Values:
    """Typed access to the keys of an architecture."""

    def __init__(self, name: str, arch: str, values: Mapping[str, Any]):
        self.name, self.arch, self._values = name, arch, values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if type(value) is not int:
            raise CheckpointError(f"{self.name}: {self.arch}.{key}={value!r} must be an integer")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._values.get(key, default)
        if not isinstance(value, float) or not math.isfinite(value):
            raise CheckpointError(f"{self.name}: {self.arch}.{key}={value!r} must be a finite number")
        # Stored as float32; the shortest decimal of it is what was meant (0.00001 and not 0.000009999999747).
        return float(str(np.float32(value)))


def _config(values: _Values, file: GgufFile) -> ModelConfig:
    name, d_model, heads = values.name, values.integer("embedding_length"), values.integer("attention.head_count")
    if heads <= 0:
        raise CheckpointError(f"{name}: {values.arch}.attention.head_count={heads} must be positive")
    head_dim = values.integer("attention.key_length", d_model // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if values.integer(key, head_dim) != head_dim:
            raise CheckpointError(f"{name}: {values.arch}.{key}={values.integer(key)} differs from head_dim={head_dim}")
    theta = values.number("rope.freq_base", 10000.0)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{name}: tensor token_embd.weight is missing")
    try:
        return ModelConfig(
            name=name,
            vocab_size=values.integer("vocab_size", embedding.shape[0]),
            d_model=d_model,
            d_ff=values.integer("feed_forward_length"),
            num_layers=values.integer("block_count"),
            num_heads=heads,
            num_kv_heads=values.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_context=values.integer("context_length"),
            rope_theta=theta,
            rope_scaling=_rope_scaling(name, theta, head_dim, file),
            rms_norm_eps=values.number("attention.layer_norm_rms_epsilon", 1e-5),
            tie_embeddings="output.weight" not in file.tensors,
            qkv_bias=values.arch == "qwen2",
            num_experts=values.integer("expert_count", 0),
            experts_per_token=values.integer("expert_used_count", 0),
            bos_token_id=next(iter(_token_ids(file, embedding.shape[0], "bos")), None),
            eos_token_ids=_token_ids(file, embedding.shape[0], "eos", "eot", "eom"),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _token_ids(file: GgufFile, vocab_size: int, *kinds: str) -> tuple[int, ...]:
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in kinds]
    found = {key: file.metadata[key] for key in keys if key in file.metadata}
    for key, token in found.items():
        if type(token) is not int or not 0 <= token < vocab_size:
            raise CheckpointError(f"{key}={token!r} is not a token id below {vocab_size}")
    return tuple(dict.fromkeys(found.values()))


def _rope_scaling(name: str, theta: float, head_dim: int, file: GgufFile) -> RopeScaling | None:
    """Llama-3 scaling, which the file holds only as the divisor of each frequency.

    All Llama-3 models blend between wavelengths of 1/4 and 1 of the original context, so that the last divisor gives the
    factor and any blended one the original context. The result must reproduce every divisor, or it is refused.
    """
    if _ROPE_FACTORS not in file.tensors:
        return None
    tensor = file.tensors[_ROPE_FACTORS]
    if tensor.shape != (head_dim // 2,):
        raise CheckpointError(f"{name}: {_ROPE_FACTORS} has shape {tensor.shape}, expected {(head_dim // 2,)}")
    divisors = tensor.read().astype(np.float64)
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    factor, low, high = float(divisors[-1]), 1.0, 4.0
    blended = np.flatnonzero((divisors > 1.001) & (divisors < factor * 0.999))
    if len(blended):
        i = blended[0]
        smooth = (1 / divisors[i] - 1 / factor) / (1 - 1 / factor)
        original = round(float(wavelengths[i] * (low + smooth * (high - low))))
        smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-4, atol=0):
            return RopeScaling(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_context=original)
    raise CheckpointError(f"{name}: {_ROPE_FACTORS} is not the scaling of a Llama-3 model, which is the only one handled")


def model_tensors(config: ModelConfig, file: GgufFile) -> dict[str, Tensor]:
    """The file's tensors by Hugging Face name; those that have none keep their own.

    `llama` files store the rows of Q and K in pairs for interleaved rotary embedding; they are put back in order. `qwen2`
    files store them in order.
    """
    found: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        if match := _ALL_EXPERTS.fullmatch(name):
            prefix = f"model.layers.{match[1]}.block_sparse_moe.experts."
            found |= {f"{prefix}{e}.{_EXPERT_NAMES[match[2]]}.weight": part for e, part in enumerate(tensor.unstacked())}
        elif name != _ROPE_FACTORS:
            found[_hf_name(name)] = tensor
    tensors = {name: Tensor(tensor.shape, tensor.read) for name, tensor in found.items()}
    if file.metadata["general.architecture"] != "llama":
        return tensors
    heads = {"q_proj.weight": config.num_heads, "k_proj.weight": config.num_kv_heads}
    for name, tensor in tensors.items():
        count = heads.get(name.rpartition("self_attn.")[2])
        # A tensor of a wrong shape stays as it is and is refused with the others.
        if count and len(tensor.shape) == 2 and tensor.shape[0] == count * config.head_dim:
            tensors[name] = _rotate_half_order(tensor, count)
    return tensors


def _hf_name(name: str) -> str:
    if match := _ONE_EXPERT.fullmatch(name):
        return f"model.layers.{match[1]}.block_sparse_moe.experts.{match[3]}.{_EXPERT_NAMES[match[2]]}.weight"
    if (match := _LAYER.fullmatch(name)) and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _TOP_NAMES.get(name, name)


def _rotate_half_order(tensor: Tensor, num_heads: int) -> Tensor:
    def read() -> np.ndarray:
        rows = tensor.read()
        return rows.reshape(num_heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)

    return Tensor(tensor.shape, read)

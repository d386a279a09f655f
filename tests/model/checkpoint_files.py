"""Checkpoints that the tests write themselves, and a float64 forward pass over canonical parameters."""

import json
import math
import shutil
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from nanoflow_jax.checkpoints.hf_folder import read_config
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.models.decoder import Decoder
from nanoflow_jax.parallel import ParallelLayout

TINY = Path(__file__).parents[1] / "data" / "tiny"
TINY_NAMES = ("llama2-tiny", "llama3-tiny", "qwen2-tiny", "mixtral-tiny", "mixtral-tiny-1l")


def tiny_tensors(name: str) -> dict[str, np.ndarray]:
    return load_file(TINY / name / "model.safetensors")


def copy_tiny(name: str, folder: Path, tensors: dict[str, np.ndarray] | None = None, **config_changes) -> Path:
    """A copy of a tiny checkpoint, with other tensors or config attributes (None removes one)."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (TINY / name).glob("*.json"):
        shutil.copy(file, folder / file.name)
        (folder / file.name).chmod(0o644)
    config = json.loads((folder / "config.json").read_text()) | config_changes
    config = {key: value for key, value in config.items() if value is not None or key not in config_changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny_tensors(name) if tensors is None else tensors, folder / "model.safetensors")
    return folder


def decoder_arrays(decoder: Decoder) -> dict[str, np.ndarray]:
    """Parameter path -> the whole array on the host."""
    arrays = {"embed": decoder.embed, "final_norm": decoder.final_norm, "lm_head": decoder.lm_head}
    for i, layer in enumerate(decoder.layers):
        names = ("attn_norm", "qkv_proj", "qkv_bias", "o_proj", "ffn_norm", "gate_up_proj", "down_proj")
        names += ("router", "experts_gate_up", "experts_down")
        arrays |= {f"layers.{i}.{name}": getattr(layer, name) for name in names}
    return {path: np.asarray(param.get_value()) for path, param in arrays.items() if param is not None}


def forward(config: ModelConfig, layout: ParallelLayout, arrays: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits `[T, V]` in float64 of one sequence, from parameters in `layout`."""
    w = {path: array.astype(np.float64) for path, array in arrays.items()}
    cos, sin = _rotary(config, len(ids))
    x = w["embed"][ids]
    for i in range(config.num_layers):
        layer = {path.removeprefix(f"layers.{i}."): a for path, a in w.items() if path.startswith(f"layers.{i}.")}
        h = _rms_norm(x, layer["attn_norm"], config.rms_norm_eps)
        qkv = np.einsum("td,dkgh->tkgh", h, layer["qkv_proj"]) + layer.get("qkv_bias", 0.0)
        q, k, v = _rotate(qkv[:, :, :-2], cos, sin), _rotate(qkv[:, :, -2:-1], cos, sin), qkv[:, :, -1]
        assert q.shape[1:3] == (layout.num_kv_heads, layout.group_size)
        x = x + _attention(q, k[:, :, 0], v).reshape(len(ids), -1) @ layer["o_proj"]
        h = _rms_norm(x, layer["ffn_norm"], config.rms_norm_eps)
        x = x + (_experts(config, layer, h) if config.is_moe else _swiglu(h, layer["gate_up_proj"], layer["down_proj"]))
    head = w["embed"].T if config.tie_embeddings else w["lm_head"]
    return (_rms_norm(x, w["final_norm"], config.rms_norm_eps) @ head)[:, : config.vocab_size]


def _rotary(config: ModelConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    if (s := config.rope_scaling) is not None:
        wavelengths = 2 * math.pi / frequencies
        smooth = (s.original_max_context / wavelengths - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        smooth = np.clip(smooth, 0, 1)
        frequencies = (1 - smooth) * frequencies / s.factor + smooth * frequencies
    angles = np.arange(length)[:, None] * frequencies
    return np.cos(angles)[:, None, None], np.sin(angles)[:, None, None]


def _rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    T = len(q)
    scores = np.einsum("tkgh,skh->kgts", q, k) / math.sqrt(q.shape[-1]) + np.triu(np.full((T, T), -np.inf), 1)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kgts,skh->tkgh", p / p.sum(-1, keepdims=True), v)


def _swiglu(h: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gate, up = h @ gate_up[:, 0], h @ gate_up[:, 1]
    return (gate / (1 + np.exp(-gate)) * up) @ down


def _experts(config: ModelConfig, layer: dict[str, np.ndarray], h: np.ndarray) -> np.ndarray:
    scores = h @ layer["router"]
    chosen = np.argsort(-scores, axis=-1, kind="stable")[:, : config.experts_per_token]
    weights = np.exp(np.take_along_axis(scores, chosen, -1))
    weights /= weights.sum(-1, keepdims=True)
    y = np.zeros_like(h)
    for t, experts in enumerate(chosen):
        for weight, e in zip(weights[t], experts, strict=True):
            y[t] += weight * _swiglu(h[t], layer["experts_gate_up"][e], layer["experts_down"][e])
    return y


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
_GGUF_EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def gguf_tensors(name: str) -> dict[str, np.ndarray]:
    """The tensors of a tiny checkpoint under the names and in the order of rows that GGUF files have."""
    config, found = read_config(TINY / name), {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for key, value in tiny_tensors(name).items():
        *stem, kind = key.split(".")
        layer = f"blk.{stem[2]}." if stem[:2] == ["model", "layers"] else ""
        rest = ".".join(stem[3:] if layer else stem)
        if "experts" in stem:
            stacks.setdefault(f"{layer}{_GGUF_EXPERTS[stem[-1]]}.weight", {})[int(stem[-2])] = value
            continue
        heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}.get(rest)
        if heads and "qwen2" not in name:
            value = value.reshape(heads, 2, config.head_dim // 2, -1).swapaxes(1, 2).reshape(value.shape)
        found[f"{layer}{_GGUF_NAMES[rest]}.{kind}"] = value
    found |= {key: np.stack([parts[e] for e in range(len(parts))]) for key, parts in stacks.items()}
    if config.rope_scaling is not None:
        found["rope_freqs.weight"] = _rope_divisors(config)
    return found


def _rope_divisors(config: ModelConfig) -> np.ndarray:
    s = config.rope_scaling
    assert s is not None
    wavelengths = 2 * math.pi * config.rope_theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    smooth = (s.original_max_context / wavelengths - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    return (1 / ((1 - smooth) / s.factor + smooth)).astype(np.float32)


def write_gguf(
    path: Path,
    name: str,
    tensors: dict[str, np.ndarray] | None = None,
    quantised: gguf.GGMLQuantizationType | None = None,
    pre: str | None = None,
    **metadata,
) -> Path:
    """A tiny checkpoint as a GGUF file; matrices quantised if asked, and its tokenizer with pre-tokenizer `pre`."""
    config = read_config(TINY / name)
    arch = "qwen2" if "qwen2" in name else "llama"
    writer = gguf.GGUFWriter(path, arch)
    integers = {
        "block_count": config.num_layers, "context_length": config.max_context, "embedding_length": config.d_model,
        "feed_forward_length": config.d_ff, "attention.head_count": config.num_heads, "vocab_size": config.vocab_size,
        "attention.head_count_kv": config.num_kv_heads, "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim,
        "expert_count": config.num_experts, "expert_used_count": config.experts_per_token,
    }  # fmt: skip
    for key, value in integers.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope_theta)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    if pre:
        _add_tokenizer(writer, name, pre)
    for key, value in metadata.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}[type(value)]
        add(key.replace("__", "."), value)
    for key, value in (gguf_tensors(name) if tensors is None else tensors).items():
        if quantised is None or value.ndim < 2:
            writer.add_tensor(key, value)
        else:
            writer.add_tensor(key, gguf.quants.quantize(value, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, name: str, pre: str) -> None:
    model = json.loads((TINY / name / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 3 else 1 for i in range(len(tokens))])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(json.loads((TINY / name / "tokenizer_config.json").read_text())["chat_template"])

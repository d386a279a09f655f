"""What a model is: sizes and numerics of one decoder family, presets by name, and the reader of Hugging Face configs.

This module imports no jax; the search and the server use it without touching a device.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3 frequency scaling of rotary embeddings (the `llama3` type of Hugging Face configs)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only transformer: RMSNorm, rotary attention with grouped KV heads, SwiGLU or a mixture of SwiGLU experts.

    `num_experts == 0` means a dense feed-forward. `max_context` counts prompt and output tokens together.
    """

    name: str
    vocab_size: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_context"):
            value = getattr(self, field)
            if not isinstance(value, int) or value <= 0:
                raise ValueError(f"ModelConfig {self.name!r}: {field}={value!r} must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig {self.name!r}: num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig {self.name!r}: head_dim={self.head_dim} must be even for rotary embeddings")
        if not 0 <= self.experts_per_token <= self.num_experts or bool(self.num_experts) != bool(self.experts_per_token):
            raise ValueError(
                f"ModelConfig {self.name!r}: experts_per_token={self.experts_per_token} does not fit "
                f"num_experts={self.num_experts}"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_dim(self) -> int:
        """Width of the query projection, num_heads x head_dim; may differ from d_model."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of the key (or value) projection, num_kv_heads x head_dim."""
        return self.num_kv_heads * self.head_dim

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def layer_params(self) -> int:
        """Parameters of one layer, all experts counted."""
        attention = self.d_model * (self.q_dim + 2 * self.kv_dim) + self.q_dim * self.d_model
        bias = self.q_dim + 2 * self.kv_dim if self.qkv_bias else 0
        feed_forward = 3 * self.d_model * self.d_ff * max(self.num_experts, 1) + self.num_experts * self.d_model
        return attention + bias + feed_forward + 2 * self.d_model

    @property
    def active_layer_params(self) -> int:
        """Parameters of one layer that one token uses: experts_per_token of the experts."""
        idle_experts = self.num_experts - self.experts_per_token
        return self.layer_params - 3 * self.d_model * self.d_ff * idle_experts

    @property
    def num_params(self) -> int:
        """All parameters; a tied embedding counts once."""
        embeddings = self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
        return self.num_layers * self.layer_params + embeddings + self.d_model

    @property
    def active_params(self) -> int:
        """Parameters that one token uses, embeddings included."""
        return self.num_params - self.num_layers * (self.layer_params - self.active_layer_params)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of K and V that one token leaves in the cache, all layers and all KV heads."""
        return 2 * self.num_layers * self.kv_dim * dtype_bytes

    def same_layer(self, other: "ModelConfig") -> bool:
        """Whether a layer of `other` has the same operations on arrays of the same shapes; names and depths may differ."""
        fields = ("d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim", "qkv_bias", "num_experts", "experts_per_token")
        return all(getattr(self, field) == getattr(other, field) for field in fields)


_LLAMA31_SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=8192)


def _llama2(name: str, d_model: int, d_ff: int, num_layers: int, num_heads: int, num_kv_heads: int) -> ModelConfig:
    return ModelConfig(
        name=name, vocab_size=32000, d_model=d_model, d_ff=d_ff, num_layers=num_layers, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=128, max_context=4096, bos_token_id=1, eos_token_ids=(2,),
    )  # fmt: skip


def _llama3(name: str, d_model: int, d_ff: int, num_layers: int, num_heads: int, scaling: RopeScaling | None) -> ModelConfig:
    return ModelConfig(
        name=name, vocab_size=128256, d_model=d_model, d_ff=d_ff, num_layers=num_layers, num_heads=num_heads,
        num_kv_heads=8, head_dim=128, max_context=131072 if scaling else 8192, rope_theta=500000.0,
        rope_scaling=scaling, bos_token_id=128000, eos_token_ids=(128001, 128009),
    )  # fmt: skip


def _qwen2(name: str, d_model: int, d_ff: int, num_layers: int, num_heads: int, num_kv_heads: int) -> ModelConfig:
    return ModelConfig(
        name=name, vocab_size=152064, d_model=d_model, d_ff=d_ff, num_layers=num_layers, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=128, max_context=32768, rope_theta=1e6, rms_norm_eps=1e-6, qkv_bias=True,
        bos_token_id=None, eos_token_ids=(151645, 151643),
    )  # fmt: skip


PRESETS: Mapping[str, ModelConfig] = {
    config.name: config
    for config in (
        ModelConfig(
            name="smollm2-135m", vocab_size=49152, d_model=576, d_ff=1536, num_layers=30, num_heads=9, num_kv_heads=3,
            head_dim=64, max_context=8192, rope_theta=100000.0, tie_embeddings=True, bos_token_id=1, eos_token_ids=(2,),
        ),
        _llama2("llama2-7b", 4096, 11008, 32, 32, 32),
        _llama2("llama2-13b", 5120, 13824, 40, 40, 40),
        _llama2("llama2-70b", 8192, 28672, 80, 64, 8),
        _llama3("llama3-8b", 4096, 14336, 32, 32, None),
        _llama3("llama3-70b", 8192, 28672, 80, 64, None),
        _llama3("llama3.1-8b", 4096, 14336, 32, 32, _LLAMA31_SCALING),
        _llama3("llama3.1-70b", 8192, 28672, 80, 64, _LLAMA31_SCALING),
        _qwen2("qwen2-7b", 3584, 18944, 28, 28, 4),
        _qwen2("qwen2-72b", 8192, 29568, 80, 64, 8),
        ModelConfig(
            name="deepseek-67b", vocab_size=102400, d_model=8192, d_ff=22016, num_layers=95, num_heads=64, num_kv_heads=8,
            head_dim=128, max_context=4096, rms_norm_eps=1e-6, bos_token_id=100000, eos_token_ids=(100001,),
        ),
        ModelConfig(
            name="mixtral-8x7b", vocab_size=32000, d_model=4096, d_ff=14336, num_layers=32, num_heads=32, num_kv_heads=8,
            head_dim=128, max_context=32768, rope_theta=1e6, num_experts=8, experts_per_token=2,
            bos_token_id=1, eos_token_ids=(2,),
        ),
    )
}  # fmt: skip


def preset(name: str) -> ModelConfig:
    """The preset called `name`.

    Raises:
      ValueError: no such preset; the message lists those there are.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown model preset {name!r}; presets: {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


# Attributes of a Hugging Face config that do not change the inference result of the models we run.
_INERT = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout", "dtype", "hidden_dropout",
    "id2label", "initializer_range", "is_llama_config", "label2id", "max_window_layers", "name_or_path", "output_router_logits",
    "pad_token_id", "residual_dropout", "router_aux_loss_coef", "router_jitter_noise", "torch_dtype",
    "transformers.js_config", "transformers_version", "unsloth_fixed", "use_cache",
})  # fmt: skip
_READ = frozenset({
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act", "bos_token_id", "eos_token_id", "sliding_window",
    "use_sliding_window", "num_local_experts", "num_experts_per_tok", "head_dim", "layer_types", "pretraining_tp",
    "rope_interleaved",
})  # fmt: skip
_MODEL_TYPES = ("llama", "qwen2", "mixtral")


def from_hf(hf: Mapping[str, Any], name: str = "model") -> ModelConfig:
    """Reads a Hugging Face `config.json` of a llama, qwen2 or mixtral model.

    Raises:
      ValueError: an attribute is missing, or is one that would change the result and is not handled here; the message names
        it. Nothing is ignored silently.
    """
    model_type = hf.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise ValueError(f"config.json: model_type={model_type!r} is not one of {', '.join(_MODEL_TYPES)}")
    unknown = sorted(set(hf) - _READ - _INERT)
    if unknown:
        raise ValueError(f"config.json: attributes not handled: {', '.join(f'{k}={hf[k]!r}' for k in unknown)}")
    _refuse_variants(hf, model_type)
    heads = _required(hf, "num_attention_heads")
    hidden = _required(hf, "hidden_size")
    theta, scaling = _rope(hf)
    eos = hf.get("eos_token_id")
    moe = model_type == "mixtral"
    return ModelConfig(
        name=name,
        vocab_size=_required(hf, "vocab_size"),
        d_model=hidden,
        d_ff=_required(hf, "intermediate_size"),
        num_layers=_required(hf, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hidden // heads,
        max_context=_required(hf, "max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2",
        num_experts=_required(hf, "num_local_experts") if moe else 0,
        experts_per_token=_required(hf, "num_experts_per_tok") if moe else 0,
        bos_token_id=hf.get("bos_token_id"),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


def _required(hf: Mapping[str, Any], key: str) -> int:
    value = hf.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key}={value!r} must be a positive integer")
    return value


def _refuse_variants(hf: Mapping[str, Any], model_type: str) -> None:
    """Refuses values of known attributes that select a computation we do not have."""
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act={hf['hidden_act']!r} is not handled, only 'silu'")
    if hf.get("mlp_bias"):
        raise ValueError("config.json: mlp_bias=True is not handled")
    if hf.get("attention_bias") and model_type != "qwen2":
        raise ValueError("config.json: attention_bias=True is not handled")
    # Qwen2 configs carry a window that is off unless use_sliding_window says otherwise; Mixtral's is on when it is set.
    window_on = hf.get("use_sliding_window", model_type == "mixtral")
    window = hf.get("sliding_window")
    if window_on and window is not None and window < hf.get("max_position_embeddings", 0):
        raise ValueError(f"config.json: sliding_window={window} with use_sliding_window is not handled")
    if hf.get("pretraining_tp", 1) != 1:
        raise ValueError(f"config.json: pretraining_tp={hf['pretraining_tp']} is not handled, only 1")
    if hf.get("rope_interleaved"):
        raise ValueError("config.json: rope_interleaved=True is not handled")
    layer_types = set(hf.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise ValueError(f"config.json: layer_types={sorted(layer_types)} are not handled, only full_attention")


def _rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from the older (rope_theta, rope_scaling) or the newer (rope_parameters) spelling."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"config.json: rope parameters {given!r} must be an object")
    spec = dict(given)
    theta = float(spec.pop("rope_theta", None) or hf.get("rope_theta", 10000.0))
    kind = spec.pop("rope_type", None) or spec.pop("type", None) or "default"
    spec.pop("type", None)
    if kind == "default" and not spec:
        return theta, None
    if kind != "llama3":
        raise ValueError(f"config.json: rope type {kind!r} ({spec}) is not handled, only 'default' and 'llama3'")
    keys = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    if set(spec) != keys:
        raise ValueError(f"config.json: llama3 rope scaling has {sorted(spec)}, expected {sorted(keys)}")
    return theta, RopeScaling(
        factor=float(spec["factor"]),
        low_freq_factor=float(spec["low_freq_factor"]),
        high_freq_factor=float(spec["high_freq_factor"]),
        original_max_context=int(spec["original_max_position_embeddings"]),
    )

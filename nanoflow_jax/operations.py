"""Each operation of a layer as a pure function over a flat token axis, and the table that executors walk.

Functions see one rank's share (they run under shard_map). An operation reads and writes named values; an executor decides for
which tokens, in which order, beside what and with which kernels it runs.

Values of padding are undefined, NaN and infinity included: kernels leave out what is behind the last token in use. Nothing of
it reaches anybody, because every operation makes a token's value of that token's values alone, but for three: attention reads
keys and values, of which padding has none (its slot is -1); experts take tokens in groups, and padding is in none; rows that
are not in use have logits, which are not sampled.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from nanoflow_jax.batch import Batch
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.kernels import REFERENCE, Kernels
from nanoflow_jax.models.decoder import Decoder, DecoderLayer
from nanoflow_jax.parallel import TP, ParallelLayout, all_gather, all_reduce


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """What the operations of a step need besides weights and activations: the batch for tokens [start, stop).

    T tokens of the range, B rows that may decode (token i of the range is row i, while it is under `num_decode`), S rows.
    """

    used_tokens: jax.Array  # int32 scalar, tokens of the range up to the last that is no padding
    slots: jax.Array  # int32[T]; -1 for padding, which there may be between tokens, too
    cos: jax.Array  # float32[T, H / 2]
    sin: jax.Array  # float32[T, H / 2]
    decode_tables: jax.Array  # int32[B, pages]
    decode_kv_lens: jax.Array  # int32[B]; 0 where the row does not decode
    block_tables: jax.Array  # int32[S, pages]
    kv_lens: jax.Array  # int32[S], up to the range's last token of the row; never negative
    q_starts: jax.Array  # int32[S], within the range
    q_lens: jax.Array  # int32[S]; 0 for decoding rows and rows outside the range
    with_kv: bool  # whether somebody reads keys and values by token
    kernels: Kernels


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """float64[H / 2]: radians per position, with Llama-3 scaling where the model has it.

    Source: the `llama3` rope type of Hugging Face transformers. Wavelengths beyond original_max_context / low_freq_factor are
    stretched by `factor`, those under original_max_context / high_freq_factor are kept, and those between are blended.
    """
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_max_context * frequencies / (2 * np.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def step_inputs(
    config: ModelConfig,
    batch: Batch,
    start: int = 0,
    stop: int | None = None,
    kernels: Kernels = REFERENCE,
    *,
    with_kv: bool = False,
) -> StepInputs:
    """The inputs for tokens [start, stop) of the batch, by default all; a prefill row's queries are clipped to the range."""
    shape = batch.shape
    stop = shape.num_tokens if stop is None else stop
    if not 0 <= start < stop <= shape.num_tokens:
        raise ValueError(f"token range [{start}, {stop}) does not lie in a batch of {shape.num_tokens}")
    frequencies = jnp.asarray(rope_frequencies(config), jnp.float32)
    angles = batch.positions[start:stop, None].astype(jnp.float32) * frequencies[None]
    decode_rows = slice(min(start, shape.num_rows), min(stop, shape.num_rows))
    row = jnp.arange(shape.num_rows, dtype=jnp.int32)
    decoding = row < batch.num_decode
    first = jnp.clip(batch.q_starts, start, stop)
    last = jnp.clip(batch.q_starts + batch.q_lens, start, stop)
    q_lens = jnp.where(decoding, 0, last - first)
    slots = batch.slots[start:stop]
    return StepInputs(
        used_tokens=_one_past_last(slots >= 0),
        slots=jnp.maximum(slots, -1),  # computed, as a slice might not begin where kernels want it to
        cos=jnp.cos(angles),
        sin=jnp.sin(angles),
        decode_tables=batch.block_tables[decode_rows],
        decode_kv_lens=jnp.where(decoding, batch.kv_lens, 0)[decode_rows],
        block_tables=batch.block_tables,
        kv_lens=jnp.maximum(batch.kv_lens - (batch.q_starts + batch.q_lens - last), 0),
        q_starts=first - start,
        q_lens=q_lens,
        with_kv=with_kv,
        kernels=kernels,
    )


def _one_past_last(used: Bool[Array, " n"]) -> Int[Array, ""]:
    """How many entries there are up to the last that is true."""
    return jnp.max(jnp.where(used, jnp.arange(1, used.shape[0] + 1, dtype=jnp.int32), 0))


def embed(decoder: Decoder, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Rows of the embedding; each rank holds a slice of the vocabulary and contributes zeros for the rest."""
    table = decoder.embed[...]
    local = token_ids - jax.lax.axis_index(TP) * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    return all_reduce(jnp.where(mine[:, None], table[jnp.where(mine, local, 0)], 0))


def logits(
    config: ModelConfig, decoder: Decoder, x: Float[Array, "S D"], in_use: Bool[Array, " S"], kernels: Kernels
) -> Float[Array, "S V"]:
    """float32 logits over the padded vocabulary; ids that pad it are -inf and can never be sampled.

    Rows behind the last one that is `in_use` are undefined.
    """
    h = rms_norm(config, decoder.final_norm[...], x)
    if decoder.lm_head is None:  # the embedding, which lies the other way round from what our kernels multiply
        contracting = (((1,), (1,)), ((), ()))
        local = jax.lax.dot_general(h, decoder.embed[...], contracting, preferred_element_type=jnp.float32)
    else:
        local = kernels.gemm(h, decoder.lm_head[...], rows=_one_past_last(in_use), out_dtype=jnp.float32)
    full = all_gather(local, axis=1)
    if full.shape[1] == config.vocab_size:
        return full
    return jnp.where(jnp.arange(full.shape[1], dtype=jnp.int32)[None] < config.vocab_size, full, -jnp.inf)


def rms_norm(config: ModelConfig, weight: Float[Array, " D"], x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """x / rms(x) * weight, in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.rms_norm_eps)
    return (wide * scale * weight.astype(jnp.float32)[None]).astype(x.dtype)


def qkv_proj(step: StepInputs, layer: DecoderLayer, h: Float[Array, "T D"]) -> Float[Array, "T K G_plus_2 H"]:
    """Queries, key and value of each KV head, with the bias where the model has one."""
    bias = None if layer.qkv_bias is None else layer.qkv_bias[...]
    return step.kernels.gemm(h, layer.qkv_proj[...], bias=bias, rows=step.used_tokens)


def append_kv(step: StepInputs, qkv: Float[Array, "T K G_plus_2 H"], k_pages: Array, v_pages: Array) -> tuple[Array, ...]:
    """Rotated queries, each token's key and value (empty where nobody reads them), and the pages with these."""
    tokens = step.cos, step.sin, step.slots
    return step.kernels.append_kv(qkv, *tokens, k_pages, v_pages, rows=step.used_tokens, with_kv=step.with_kv)


def decode_attention(step: StepInputs, q: Array, k_pages: Array, v_pages: Array) -> Float[Array, "T K G H"]:
    """Attention of the decoding tokens; undefined for the others."""
    if step.decode_kv_lens.shape[0] == 0:  # a token range behind the last row that could decode
        return jnp.zeros_like(q)
    return step.kernels.decode_attention(q, k_pages, v_pages, step.decode_tables, step.decode_kv_lens)


def prefill_attention(
    step: StepInputs, q: Array, k_pages: Array, v_pages: Array, decoded: Float[Array, "T K G H"] | None = None
) -> Float[Array, "T K G H"]:
    """Attention of the prompt chunks; undefined for decoding tokens and padding.

    In a range in which both kinds may occur the other tokens' is as in `decoded`, into which it is written.
    """
    rows = step.block_tables, step.kv_lens, step.q_starts, step.q_lens
    return step.kernels.prefill_attention(q, k_pages, v_pages, *rows, out=decoded)


def o_proj(
    step: StepInputs, layer: DecoderLayer, attended: Float[Array, "T K G H"], residual: Float[Array, "T D"] | None = None
) -> Float[Array, "T D"]:
    """This rank's part of the attention output projection: a partial sum, or, after an all-gather, its columns."""
    flat = attended.reshape(attended.shape[0], -1)
    return step.kernels.gemm(flat, layer.o_proj[...], residual=residual, rows=step.used_tokens)


def o_proj_all_reduce(
    step: StepInputs, layer: DecoderLayer, attended: Float[Array, "T K G H"], residual: Float[Array, "T D"]
) -> Float[Array, "T D"]:
    """The attention output projection, summed over the ranks, and the residual."""
    return step.kernels.gemm_all_reduce(attended.reshape(attended.shape[0], -1), layer.o_proj[...], residual)


def gate_up_proj(step: StepInputs, layer: DecoderLayer, h: Float[Array, "T D"]) -> Float[Array, "T F"]:
    """silu(gate) * up of this rank's columns."""
    return step.kernels.gemm(h, layer.gate_up_proj[...], swiglu=True, rows=step.used_tokens)


def down_proj(
    step: StepInputs, layer: DecoderLayer, ffn: Float[Array, "T F"], residual: Float[Array, "T D"] | None = None
) -> Float[Array, "T D"]:
    """This rank's part of the feed-forward's output: a partial sum."""
    return step.kernels.gemm(ffn, layer.down_proj[...], residual=residual, rows=step.used_tokens)


def down_proj_all_reduce(
    step: StepInputs, layer: DecoderLayer, ffn: Float[Array, "T F"], residual: Float[Array, "T D"]
) -> Float[Array, "T D"]:
    """The feed-forward's output, summed over the ranks, and the residual."""
    return step.kernels.gemm_all_reduce(ffn, layer.down_proj[...], residual)


def router(config: ModelConfig, layer: DecoderLayer, h: Float[Array, "T D"]) -> tuple[Array, Array]:
    """Experts of each token, int32[T, experts_per_token], and weights: softmax over all, renormalised over the chosen."""
    scores = jnp.matmul(h, layer.router[...], preferred_element_type=jnp.float32)
    weights, experts = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), config.experts_per_token)
    return experts, weights / weights.sum(-1, keepdims=True)


def experts(
    config: ModelConfig, step: StepInputs, layer: DecoderLayer, h: Float[Array, "T D"], chosen: Array, weights: Array
) -> Float[Array, "T D"]:
    """This rank's part of the mixture: tokens sorted by expert, two grouped GEMMs, weighted sum back per token.

    Padding goes to no expert: it is sorted behind the last one's tokens, where nothing is multiplied.
    """
    T, top = chosen.shape
    flat = jnp.where(step.slots[:, None] >= 0, chosen, config.num_experts).reshape(-1)
    order = jnp.argsort(flat)
    group_sizes = jnp.bincount(flat, length=config.num_experts).astype(jnp.int32)
    hidden = step.kernels.grouped_gemm(h[order // top], layer.experts_gate_up[...], group_sizes, swiglu=True)
    out = step.kernels.grouped_gemm(hidden, layer.experts_down[...], group_sizes)
    per_choice = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(T, top, -1)
    return jnp.einsum("tkd,tk->td", per_choice.astype(jnp.float32), weights).astype(h.dtype)


@dataclasses.dataclass(frozen=True)
class Operation:
    """`apply(config, step, layer, *reads) -> writes`, where reads and writes are the named values of a token range.

    `k_pages` and `v_pages` are the exception: they are the layer's whole pool, whatever the range.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    apply: Callable[..., tuple[Array, ...]]


# x is the residual stream, h a normalised copy of it; o and down are what the two halves of a layer add to it.
OPERATIONS: dict[str, Operation] = {
    "attention_norm": Operation(("x",), ("h",), lambda c, s, l, x: (rms_norm(c, l.attn_norm[...], x),)),
    "qkv_proj": Operation(("h",), ("qkv",), lambda c, s, l, h: (qkv_proj(s, l, h),)),
    "append_kv": Operation(
        ("qkv", "k_pages", "v_pages"),
        ("q", "kv", "k_pages", "v_pages"),
        lambda c, s, l, qkv, k, v: append_kv(s, qkv, k, v),
    ),
    "decode_attention": Operation(
        ("q", "k_pages", "v_pages"), ("decoded",), lambda c, s, l, q, k, v: (decode_attention(s, q, k, v),)
    ),
    "prefill_attention": Operation(
        ("q", "k_pages", "v_pages"), ("prefilled",), lambda c, s, l, q, k, v: (prefill_attention(s, q, k, v),)
    ),
    "prefill_attention_into_decoded": Operation(
        ("q", "k_pages", "v_pages", "decoded"), ("attended",), lambda c, s, l, q, k, v, d: (prefill_attention(s, q, k, v, d),)
    ),
    "attention_all_gather": Operation(("attended",), ("attended",), lambda c, s, l, a: (all_gather(a, axis=1),)),
    "o_proj": Operation(("attended",), ("o",), lambda c, s, l, a: (o_proj(s, l, a),)),
    "o_proj_residual": Operation(("attended", "x"), ("x",), lambda c, s, l, a, x: (o_proj(s, l, a, residual=x),)),
    "o_proj_all_reduce": Operation(("attended", "x"), ("x",), lambda c, s, l, a, x: (o_proj_all_reduce(s, l, a, x),)),
    "o_all_reduce": Operation(("o",), ("o",), lambda c, s, l, o: (all_reduce(o),)),
    "o_all_gather": Operation(("o",), ("o",), lambda c, s, l, o: (all_gather(o, axis=1),)),
    "attention_residual": Operation(("x", "o"), ("x",), lambda c, s, l, x, o: (x + o,)),
    "ffn_norm": Operation(("x",), ("h",), lambda c, s, l, x: (rms_norm(c, l.ffn_norm[...], x),)),
    "gate_up_proj": Operation(("h",), ("ffn",), lambda c, s, l, h: (gate_up_proj(s, l, h),)),
    "down_proj": Operation(("ffn",), ("down",), lambda c, s, l, f: (down_proj(s, l, f),)),
    "down_proj_residual": Operation(("ffn", "x"), ("x",), lambda c, s, l, f, x: (down_proj(s, l, f, residual=x),)),
    "down_proj_all_reduce": Operation(("ffn", "x"), ("x",), lambda c, s, l, f, x: (down_proj_all_reduce(s, l, f, x),)),
    "router": Operation(("h",), ("chosen", "weights"), lambda c, s, l, h: router(c, l, h)),
    "experts": Operation(("h", "chosen", "weights"), ("down",), lambda c, s, l, h, e, w: (experts(c, s, l, h, e, w),)),
    "ffn_all_reduce": Operation(("down",), ("down",), lambda c, s, l, d: (all_reduce(d),)),
    "ffn_residual": Operation(("x", "down"), ("x",), lambda c, s, l, x, d: (x + d,)),
}


def layer_operations(config: ModelConfig, layout: ParallelLayout, *, reduce_in_gemm: bool = False) -> tuple[str, ...]:
    """Names of a layer's operations in an order that respects their reads and writes, for a whole batch at once.

    With `reduce_in_gemm` the GEMMs in front of an all-reduce sum over the ranks themselves.
    """
    attention = (
        "attention_norm", "qkv_proj", "append_kv", "decode_attention", "prefill_attention_into_decoded",
    )  # fmt: skip
    if layout.tp_size == 1:  # nothing to reduce, so the GEMM adds the residual
        output: tuple[str, ...] = ("o_proj_residual",)
    elif layout.gathered_o_proj:
        output = ("attention_all_gather", "o_proj", "o_all_gather", "attention_residual")
    elif reduce_in_gemm:
        output = ("o_proj_all_reduce",)
    else:
        output = ("o_proj", "o_all_reduce", "attention_residual")
    if config.is_moe:
        feed_forward: tuple[str, ...] = ("router", "experts", "ffn_all_reduce", "ffn_residual")
    elif layout.tp_size == 1:
        feed_forward = ("gate_up_proj", "down_proj_residual")
    elif reduce_in_gemm:
        feed_forward = ("gate_up_proj", "down_proj_all_reduce")
    else:
        feed_forward = ("gate_up_proj", "down_proj", "ffn_all_reduce", "ffn_residual")
    return (*attention, *output, "ffn_norm", *feed_forward)

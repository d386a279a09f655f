"""Logits to tokens: greedy, temperature, top-k, top-p and min-p, each row by its own parameters and its own random key.

Filters are thresholds on the scaled logits, found by bisection over the ordered bit patterns of float32 instead of a sort: 32
counting (or summing) passes over [S, V], which the compiler fuses, and exact for ties.
"""

import enum
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from nanoflow_jax.batch import Batch


class SamplingMode(enum.Enum):
    """What a step's sampling needs to compute; static, one executable each. Later modes handle the rows of earlier ones."""

    GREEDY = "greedy"
    TEMPERATURE = "temperature"
    FILTERED = "filtered"


class Sampled(NamedTuple):
    """One token per row. Log-probabilities are the log-softmax of the raw logits: temperature and filters do not enter.

    `top_ids` and `top_logprobs` are the likeliest tokens, likeliest first, or None when none were asked for.
    """

    token_ids: Int[Array, " S"]
    logprobs: Float[Array, " S"]
    top_ids: Int[Array, "S n"] | None
    top_logprobs: Float[Array, "S n"] | None


def sampling_mode(batch: Batch) -> SamplingMode:
    """The cheapest mode that serves every sampling row of a host batch."""
    hot = (batch.temperature > 0) & (batch.sequence_rows >= 0)
    if not np.any(hot):
        return SamplingMode.GREEDY
    filtered = hot & ((batch.top_k > 0) | (batch.top_p < 1) | (batch.min_p > 0))
    return SamplingMode.FILTERED if np.any(filtered) else SamplingMode.TEMPERATURE


def sample(logits: Float[Array, "S V"], batch: Batch, mode: SamplingMode, num_logprobs: int = 0) -> Sampled:
    """One token per row of `logits`, which belong to the rows of `batch` in order. `mode` and `num_logprobs` are static.

    Rows with temperature 0 take the likeliest token (the lowest id among equals) in every mode. Filters apply in the order
    temperature, top-k, top-p (of what top-k left), min-p; tokens tied with the last one kept are kept. The random key of a row
    is (seed, kv_len), so its token does not depend on its place in the batch nor on the batch.
    """
    logits = logits.astype(jnp.float32)
    log_normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    token_ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if mode is not SamplingMode.GREEDY:
        hot = batch.temperature > 0
        # The likeliest token stays at 0, so that no temperature, however small, overflows into inf - inf.
        temperature = jnp.where(hot, jnp.maximum(batch.temperature, jnp.finfo(jnp.float32).tiny), 1.0)
        scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature[:, None]
        if mode is SamplingMode.FILTERED:
            scaled = _filter(scaled, batch)
        drawn = jnp.argmax(scaled + _gumbel(batch, logits.shape[1]), axis=-1).astype(jnp.int32)
        token_ids = jnp.where(hot, drawn, token_ids)
    logprobs = jnp.take_along_axis(logits, token_ids[:, None], axis=1) - log_normaliser
    if num_logprobs == 0:
        return Sampled(token_ids, logprobs[:, 0], None, None)
    top_logits, top_ids = jax.lax.top_k(logits, min(num_logprobs, logits.shape[1]))
    return Sampled(token_ids, logprobs[:, 0], top_ids.astype(jnp.int32), top_logits - log_normaliser)


def _gumbel(batch: Batch, vocab_size: int) -> Float[Array, "S V"]:
    """argmax(logits + Gumbel noise) is a draw from softmax(logits)."""

    def row(seed: jax.Array, kv_len: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), kv_len), (vocab_size,), jnp.float32)

    return jax.vmap(row)(jnp.asarray(batch.seeds), jnp.asarray(batch.kv_lens))


def _filter(scaled: Float[Array, "S V"], batch: Batch) -> Float[Array, "S V"]:
    """`scaled` with -inf for every token that a filter removes; at least the likeliest stays."""
    keys = _ordered_bits(scaled)
    highest = jnp.max(keys, axis=-1)
    probs = jax.nn.softmax(scaled, axis=-1)

    vocab_size = scaled.shape[1]
    count = jnp.where(batch.top_k > 0, jnp.minimum(batch.top_k, vocab_size), vocab_size)
    k_key = _largest_key(lambda key: jnp.sum(keys >= key[:, None], axis=-1, dtype=jnp.int32) >= count, highest)
    kept = jnp.where(keys >= k_key[:, None], probs, 0.0)

    # Mass that rounding keeps out of reach leaves the threshold at 0, which keeps everything.
    mass = jnp.where(batch.top_p < 1, batch.top_p * jnp.sum(kept, axis=-1), jnp.inf)
    p_key = _largest_key(lambda key: jnp.sum(jnp.where(keys >= key[:, None], kept, 0.0), axis=-1) >= mass, highest)

    likely = probs >= jnp.asarray(batch.min_p)[:, None] * jnp.max(probs, axis=-1, keepdims=True)
    return jnp.where((keys >= jnp.maximum(k_key, p_key)[:, None]) & likely, scaled, -jnp.inf)


def _ordered_bits(x: Float[Array, "S V"]) -> UInt[Array, "S V"]:
    """uint32 with the order of the floats; -0.0 and 0.0 get one key."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest_key(holds: Callable[[jax.Array], jax.Array], highest: UInt[Array, " S"]) -> UInt[Array, " S"]:
    """The largest key up to `highest` at which `holds` is true; it is true of every smaller key. 0 if of none."""

    def step(i: jax.Array, key: jax.Array) -> jax.Array:
        trial = key | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where((trial <= highest) & holds(trial), trial, key)

    return jax.lax.fori_loop(0, 32, step, jnp.zeros_like(highest))

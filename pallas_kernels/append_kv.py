"""Rotary embedding on queries and keys, and keys and values to their slots: XLA's own fusions, not a Pallas kernel.

The work is a pass over the qkv activations and nothing else; docs/kernels-attention.md has its time beside the stream's.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.reference import rotate


def append_kv(
    qkv: Float[Array, "T K G_plus_2 H"],
    cos: Float[Array, "T H_2"],
    sin: Float[Array, "T H_2"],
    slots: Int[Array, " T"],
    k_pages: Float[Array, "P K page_size H"],
    v_pages: Float[Array, "P K page_size H"],
    *,
    num_sms: int,
) -> tuple[
    Float[Array, "T K G H"],
    Float[Array, "T K 2 H"],
    Float[Array, "P K page_size H"],
    Float[Array, "P K page_size H"],
]:
    """Rotated queries, each token's rotated key and value, and the pages with these in the tokens' slots.

    Slots are distinct; a token with slot -1 writes nothing. Pages are updated in place where they are donated or are
    temporaries of the surrounding computation.

    XLA spreads its fusions over the SMs that are free, so `num_sms` bounds nothing here; it stands for the kernel contract.

    Raises:
      ValueError: shapes do not fit each other, or `num_sms` is not positive.
    """
    T, K, _, H = qkv.shape
    if k_pages.shape != v_pages.shape or k_pages.shape[1] != K or k_pages.shape[3] != H:
        raise ValueError(f"{k_pages.shape=} and {v_pages.shape=} do not fit {qkv.shape=}")
    if cos.shape != (T, H // 2) or sin.shape != cos.shape or slots.shape != (T,):
        raise ValueError(f"{cos.shape=}, {sin.shape=} and {slots.shape=} do not fit {qkv.shape=}")
    if num_sms < 1:
        raise ValueError(f"{num_sms=} is not positive")
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    k, v = rotate(k, cos, sin).astype(k_pages.dtype), v.astype(v_pages.dtype)
    # What nobody reads of these four costs nothing: XLA leaves it out.
    return rotate(q, cos, sin), jnp.stack([k, v], axis=2), _write(k_pages, k, slots), _write(v_pages, v, slots)


def _write(pages: Array, tokens: Array, slots: Array) -> Array:
    num_pages, _, page_size, _ = pages.shape
    # Out of bounds is what "drop" drops, and a negative index would count from the end. Pages and offsets stay separate
    # indices: the element offset of a slot can pass 2^31.
    page, offset = jnp.where(slots < 0, num_pages, slots // page_size), slots % page_size
    return pages.at[page, :, offset].set(tokens, mode="drop", unique_indices=True)

"""Kernels whose undefined results are a value of one's choice: what depends on it depends on padding."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from nanoflow_jax.kernels import REFERENCE, Kernels
from pallas_kernels import reference


def leaving_undefined(value: Array | float, told_rows: Callable[[bool], None] = lambda _: None) -> Kernels:
    """The reference, but for `value` wherever the kernel contract leaves a result undefined.

    Args:
      told_rows: called for every GEMM with whether it was told how many rows are in use.
    """

    def fill(out: Array, defined: Array) -> Array:
        return jnp.where(defined.reshape(-1, *[1] * (out.ndim - 1)), out, jnp.asarray(value, out.dtype))

    def count(array: Array) -> Array:
        return jnp.arange(array.shape[0], dtype=jnp.int32)

    def gemm(a: Array, b: Array, *, rows: Array | None = None, **epilogue: Any) -> Array:
        told_rows(rows is not None)
        return fill(reference.gemm(a, b, **epilogue), count(a) < (a.shape[0] if rows is None else rows))

    def grouped_gemm(x: Array, w: Array, group_sizes: Array, *, swiglu: bool = False) -> Array:
        return fill(reference.grouped_gemm(x, w, group_sizes, swiglu=swiglu), count(x) < group_sizes.sum())

    def append_kv(
        qkv: Array, cos: Array, sin: Array, slots: Array, k_pages: Array, v_pages: Array, *, rows: Array, with_kv: bool
    ) -> tuple[Array, ...]:
        assert rows is not None
        q, kv, *pages = reference.append_kv(qkv, cos, sin, slots, k_pages, v_pages)
        used = count(q) < rows
        return fill(q, used), fill(kv, used) if with_kv else kv[:, :, :0], *pages

    def decode_attention(q: Array, *operands: Array) -> Array:
        return fill(reference.decode_attention(q, *operands), count(q) < operands[-1].shape[0])

    def prefill_attention(q: Array, *operands: Array, out: Array | None = None) -> Array:
        *_, q_starts, q_lens = operands
        if out is not None:
            return reference.prefill_attention(q, *operands, out=out)
        token = count(q)[:, None]
        covered = (token >= q_starts[None]) & (token < (q_starts + q_lens)[None])
        return fill(reference.prefill_attention(q, *operands), covered.any(axis=1))

    return Kernels(
        gemm=gemm,
        grouped_gemm=grouped_gemm,
        append_kv=append_kv,
        decode_attention=decode_attention,
        prefill_attention=prefill_attention,
        gemm_all_reduce=REFERENCE.gemm_all_reduce,
        gemm_with_decode_attention=REFERENCE.gemm_with_decode_attention,
    )

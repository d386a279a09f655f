"""The jnp references against naive float64 numpy, at awkward lengths, with NaN wherever nothing may be read."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import reference

K, G, H = 2, 3, 8


def naive_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q [K, G, H] over k, v [n, K, H]."""
    scores = np.einsum("kgh,nkh->kgn", q, k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kgn,nkh->kgh", weights / weights.sum(-1, keepdims=True), v)


class Pool:
    """Pages handed out in shuffled order; whatever no sequence wrote is NaN."""

    def __init__(self, rng: np.random.Generator, kv_lens: list[int], page_size: int, spare_pages: int = 3):
        per_row = [-(-n // page_size) for n in kv_lens]
        num_pages = 1 + sum(per_row) + spare_pages
        ids = iter(rng.permutation(np.arange(1, num_pages)))
        self.tables = np.zeros((len(kv_lens), max(per_row) + 2), np.int32)
        self.k_pages = np.full((num_pages, K, page_size, H), np.nan, np.float32)
        self.v_pages = self.k_pages.copy()
        self.keys = [rng.standard_normal((n, K, H), np.float32) for n in kv_lens]
        self.values = [rng.standard_normal((n, K, H), np.float32) for n in kv_lens]
        for row, n in enumerate(kv_lens):
            self.tables[row, : per_row[row]] = [next(ids) for _ in range(per_row[row])]
            for i in range(n):
                page = self.tables[row, i // page_size]
                self.k_pages[page, :, i % page_size] = self.keys[row][i]
                self.v_pages[page, :, i % page_size] = self.values[row][i]


@settings(max_examples=25)
@given(
    kv_lens=st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 127, 128, 129, 300]), min_size=5, max_size=5),
    page_size=st.sampled_from([1, 8, 16]),
    seed=st.integers(0, 2**31),
)
def test_decode_attention(kv_lens: list[int], page_size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool = Pool(rng, [*kv_lens, 5], page_size)
    lens = [*kv_lens, 5]
    q = rng.standard_normal((len(lens), K, G, H), np.float32)
    out = reference.decode_attention(
        jnp.asarray(q),
        jnp.asarray(pool.k_pages),
        jnp.asarray(pool.v_pages),
        jnp.asarray(pool.tables),
        jnp.asarray(lens, jnp.int32),
    )
    for row, n in enumerate(lens):
        expected = naive_attention(q[row], pool.keys[row], pool.values[row]) if n else np.zeros((K, G, H))
        np.testing.assert_allclose(out[row], expected, atol=2e-6)


@settings(max_examples=25)
@given(
    rows=st.lists(st.tuples(st.sampled_from([0, 1, 31, 32, 33, 70]), st.sampled_from([0, 1, 9, 130])), min_size=3, max_size=3),
    page_size=st.sampled_from([4, 16]),
    gap=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_prefill_attention(rows: list[tuple[int, int]], page_size: int, gap: int, seed: int) -> None:
    """Rows of (queries, tokens already cached), with tokens between rows that no row covers."""
    rng = np.random.default_rng(seed)
    q_lens = [n for n, _ in rows]
    kv_lens = [n + cached if n else 0 for n, cached in rows]
    pool = Pool(rng, kv_lens, page_size)
    q_starts = np.cumsum([gap, *(n + gap for n in q_lens)])[:-1]
    q = rng.standard_normal((3 * (70 + gap) + gap, K, G, H), np.float32)
    out = reference.prefill_attention(
        *map(jnp.asarray, (q, pool.k_pages, pool.v_pages, pool.tables)),
        *(jnp.asarray(x, jnp.int32) for x in (kv_lens, q_starts, q_lens)),
    )
    for row, (n, cached) in enumerate(rows):
        for j in range(n):
            seen = cached + j + 1
            expected = naive_attention(q[q_starts[row] + j], pool.keys[row][:seen], pool.values[row][:seen])
            np.testing.assert_allclose(out[q_starts[row] + j], expected, atol=2e-6)


def test_append_kv_rotates_and_writes_only_its_slots() -> None:
    rng = np.random.default_rng(0)
    T, page_size = 5, 4
    qkv = rng.standard_normal((T, K, G + 2, H), np.float32)
    angles = rng.uniform(0, 6, (T, H // 2)).astype(np.float32)
    slots = np.array([6, -1, 13, 15, 4], np.int32)
    pages = rng.standard_normal((4, K, page_size, H), np.float32)
    inputs = (qkv, np.cos(angles), np.sin(angles), slots, pages, 2 * pages)
    q, kv, k_pages, v_pages = reference.append_kv(*map(jnp.asarray, inputs))

    def rotated(x: np.ndarray) -> np.ndarray:
        """Each pair (i, i + H / 2) as a complex number, turned by its angle."""
        turned = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * np.exp(1j * angles)[:, None]
        return np.concatenate([turned.real, turned.imag], -1)

    for g in range(G):
        np.testing.assert_allclose(q[:, :, g], rotated(qkv[:, :, g]), atol=1e-6)
    np.testing.assert_allclose(kv[:, :, 0], rotated(qkv[:, :, -2]), atol=1e-6)
    np.testing.assert_array_equal(kv[:, :, 1], qkv[:, :, -1])
    expected_k, expected_v = pages.copy(), 2 * pages
    for token in (0, 2, 3, 4):
        expected_k[slots[token] // page_size, :, slots[token] % page_size] = rotated(qkv[:, :, -2])[token]
        expected_v[slots[token] // page_size, :, slots[token] % page_size] = qkv[token, :, -1]
    np.testing.assert_allclose(k_pages, expected_k, atol=1e-6)
    np.testing.assert_array_equal(v_pages, expected_v)


@pytest.mark.parametrize("swiglu", [False, True])
def test_gemm_epilogues(swiglu: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((5, 7), np.float32), rng.standard_normal((7, 2, 6), np.float32)
    bias = rng.standard_normal((2, 6), np.float32)
    product = np.einsum("mk,kcn->mcn", a, b) + bias
    if swiglu:
        residual = rng.standard_normal((5, 6), np.float32)
        out = reference.gemm(
            jnp.asarray(a), jnp.asarray(b), bias=jnp.asarray(bias), residual=jnp.asarray(residual), swiglu=True
        )
        expected = product[:, 0] / (1 + np.exp(-product[:, 0])) * product[:, 1] + residual
    else:
        out, expected = reference.gemm(jnp.asarray(a), jnp.asarray(b), bias=jnp.asarray(bias)), product
    np.testing.assert_allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("sizes", [[0, 9, 0, 3], [12, 0, 0, 0], [3, 3, 3, 3], [0, 0, 0, 0]])
def test_grouped_gemm(sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((12, 5), np.float32), rng.standard_normal((4, 5, 7), np.float32)
    out = reference.grouped_gemm(jnp.asarray(x), jnp.asarray(w), jnp.asarray(sizes, jnp.int32))
    expert = np.repeat(np.arange(4), sizes)
    np.testing.assert_allclose(out[: len(expert)], np.einsum("mk,mkn->mn", x[: len(expert)], w[expert]), atol=1e-5)

"""append_kv: the rotation against one written out with complex numbers, the writes against a loop over tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import append_kv


def _inputs(T: int, K: int, G: int, H: int, pages: int, page_size: int, seed: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(seed)
    normal = functools.partial(_normal, rng)
    angle = rng.uniform(0, 7, (T, H // 2))
    slots = rng.permutation(pages * page_size)[:T].astype(np.int32)
    slots[rng.random(T) < 0.3] = -1
    cos, sin = jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)
    pool = (pages, K, page_size, H)
    return normal(T, K, G + 2, H), cos, sin, jnp.asarray(slots), normal(*pool), normal(*pool)


def _normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Halves of a head as real and imaginary parts, turned by the token's angles."""
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    turned = (first + 1j * second) * (cos + 1j * sin)
    return np.concatenate([turned.real, turned.imag], axis=-1)


@settings(max_examples=8)
@given(
    T=st.integers(1, 9),
    K=st.integers(1, 3),
    G=st.integers(1, 4),
    page_size=st.sampled_from([4, 16]),
    seed=st.integers(0, 1000),
)
def test_rotates_and_writes_only_the_slots(T, K, G, page_size, seed):
    qkv, cos, sin, slots, k_pages, v_pages = _inputs(T, K, G, 8, 5, page_size, seed)
    q, kv, k_new, v_new = append_kv(qkv, cos, sin, slots, k_pages, v_pages, num_sms=1)
    x, c, s = np.asarray(qkv, np.float64), np.asarray(cos, np.float64), np.asarray(sin, np.float64)
    k_wanted, v_wanted = np.asarray(k_pages, np.float64), np.asarray(v_pages, np.float64)
    for t, slot in enumerate(np.asarray(slots)):
        np.testing.assert_allclose(np.asarray(q[t], np.float64), _rotated(x[t, :, :G], c[t], s[t]), rtol=2**-7, atol=2**-7)
        np.testing.assert_array_equal(kv[t, :, 1], qkv[t, :, -1])
        if slot >= 0:
            np.testing.assert_array_equal(kv[t, :, 0], k_new[slot // page_size, :, slot % page_size])
            k_wanted[slot // page_size, :, slot % page_size] = _rotated(x[t, :, G], c[t], s[t])
            v_wanted[slot // page_size, :, slot % page_size] = x[t, :, G + 1]
    np.testing.assert_allclose(np.asarray(k_new, np.float64), k_wanted, rtol=2**-7, atol=2**-7)
    np.testing.assert_array_equal(np.asarray(v_new, np.float64), v_wanted)


def test_updates_donated_pages_in_place():
    # float32: on a CPU, XLA computes bfloat16 scatters in float32, with copies.
    inputs = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in _inputs(7, 2, 2, 8, 1000, 16, 0)]
    compiled = jax.jit(functools.partial(append_kv, num_sms=1), donate_argnums=(4, 5)).lower(*inputs).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * inputs[4].nbytes
    assert memory.temp_size_in_bytes < inputs[4].nbytes


def test_refuses_arrays_that_do_not_fit():
    qkv, cos, sin, slots, k_pages, v_pages = _inputs(3, 2, 2, 8, 4, 16, 0)
    with pytest.raises(ValueError, match="k_pages"):
        append_kv(qkv, cos, sin, slots, k_pages[:, :1], v_pages, num_sms=1)
    with pytest.raises(ValueError, match="slots"):
        append_kv(qkv, cos, sin, slots[:2], k_pages, v_pages, num_sms=1)
    with pytest.raises(ValueError, match="num_sms=0"):
        append_kv(qkv, cos, sin, slots, k_pages, v_pages, num_sms=0)


@pytest.mark.gpu
def test_gpu_slots_beyond_2_to_the_31_elements():
    K, H, page_size = 8, 128, 64
    pages = 2**31 // (K * page_size * H) + 8
    qkv, cos, sin, _, _, _ = _inputs(4, K, 4, H, 1, page_size, 0)
    slots = jnp.asarray([pages * page_size - 1, 0, -1, (pages - 2) * page_size + 5], jnp.int32)
    append = jax.jit(functools.partial(append_kv, num_sms=132), donate_argnums=(4, 5))
    *_, v_new = append(qkv, cos, sin, slots, *(jnp.zeros((pages, K, page_size, H), jnp.bfloat16) for _ in range(2)))
    np.testing.assert_array_equal(np.asarray(v_new[-1, :, -1]), np.asarray(qkv[0, :, -1]))
    np.testing.assert_array_equal(np.asarray(v_new[-2, :, 5]), np.asarray(qkv[3, :, -1]))
    np.testing.assert_array_equal(np.asarray(v_new[0, :, 0]), np.asarray(qkv[1, :, -1]))
    written = jax.jit(lambda x: (x != 0).any(axis=(1, 3)).sum())(v_new)
    assert int(written) == 3

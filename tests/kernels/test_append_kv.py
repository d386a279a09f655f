"""append_kv interpreted on the CPU, compiled for an H200 without one, and on the GPU.

The rotation against one written out with complex numbers, the writes against a loop over tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import append_kv, reference
from pallas_kernels._mosaic import UnsupportedDeviceError
from pallas_kernels.append_kv import TuningConfig
from pallas_kernels.bench.attention import APPEND_CONFIGS
from tests.kernels import aot
from tests.kernels.interpret import interpreted

_SMALL = TuningConfig(warpgroups=2, pairs=1)


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


def _check(inputs: tuple[jax.Array, ...], outputs: tuple[jax.Array, ...], rows: int) -> None:
    qkv, cos, sin, slots, k_pages, v_pages = inputs
    q, kv, k_new, v_new = outputs
    page_size, G = k_pages.shape[2], q.shape[2]
    x, c, s = np.asarray(qkv, np.float64), np.asarray(cos, np.float64), np.asarray(sin, np.float64)
    k_wanted, v_wanted = np.asarray(k_pages, np.float64), np.asarray(v_pages, np.float64)
    for t, slot in enumerate(np.asarray(slots)[:rows]):
        np.testing.assert_allclose(np.asarray(q[t], np.float64), _rotated(x[t, :, :G], c[t], s[t]), rtol=2**-7, atol=2**-7)
        np.testing.assert_array_equal(kv[t, :, 1], qkv[t, :, -1])
        if slot >= 0:
            np.testing.assert_array_equal(kv[t, :, 0], k_new[slot // page_size, :, slot % page_size])
            k_wanted[slot // page_size, :, slot % page_size] = _rotated(x[t, :, G], c[t], s[t])
            v_wanted[slot // page_size, :, slot % page_size] = x[t, :, G + 1]
    np.testing.assert_allclose(np.asarray(k_new, np.float64), k_wanted, rtol=2**-7, atol=2**-7)
    np.testing.assert_array_equal(np.asarray(v_new, np.float64), v_wanted)


@settings(max_examples=4)
@given(
    T=st.integers(1, 9),
    K=st.integers(1, 3),
    G=st.integers(1, 4),
    H=st.sampled_from([16, 64]),
    page_size=st.sampled_from([4, 16]),
    num_sms=st.integers(1, 3),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_rotates_and_writes_only_the_slots(T, K, G, H, page_size, num_sms, seed, data):
    inputs = _inputs(T, K, G, H, 5, page_size, seed)
    rows = data.draw(st.integers(0, T))
    inputs = (*inputs[:3], jnp.where(jnp.arange(T) < rows, inputs[3], -1), *inputs[4:])
    with interpreted():
        append = jax.jit(functools.partial(append_kv, num_sms=num_sms, config=_SMALL))
        _check(inputs, append(*inputs, rows=jnp.int32(rows)), rows)


def test_blocks_that_end_within_a_token_leave_nothing_out():
    """A token is 81 pairs, a block 128."""
    inputs = _inputs(9, 3, 7, 48, 3, 8, 0)
    with interpreted():
        outputs = jax.jit(functools.partial(append_kv, num_sms=1, config=TuningConfig(warpgroups=3, pairs=1)))(*inputs)
    _check(inputs, outputs, 9)


def test_keys_and_values_by_token_can_be_left_out():
    inputs = _inputs(3, 1, 2, 32, 2, 4, 1)
    with interpreted():
        with_kv, without = (
            jax.jit(functools.partial(append_kv, num_sms=1, with_kv=wanted, config=_SMALL))(*inputs) for wanted in (True, False)
        )
    assert without[1].size == 0
    for i in (0, 2, 3):
        np.testing.assert_array_equal(with_kv[i], without[i])


def test_what_lies_behind_the_rows_is_left_out():
    """All but the first block of a warpgroup, which does not wait to be told: here the second token begins the second block."""
    T, K, G, H = 4, 2, 6, 128  # a token is 128 pairs
    inputs = _inputs(T, K, G, H, 2, 4, 2)
    inputs = (*inputs[:3], jnp.arange(T, dtype=jnp.int32), *inputs[4:])
    with interpreted():
        append = jax.jit(functools.partial(append_kv, num_sms=1, config=TuningConfig(warpgroups=1, pairs=1)))
        *_, k_pages, v_pages = append(*inputs, rows=jnp.int32(2))
    for pages, before in ((k_pages, inputs[4]), (v_pages, inputs[5])):
        np.testing.assert_array_equal(pages[0, :, 2:], before[0, :, 2:])
        assert (np.asarray(pages[0, :, :2]) != np.asarray(before[0, :, :2])).any(axis=(0, 2)).all()


def test_refuses_what_it_cannot_do():
    qkv, cos, sin, slots, k_pages, v_pages = _inputs(3, 2, 2, 16, 4, 16, 0)
    with pytest.raises(UnsupportedDeviceError, match=r"reference\.append_kv"):
        append_kv(qkv, cos, sin, slots, k_pages, v_pages, num_sms=1)
    with pytest.raises(ValueError, match="k_pages"):
        append_kv(qkv, cos, sin, slots, k_pages[:, :1], v_pages, num_sms=1)
    with pytest.raises(ValueError, match="slots"):
        append_kv(qkv, cos, sin, slots[:2], k_pages, v_pages, num_sms=1)
    with interpreted(), pytest.raises(ValueError, match="num_sms=0"):
        append_kv(qkv, cos, sin, slots, k_pages, v_pages, num_sms=0)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        append_kv(qkv.astype(jnp.float32), cos, sin, slots, k_pages, v_pages, num_sms=1)
    with pytest.raises(NotImplementedError, match="16, not 8"):
        append_kv(*_inputs(3, 2, 2, 8, 4, 16, 0), num_sms=1)


def aot_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    def case(T: int, K: int, G: int, H: int, page_size: int, **options: Any) -> tuple[Any, tuple[Any, ...]]:
        pages = jax.ShapeDtypeStruct((4096, K, page_size, H), jnp.bfloat16)
        angles = jax.ShapeDtypeStruct((T, H // 2), jnp.float32)
        slots, rows = jax.ShapeDtypeStruct((T,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)

        def append(rows: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
            return append_kv(*operands, rows=rows, num_sms=132, **options)

        return append, (rows, jax.ShapeDtypeStruct((T, K, G + 2, H), jnp.bfloat16), angles, angles, slots, pages, pages)

    configs = {f"{c.warpgroups} x {c.pairs}": case(2048, 8, 4, 128, 64, with_kv=False, config=c) for c in APPEND_CONFIGS}
    return configs | {
        "with-kv": case(2048, 8, 4, 128, 64),
        "llama-3-70b-tp8": case(2048, 1, 8, 128, 16, with_kv=False),
        "smollm2": case(100, 3, 3, 64, 32),
    }


@pytest.mark.aot
def test_compiles_for_h200_without_spills():
    for name, found in aot.resources(__name__).items():
        assert found.spill_bytes == 0, name


# On a Hopper GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("config", APPEND_CONFIGS)
@pytest.mark.parametrize(("T", "K", "G", "H", "page_size"), [(300, 8, 4, 128, 64), (77, 1, 8, 128, 16), (512, 3, 3, 64, 32)])
def test_gpu_rotates_and_writes_only_the_slots(T, K, G, H, page_size, config):
    inputs = _inputs(T, K, G, H, 2 * T // page_size, page_size, 0)
    for num_sms in (132, 7):
        _check(inputs, jax.jit(functools.partial(append_kv, num_sms=num_sms, config=config))(*inputs), T)


@pytest.mark.gpu
def test_gpu_padding_costs_no_writes():
    inputs = _inputs(2000, 8, 4, 128, 64, 64, 0)
    padded = (*inputs[:3], jnp.where(jnp.arange(2000) < 500, inputs[3], -1), *inputs[4:])
    outputs = jax.jit(functools.partial(append_kv, num_sms=132))(*padded, rows=jnp.int32(500))
    _check(padded, outputs, 500)
    wanted = jax.jit(reference.append_kv)(*padded)
    np.testing.assert_array_equal(outputs[3], wanted[3])


@pytest.mark.gpu
def test_gpu_updates_donated_pages_in_place():
    inputs = _inputs(7, 8, 4, 128, 1000, 64, 0)
    compiled = jax.jit(functools.partial(append_kv, num_sms=132), donate_argnums=(4, 5)).lower(*inputs).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * inputs[4].nbytes
    assert memory.temp_size_in_bytes < inputs[4].nbytes


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

"""decode_attention interpreted on the CPU, compiled for an H200 without one, and on the GPU, against the plain reference."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import reference
from pallas_kernels._mosaic import SMEM_LIMIT_BYTES, UnsupportedDeviceError
from pallas_kernels.decode_attention import TuningConfig, decode_attention
from tests.kernels import aot, paged
from tests.kernels.interpret import interpreted

_SMALL = TuningConfig(workers=2, tiles_per_step=1, slots=2)


def _inputs(kv_lens: list[int], K: int, G: int, H: int, page_size: int, seed: int = 0) -> tuple[jax.Array, ...]:
    q = jax.random.normal(jax.random.key(seed), (len(kv_lens), K, G, H), jnp.bfloat16)
    return q, *paged.cache(kv_lens, K, page_size, H, seed=seed), jnp.asarray(kv_lens, jnp.int32)


def _interpret(inputs: tuple[jax.Array, ...], num_sms: int, config: TuningConfig | None = None) -> np.ndarray:
    with interpreted():
        return np.asarray(jax.jit(functools.partial(decode_attention, num_sms=num_sms, config=config))(*inputs))


@pytest.mark.parametrize(
    ("kv_lens", "K", "G", "H", "page_size", "num_sms", "config"),
    [
        # A page, one more, one less, a single token, an unused row between; groups of three.
        pytest.param([16, 17, 0, 15, 1], 1, 3, 64, 16, 2, _SMALL, id="page-borders"),
        # One sequence spread over all workers: every part but the last ends on a whole tile.
        pytest.param([260], 1, 8, 128, 128, 3, TuningConfig(workers=1, tiles_per_step=1, slots=2), id="one-long"),
        pytest.param([130, 64], 1, 4, 64, 64, 1, TuningConfig(workers=1, slots=4), id="one-worker"),
        # Stretches cut items of several heads.
        pytest.param([200, 0, 30], 4, 2, 64, 32, 2, _SMALL, id="several-heads"),
    ],
)
def test_matches_reference(kv_lens, K, G, H, page_size, num_sms, config):
    inputs = _inputs(kv_lens, K, G, H, page_size)
    paged.assert_close(_interpret(inputs, num_sms, config), reference.decode_attention(*inputs))


def test_tokens_behind_the_rows_are_no_concern_of_it():
    """They may hold anything."""
    inputs = _inputs([70, 3], 1, 3, 64, 32)
    more = jnp.concatenate([inputs[0], jnp.full((5, *inputs[0].shape[1:]), jnp.nan, jnp.bfloat16)])
    found = _interpret((more, *inputs[1:]), 2, _SMALL)
    assert found.shape == more.shape
    np.testing.assert_array_equal(found[:2], _interpret(inputs, 2, _SMALL))
    paged.assert_close(reference.decode_attention(more, *inputs[1:])[:2], reference.decode_attention(*inputs))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_sms", [1, 2, 3])
def test_random_shapes_match_reference(seed, num_sms):
    rng = np.random.default_rng([seed, num_sms])
    page_size = int(rng.choice([16, 32, 64, 128]))
    borders = [0, 1, page_size - 1, page_size, page_size + 1, 65, 200]
    kv_lens = [int(n) for n in rng.choice(borders, size=rng.integers(1, 6))]
    K, G, H = int(rng.integers(1, 4)), int(rng.integers(1, 9)), int(rng.choice([64, 128]))
    config = TuningConfig(workers=int(rng.integers(1, 5)), tiles_per_step=int(rng.integers(1, 3)), slots=4)
    inputs = _inputs(kv_lens, K, G, H, page_size, seed)
    paged.assert_close(_interpret(inputs, num_sms, config), reference.decode_attention(*inputs))


@pytest.mark.slow
def test_more_rows_than_a_warpgroup_has_threads():
    """Work is found by a scan over all rows; most of a wide batch may be unused."""
    kv_lens = [0] * 100 + [70, 0, 3] + [0] * 60 + [40]
    inputs = _inputs(kv_lens, 1, 2, 64, 64)
    paged.assert_close(_interpret(inputs, 2, _SMALL), reference.decode_attention(*inputs))


@pytest.mark.slow
def test_empty_batch_returns_zeros():
    assert not _interpret(_inputs([0, 0], 2, 1, 64, 32), 2, _SMALL).any()


def test_refuses_what_it_cannot_do():
    q, k, v, tables, lens = _inputs([16], 1, 2, 64, 16)
    with pytest.raises(UnsupportedDeviceError, match=r"reference\.decode_attention"):
        decode_attention(q, k, v, tables, lens, num_sms=1)
    with pytest.raises(ValueError, match="kv_lens"):
        decode_attention(q, k, v, tables, lens[:0], num_sms=1)
    with pytest.raises(NotImplementedError, match="group 9"):
        decode_attention(jnp.zeros((1, 1, 9, 64), jnp.bfloat16), k, v, tables, lens, num_sms=1)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        decode_attention(q.astype(jnp.float32), k, v, tables, lens, num_sms=1)
    with pytest.raises(ValueError, match="slots=3"):
        TuningConfig(tiles_per_step=2, slots=3)


def aot_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    def case(B: int, K: int, G: int, H: int, page_size: int) -> tuple[Any, tuple[Any, ...]]:
        pages = jax.ShapeDtypeStruct((4096, K, page_size, H), jnp.bfloat16)
        arguments = (
            jax.ShapeDtypeStruct((B, K, G, H), jnp.bfloat16),
            pages,
            pages,
            jax.ShapeDtypeStruct((B, 64), jnp.int32),
            jax.ShapeDtypeStruct((B,), jnp.int32),
        )
        return functools.partial(decode_attention, num_sms=132), arguments

    return {
        "llama-3-8b": case(512, 8, 4, 128, 64),
        "llama-3-70b-tp8": case(2048, 1, 8, 128, 16),
        "smollm2": case(100, 3, 3, 64, 32),
        "large-pages": case(1, 2, 7, 128, 128),
    }


@pytest.mark.aot
def test_compiles_for_h200_without_spills():
    for name, found in aot.resources(__name__).items():
        assert found.spill_bytes == 0, name
        assert found.smem_bytes <= SMEM_LIMIT_BYTES, name


# On a Hopper GPU.


def _on_gpu(inputs: tuple[jax.Array, ...], num_sms: int) -> np.ndarray:
    return np.asarray(jax.jit(functools.partial(decode_attention, num_sms=num_sms))(*inputs))


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "G", "H", "page_size"), [(8, 4, 128, 64), (1, 8, 128, 16), (3, 3, 64, 32), (2, 7, 128, 128)])
def test_gpu_ragged_batch_matches_reference_for_any_num_sms(K, G, H, page_size):
    rng = np.random.default_rng(K)
    kv_lens = [0, 1, page_size - 1, page_size, page_size + 1, 20000, *rng.exponential(1000, 250).astype(int).tolist()]
    inputs = _inputs(kv_lens, K, G, H, page_size)
    wanted = jax.jit(reference.decode_attention)(*inputs)
    all_sms = jax.devices()[0].core_count
    for num_sms in (1, all_sms // 2, all_sms):
        paged.assert_close(_on_gpu(inputs, num_sms), wanted)


@pytest.mark.gpu
def test_gpu_large_scores_neither_overflow_nor_vanish():
    q, *rest = _inputs([3000, 64], 2, 4, 128, 64)
    inputs = (q * jnp.bfloat16(50), *rest)
    paged.assert_close(_on_gpu(inputs, 132), jax.jit(reference.decode_attention)(*inputs))


@pytest.mark.gpu
def test_gpu_pages_beyond_2_to_the_31_elements():
    """The pool's last pages lie beyond 2^31 elements; the row that owns them equals a row in a small pool."""
    K, G, H, page_size = 8, 4, 128, 64
    q, k, v, tables, lens = _inputs([700], K, G, H, page_size)
    number = 2**31 // (K * page_size * H) + 64
    far = jnp.where(tables > 0, number - 1 - tables, 0)
    assert (int(far[0, 0]) * K * page_size * H) > 2**31

    @functools.partial(jax.jit, donate_argnums=0)
    def place(pool: jax.Array, pages: jax.Array) -> jax.Array:
        return pool.at[far[0, :11]].set(pages[tables[0, :11]])

    wide = [place(jnp.zeros((number, *k.shape[1:]), jnp.bfloat16), x) for x in (k, v)]
    np.testing.assert_array_equal(_on_gpu((q, *wide, far, lens), 132), _on_gpu((q, k, v, tables, lens), 132))


@pytest.mark.gpu
def test_gpu_a_thousand_runs_give_the_same_bits():
    rng = np.random.default_rng(1)
    inputs = _inputs([30000, *rng.exponential(500, 99).astype(int).tolist()], 4, 8, 128, 64)
    f = jax.jit(functools.partial(decode_attention, num_sms=100))
    first = f(*inputs)
    differs = jax.jit(lambda a, b: (a != b).any())
    assert not any([bool(differs(first, f(*inputs))) for _ in range(1000)])

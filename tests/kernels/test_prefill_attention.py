"""prefill_attention interpreted on the CPU, compiled for an H200 without one, and on the GPU, against the plain reference."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import prefill_attention, reference
from pallas_kernels._mosaic import SMEM_LIMIT_BYTES, UnsupportedDeviceError
from pallas_kernels.prefill_attention import TuningConfig
from tests.kernels import aot, paged
from tests.kernels.interpret import interpreted

_SMALL = TuningConfig(kv_tile=64, stages=2)
_LEAD = 3


def _inputs(chunks: Sequence[tuple[int, int]], K: int, G: int, H: int, page_size: int, seed: int = 0) -> tuple[jax.Array, ...]:
    """Rows of (tokens in the cache before, tokens of the chunk); the first chunk begins behind a few tokens of nobody."""
    q_lens = np.array([q for _, q in chunks], np.int32)
    kv_lens = [before + q if q else before for before, q in chunks]
    q_starts = (_LEAD + np.cumsum(q_lens) - q_lens).astype(np.int32)
    q = jax.random.normal(jax.random.key(seed), (_LEAD + int(q_lens.sum()), K, G, H), jnp.bfloat16)
    per_row = (jnp.asarray(kv_lens, jnp.int32), jnp.asarray(q_starts), jnp.asarray(q_lens))
    return q, *paged.cache(kv_lens, K, page_size, H, seed=seed), *per_row


def _interpret(inputs: tuple[jax.Array, ...], num_sms: int, config: TuningConfig | None = None) -> jax.Array:
    with interpreted():
        return jax.jit(functools.partial(prefill_attention, num_sms=num_sms, config=config))(*inputs)[_LEAD:]


@pytest.mark.parametrize(
    ("chunks", "K", "G", "H", "page_size", "num_sms", "config"),
    [
        # One token alone, a chunk behind a prefix that ends in a page, a row without queries.
        pytest.param([(0, 1), (70, 35), (9, 0)], 1, 4, 64, 64, 2, _SMALL, id="ragged"),
        pytest.param([(15, 30)], 1, 3, 64, 16, 1, _SMALL, id="group-of-three"),
        pytest.param([(63, 2)], 1, 8, 128, 128, 3, None, id="more-sms-than-tiles"),
    ],
)
def test_matches_reference(chunks, K, G, H, page_size, num_sms, config):
    inputs = _inputs(chunks, K, G, H, page_size)
    paged.assert_close(_interpret(inputs, num_sms, config), reference.prefill_attention(*inputs)[_LEAD:])


def test_writes_into_what_is_there_and_nothing_else():
    inputs = _inputs([(0, 5), (3, 0), (20, 9)], 1, 4, 64, 16)
    before = jax.random.normal(jax.random.key(1), inputs[0].shape, jnp.bfloat16)
    wanted = np.asarray(_interpret(inputs, 2, _SMALL))
    with interpreted():
        run = jax.jit(lambda out: prefill_attention(*inputs, out=out, num_sms=2, config=_SMALL))
        found = np.asarray(run(before))
    np.testing.assert_array_equal(found[_LEAD:], wanted)
    np.testing.assert_array_equal(found[:_LEAD], before[:_LEAD])
    paged.assert_close(found, reference.prefill_attention(*inputs, out=before))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_sms", [1, 2, 3])
def test_random_shapes_match_reference(seed, num_sms):
    rng = np.random.default_rng([seed, num_sms])
    page_size = int(rng.choice([16, 32, 64, 128]))
    before, lengths = [0, 1, page_size - 1, page_size, page_size + 1, 100], [0, 1, 16, 31, 70]
    chunks = [(int(rng.choice(before)), int(rng.choice(lengths))) for _ in range(rng.integers(1, 5))] + [(3, 5)]
    K, G, H = int(rng.integers(1, 3)), int(rng.integers(1, 9)), int(rng.choice([64, 128]))
    config = TuningConfig(kv_tile=int(rng.choice([64, 128])), stages=2)
    inputs = _inputs(chunks, K, G, H, page_size, seed)
    paged.assert_close(_interpret(inputs, num_sms, config), reference.prefill_attention(*inputs)[_LEAD:])


def test_refuses_what_it_cannot_do():
    inputs = _inputs([(0, 5)], 1, 2, 64, 16)
    q, k, v, tables, kv_lens, q_starts, q_lens = inputs
    with pytest.raises(UnsupportedDeviceError, match=r"reference\.prefill_attention"):
        prefill_attention(*inputs, num_sms=1)
    with pytest.raises(ValueError, match="q_lens"):
        prefill_attention(q, k, v, tables, kv_lens, q_starts, q_lens[:0], num_sms=1)
    with pytest.raises(NotImplementedError, match="group 17"):
        prefill_attention(jnp.zeros((5, 1, 17, 64), jnp.bfloat16), *inputs[1:], num_sms=1)
    with pytest.raises(ValueError, match="out"):
        prefill_attention(*inputs, out=q[1:], num_sms=1)
    with pytest.raises(ValueError, match="kv_tile"):
        TuningConfig(kv_tile=96)


def aot_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    def case(T: int, S: int, K: int, G: int, H: int, page_size: int, into: bool = False) -> tuple[Any, tuple[Any, ...]]:
        pages = jax.ShapeDtypeStruct((4096, K, page_size, H), jnp.bfloat16)
        row = jax.ShapeDtypeStruct((S,), jnp.int32)
        tables = jax.ShapeDtypeStruct((S, 64), jnp.int32)
        q = jax.ShapeDtypeStruct((T, K, G, H), jnp.bfloat16)
        operands = (q, pages, pages, tables, row, row, row)
        if into:
            return lambda *operands: prefill_attention(*operands[:-1], out=operands[-1], num_sms=132), (*operands, q)
        return functools.partial(prefill_attention, num_sms=132), operands

    return {
        "llama-3-8b": case(2048, 1000, 8, 4, 128, 64),
        "llama-3-8b into": case(2048, 1000, 8, 4, 128, 64, into=True),
        "llama-3-70b-tp8": case(2048, 128, 1, 8, 128, 16),
        "smollm2": case(100, 3, 3, 3, 64, 16),
    }


@pytest.mark.aot
def test_compiles_for_h200_without_spills():
    for name, found in aot.resources(__name__).items():
        assert found.spill_bytes == 0, name
        assert found.smem_bytes <= SMEM_LIMIT_BYTES, name


# On a Hopper GPU.


def _on_gpu(inputs: tuple[jax.Array, ...], num_sms: int) -> np.ndarray:
    return np.asarray(jax.jit(functools.partial(prefill_attention, num_sms=num_sms))(*inputs))[_LEAD:]


@pytest.mark.gpu
@pytest.mark.parametrize(("K", "G", "H", "page_size"), [(8, 4, 128, 64), (1, 8, 128, 16), (3, 3, 64, 32), (2, 7, 128, 128)])
def test_gpu_ragged_batch_matches_reference_and_is_the_same_for_any_num_sms(K, G, H, page_size):
    chunks = [(0, 1), (6000, 2000), (50, 0), (0, 1000), (page_size - 1, 3), (333, 129)]
    inputs = _inputs(chunks, K, G, H, page_size)
    all_sms = jax.devices()[0].core_count
    results = [_on_gpu(inputs, num_sms) for num_sms in (all_sms, all_sms // 2, 1)]
    paged.assert_close(results[0], np.asarray(jax.jit(reference.prefill_attention)(*inputs))[_LEAD:])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.gpu
def test_gpu_writes_into_what_is_there_and_nothing_else():
    inputs = _inputs([(0, 5), (300, 0), (200, 700)], 8, 4, 128, 64)
    before = jax.random.normal(jax.random.key(1), inputs[0].shape, jnp.bfloat16)
    found = np.asarray(jax.jit(lambda *x, out: prefill_attention(*x, out=out, num_sms=132))(*inputs, out=before))
    np.testing.assert_array_equal(found[_LEAD:], _on_gpu(inputs, 132))
    np.testing.assert_array_equal(found[:_LEAD], np.asarray(before)[:_LEAD])


@pytest.mark.gpu
def test_gpu_pages_beyond_2_to_the_31_elements():
    """The pool's last pages lie beyond 2^31 elements; the row that owns them equals a row in a small pool."""
    K, G, H, page_size = 8, 4, 128, 64
    q, k, v, tables, *rest = _inputs([(500, 200)], K, G, H, page_size)
    number = 2**31 // (K * page_size * H) + 64
    far = jnp.where(tables > 0, number - 1 - tables, 0)

    @functools.partial(jax.jit, donate_argnums=0)
    def place(pool: jax.Array, pages: jax.Array) -> jax.Array:
        return pool.at[far[0, :11]].set(pages[tables[0, :11]])

    wide = [place(jnp.zeros((number, *k.shape[1:]), jnp.bfloat16), x) for x in (k, v)]
    np.testing.assert_array_equal(_on_gpu((q, *wide, far, *rest), 132), _on_gpu((q, k, v, tables, *rest), 132))


@pytest.mark.gpu
def test_gpu_a_thousand_runs_give_the_same_bits():
    inputs = _inputs([(1000, 500), (0, 300)], 4, 8, 128, 64)
    f = jax.jit(lambda *x: prefill_attention(*x, num_sms=100)[_LEAD:])
    first = f(*inputs)
    differs = jax.jit(lambda a, b: (a != b).any())
    assert not any([bool(differs(first, f(*inputs))) for _ in range(1000)])

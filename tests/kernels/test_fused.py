"""gemm_with_decode_attention interpreted on the CPU, compiled for an H200 without one, and on the GPU."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import UnsupportedDeviceError, _fused_schedule, gemm, gemm_with_decode_attention, reference
from pallas_kernels._decode_plan import TuningConfig
from pallas_kernels._gemm_config import GemmConfig
from pallas_kernels._mosaic import SMEM_LIMIT_BYTES
from pallas_kernels.decode_attention import decode_attention
from tests.kernels import aot, paged
from tests.kernels.interpret import interpreted

_TILE = GemmConfig(tile_m=64, tile_n=64, consumers=1)
_WORKER = TuningConfig(workers=1, tiles_per_step=1, slots=2)
_GEMM_NAMES = ("bias", "residual")


def _gemm_inputs(
    m: int, k: int, n: int, *, swiglu: bool = False, bias: bool = False, residual: bool = False
) -> tuple[tuple[jax.Array, jax.Array], dict[str, Any]]:
    def normal(key: int, *shape: int, scale: float = 1.0) -> jax.Array:
        x = jax.random.normal(jax.random.key(key), shape, jnp.float32)
        return (x * scale).astype(jnp.bfloat16)

    columns = (2, n) if swiglu else (n,)
    arrays = {"bias": normal(2, *columns) if bias else None, "residual": normal(3, m, n) if residual else None}
    return (normal(0, m, k), normal(1, k, *columns, scale=k**-0.5)), {**arrays, "swiglu": swiglu}


def _attention_inputs(kv_lens: list[int], K: int, G: int, H: int, page_size: int) -> tuple[jax.Array, ...]:
    q = jax.random.normal(jax.random.key(4), (len(kv_lens), K, G, H), jnp.bfloat16)
    return q, *paged.cache(kv_lens, K, page_size, H), jnp.asarray(kv_lens, jnp.int32)


def _run(operands: Any, extra: dict[str, Any], attention: tuple[jax.Array, ...], **options: Any) -> tuple[Any, Any]:
    swiglu, arrays = extra["swiglu"], {name: extra[name] for name in _GEMM_NAMES}

    @jax.jit
    def call(operands: Any, arrays: dict[str, Any], attention: Any) -> Any:
        return gemm_with_decode_attention(*operands, *attention, **arrays, swiglu=swiglu, **options)

    return call(operands, arrays, attention)


def _assert_product(out: Any, operands: Any, extra: dict[str, Any]) -> None:
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (operands, {n: extra[n] for n in _GEMM_NAMES}))
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(functools.partial(reference.gemm, swiglu=extra["swiglu"]))(*wide[0], **wide[1])
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(wanted), rtol=2**-7, atol=2**-10)


@given(
    m_tiles=st.integers(1, 20),
    n_tiles=st.integers(1, 20),
    k_steps=st.integers(1, 70),
    num_ctas=st.integers(2, 132),
    stream_k=st.booleans(),
)
def test_segments_cover_every_step_once_and_wait_only_for_earlier_ones(m_tiles, n_tiles, k_steps, num_ctas, stream_k):
    config = GemmConfig(tile_m=64, tile_n=64, consumers=1, stream_k=stream_k)
    table = _fused_schedule.segments(m_tiles, n_tiles, k_steps, num_ctas, config)
    *line, end = table.tolist()
    assert not any(end)
    steps = {tile: np.zeros(k_steps, int) for tile in itertools.product(range(m_tiles), range(n_tiles))}
    left: dict[int, tuple[int, int]] = {}  # place -> the tile whose sums lie there
    for m, n, begin, length, sources, partial, place, _ in line:
        assert length > 0
        steps[m, n][begin : begin + length] += 1
        assert (begin + length < k_steps) == bool(partial)
        if partial:
            assert place == len(left)
            left[place] = (m, n)
        else:
            assert [left.get(place - i) for i in range(1, sources + 1)] == [(m, n)] * sources
            assert steps[m, n].all()
    assert all((s == 1).all() for s in steps.values())
    assert stream_k or not left


@pytest.mark.parametrize(
    ("gemm_sms", "shape", "flags"),
    [
        # Three CTAs take three tiles: the one that attends has one of them.
        pytest.param(2, (64, 64, 192), {"residual": True}, id="2+1"),
        pytest.param(1, (64, 64, 128), {"swiglu": True, "bias": True}, marks=pytest.mark.slow, id="1+1"),
    ],
)
def test_interpreted_without_races(gemm_sms, shape, flags):
    operands, extra = _gemm_inputs(*shape, **flags)
    attention = _attention_inputs([17, 0, 33], 1, 3, 64, 16)
    sms = {"gemm_sms": gemm_sms, "attention_sms": 1}
    with interpreted():
        c, out = _run(operands, extra, attention, **sms, gemm_config=_TILE, attention_config=_WORKER)
        jax.block_until_ready((c, out))
    _assert_product(c, operands, extra)
    paged.assert_close(out, reference.decode_attention(*attention))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sms", "shape", "flags", "config"),
    [
        # Sixteen steps: every tile is cut, in two or four pieces, and they are shared among the CTAs.
        pytest.param((2, 1), (64, 1024, 128), {}, _TILE, id="cut"),
        # M, N and K end inside tiles; two consumers.
        pytest.param((1, 1), (80, 528, 144), {"swiglu": True}, GemmConfig(tile_m=128, tile_n=64), id="ragged"),
        pytest.param(
            (1, 2), (72, 80, 48), {"residual": True, "bias": True}, GemmConfig(tile_m=64, tile_n=128, split="n"), id="ends"
        ),
    ],
)
def test_interpreted_cut_tiles(sms, shape, flags, config):
    operands, extra = _gemm_inputs(*shape, **flags)
    attention = _attention_inputs([130, 3], 2, 4, 64, 64)
    with interpreted(zero_fill=True, detect_races=False):
        c, out = _run(
            operands, extra, attention, gemm_sms=sms[0], attention_sms=sms[1], gemm_config=config,
            attention_config=TuningConfig(workers=2, tiles_per_step=1, slots=2),
        )  # fmt: skip
        jax.block_until_ready((c, out))
    _assert_product(c, operands, extra)
    paged.assert_close(out, reference.decode_attention(*attention))


def test_without_rows_that_decode_there_is_still_the_product():
    operands, extra = _gemm_inputs(64, 64, 64)
    attention = _attention_inputs([], 1, 2, 64, 16)
    with interpreted():
        c, out = _run(operands, extra, attention, gemm_sms=1, attention_sms=1, gemm_config=_TILE)
        c = np.asarray(c)
    _assert_product(c, operands, extra)
    assert out.shape == (0, 1, 2, 64)


def test_refuses_by_name():
    (a, b), _ = _gemm_inputs(64, 64, 64)
    attention = _attention_inputs([16], 1, 2, 64, 16)
    call = functools.partial(gemm_with_decode_attention, a, b, *attention)
    with pytest.raises(UnsupportedDeviceError, match=r"reference\.gemm_with_decode_attention"):
        call(gemm_sms=1, attention_sms=1)
    with pytest.raises(ValueError, match="attention_sms=0"):
        call(gemm_sms=1, attention_sms=0)
    with interpreted(detect_races=False):
        with pytest.raises(ValueError, match="num_sms=133"):
            call(gemm_sms=101, attention_sms=32)
        with pytest.raises(ValueError, match="do not multiply"):
            gemm_with_decode_attention(a, b[:48], *attention, gemm_sms=1, attention_sms=1)
        q = jnp.zeros((1, 1, 9, 64), jnp.bfloat16)
        with pytest.raises(NotImplementedError, match="group 9"):
            gemm_with_decode_attention(a, b, q, *attention[1:], gemm_sms=1, attention_sms=1)


def _shapes(
    m: int, k: int, n: int, rows: int, K: int, G: int, page_size: int, flags: tuple[str, ...] = (), **options: Any
) -> tuple[Any, tuple[Any, ...]]:
    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    pages = shape(4096, K, page_size, 128)
    attention = (shape(rows, K, G, 128), pages, pages, shape(rows, 64, dtype=jnp.int32), shape(rows, dtype=jnp.int32))
    columns = (2, n) if "swiglu" in flags else (n,)
    extra = {"bias": shape(*columns), "residual": shape(m, n)}

    def call(a: Any, b: Any, arrays: Any, attention: Any) -> Any:
        sms = {"gemm_sms": 104, "attention_sms": 28}
        return gemm_with_decode_attention(a, b, *attention, **arrays, swiglu="swiglu" in flags, **sms, **options)

    return call, (shape(m, k), shape(k, *columns), {name: extra[name] for name in flags if name in extra}, attention)


def aot_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    return {
        "8b gate_up": _shapes(2048, 4096, 14336, 512, 8, 4, 64, ("swiglu",)),
        "8b gate_up, four warpgroups": _shapes(2048, 4096, 14336, 512, 8, 4, 64, ("swiglu",), attention_config=TuningConfig()),
        "8b down": _shapes(2048, 14336, 4096, 512, 8, 4, 64, ("residual",)),
        "qwen qkv": _shapes(1024, 4096, 6144, 512, 8, 4, 16, ("bias",)),
        "70b/8 gate_up": _shapes(1024, 8192, 3584, 1024, 1, 8, 16, ("swiglu", "bias")),
        "few rows": _shapes(128, 4096, 4096, 64, 8, 4, 64),
    }


@pytest.mark.aot
def test_compiles_for_h200_without_spills():
    for name, found in aot.resources(__name__).items():
        assert found.spill_bytes == 0, name
        assert found.registers <= 168, name
        assert found.smem_bytes <= SMEM_LIMIT_BYTES, name


# On a Hopper GPU.

_SHAPES = [
    pytest.param((2048, 4096, 14336), {"swiglu": True}, id="gate_up"),
    pytest.param((2048, 14336, 4096), {"residual": True}, id="down"),
    pytest.param((1000, 4096, 6144), {"bias": True}, id="qkv"),
    pytest.param((512, 1024, 1536), {"swiglu": True, "bias": True, "residual": True}, id="all"),
    pytest.param((96, 4096, 4096), {}, id="few-rows"),
]


def _ragged(rows: int, mean: int) -> list[int]:
    return [0, 1, 64, *np.random.default_rng(0).exponential(mean, rows - 3).astype(int).tolist()]


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "flags"), _SHAPES)
@pytest.mark.parametrize("sms", [(104, 28), (84, 48)])
def test_gpu_matches_reference(shape, flags, sms):
    operands, extra = _gemm_inputs(*shape, **flags)
    attention = _attention_inputs(_ragged(300, 800), 8, 4, 128, 64)
    c, out = _run(operands, extra, attention, gemm_sms=sms[0], attention_sms=sms[1])
    _assert_product(c, operands, extra)
    paged.assert_close(out, jax.jit(reference.decode_attention)(*attention))


@pytest.mark.gpu
@pytest.mark.parametrize(("mean", "rows"), [(1, 8), (3000, 300)])
def test_gpu_same_bits_as_the_separate_kernels(mean, rows):
    """Whole tiles and the same attention; whether attention ends long before the GEMM or long after it."""
    operands, extra = _gemm_inputs(2048, 4096, 4096)
    attention = _attention_inputs(_ragged(rows, mean), 8, 4, 128, 64)
    whole = GemmConfig(tile_m=128, tile_n=128, stream_k=False)
    workers = TuningConfig(workers=2, slots=6)
    c, out = _run(operands, extra, attention, gemm_sms=100, attention_sms=32, gemm_config=whole, attention_config=workers)
    np.testing.assert_array_equal(c, jax.jit(functools.partial(gemm, num_sms=132, config=whole))(*operands))
    alone = jax.jit(functools.partial(decode_attention, num_sms=32, config=workers))(*attention)
    np.testing.assert_array_equal(out, alone)


@pytest.mark.gpu
def test_gpu_two_hundred_runs_give_the_same_bits():
    """Who computes what differs between runs, above all beside attention of ragged lengths; the results must not."""
    operands, extra = _gemm_inputs(1000, 4096, 6144, swiglu=True)
    attention = _attention_inputs(_ragged(200, 500), 4, 8, 128, 64)
    call = jax.jit(lambda *arrays: gemm_with_decode_attention(*arrays, swiglu=extra["swiglu"], gemm_sms=100, attention_sms=32))
    first = call(*operands, *attention)
    differs = jax.jit(lambda x, y: (x[0] != y[0]).any() | (x[1] != y[1]).any())
    assert not any([bool(differs(first, call(*operands, *attention))) for _ in range(200)])

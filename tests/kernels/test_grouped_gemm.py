"""grouped_gemm interpreted on the CPU, compiled for an H200 without one, and run on a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedDeviceError, grouped_gemm
from pallas_kernels._mosaic import SMEM_LIMIT_BYTES
from pallas_kernels._tuning import GemmConfig
from tests.kernels import aot
from tests.kernels.interpret import interpreted

_64X64 = GemmConfig(tile_m=64, tile_n=64, consumers=1)
_128X64 = GemmConfig(tile_m=128, tile_n=64)


def _operands(sizes: list[int], rows: int, k: int, n: int, *, swiglu: bool = False) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(len(sizes)), 2)
    shape = (len(sizes), k, 2, n) if swiglu else (len(sizes), k, n)
    x = jax.random.normal(keys[0], (rows, k), jnp.float32)
    w = jax.random.normal(keys[1], shape, jnp.float32) * k**-0.5
    return x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), jnp.asarray(sizes, jnp.int32)


def _expected(x: jax.Array, w: jax.Array, sizes: list[int]) -> np.ndarray:
    """Group by group in float32."""
    groups, start = [], 0
    for expert, size in enumerate(sizes):
        rows = x[start : start + size].astype(jnp.float32)
        with jax.default_matmul_precision("highest"):
            out = jnp.tensordot(rows, w[expert].astype(jnp.float32), 1)
        groups.append(np.asarray(out if w.ndim == 3 else jax.nn.silu(out[:, 0]) * out[:, 1]))
        start += size
    return np.concatenate(groups)


def _assert_close(out: Any, want: np.ndarray) -> None:
    """Rows behind the last group are whatever they are."""
    np.testing.assert_allclose(np.asarray(out, np.float32)[: len(want)], want, rtol=2**-7, atol=2**-10)


@pytest.mark.parametrize(
    ("sizes", "rows", "n", "swiglu", "num_sms", "config"),
    [
        pytest.param([64, 0, 64], 128, 64, False, 1, _64X64, id="empty"),
        # Groups of one row, of less than a tile, of more; borders off the multiples of eight; rows that no group owns.
        pytest.param([37, 0, 1, 90], 150, 80, False, 2, _128X64, id="unequal"),
        pytest.param([5, 70, 61, 0], 136, 64, True, 3, _64X64, id="swiglu"),
        pytest.param([0, 0, 0], 64, 64, False, 2, _64X64, id="no-rows"),
    ],
)
def test_interpreted_without_races(sizes, rows, n, swiglu, num_sms, config):
    x, w, group_sizes = _operands(sizes, rows, 64, n, swiglu=swiglu)
    with interpreted(zero_fill=True):
        out = np.asarray(grouped_gemm(x, w, group_sizes, swiglu=swiglu, num_sms=num_sms, config=config).astype(jnp.float32))
    _assert_close(out, _expected(x, w, sizes))


@pytest.mark.slow
@pytest.mark.parametrize("num_sms", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_interpreted_random_groups(seed, num_sms):
    rng = np.random.default_rng([seed, num_sms])
    sizes = [int(s) for s in rng.choice([0, 1, 7, 8, 9, 63, 64, 65, 100], size=rng.integers(1, 6))]
    rows, swiglu = sum(sizes) + int(rng.integers(1, 20)), bool(rng.integers(2))
    x, w, group_sizes = _operands(sizes, rows, int(rng.integers(1, 12)) * 16, int(rng.integers(1, 12)) * 16, swiglu=swiglu)
    with interpreted(zero_fill=True):
        out = grouped_gemm(x, w, group_sizes, swiglu=swiglu, num_sms=num_sms, config=[_64X64, _128X64, _64X64][seed])
        out = np.asarray(out.astype(jnp.float32))
    _assert_close(out, _expected(x, w, sizes))


def test_refuses_by_name():
    x, w, sizes = _operands([64], 64, 64, 64)
    with pytest.raises(UnsupportedDeviceError, match=r"pallas_kernels\.reference\.grouped_gemm"):
        grouped_gemm(x, w, sizes, num_sms=1)
    with interpreted(detect_races=False):
        with pytest.raises(ValueError, match="do not multiply"):
            grouped_gemm(x[:, :48], w, sizes, num_sms=1)
        with pytest.raises(ValueError, match="group_sizes"):
            grouped_gemm(x, w, jnp.concatenate([sizes, sizes]), num_sms=1)
        with pytest.raises(ValueError, match="only bfloat16"):
            grouped_gemm(x.astype(jnp.float32), w, sizes, num_sms=1)


def aot_cases() -> dict[str, Any]:
    def case(m: int, k: int, n: int, *, swiglu: bool = False) -> Any:
        shapes = ((m, k), (8, k, 2, n) if swiglu else (8, k, n))
        x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
        return functools.partial(grouped_gemm, swiglu=swiglu, num_sms=132), (x, w, jax.ShapeDtypeStruct((8,), jnp.int32))

    return {
        "gate and up": case(4096, 4096, 14336, swiglu=True),
        "down": case(4096, 14336, 4096),
        "few rows": case(256, 4096, 14336, swiglu=True),
    }


@pytest.mark.aot
def test_compiles_without_spills():
    for name, r in aot.resources(__name__).items():
        assert r.spill_bytes == 0, name
        assert r.registers <= 232, name
        assert SMEM_LIMIT_BYTES // 2 < r.smem_bytes <= SMEM_LIMIT_BYTES, name


_GROUPS = [[512] * 8, [820, 820, 819, 819, 205, 205, 204, 204], [5, 0, 1000, 1, 2047, 333, 0, 500], [0, 0, 0, 4096, 0, 0, 0, 0]]


@pytest.mark.gpu
@pytest.mark.parametrize("swiglu", [True, False])
def test_gpu_matches_reference_on_any_number_of_sms(swiglu):
    x, w, _ = jax.jit(functools.partial(_operands, _GROUPS[0], 4096, 4096, 3584, swiglu=swiglu))()
    kernels = [jax.jit(functools.partial(grouped_gemm, swiglu=swiglu, num_sms=n)) for n in (132, 100)]

    @jax.jit
    def product(sizes: jax.Array) -> jax.Array:
        """Expert after expert all rows, of which the group's are kept: bfloat16 products that are not ours, float32 sums."""
        ends = jnp.cumsum(sizes)

        def one(kept: jax.Array, expert: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
            matrix, start, end = expert
            out = jnp.tensordot(x, matrix, 1, preferred_element_type=jnp.float32)
            out = jax.nn.silu(out[:, 0]) * out[:, 1] if swiglu else out
            row = jnp.arange(len(x), dtype=jnp.int32)[:, None]
            return jnp.where((start <= row) & (row < end), out, kept), None

        return jax.lax.scan(one, jnp.zeros((len(x), w.shape[-1]), jnp.float32), (w, ends - sizes, ends))[0]

    @jax.jit
    def worst(out: jax.Array, want: jax.Array, rows: jax.Array) -> jax.Array:
        error = jnp.abs(out.astype(jnp.float32) - want) / (2**-10 + 2**-7 * jnp.abs(want))
        error = jnp.where(jnp.isnan(error), jnp.inf, error)
        return jnp.where(jnp.arange(len(x), dtype=jnp.int32)[:, None] < rows, error, 0).max()

    for sizes in _GROUPS:
        group_sizes = jnp.asarray(sizes, jnp.int32)
        want = product(group_sizes)
        for kernel in kernels:
            assert float(worst(kernel(x, w, group_sizes), want, jnp.int32(sum(sizes)))) <= 1, sizes

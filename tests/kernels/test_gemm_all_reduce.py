"""GEMMs fused with their all-reduce: interpreted with all ranks on one device, compiled for four H200s, and run on four GPUs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._collective_schedule import collective_schedule
from pallas_kernels._tuning import GemmConfig
from pallas_kernels.gemm_all_reduce import run
from tests.kernels.all_ranks import AllRanks
from tests.kernels.interpret import interpreted

_64X64 = GemmConfig(tile_m=64, tile_n=64, consumers=1, stream_k=False)
_64X128 = GemmConfig(tile_m=64, tile_n=128, split="n", stream_k=False)
_128X64 = GemmConfig(tile_m=128, tile_n=64, stream_k=False)
_256X128 = GemmConfig(tile_m=256, tile_n=128, stream_k=False)


def _normal(key: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (jax.random.normal(jax.random.key(key), shape, jnp.float32) * scale).astype(jnp.bfloat16)


def _expected(a: jax.Array, b: jax.Array, residual: jax.Array | None) -> jax.Array:
    """float32 [M, N] from a [R, M, K] and b [R, K, N]: parts rounded to bfloat16, then summed in the order of the ranks."""
    parts = jnp.einsum("rmk,rkn->rmn", a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
    total = functools.reduce(jnp.add, list(parts.astype(jnp.bfloat16).astype(jnp.float32)))
    return total if residual is None else total + residual.astype(jnp.float32)


@pytest.mark.parametrize(
    ("shape", "ranks", "ctas", "config", "with_residual", "scatter"),
    [
        # 2 x 3 tiles, owned unevenly by four ranks; the lower tiles reach past the end of A and of C.
        pytest.param((192, 128, 192), 4, 2, _128X64, True, False, id="ragged-residual"),
        pytest.param((128, 192, 256), 2, 1, _64X128, False, False, id="split-n"),
        pytest.param((256, 64, 128), 2, 3, _64X64, False, True, id="scatter"),
    ],
)
def test_interpreted(shape, ranks, ctas, config, with_residual, scatter):
    m, k, n = shape
    a, b = _normal(0, ranks, m, k), _normal(1, ranks, k, n, scale=k**-0.5)
    residual = _normal(2, m, n) if with_residual else None
    plan = collective_schedule(m, n, ranks, ctas, config, scatter=scatter)
    everyone = AllRanks("", ranks, scatter, ctas=plan.ctas)
    copies = None if residual is None else jnp.broadcast_to(residual, (ranks, m, n))
    with interpreted(zero_fill=True, detect_races=False):
        out = run("gemm_all_reduce", plan, everyone, config, a, b, copies, (m // ranks if scatter else m, n))
    out = np.asarray(out.astype(jnp.float32))
    want = np.asarray(_expected(a, b, residual))
    if scatter:
        np.testing.assert_allclose(out.reshape(m, n), want, rtol=2**-7, atol=2**-7)
        return
    assert all(np.array_equal(out[0], copy) for copy in out), "ranks differ"
    np.testing.assert_allclose(out[0], want, rtol=2**-7, atol=2**-7)

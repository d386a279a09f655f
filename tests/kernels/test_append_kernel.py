"""The one-kernel form of append_kv, compiled for an H200 without one and run on a GPU; nothing of it can be interpreted."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import UnsupportedDeviceError, _append_kernel, reference
from tests.kernels import aot


def _inputs(tokens: int, kv_heads: int, group: int, head_dim: int, page_size: int, *, pages: int = 0) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(tokens)
    pages = pages or 2 * tokens // page_size + 1
    slots = rng.permutation(pages * page_size)[:tokens]
    slots[::7] = -1

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    angles = jnp.asarray(rng.uniform(0, 6, (tokens, head_dim // 2)), jnp.float32)
    pool = (pages, kv_heads, page_size, head_dim)
    qkv = normal(tokens, kv_heads, group + 2, head_dim)
    return qkv, jnp.cos(angles), jnp.sin(angles), jnp.asarray(slots, jnp.int32), normal(*pool), normal(*pool)


def test_refuses_by_name():
    inputs = _inputs(16, 1, 1, 64, 16)
    with pytest.raises(UnsupportedDeviceError, match=r"pallas_kernels\.reference\.append_kv"):
        _append_kernel.append(*inputs, num_sms=1)


def aot_cases() -> dict[str, Any]:
    def case(*sizes: int, num_sms: int) -> Any:
        shapes = jax.eval_shape(functools.partial(_inputs, *sizes))
        return functools.partial(_append_kernel.append, num_sms=num_sms), tuple(shapes)

    return {"8b": case(2048, 8, 4, 128, 64, num_sms=132), "smollm2": case(48, 3, 3, 64, 16, num_sms=8)}


@pytest.mark.aot
def test_compiles_without_spills():
    for name, r in aot.resources(__name__).items():
        assert r.spill_bytes == 0, name
        assert r.registers <= 128, name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "num_sms"), [((2048, 8, 4, 128, 64), 132), ((512, 1, 8, 128, 16), 32), ((37, 3, 3, 64, 16), 5)]
)
def test_gpu_matches_reference(sizes, num_sms):
    inputs = _inputs(*sizes)
    want = jax.jit(reference.append_kv)(*inputs)
    found = jax.jit(functools.partial(_append_kernel.append, num_sms=num_sms))(*inputs)
    want = [want[0], *want[-2:]]
    for name, a, b in zip(("q", "k_pages", "v_pages"), found, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=2**-9, err_msg=name)

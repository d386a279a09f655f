"""Operands of products, and what their results must be close to."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import gemm, reference
from pallas_kernels._tuning import GemmConfig

Operands = tuple[jax.Array, jax.Array]

# Tiles are cut along K whenever the tiles do not fill a wave, into pieces as short as one step.
CUT = {"fixup_steps": 0, "min_steps": 1}


def operands(
    m: int, k: int, n: int, *, swiglu: bool = False, bias: bool = False, residual: bool = False, seed: int = 0
) -> tuple[Operands, dict[str, Any]]:
    """a and b, and the keywords that `gemm` and its reference take beside them."""

    def normal(key: int, *shape: int, scale: float = 1.0) -> jax.Array:
        x = jax.random.normal(jax.random.fold_in(jax.random.key(seed), key), shape, jnp.float32)
        return (x * scale).astype(jnp.bfloat16)

    columns = (2, n) if swiglu else (n,)
    extra: dict[str, Any] = {"swiglu": swiglu}
    if bias:
        extra["bias"] = normal(2, *columns)
    if residual:
        extra["residual"] = normal(3, m, n)
    return (normal(0, m, k), normal(1, k, *columns, scale=k**-0.5)), extra


def assert_matches_reference(out: Any, ab: Operands, extra: dict[str, Any], *, rounding: float = 2**-7) -> None:
    """The sums are float32 like the reference's; what differs is the `rounding` of the result, and that of silu's exp."""

    def widen(x: Any) -> Any:
        return x.astype(jnp.float32) if isinstance(x, jax.Array) else x

    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(reference.gemm, swiglu=extra["swiglu"]))(
            *map(widen, ab), **{name: widen(x) for name, x in extra.items() if name != "swiglu"}
        )
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(want), rtol=rounding, atol=2**-10)


def operands_on_device(m: int, k: int, n: int, **extra: Any) -> tuple[Operands, dict[str, Any]]:
    """As `operands`, made by one program."""
    ab, kwargs = jax.jit(functools.partial(operands, m, k, n, **extra))()
    return ab, kwargs | {"swiglu": bool(kwargs["swiglu"])}


def assert_right_on_device(
    ab: Operands,
    extra: dict[str, Any],
    *,
    rows: Sequence[int | None] = (None,),
    out_dtype: Any = jnp.bfloat16,
    num_sms: int,
    config: GemmConfig | None = None,
) -> None:
    """As `assert_matches_reference`, by a product of bfloat16 with float32 sums that is not ours, compared where it is.

    With each number of `rows` in use, what a and the residual hold from there on becomes NaN, for `gemm` alone.
    """
    swiglu, arrays = extra["swiglu"], {name: x for name, x in extra.items() if name != "swiglu"}

    @jax.jit
    def worst(ab: Any, arrays: Any, rows: Any) -> jax.Array:
        ours, given = ab, arrays
        in_use = jnp.ones((ab[0].shape[0], 1), bool)
        if rows is not None:
            in_use = jnp.arange(ab[0].shape[0])[:, None] < rows
            ours = (jnp.where(in_use, ab[0], jnp.nan), ab[1])
            given = {name: jnp.where(in_use, x, jnp.nan) if name == "residual" else x for name, x in arrays.items()}
        out = gemm(*ours, **given, swiglu=swiglu, rows=rows, out_dtype=out_dtype, num_sms=num_sms, config=config)
        assert out.dtype == out_dtype
        want = jnp.tensordot(*ab, 1, preferred_element_type=jnp.float32)
        want += arrays["bias"].astype(jnp.float32)[None] if "bias" in arrays else 0.0
        want = jax.nn.silu(want[:, 0]) * want[:, 1] if swiglu else want
        want += arrays["residual"].astype(jnp.float32) if "residual" in arrays else 0.0
        error = jnp.abs(out.astype(jnp.float32) - want) / (2**-10 + 2**-7 * jnp.abs(want))
        return jnp.where(in_use, jnp.where(jnp.isnan(error), jnp.inf, error), 0.0).max()

    for number in rows:
        assert float(worst(ab, arrays, None if number is None else jnp.int32(number))) <= 1, number

"""gemm where the number of rows in use is data: what it computes, what it leaves out, and results in float32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _gemm_cost, _tuning, gemm, reference
from pallas_kernels._mosaic import SMEM_LIMIT_BYTES, cdiv
from pallas_kernels._tuning import GemmConfig
from tests.kernels import aot
from tests.kernels.interpret import interpreted
from tests.kernels.products import CUT, assert_matches_reference, assert_right_on_device, operands, operands_on_device

_64X64 = GemmConfig(tile_m=64, tile_n=64, consumers=1, **CUT)
_WHOLE = GemmConfig(tile_m=64, tile_n=64, consumers=1, stream_k=False)
_64X128 = GemmConfig(tile_m=64, tile_n=128, split="n", **CUT)
_128X128 = GemmConfig(tile_m=128, tile_n=128, **CUT)
_ALONG_M = GemmConfig(tile_m=64, tile_n=64, consumers=1, cluster=2, **CUT)
_ALONG_K = GemmConfig(tile_m=64, tile_n=128, split="n", cluster=2, cluster_along="k")

# jax's interpreter before 0.11 compiles every warpgroup of every CTA again in each run.
_SLOW_ONCE = pytest.mark.slow if jax.__version_info__ < (0, 11) else ()
_needs_clusters = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax's interpreter knows no clusters before 0.11")


def _rows(first: int, *others: int) -> pytest.MarkDecorator:
    """The test for several numbers of rows in use, where time is short for the `first` alone."""
    return pytest.mark.parametrize("rows", [first, *(pytest.param(rows, marks=_SLOW_ONCE) for rows in others)])


def _run(ab: Any, extra: dict[str, Any], rows: int | None, *, num_sms: int, config: GemmConfig, **mode: bool) -> np.ndarray:
    out_dtype = extra.get("out_dtype", jnp.bfloat16)
    with interpreted(**mode):
        out = gemm(*ab, **extra, rows=None if rows is None else jnp.int32(rows), num_sms=num_sms, config=config)
        assert out.dtype == out_dtype
        return np.asarray(out.astype(jnp.float32))


def _poisoned(ab: Any, extra: dict[str, Any], rows: int) -> tuple[Any, dict[str, Any]]:
    """NaN in everything behind the rows in use."""

    def poison(x: jax.Array) -> jax.Array:
        return x.at[rows:].set(jnp.nan)

    return (poison(ab[0]), ab[1]), {name: poison(x) if name == "residual" else x for name, x in extra.items()}


def _assert_rows_right(shape: Any, flags: Any, rows: int, *, num_sms: int, config: GemmConfig, **mode: bool) -> None:
    ab, extra = operands(*shape, **flags)
    out = _run(*_poisoned(ab, extra, rows), rows, num_sms=num_sms, config=config, **mode)
    used = {name: x[:rows] if name == "residual" else x for name, x in extra.items()}
    assert_matches_reference(out[:rows], (ab[0][:rows], ab[1]), used)


@_rows(65, 0, 1, 63, 64, 128)
@pytest.mark.parametrize(
    ("shape", "flags", "num_sms", "config"),
    [
        pytest.param((128, 128, 64), {"residual": True, "bias": True}, 2, _WHOLE, id="residual-bias"),
        # One block a tile: all of them go through the same place in shared memory.
        pytest.param((128, 64, 128), {"swiglu": True}, 1, _64X128, id="swiglu"),
    ],
)
def test_rows_in_use_without_races(shape, flags, num_sms, config, rows):
    _assert_rows_right(shape, flags, rows, num_sms=num_sms, config=config)


# What CTAs hand to each other the race detector cannot judge.
@_rows(65, 1, 64, 192)
@pytest.mark.parametrize("num_sms", [3, pytest.param(2, marks=_SLOW_ONCE)])
def test_rows_in_use_where_some_tables_cut_tiles(num_sms, rows):
    _assert_rows_right((192, 192, 128), {"bias": True}, rows, num_sms=num_sms, config=_64X64, detect_races=False)


@_rows(65, 0, 1, 63, 64, 80)
def test_rows_in_use_of_ragged_shapes(rows):
    flags = {"residual": True, "swiglu": True, "bias": True}
    _assert_rows_right((80, 80, 48), flags, rows, num_sms=2, config=_64X64, zero_fill=True, detect_races=False)


@_needs_clusters
@pytest.mark.parametrize("rows", [0, 64, 127, 128, 129, 320])
def test_rows_in_use_of_clusters_along_m(rows):
    mode = {"zero_fill": True, "detect_races": False}
    _assert_rows_right((320, 128, 64), {}, rows, num_sms=4, config=_ALONG_M, **mode)


@_needs_clusters
@pytest.mark.parametrize("flags", [{"residual": True}, {"swiglu": True}])
@pytest.mark.parametrize("rows", [0, 1, 64, 65, 128])
def test_rows_in_use_of_clusters_along_k(rows, flags):
    _assert_rows_right((128, 192, 128), flags, rows, num_sms=2, config=_ALONG_K, detect_races=False)


@pytest.mark.slow
@pytest.mark.parametrize("num_sms", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_rows_in_use_of_random_shapes(seed, num_sms):
    rng = np.random.default_rng([seed, num_sms])
    m, k, n = (int(rng.integers(1, limit)) * 16 for limit in (20, 20, 16))
    config = [_64X64, _64X128, _128X128, GemmConfig(tile_m=128, tile_n=192, shared_waves=0, **CUT)][seed]
    flags = {name: bool(rng.integers(2)) for name in ("swiglu", "bias", "residual")}
    rows = int(rng.integers(m))
    _assert_rows_right((m, k, n), flags, rows, num_sms=num_sms, config=config, zero_fill=True, detect_races=False)


@_rows(64, -5, 0, 1, 65, 128, 192, 1000)
@pytest.mark.parametrize("num_sms", [1, 2])
def test_tiles_of_nothing_but_padding_are_not_computed(num_sms, rows):
    ab, extra = operands(192, 192, 64)
    out = _run(ab, extra, rows, num_sms=num_sms, config=_64X64, detect_races=False)
    computed = 64 * cdiv(min(max(rows, 0), 192), 64)
    assert not np.isnan(out[:computed]).any()
    assert np.isnan(out[computed:]).all(), "the interpreter's memory starts as NaN"


@pytest.mark.parametrize("num_sms", [1, pytest.param(2, marks=_SLOW_ONCE), pytest.param(3, marks=_SLOW_ONCE)])
def test_all_rows_in_use_are_the_bits_of_a_gemm_without(num_sms):
    ab, extra = operands(192, 192, 64, bias=True)
    run = functools.partial(_run, ab, extra, num_sms=num_sms, config=_64X64, detect_races=False)
    np.testing.assert_array_equal(run(192), run(None))


@pytest.mark.parametrize(
    ("shape", "flags", "num_sms", "config"),
    [
        pytest.param((64, 128, 128), {"bias": True}, 1, _64X128, id="bias"),
        pytest.param((128, 64, 64), {"swiglu": True}, 1, _64X64, id="swiglu"),
    ],
)
def test_float32_results_without_races(shape, flags, num_sms, config):
    ab, extra = operands(*shape, **flags)
    out = _run(ab, extra | {"out_dtype": jnp.float32}, None, num_sms=num_sms, config=config)
    # silu's exp is approximate; nothing else is rounded.
    assert_matches_reference(out, ab, extra, rounding=2**-16 if extra["swiglu"] else 2**-20)


def test_float32_results_of_cut_tiles_and_rows_in_use():
    ab, extra = operands(128, 192, 48)
    given = _poisoned(ab, extra | {"out_dtype": jnp.float32}, 70)
    out = _run(*given, 70, num_sms=2, config=_64X64, zero_fill=True, detect_races=False)
    assert_matches_reference(out[:70], (ab[0][:70], ab[1]), extra, rounding=2**-20)


def test_reference_takes_rows_and_dtype():
    (a, b), _ = operands(16, 32, 16)
    assert reference.gemm(a, b).dtype == jnp.bfloat16
    out = reference.gemm(a, b, rows=jnp.int32(3), out_dtype=jnp.float32)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out[:3], reference.gemm(a[:3], b, out_dtype=jnp.float32))


def test_refuses_by_name():
    (a, b), _ = operands(64, 64, 64)
    with interpreted(detect_races=False):
        with pytest.raises(ValueError, match=r"rows is int32\(1,\)"):
            gemm(a, b, rows=jnp.ones(1, jnp.int32), num_sms=1)
        with pytest.raises(ValueError, match="rows is float32"):
            gemm(a, b, rows=jnp.float32(3), num_sms=1)
        with pytest.raises(ValueError, match="out_dtype is float16"):
            gemm(a, b, out_dtype=jnp.float16, num_sms=1)
        with pytest.raises(ValueError, match="residual"):
            gemm(a, b, residual=a, out_dtype=jnp.float32, num_sms=1)


def test_float32_results_take_tiles_that_leave_room_for_their_blocks():
    for m in (64, 256, 1024):
        for n in (48, 32000, 128256):
            wide = _gemm_cost.fastest(m, n, 4096, swiglu=False, num_sms=132, result_bytes=4)
            assert wide.stages(False, 4) >= 3
            given = {"m": m, "n": n, "k": 4096, "swiglu": False, "num_sms": 132}
            seconds = [_gemm_cost.predicted_seconds(wide, **given, result_bytes=size) for size in (2, 4)]
            assert seconds[1] > seconds[0]
    # Timed with bfloat16 results: nothing of the table is for others.
    given = {"m": 2048, "n": 4096, "k": 14336, "swiglu": False, "num_sms": 132, "result_bytes": 4}
    assert _tuning.gemm_config("NVIDIA H200", **given) == _gemm_cost.fastest(**given)
    for config in (_64X64, _128X128):
        fits = config.stages(False, 4) * (config.tile_m + config.tile_n) * config.tile_k * 2 + 4 * 64 * 64 * 4
        assert fits <= SMEM_LIMIT_BYTES


_LOGITS = {"out_dtype": jnp.float32}
# Rows, K, N, what is added, tiles.
_REAL: dict[str, tuple[int, int, int, dict[str, Any], GemmConfig | None]] = {
    "gate_up": (2048, 4096, 14336, {"swiglu": True}, None),
    "o": (2048, 4096, 4096, {"residual": True}, None),
    "qkv": (512, 4096, 6144, {"bias": True}, None),
    "logits": (1024, 4096, 128256, _LOGITS, None),
    "logits, 64 rows": (64, 4096, 128256, _LOGITS, None),
    "cluster": (2048, 4096, 6144, {}, GemmConfig(tile_m=128, tile_n=256, cluster=2)),
    "cluster along k": (512, 8192, 2560, {"bias": True}, GemmConfig(tile_m=128, tile_n=256, cluster=3, cluster_along="k")),
}


def aot_cases() -> dict[str, Any]:
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    def case(name: str, in_use: bool) -> Any:
        m, k, n, flags, config = _REAL[name]
        columns = (2, n) if flags.get("swiglu") else (n,)
        arrays = {"bias": columns, "residual": (m, n)}
        static = {key: x for key, x in flags.items() if key not in arrays}
        given = {key: shape(*sizes) for key, sizes in arrays.items() if key in flags}
        rows = jax.ShapeDtypeStruct((), jnp.int32) if in_use else None

        def run(a: jax.Array, b: jax.Array, rows: Any, given: Any) -> jax.Array:
            return gemm(a, b, rows=rows, **given, **static, num_sms=132, config=config)

        return run, (shape(m, k), shape(k, *columns), rows, given)

    return {name + suffix: case(name, bool(suffix)) for name in _REAL for suffix in ("", ", rows")}


@pytest.mark.aot
def test_compiles_to_no_more_registers_than_without_rows():
    found = aot.resources(__name__)
    for name in _REAL:
        without, in_use = found[name], found[f"{name}, rows"]
        assert in_use.registers <= without.registers, name
        assert in_use.spill_bytes == without.spill_bytes == 0, name
        assert SMEM_LIMIT_BYTES // 2 < in_use.smem_bytes <= SMEM_LIMIT_BYTES, name


@pytest.mark.gpu
@pytest.mark.parametrize("name", _REAL)
def test_gpu_rows_in_use_match_reference(name):
    m, k, n, flags, config = _REAL[name]
    added = {key: x for key, x in flags.items() if key != "out_dtype"}
    ab, extra = operands_on_device(m, k, n, **added)
    given = {"rows": (0, 1, m // 2 - 1, m // 2, m * 7 // 8 + 1, m), "out_dtype": flags.get("out_dtype", jnp.bfloat16)}
    for num_sms in (132, 100):
        assert_right_on_device(ab, extra, **given, num_sms=num_sms, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gate_up", "o", "cluster along k"])
def test_gpu_rows_in_use_repeat_bit_for_bit(name):
    m, k, n, flags, config = _REAL[name]
    ab, extra = operands_on_device(m, k, n, **flags)

    @jax.jit
    def run(ab: Any, arrays: Any, rows: jax.Array) -> jax.Array:
        out = gemm(*ab, **arrays, swiglu=extra["swiglu"], rows=rows, num_sms=132, config=config)
        return jnp.where(jnp.arange(m)[:, None] < rows, out.view(jnp.uint16), 0)

    arrays = {key: x for key, x in extra.items() if key != "swiglu"}
    for rows in map(jnp.int32, (m // 2 + 1, m - 100)):
        first = run(ab, arrays, rows)
        assert all(jnp.array_equal(run(ab, arrays, rows), first) for _ in range(100))

"""GEMMs fused with their all-reduce: interpreted, all ranks on one device; compiled for four H200s; run on two GPUs or four."""

import dataclasses
import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import UnsupportedDeviceError, _mosaic
from pallas_kernels._collective_schedule import collective_schedule
from pallas_kernels._tuning import GemmConfig
from pallas_kernels.bench import gemm_all_reduce as bench
from pallas_kernels.cuda_driver import signal_each_other
from pallas_kernels.gemm_all_reduce import default_config, gemm_all_reduce, gemm_reduce_scatter, run
from tests.kernels import aot
from tests.kernels.all_ranks import AllRanks
from tests.kernels.interpret import interpreted

_64X64 = GemmConfig(tile_m=64, tile_n=64, consumers=1, stream_k=False)
_64X128 = GemmConfig(tile_m=64, tile_n=128, split="n", stream_k=False)
_128X64 = GemmConfig(tile_m=128, tile_n=64, stream_k=False)


def _normal(key: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return (jax.random.normal(jax.random.key(key), shape, jnp.float32) * scale).astype(jnp.bfloat16)


def _parts(a: jax.Array, b: jax.Array) -> jax.Array:
    """bfloat16 [R, M, N] from a [R, M, K] and b [R, K, N]."""
    return jnp.einsum("rmk,rkn->rmn", a, b, precision="highest", preferred_element_type=jnp.float32).astype(jnp.bfloat16)


def _assert_sum(out: jax.Array | np.ndarray, parts: jax.Array, k: int, residual: jax.Array | None = None) -> None:
    """`out` [M, N] is the sum of `parts` [R, M, N], which are sums of K products each, and of the residual.

    A part may differ by what float32 sums along K in another order do, and then round to the neighbouring bfloat16, however
    small the sum of all is. Tensor cores add 16 products at a time and cut off what lies below float32's last bit, here as in
    the reference. The sum is rounded once.
    """
    found, terms = np.asarray(out), np.asarray(parts)
    want = terms.astype(np.float32).sum(0) + (0 if residual is None else np.asarray(residual).astype(np.float32))
    along_k = 2 * (k / 16) * 2.0**-23 * float(np.abs(terms).max())
    bound = (np.spacing(np.abs(terms)).astype(np.float32) + along_k).sum(0) + np.spacing(np.abs(found)).astype(np.float32) / 2
    beyond = np.abs(found.astype(np.float32) - want) - bound
    worst = np.unravel_index(beyond.argmax(), beyond.shape)
    assert beyond[worst] <= 0, (
        f"{(beyond > 0).sum()} of {beyond.size} elements differ; at {worst} {found[worst]} is not the sum {want[worst]} of "
        f"{terms[:, *worst]}, by {beyond[worst]:.1e} more than rounding explains"
    )


def test_another_order_of_sums_is_in_bounds_and_a_wrong_block_is_not():
    ranks, m, k, n = 2, 192, 2048, 512
    a, b, residual = _normal(0, ranks, m, k), _normal(1, ranks, k, n, scale=(k * ranks) ** -0.5), _normal(2, m, n)
    wide_a, wide_b = np.asarray(a).astype(np.float32), np.asarray(b).astype(np.float32)
    sums = np.zeros((ranks, m, n), np.float32)
    for first in reversed(range(0, k, 16)):
        sums += wide_a[:, :, first : first + 16] @ wide_b[:, first : first + 16]
    summed = jnp.asarray(sums).astype(jnp.bfloat16)

    def total(parts: jax.Array) -> jax.Array:
        return (parts.astype(jnp.float32).sum(0) + residual.astype(jnp.float32)).astype(jnp.bfloat16)

    parts = _parts(a, b)
    assert (summed != parts).any(), "one order is as good as the other"
    _assert_sum(total(summed), parts, k, residual)
    for wrong in (
        summed.at[1, 64:128, :64].set(0),  # has not come
        summed.at[1, 64:128, :64].set(summed[1, :64, :64]),  # another block's
        summed.at[1, 64:128, :64].set(summed[0, 64:128, :64]),  # another rank's
    ):
        with pytest.raises(AssertionError, match="of 98304 elements differ"):
            _assert_sum(total(wrong), parts, k, residual)


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
    if not scatter:
        assert all(np.array_equal(out[0], copy) for copy in out), "ranks differ"
    _assert_sum(out.reshape(m, n) if scatter else out[0], _parts(a, b), k, residual)


def _mesh(devices: Any) -> Mesh:
    return Mesh(np.array(devices), ("tp",), axis_types=(AxisType.Auto,))


def _sharded(mesh: Any, *, with_residual: bool = False, scatter: bool = False, per_rank: bool = False, **options: Any) -> Any:
    """The kernel on all of `mesh`: (a [M, K], b [K, N], residual) -> C, or with `per_rank` every rank's copy of it."""

    def one(a: jax.Array, b: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        if scatter:
            return gemm_reduce_scatter(a, b, axis="tp", **options)
        out = gemm_all_reduce(a, b, axis="tp", residual=residual, **options)
        return out[None] if per_rank else out

    specs = (P(None, "tp"), P("tp", None), *((P(),) if with_residual else ()))
    return jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P("tp") if scatter or per_rank else P(), check_vma=False)


def _shapes(m: int, k: int, n: int, ranks: int, with_residual: bool = False) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of the whole arrays; k is one rank's."""
    sizes = ((m, k * ranks), (k * ranks, n), *(((m, n),) if with_residual else ()))
    return tuple(jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes)


def test_refuses_by_name(monkeypatch):
    monkeypatch.setattr(_mosaic, "_OLDEST_JAX", (0,))  # nothing is compiled here

    def trace(m: int, k: int, n: int, *, device: str = "NVIDIA H200", ranks: int = 4, **options: Any) -> None:
        mesh = AbstractMesh((ranks,), ("tp",), axis_types=(AxisType.Auto,), abstract_device=AbstractDevice(device, 132, "gpu"))
        shapes = _shapes(m, k, n, ranks, options.get("with_residual", False))
        jax.eval_shape(_sharded(mesh, **{"num_sms": 132, **options}), *shapes)

    trace(64, 64, 64)
    with pytest.raises(UnsupportedDeviceError, match="gemm_all_reduce"):
        trace(64, 64, 64, device="cpu")
    with pytest.raises(UnsupportedDeviceError, match="gemm_reduce_scatter"):
        trace(256, 64, 64, device="cpu", scatter=True)
    with pytest.raises(ValueError, match="neither peers' memory nor semaphores"):
        trace(64, 64, 64, device=_mosaic.INTERPRETED)
    with pytest.raises(ValueError, match="num_sms=133"):
        trace(64, 64, 64, num_sms=133)
    with pytest.raises(ValueError, match="1 rank"):
        trace(64, 64, 64, ranks=1)
    with pytest.raises(ValueError, match="multiple of 8, not 100"):
        trace(100, 64, 64)
    with pytest.raises(ValueError, match="cuts tiles along K"):
        trace(64, 64, 64, config=dataclasses.replace(_64X64, stream_k=True))
    with pytest.raises(ValueError, match="too many registers"):
        trace(64, 64, 512, config=dataclasses.replace(_64X64, tile_n=256))
    with pytest.raises(ValueError, match="96 rows do not divide"):
        trace(96, 64, 64, scatter=True, config=_64X64)


def test_default_tiles_fit_the_kernel():
    for m in (64, 1024, 2048, 4096):
        for k, n in ((7168, 8192), (2048, 8192)):
            config = default_config(m, k, n, num_sms=132)
            assert config.cluster == 1
            assert not config.stream_k
            assert config.stages(False) >= 2
    assert 384 % default_config(1536, 7168, 8192, num_sms=132, shard_rows=384).tile_m == 0
    with pytest.raises(ValueError, match="no tile's height divides the 80 rows"):
        default_config(320, 7168, 8192, num_sms=132, shard_rows=80)


# Name -> rows, K of a rank, N, and options.
_COMPILED: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "70b/4 down": (2048, 7168, 8192, {}),
    "70b/4 o, residual": (2048, 2048, 8192, {"with_residual": True}),
    "1024 rows, 116 SMs": (1024, 7168, 8192, {"num_sms": 116}),
    "few rows": (72, 2048, 8192, {"with_residual": True}),
    "one consumer": (512, 2048, 4096, {"config": GemmConfig(tile_m=64, tile_n=128, consumers=1, stream_k=False)}),
    "reduce-scatter": (2048, 7168, 8192, {"scatter": True}),
}


@pytest.mark.aot
def test_compiles_for_four_gpus_without_spills_and_without_multicast():
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        env=aot.child_environment() | {"MOSAIC_GPU_DUMP_PTXAS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == _COMPILED.keys()
    for name, facts in found.items():
        resources = aot.Resources(**facts["resources"])
        assert resources.spill_bytes == 0, name
        assert _mosaic.SMEM_LIMIT_BYTES // 2 < resources.smem_bytes <= _mosaic.SMEM_LIMIT_BYTES, name
        assert resources.registers <= 168, f"{name}: more than the warpgroups of a CTA can start with"
        assert facts["peers"], f"{name}: no addresses of peers"
        assert not facts["multicast"], f"{name}: NVLink multicast"


def _compile_all() -> None:
    """In a process of its own, see `tests.kernels.aot`."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc("h200", platform="cuda", target_config=aot.H200, topology="1x1x4")
    mesh = _mesh(topology.devices[:4])
    found = {}
    for name, (m, k, n, options) in _COMPILED.items():
        function = _sharded(mesh, **{"num_sms": 132, **options})
        shapes = _shapes(m, k, n, 4, options.get("with_residual", False))
        resources = aot._compile(function, shapes, mesh)
        with jax.set_mesh(mesh):
            text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        found[name] = {
            "resources": dataclasses.asdict(resources),
            "peers": "uses_xla_collective_metadata = true" in text,
            # What XLA is told of arrays that a kernel reaches through multicast.
            "multicast": "symmetric_memory_parameters" in text or "multimem" in text,
        }
    print(json.dumps(found))


@pytest.mark.parametrize(("count", "why"), [(1, "needs two GPUs or more"), (2, "needs NVLink between all GPUs")])
def test_the_benchmark_refuses_gpus_that_would_wait_for_each_other(
    count: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = jax.devices()[:count]
    monkeypatch.setattr(bench.jax, "devices", lambda: devices)
    monkeypatch.setattr(bench, "signal_each_other", lambda asked: asked is not devices)
    with pytest.raises(UnsupportedDeviceError, match=why):
        next(bench.benchmark("gemm_all_reduce", [132]))


needs_gpus = pytest.mark.skipif(
    len(jax.devices()) < 2 or jax.default_backend() != "gpu" or not signal_each_other(jax.devices()),
    reason="needs two GPUs or four, with NVLink",
)


def _operands(mesh: Mesh, m: int, k: int, n: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random a [M, R K], b [R K, N], divided along R K, and a residual on all ranks."""
    ranks = mesh.size

    def make() -> tuple[jax.Array, jax.Array, jax.Array]:
        return _normal(0, m, k * ranks), _normal(1, k * ranks, n, scale=(k * ranks) ** -0.5), _normal(2, m, n)

    shardings = tuple(NamedSharding(mesh, spec) for spec in (P(None, "tp"), P("tp", None), P()))
    return jax.jit(make, out_shardings=shardings)()


def _parts_on_device(mesh: Mesh, a: jax.Array, b: jax.Array) -> jax.Array:
    """bfloat16 [R, M, N], XLA's product on each rank."""

    def one(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.dot(a, b, preferred_element_type=jnp.float32).astype(jnp.bfloat16)[None]

    specs = (P(None, "tp"), P("tp", None))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P("tp"), check_vma=False))(a, b)


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize(
    ("m", "k", "n", "with_residual", "options"),
    [
        (2048, 7168, 8192, False, {}),
        (2048, 2048, 8192, True, {}),
        (1024, 2048, 8192, True, {"num_sms": 84}),
        (72, 2048, 8192, True, {}),
        (200, 1024, 2000, True, {"config": _128X64, "num_sms": 8}),
        (512, 2048, 4096, False, {"config": GemmConfig(tile_m=64, tile_n=128, consumers=1, stream_k=False)}),
    ],
)
def test_gpu_matches_reference_on_all_ranks(m, k, n, with_residual, options):
    mesh = _mesh(jax.devices()[:4])
    a, b, residual = _operands(mesh, m, k, n)
    run_all = jax.jit(_sharded(mesh, with_residual=with_residual, per_rank=True, **{"num_sms": 132, **options}))
    copies = np.asarray(run_all(a, b, *((residual,) if with_residual else ())))
    assert all(np.array_equal(copies[0], copy) for copy in copies), "ranks differ"
    _assert_sum(copies[0], _parts_on_device(mesh, a, b), k, residual if with_residual else None)


@pytest.mark.gpu
@needs_gpus
def test_gpu_reduce_scatter_gives_each_rank_its_rows():
    mesh = _mesh(jax.devices()[:4])
    a, b, _ = _operands(mesh, 1024, 2048, 8192)
    _assert_sum(jax.jit(_sharded(mesh, scatter=True, num_sms=132))(a, b), _parts_on_device(mesh, a, b), 2048)


@pytest.mark.gpu
@needs_gpus
@pytest.mark.parametrize(("m", "num_sms"), [(2048, 132), (512, 100)])
def test_gpu_repeats_bit_for_bit(m, num_sms):
    mesh = _mesh(jax.devices()[:4])
    a, b, _ = _operands(mesh, m, 2048, 8192)
    run_all = jax.jit(_sharded(mesh, per_rank=True, num_sms=num_sms))

    @jax.jit
    def still_same(same: jax.Array, out: jax.Array, first: jax.Array) -> jax.Array:
        return same & jnp.array_equal(out.view(jnp.uint16), first.view(jnp.uint16)[:1].repeat(out.shape[0], 0))

    first, same = run_all(a, b), jnp.asarray(True)
    for _ in range(200):
        same = still_same(same, run_all(a, b), first)
    assert bool(same)


if __name__ == "__main__":
    _compile_all()

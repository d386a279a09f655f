"""The row-parallel projections of Llama-3-70B on all GPUs of the machine: a GEMM and its all-reduce in one kernel, and in two.

The baseline is cuBLAS, then NCCL's all-reduce; beside it this package's GEMM, then the same, and that GEMM alone, which nothing
that also communicates can beat.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import UnsupportedDeviceError
from pallas_kernels.bench import timing
from pallas_kernels.bench.gemm import Projection, selected
from pallas_kernels.cuda_driver import signal_each_other
from pallas_kernels.gemm import gemm
from pallas_kernels.gemm_all_reduce import gemm_all_reduce

ROWS = (2048, 1024)
AXIS = "tp"
# K is all ranks' together.
PROJECTIONS = (Projection(name="70b down", k=28672, n=8192), Projection(name="70b o", k=8192, n=8192))

_CALLS = 4
_OPTIONS = {"xla_gpu_enable_command_buffer": "", "xla_gpu_enable_triton_gemm": False}
_BASELINE, _ALONE = "cublas, psum", "gemm alone"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One rank's (a, b) -> C. `communicates` is false of the GEMM alone."""

    name: str
    num_sms: int
    apply: Callable[[jax.Array, jax.Array], jax.Array]
    communicates: bool = True


def benchmark(kernel: str, num_sms: Sequence[int], *, names: str = "", sustained: bool = False) -> Iterator[timing.Row]:
    """Rows for each projection, number of rows and variant; `names` keeps projections, `sustained` adds one GPU's energy.

    Raises:
      UnsupportedDeviceError: the machine has a single GPU, or GPUs that NVLink does not connect.
      CudaDriverError: the driver does not say how they are connected.
    """
    if len(jax.devices()) < 2:
        raise UnsupportedDeviceError(f"{kernel} needs two GPUs or more, this machine has {len(jax.devices())}")
    if not signal_each_other(jax.devices()):
        raise UnsupportedDeviceError(f"{kernel} needs NVLink between all GPUs")
    mesh = Mesh(np.array(jax.devices()), (AXIS,), axis_types=(AxisType.Auto,))
    cases = [(p, m) for p in selected(PROJECTIONS, names) for m in ROWS]
    jobs = [(p, m, v) for p, m in cases for v in variants(num_sms)]
    compiled = timing.compile_side_by_side({job: functools.partial(lower, mesh, *job) for job in jobs}, _OPTIONS)
    chains = {job: timing.Chain(program, _CALLS) for job, program in compiled.items()}
    for p, m in cases:
        input_sets = _inputs(mesh, p, m)
        own = {v: chains[p, m, v] for v in variants(num_sms)}
        seconds = timing.take_turns({v.name: c for v, c in own.items()}, input_sets, reps=3)
        for v, chain in own.items():
            energy = timing.sustained_chain(chain, input_sets) if sustained else None
            yield _row(kernel, p, m, v, mesh.size, seconds, energy)


@functools.cache
def _variants(num_sms: tuple[int, ...]) -> tuple[Variant, ...]:
    device_sms = jax.devices()[0].core_count

    def then_sum(multiply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda a, b: lax.psum(multiply(a, b), AXIS)

    found = [
        Variant(_BASELINE, device_sms, then_sum(jnp.dot)),
        Variant("gemm, psum", device_sms, then_sum(functools.partial(gemm, num_sms=device_sms))),
        Variant(_ALONE, device_sms, functools.partial(gemm, num_sms=device_sms), communicates=False),
    ]
    one = [Variant(f"one kernel, {n} SMs", n, functools.partial(gemm_all_reduce, axis=AXIS, num_sms=n)) for n in num_sms]
    return (*found, *one)


def variants(num_sms: Sequence[int]) -> tuple[Variant, ...]:
    """The baselines, and the one kernel on each number of SMs."""
    return _variants(tuple(num_sms))


def lower(mesh: Mesh, p: Projection, m: int, v: Variant) -> jax.stages.Lowered:
    """The program that is timed."""
    operands = ((m, p.k), P(None, AXIS)), (p.weight_shape, P(AXIS, None))
    shapes = tuple(jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for s, spec in operands)
    # What a GEMM alone leaves differs from rank to rank, so its ranks' results are rows of one array.
    out = P() if v.communicates else P(AXIS)
    on_all = jax.shard_map(v.apply, mesh=mesh, in_specs=(P(None, AXIS), P(AXIS, None)), out_specs=out, check_vma=False)
    return timing.lower_chain(on_all, [shapes] * _sets(p, m, mesh.size), calls=_CALLS)


def _sets(p: Projection, m: int, ranks: int) -> int:
    return timing.copies_beyond_l2(dataclasses.replace(p, k=p.k // ranks).hbm_bytes(m))


def _inputs(mesh: Mesh, p: Projection, m: int) -> list[timing.Inputs]:
    @functools.partial(jax.jit, out_shardings=tuple(NamedSharding(mesh, spec) for spec in (P(None, AXIS), P(AXIS, None))))
    def make(key: jax.Array) -> timing.Inputs:
        keys = jax.random.split(key)
        return tuple(
            jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, ((m, p.k), p.weight_shape), strict=True)
        )

    return [make(jax.random.key(i)) for i in range(_sets(p, m, mesh.size))]


def _row(
    kernel: str, p: Projection, m: int, v: Variant, ranks: int, seconds: dict[str, float], energy: timing.Sustained | None
) -> timing.Row:
    of_rank = dataclasses.replace(p, k=p.k // ranks)
    beyond = f"{1e6 * (seconds[v.name] - seconds[_ALONE]):.0f} us beyond the GEMM"
    # What a ring would send from each rank in that time: the usual measure of all-reduces, here of the whole.
    bus_bytes = 2 * (ranks - 1) / ranks * m * p.n * 2
    return timing.Row(
        kernel=f"{kernel} {v.name}",
        case=f"{p.name} {m}x{of_rank.k}x{p.n}",
        num_sms=v.num_sms,
        seconds=seconds[v.name],
        flops=of_rank.flops(m),
        hbm_bytes=of_rank.hbm_bytes(m),
        baseline=_BASELINE,
        baseline_seconds=seconds[_BASELINE],
        sustained=energy,
        note=f"{bus_bytes / seconds[v.name] / 1e9:.0f} GB/s of bus, {beyond}" if v.communicates else "",
    )

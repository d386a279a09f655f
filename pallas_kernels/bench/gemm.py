"""GEMMs of the models we serve, as one rank of their tensor parallelism sees them, beside cuBLAS and jax.lax.ragged_dot."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._tuning import GemmConfig
from pallas_kernels.bench import parallel, timing
from pallas_kernels.gemm import gemm
from pallas_kernels.grouped_gemm import grouped_gemm

ROWS = {"gemm": (64, 128, 256, 512, 1024, 2048, 4096), "grouped_gemm": (256, 1024, 4096)}
SKEWS = {"gemm": ((),), "grouped_gemm": ((1,) * 8, (4,) * 4 + (1,) * 4)}
BASELINE = {"gemm": "cublas", "grouped_gemm": "lax.ragged_dot"}
# At least so long a chain: the host takes some 0.1 ms to launch one.
_CHAIN_SECONDS = 0.4e-3
_LONG = 250e-6  # what the power limit is of interest for
# XLA would also try its Triton kernels; the figure beside ours is cuBLAS's own.
_OPTIONS = {"cublas": {"xla_gpu_enable_triton_gemm": False}, "lax.ragged_dot": {}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projection:
    """One weight: [k, n], or [k, 2, n] with `swiglu`; a stack of them, one for each of `experts`, if there are any."""

    name: str
    k: int
    n: int
    swiglu: bool = False
    experts: int = 0
    out_dtype: str = "bfloat16"

    @property
    def kernel(self) -> str:
        return "grouped_gemm" if self.experts else "gemm"

    @property
    def weight_shape(self) -> tuple[int, ...]:
        stack = (self.experts,) if self.experts else ()
        return (*stack, self.k, 2, self.n) if self.swiglu else (*stack, self.k, self.n)

    def flops(self, m: int) -> float:
        return 2.0 * m * self.k * self.n * (2 if self.swiglu else 1)

    def hbm_bytes(self, m: int) -> float:
        """Each operand once."""
        weights = self.k * self.n * (2 if self.swiglu else 1) * max(self.experts, 1)
        return 2.0 * (m * self.k + weights) + jnp.dtype(self.out_dtype).itemsize * m * self.n


# Llama-3-8B on one GPU (Mixtral has its qkv and o), Llama-3-70B and Qwen2-72B on 4 and on 8 (the same qkv and o). Qwen2's d_ff
# is no multiple of 64 per rank: "padded" is what a loader makes of it by adding columns of zeros.
PROJECTIONS = (
    Projection(name="8b gate_up", k=4096, n=14336, swiglu=True),
    Projection(name="8b down", k=14336, n=4096),
    Projection(name="8b qkv", k=4096, n=6144),
    Projection(name="8b o", k=4096, n=4096),
    Projection(name="70b/4 gate_up", k=8192, n=7168, swiglu=True),
    Projection(name="70b/4 down", k=7168, n=8192),
    Projection(name="70b/4 qkv", k=8192, n=2560),
    Projection(name="70b/4 o", k=2048, n=8192),
    Projection(name="70b/8 gate_up", k=8192, n=3584, swiglu=True),
    Projection(name="70b/8 down", k=3584, n=8192),
    Projection(name="70b/8 qkv", k=8192, n=1280),
    Projection(name="70b/8 o", k=1024, n=8192),
    Projection(name="qwen72b/4 gate_up", k=8192, n=7392, swiglu=True),
    Projection(name="qwen72b/4 down", k=7392, n=8192),
    Projection(name="qwen72b/8 gate_up", k=8192, n=3696, swiglu=True),
    Projection(name="qwen72b/8 down", k=3696, n=8192),
    Projection(name="qwen72b/4 gate_up padded", k=8192, n=7424, swiglu=True),
    Projection(name="qwen72b/4 down padded", k=7424, n=8192),
    Projection(name="qwen72b/8 gate_up padded", k=8192, n=3712, swiglu=True),
    Projection(name="qwen72b/8 down padded", k=3712, n=8192),
)
# Computed once a step, so nothing tunes it, and it runs where its name is asked for.
LOGITS = Projection(name="logits", k=4096, n=128256, out_dtype="float32")
EXPERTS = (
    Projection(name="mixtral gate_up", k=4096, n=14336, swiglu=True, experts=8),
    Projection(name="mixtral down", k=14336, n=4096, experts=8),
)


@dataclasses.dataclass(frozen=True)
class Variant:
    """How to compute a projection: a baseline's name, or our kernel with a configuration (None: the tuned one) on some SMs."""

    name: str
    num_sms: int = 0
    config: GemmConfig | None = None
    of: Literal["all", "in use", "just"] = "all"
    """Rows: all of A; those that data says are in use; as many, without others behind them and known to the compiler."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One projection of `m` rows in several variants, timed in turns or, if `steady`, each for long enough that the power limit
    sets its clock; group sizes relate as `skew`."""

    projection: Projection
    m: int
    variants: tuple[Variant, ...]
    skew: tuple[int, ...] = ()
    steady: bool = False
    in_use: int | None = None
    """Rows in use of the `m`, for variants that are not of all."""

    @property
    def label(self) -> str:
        p = self.projection
        skew = f" {max(self.skew)}:{min(self.skew)}" if p.experts else ""
        used = "" if self.in_use is None else f"{self.in_use}/"
        return f"{p.name} {used}{self.m}x{p.k}x{'2x' if p.swiglu else ''}{p.n}{skew}"


def group_sizes(m: int, skew: Sequence[int]) -> list[int]:
    """`m` rows over experts in proportion to `skew`, to the row."""
    bounds = [m * sum(skew[:i]) // sum(skew) for i in range(len(skew) + 1)]
    return [high - low for low, high in itertools.pairwise(bounds)]


def selected(projections: Sequence[Projection], names: str) -> list[Projection]:
    """Those whose name contains one of the comma-separated `names`."""
    return [p for p in projections if any(name in p.name for name in names.split(","))]


def benchmark(
    kernel: str,
    num_sms: Sequence[int],
    *,
    rows: Sequence[int] = (),
    names: str = "",
    sustained: bool = False,
    workers: int = 12,
    rows_in_use: Sequence[float] = (),
) -> Iterator[timing.Row]:
    """`kernel` ("gemm" or "grouped_gemm") as tuned, on each number of SMs, beside its baseline.

    `rows` replaces the usual numbers of rows, `names` keeps projections whose name contains one of them. With `sustained`, a
    case that runs a quarter of a millisecond or longer is repeated for some seconds at the power limit, and so is the baseline.
    With `rows_in_use`, fractions of the rows, `gemm` runs with so many of them in use instead, beside itself; their number is
    rounded to a multiple of 64.
    """
    projections = selected(EXPERTS if kernel == "grouped_gemm" else (*PROJECTIONS, *([LOGITS] if names else [])), names)
    if rows_in_use:
        yield from _benchmark_in_use(projections, num_sms, rows or ROWS[kernel], rows_in_use, sustained, workers)
        return
    variants = (Variant(BASELINE[kernel]), *(Variant(str(n), n) for n in num_sms))
    jobs = [Job(p, m, variants, skew) for m in rows or ROWS[kernel] for p in projections for skew in SKEWS[kernel]]
    for job, seconds in measure(jobs, workers=workers):
        rows_of_job = [_row(job, v, seconds) for v in variants[1:]]
        yield from rows_of_job
        if sustained and rows_of_job[0].seconds >= _LONG:
            yield from _held(job, variants[:2], rows_of_job[0])


def _benchmark_in_use(
    projections: Sequence[Projection],
    num_sms: Sequence[int],
    rows: Sequence[int],
    fractions: Sequence[float],
    sustained: bool,
    workers: int,
) -> Iterator[timing.Row]:
    """The kernel that is told how many rows are in use beside that of all rows, and beside that of just so many."""
    kinds: tuple[Literal["all", "in use", "just"], ...] = ("in use", "all", "just")
    jobs = [
        Job(p, m, (Variant("cublas"), *(Variant(of, sms, of=of) for of in kinds)), in_use=in_use)
        for m, p, sms in itertools.product(rows, projections, num_sms)
        for in_use in dict.fromkeys(_whole_blocks(fraction * m, m) for fraction in fractions)
    ]
    for job, seconds in measure(jobs, workers=workers):
        _, ours, *others = job.variants
        lines = [_row(job, ours, seconds, baseline=other.name) for other in others]
        yield from (dataclasses.replace(line, kernel=f"gemm {ours.name} / {line.baseline}") for line in lines)
        if sustained and lines[0].seconds >= _LONG:
            yield from _held(job, job.variants[1:], lines[0])


def _whole_blocks(rows: float, most: int) -> int:
    """A multiple of 64 near `rows`, as steps have them and as a GEMM of just so many can be compiled; none above `most`."""
    return min(most, max(64, 64 * round(rows / 64)))


def _held(job: Job, variants: Sequence[Variant], row: timing.Row) -> Iterator[timing.Row]:
    """`row` for each of the variants, repeated at the power limit."""
    for v in variants:
        held = timing.sustained(_function(job, v), _inputs(job))
        yield dataclasses.replace(row, kernel=f"{job.projection.kernel} {v.name}", baseline="", sustained=held)


def _row(job: Job, v: Variant, seconds: dict[str, Any], baseline: str = "") -> timing.Row:
    baseline, m = baseline or BASELINE[job.projection.kernel], job.m if job.in_use is None else job.in_use
    errors = [s for s in (seconds.get("error"), seconds.get(v.name), seconds.get(baseline)) if isinstance(s, str)]
    ours, theirs = (s if isinstance(s := seconds.get(name), float) else math.nan for name in (v.name, baseline))
    return timing.Row(
        kernel=job.projection.kernel,
        case=job.label,
        num_sms=v.num_sms,
        seconds=ours,
        flops=job.projection.flops(m),
        hbm_bytes=job.projection.hbm_bytes(m),
        baseline=baseline,
        baseline_seconds=theirs,
        note=" ".join(errors),
    )


def measure(jobs: Sequence[Job], *, workers: int, compile_seconds: float = 600.0) -> Generator[tuple[Job, dict[str, Any]]]:
    """Seconds per call of every variant of every job, by the variant's name; an error's text where one failed."""
    run = parallel.run(jobs, _prepare, _measure, workers=workers, compile_seconds=compile_seconds, job_seconds=30.0)
    for job, result in run:
        yield job, {"error": str(result)} if isinstance(result, Exception) else result


@dataclasses.dataclass
class _Prepared:
    chains: dict[str, timing.Chain]
    errors: dict[str, str]
    inputs: Callable[[], list[timing.Inputs]]


def _prepare(job: Job, quiet: AbstractContextManager[Any]) -> _Prepared:
    """Compiles everything. A baseline picks its algorithm by timing candidates, so it is compiled while the device is quiet."""
    prepared = _Prepared({}, {}, jax.jit(functools.partial(_inputs, job)).lower().compile())
    p = job.projection
    roofline = max(p.flops(job.m) / timing.PEAK_FLOPS, p.hbm_bytes(job.m) / timing.PEAK_BYTES_PER_S)
    calls = max(8, min(32, round(_CHAIN_SECONDS / roofline)))
    for v in job.variants:
        try:
            if v.name in _OPTIONS:
                with quiet:
                    options = _OPTIONS[v.name]
                    prepared.chains[v.name] = timing.chain(
                        _function(job, v), _shapes(job), calls=calls, compiler_options=options
                    )
            else:
                prepared.chains[v.name] = timing.chain(_function(job, v), _shapes(job), calls=calls)
        except Exception as error:  # a configuration that does not compile is a result too
            prepared.errors[v.name] = f"{type(error).__name__}: {str(error)[:200]}"
    return prepared


def _measure(job: Job, prepared: _Prepared) -> dict[str, Any]:
    inputs = prepared.inputs()
    errors = prepared.errors | _wrong_results(job, prepared.chains, inputs)
    right = {name: chain for name, chain in prepared.chains.items() if name not in errors}
    if job.steady:
        return errors | {name: timing.steady_seconds(chain, inputs) for name, chain in right.items()}
    return errors | timing.take_turns(right, inputs, rep_seconds=10e-3)


def _wrong_results(job: Job, chains: dict[str, timing.Chain], inputs: list[timing.Inputs]) -> dict[str, str]:
    """The variants whose first result differs from the baseline's by more than bf16 and the order of sums explain.

    Of rows not in use nothing is asked.
    """
    baseline = BASELINE[job.projection.kernel]
    if baseline not in chains:
        return {}
    want = _activated(job, chains[baseline].run(inputs)[0])
    wrong = {}
    for name, chain in chains.items():
        error = float(_relative_error(chain.run(inputs)[0][: job.in_use], want[: job.in_use])) if name != baseline else 0.0
        if not error < 1e-2:  # NaN is wrong too
            wrong[name] = f"relative error {error:.1e}"
    return wrong


@functools.partial(jax.jit, static_argnums=0)
def _activated(job: Job, product: jax.Array) -> jax.Array:
    if not job.projection.swiglu:
        return product
    gate, up = jnp.split(product.astype(jnp.float32), 2, axis=1)
    return jax.nn.silu(gate) * up


@jax.jit
def _relative_error(out: jax.Array, want: jax.Array) -> jax.Array:
    difference = out.astype(jnp.float32) - want.astype(jnp.float32)
    return jnp.linalg.norm(difference) / jnp.linalg.norm(want.astype(jnp.float32))


def _function(job: Job, v: Variant) -> Callable[..., jax.Array]:
    p = job.projection
    if v.name in _OPTIONS:
        return _xla_ragged_dot if p.experts else functools.partial(_xla_dot, p.out_dtype)
    given = {"swiglu": p.swiglu, "num_sms": v.num_sms, "config": v.config}
    return functools.partial(grouped_gemm, **given) if p.experts else functools.partial(_gemm, v.of, p.out_dtype, given)


def _gemm(of: str, out_dtype: str, given: dict[str, Any], a: jax.Array, b: jax.Array, *in_use: jax.Array) -> jax.Array:
    """`in_use`: the first rows of `a` that are, and their number."""
    if of == "just":
        return gemm(in_use[0], b, out_dtype=out_dtype, **given)
    return gemm(a, b, rows=in_use[1] if of == "in use" else None, out_dtype=out_dtype, **given)


def _xla_dot(out_dtype: str, a: jax.Array, b: jax.Array, *_: jax.Array) -> jax.Array:
    """Gate and up as one matrix and without their activation: the product alone, as fast as the library has it."""
    return lax.dot(a, b.reshape(b.shape[0], -1), preferred_element_type=jnp.dtype(out_dtype))


def _xla_ragged_dot(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(x, w.reshape(*w.shape[:2], -1), sizes)


def _shapes(job: Job) -> list[timing.Inputs]:
    p = job.projection
    copies = timing.copies_beyond_l2(p.hbm_bytes(job.m))
    a, b = jax.ShapeDtypeStruct((job.m, p.k), jnp.bfloat16), jax.ShapeDtypeStruct(p.weight_shape, jnp.bfloat16)
    more: tuple[Any, ...] = (jax.ShapeDtypeStruct((p.experts,), jnp.int32),) if p.experts else ()
    if job.in_use is not None:
        more = jax.ShapeDtypeStruct((job.in_use, p.k), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int32)
    return [(a, b, *more)] * copies


def _inputs(job: Job) -> list[timing.Inputs]:
    """Random-normal operands."""
    shapes = _shapes(job)
    keys = jax.random.split(jax.random.key(job.m), len(shapes) + 1)
    a = jax.random.normal(keys[0], shapes[0][0].shape, jnp.bfloat16)
    more: tuple[Any, ...] = (jnp.asarray(group_sizes(job.m, job.skew), jnp.int32),) if job.projection.experts else ()
    if job.in_use is not None:
        more = a[: job.in_use], jnp.int32(job.in_use)
    return [(a, jax.random.normal(key, shapes[0][1].shape, jnp.bfloat16), *more) for key in keys[1:]]

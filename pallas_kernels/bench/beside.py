"""GEMMs beside decode attention: what a projection's tiles lose to attention's reads on the other SMs, and what the pair gains.

A program is some phases between barriers, as a pipeline has them: in each, calls of the GEMM one after another on one stream
and one call of attention on a second, each on SMs of its own. How many sequences attention reads is data (rows without tokens
cost nothing), so one program serves every amount. The baseline is one after the other, each on all SMs, in the same run.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import _gemm_cost, _mosaic, _tuning
from pallas_kernels._gemm_config import GemmConfig
from pallas_kernels._gemm_schedule import PARTIAL, schedule
from pallas_kernels.bench import timing
from pallas_kernels.bench.attention import Decode, normal, paged
from pallas_kernels.bench.gemm import PROJECTIONS, Projection, selected
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.gemm import gemm
from pallas_kernels.streams import COMPUTE_STREAM, MEMORY_STREAM, on_stream

NAMES = "8b "
ROWS = (512, 1024)
ATTENTION_SMS = (32,)
DECODE = Decode(name="8b 512 x 2048", rows=512, mean_kv_len=2048, kv_heads=8, group=4, page_size=64)

PHASES = 4
_PHASE_SECONDS = 0.4e-3  # of GEMMs; several phases hide a program's launch
_FLOPS_PER_SM = 5e12
_ALONE_CALLS = {"gemm": 8, "attention": 4}
# Parts of DECODE.rows for which attention is timed alone; a start and an end without any tokens cost something, too.
_CURVE = (0.0, 0.125, 0.25, 0.5, 1.0)
# Attention's time alone on its SMs over that of the GEMMs on theirs, around which the best amount of attention is sought.
_ATTENTION_OVER_GEMMS = 1.2
_AMOUNTS = (0.6, 0.75, 0.9, 1.05)
# Graphs would put the streams one behind the other.
_OPTIONS = {"xla_gpu_enable_command_buffer": ""}


@dataclasses.dataclass(frozen=True)
class Case:
    """A projection of `m` rows on `gemm_sms` beside DECODE on `attention_sms`."""

    projection: Projection
    m: int
    gemm_sms: int
    attention_sms: int

    @property
    def calls(self) -> int:
        """GEMMs of a phase."""
        return max(1, round(_PHASE_SECONDS * self.gemm_sms * _FLOPS_PER_SM / self.projection.flops(self.m)))

    @property
    def copies(self) -> int:
        """Weights to take turns with."""
        return timing.copies_beyond_l2(2.0 * math.prod(self.projection.weight_shape))

    @property
    def sets(self) -> int:
        """Weights of the pair: a phase's calls must differ, else XLA would merge them."""
        return max(self.calls, self.copies)


Variants = dict[str, GemmConfig]
Chains = Mapping[Any, timing.Chain]


def benchmark(
    kernel: str,
    num_sms: Sequence[int],
    *,
    rows: Sequence[int] = (),
    names: str = "",
    attention_sms: Sequence[int] = (),
    sustained: bool = False,
) -> Iterator[timing.Row]:
    """Rows for the first of `num_sms`, the SMs that the two share: one for each variant of each GEMM, see `variants`.

    A row's time is that of a phase with that number of sequences, of a few, that gains most; `figures` holds all of them.

    Raises:
      ValueError: `attention_sms` leaves a GEMM none of them.
    """
    total = num_sms[0]
    shares = tuple(attention_sms or ATTENTION_SMS)
    if not all(0 < share < total for share in shares):
        raise ValueError(f"{kernel}: attention_sms={shares} are not all between 1 and {total - 1}, one less than all SMs")
    projections = selected(PROJECTIONS, names or NAMES)
    cases = [Case(p, m, total - share, share) for p in projections for m in rows or ROWS for share in shares]
    plan = {case: variants(case) for case in cases}
    chains = _compile(plan, total)
    attention = _attention_set()
    curves = {n: _curve(chains["attention", n], attention) for n in (total, *shares)}
    for case in cases:
        sets = _gemm_sets(case)
        alone = timing.steady_seconds(chains[case.projection, case.m], sets[: case.copies])
        for name, config in plan[case].items():
            chain, inputs = chains[case, config], [*sets, attention]
            amounts = _amounts(case, chain, inputs, curves[case.attention_sms])
            one_by_one = {n: case.calls * alone + curves[total].seconds_of(n) for n in amounts if n}
            best = max(one_by_one, key=lambda n: one_by_one[n] / amounts[n])
            held = timing.sustained_chain(chain, with_rows(inputs, best)) if sustained else None
            yield _row(f"{kernel} {name}", case, config, best, amounts, one_by_one, held)


def variants(case: Case) -> Variants:
    """By name: what `gemm` takes by itself there, and what it would take if it knew of nothing on the other SMs, cut and whole.

    Where one of these is the same launch as one before, it is left out.
    """
    p, m = case.projection, case.m
    shape = {"swiglu": p.swiglu, "num_sms": case.gemm_sms}
    candidates = [c for tile in _gemm_cost.tiles(m, swiglu=p.swiglu) for c in _gemm_cost.cuts(tile)]
    found = {"chosen": _tuning.gemm_config(_mosaic.target_device().kind, m, p.n, p.k, **shape, beside=True)}
    for name, cut in (("cut", True), ("whole", False)):
        of_kind = [c for c in candidates if _is_cut(case, c) == cut]
        seconds = functools.partial(_gemm_cost.predicted_seconds, m=m, n=p.n, k=p.k, **shape)
        if of_kind:
            found[name] = min(of_kind, key=seconds)
    launches = {name: _launch(case, c) for name, c in found.items()}
    first = {launch: name for name, launch in reversed(launches.items())}
    return {name: c for name, c in found.items() if first[launches[name]] == name}


def _launch(case: Case, config: GemmConfig) -> tuple[Any, ...]:
    """The same for configurations that are the same launch."""
    return config.tile_m, config.tile_n, config.tile_k, config.split, _table(case, config).tobytes()


def _table(case: Case, config: GemmConfig) -> np.ndarray:
    p, tiles = case.projection, _mosaic.cdiv
    m_tiles, n_tiles, k_steps = tiles(case.m, config.segment_m), tiles(p.n, config.tile_n), tiles(p.k, config.tile_k)
    return schedule(m_tiles, n_tiles, k_steps, case.gemm_sms // config.cluster, config)


def _is_cut(case: Case, config: GemmConfig) -> bool:
    return bool(_table(case, config)[..., PARTIAL].any())


def phases(case: Case, config: GemmConfig) -> Callable[[Sequence[timing.Inputs]], Any]:
    """The program of a pair, a function of `Case.sets` times (a, b) and then decode attention's arguments."""

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return gemm(a, b, swiglu=case.projection.swiglu, num_sms=case.gemm_sms, config=config)

    attend = functools.partial(decode_attention, num_sms=case.attention_sms)

    def run(inputs: Sequence[timing.Inputs]) -> list[Any]:
        *sets, attention = inputs
        outs: list[Any] = []
        for i in range(PHASES):
            given = [sets[(i * case.calls + j) % len(sets)] for j in range(case.calls)], attention
            # Orders the phases, and makes their inputs different values, so that XLA cannot merge equal calls.
            given, outs[-1:] = lax.optimization_barrier((given, outs[-1:]))
            products = [on_stream(COMPUTE_STREAM, multiply)(*one) for one in given[0]]
            outs.append(lax.optimization_barrier((products, on_stream(MEMORY_STREAM, attend)(*given[1]))))
        return outs  # all of them: what nobody needs is not computed

    return run


def _compile(plan: Mapping[Case, Variants], total: int) -> Chains:
    attention = jax.eval_shape(_attention_set)
    lowered, calls = {}, {}
    for n in dict.fromkeys((total, *(case.attention_sms for case in plan))):
        f, calls["attention", n] = functools.partial(decode_attention, num_sms=n), _ALONE_CALLS["attention"]
        lowered["attention", n] = functools.partial(timing.lower_chain, f, [attention], calls=calls["attention", n])
    for case, configs in plan.items():
        key, sets = (case.projection, case.m), gemm_shapes(case)
        f, calls[key] = functools.partial(gemm, swiglu=case.projection.swiglu, num_sms=total), _ALONE_CALLS["gemm"]
        lowered[key] = functools.partial(timing.lower_chain, f, sets[: case.copies], calls=calls[key])
        for config in configs.values():
            calls[case, config] = PHASES
            lowered[case, config] = functools.partial(jax.jit(phases(case, config)).lower, [*sets, attention])
    compiled = timing.compile_side_by_side(lowered, _OPTIONS)
    return {key: timing.Chain(program, calls[key]) for key, program in compiled.items()}


def gemm_shapes(case: Case) -> list[timing.Inputs]:
    p = case.projection
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((case.m, p.k), p.weight_shape))
    return [(a, b)] * case.sets


def _gemm_sets(case: Case) -> list[timing.Inputs]:
    a = normal(6, (case.m, case.projection.k))
    return [(a, normal(7 + i, case.projection.weight_shape)) for i in range(case.sets)]


def _attention_set() -> timing.Inputs:
    d = DECODE
    kv_lens = d.kv_lens()
    q = normal(0, (d.rows, d.kv_heads, d.group, d.head_dim))
    return q, *paged(kv_lens, d.kv_heads, d.page_size, d.head_dim), jnp.asarray(kv_lens)


def with_rows(inputs: Sequence[timing.Inputs], number: int) -> list[timing.Inputs]:
    """The arguments, of which attention's are the last, with tokens in the first `number` rows only."""
    *others, (*arrays, kv_lens) = inputs
    kept = np.where(np.arange(len(kv_lens)) < number, DECODE.kv_lens(), 0)
    return [*others, (*arrays, jnp.asarray(kept, kv_lens.dtype))]


@dataclasses.dataclass(frozen=True)
class Curve:
    """Seconds of attention alone by its rows that have tokens."""

    rows: Sequence[int]
    seconds: Sequence[float]

    def seconds_of(self, rows: int) -> float:
        return float(np.interp(rows, self.rows, self.seconds))

    def rows_within(self, seconds: float) -> float:
        return float(np.interp(seconds, self.seconds, self.rows))


def _curve(chain: timing.Chain, attention: timing.Inputs) -> Curve:
    rows = [round(part * DECODE.rows) for part in _CURVE]
    return Curve(rows, [timing.steady_seconds(chain, with_rows([attention], n)) for n in rows])


def _amounts(case: Case, chain: timing.Chain, inputs: Sequence[timing.Inputs], curve: Curve) -> dict[int, float]:
    """Seconds of a phase by attention's rows: without any, and with a few numbers of which one should gain most."""
    alone = timing.steady_seconds(chain, with_rows(inputs, 0))
    most = curve.rows_within(_ATTENTION_OVER_GEMMS * alone)
    numbers = sorted({min(max(1, round(part * most)), DECODE.rows) for part in _AMOUNTS})
    return {0: alone} | {n: timing.steady_seconds(chain, with_rows(inputs, n)) for n in numbers}


def _row(
    kernel: str,
    case: Case,
    config: GemmConfig,
    best: int,
    seconds: Mapping[int, float],
    one_by_one: Mapping[int, float],
    held: timing.Sustained | None,
) -> timing.Row:
    p = case.projection
    alone_us = 1e6 * seconds[0] / case.calls
    shape = f"{config.tile_m}x{config.tile_n} {'cut' if _is_cut(case, config) else 'whole'}"
    return timing.Row(
        kernel=kernel,
        case=f"{p.name} {case.m}, {case.gemm_sms}+{case.attention_sms}, {shape}",
        num_sms=case.gemm_sms + case.attention_sms,
        seconds=seconds[best],
        flops=case.calls * p.flops(case.m),
        hbm_bytes=4.0 * DECODE.kv_heads * DECODE.head_dim * DECODE.mean_kv_len * best,
        baseline="one by one",
        baseline_seconds=one_by_one[best],
        sustained=held,
        note=f"{case.calls} of {alone_us:.1f} us alone, {best} rows",
        figures={
            "m": case.m,
            "n": p.n,
            "k": p.k,
            "swiglu": p.swiglu,
            "config": dataclasses.asdict(config),
            "gemm_sms": case.gemm_sms,
            "attention_sms": case.attention_sms,
            "gemms": case.calls,
            "gemm_us": alone_us,
            "attention_rows": best,
            "together_us": {n: 1e6 * t for n, t in seconds.items()},
            "one_by_one_us": {n: 1e6 * t for n, t in one_by_one.items()},
        },
    )

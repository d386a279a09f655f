"""What the profiler compiles: chains of one kernel, and pairs of kernels in phases; and what it runs them on.

A kernel is called several times in one program, each call behind the one before, on several sets of weights in turn that are
together larger than the L2 cache. A pair runs in phases between barriers, as the executor runs them: GEMMs one after another on
one stream, the other kernel on a second, each within its SM budget. How much attention a pair holds is data (rows without keys
cost nothing), so that one program serves every amount.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from nanoflow_jax.executor.step import PLAN_OPTIONS  # as the executor compiles, so that kernels meet the same schedule
from nanoflow_jax.executor.streams import on_stream
from nanoflow_jax.kernels import Kernels, mosaic
from nanoflow_jax.parallel import all_gather, all_reduce
from nanoflow_jax.plan import TILE, Resource
from pallas_kernels.programs import copies_beyond_l2
from search.analytic import kernel_work
from search.measurement import Alone, Load, Program, Together, is_collective
from search.profile_table import ProfileError

PAGE = 64
_POOL_BYTES = 1 << 30  # of K, and as much of V: many times the L2 cache
_PROGRAM_US = 1500.0  # long enough to hide a launch by the host

Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Workbench:
    """Makes programs and their inputs. `mesh` holds the ranks of collectives; everything else runs on its first device."""

    mesh: jax.sharding.Mesh
    kernels_for: Callable[[int], Kernels] = mosaic
    annotate: Callable[[Resource, Callable], Callable] = on_stream
    options: dict[str, str] | None = dataclasses.field(default_factory=lambda: dict(PLAN_OPTIONS))

    def trace(self, program: Program) -> Any:
        """The program's jaxpr, for arguments as `arguments` makes them."""
        over_ranks = program.ranks > 1
        body = self._phases(program) if isinstance(program, Together) else self._chain(program)
        if over_ranks:
            replicated = PartitionSpec()
            body = jax.shard_map(body, mesh=self.mesh, in_specs=replicated, out_specs=replicated, check_vma=False)
        sharding = NamedSharding(self.mesh, PartitionSpec()) if over_ranks else None
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), _shapes(program))
        return jax.jit(body, compiler_options=self.options).trace(*shapes)

    def _function(self, alone: Alone) -> Callable[..., jax.Array]:
        """The kernel as a function of one input set."""
        name, kernels = alone.kernel.name, self.kernels_for(alone.num_sms)
        if name == "experts":

            def feed_forward(x: Any, up: Any, down: Any, groups: Any) -> jax.Array:
                return kernels.grouped_gemm(kernels.grouped_gemm(x, up, groups, swiglu=True), down, groups)

            return feed_forward
        return {
            "gemm": kernels.gemm,
            "swiglu_gemm": functools.partial(kernels.gemm, swiglu=True),
            "decode_attention": kernels.decode_attention,
            "prefill_attention": kernels.prefill_attention,
            "all_reduce": all_reduce,
            "all_gather": functools.partial(all_gather, axis=1),
        }[name]

    def _chain(self, alone: Alone) -> Callable[..., Any]:
        once = jax.jit(self._function(alone))  # lowered once, however often the chain calls it

        def run(sets: Sequence[Arrays]) -> Any:
            outs: list[Any] = []
            given = sets[0]
            for i in range(repeats(alone)):
                given = given if _in_place(alone) else sets[i % len(sets)]
                # Orders the calls, and makes their inputs different values, so that XLA cannot merge equal calls.
                given, outs[-1:] = lax.optimization_barrier((given, outs[-1:]))
                result = once(*given)
                if _in_place(alone):
                    given = (result,)
                else:
                    outs.append(result)
            return outs or given  # all of them: what nobody needs is not computed

        return run

    def _phases(self, pair: Together) -> Callable[..., Any]:
        gemm, other = self._function(pair.gemm), self._function(pair.other)
        beside = Resource.NETWORK if is_collective(pair.other.kernel) else Resource.MEMORY

        def run(sets: Sequence[Arrays], other_set: Arrays) -> Any:
            outs: list[Any] = []
            for i in range(repeats(pair)):
                given = [sets[(i * pair.calls + j) % len(sets)] for j in range(pair.calls)], other_set
                given, outs[-1:] = lax.optimization_barrier((given, outs[-1:]))
                results = [self.annotate(Resource.COMPUTE, lambda one: gemm(*one))(one) for one in given[0]]
                results.append(self.annotate(beside, lambda one: other(*one))(given[1]))
                *results, last = lax.optimization_barrier(tuple(results))
                if _in_place(pair.other):
                    other_set = (last,)
                else:
                    results.append(last)
                outs.append(results)
            return outs, other_set if _in_place(pair.other) else ()

        return run


def _in_place(alone: Alone) -> bool:
    """Whether each call takes the result of the one before, which XLA needs to overwrite an argument without a copy of it."""
    return alone.kernel.name == "all_reduce"


def repeats(program: Program) -> int:
    """Calls (of a pair: phases) in one program."""
    alone = program.gemm if isinstance(program, Together) else program
    flops, moved, sent = kernel_work(alone.kernel, alone.tokens, float(alone.max_context))
    us = 5.0 + 1e6 * max(flops / 700e12, moved / 4e12, sent / 300e9) * (program.calls if isinstance(program, Together) else 1)
    return min(max(math.ceil(_PROGRAM_US / us), 4), 32)


def _bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _shapes(program: Program) -> tuple[Any, ...]:
    """The arguments of a program: input sets of the kernel (of a pair: of its GEMM), and one set of what runs beside it."""
    if isinstance(program, Together):
        return [_set_shapes(program.gemm)] * max(copies(program.gemm), program.calls), _set_shapes(program.other)
    return ([_set_shapes(program)] * copies(program),)


def copies(alone: Alone) -> int:
    """Input sets that a chain takes turns with: weights in a step are never in the L2 cache. Pools are too large for it."""
    if alone.kernel.name not in ("gemm", "swiglu_gemm"):
        return 1
    return copies_beyond_l2(2.0 * math.prod(alone.kernel.shape), most=8)


def _set_shapes(alone: Alone) -> Arrays:
    """Shapes of one input set: activations first, then weights or pages, then what is data."""
    shape, tokens = alone.kernel.shape, alone.tokens
    match alone.kernel.name:
        case "gemm":
            k, n = shape
            return _bf16(tokens, k), _bf16(k, n)
        case "swiglu_gemm":
            k, n = shape
            return _bf16(tokens, k), _bf16(k, 2, n // 2)
        case "experts":
            experts, per_token, d, f = shape
            return _bf16(tokens * per_token, d), _bf16(experts, d, 2, f), _bf16(experts, f, d), _int32(experts)
        case "decode_attention" | "prefill_attention":
            heads, group, head_dim = shape
            pool = _bf16(1 + _POOL_BYTES // (2 * heads * PAGE * head_dim), heads, PAGE, head_dim)
            rows = tokens if alone.kernel.name == "decode_attention" else prefill_rows(tokens)
            pages = math.ceil(alone.max_context / PAGE)
            data = (_int32(rows),) * (1 if alone.kernel.name == "decode_attention" else 3)
            return _bf16(tokens, heads, group, head_dim), pool, pool, _int32(rows, pages), *data
        case "all_reduce":
            return (_bf16(tokens, shape[1]),)
        case "all_gather":
            return (_bf16(tokens, shape[1] // shape[0]),)
    raise ProfileError(f"the profiler does not know {alone.kernel}")


def prefill_rows(tokens: int) -> int:
    """Rows of a batch of prompts of at least 128 tokens."""
    return tokens // TILE + 1


def prefill_lengths(tokens: int, context: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys, first query and queries of each row, int32: `tokens` that see `context` keys on average.

    Whole prompts of twice the context, which causal tokens see half of on average, and of one more as many tokens from its
    middle as remain.
    """
    length = round(2 * context)
    whole, rest = divmod(tokens, length)
    q_lens, kv_lens = [length] * whole, [length] * whole
    if rest:
        q_lens.append(rest)
        kv_lens.append(round(context + rest / 2))
    rows = prefill_rows(tokens)
    padded = [np.zeros(rows, np.int32) for _ in range(3)]
    for array, values in zip(padded, (kv_lens, np.cumsum([0, *q_lens])[:-1], q_lens), strict=True):
        array[: len(values)] = values
    return padded[0], padded[1], padded[2]


def decode_lengths(tokens: int, load: Load) -> np.ndarray:
    """Keys of each row, int32: the first `load.rows` have `load.context`, the others none and cost nothing."""
    rows = tokens if load.rows is None else load.rows
    return np.where(np.arange(tokens) < rows, round(load.context), 0).astype(np.int32)


class Inputs:
    """Arrays on the devices of a mesh, made once and kept: random normal, since arithmetic on zeros draws too little power."""

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._one: Any = jax.devices()[0]  # where programs of one device are compiled for
        self._all: Any = NamedSharding(mesh, PartitionSpec())
        self._kept: dict[tuple[Any, ...], jax.Array] = {}
        self._host = np.random.default_rng(0).standard_normal(1 << 22, np.float32).astype(jnp.bfloat16)

    def arguments(self, program: Program, load: Load) -> tuple[Any, ...]:
        """What the compiled `program` is called with."""
        to = self._all if program.ranks > 1 else self._one
        if not isinstance(program, Together):
            return ([self._set(program, load, i, to) for i in range(copies(program))],)
        number = max(copies(program.gemm), program.calls)
        return [self._set(program.gemm, load, i, to) for i in range(number)], self._set(program.other, load, 0, to)

    def _set(self, alone: Alone, load: Load, index: int, to: Any) -> Arrays:
        shapes, name = _set_shapes(alone), alone.kernel.name
        activations = self._activations(shapes[0].shape, to)
        if is_collective(alone.kernel):
            return (activations,)
        if name in ("gemm", "swiglu_gemm", "experts"):
            weights = [self._normal(x.shape, index, x.shape[-2 if name == "experts" else 0], to) for x in shapes[1:3]]
            if name != "experts":
                return activations, *weights
            rows, groups = shapes[0].shape[0], shapes[3].shape[0]
            sizes = np.full(groups, rows // groups, np.int32)
            sizes[: rows % groups] += 1
            return activations, *weights, jax.device_put(sizes, to)
        pool, (rows, pages) = shapes[1].shape, shapes[3].shape
        keys, values = (self._normal(pool, which, 1, to) for which in (0, 1))
        lengths = (
            (decode_lengths(alone.tokens, load),) if name == "decode_attention" else prefill_lengths(alone.tokens, load.context)
        )
        tables = self._tables(pool[0] - 1, rows, pages, to)
        return activations, keys, values, tables, *(jax.device_put(x, to) for x in lengths)

    def _activations(self, shape: tuple[int, ...], to: Any) -> jax.Array:
        # From the host: every number of tokens is another shape, and making each on the device would be another program.
        key = ("activations", shape, to)
        if key not in self._kept:
            self._kept[key] = jax.device_put(np.resize(self._host, math.prod(shape)).reshape(shape), to)
        return self._kept[key]

    def _normal(self, shape: tuple[int, ...], seed: int, fan_in: int, to: Any) -> jax.Array:
        key = ("normal", shape, seed, to)
        if key not in self._kept:
            made = _random_normal(jax.random.key(seed), shape, 1 / math.sqrt(fan_in))
            self._kept[key] = jax.block_until_ready(jax.device_put(made, to))
        return self._kept[key]

    def _tables(self, pool_pages: int, rows: int, pages: int, to: Any) -> jax.Array:
        """Sequences scattered over the pool, which they share where it is too small for all; page 0 belongs to nobody."""
        key = ("tables", pool_pages, rows, pages, to)
        if key not in self._kept:
            rng = np.random.default_rng(0)
            order = np.concatenate([rng.permutation(pool_pages) for _ in range(math.ceil(rows * pages / pool_pages))])
            self._kept[key] = jax.device_put(1 + order[: rows * pages].reshape(rows, pages).astype(np.int32), to)
        return self._kept[key]


@functools.partial(jax.jit, static_argnums=1)
def _random_normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.asarray(scale, jnp.bfloat16)

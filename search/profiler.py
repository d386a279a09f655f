"""Runs single kernels and pairs on the GPUs at hand for the profiler. Imports jax; nothing but the profiler imports this.

Repetitions are unrolled inside one compiled program and kept apart by barriers, so that launches cost what they cost in a step.
Pairs run on two streams of one program (jax 0.11 or newer), each kernel within its SM budget.
"""

import functools
import importlib.metadata
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pynvml  # pyright: ignore[reportMissingImports]  # of the cuda extras; not on machines without a GPU
from jax import lax

import pallas_kernels
from nanoflow_jax.executor.streams import on_stream
from nanoflow_jax.plan import Resource
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.gemm import gemm
from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.prefill_attention import prefill_attention
from search.profile_table import Kernel, Point, ProfileError

REPEATS = 8
TRIALS = 3
ENERGY_S = 0.3
ENERGY_TOKENS = (512, 2048)
PAGE = 64
COLLECTIVES = ("all_reduce", "all_gather")

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class GpuMachine:
    """The GPUs that jax sees; collectives span the first `tp`."""

    def __init__(self, tp: int) -> None:
        devices = jax.devices()
        if devices[0].platform != "gpu" or len(devices) < tp:
            raise ProfileError(f"profiling needs {tp} GPU(s), jax sees {[d.platform for d in devices]}")
        self.num_sms = int(devices[0].core_count)
        self.mesh = jax.make_mesh((tp,), ("tp",), devices=devices[:tp], axis_types=(jax.sharding.AxisType.Auto,))
        pynvml.nvmlInit()
        self._meter = pynvml.nvmlDeviceGetHandleByIndex(0)
        time.sleep(1.0)
        self._idle_w = pynvml.nvmlDeviceGetPowerUsage(self._meter) / 1e3
        self._calls = functools.lru_cache(maxsize=4)(self._make_call)

    def libraries(self) -> dict[str, str]:
        """Versions of jax and of the device's driver software as jax reports it."""
        return {"jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib"), "kernels": pallas_kernels.__name__}

    def alone(self, kernel: Kernel, tokens: int, num_sms: int, context: float) -> Point:
        """Times one kernel."""
        function, arguments = self._calls(kernel, tokens, num_sms, context)
        run = _repeated(lambda *a: (function(*a),), arguments)
        time_us = _best_us(run)
        energy = self._energy_j(run) if num_sms >= self.num_sms and tokens in ENERGY_TOKENS else None
        name = "nccl" if kernel.name in COLLECTIVES else "pallas"
        return Point(tokens=tokens, num_sms=num_sms, context=context, time_us=time_us, implementation=name, energy_j=energy)

    def _energy_j(self, run: Callable[[], Any]) -> float:
        """Joules above idle of one call, from the board's energy counter over a stretch of steady running."""
        begun, joules, calls = time.perf_counter(), pynvml.nvmlDeviceGetTotalEnergyConsumption(self._meter) / 1e3, 0
        while time.perf_counter() - begun < ENERGY_S:
            jax.block_until_ready([run() for _ in range(8)])
            calls += 8 * REPEATS
        seconds = time.perf_counter() - begun
        spent = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._meter) / 1e3 - joules
        return max(spent - self._idle_w * seconds, 0.0) / calls

    def together_us(self, gemm: tuple[Kernel, int, int], other: tuple[Kernel, int, int, float]) -> float:
        """Times a GEMM beside another kernel on a second stream."""
        left, left_arguments = self._calls(*gemm, 0.0)
        right, right_arguments = self._calls(*other)
        split = len(left_arguments)
        beside = Resource.NETWORK if other[0].name in COLLECTIVES else Resource.MEMORY

        def both(*arguments: Any) -> tuple[Any, Any]:
            x = on_stream(Resource.COMPUTE, lambda given: left(*given))(arguments[:split])
            return x, on_stream(beside, lambda given: right(*given))(arguments[split:])

        return _best_us(_repeated(both, (*left_arguments, *right_arguments)))

    def _make_call(self, kernel: Kernel, tokens: int, num_sms: int, context: float) -> Call:
        key = jax.random.key(0)
        shape = kernel.shape
        if kernel.name in ("gemm", "swiglu_gemm"):
            k, n = shape
            swiglu = kernel.name == "swiglu_gemm"
            b = _normal(key, (k, 2, n // 2) if swiglu else (k, n), k)
            return functools.partial(gemm, swiglu=swiglu, num_sms=num_sms), (_normal(key, (tokens, k)), b)
        if kernel.name == "experts":
            experts, per_token, d, f = shape
            rows = tokens * per_token
            sizes = np.full(experts, rows // experts, np.int32)
            sizes[: rows % experts] += 1

            def feed_forward(x: Any, up: Any, down: Any, groups: Any) -> Any:
                hidden = grouped_gemm(x, up, groups, swiglu=True, num_sms=num_sms)
                return grouped_gemm(hidden, down, groups, num_sms=num_sms)

            weights = _normal(key, (experts, d, 2, f), d), _normal(key, (experts, f, d), f)
            return feed_forward, (_normal(key, (rows, d)), *weights, jnp.asarray(sizes))
        if kernel.name == "decode_attention":
            return functools.partial(decode_attention, num_sms=num_sms), _decode_inputs(key, shape, tokens, round(context))
        if kernel.name == "prefill_attention":
            return functools.partial(prefill_attention, num_sms=num_sms), _prefill_inputs(key, shape, tokens, round(context))
        return self._collective(kernel, tokens)

    def _collective(self, kernel: Kernel, tokens: int) -> Call:
        tp, d = kernel.shape
        spec = jax.sharding.PartitionSpec
        gathers = kernel.name == "all_gather"

        def body(x: Any) -> Any:
            return lax.all_gather(x, "tp", axis=1, tiled=True) if gathers else lax.psum(x, "tp")

        mapped = jax.shard_map(
            body, mesh=self.mesh, in_specs=spec(None, "tp"), out_specs=spec(None, None) if gathers else spec(), check_vma=False
        )
        width = d if gathers else d * tp
        x = jax.device_put(_normal(jax.random.key(0), (tokens, width)), jax.sharding.NamedSharding(self.mesh, spec(None, "tp")))
        return mapped, (x,)


def _normal(key: jax.Array, shape: tuple[int, ...], fan_in: int = 1) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(1 / math.sqrt(fan_in))


def _pool(key: jax.Array, kv_heads: int, head_dim: int, sequences: int, length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys, values and a block table in which sequences lie scattered; page 0 belongs to nobody."""
    pages = -(-length // PAGE)
    order = np.random.default_rng(0).permutation(sequences * pages) + 1
    shape = (sequences * pages + 1, kv_heads, PAGE, head_dim)
    k, v = (_normal(x, shape) for x in jax.random.split(key))
    return k, v, jnp.asarray(order.reshape(sequences, pages), jnp.int32)


def _decode_inputs(key: jax.Array, shape: tuple[int, ...], tokens: int, context: int) -> tuple[jax.Array, ...]:
    kv_heads, group, head_dim = shape
    k, v, tables = _pool(key, kv_heads, head_dim, tokens, context)
    q = _normal(key, (tokens, kv_heads, group, head_dim))
    return q, k, v, tables, jnp.full(tokens, context, jnp.int32)


def _prefill_inputs(key: jax.Array, shape: tuple[int, ...], tokens: int, context: int) -> tuple[jax.Array, ...]:
    """Whole prompts of twice the mean context, which causal tokens attend to on average, and what remains of one."""
    kv_heads, group, head_dim = shape
    length = max(2 * context, 1)
    lens = [length] * (tokens // length) + ([tokens % length] if tokens % length else [])
    k, v, tables = _pool(key, kv_heads, head_dim, len(lens), max(lens))
    starts = np.concatenate([[0], np.cumsum(lens)[:-1]]).astype(np.int32)
    q = _normal(key, (tokens, kv_heads, group, head_dim))
    sizes = jnp.asarray(lens, jnp.int32)
    return q, k, v, tables, sizes, jnp.asarray(starts), sizes


def _repeated(function: Callable[..., tuple[Any, ...]], arguments: tuple[Any, ...]) -> Callable[[], Any]:
    """A compiled program of several calls, warmed up."""

    def program(*args: Any) -> list[Any]:
        kept = []
        for _ in range(REPEATS):
            results = function(*args)
            args, results = lax.optimization_barrier((args, results))
            kept += [r.ravel()[:8] for r in results]
        return kept

    compiled = jax.jit(program)
    jax.block_until_ready(compiled(*arguments))
    return lambda: compiled(*arguments)


def _best_us(run: Callable[[], Any]) -> float:
    """Mean device microseconds of one call, the best of several trials."""
    best = math.inf
    for _ in range(TRIALS):
        begun = time.perf_counter()
        jax.block_until_ready([run() for _ in range(4)])
        best = min(best, (time.perf_counter() - begun) / (4 * REPEATS))
    return 1e6 * best

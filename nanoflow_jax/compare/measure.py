"""Builds one model, compiles every mode at two depths side by side, and measures them one after another.

The shallow model is the first layers of the deep one: weights and pool exist once.
"""

import concurrent.futures
import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float

from nanoflow_jax.batch import pack, packed_size
from nanoflow_jax.checkpoints.random_weights import random_parameters
from nanoflow_jax.compare.steady import steady_batch
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.executor.step import ExecutionMode, step_function
from nanoflow_jax.kernels import KernelChoice, best_choice, check_choice
from nanoflow_jax.kv_cache import KV_PARTITION, KVCache
from nanoflow_jax.models.decoder import abstract_decoder, build_decoder
from nanoflow_jax.parallel import make_mesh, parallel_layout
from nanoflow_jax.plan import PipelinePlan
from nanoflow_jax.workload import Workload
from pallas_kernels.power import PowerError, PowerMeter

# Steps of a burst: enough to hide the launch of the first, few enough to end before the clock falls.
_BURST_STEPS, _BURSTS = 5, 5
# Idle time before each burst, in which the clock recovers, and steps before a sustained run, in which it settles.
_REST_S, _SETTLE_S = 0.1, 0.3
TRACED_STEPS = 3
# Rows of which the logits are compared.
_LOGIT_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the table: a mode, the kernels that it runs with, and the name of its plan, None for sequential execution."""

    mode: ExecutionMode
    kernels: KernelChoice
    plan: str | None = None

    @property
    def label(self) -> str:
        return f"{self.mode} {self.plan} ({self.kernels})" if self.plan else f"{self.mode} ({self.kernels})"

    @property
    def file_name(self) -> str:
        return f"{self.mode}-{self.plan}-{self.kernels}" if self.plan else f"{self.mode}-{self.kernels}"


def variants(on_gpu: bool, kernels: KernelChoice, modes: Sequence[str], plans: Mapping[str, PipelinePlan]) -> list[Variant]:
    """The rows: sequential execution, then each other mode by each plan.

    On GPUs what needs no SM budgets is shown with all kernels that can do it.
    """
    several_ranks = next(iter(plans.values())).tp > 1
    rows = []
    for mode in get_args(ExecutionMode):
        if mode not in modes:
            continue
        if mode == "sequential":
            rows += [Variant(mode, choice) for choice in (_sequential_kernels(several_ranks) if on_gpu else (kernels,))]
            continue
        for name, plan in plans.items():
            rows += [Variant(mode, choice, name) for choice in (_planned_kernels(mode, plan) if on_gpu else (kernels,))]
    return rows


def _sequential_kernels(several_ranks: bool) -> tuple[KernelChoice, ...]:
    return ("cublas", "mosaic", "mosaic_peers") if several_ranks else ("cublas", "mosaic")


def _planned_kernels(mode: ExecutionMode, plan: PipelinePlan) -> tuple[KernelChoice, ...]:
    if plan.partition == "gemm_all_reduce":
        return ("mosaic_peers",)
    return ("cublas", "mosaic") if mode == "xla" else ("mosaic",)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all modes share. `plans` are of one batch, by the names that rows show; a single plan's is empty."""

    config: ModelConfig
    plans: Mapping[str, PipelinePlan]
    workload: Workload
    depths: tuple[int, int]
    page_size: int
    dtype: jnp.dtype

    @property
    def plan(self) -> PipelinePlan:
        """The first plan, for what is the same in all: model, device, ranks and batch."""
        return next(iter(self.plans.values()))

    def of(self, variant: Variant) -> PipelinePlan | None:
        return None if variant.plan is None else self.plans[variant.plan]

    def predicted_us(self, variant: Variant) -> float | None:
        """Microseconds per layer by the row's plan, of sequential execution by the first; None where plans say nothing."""
        plan = self.of(variant)
        if plan is None:
            return self.plan.prediction.sequential_us
        return {"nano": plan.prediction.nano_us, "streams": plan.period_us, "fused": plan.period_us}.get(variant.mode)

    def at(self, num_layers: int) -> ModelConfig:
        return dataclasses.replace(self.config, num_layers=num_layers)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per step at one depth, and mean watts of each GPU during the sustained run (none where NVML gives none)."""

    burst_s: float
    sustained_s: float
    watts: list[float]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One mode at one depth, ready to run."""

    run: Any
    seconds: float


class Bench:
    """The model, the pool and the batch on the mesh."""

    def __init__(self, setup: Setup):
        self.setup = setup
        plan = setup.plan
        self.mesh = make_mesh(plan.tp)
        self.devices = list(self.mesh.devices.flat)
        self.on_gpu = self.devices[0].platform == "gpu"
        config = setup.at(max(setup.depths))
        self.layout = dataclasses.replace(parallel_layout(config, plan.tp), gathered_o_proj=plan.partition == "all_gather")
        self.batch, self._num_pages = steady_batch(config, setup.workload, plan.b_dense, setup.page_size, plan.decode_tokens)
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self._row_logits: Any = None

    @property
    def default_kernels(self) -> KernelChoice:
        return best_choice(self.devices)

    def lower(self, variant: Variant, num_layers: int) -> Any:
        """The step of one mode at one depth, traced but not compiled; needs no weights.

        Raises:
          ValueError: the devices cannot run these kernels.
        """
        check_choice(variant.kernels, self.devices)
        plan, config, shape = self.setup.plan, self.setup.at(num_layers), self.batch.shape
        graph, weights = nnx.split(abstract_decoder(config, self.layout, self.mesh, self.setup.dtype))
        step = step_function(
            config, self.layout, self.mesh, graph, shape, plan=self.setup.of(variant),
            mode=variant.mode, kernels=variant.kernels, num_sms=plan.num_sms, on_gpu=self.on_gpu,
        )  # fmt: skip
        cache = KVCache([self._page_struct()] * num_layers, [self._page_struct()] * num_layers)
        return step.lower(weights, cache, self._integers(shape.num_tokens), self._integers(packed_size(shape)))

    def fill(self) -> None:
        """Puts weights and batch on the devices."""
        config = self.setup.at(max(self.setup.depths))
        self._parameters = random_parameters(config, self.layout, self.mesh, self.setup.dtype, seed=0)
        self._last_tokens = jax.device_put(np.zeros(self.batch.shape.num_tokens, np.int32), self._replicated)
        self._packed = jax.device_put(pack(self.batch), self._replicated)
        page = self._page_struct()
        self._make_pages = jax.jit(lambda key: jax.random.normal(key, page.shape, page.dtype), out_shardings=page.sharding)

    def fill_pool(self) -> None:
        """A fresh pool of normal values, before each mode: a step that failed has taken the last one along.

        Not zeros: arithmetic on zeros draws so little power that the clock would not fall.
        """
        self._cache = KVCache([], [])
        depth = max(self.setup.depths)
        pages = [self._make_pages(key) for key in jax.random.split(jax.random.key(0), 2 * depth)]
        self._cache = KVCache(pages[:depth], pages[depth:])

    def steps(self, run: Any, num_layers: int, count: int) -> float:
        """Seconds per step over `count` of them, one behind the other as in the engine."""
        weights = self._weights(num_layers)
        cache = KVCache(self._cache.k_pages[:num_layers], self._cache.v_pages[:num_layers])
        begun = time.perf_counter()
        for _ in range(count):
            self._row_logits, cache = run(weights, cache, self._last_tokens, self._packed)
        jax.block_until_ready(self._row_logits)
        seconds = (time.perf_counter() - begun) / count
        self._cache.k_pages[:num_layers], self._cache.v_pages[:num_layers] = cache.k_pages, cache.v_pages
        return seconds

    def last_logits(self) -> Float[np.ndarray, "rows V"]:
        """What the last step left in some of the rows in use, spread over all of them.

        Equal from step to step: each writes the same keys and values where the one before did.
        """
        in_use = np.flatnonzero(self.batch.q_lens)
        chosen = in_use[np.linspace(0, len(in_use) - 1, min(_LOGIT_ROWS, len(in_use))).astype(int)]
        return np.asarray(self._row_logits[chosen, : self.setup.config.vocab_size])

    def time(self, run: Any, num_layers: int, seconds: float) -> Timing:
        """Median of short runs from rest, then the mean over about `seconds`, in which a power limit sets the clock."""
        self.steps(run, num_layers, 2)
        burst_s = statistics.median(self._burst(run, num_layers) for _ in range(_BURSTS))
        settle_s = _SETTLE_S if self.on_gpu else 0.0
        self.steps(run, num_layers, max(1, round(settle_s / burst_s)))
        with PowerMeter(self.devices if self.on_gpu else ()) as meter:
            begun = time.perf_counter()
            sustained_s = self.steps(run, num_layers, max(1, round(seconds / burst_s)))
            end = time.perf_counter()
        return Timing(burst_s, sustained_s, _watts(meter, begun, end))

    def _burst(self, run: Any, num_layers: int) -> float:
        time.sleep(_REST_S if self.on_gpu else 0.0)
        return self.steps(run, num_layers, _BURST_STEPS)

    def trace(self, run: Any, num_layers: int, folder: Path) -> None:
        """Leaves the profile of TRACED_STEPS steps under `folder`."""
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 1
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            self.steps(run, num_layers, TRACED_STEPS)
        finally:
            jax.profiler.stop_trace()

    def _weights(self, num_layers: int) -> Any:
        beyond = tuple(f"layers.{i}." for i in range(num_layers, max(self.setup.depths)))
        arrays = {path: array for path, array in self._parameters.items() if not (beyond and path.startswith(beyond))}
        return nnx.split(build_decoder(self.setup.at(num_layers), self.layout, arrays))[1]

    def _page_struct(self) -> Any:
        shape = (self._num_pages, self.layout.num_kv_heads, self.setup.page_size, self.setup.config.head_dim)
        return jax.ShapeDtypeStruct(shape, self.setup.dtype, sharding=NamedSharding(self.mesh, KV_PARTITION))

    def _integers(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self._replicated)


Key = tuple[Variant, int]


def compile_all(
    bench: Bench, rows: Sequence[Variant], threads: int
) -> tuple[dict[Key, concurrent.futures.Future[Compiled]], concurrent.futures.Executor]:
    """Every (mode, depth) compiling in a pool while this thread traces the next: XLA compiles outside Python's lock."""
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    futures: dict[Key, concurrent.futures.Future[Compiled]] = {}
    for variant in rows:
        for depth in bench.setup.depths:
            try:
                lowered = bench.lower(variant, depth)
            except Exception as error:  # belongs to this row; the others still run
                futures[variant, depth] = concurrent.futures.Future()
                futures[variant, depth].set_exception(error)
            else:
                futures[variant, depth] = pool.submit(_compile, lowered, f"{variant.label}, {depth} layers")
    return futures, pool


def _compile(lowered: Any, label: str) -> Compiled:
    begun = time.perf_counter()
    run = lowered.compile()
    seconds = time.perf_counter() - begun
    progress(f"compiled {label} in {seconds:.1f} s")
    return Compiled(run, seconds)


def _watts(meter: PowerMeter, begun: float, end: float) -> list[float]:
    """Of each GPU; empty, and said, where NVML gives none: the times hold without."""
    try:
        return [mean.watts for mean in meter.means(begun, end)]
    except PowerError as error:
        progress(f"no watts: {error}")
        return []


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

"""The device side of the engine: owns weights, KV pool and last tokens; compiles a fixed set of steps and launches them.

A step is two executables: `forward` (rows' logits, pool updated in place) and `sample` (tokens out, last tokens updated in
place). Both read the batch from one packed int32 array. Everything is compiled in `warm_up`; `launch` only looks up.
"""

import dataclasses
import functools
import itertools
import logging
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from nanoflow_jax.batch import Batch, BatchShape, empty_batch, pack, packed_size
from nanoflow_jax.config import PRESETS, ModelConfig
from nanoflow_jax.executor import kv_transfer
from nanoflow_jax.executor.executables import ExecutableStore, Job, Progress, describe_arrays, obtain
from nanoflow_jax.executor.in_flight import InFlightStep
from nanoflow_jax.executor.kv_transfer import PageFormat, page_format
from nanoflow_jax.executor.step import ExecutionMode, sample_step, step_function
from nanoflow_jax.kernels import KernelChoice, best_choice, check_choice
from nanoflow_jax.kv_cache import (
    create_kv_cache,
    free_device_bytes,
    page_bytes,
    pages_that_fit,
    rounded_pages,
    step_bytes,
)
from nanoflow_jax.models.decoder import Decoder
from nanoflow_jax.parallel import ParallelLayout
from nanoflow_jax.plan import PipelinePlan, PlanSet
from nanoflow_jax.sampling import SamplingMode, sampling_mode

MAX_LOGPROBS = 20
_log = logging.getLogger(__name__)
KVOffload = Literal["off", "on", "both"]
# What a platform without memory statistics (CPU) gives the pool, unless the caller says otherwise.
_DEFAULT_POOL_BYTES = 1 << 30
# Steps whose K and V may be on their way to the host at once: what `runtime.kv_offload` lets wait, and two in flight.
_STEPS_LEAVING = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """What to compile and how large to make the pool.

    Attributes:
      b_dense: tokens of the largest step.
      max_sequences: sequences that may run at once, at most b_dense.
      page_size: tokens per KV page.
      num_pages: size of the pool, dummy page included; None sizes it from free device memory.
      max_context: longest prompt plus output; None takes the model's. It sets the width of block tables.
      memory_fraction: share of the free device memory that the pool and what steps need beside it (`kv_cache.step_bytes`) may
        take when num_pages is None; the rest is for what nobody counts, such as gaps between arrays.
      mode: how a step is executed. Other than "sequential", it goes by `plans` where the batcher finds that one of them pays.
      plans: what the search found, for the model or one with the same layers; each plan's b_dense becomes a step size.
      kernels: see `nanoflow_jax.kernels`; "auto" takes what is best on the device at hand.
      kv_offload: "on" compiles steps that also hand out K and V of their tokens, and what brings pages back (see
        `kv_transfer`); "both" compiles the plain steps too, for comparing.
      step_sizes: tokens of the steps to compile; a step takes the smallest that holds it. Fewer compile sooner, and pad more.
        `b_dense` and those of plans are added. None chooses.
      greedy_only: compiles no sampling but the greedy one, without log-probabilities: steps that need another cannot be
        launched. For benchmarks, which start sooner that way.
    """

    b_dense: int = 256
    max_sequences: int = 64
    page_size: int = 16
    num_pages: int | None = None
    max_context: int | None = None
    memory_fraction: float = 0.985
    mode: ExecutionMode = "sequential"
    plans: PlanSet | None = None
    kernels: KernelChoice | Literal["auto"] = "auto"
    kv_offload: KVOffload = "off"
    step_sizes: tuple[int, ...] | None = None
    greedy_only: bool = False

    def __post_init__(self) -> None:
        for field in ("b_dense", "max_sequences", "page_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"RunnerConfig: {field}={getattr(self, field)} must be positive")
        if self.max_sequences > self.b_dense:
            raise ValueError(
                f"RunnerConfig: max_sequences={self.max_sequences} exceeds b_dense={self.b_dense}; each sequence takes a token"
            )
        if not all(0 < size <= self.b_dense for size in self.step_sizes or ()):
            raise ValueError(f"RunnerConfig: step_sizes={self.step_sizes} must be positive and at most b_dense={self.b_dense}")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"RunnerConfig: memory_fraction={self.memory_fraction} must lie in (0, 1]")
        if self.mode not in get_args(ExecutionMode):
            raise ValueError(f"RunnerConfig: mode={self.mode!r} is not one of {', '.join(get_args(ExecutionMode))}")
        if self.kv_offload not in get_args(KVOffload):
            raise ValueError(f"RunnerConfig: kv_offload={self.kv_offload!r} is not one of {', '.join(get_args(KVOffload))}")
        if (self.mode == "sequential") != (self.plans is None):
            others = "" if self.plans is None else f"; {', '.join(m for m in get_args(ExecutionMode) if m != self.mode)} do"
            raise ValueError(f"RunnerConfig: mode={self.mode!r} {'needs' if self.plans is None else 'takes no'} plans{others}")


def step_sizes(b_dense: int, *, on_gpu: bool) -> list[int]:
    """Tokens of steps unless told otherwise, ascending, the last `b_dense`.

    On CPUs powers of two from 16. A GPU reads all weights in every step and multiplies 64 rows meanwhile, so less would cost as
    much. Larger sizes lie half a power of two apart, from 512 to 1024, where steps that only decode are, a quarter: GEMMs leave
    padding out, but for those that sum over ranks, so that it costs what small operations do per token, what collectives send
    and that tiles are chosen for all tokens; but every size has to be compiled.
    """

    def following(size: int) -> int:
        if not on_gpu or size < 256:
            return 2 * size
        power = 1 << (size.bit_length() - 1)
        return size + power // (4 if power == 512 else 2)

    sizes = []
    size = 64 if on_gpu else 16
    while size < b_dense:
        sizes.append(size)
        size = following(size)
    return [*sizes, b_dense]


def step_shapes(options: RunnerConfig, pages_per_seq: int, *, on_gpu: bool) -> tuple[BatchShape, ...]:
    """The shapes to compile, ascending; the last has b_dense tokens. A GPU's GEMMs want multiples of 8, so it gets the next."""
    unit = 8 if on_gpu else 1

    def whole(number: int) -> int:
        return -(-number // unit) * unit

    sizes = {*(options.step_sizes or step_sizes(options.b_dense, on_gpu=on_gpu)), options.b_dense}
    sizes |= {plan.b_dense for plan in (options.plans.plans if options.plans else ())}
    sizes = sorted({whole(size) for size in sizes if size <= options.b_dense})
    return tuple(BatchShape(size, min(size, whole(options.max_sequences)), pages_per_seq) for size in sizes)


class ModelRunner:
    """Runs steps of one model on one mesh. Not thread-safe: one thread launches, in order.

    Attributes:
      shapes: the compiled batch shapes, ascending; the last has b_dense tokens.
      num_pages: pages of the pool, the dummy page 0 included.
      pages_per_seq: columns of a block table; bounds prompt plus output of a sequence.
      plan_set, plans: what a step may be launched with; None and empty in mode "sequential".
      num_compilations: executables compiled so far; constant once `warm_up` has returned.
      num_loaded: executables that `warm_up` found on disk.
      page_format: of pages outside the pool; None if nothing for them is compiled.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: ParallelLayout,
        mesh: jax.sharding.Mesh,
        decoder: Decoder,
        options: RunnerConfig,
        dtype: jnp.dtype,
    ):
        self.config = config
        self.mesh = mesh
        self._layout = layout
        self.page_size = options.page_size
        self.max_sequences = options.max_sequences
        self.max_context = min(options.max_context or config.max_context, config.max_context)
        self.pages_per_seq = -(-self.max_context // options.page_size)
        device = mesh.devices.flat[0]
        self._num_sms = getattr(device, "core_count", None) or 1
        self._on_gpu = device.platform == "gpu"
        self.plan_set = options.plans
        self.plans = options.plans.plans if options.plans else ()
        self.shapes = step_shapes(options, self.pages_per_seq, on_gpu=self._on_gpu)
        self.num_compilations = self.num_loaded = 0
        bytes_per_page = page_bytes(config, layout, options.page_size, dtype)
        self.num_pages = options.num_pages or self._pages_from_memory(options, bytes_per_page)
        self._graph, self._weights = nnx.split(decoder)
        self._cache = create_kv_cache(config, layout, mesh, num_pages=self.num_pages, page_size=options.page_size, dtype=dtype)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._last_tokens = jax.device_put(np.zeros(options.max_sequences, np.int32), self._replicated)
        self._mode: ExecutionMode = options.mode
        devices = list(mesh.devices.flat)
        self._kernels: KernelChoice = best_choice(devices) if options.kernels == "auto" else options.kernels
        check_choice(self._kernels, devices)
        self._check_plans()
        self.page_format: PageFormat | None = None
        if options.kv_offload != "off":
            self.page_format = page_format(config, layout, options.page_size, dtype, on_gpu=self._on_gpu)
        # Steps without offload, with it, or both.
        self._offloads = [flag for flag in (False, True) if options.kv_offload in ("both", "on" if flag else "off")]
        self._sampling = [(SamplingMode.GREEDY, 0)]
        if not options.greedy_only:
            self._sampling = list(itertools.product(SamplingMode, (0, MAX_LOGPROBS)))
        self._forwards: dict[tuple[BatchShape, int | None, bool], Any] = {}
        self._page_writers: dict[int, Any] = {}
        self._samplers: dict[tuple[BatchShape, SamplingMode, int], Any] = {}

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool over all ranks."""
        return sum(pages.nbytes for pages in (*self._cache.k_pages, *self._cache.v_pages))

    def warm_up(self, progress: Progress | None = None, cache_dir: Path | None = None) -> None:
        """Compiles every executable that a step can need, or loads it.

        Args:
          progress: called with (what is done or under way, done, total).
          cache_dir: where executables of earlier starts are looked for, and those compiled now are kept; see `executables`. Not
            used where jax's own cache is on: what XLA has loaded from there lacks parts when it is written again.
        """
        if cache_dir and jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
            _log.warning("executables are not kept in %s: jax keeps its own cache", cache_dir)
            cache_dir = None
        steps: list[tuple[BatchShape, int | None]] = [(shape, None) for shape in self.shapes]
        steps += [(self._shape_of(plan), index) for index, plan in enumerate(self.plans)]
        jobs: list[Job] = []
        places: list[tuple[dict, Any]] = []
        for (shape, index), offload in itertools.product(steps, self._offloads):
            plan = None if index is None else self.plans[index]
            by_plan = f" by a plan for {plan.decode_tokens} decoding" if plan else ""
            lower = functools.partial(self._lower_forward, shape, plan, offload)
            jobs.append(Job(f"step of {shape.num_tokens} tokens{by_plan}", lower))
            places.append((self._forwards, (shape, index, offload)))
        for shape, (mode, num_logprobs) in itertools.product(self.shapes, self._sampling):
            lower = functools.partial(self._lower_sampler, shape, mode, num_logprobs)
            jobs.append(Job(f"{mode.value} sampling of {shape.num_rows} rows", lower))
            places.append((self._samplers, (shape, mode, num_logprobs)))
        for size in self.page_format.chunk_sizes if self.page_format else ():
            jobs.append(Job(f"writing {size} pages", functools.partial(self._lower_page_writer, size)))
            places.append((self._page_writers, size))
        store = ExecutableStore(cache_dir, [*self.mesh.devices.flat], self._lowered_from()) if cache_dir else None
        compiled, num_loaded = obtain(jobs, store, progress)
        for (executables, key), executable in zip(places, compiled, strict=True):
            executables[key] = executable
        self.num_loaded += num_loaded
        self.num_compilations += len(jobs) - num_loaded
        if self._on_gpu:
            self.rehearse()

    def rehearse(self) -> None:
        """Executes everything once, on padding, which changes nothing.

        A GPU loads a program at its first use, and the pinned memory that K and V leave through is mapped when it is first
        needed, both while the device waits: that should not happen to the first requests.
        """
        for (shape, plan, offload), forward in self._forwards.items():
            packed = jax.device_put(pack(empty_batch(shape)), self._replicated)
            leaving: list[Any] = []
            for _ in range(_STEPS_LEAVING if offload and shape == self.shapes[-1] else 1):
                row_logits, self._cache, *new_kv = forward(self._weights, self._cache, self._last_tokens, packed)
                leaving.append(self._to_host(new_kv))
            if plan is None and offload == self._offloads[0]:
                for (shape_sampled, _, _), sampler in self._samplers.items():
                    if shape_sampled == shape:
                        _, self._last_tokens = sampler(row_logits, self._last_tokens, packed)
            jax.block_until_ready((row_logits, leaving))
        for size in self._page_writers:
            assert self.page_format is not None
            filling = np.zeros((size, self.page_format.page_bytes), np.uint8)
            self.write_pages(self.stage_pages(filling), np.zeros(0, np.int32))
        jax.block_until_ready(self._cache.k_pages)

    def launch(self, batch: Batch, *, num_logprobs: int = 0, plan: int | None = None, offload: bool = False) -> InFlightStep:
        """Starts one step and returns at once. Steps run in launch order.

        Args:
          plan: index of one of `plans`, whose token ranges the batch keeps; None runs the step sequentially.
          num_logprobs: likeliest tokens to return per row, at most MAX_LOGPROBS.
          offload: hand out K and V of the step's tokens.

        Raises:
          KeyError: `warm_up` did not compile what the batch needs: its shape, with this `offload`, its kind of sampling.
        """
        if not 0 <= num_logprobs <= MAX_LOGPROBS:
            raise ValueError(f"{num_logprobs=} must lie in [0, {MAX_LOGPROBS}]")
        width = MAX_LOGPROBS if num_logprobs else 0
        forward = self._forwards[batch.shape, plan, offload]
        sampler = self._samplers[batch.shape, sampling_mode(batch), width]
        packed = jax.device_put(pack(batch), self._replicated)
        row_logits, self._cache, *new_kv = forward(self._weights, self._cache, self._last_tokens, packed)
        packed_result, self._last_tokens = sampler(row_logits, self._last_tokens, packed)
        packed_result.copy_to_host_async()
        return InFlightStep(packed_result, width, self._to_host(new_kv))

    def _to_host(self, new_kv: list[jax.Array]) -> tuple[jax.Array, ...]:
        """Begins to copy to pinned memory what a step has not moved there itself."""
        if new_kv and self._on_gpu:
            new_kv = jax.device_put(new_kv, kv_transfer.leaving_sharding(self.mesh, to_host=True))
        return tuple(new_kv)

    def transfer_memory(self, num_bytes: int) -> np.ndarray:
        """`kv_transfer.transfer_memory` for this runner's devices: what pages should lie in to be staged fast."""
        return kv_transfer.transfer_memory(num_bytes, self.mesh)

    def stage_pages(self, pages: np.ndarray) -> jax.Array:
        """`kv_transfer.stage_pages` for this runner's pool; may be called on any thread."""
        assert self.page_format is not None, "compiled without offload"
        return kv_transfer.stage_pages(pages, self.page_format, self.mesh)

    def write_pages(self, staged: jax.Array, page_ids: np.ndarray) -> None:
        """Launches the write of staged pages to the pool, in order with steps.

        Args:
          page_ids: int32, fewer than were staged if the rest is filling.
        """
        ids = np.full(len(staged), self.num_pages, np.int32)
        ids[: page_ids.size] = page_ids
        self._cache = self._page_writers[len(staged)](self._cache, staged, jax.device_put(ids, self._replicated))

    def weights_checksum(self) -> str:
        return kv_transfer.weights_checksum(self._weights)

    def forward_memory(self, shape: BatchShape, plan: int | None = None, *, offload: bool = False) -> Any:
        """XLA's memory analysis of a compiled forward: arguments, aliased outputs, temporaries."""
        return self._forwards[shape, plan, offload].memory_analysis()

    def _check_plans(self) -> None:
        for plan in self.plans:
            wanted = (plan.model, plan.tp, plan.partition == "all_gather")
            have = (self.config.name, self._layout.tp_size, self._layout.gathered_o_proj)
            known = PRESETS.get(plan.model)
            same_model = plan.model == self.config.name or (known is not None and known.same_layer(self.config))
            if not same_model or wanted[1:] != have[1:]:
                raise ValueError(f"a plan for (model, tp, gathered o_proj) {wanted} does not fit {have}")
            if plan.b_dense > self.shapes[-1].num_tokens:
                raise ValueError(f"a plan of {plan.b_dense=} is larger than steps, b_dense={self.shapes[-1].num_tokens}")
        if self._mode in ("streams", "fused") and self._on_gpu and jax.__version_info__ < (0, 11):
            raise ValueError(f"mode {self._mode!r} needs jax 0.11 or newer, this is {jax.__version__}")

    def _shape_of(self, plan: PipelinePlan) -> BatchShape:
        return next(shape for shape in self.shapes if shape.num_tokens == plan.b_dense)

    def _pages_from_memory(self, options: RunnerConfig, bytes_per_page: int) -> int:
        free = free_device_bytes(self.mesh.devices.flat[0])
        budget = _DEFAULT_POOL_BYTES if free is None else int(free * options.memory_fraction)
        # More than every sequence at full length can never be used.
        useful = 1 + options.max_sequences * self.pages_per_seq
        reserve = 0 if free is None else self._bytes_beside_pool(options, bytes_per_page // options.page_size)
        pages = pages_that_fit(budget, bytes_per_page, reserve_bytes=reserve)
        return min(useful, rounded_pages(pages))

    def _bytes_beside_pool(self, options: RunnerConfig, kv_bytes_per_token: int) -> int:
        num_bytes = step_bytes(
            self.config, self._layout, b_dense=options.b_dense, num_rows=options.max_sequences, greedy_only=options.greedy_only
        )
        if options.kv_offload != "off":
            num_bytes += _STEPS_LEAVING * options.b_dense * kv_bytes_per_token + kv_transfer.MAX_STAGED_BYTES
        return num_bytes

    def _lowered_from(self) -> str:
        """All that `_lower_forward`, `_lower_page_writer` and `_lower_sampler` take from this object."""
        arrays = describe_arrays((self._weights, self._cache, self._last_tokens))
        facts = (
            self.config, self._layout, self.mesh, self._graph, self._mode, self._kernels, self._num_sms, self._on_gpu,
            self.page_format, self._replicated,
        )  # fmt: skip
        return f"{facts}\n{arrays}"

    def _lower_forward(self, shape: BatchShape, plan: PipelinePlan | None, offload: bool) -> Any:
        step = step_function(
            self.config, self._layout, self.mesh, self._graph, shape, plan=plan, mode=self._mode, kernels=self._kernels,
            num_sms=self._num_sms, on_gpu=self._on_gpu,
            num_kv_groups=self.page_format.num_groups if offload and self.page_format else 0,
        )  # fmt: skip
        packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32, sharding=self._replicated)
        return step.lower(self._weights, self._cache, self._last_tokens, packed)

    def _lower_page_writer(self, num_pages: int) -> Any:
        assert self.page_format is not None
        return kv_transfer.lower_write_pages(self.page_format, num_pages, self._cache, self.mesh)

    def _lower_sampler(self, shape: BatchShape, mode: SamplingMode, num_logprobs: int) -> Any:
        row_logits = jax.ShapeDtypeStruct(
            (shape.num_rows, self._layout.padded_vocab_size), jnp.float32, sharding=self._replicated
        )
        packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32, sharding=self._replicated)
        step = functools.partial(sample_step, shape=shape, mode=mode, num_logprobs=num_logprobs)
        jitted = jax.jit(step, donate_argnums=1, out_shardings=(self._replicated, self._replicated))
        return jitted.lower(row_logits, self._last_tokens, packed)

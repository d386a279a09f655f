"""Runs a `PipelinePlan`: explicit nano-operations in the plan's order, across layer borders.

The plan is the only input that decides split, order, streams and budgets. The same nano-operations can be handed to XLA in
three ways, which a comparison needs side by side:

- `NANO`: one after another, each behind a barrier: the split alone.
- `XLA`: in no order but the data's; what overlaps is the compiler's choice.
- `STREAMS`: nano-operations of different resources on streams of their own, each behind whatever the plan ends before it
  starts, so that just what the plan has side by side may run side by side.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import compute_on
from jaxtyping import Array, Float

from nanoflow_jax.batch import Batch
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.executor.segments import Segments
from nanoflow_jax.executor.sequential import Probe, input_tokens, last_of_rows
from nanoflow_jax.kernels import Kernels
from nanoflow_jax.kv_cache import KVCache
from nanoflow_jax.models.decoder import Decoder, DecoderLayer
from nanoflow_jax.operations import OPERATIONS, StepInputs, embed, logits, step_inputs
from nanoflow_jax.parallel import ParallelLayout
from nanoflow_jax.plan import NanoBatch, NanoOperation, PipelinePlan, Resource, plan_graph, unroll

_POOL = ("k_pages", "v_pages")
# A plan gives decoding and prompt tokens ranges of their own, so their attention needs no merge.
_RENAMED = {"decoded": "attended", "prefilled": "attended"}
# XLA spreads its own asynchronous work over streams 0 to 3, and collectives have theirs.
_STREAM_OF = {Resource.COMPUTE: 5, Resource.MEMORY: 6}

Values = dict[str, Array]
KernelsFor = Callable[[int], Kernels]


class Mode(enum.Enum):
    """How nano-operations are handed to XLA; see the module's docstring."""

    NANO = "nano"
    XLA = "xla"
    STREAMS = "streams"


def forward(
    config: ModelConfig,
    layout: ParallelLayout,
    decoder: Decoder,
    cache: KVCache,
    last_tokens: Array,
    batch: Batch,
    probe: Probe | None = None,
    *,
    plan: PipelinePlan,
    mode: Mode,
    kernels_for: KernelsFor,
    on_streams: bool,
) -> tuple[Float[Array, "S V"], KVCache]:
    """As `sequential.forward`, by the plan. The batch's prompt tokens begin at `plan.decode_tokens`; the gap is padding.

    Args:
      probe: called after each nano-operation with (layer index, "operation[start:stop]", what it wrote for these tokens).
      kernels_for: the kernels that keep to a number of SMs.
      on_streams: annotate streams in mode STREAMS; without (on CPUs) that mode only orders.

    Raises:
      ValueError: the batch has another number of tokens than the plan, or weights are divided otherwise than it wants.
    """
    if (plan.partition == "all_gather") != layout.gathered_o_proj:
        raise ValueError(f"{plan.partition=} does not fit weights with {layout.gathered_o_proj=}")
    if batch.shape.num_tokens != plan.b_dense:
        raise ValueError(f"a batch of {batch.shape.num_tokens} tokens does not fit a plan of {plan.b_dense=}")
    inputs = functools.cache(lambda start, stop: step_inputs(config, batch, start, stop))
    runs = {node.name: node.runs for node in plan_graph(plan)}
    # Every token's residual stream has one current state, so all layers share x; the rest lives within a layer.
    x = Segments()
    x.write(0, plan.b_dense, embed(decoder, input_tokens(batch, last_tokens)))
    pools = zip(cache.k_pages, cache.v_pages, strict=True)
    layers = [_Layer({"x": x}, dict(zip(_POOL, pages, strict=True))) for pages in pools]
    order = _Order(plan, mode)
    annotate = _on_stream if on_streams and mode is Mode.STREAMS else _where_it_is
    for window, index, nano in unroll(plan, len(layers)):
        tokens = plan.batch_of(nano)
        step = dataclasses.replace(inputs(tokens.start, tokens.stop), kernels=kernels_for(nano.num_sms))
        run = functools.partial(_run_operations, config, step, decoder.layers[index])
        results = _run_node(runs[nano.operation], nano, tokens, layers[index], run, order.behind(window, nano), annotate)
        order.done(window, nano, list(results.values()))
        if probe is not None:
            probe(index, f"{nano.operation}[{tokens.start}:{tokens.stop}]", results)
    row_logits = logits(config, decoder, last_of_rows(batch, x.read(0, plan.b_dense)))
    return row_logits, KVCache([layer.pool["k_pages"] for layer in layers], [layer.pool["v_pages"] for layer in layers])


@dataclasses.dataclass
class _Layer:
    """What exists of one layer while the pipeline passes through it."""

    values: dict[str, Segments]
    pool: Values
    # Results of reads of the pool since it was last written. The next write must come after them: XLA updates in place only
    # what nobody can still need, and would copy the whole pool otherwise.
    pool_readers: list[Array] = dataclasses.field(default_factory=list)


def _run_node(
    names: Sequence[str],
    nano: NanoOperation,
    tokens: NanoBatch,
    layer: _Layer,
    run: Callable[[Sequence[str], Values], Values],
    behind: Sequence[Array],
    annotate: Callable[[Resource, Callable], Callable],
) -> Values:
    """Runs the operations of one nano-operation and stores what they wrote for its tokens, which it returns."""
    # Writes of the pool stay on the main stream: inside an asynchronous region they would not be in place.
    first_write = next((i for i, name in enumerate(names) if set(_POOL) & set(OPERATIONS[name].writes)), len(names))
    values = _external_reads(names[:first_write], layer, tokens)
    values = _tie(values, behind)
    pool = {name: layer.pool[name] for name in _POOL if _reads(names[:first_write], name)}
    results = annotate(nano.resource, functools.partial(run, names[:first_write]))({**values, **pool})
    if pool:
        layer.pool_readers += results.values()
    if first_write < len(names):
        pool = _tie(layer.pool, layer.pool_readers)
        results = run(names[first_write:], {**results, **pool})
        layer.pool = {name: results.pop(name) for name in _POOL}
        layer.pool_readers = []
    for name, array in results.items():
        layer.values.setdefault(_RENAMED.get(name, name), Segments()).write(tokens.start, tokens.stop, array)
    return results


def _run_operations(config: ModelConfig, step: StepInputs, layer: DecoderLayer, names: Sequence[str], values: Values) -> Values:
    """Applies operations in order; returns what they wrote last under each name."""
    known, written = dict(values), {}
    for name in names:
        operation = OPERATIONS[name]
        results = operation.apply(config, step, layer, *(known[read] for read in operation.reads))
        update = dict(zip(operation.writes, results, strict=True))
        known.update(update)
        written.update(update)
    return written


def _reads(names: Sequence[str], value: str) -> bool:
    return any(value in OPERATIONS[name].reads for name in names)


def _external_reads(names: Sequence[str], layer: _Layer, tokens: NanoBatch) -> Values:
    """The values that `names` need from outside, for these tokens."""
    inside: set[str] = set()
    values = {}
    for name in names:
        for read in OPERATIONS[name].reads:
            if read not in inside and read not in _POOL:
                values[read] = layer.values[read].read(tokens.start, tokens.stop)
        inside |= set(OPERATIONS[name].writes)
    return values


def _tie(values: Values, behind: Sequence[Array]) -> Values:
    """The same values, but not before `behind` exists."""
    if not behind:
        return values
    tied, _ = lax.optimization_barrier((values, list(behind)))
    return tied


def _where_it_is(_: Resource, function: Callable) -> Callable:
    return function


def _on_stream(resource: Resource, function: Callable) -> Callable:
    """Runs `function` on the stream of its resource; collectives are asynchronous by themselves."""
    if resource not in _STREAM_OF:
        return function
    # The function form came with jax 0.11; the runner refuses this mode on older ones.
    transform: Any = compute_on.compute_on
    compute_type = f"gpu_stream:{_STREAM_OF[resource]}"
    return transform(function, compute_type=compute_type, out_memory_spaces=jax.memory.Space.Device)


class _Order:
    """Which earlier results a nano-operation must wait for beyond its data, by mode."""

    def __init__(self, plan: PipelinePlan, mode: Mode):
        self._period_us = plan.period_us
        self._mode = mode
        # Per resource: (end in the plan's unrolled time, results), in order of start.
        self._ended: dict[Resource, list[tuple[float, list[Array]]]] = {resource: [] for resource in Resource}
        self._latest: list[Array] = []

    def behind(self, window: int, nano: NanoOperation) -> list[Array]:
        if self._mode is Mode.XLA:
            return []
        if self._mode is Mode.NANO:
            return self._latest
        # Lanes run in order, so the last that ended on each implies those before it.
        starts_us = window * self._period_us + nano.start_us
        slack_us = 1e-6 * self._period_us
        behind: list[Array] = []
        for lane in self._ended.values():
            over = [results for ends_us, results in lane if ends_us <= starts_us + slack_us]
            behind += over[-1] if over else []
        return behind

    def done(self, window: int, nano: NanoOperation, results: list[Array]) -> None:
        self._latest = results
        lane = self._ended[nano.resource]
        lane.append((window * self._period_us + nano.start_us + nano.duration_us, results))
        # Nothing starts before what has started already, so only the last few can still be the latest that ended.
        del lane[:-8]

"""Runs a `PipelinePlan`: explicit nano-operations in the plan's order, across layer borders.

The plan is the only input that decides split, order, streams and budgets. The same nano-operations can be handed to XLA in
four ways, which a comparison needs side by side:

- `NANO`: one after another, a barrier between each two: the split alone.
- `XLA`: in no order but the data's; what overlaps is the compiler's choice.
- `STREAMS`: in phases between barriers (`executor.phases`), in which each resource has a stream of its own. What follows on one
  stream is one region of it, as far as it has one result.
- `FUSED`: in the same phases; where one has a GEMM beside decode attention, the two are one kernel (`executor.fused`).
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager

import jax
from jax import lax
from jaxtyping import Array, Float

from nanoflow_jax.batch import Batch
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.executor import dataflow, fused
from nanoflow_jax.executor.data_order import not_before
from nanoflow_jax.executor.kv_transfer import LeavingKV
from nanoflow_jax.executor.phases import Phase, Placed, group, in_order
from nanoflow_jax.executor.segments import Segments
from nanoflow_jax.executor.sequential import Probe, input_tokens, last_of_rows
from nanoflow_jax.executor.streams import on_stream, where_it_is
from nanoflow_jax.kernels import Kernels
from nanoflow_jax.kv_cache import KVCache
from nanoflow_jax.models.decoder import Decoder
from nanoflow_jax.operations import OPERATIONS, StepInputs, embed, logits, step_inputs
from nanoflow_jax.parallel import ParallelLayout
from nanoflow_jax.plan import NanoBatch, NanoOperation, PipelinePlan, Resource, plan_graph

Values = dict[str, Array]
KernelsFor = Callable[[int], Kernels]
Annotate = Callable[[Resource, Callable], Callable]


class Mode(enum.Enum):
    """How nano-operations are handed to XLA; see the module's docstring."""

    NANO = "nano"
    XLA = "xla"
    STREAMS = "streams"
    FUSED = "fused"


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
    in_graph: bool = False,
    new_kv: LeavingKV | None = None,
) -> tuple[Float[Array, "S V"], KVCache]:
    """As `sequential.forward`, by the plan. The batch's prompt tokens begin at `plan.decode_tokens`; the gap is padding.

    Args:
      probe: called after each nano-operation with (layer index, "operation[start:stop]", what it wrote for these tokens).
      kernels_for: the kernels that keep to a number of SMs.
      on_streams: annotate streams in modes STREAMS and FUSED; without (on CPUs) these modes only order.
      in_graph: the step becomes a CUDA graph, in which kernels wait for data and for nothing else: what barriers and streams
        say is then said by data, too (`executor.data_order`). For mode STREAMS.
      new_kv: as in `sequential.forward`.

    Raises:
      ValueError: the batch has another number of tokens than the plan, weights are divided otherwise than it wants, or it wants
        GEMMs on streams to sum over the ranks where kernels need a collective for that.
    """
    if (plan.partition == "all_gather") != layout.gathered_o_proj:
        raise ValueError(f"{plan.partition=} does not fit weights with {layout.gathered_o_proj=}")
    in_phases = mode in (Mode.STREAMS, Mode.FUSED)
    on_streams = on_streams and in_phases
    if plan.partition == "gemm_all_reduce" and on_streams and not kernels_for(plan.num_sms).reduces_in_gemm:
        raise ValueError(f"{plan.partition=} wants GEMMs that sum over the ranks themselves: kernels 'mosaic_peers'")
    if batch.shape.num_tokens != plan.b_dense:
        raise ValueError(f"a batch of {batch.shape.num_tokens} tokens does not fit a plan of {plan.b_dense=}")
    pipeline = _Pipeline(config, decoder, batch, plan, kernels_for, cache, in_graph, with_kv=new_kv is not None)
    pipeline.x.write(0, plan.b_dense, embed(decoder, input_tokens(batch, last_tokens)))
    num_layers = config.num_layers
    phases = group(plan, num_layers) if in_phases else [(placed,) for placed in in_order(plan, num_layers)]
    annotate = on_stream if on_streams else where_it_is
    gemms = fused.gemms(plan)
    behind: list[Array] = []
    for phase in phases:
        if mode is not Mode.XLA:
            pipeline.hold_back(phase, behind)
        regions = pipeline.regions(phase) if mode is Mode.STREAMS and probe is None else [[i] for i in range(len(phase))]
        results = pipeline.run(phase, behind, annotate, fused.beside(phase, gemms) if mode is Mode.FUSED else {}, regions)
        if mode is not Mode.XLA:
            results = lax.optimization_barrier(results)
        behind = [array for values in results for array in values.values()]
        pipeline.note_pool_readers(phase, results, regions)
        for placed, values in zip(phase, results, strict=True):
            written = pipeline.finish(placed, values)
            if probe is not None:
                tokens = plan.batch_of(placed.nano)
                probe(placed.layer, f"{placed.nano.operation}[{tokens.start}:{tokens.stop}]", written)
        if new_kv is not None:
            behind += [awaited for kv in pipeline.newly_appended() for awaited in new_kv.take(kv)]
    last = last_of_rows(batch, pipeline.x.read(0, plan.b_dense))
    row_logits = logits(config, decoder, last, batch.q_lens > 0, kernels_for(plan.num_sms))
    return row_logits, KVCache(*([layer.pool[name] for layer in pipeline.layers] for name in dataflow.POOL))


@dataclasses.dataclass
class _Layer:
    """What exists of one layer while the pipeline passes through it. `values` of all layers share x: see `_Pipeline`."""

    values: dict[str, Segments]
    pool: Values
    # Results of reads of the pool since it was last written. The next write must come after them: XLA updates in place only
    # what nobody can still need, and would copy the whole pool otherwise.
    pool_readers: list[Array] = dataclasses.field(default_factory=list)

    def write(self, tokens: NanoBatch, results: Values, rows: NanoBatch) -> None:
        """Stores results of `tokens`, in arrays that have the rows of all of `rows`."""
        for name, array in results.items():
            value = self.values.setdefault(dataflow.known_as(name), Segments())
            value.write(tokens.start, tokens.stop, array, tokens.start - rows.start)


class _Pipeline:
    """The values of a step on their way through the layers.

    Every token's residual stream has one current state, so all layers share x; everything else lives within a layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        batch: Batch,
        plan: PipelinePlan,
        kernels_for: KernelsFor,
        cache: KVCache,
        in_graph: bool,
        *,
        with_kv: bool,
    ):
        self.x = Segments()
        self._in_graph = in_graph
        pools = zip(cache.k_pages, cache.v_pages, strict=True)
        self.layers = [_Layer({"x": self.x}, dict(zip(dataflow.POOL, pages, strict=True))) for pages in pools]
        self._config, self._decoder, self._plan = config, decoder, plan
        self._num_appended = 0
        self._kernels_for = kernels_for
        # Computed here once per range: inside a region they would be computed again.
        ranges = dict.fromkeys((plan.batch_of(nano), self._rows_of(nano)) for nano in plan.nano_operations)
        self._steps = {key: _step_inputs(config, batch, *key, with_kv=with_kv) for key in ranges}
        # The operations of each node: those that may run asynchronously, and those from the first write of the pool on,
        # which stay on the main stream because elsewhere they would not be in place.
        nodes = plan_graph(plan)
        self._runs = {node.name: dataflow.split_at_pool_write(node.runs) for node in nodes}
        # Of what a node's asynchronous part writes, only what others read leaves it. This is one value per node, and has to
        # be: XLA breaks up a region with several results and then waits for it at once.
        self._readers = dataflow.readers(self._runs)
        self._kept = {node.name: dataflow.needed_outside(node.name, self._runs, self._readers) for node in nodes}

    def _rows_of(self, nano: NanoOperation) -> NanoBatch:
        """The tokens of which a nano-operation's queries and results have rows: its own and perhaps more.

        Attention has those of the nano-batch of qkv that its tokens lie in: cut out of it, queries would be copied.
        """
        tokens = self._plan.batch_of(nano)
        if nano.operation in ("decode_attention", "prefill_attention"):
            for whole in self._plan.nano_batches["qkv_proj"]:
                # Decode attention's rows are the first of its arrays.
                begins = whole.start == tokens.start or (nano.operation == "prefill_attention" and whole.start < tokens.start)
                if begins and tokens.stop <= whole.stop:
                    return whole
        return tokens

    def _tokens_read(self, nano: NanoOperation, name: str) -> NanoBatch:
        return self._rows_of(nano) if name == "q" else self._plan.batch_of(nano)

    def hold_back(self, phase: Phase, behind: Sequence[Array]) -> None:
        """Makes everything that `phase` reads from outside ready together, and not before `behind` exists."""
        reads: dict[tuple[int, str, int, int], Array] = {}
        for placed in phase:
            layer = self.layers[placed.layer]
            for name in dataflow.external_reads(self._runs[placed.nano.operation][0]):
                tokens = self._tokens_read(placed.nano, name)
                if name in layer.values and layer.values[name].covers(tokens.start, tokens.stop):
                    key = (placed.layer, name, tokens.start, tokens.stop)
                    reads[key] = layer.values[name].read(tokens.start, tokens.stop)
        held, _ = lax.optimization_barrier((reads, list(behind)))
        for (layer, name, start, stop), array in held.items():
            self.layers[layer].values[name].write(start, stop, array)

    def regions(self, phase: Phase) -> list[list[int]]:
        """The phase's members in groups, by their indices: those that follow each other on one stream and can be one region.

        Between regions XLA has a stream wait for the main stream and that for the stream, which takes microseconds.
        """
        found = []
        for resource in Resource:
            chain = [index for index, placed in enumerate(phase) if placed.nano.resource is resource]
            while chain:
                longest = next(n for n in range(len(chain), 0, -1) if self._is_one_region([phase[i] for i in chain[:n]]))
                found.append(chain[:longest])
                chain = chain[longest:]
        return sorted(found, key=lambda region: region[-1])

    def _is_one_region(self, members: Sequence[Placed]) -> bool:
        """Whether only what the last member writes is needed outside, for one result is all that may leave a region."""
        *inner, last = members
        names = {placed.nano.operation for placed in members}
        where = self._where(last)
        for index, placed in enumerate(inner):
            before_pool, from_pool_write = self._runs[placed.nano.operation]
            if from_pool_write or self._where(placed) != where:
                return False
            later = {name for other in members[index + 1 :] for name in dataflow.written(self._runs[other.nano.operation][0])}
            needed = dataflow.written(before_pool) & {dataflow.known_as(name) for name in self._kept[placed.nano.operation]}
            if any(name not in later and not self._readers[name] <= names for name in needed):
                return False
        return not inner or last.nano.resource is not Resource.NETWORK

    def _where(self, placed: Placed) -> tuple[int, Resource, NanoBatch, NanoBatch]:
        return placed.layer, placed.nano.resource, self._plan.batch_of(placed.nano), self._rows_of(placed.nano)

    def run(
        self,
        phase: Phase,
        behind: Sequence[Array],
        annotate: Annotate,
        parts: Mapping[int, Sequence[fused.Part]],
        regions: Sequence[Sequence[int]],
    ) -> list[Values]:
        """What each member of a phase wrote, in order. Members see what earlier ones wrote; nothing is stored yet.

        Of several members in one of the `regions` only the last has anything to show. `parts` says which rows of attention go
        with the GEMM at an index of the phase, where kernels can do both.
        """
        copies = {id(value): value.copy() for layer in self.layers for value in layer.values.values()}
        state = [_Layer({name: copies[id(v)] for name, v in layer.values.items()}, layer.pool) for layer in self.layers]
        parts = {i: p for i, p in parts.items() if self._kernels_for(phase[i].nano.num_sms).gemm_with_decode_attention}
        annotate = annotate if fused.needs_streams(phase, parts) or not parts else where_it_is
        split: dict[int, fused.SplitAttention] = {}
        for index in sorted({part.attention for of_gemm in parts.values() for part in of_gemm}):
            kernels = self._kernels_for(phase[index].nano.num_sms)
            split[index] = fused.SplitAttention(self._applied(phase[index], state), kernels)
        outputs: list[Values] = [{} for _ in phase]
        chains: dict[Resource, Sequence[Array]] = {}
        for *inner, index in regions:
            placed = phase[index]
            if index in split:
                continue
            if index in parts:
                attention = phase[parts[index][0].attention]
                kernels = self._kernels_for(fused.gemm_share(placed, attention, self._plan.num_sms))
                beside = [(split[part.attention], part) for part in parts[index]]
                with _scope(placed):
                    outputs[index] = fused.run_gemm(self._applied(placed, state), kernels, beside, attention.nano.num_sms)
            else:
                members = [phase[i] for i in (*inner, index)]
                step = self._step_of(members[0], [*behind, *chains.get(placed.nano.resource, ())])
                apply = functools.partial(self._apply_all, members, step)
                outputs[index] = annotate(placed.nano.resource, apply)(self._inputs(members, state))
                chains[placed.nano.resource] = list(outputs[index].values())
            state[placed.layer].write(self._plan.batch_of(placed.nano), outputs[index], self._rows_of(placed.nano))
        for index, attention in split.items():
            outputs[index] = attention.result()
        return outputs

    def _parts(self, placed: Placed) -> tuple[Sequence[str], Set[str]]:
        """The operations of a node that run in a phase, and what of their results leaves it."""
        return self._runs[placed.nano.operation][0], self._kept[placed.nano.operation]

    def _step_of(self, placed: Placed, after: Sequence[Array]) -> StepInputs:
        """Of a nano-operation's tokens; in a graph its kernels come after what `after` holds."""
        step = self._steps[self._plan.batch_of(placed.nano), self._rows_of(placed.nano)]
        return not_before(step, after) if self._in_graph and after else step

    def _inputs(self, members: Sequence[Placed], state: Sequence[_Layer]) -> Values:
        """What the members of a region read from outside; all work on the same tokens of one layer."""
        nano, layer = members[0].nano, state[members[0].layer]
        names = [name for placed in members for name in self._parts(placed)[0]]
        wanted = {name: self._tokens_read(nano, name) for name in dataflow.external_reads(names)}
        values = {name: layer.values[name].read(tokens.start, tokens.stop) for name, tokens in wanted.items()}
        return values | layer.pool if dataflow.reads_pool(names) else values

    def _applied(self, placed: Placed, state: Sequence[_Layer]) -> fused.Apply:
        """A nano-operation on what it reads now, as a function of the kernels."""
        step = self._step_of(placed, ())
        return functools.partial(self._apply, placed, step, *self._parts(placed), self._inputs([placed], state))

    def note_pool_readers(self, phase: Phase, results: Sequence[Values], regions: Sequence[Sequence[int]]) -> None:
        """Lets the writes of a phase, all at its end, come after every read of the pool in it, whichever the plan has first."""
        for region in regions:
            for placed in (phase[index] for index in region):
                if dataflow.reads_pool(self._runs[placed.nano.operation][0]):
                    self.layers[placed.layer].pool_readers += results[region[-1]].values()

    def finish(self, placed: Placed, results: Values) -> Values:
        """Stores what a nano-operation wrote, after its write of the pool if it has one; returns all it wrote."""
        layer, tokens, rows = self.layers[placed.layer], self._plan.batch_of(placed.nano), self._rows_of(placed.nano)
        _, after = self._runs[placed.nano.operation]
        if after:
            pool, _ = lax.optimization_barrier((layer.pool, layer.pool_readers))
            kept = {write for name in after for write in OPERATIONS[name].writes}
            with _scope(placed):
                results = self._apply(placed, self._step_of(placed, ()), after, kept, results | pool)
            layer.pool = {name: results.pop(name) for name in dataflow.POOL}
            layer.pool_readers = []
        layer.write(tokens, results, rows)
        first = tokens.start - rows.start
        return results if rows == tokens else {name: x[first : first + tokens.tokens] for name, x in results.items()}

    def newly_appended(self) -> list[Array]:
        """`[T, K, 2, H]` of the layers that have appended all their tokens since the last call."""
        arrays = []
        for layer in self.layers[self._num_appended :]:
            if "kv" not in layer.values or not layer.values["kv"].covers(0, self._plan.b_dense):
                break
            arrays.append(layer.values["kv"].read(0, self._plan.b_dense))
        self._num_appended += len(arrays)
        return arrays

    def _apply_all(self, members: Sequence[Placed], step: StepInputs, values: Values) -> Values:
        """Runs a region's members, all on the same tokens, in order; returns what the last one wrote."""
        known, results = dict(values), {}
        for placed in members:
            with _scope(placed):
                results = self._apply(placed, step, *self._parts(placed), known)
            known |= {dataflow.known_as(name): array for name, array in results.items()}
        return results

    def _apply(
        self,
        placed: Placed,
        step: StepInputs,
        names: Sequence[str],
        kept: Set[str],
        values: Values,
        kernels: Kernels | None = None,
    ) -> Values:
        """Runs operations in order, by default with the plan's SMs; returns what they wrote last under the names in `kept`."""
        step = dataclasses.replace(step, kernels=kernels or self._kernels_for(placed.nano.num_sms))
        layer = self._decoder.layers[placed.layer]
        known, written = dict(values), {}
        for name in names:
            operation = OPERATIONS[name]
            results = operation.apply(self._config, step, layer, *(known[read] for read in operation.reads))
            written.update(zip(operation.writes, results, strict=True))
            known.update(written)
        return {name: written[name] for name in sorted(kept & written.keys())}


def _step_inputs(config: ModelConfig, batch: Batch, tokens: NanoBatch, rows: NanoBatch, *, with_kv: bool) -> StepInputs:
    """Of `tokens`, for arrays that have the rows of all of `rows`."""
    step = step_inputs(config, batch, tokens.start, tokens.stop, with_kv=with_kv)
    return step if rows == tokens else dataclasses.replace(step, q_starts=step.q_starts + (tokens.start - rows.start))


def _scope(placed: Placed) -> AbstractContextManager:
    """Names kernels after their nano-operation, for whoever reads a profile."""
    return jax.named_scope(f"{placed.nano.operation}.{placed.layer}.{placed.nano.nano_batch}")

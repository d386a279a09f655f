"""Which nano-operation each kernel of a trace is: by the name scope that the executor gave it, else by order."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from nanoflow_jax.compare.trace import Event, kind
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.executor import fused as fused_executor
from nanoflow_jax.executor.phases import Placed, group, in_order
from nanoflow_jax.operations import layer_operations
from nanoflow_jax.parallel import ParallelLayout
from nanoflow_jax.plan import PipelinePlan, reduced_in_gemm

# Kinds of kernels that each operation launches, in order. Anything that an operation launches besides is of kind "other".
_KINDS: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("gemm",),
    "decode_attention": ("decode_attention", "decode_attention_combine"),
    "prefill_attention": ("prefill_attention",),
    "o_proj": ("gemm",),
    "gate_up_proj": ("gemm",),
    "down_proj": ("gemm",),
    "experts": ("grouped_gemm", "grouped_gemm"),
    "attention_all_gather": ("collective",),
    "o_all_gather": ("collective",),
    "o_all_reduce": ("collective",),
    "ffn_all_reduce": ("collective",),
    "embed": ("collective",),
    "logits": ("gemm", "collective"),
}


_SCOPE = re.compile(r'^\s*(?:ROOT )?%?(\S+) = .*op_name="[^"]*?\b([a-z_]+)\.(\d+)\.(\d+)\b[^"]*"', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Label:
    """An operation of a layer and its nano-batch; the layer is None where only the kind of kernel is known.

    `beside` is the decode attention of which the same kernel as this GEMM computes a part; of several, the first.
    """

    operation: str
    layer: int | None = None
    nano_batch: int | None = None
    beside: "Label | None" = None

    def __str__(self) -> str:
        own = self.operation if self.nano_batch is None else f"{self.operation} {self.nano_batch + 1}"
        return f"{own} + {self.beside}" if self.beside else own


Expected = dict[str, list[Label]]
"""Kind of kernel -> what those of one step are, in the order in which a mode issues them."""


def sequential_kernels(config: ModelConfig, layout: ParallelLayout, *, reduce_in_gemm: bool = False) -> Expected:
    """What a sequential step launches."""
    names = layer_operations(config, layout, reduce_in_gemm=reduce_in_gemm)
    # On one rank the projections add the residual, too; attention of both kinds has one result.
    operations = [
        name.removesuffix("_residual").removesuffix("_into_decoded").replace("_proj_all_reduce", "_proj") for name in names
    ]
    reduced = {operation for name, operation in zip(names, operations, strict=True) if name == f"{operation}_all_reduce"}
    return _expected([Label(name, layer) for layer in range(config.num_layers) for name in operations], reduced)


def planned_kernels(plan: PipelinePlan, num_layers: int) -> Expected:
    """What a step by the plan launches when every nano-operation has kernels of its own."""
    return _expected([_label(placed) for placed in in_order(plan, num_layers)], reduced_in_gemm(plan.partition))


def fused_kernels(plan: PipelinePlan, num_layers: int) -> Expected:
    """What a step by the plan launches when attention and the GEMM beside it are one kernel."""
    alone: list[Label] = []
    fused: list[Label] = []
    gemms, reduced = fused_executor.gemms(plan), reduced_in_gemm(plan.partition)
    for phase in group(plan, num_layers):
        parts = fused_executor.beside(phase, gemms)
        taken = {part.attention for of_gemm in parts.values() for part in of_gemm}
        for index, placed in enumerate(phase):
            if index in parts:
                fused.append(dataclasses.replace(_label(placed), beside=_label(phase[parts[index][0].attention])))
            elif placed.nano.operation in reduced:
                fused.append(_label(placed))
            elif index not in taken:
                alone.append(_label(placed))
    return _expected(alone) | {"fused": fused}


def _label(placed: Placed) -> Label:
    return Label(placed.nano.operation, placed.layer, placed.nano.nano_batch)


def _expected(layers: Sequence[Label], reduced: Set[str] = frozenset()) -> Expected:
    """Kernels in order; those of `reduced` sum over the ranks themselves."""
    found: Expected = defaultdict(list)
    for label in (Label("embed"), *layers, Label("logits")):
        for each in ("fused",) if label.operation in reduced else _KINDS.get(label.operation, ()):
            found[each].append(label)
    return found


def scopes(text: str) -> dict[str, Label]:
    """Instruction -> nano-operation in a compiled module's text, from scopes `OPERATION.LAYER.NANO_BATCH` in its metadata."""
    found = {}
    for name, operation, layer, nano_batch in _SCOPE.findall(text):
        found[name] = Label(operation, int(layer), int(nano_batch))
    return found


def label_events(
    events: Sequence[Event], expected: Mapping[str, Sequence[Label]], steps: int, scoped: Mapping[str, Label] | None = None
) -> dict[Event, Label]:
    """A label for every event of one device.

    Kernels whose instruction is in `scoped` have its label. Of the others, kinds whose kernels are as many as `expected` tells
    for `steps` steps are matched in order of start; of the rest only the kind is told.
    """
    found: dict[str, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.start_ns):
        found[kind(event.name)].append(event)
    labels = {}
    for each, of_kind in found.items():
        told = [*expected.get(each, ())] * steps
        matched = told if len(told) == len(of_kind) else [Label(each)] * len(of_kind)
        if scoped and each not in ("other", "fused"):
            matched = [scoped.get(event.op, label) for event, label in zip(of_kind, matched, strict=True)]
        labels.update(zip(of_kind, matched, strict=True))
    return labels

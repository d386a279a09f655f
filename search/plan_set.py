"""Plans for several batch sizes and mixes, and the batch size below which sequential execution is better."""

from collections.abc import Iterable, Sequence

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import PipelinePlan, PlanError, PlanSet, SequentialTime, sequential_time_of
from nanoflow_jax.workload import BatchMix, Workload
from search.problem import Costing
from search.profile_table import ProfileTable

# Of the batches whose sequential times are recorded.
_SIZE_STEP, _DECODE_PARTS = 256, 4


def make_plan_set(model: ModelConfig, table: ProfileTable, plans: Sequence[PipelinePlan], mixes: Iterable[BatchMix]) -> PlanSet:
    """The set of `plans` that beat sequential execution at their own mix, with sequential times at `mixes`."""
    winning = tuple(sorted((p for p in plans if p.speedup > 1), key=lambda p: (p.b_dense, p.decode_tokens)))
    return PlanSet(
        model=model.name,
        device=table.device,
        tp=table.tp,
        plans=winning,
        sequential=tuple(sequential_times(model, table, mixes)),
        crossover_tokens=crossover(plans),
    )


def join_plans(plans: Sequence[PipelinePlan], sequential: Iterable[SequentialTime] = ()) -> PlanSet:
    """A set of plans made one by one, with the sequential times that each predicts for its own mix, and more of them.

    Args:
      sequential: as from `sequential_times`; without any the runtime can only scale the plans' own to other batches.

    Raises:
      PlanError: they are for different models, devices, ranks or partitions.
    """
    kinds = {(p.model, p.device, p.tp, p.partition) for p in plans}
    if len(kinds) != 1:
        raise PlanError(f"plans of one set are for one model, device, number of ranks and partition, not {sorted(kinds)}")
    first = plans[0]
    by_mix = {(s.b_dense, s.decode_tokens): s for s in (*map(sequential_time_of, plans), *sequential)}
    winning = tuple(sorted((p for p in plans if p.speedup > 1), key=lambda p: (p.b_dense, p.decode_tokens)))
    return PlanSet(
        model=first.model, device=first.device, tp=first.tp, plans=winning,
        sequential=tuple(by_mix[mix] for mix in sorted(by_mix)), crossover_tokens=crossover(plans),
    )  # fmt: skip


def mixes_of_all_sizes(workload: Workload, b_dense: int) -> list[BatchMix]:
    """Batches up to `b_dense` tokens from prompts alone to decoding alone, with the contexts of a workload."""
    contexts = {"decode_context": workload.decode_context, "prefill_context": workload.prefill_context}
    sizes = range(_SIZE_STEP, b_dense + 1, _SIZE_STEP)
    return [
        BatchMix(b_dense=size, decode_tokens=size * part // _DECODE_PARTS, **contexts)
        for size in sizes
        for part in range(_DECODE_PARTS + 1)
    ]


def sequential_times(model: ModelConfig, table: ProfileTable, mixes: Iterable[BatchMix]) -> list[SequentialTime]:
    """A layer's time at each mix, in the better of the partitions."""
    return [
        SequentialTime(
            b_dense=m.b_dense, decode_tokens=m.decode_tokens, layer_us=sequential_us(model, table, m),
            decode_context=m.decode_context or None,
        )
        for m in mixes
    ]  # fmt: skip


def sequential_us(model: ModelConfig, table: ProfileTable, mix: BatchMix) -> float:
    """One layer without splitting, in the better of the partitions."""
    partitions = ("none",) if table.tp == 1 else ("all_reduce", "all_gather")
    return min(Costing(model=model, table=table, mix=mix, partition=p).sequential_us() for p in partitions)


def crossover(plans: Sequence[PipelinePlan]) -> int | None:
    """The smallest b_dense from which on every plan, whatever its mix, beats sequential execution, if there is one."""
    smallest = None
    for size in sorted({p.b_dense for p in plans}, reverse=True):
        if any(p.speedup <= 1 for p in plans if p.b_dense == size):
            break
        smallest = size
    return smallest

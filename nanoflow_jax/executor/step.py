"""The programs of a step: its forward in every mode, and the sampling of its rows."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from nanoflow_jax.batch import BatchShape, unpack
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.executor import kv_transfer, nano_batch, sequential
from nanoflow_jax.kernels import KernelChoice, kernels_for
from nanoflow_jax.kv_cache import KV_PARTITION, KVCache
from nanoflow_jax.models.decoder import decoder_partition
from nanoflow_jax.parallel import ParallelLayout
from nanoflow_jax.plan import PipelinePlan
from nanoflow_jax.sampling import SamplingMode, sample

ExecutionMode = Literal["sequential", "nano", "xla", "streams", "fused"]
# What keeps XLA on GPUs from undoing a plan: no merged GEMMs, no combined, synchronous or serial collectives.
_ANY_PLAN = {
    "xla_gpu_dot_merger_threshold_mb": "0",
    "xla_gpu_all_reduce_combine_threshold_bytes": "0",
    "xla_gpu_experimental_parallel_collective_overlap_limit": "2",
    "xla_gpu_experimental_use_collective_kernels": "",
}
# Streams and no CUDA graphs: by default XLA puts a graph's kernels in a row.
PLAN_OPTIONS = {**_ANY_PLAN, "xla_gpu_enable_command_buffer": ""}
# Graphs whose kernels wait for data alone. Between kernels on streams there are microseconds, at a join tens of them. A profile
# is to show what runs: XLA may launch a graph's kernels one by one while it is profiled.
_GRAPH_OPTIONS = {
    **_ANY_PLAN,
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    "xla_enable_command_buffers_during_profiling": True,
}


def step_function(
    config: ModelConfig,
    layout: ParallelLayout,
    mesh: jax.sharding.Mesh,
    graph: Any,
    shape: BatchShape,
    *,
    plan: PipelinePlan | None,
    mode: ExecutionMode,
    kernels: KernelChoice,
    num_sms: int,
    on_gpu: bool,
    num_kv_groups: int = 0,
) -> Any:
    """The jitted forward of one step: (weights, cache, last tokens, packed batch) -> (row logits, cache); the cache is donated.

    Args:
      graph: `nnx.graphdef` of the decoder.
      plan: executed in `mode`; None is the sequential step.
      num_sms: what a sequential step may use; a plan has budgets of its own.
      on_gpu: the mesh is made of GPUs, so streams and XLA's GPU options apply.
      num_kv_groups: more results, K and V of the step's tokens: one per group of so many groups of layers; see `kv_transfer`.
    """
    budgeted = kernels_for(kernels)
    # Not with several ranks: collectives are in no graph, and kernels that wait for their peers must start in one order on all.
    # Nor XLA's GEMM, which reads no count that order could be made of.
    in_graph = on_gpu and plan is not None and plan.tp == 1 and mode == "streams" and kernels != "cublas"
    if plan is None:
        execute = functools.partial(sequential.forward, kernels=budgeted(num_sms))
    else:
        execute = functools.partial(
            nano_batch.forward, plan=plan, mode=nano_batch.Mode(mode), kernels_for=budgeted, on_streams=on_gpu,
            in_graph=in_graph,
        )  # fmt: skip

    # With streams of its own XLA waits for a copy as soon as it has started it; there the copy follows the step.
    to_host = on_gpu and (plan is None or mode in ("nano", "xla"))

    def forward(weights: Any, cache: KVCache, last_tokens: jax.Array, packed: jax.Array) -> tuple:
        new_kv = kv_transfer.LeavingKV(config.num_layers, num_kv_groups, to_host=to_host) if num_kv_groups else None
        decoder, batch = nnx.merge(graph, weights), unpack(packed, shape)
        out = execute(config, layout, decoder, cache, last_tokens, batch, new_kv=new_kv)
        return out if new_kv is None else (*out, *new_kv.groups)

    replicated = PartitionSpec()
    out_specs = (replicated, KV_PARTITION, *[kv_transfer.NEW_KV_PARTITION] * num_kv_groups)
    sharded = jax.shard_map(
        forward,
        mesh=mesh,
        in_specs=(decoder_partition(config, layout), KV_PARTITION, replicated, replicated),
        out_specs=out_specs,
        check_vma=False,
    )
    leaving = kv_transfer.leaving_sharding(mesh, to_host=to_host)
    return jax.jit(
        sharded,
        donate_argnums=1,
        out_shardings=(None, None, *[leaving] * num_kv_groups) if num_kv_groups else None,
        compiler_options=(_GRAPH_OPTIONS if in_graph else PLAN_OPTIONS) if plan and on_gpu else None,
    )


def sample_step(
    row_logits: jax.Array,
    last_tokens: jax.Array,
    packed: jax.Array,
    *,
    shape: BatchShape,
    mode: SamplingMode,
    num_logprobs: int,
) -> tuple[jax.Array, jax.Array]:
    """Samples every row; returns int32[S, 2 + 2 n] (token, logprob bits, top ids, top logprob bits) and the new last tokens."""
    batch = unpack(packed, shape)
    sampled = sample(row_logits, batch, mode, num_logprobs)
    # Rows that sample nothing have sequence row -1; as an index that would be the last row, so they are sent out of range.
    target = jnp.where(batch.sequence_rows < 0, last_tokens.shape[0], batch.sequence_rows)
    last_tokens = last_tokens.at[target].set(sampled.token_ids, mode="drop")
    columns = [sampled.token_ids[:, None], _bits(sampled.logprobs)[:, None]]
    if num_logprobs:
        assert sampled.top_ids is not None and sampled.top_logprobs is not None
        columns += [sampled.top_ids, _bits(sampled.top_logprobs)]
    return jnp.concatenate(columns, axis=1), last_tokens


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)

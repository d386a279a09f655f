"""What mode STREAMS hands to XLA as one region: one result each, and as few regions as that allows."""

import dataclasses
import functools
from collections.abc import Callable
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from nanoflow_jax.batch import BatchShape, packed_size, unpack
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.executor import nano_batch
from nanoflow_jax.kernels import REFERENCE
from nanoflow_jax.kv_cache import KV_PARTITION, KVCache
from nanoflow_jax.models.decoder import abstract_decoder, decoder_partition
from nanoflow_jax.parallel import make_mesh, parallel_layout
from nanoflow_jax.plan import PipelinePlan, Resource
from nanoflow_jax.plan_files import decode_plan_set
from tests.executor.plans import random_plan
from tests.model.test_golden import small_config


def regions_of(config: ModelConfig, plan: PipelinePlan, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Resource, int]]:
    """(resource, results) of every region of a step, in order; nothing is executed."""
    found: list[tuple[Resource, int]] = []

    def on_stream(resource: Resource, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched(argument: Any) -> Any:
            results = function(argument)
            found.append((resource, len(jax.tree.leaves(results))))
            return results

        return watched

    monkeypatch.setattr(nano_batch, "on_stream", on_stream)
    layout = dataclasses.replace(parallel_layout(config, plan.tp), gathered_o_proj=plan.partition == "all_gather")
    mesh = make_mesh(plan.tp)
    shape = BatchShape(plan.b_dense, plan.b_dense, 4)
    graph, weights = nnx.split(abstract_decoder(config, layout, mesh, jnp.dtype(jnp.float32)))
    pages = jax.ShapeDtypeStruct((8, layout.num_kv_heads, 4, config.head_dim), jnp.float32)
    cache = KVCache([pages] * config.num_layers, [pages] * config.num_layers)
    execute = functools.partial(
        nano_batch.forward, plan=plan, mode=nano_batch.Mode.STREAMS, kernels_for=lambda _: REFERENCE, on_streams=True
    )

    def step(weights: Any, cache: KVCache, last_tokens: jax.Array, packed: jax.Array) -> Any:
        return execute(config, layout, nnx.merge(graph, weights), cache, last_tokens, unpack(packed, shape))

    replicated = PartitionSpec()
    in_specs = (decoder_partition(config, layout), KV_PARTITION, replicated, replicated)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(replicated, KV_PARTITION), check_vma=False)
    ids = jax.ShapeDtypeStruct((plan.b_dense,), jnp.int32)
    jax.eval_shape(mapped, weights, cache, ids, jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize(("tp", "partition"), [(1, "none"), (2, "all_reduce"), (4, "all_gather")])
def test_a_region_on_a_stream_has_one_result(tp: int, partition: str, moe: bool, seed: int, monkeypatch) -> None:
    config = small_config(num_experts=4, experts_per_token=2) if moe else small_config()
    plan = random_plan(
        np.random.default_rng(seed), tp=tp, moe=moe, partition=partition, b_dense=40, tile=4, decode_tokens=(5, 16, 40)[seed]
    )
    found = regions_of(config, plan, monkeypatch)
    assert {results for resource, results in found if resource is not Resource.NETWORK} == {1}


def test_a_pipeline_by_hand_takes_five_regions_a_layer(monkeypatch) -> None:
    """Attention; beside it prompt attention, o and the feed-forward of one nano-batch, then its qkv; the same of the other.

    Where attention runs beside one of them only: of the plans for as many outputs as prompt tokens, which the last one is.
    """
    text = resources.files("nanoflow_jax").joinpath("plans", "h200-llama3-8b-tp1.json").read_bytes()
    counts = []
    for num_layers in (2, 3):
        config = small_config(num_layers=num_layers)
        counts.append(len(regions_of(config, decode_plan_set(text).plans[-1], monkeypatch)))
    assert counts[1] - counts[0] == 5

"""Compiles a step with offload for H200s without having one; prints XLA's order of copies and layers as a JSON list.

`python -m tests.executor.h200_offload MODE`, "sequential" or a mode of plans. It is a process of its own because jax's CUDA
plug-in must load before any other back end.
"""

import dataclasses
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from nanoflow_jax.batch import BatchShape, packed_size
from nanoflow_jax.config import preset
from nanoflow_jax.executor.step import ExecutionMode, step_function
from nanoflow_jax.kv_cache import KV_PARTITION, KVCache
from nanoflow_jax.models.decoder import abstract_decoder
from nanoflow_jax.parallel import TP, parallel_layout
from nanoflow_jax.plan_files import decode_plan
from tests.kernels.aot import H200

PLAN = pathlib.Path(__file__).parent.parent / "data" / "plans" / "llama3-8b-h200-tp1.json"
NUM_LAYERS, NUM_GROUPS = 4, 4


def main(mode: ExecutionMode) -> None:
    plan = decode_plan(PLAN.read_bytes())
    topology = topologies.get_topology_desc("h200", platform="cuda", target_config=H200, topology="1x1x1")
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), (TP,), axis_types=(jax.sharding.AxisType.Auto,))
    config = dataclasses.replace(preset(plan.model), num_layers=NUM_LAYERS)
    layout = parallel_layout(config, 1)
    shape = BatchShape(plan.b_dense, plan.b_dense, 16)
    graph, weights = nnx.split(abstract_decoder(config, layout, mesh, jnp.dtype(jnp.bfloat16)))
    step = step_function(
        config, layout, mesh, graph, shape, plan=None if mode == "sequential" else plan, mode=mode, kernels="mosaic",
        num_sms=plan.num_sms, on_gpu=True, num_kv_groups=NUM_GROUPS,
    )  # fmt: skip
    pool = (4096, layout.num_kv_heads, 64, config.head_dim)
    pages = jax.ShapeDtypeStruct(pool, jnp.bfloat16, sharding=NamedSharding(mesh, KV_PARTITION))
    cache = KVCache([pages] * NUM_LAYERS, [pages] * NUM_LAYERS)
    replicated = NamedSharding(mesh, PartitionSpec())
    last_tokens = jax.ShapeDtypeStruct((plan.b_dense,), jnp.int32, sharding=replicated)
    packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32, sharding=replicated)
    with jax.set_mesh(mesh):
        compiled = step.trace(weights, cache, last_tokens, packed).lower(lowering_platforms=("cuda",)).compile()
    events = []
    starts: dict[str, int] = {}
    entry = compiled.as_text().partition("\nENTRY")[2]  # before it, the bodies of what runs on streams of its own
    for line in entry.splitlines():
        if (start := re.match(r"\s*(%copy-start\S*) = \(bf16\[\S*S\(5\)", line)) is not None:
            starts[start[1]] = len(starts)
            events.append(f"start {starts[start[1]]}")
        elif (done := re.search(r" copy-done\((%[^)]*)\)", line)) is not None and done[1] in starts:
            events.append(f"done {starts[done[1]]}")
        elif re.search(r" (call-start|async-start)\(", line) or ("custom-call" in line and "mosaic_gpu" in line):
            events.append("kernel")
    print(json.dumps(events))


if __name__ == "__main__":
    main(sys.argv[1])  # pyright: ignore[reportArgumentType]

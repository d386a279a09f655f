"""Compiles the sampling of a step's logits for an H200 without having one; prints the bytes of its temporaries as JSON.

`python -m tests.executor.h200_sampling ROWS VOCABULARY`. A process of its own, as `tests.executor.h200_schedule`.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from nanoflow_jax.batch import BatchShape, packed_size
from nanoflow_jax.executor.runner import MAX_LOGPROBS
from nanoflow_jax.executor.step import sample_step
from nanoflow_jax.parallel import TP
from nanoflow_jax.sampling import SamplingMode
from tests.kernels.aot import H200


def main(rows: int, vocabulary: int) -> None:
    topology = topologies.get_topology_desc("h200", platform="cuda", target_config=H200, topology="1x1x1")
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), (TP,), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    shape = BatchShape(rows, rows, 16)
    arguments = [
        jax.ShapeDtypeStruct(of, dtype, sharding=replicated)
        for of, dtype in (((rows, vocabulary), jnp.float32), ((rows,), jnp.int32), ((packed_size(shape),), jnp.int32))
    ]
    temporary = {}
    for mode in SamplingMode:
        for num_logprobs in (0, MAX_LOGPROBS):
            step = functools.partial(sample_step, shape=shape, mode=mode, num_logprobs=num_logprobs)
            with jax.set_mesh(mesh):
                lowered = jax.jit(step, donate_argnums=1).trace(*arguments).lower(lowering_platforms=("cuda",))
                temporary[f"{mode.value} {num_logprobs}"] = lowered.compile().memory_analysis().temp_size_in_bytes
    print(json.dumps(temporary))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

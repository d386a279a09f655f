"""Compiles a step for H200s without having one, prints XLA's schedule and, as last line, what overlaps in it as JSON.

`XLA_FLAGS=--xla_dump_to=DIR python -m tests.executor.h200_schedule PLAN MODE DIR` with a plan of tests/data/plans. It is a
process of its own because jax's CUDA plug-in must load before any other back end and XLA reads its flags once.
"""

import dataclasses
import glob
import itertools
import json
import math
import os
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
from nanoflow_jax.compare.names import scopes
from nanoflow_jax.config import preset
from nanoflow_jax.executor.step import ExecutionMode, step_function
from nanoflow_jax.kv_cache import KV_PARTITION, KVCache
from nanoflow_jax.models.decoder import abstract_decoder
from nanoflow_jax.parallel import TP, parallel_layout
from nanoflow_jax.plan_files import decode_plan
from tests.kernels.aot import H200

PLANS = pathlib.Path(__file__).parent.parent / "data" / "plans"
_CALLED = re.compile(r"(?:calls|to_apply)=(%[\w.-]+)")
NUM_LAYERS, NUM_PAGES, PAGE_SIZE, MAX_CONTEXT = 3, 4096, 64, 1024


def main(plan_name: str, mode: ExecutionMode, dump: str) -> None:
    plan = decode_plan((PLANS / f"{plan_name}.json").read_bytes())
    topology = topologies.get_topology_desc("h200", platform="cuda", target_config=H200, topology=f"1x1x{plan.tp}")
    mesh = jax.sharding.Mesh(np.array(topology.devices[: plan.tp]), (TP,), axis_types=(jax.sharding.AxisType.Auto,))
    config = dataclasses.replace(preset(plan.model), num_layers=NUM_LAYERS)
    layout = parallel_layout(config, plan.tp)
    shape = BatchShape(plan.b_dense, plan.b_dense, MAX_CONTEXT // PAGE_SIZE)
    graph, weights = nnx.split(abstract_decoder(config, layout, mesh, jnp.dtype(jnp.bfloat16)))
    kernels = "mosaic_peers" if plan.partition == "gemm_all_reduce" else "mosaic"
    step = step_function(
        config, layout, mesh, graph, shape, plan=None if mode == "sequential" else plan, mode=mode, kernels=kernels,
        num_sms=plan.num_sms, on_gpu=True,
    )  # fmt: skip
    pages = jax.ShapeDtypeStruct(
        (NUM_PAGES, layout.num_kv_heads, PAGE_SIZE, config.head_dim),
        jnp.bfloat16,
        sharding=NamedSharding(mesh, KV_PARTITION),
    )
    cache = KVCache([pages] * NUM_LAYERS, [pages] * NUM_LAYERS)
    replicated = NamedSharding(mesh, PartitionSpec())
    last_tokens = jax.ShapeDtypeStruct((plan.b_dense,), jnp.int32, sharding=replicated)
    packed = jax.ShapeDtypeStruct((packed_size(shape),), jnp.int32, sharding=replicated)
    with jax.set_mesh(mesh):
        compiled = step.trace(weights, cache, last_tokens, packed).lower(lowering_platforms=("cuda",)).compile()
    lines = thunks(dump)
    print("\n".join(lines))
    print(json.dumps({
        "pairs": in_flight_together(lines),
        "pool_bytes": sum(2 * math.prod(pages.shape) // plan.tp * 2 for _ in range(NUM_LAYERS)),
        "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "kernel_slice_offsets": kernel_slice_offsets(compiled.as_text()),
        "fused_calls": fused_calls(compiled.as_text()),
        "unnamed_kernels": unnamed_kernels(compiled.as_text()),
        "unordered": {kernel: unordered(compiled.as_text(), kernel) for kernel in ("gemm", "decode_attention")},
        "kernels": len(set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', compiled.as_text()))),
        "launches": sum(bool(re.search(r"^\s*\d+: k(CustomKernel|CustomCall|Copy)\b", line)) for line in lines),
        "copies": sum("kCopy" in line for line in lines),
        "empty_starts": sum("kAsyncStart" in line and "No thunks" in after for line, after in itertools.pairwise(lines)),
    }))  # fmt: skip


def thunks(dump: str) -> list[str]:
    paths = [path for path in glob.glob(f"{dump}/*thunk_sequence.txt") if "forward" in path]
    with open(max(paths, key=os.path.getsize)) as lines:
        return lines.read().splitlines()


def unnamed_kernels(hlo: str) -> list[str]:
    """Our kernels of which the module does not tell whose nano-operation they are."""
    calls = re.findall(r"^\s*(?:ROOT )?(%\S+) = .*mosaic_gpu", hlo, re.MULTILINE)
    return [name for name in calls if name.removeprefix("%") not in scopes(hlo)]


def fused_calls(hlo: str) -> int:
    """Calls of the kernel that is a GEMM and decode attention."""
    return len(re.findall(r"custom-call\(.*gemm_with_decode_attention", hlo))


def unordered(hlo: str, kernel: str) -> tuple[int, int]:
    """How many kernels of that name, or regions with some, take nothing that the one before had a part in, and how many exist.

    The former a graph may run at once.
    """
    sign = re.compile(rf'op_name="[^"]*/{kernel}[/"]')
    before, _, entry = hlo.partition("\nENTRY ")
    bodies = re.findall(r"^(%[\w.-]+) \([^\n]*\{\n(.*?)^\}", before, re.MULTILINE | re.DOTALL)
    with_some: set[str] = set()
    for name, body in bodies:  # what is called comes before what calls it
        if sign.search(body) or with_some & set(_CALLED.findall(body)):
            with_some.add(name)
    comes_from: dict[str, set[str]] = {}  # value: the kernels
    elements: dict[str, list[str]] = {}  # of tuples
    found, kernels = 0, []
    instruction = r"^\s*(?:ROOT )?(%[\w.-]+) = .*? ([\w-]+)\((%[^()]*)\)(.*)$"
    for name, opcode, operands, rest in re.findall(instruction, entry, re.MULTILINE):
        read = re.findall(r"%[\w.-]+", operands)
        if opcode == "get-tuple-element" and read[0] in elements:
            read = [elements[read[0]][int(re.findall(r"index=(\d+)", rest)[0])]]
        if opcode == "tuple":
            elements[name] = read
        comes_from[name] = set().union(*(comes_from.get(value, ()) for value in read))
        if opcode in ("custom-call", "call-start") and (sign.search(rest) or with_some & set(_CALLED.findall(rest))):
            found += bool(kernels) and kernels[-1] not in comes_from[name]
            comes_from[name].add(name)
            kernels.append(name)
    return found, len(kernels)


def kernel_slice_offsets(hlo: str) -> list[int]:
    """Byte offsets of the slices that XLA hands to kernels as pointers into a larger array instead of copying them."""
    offsets = []
    for fused in re.findall(r"^%dynamic-slice-fusion[^\n]*\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL):
        shapes = {name: (dtype, _ints(shape)) for name, dtype, shape in re.findall(r"(%[\w.-]+) = (\w+)\[([\d,]*)\]", fused)}
        for operand, ranges in re.findall(r" slice\((%[\w.-]+)\), slice=\{([^}]*)\}", fused):
            dtype, shape = shapes[operand]
            starts = [int(start) for start in re.findall(r"\[(\d+):", ranges)]
            element = sum(start * math.prod(shape[axis + 1 :]) for axis, start in enumerate(starts))
            offsets.append(element * {"s32": 4, "f32": 4, "bf16": 2}[dtype])
    return offsets


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def in_flight_together(lines: list[str]) -> dict[str, int]:
    """How often work of two kinds was under way at once: on our streams 5 and 6, and collectives.

    A collective that XLA runs on the main stream is under way beside whatever was started before it and not yet waited for.
    """
    open_work: dict[str, str] = {}
    pairs: dict[str, int] = {}

    def meet(name: str) -> None:
        for other in set(open_work.values()) - {name, "other"}:
            pair = "+".join(sorted((name, other)))
            pairs[pair] = pairs.get(pair, 0) + (name != "other")

    for number, line in enumerate(lines):
        work = re.search(r"async_id=(\d+)", line)
        if "kAsyncStart" in line and work and "No thunks" not in lines[number + 1]:
            stream = re.search(r"stream=(\w+)\[(\d+)\]", line)
            assert stream, line
            communicates = stream[1].startswith("communication")
            name = "network" if communicates else {"5": "compute", "6": "memory"}.get(stream[2], "other")
            meet(name)
            open_work[work[1]] = name
        elif "kAsyncDone" in line and work:
            open_work.pop(work[1], None)
        elif re.match(r"\d+: k(AllReduce|AllGather)", line):
            meet("network")
    return pairs


if __name__ == "__main__":
    main(*sys.argv[1:])  # pyright: ignore[reportArgumentType]

"""Compiles programs of the profiler for H200s without having one; prints, as last line, what it found as JSON.

`XLA_FLAGS=--xla_dump_to=DIR python -m tests.search.h200_profile DIR`. It is a process of its own because jax's CUDA plug-in
must load before any other back end and XLA reads its flags once.
"""

import json
import re
import shutil
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies

from nanoflow_jax.config import preset
from nanoflow_jax.parallel import TP
from search.measurement import Alone, Program, Together
from search.profile_points import fewer_sms_requests, pairs_to_measure, requests
from search.profiler_programs import Workbench
from tests.executor.h200_schedule import in_flight_together
from tests.kernels.aot import H200

B_DENSE, CONTEXTS, NUM_SMS = 2048, (512, 1024, 2048), 132


def samples(tp: int) -> dict[str, Program]:
    """One program of each kind of kernel, and the pairs with the fewest and the most SMs."""
    model = preset("llama3-8b" if tp == 1 else "llama3-70b")
    sizes = model, tp, B_DENSE, CONTEXTS, NUM_SMS
    found: dict[str, Program] = {}
    for request in requests(*sizes):
        program = request.program
        kind = f"{program.kernel.name} {'full' if request.full else 'few'}"
        if program.tokens >= 512:
            found.setdefault(kind, program)
    if tp == 1:
        for request in fewer_sms_requests(*sizes):
            found.setdefault(f"{request.program.kernel.name} fewer", request.program)
    else:
        found = {kind: p for kind, p in found.items() if p.kernel.name.startswith("all") or kind == "decode_attention few"}
    for gemm, other, sms in pairs_to_measure(*sizes):
        on = Alone(kernel=gemm, tokens=1024, num_sms=NUM_SMS - sms)
        beside = Alone(kernel=other, tokens=1024, num_sms=sms, max_context=max(CONTEXTS) if "attention" in other.name else 0)
        if tp == 1 or "attention" not in other.name:
            found.setdefault(f"{gemm.name} beside {other.name}", Together(gemm=on, calls=2, other=beside))
    return {f"tp{tp} {kind}": program for kind, program in found.items()}


def mesh(tp: int) -> jax.sharding.Mesh:
    topology = topologies.get_topology_desc("h200", platform="cuda", target_config=H200, topology=f"1x1x{tp}")
    return jax.sharding.Mesh(np.array(topology.devices[:tp]), (TP,), axis_types=(jax.sharding.AxisType.Auto,))


def compiled(bench: Workbench, program: Program, dump: Path) -> dict:
    shutil.rmtree(dump, ignore_errors=True)
    begun = time.perf_counter()
    traced = bench.trace(program)
    lowered = traced.lower(lowering_platforms=("cuda",))
    lowered_s = time.perf_counter() - begun
    executable = lowered.compile()
    text = executable.as_text()
    schedule = max(dump.glob("*thunk_sequence.txt"), key=lambda path: path.stat().st_size).read_text().splitlines()
    return {
        "kernels": len(re.findall(r"custom-call\(.*mosaic", text)),
        "collectives": len(re.findall(r" all-(?:reduce|gather)(?:-start)?\(", text)),
        "copies": len(re.findall(r" = (?:bf16|f32)\S+ copy(?:-start)?\(", text)),
        "temp_mb": round(executable.memory_analysis().temp_size_in_bytes / 1e6),
        "pairs": in_flight_together(schedule),
        "lowered_s": round(lowered_s, 2),
        "compiled_s": round(time.perf_counter() - begun - lowered_s, 2),
    }


def main(dump: Path) -> None:
    found = {}
    for tp in (1, 4):
        whole, single = mesh(tp), mesh(1)
        for kind, program in samples(tp).items():
            # What runs on one device is compiled for one, as the profiler does.
            on = whole if program.ranks > 1 else single
            with jax.set_mesh(on):
                found[kind] = compiled(Workbench(on), program, dump)
            print(kind, found[kind], file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

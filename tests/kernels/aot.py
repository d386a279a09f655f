"""Compiles kernels for an H200 (sm_90a) without a GPU and reads registers, spills and shared memory.

jax's CUDA plug-in must load before any other backend starts, so a module's kernels are compiled in one child process:
`resources("tests.kernels.test_gemm")` runs the function `aot_cases` of that module, which returns
`{name: (function, argument shapes)}`, and returns `{name: Resources}`. Tests skip where the plug-in or ptxas is absent.
"""

import dataclasses
import functools
import importlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import pytest

# Public properties of an H200 SXM; the compiler reads the limits, nothing here depends on the rates.
H200 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
 cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
 registers_per_core_limit: 65536 registers_per_block_limit: 65536
 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
 device_vendor: "NVIDIA Corporation" name: "NVIDIA H200" driver_version: "13.0.0"
 runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
 device_interconnect_info { active_links: 18 } }
platform_name: "CUDA" device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """What ptxas and Mosaic say of one compiled case; the largest figure where a case holds several kernels."""

    registers: int
    spill_bytes: int
    smem_bytes: int


def child_environment() -> dict[str, str]:
    """The environment of a process that compiles for GPUs; skips the calling test where this machine cannot."""
    if not importlib.util.find_spec("jax_plugins") or not importlib.util.find_spec("jax_plugins.xla_cuda13"):
        pytest.skip("no jax CUDA 13 plug-in here, so nothing compiles for sm_90a")
    if shutil.which("ptxas") is None:
        pytest.skip("no ptxas on the PATH, so nothing compiles for sm_90a")
    # No GPU is asked for, and no cuDNN.
    return os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


@functools.cache
def resources(module: str) -> dict[str, Resources]:
    """Compiles every case of `module`; skips the calling test where this machine cannot."""
    env = child_environment() | {"MOSAIC_GPU_DUMP_PTXAS": "1"}
    done = subprocess.run([sys.executable, "-m", "tests.kernels.aot", module], env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ahead-of-time compilation of {module} failed:\n{done.stderr[-4000:]}")
    return {name: Resources(**r) for name, r in json.loads(done.stdout.splitlines()[-1]).items()}


def _compile(function: Any, arguments: tuple[Any, ...], mesh: Any) -> Resources:
    import jax

    with tempfile.TemporaryDirectory() as dump:
        os.environ["MOSAIC_GPU_DUMP_TO"] = dump  # read by the compiler at each kernel
        with jax.set_mesh(mesh):
            jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
        ptxas, smem = (
            "\n".join(file.read_text() for file in pathlib.Path(dump).glob(f"*{ending}"))
            for ending in (".ptxas", ".resources.txt")
        )
    return Resources(
        registers=max(int(n) for n in re.findall(r"Used (\d+) registers", ptxas)),
        spill_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", ptxas)),
        smem_bytes=max(int(n) for n in re.findall(r"smem_scratch_bytes=(\d+)", smem)),
    )


def _main(module: str) -> None:
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc("h200", platform="cuda", target_config=H200, topology="1x1x1")
    mesh = jax.sharding.Mesh(topology.devices[:1], ("gpu",))
    cases = importlib.import_module(module).aot_cases()
    found = {name: dataclasses.asdict(_compile(f, arguments, mesh)) for name, (f, arguments) in cases.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    _main(sys.argv[1])

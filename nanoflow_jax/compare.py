"""The same step executed in every mode, beside each other: `python -m nanoflow_jax.compare --plan plan.json`.

Builds a model of two depths with random weights and a full batch of the plan's mix (decoding sequences of `--context` tokens,
prompts for the rest), and times the step in each mode. The period of a layer is the difference of the two depths over the
difference in layers, so embedding and logits cancel. `burst` is the median of short runs, `sustained` the mean over
`--seconds`, in which a GPU's power limit sets the clock. All modes take turns in one process on the same arrays.

The table is for people; the last line of standard output is one JSON object.
"""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nanoflow_jax.batch import Batch, BatchShape, empty_batch, pack
from nanoflow_jax.checkpoints.random_weights import random_parameters
from nanoflow_jax.config import ModelConfig, preset
from nanoflow_jax.executor.runner import ExecutionMode, step_function
from nanoflow_jax.kernels import KernelChoice, best_choice
from nanoflow_jax.kv_cache import KVCache, create_kv_cache
from nanoflow_jax.models.decoder import build_decoder
from nanoflow_jax.parallel import make_mesh, parallel_layout
from nanoflow_jax.plan import PipelinePlan, decode_plan

# Steps per measurement of a burst: enough to hide the launch of the first, few enough to end before the clock falls.
_BURST_STEPS = 5


@dataclasses.dataclass(frozen=True)
class Variant:
    """A row of the table: a mode and the kernels that it runs with."""

    mode: ExecutionMode
    kernels: KernelChoice

    @property
    def label(self) -> str:
        return f"{self.mode} ({self.kernels})"


def main(argv: list[str] | None = None) -> None:
    args = _parse(argv)
    plan = decode_plan(args.plan.read_bytes())
    config = preset(args.model or plan.model)
    times = {layers: measure(config, plan, layers, args) for layers in (args.layers, args.fewer_layers)}
    report = {
        "model": config.name, "device": jax.devices()[0].device_kind, "tp": plan.tp, "b_dense": plan.b_dense,
        "decode_tokens": plan.decode_tokens, "context": args.context, "layers": [args.layers, args.fewer_layers],
        "predicted_period_us": plan.period_us, "predicted_sequential_us": plan.prediction.sequential_us,
        "jax": jax.__version__,
        "modes": periods(times, args.layers, args.fewer_layers),
    }  # fmt: skip
    print_table(report)
    print(json.dumps(report))


def periods(times: dict[int, dict[str, dict[str, Any]]], layers: int, fewer: int) -> dict[str, dict[str, float]]:
    """Microseconds per layer by mode; modes that failed carry the error instead."""
    found = {}
    for label, deep in times[layers].items():
        shallow = times[fewer].get(label, {"error": "not run"})
        if "error" in deep or "error" in shallow:
            found[label] = {"error": deep.get("error") or shallow.get("error")}
            continue
        found[label] = {
            f"{kind}_us": 1e6 * (deep[f"{kind}_s"] - shallow[f"{kind}_s"]) / (layers - fewer) for kind in ("burst", "sustained")
        } | {"step_ms": 1e3 * deep["burst_s"], "watts": deep["watts"]}
    return found


def measure(config: ModelConfig, plan: PipelinePlan, num_layers: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Seconds per step of every variant at one depth."""
    config = dataclasses.replace(config, num_layers=num_layers)
    mesh, dtype = make_mesh(plan.tp), jnp.dtype(args.dtype)
    layout = dataclasses.replace(parallel_layout(config, plan.tp), gathered_o_proj=plan.partition == "all_gather")
    batch, num_pages = steady_batch(config, plan, args.context, args.prompt, args.page_size)
    parameters = random_parameters(config, layout, mesh, dtype, seed=0)
    graph, weights = nnx.split(build_decoder(config, layout, parameters))
    last_tokens = jnp.zeros(plan.b_dense, jnp.int32)
    packed = jnp.asarray(pack(batch))
    device = mesh.devices.flat[0]
    on_gpu = device.platform == "gpu"
    found: dict[str, dict[str, Any]] = {}
    for variant in variants(on_gpu, args.kernels or best_choice(device)):
        step = step_function(
            config, layout, mesh, graph, batch.shape, plan=None if variant.mode == "sequential" else plan, mode=variant.mode,
            kernels=variant.kernels, num_sms=plan.num_sms, on_gpu=on_gpu,
        )  # fmt: skip
        cache = create_kv_cache(config, layout, mesh, num_pages=num_pages, page_size=args.page_size, dtype=dtype)
        try:
            found[variant.label] = _time(step, weights, cache, last_tokens, packed, args.seconds, on_gpu)
        except Exception as error:  # reported in the mode's row; the other modes still run
            found[variant.label] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(f"{num_layers} layers, {variant.label}: {found[variant.label]}", flush=True)
    return found


def _time(
    step: Any, weights: Any, cache: KVCache, last_tokens: jax.Array, packed: jax.Array, seconds: float, on_gpu: bool
) -> dict[str, float]:
    """Compiles and runs one variant; the cache goes from step to step as in the engine."""
    start = time.perf_counter()
    run = step.lower(weights, cache, last_tokens, packed).compile()
    compile_s = time.perf_counter() - start

    def steps(count: int) -> float:
        nonlocal cache
        begun = time.perf_counter()
        for _ in range(count):
            row_logits, cache = run(weights, cache, last_tokens, packed)
        row_logits.block_until_ready()
        return (time.perf_counter() - begun) / count

    steps(2)
    burst_s = statistics.median(steps(_BURST_STEPS) for _ in range(5))
    with _Power(on_gpu) as power:
        sustained_s = steps(max(1, round(seconds / burst_s)))
    return {"burst_s": burst_s, "sustained_s": sustained_s, "watts": power.mean_watts, "compile_s": compile_s}


def variants(on_gpu: bool, kernels: KernelChoice) -> list[Variant]:
    """On GPUs sequential execution is shown with either GEMM; modes with SM budgets need ours."""
    if not on_gpu:
        return [Variant(mode, kernels) for mode in ("sequential", "nano", "xla", "streams")]
    budgeted: list[ExecutionMode] = ["sequential", "nano", "xla", "streams"]
    return [Variant("sequential", "cublas"), *(Variant(mode, "mosaic") for mode in budgeted), Variant("xla", "cublas")]


def steady_batch(config: ModelConfig, plan: PipelinePlan, context: int, prompt: int, page_size: int) -> tuple[Batch, int]:
    """A full batch of the plan's mix with pages in shuffled order, and the pages that its pool must have."""
    rng = np.random.default_rng(0)
    room = plan.b_dense - plan.decode_tokens
    q_lens = [1] * plan.decode_tokens + [prompt] * (room // prompt) + ([room % prompt] if room % prompt else [])
    kv_lens = np.array([context] * plan.decode_tokens + q_lens[plan.decode_tokens :], np.int32)
    pages_per_seq = -(-int(kv_lens.max()) // page_size)
    batch = empty_batch(BatchShape(plan.b_dense, plan.b_dense, pages_per_seq))
    owned = -(-kv_lens // page_size)
    pages = rng.permutation(np.arange(1, 1 + int(owned.sum()), dtype=np.int32))
    rows = len(q_lens)
    tables = np.arange(pages_per_seq) < owned[:, None]
    batch.block_tables[:rows][tables] = pages
    batch.num_decode[...] = plan.decode_tokens
    batch.q_lens[:rows], batch.kv_lens[:rows] = q_lens, kv_lens
    batch.q_starts[:rows] = np.cumsum([0, *q_lens])[:-1]
    batch.sequence_rows[:rows] = np.arange(rows)
    row = np.repeat(np.arange(rows), q_lens)
    batch.positions[:] = np.arange(plan.b_dense) - np.repeat(batch.q_starts[:rows] - kv_lens + q_lens, q_lens)
    page, offset = np.divmod(batch.positions, page_size)
    batch.slots[:] = batch.block_tables[row, page] * page_size + offset
    batch.token_ids[:] = rng.integers(0, config.vocab_size, plan.b_dense)
    return batch, 1 + len(pages)


class _Power:
    """Mean power draw of the first GPU over a with-block, by NVML's energy counter; nan without a GPU."""

    def __init__(self, on_gpu: bool):
        self.mean_watts = float("nan")
        self._handle = None
        if on_gpu:
            import pynvml  # pyright: ignore[reportMissingImports]

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)

    def __enter__(self) -> "_Power":
        self._start = self._reading()
        return self

    def __exit__(self, *_: object) -> None:
        (joules, seconds), (joules_before, seconds_before) = self._reading(), self._start
        self.mean_watts = (joules - joules_before) / (seconds - seconds_before)

    def _reading(self) -> tuple[float, float]:
        if self._handle is None:
            return float("nan"), time.perf_counter()
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3, time.perf_counter()


def print_table(report: dict) -> None:
    print(f"{report['model']} on {report['device']} x {report['tp']}: {report['b_dense']} tokens, {report['decode_tokens']} "
          f"decoding at {report['context']} tokens; predicted {report['predicted_sequential_us']:.0f} us sequential, "
          f"{report['predicted_period_us']:.0f} us by the plan")  # fmt: skip
    print(f"{'mode':24}{'burst us/layer':>16}{'sustained':>12}{'speed-up':>10}{'sustained':>11}{'W':>7}")
    sequential = [times for label, times in report["modes"].items() if label.startswith("sequential") and "error" not in times]
    best = {kind: min((times[kind] for times in sequential), default=float("nan")) for kind in ("burst_us", "sustained_us")}
    for label, times in report["modes"].items():
        if "error" in times:
            print(f"{label:24}  {times['error']}")
            continue
        burst, sustained = times["burst_us"], times["sustained_us"]
        print(f"{label:24}{burst:16.1f}{sustained:12.1f}{best['burst_us'] / burst:10.3f}"
              f"{best['sustained_us'] / sustained:11.3f}{times['watts']:7.0f}")  # fmt: skip


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nanoflow_jax.compare", description="One step in every mode.")
    parser.add_argument("--plan", type=Path, required=True, help="a plan of python -m search plan")
    parser.add_argument("--model", help="a preset (default: the plan's)")
    parser.add_argument("--layers", type=int, default=6, help="depth of the deeper model (default %(default)s)")
    parser.add_argument("--fewer-layers", type=int, default=2, help="depth of the other (default %(default)s)")
    parser.add_argument("--context", type=int, default=1280, help="tokens of a decoding sequence (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens per KV page (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default %(default)s)")
    parser.add_argument("--kernels", choices=("reference",), help="on CPUs; GPUs show those that apply")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a sustained run (default %(default)s)")
    args = parser.parse_args(argv)
    if not 0 < args.fewer_layers < args.layers:
        parser.error(f"--fewer-layers {args.fewer_layers} must lie between 0 and --layers {args.layers}")
    return args


if __name__ == "__main__":
    main()

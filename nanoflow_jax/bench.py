"""Offline throughput: `python -m nanoflow_jax.bench --model smollm2 --input 64 --output 64 --requests 16`.

All requests are there from the start, with random tokens for prompts and outputs that run to their full length. Two rates are
reported: the whole run, from the first step to the last token, and the steady state, the steps in which requests still waited
for admission after the first had finished; a run too short to have one says so. Steps are also told apart by what they computed
(prefill: prompts only; mixed; decode: outputs only) and by how many sequences decoded, and on a GPU a profile of some says how
long it idled between which kernels. Times are the host's: form and consume are scheduling, launch is upload and dispatch (on a
CPU the device shares its cores), wait is the time that the host has nothing to do but wait for the device.

`--workload multi-round` serves conversations of several rounds instead, with and without prefix reuse in one run.

`--peer-python PYTHON` runs the same load through Hugging Face transformers in another interpreter, before this process touches
the device, with as many threads as there are cores for us; see bench_transformers.py for what PYTHON must have.

The table is for people; the last line of standard output is one JSON object.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import get_args

import jax
import numpy as np
from tqdm import tqdm

from nanoflow_jax.checkpoints import read_config, resolve_smollm2
from nanoflow_jax.compare.step_trace import StepTrace
from nanoflow_jax.config import PRESETS
from nanoflow_jax.executor.runner import RunnerConfig
from nanoflow_jax.executor.step import ExecutionMode
from nanoflow_jax.kernels import KernelChoice
from nanoflow_jax.kv_cache import claim_device_memory, free_device_bytes
from nanoflow_jax.plan import PlanSet
from nanoflow_jax.plan_files import read_plans
from nanoflow_jax.runtime import multi_round
from nanoflow_jax.runtime.engine import Engine, EngineStats
from nanoflow_jax.runtime.kv_tiers import add_tier_arguments, tier_options
from nanoflow_jax.runtime.llm import LLM
from nanoflow_jax.runtime.plan_choice import default_mode, largest_b_dense, resolve_mode
from nanoflow_jax.runtime.request import Request, SamplingParams
from nanoflow_jax.runtime.sizing import DoesNotFitError, complete_sizes, pool_tokens, serving_sizes, sizes_from, steady_sizes
from nanoflow_jax.runtime.step_records import HOST_PARTS, StepRecord, shares, summarise
from nanoflow_jax.runtime.step_tables import print_shares, print_table


def main(argv: list[str] | None = None) -> None:
    args = _parse(argv)
    claim_device_memory(args.tp_size)
    conversations = multi_round.draw_lengths(args) if args.workload == "multi-round" else []
    longest = max(each.total for each in conversations) if conversations else args.input + args.output
    if args.model in PRESETS and longest > PRESETS[args.model].max_context:
        raise SystemExit(f"{longest} tokens do not fit the context of {args.model}, {PRESETS[args.model].max_context}")
    peer = run_peer(args) if args.peer_python else None
    begun = time.perf_counter()
    try:
        llm = load(args, args.max_context or longest)
    except (ValueError, OSError, MemoryError) as error:
        raise SystemExit(f"error: {error}") from error
    ready_s = time.perf_counter() - begun
    try:
        report = measure(llm, args, conversations)
    except DoesNotFitError as error:
        raise SystemExit(f"error: {error}") from error
    report |= {"workload": args.workload, "ready_s": ready_s, **_setting(llm, args)}
    if conversations:
        multi_round.print_table(report)
    else:
        report["peer"] = peer
        print_table(report)
        print_shares(report["shares"])
        print(
            f"{report['planned_steps']} steps by a plan; ready to serve after {ready_s:.0f} s, "
            f"{report['num_compilations']} programs compiled"
        )
    print(json.dumps(report))


def load(args: argparse.Namespace, max_context: int) -> LLM:
    """The engine that the options ask for, compiled; `mode` and `trace_steps`, if left open, are settled in `args`.

    Raises:
      ValueError, OSError, MemoryError: the model, a plan or a size will not do.
    """
    plans = read_plans(args.plan) if args.plan else None
    if args.trace_steps is None:
        args.trace_steps = 20 if jax.default_backend() == "gpu" else 0
    args.mode = args.mode or default_mode(plans)
    if args.mode == "auto":
        config = read_config(args.model, args.models_dir)
        args.mode, plans = resolve_mode("auto", plans, config, jax.devices()[0], args.tp_size)
    return LLM(
        args.model,
        random_weights=args.random_weights,
        seed=args.seed,
        dtype=args.dtype,
        tp_size=args.tp_size,
        options=RunnerConfig(
            **sizes_for(args, plans, free_device_bytes(jax.devices()[0])),
            step_sizes=args.step_sizes,
            num_pages=args.num_pages,
            memory_fraction=args.memory_fraction,
            max_context=max_context,
            mode=args.mode,
            plans=plans,
            kernels=args.kernels,
            kv_offload="both" if args.kv_host_gb else "off",
            greedy_only=True,
        ),
        cache_dir=args.cache_dir,
        sync=args.sync,
        models_dir=args.models_dir,
        progress=_progress_bar(),
    )


def measure(llm: LLM, args: argparse.Namespace, conversations: list[multi_round.Lengths]) -> dict:
    """The report of the conversations, or without any of requests of one length.

    Raises:
      DoesNotFitError: one of them is too long.
    """
    if conversations:
        return multi_round.measure(llm.engine.runner, conversations, seed=args.seed, sync=args.sync, tiers=tier_options(args))
    return bench_uniform(llm, args)


def sizes_for(args: argparse.Namespace, plans: PlanSet | None, free: int | None) -> dict[str, int]:
    """b_dense, max_sequences and page_size: as told, else the plans', what keeps a GPU's memory full, a server's.

    Args:
      free: bytes of a GPU's memory before the weights are there; None on a CPU.
    """
    sizes = serving_sizes(on_gpu=free is not None)
    if free is not None and args.model in PRESETS and args.workload == "uniform":
        tokens = pool_tokens(PRESETS[args.model], args.tp_size, free, itemsize=2)
        sizes |= dataclasses.asdict(steady_sizes(tokens, args.input, args.output))
    told = {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}
    return complete_sizes(sizes, largest_b_dense(plans), told)


def bench_uniform(llm: LLM, args: argparse.Namespace) -> dict:
    """The report of requests of one length."""
    requests = make_requests(llm.engine, args.requests, args.input, args.output, args.seed)
    trace = StepTrace(args.trace_steps) if args.trace_steps else None
    records = run(llm.engine, requests, trace)
    report = summarise(records, llm.engine.stats())
    return report | {
        "gpu_idle": trace.idle if trace else None,
        "shares": shares(records, llm.engine.runner.max_sequences),
        "requests": args.requests,
        "input_tokens": args.input,
        "output_tokens": args.output,
        "planned_steps": llm.engine.stats().planned_steps,
    }


def _setting(llm: LLM, args: argparse.Namespace) -> dict:
    """What was measured, and on what."""
    return {
        "model": llm.engine.runner.config.name,
        "random_weights": args.random_weights,
        "stepping": "sync" if args.sync else "async",
        "mode": args.mode,
        "shapes": [[s.num_tokens, s.num_rows, s.pages_per_seq] for s in llm.engine.runner.shapes],
        **environment(args.tp_size),
    }


def run_peer(args: argparse.Namespace) -> dict:
    """The report of bench_transformers.py on the same load.

    Raises:
      subprocess.CalledProcessError: it fails; its own words are on standard error.
    """
    model = resolve_smollm2(args.models_dir) if args.model == "smollm2" else Path(args.model)
    load = {"--input": args.input, "--output": args.output, "--requests": args.requests, "--seed": args.seed}
    # -I keeps the script's folder off the import path, where our modules would hide packages of the same names.
    command = [
        args.peer_python,
        "-I",
        Path(__file__).with_name("bench_transformers.py"),
        model,
        "--threads",
        len(os.sched_getaffinity(0)),
    ]
    command += [word for pair in load.items() for word in pair]
    done = subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def make_requests(engine: Engine, count: int, input_tokens: int, output_tokens: int, seed: int) -> list[Request]:
    """Random prompts of one length; outputs run to theirs.

    Raises:
      DoesNotFitError: prompt and output do not fit the context or the pool.
    """
    limits = engine.limits
    if limits.output_limit(input_tokens, output_tokens) < output_tokens:
        raise DoesNotFitError(
            f"{input_tokens} tokens in and {output_tokens} out do not fit: "
            f"the context is {limits.max_context}, the pool holds {limits.pool_tokens}"
        )
    prompts = np.random.default_rng(seed).integers(0, limits.vocab_size, (count, input_tokens))
    params = SamplingParams(max_tokens=output_tokens, ignore_eos=True)
    return [
        Request(request_id=f"bench-{i}", prompt_token_ids=prompt.tolist(), params=params, stream=False)
        for i, prompt in enumerate(prompts)
    ]


def run(engine: Engine, requests: list[Request], trace: StepTrace | None = None) -> list[StepRecord]:
    """Runs one request to touch everything once, then all of them, recording every step.

    Args:
      trace: profiles steps from the first finished request on; that time is not in the records.
    """
    warm = Request(
        request_id="warm-up", prompt_token_ids=[0], params=SamplingParams(max_tokens=3, ignore_eos=True), stream=False
    )
    engine.add(warm)
    while engine.busy:
        engine.step()
    for request in requests:
        engine.add(request)
    records = []
    launched = (0, 0, False)
    finished = False
    before = engine.stats()
    with tqdm(total=len(requests), unit="request", mininterval=0.5) as bar, trace or contextlib.nullcontext():
        while engine.busy:
            if trace is not None and finished:
                trace.before_step()
            start = time.perf_counter()
            events = engine.step()
            total_s = time.perf_counter() - start
            after = engine.stats()
            # In asynchronous mode a call reads the step that the call before launched.
            previous, launched = launched, _launched(before, after)
            computed = launched if engine.sync else previous
            output_tokens = after.output_tokens - before.output_tokens
            parts = {part: getattr(after, part) - getattr(before, part) for part in HOST_PARTS}
            records.append(StepRecord(*computed, output_tokens, after.waiting, len(events), total_s, **parts))
            before = after
            finished = finished or bool(events)
            bar.update(len(events))
    return records


def _launched(before: EngineStats, after: EngineStats) -> tuple[int, int, bool]:
    """Prompt and decode tokens that the step launched in between computes, and whether it does so by a plan."""
    prompt = after.prefill_tokens - before.prefill_tokens
    return prompt, after.batch_tokens - before.batch_tokens - prompt, after.planned_steps > before.planned_steps


def environment(tp_size: int) -> dict:
    """What a number must be read with: devices, versions, commit."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "tp_size": tp_size,
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "nanoflow_jax": _installed_version(),
        "commit": _commit(),
    }


def _installed_version() -> str | None:
    """None when run from a checkout that is not installed."""
    try:
        return metadata.version("nanoflow-jax")
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checked out commit, None outside a repository."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _progress_bar() -> Callable[[str, int, int], None]:
    bars: list[tqdm] = []  # none before there is something to report

    def report(what: str, done: int, total: int) -> None:
        if not bars:
            bars.append(tqdm(total=total, bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} {desc}", leave=False))
        bar = bars[0]
        bar.total, bar.n = total, done
        bar.set_description_str(what)
        if done >= total:
            bar.clear()

    return report


def _parse(argv: list[str] | None) -> argparse.Namespace:
    defaults, on_gpu = RunnerConfig(), serving_sizes(on_gpu=True)
    parser = argparse.ArgumentParser(prog="python -m nanoflow_jax.bench", description="Offline throughput of a model.")
    parser.add_argument("--model", required=True, help="smollm2, a checkpoint's path, or a preset (with --random-weights)")
    parser.add_argument("--random-weights", action="store_true", help="make weights on the device instead of reading them")
    parser.add_argument("--models-dir", type=Path, help="where downloaded models are kept")
    parser.add_argument("--workload", default="uniform", choices=("uniform", "multi-round"), help="(default %(default)s)")
    parser.add_argument("--input", type=int, metavar="N", help="tokens per prompt (default 512, or a trace's)")
    parser.add_argument("--output", type=int, metavar="N", help="tokens per output (default 512, or a trace's)")
    parser.add_argument(
        "--requests", type=int, default=256, metavar="K", help="requests, or conversations (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and random weights (default %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default %(default)s)")
    parser.add_argument("--tp-size", type=int, default=1, help="devices to divide the model over (default %(default)s)")
    parser.add_argument("--b-dense", type=int, help="tokens per step (default: on a GPU from its memory)")
    parser.add_argument("--step-sizes", type=sizes_from, metavar="N,N,..", help="tokens of the steps to compile")
    parser.add_argument("--max-sequences", type=int, help="requests running at once (default: on a GPU from its memory)")
    parser.add_argument(
        "--page-size", type=int, help=f"tokens per KV page (default {defaults.page_size}, on a GPU {on_gpu['page_size']})"
    )
    parser.add_argument("--num-pages", type=int, help="size of the KV pool (default: from free memory)")
    parser.add_argument(
        "--memory-fraction",
        type=float,
        default=defaults.memory_fraction,
        help="share of free device memory for the KV pool (default %(default)s)",
    )
    parser.add_argument("--max-context", type=int, help="prompt plus output tokens (default: what the workload needs)")
    parser.add_argument(
        "--mode",
        choices=("auto", *get_args(ExecutionMode)),
        help="how steps are executed; auto: by --plan, else by the plans shipped for model and device; the others but "
        "sequential need --plan (default: sequential, auto with --plan)",
    )
    parser.add_argument("--plan", type=Path, help="a plan or plan set of python -m search")
    parser.add_argument(
        "--kernels",
        default=defaults.kernels,
        choices=("auto", *get_args(KernelChoice)),
        help="auto: the best for the device (default)",
    )
    parser.add_argument("--cache-dir", type=Path, help="keep compiled steps there")
    parser.add_argument(
        "--trace-steps",
        type=int,
        metavar="N",
        help="profile so many steps for the GPU's idle time (default: 20 on a GPU, else 0)",
    )
    parser.add_argument("--sync", action="store_true", help="read each step's tokens before the next step is formed")
    parser.add_argument("--peer-python", metavar="PYTHON", help="also run transformers, in this interpreter, on the same load")
    multi_round.add_arguments(parser)
    add_tier_arguments(parser.add_argument_group("memory tiers", "with --workload multi-round"))
    args = parser.parse_args(argv)
    for name in ("input", "output", "requests", "rounds", "message"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if not args.scale > 0:
        parser.error(f"--scale {args.scale} must be positive")
    try:
        if tier_options(args) is not None and args.workload != "multi-round":
            parser.error("memory tiers are measured with --workload multi-round")
    except ValueError as error:
        parser.error(str(error))
    if args.workload == "multi-round" and args.peer_python:
        parser.error("--peer-python runs the uniform workload only")
    if args.workload == "uniform":
        args.input, args.output = args.input or 512, args.output or 512
    if args.peer_python and (args.random_weights or args.model in PRESETS):
        parser.error("--peer-python needs a model with weights")
    return args


if __name__ == "__main__":
    main()

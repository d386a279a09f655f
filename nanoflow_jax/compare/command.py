"""The command: finds or reads the plan, compiles, measures mode after mode, and writes table, pictures and traces.

The table is for people and grows by a row as each mode is done; progress goes to standard error; the last line of standard
output is one JSON object, which `--out` also keeps up to date on disk.
"""

import argparse
import concurrent.futures
import contextlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from nanoflow_jax.compare import names, overlap, pictures, report
from nanoflow_jax.compare.measure import TRACED_STEPS, Bench, Compiled, Key, Setup, Variant, compile_all, progress, variants
from nanoflow_jax.compare.schedule import read_schedule
from nanoflow_jax.compare.searched import SearchError, find_plan, optimal_throughput
from nanoflow_jax.compare.trace import Event, NoDeviceTraceError, by_device, read_events
from nanoflow_jax.config import preset
from nanoflow_jax.executor.phases import group
from nanoflow_jax.executor.step import ExecutionMode
from nanoflow_jax.kernels import kernels_for
from nanoflow_jax.parallel import device_name
from nanoflow_jax.plan import PipelinePlan, PlanError
from nanoflow_jax.plan_files import decode_plan
from nanoflow_jax.workload import Workload, WorkloadError, parse_workload, steady_mix

# Of a time limit, what may pass until measuring starts although some modes still compile.
_COMPILE_SHARE = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the comparison; 2 and a message on standard error for input that cannot be served, 1 if no mode was measured."""
    args = _parse(argv)
    begun = time.monotonic()
    deadline = begun + args.time_limit if args.time_limit else math.inf
    try:
        with tempfile.TemporaryDirectory() as scratch:
            out = args.out or Path(scratch)
            out.mkdir(parents=True, exist_ok=True)
            if args.compile_cache:
                _enable_compilation_cache(args.compile_cache)
            setup, optimal = _prepare(args, out)
            bench = Bench(setup)
            record = _run(bench, optimal, args, out, begun, deadline)
    except (SearchError, PlanError, ValueError, OSError) as error:
        progress(f"error: {error}")
        return 2
    print(json.dumps(record))
    return 0 if any("error" not in row for row in record["modes"].values()) else 1


def _prepare(args: argparse.Namespace, out: Path) -> tuple[Setup, dict[str, Any]]:
    """What to compare, and the optimal throughput as data."""
    device = jax.devices()[0]
    if args.plan:
        plans = _read_plans(args)
    else:
        hardware = args.hardware or device_name(device)
        progress(f"searching a plan for {args.model} on {args.tp} x {hardware}")
        found = find_plan(
            args.model, hardware, args.tp, args.b_dense, args.workload, profile=args.profile, shares=args.shares,
            out=out / "plan.json",
        )  # fmt: skip
        plans = {"": decode_plan(found)}
    model = next(iter(plans.values())).model
    setup = Setup(
        config=preset(model), plans=plans, workload=args.workload, depths=(args.fewer_layers, args.layers),
        page_size=args.page_size, dtype=jnp.dtype(args.dtype),
    )  # fmt: skip
    return setup, _optimal(setup, device_name(device))


def _read_plans(args: argparse.Namespace) -> dict[str, PipelinePlan]:
    """The plans by their files' names, which one alone does not need.

    Raises:
      PlanError: a file is no plan, or one for something else than was asked for or than the first is for.
      ValueError: two files have one name.
    """
    plans: dict[str, PipelinePlan] = {}
    for path in args.plan:
        try:
            plan = decode_plan(path.read_bytes())
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        _check_fits(plan, path, args)
        name = path.stem if len(args.plan) > 1 else ""
        if name in plans:
            raise ValueError(f"two plans are named {name}: {', '.join(map(str, args.plan))}")
        plans[name] = plan
        first = next(iter(plans.values()))
        for what in ("model", "device", "tp", "b_dense", "decode_tokens", "num_sms"):
            if getattr(plan, what) != getattr(first, what):
                raise PlanError(f"{path} has {what}={getattr(plan, what)}, {args.plan[0]} has {getattr(first, what)}")
        if (plan.partition == "all_gather") != (first.partition == "all_gather"):
            raise PlanError(f"{path} divides o_proj for {plan.partition}, {args.plan[0]} for {first.partition}")
    return plans


def _check_fits(plan: PipelinePlan, path: Path, args: argparse.Namespace) -> None:
    wanted = {"model": args.model, "tp": args.tp, "b_dense": args.b_dense}
    if plan.decode_context is None:
        wanted["decode_tokens"] = steady_mix(args.workload, plan.b_dense).decode_tokens
    else:  # how many decode is the plan's to say, how long their contexts are the workload's
        wanted["decode_context"] = args.workload.decode_context
    for field, value in wanted.items():
        if value is not None and getattr(plan, field) != value:
            raise PlanError(f"{path} has {field}={getattr(plan, field)}, asked for {value} (workload {args.workload})")


def _optimal(setup: Setup, at_hand: str) -> dict[str, Any]:
    """Compute / 2P on the plan's device; without a figure where the device at hand is another."""
    plan = setup.plan
    if plan.device != at_hand:
        return {"tokens_per_s_per_gpu": None, "why": f"the plan is for {plan.device}, this is {at_hand}"}
    throughput, rate = optimal_throughput(plan.model, plan.device, plan.tp, plan.b_dense, setup.workload)
    flops = throughput * 2 * setup.config.active_params
    return {"tokens_per_s_per_gpu": throughput, "compute_tflops": flops / 1e12, "rate": rate}


def _enable_compilation_cache(directory: Path) -> None:
    """Keeps what XLA compiles on disk, so that it compiles no program twice. Process-wide; call it first."""
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _run(
    bench: Bench, optimal: dict[str, Any], args: argparse.Namespace, out: Path, begun: float, deadline: float
) -> dict[str, Any]:
    setup, plan = bench.setup, bench.setup.plan
    rows = variants(bench.on_gpu, args.kernels or bench.default_kernels, args.modes, setup.plans)
    width = max(len(variant.label) for variant in rows)
    record: dict[str, Any] = {
        "model": plan.model, "device": bench.devices[0].device_kind, "tp": plan.tp, "b_dense": plan.b_dense,
        "decode_tokens": plan.decode_tokens, "workload": str(setup.workload), "context": int(setup.workload.decode_context),
        "layers": list(setup.depths), "model_layers": setup.config.num_layers, "optimal": optimal, "jax": jax.__version__,
        "modes": {},
    }  # fmt: skip
    progress(f"compiling {len(rows)} modes at {setup.depths[0]} and {setup.depths[1]} layers in {args.compile_threads} threads")
    futures, pool = compile_all(bench, rows, args.compile_threads)
    try:
        patience = None if math.isinf(deadline) else max(0.0, _COMPILE_SHARE * args.time_limit - (time.monotonic() - begun))
        concurrent.futures.wait(futures.values(), patience)
        record["ready_s"] = time.monotonic() - begun
        if time.monotonic() < deadline:
            bench.fill()
        print(f"{report.title(record)}\n{report.header(width)}", flush=True)
        expected: tuple[str, np.ndarray] | None = None
        for variant in rows:
            row, logits = _measure_row(bench, variant, futures, optimal, args, out, deadline)
            if logits is not None:
                expected = (variant.label, logits) if expected is None else expected
                row["logits"] |= {"compared_with": expected[0], "difference": report.difference(logits, expected[1])}
            record["modes"][variant.label] = row
            print("\n".join(report.lines(variant.label, row, record["modes"], width)), flush=True)
            (out / "report.json").write_text(json.dumps(record, indent=1))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    record["wall_s"] = time.monotonic() - begun
    (out / "report.json").write_text(json.dumps(record, indent=1))
    return record


def _measure_row(
    bench: Bench,
    variant: Variant,
    futures: dict[Key, concurrent.futures.Future[Compiled]],
    optimal: dict[str, Any],
    args: argparse.Namespace,
    out: Path,
    deadline: float,
) -> tuple[report.Row, np.ndarray | None]:
    """One mode at both depths, and its logits; whatever goes wrong belongs to its row, and the next mode still runs."""
    left = deadline - time.monotonic()
    if left <= 0:
        return {"error": f"not started: the time limit of {args.time_limit:g} s has passed"}, None
    begun = time.monotonic()
    try:
        compiled = {}
        for depth in bench.setup.depths:
            remaining = None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())
            compiled[depth] = futures[variant, depth].result(remaining)
        others = sum(not future.done() for future in futures.values())
        row, logits = _measured(bench, variant, compiled, optimal, args, out)
    except TimeoutError:
        return {"error": f"not started: it was still compiling when the time limit of {args.time_limit:g} s passed"}, None
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:400]}"}, None
    row["compile_s"] = {str(depth): round(one.seconds, 2) for depth, one in compiled.items()}
    row["beside_compiles"] = others
    progress(f"measured {variant.label} in {time.monotonic() - begun:.1f} s")
    return row, logits


def _measured(
    bench: Bench, variant: Variant, compiled: dict[int, Compiled], optimal: dict[str, Any], args: argparse.Namespace, out: Path
) -> tuple[report.Row, np.ndarray]:
    progress(f"measuring {variant.label}")
    bench.fill_pool()
    deep = max(compiled)
    bench.steps(compiled[deep].run, deep, 1)
    logits = bench.last_logits()
    timings = {depth: bench.time(compiled[depth].run, depth, args.seconds) for depth in sorted(compiled)}
    row = report.figures(bench.setup, timings, optimal["tokens_per_s_per_gpu"])
    row["predicted_period_us"] = bench.setup.predicted_us(variant)
    row["logits"] = {"repeats": logits.tobytes() == bench.last_logits().tobytes()}
    with contextlib.ExitStack() as stack:
        if args.keep_xplane:
            folder = out / f"{variant.file_name}-xplane"
            shutil.rmtree(folder, ignore_errors=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for depth, one in compiled.items():
            bench.trace(one.run, depth, folder / str(depth))
        if args.keep_xplane:
            (folder / "schedule.txt").write_text(compiled[max(compiled)].run.as_text())
        try:
            row["overlap"] = _overlap(bench, variant, compiled, folder, row, args, out)
        except NoDeviceTraceError as error:
            row["overlap"] = {"unavailable": str(error)}
    return row, logits


def _overlap(
    bench: Bench,
    variant: Variant,
    compiled: dict[int, Compiled],
    folder: Path,
    row: report.Row,
    args: argparse.Namespace,
    out: Path,
) -> dict[str, Any]:
    """Overlap from the traces of both depths; draws the deep one."""
    shallow, deep = sorted(compiled)
    events = {depth: read_events(folder / str(depth)) for depth in compiled}
    busy = {depth: overlap.measure(of_depth, TRACED_STEPS) for depth, of_depth in events.items()}
    layer = busy[deep].per_layer(busy[shallow], deep - shallow)
    plan = bench.setup.of(variant)
    phases = group(plan, deep) if plan and variant.mode in ("streams", "fused") else None
    text = compiled[deep].run.as_text()
    if args.out:
        _draw(bench, variant, events[deep], text, row, out)
    schedule = read_schedule(text)
    return overlap.record(layer, events[deep], phases=phases, schedule=schedule, num_sms=bench.setup.plan.num_sms)


def _draw(bench: Bench, variant: Variant, events: Sequence[Event], text: str, row: report.Row, out: Path) -> None:
    setup, deep = bench.setup, max(bench.setup.depths)
    plan = setup.of(variant)
    expected: names.Expected = {}
    if plan is None:
        reduce_in_gemm = kernels_for(variant.kernels)(setup.plan.num_sms).reduces_in_gemm
        expected = names.sequential_kernels(setup.at(deep), bench.layout, reduce_in_gemm=reduce_in_gemm)
    elif variant.mode == "fused":
        expected = names.fused_kernels(plan, deep)
    elif variant.mode != "xla":  # what XLA is free to order has no order to match
        expected = names.planned_kernels(plan, deep)
    scoped = names.scopes(text)
    devices = by_device(events)
    labels = {}
    for of_device in devices.values():
        labels |= names.label_events(of_device, expected, TRACED_STEPS, scoped)
    first = devices[min(devices)]
    period_us = row["burst"]["period_us"] or 1e3 * row["burst"]["deep_step_ms"] / deep
    window = pictures.middle_of_step(first, TRACED_STEPS, deep * period_us, 2 * period_us)
    title = f"{setup.plan.model}, {variant.label}: two layers of {period_us:.0f} us mid-step; bar height and number: SMs"
    pictures.draw(first, labels, window, num_sms=setup.plan.num_sms, title=title, path=out / f"{variant.file_name}.png")
    pictures.write_perfetto(events, labels, out / f"{variant.file_name}.trace.json.gz")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m nanoflow_jax.compare", description="One step in every mode.")
    parser.add_argument("--model", help="a preset, such as llama3-8b")
    parser.add_argument("--tp", type=int, help="tensor-parallel ranks (default 1)")
    parser.add_argument("--b-dense", type=int, help="tokens of the step, a multiple of 128")
    parser.add_argument(
        "--workload", type=_workload, default="1024:512", help="PROMPT:OUTPUT in tokens or a trace (default %(default)s)"
    )
    parser.add_argument(
        "--plan", type=Path, nargs="+", help="plans of python -m search, all of one batch (default: the search finds one)"
    )
    parser.add_argument("--hardware", help="what the search plans for (default: the device at hand)")
    parser.add_argument(
        "--profile", default="analytic", help="of the search: 'analytic' or a profile file (default %(default)s)"
    )
    parser.add_argument("--shares", default="constant", help="of the search: constant or phased (default %(default)s)")
    known = get_args(ExecutionMode)
    parser.add_argument("--modes", type=_modes, default=known, help=f"comma-separated, of {', '.join(known)} (default: all)")
    parser.add_argument("--out", type=Path, help="folder for report.json, plan, pictures and Perfetto traces")
    parser.add_argument("--keep-xplane", action="store_true", help="leave the profiler's own files in --out, too")
    parser.add_argument("--time-limit", type=float, help="seconds after which no further mode starts")
    parser.add_argument("--compile-threads", type=int, default=8, help="(default %(default)s)")
    parser.add_argument("--compile-cache", type=Path, help="folder that keeps compiled executables")
    parser.add_argument("--layers", type=int, default=6, help="depth of the deeper model (default %(default)s)")
    parser.add_argument("--fewer-layers", type=int, default=2, help="depth of the other (default %(default)s)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens per KV page (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default %(default)s)")
    parser.add_argument("--kernels", choices=("reference",), help="on CPUs; GPUs show those that apply")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a sustained run (default %(default)s)")
    args = parser.parse_args(argv)
    if not 0 < args.fewer_layers < args.layers:
        parser.error(f"--fewer-layers {args.fewer_layers} must lie between 0 and --layers {args.layers}")
    if args.plan is None:
        if args.model is None or args.b_dense is None:
            parser.error("without --plan, --model and --b-dense are needed")
        args.tp = args.tp or 1
    if args.keep_xplane and args.out is None:
        parser.error("--keep-xplane needs --out")
    if args.time_limit is not None and args.time_limit <= 0:
        parser.error(f"--time-limit {args.time_limit} must be positive")
    if args.compile_threads < 1:
        parser.error(f"--compile-threads {args.compile_threads} must be positive")
    return args


def _workload(text: str) -> Workload:
    try:
        workload = parse_workload(text)
    except WorkloadError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if workload.prompt_tokens < 1:
        raise argparse.ArgumentTypeError(f"workload {text!r} has no prompt")
    return workload


def _modes(text: str) -> tuple[str, ...]:
    known = get_args(ExecutionMode)
    modes = tuple(text.split(","))
    unknown = [mode for mode in modes if mode not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown modes {', '.join(unknown)}; known: {', '.join(known)}")
    return modes

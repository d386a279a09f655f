"""Command line of the search: `python -m search cost | plan | hand | join | plan-set | simulate | evaluate | profile`."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanoflow_jax import plan as plans
from nanoflow_jax import plan_files
from nanoflow_jax.config import ModelConfig, preset
from nanoflow_jax.workload import BatchMix, Workload, WorkloadError, parse_workload, steady_mix
from search import profile_table
from search.analytic import analytic_profile
from search.cost_model import InfeasibleError, check_batch, check_split, classify, operation_costs
from search.hardware import HardwareError, hardware
from search.plan_set import join_plans, make_plan_set, mixes_of_all_sizes, sequential_times
from search.problem import Costing
from search.profile_table import ProfileError, ProfileTable
from search.report import Progress, cost_table, plan_record, plan_table
from search.simulate import Replay, mix_of, simulate

if TYPE_CHECKING:
    from search.auto_search import Outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; 2 and a message on standard error for input that cannot be served."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except (InfeasibleError, HardwareError, WorkloadError, ProfileError, plans.PlanError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m search", description="Finds nano-batch pipelines.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    def machine(sub: argparse.ArgumentParser, many: bool = False) -> None:
        sub.add_argument("--model", required=True, help="a preset name, such as llama2-70b")
        sub.add_argument("--hardware", required=True, help="a device of the hardware table, such as a100-80g")
        sub.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
        nargs = {"nargs": "+"} if many else {}
        sub.add_argument("--b-dense", type=int, required=True, help="tokens of a step, a multiple of 128", **nargs)
        sub.add_argument("--workload", required=True, help="PROMPT:OUTPUT, sharegpt, lmsys or splitwise", **nargs)

    def solving(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--profile", default="analytic", help="'analytic' or a profile file")
        sub.add_argument("--shares", choices=("constant", "phased", "ideal"), default="constant")
        sub.add_argument("--seed", type=int, default=0)
        sub.add_argument("--work", type=float, default=1.0, help="scales the deterministic limits of the solvers")
        sub.add_argument("--time-limit", type=float, default=60.0, help="seconds after which the best plan so far is taken")
        sub.add_argument("--quiet", action="store_true", help="no progress on standard error")

    machine(command("cost", _cost, "FLOPs, bytes and times of each operation, and what bounds the workload"))
    one = command("plan", _plan, "the best pipeline plan of one batch")
    machine(one)
    solving(one)
    one.add_argument("--out", type=Path, help="where the plan goes (JSON)")
    one.add_argument("--plot", type=Path, help="where the picture goes (svg, png or pdf)")
    hand = command("hand", _hand, "a pipeline by hand, to hold against the search's: two nano-batches, attention beside GEMMs")
    machine(hand)
    hand.add_argument("--profile", default="analytic", help="'analytic' or a profile file")
    hand.add_argument("--decode-tokens", type=int, help="how many of the batch decode; without this the workload's share")
    hand.add_argument("--border", type=int, required=True, help="first token of the second nano-batch, a multiple of 128")
    hand.add_argument("--attention-sms", type=int, required=True, help="SMs of decode attention; GEMMs beside it get the rest")
    hand.add_argument("--out", type=Path, required=True, help="where the plan goes (JSON)")
    join = command("join", _join, "plans, however they came about, as one plan set for the runtime to choose from")
    join.add_argument("plans", type=Path, nargs="+")
    join.add_argument(
        "--profile",
        help="'analytic' or a profile file: replay the plans on it and record sequential times of batches of all sizes",
    )
    join.add_argument(
        "--workload",
        nargs="+",
        help="with --profile: workloads of the plans; batches of all sizes have the first one's contexts",
    )
    join.add_argument("--out", type=Path, required=True, help="where the plan set goes (JSON)")
    several = command("plan-set", _plan_set, "plans for several batch sizes and workloads, and the crossover to sequential")
    machine(several, many=True)
    solving(several)
    several.add_argument("--out", type=Path, required=True, help="where the plan set goes (JSON)")
    replay = command("simulate", _simulate, "replays a plan, or every plan of a set, on a profile and draws it")
    replay.add_argument("plan", type=Path, help="a plan or a plan set")
    replay.add_argument("--workload", nargs="+", default=[], help="of the plans; says what context their prompts, if any, have")
    replay.add_argument("--profile", default="analytic", help="'analytic' or a profile file")
    replay.add_argument("--plot", type=Path, help="where the picture of a single plan goes (svg, png or pdf)")
    table = command("evaluate", _evaluate, "the tables of docs/search.md: all paper models, workloads and split counts")
    table.add_argument("--only", choices=("models", "workloads", "counts", "h200"), nargs="+")
    table.add_argument("--work", type=float, default=1.0)
    table.add_argument("--time-limit", type=float, default=60.0)
    _add_profile(command("profile", _profile, "measures kernels on the GPU at hand into a profile file"))
    return parser


def _add_profile(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--model", required=True)
    sub.add_argument("--hardware", required=True, help="name of this device in the hardware table")
    sub.add_argument("--tp", type=int, default=1)
    sub.add_argument("--b-dense", type=int, default=2048, help="largest batch to measure")
    sub.add_argument("--context", type=int, nargs="+", default=[512, 1024, 2048], help="KV tokens per decoding sequence")
    sub.add_argument("--time-limit", type=float, default=math.inf, help="seconds after which nothing new is begun")
    sub.add_argument("--out", type=Path, required=True, help="profile file; measurements already in it are kept")


def _load_profile(name: str, model: ModelConfig, device: str, tp: int, mixes: Sequence[BatchMix]) -> ProfileTable:
    if name == "analytic":
        return analytic_profile(model, hardware(device), tp, mixes)
    return profile_table.read(Path(name), device, tp)


def _solve(args: argparse.Namespace, model: ModelConfig, table: ProfileTable, mix: BatchMix) -> "Outcome":
    # Imported here because the solvers come with it, which the other commands do not need.
    from search.auto_search import Options, auto_search

    options = Options(shares=args.shares, seed=args.seed, work=args.work, time_limit_s=args.time_limit)
    return auto_search(model, table, mix, options, None if args.quiet else Progress())


def _cost(args: argparse.Namespace) -> None:
    model, device, workload = preset(args.model), hardware(args.hardware), parse_workload(args.workload)
    check_split(model, args.tp)
    mix = steady_mix(workload, args.b_dense)
    costs, verdict = operation_costs(model, mix, args.tp), classify(model, device, args.tp, mix, workload)
    print(f"{model.name} on {args.tp} x {device.name}, {args.b_dense} tokens ({mix.decode_tokens} decoding), {workload.name}\n")
    print(cost_table(costs, verdict, device, args.tp, args.b_dense))
    record = {
        "model": model.name, "hardware": device.name, "tp": args.tp, "b_dense": args.b_dense, "workload": workload.name,
        "t_compute_ms": 1e3 * verdict.t_compute, "t_memory_ms": 1e3 * verdict.t_memory, "t_network_ms": 1e3 * verdict.t_network,
        "bottleneck": verdict.bottleneck, "tr": verdict.tr, "max_b_dense": verdict.budget.max_b_dense,
        "optimal_datasheet": verdict.optimal_datasheet, "optimal_measured": verdict.optimal_measured,
        "operations": {c.name: {"flops": c.flops, "bytes": c.bytes_moved, "network_bytes": c.network_bytes} for c in costs},
    }  # fmt: skip
    print(json.dumps(record))


def _checked_mix(
    model: ModelConfig, device: str, tp: int, workload: Workload, b_dense: int, decode_tokens: int | None = None
) -> BatchMix:
    check_batch(model, hardware(device), tp, workload, b_dense, decode_tokens)
    mix = steady_mix(workload, b_dense)
    return mix if decode_tokens is None else dataclasses.replace(mix, decode_tokens=decode_tokens)


def _plan(args: argparse.Namespace) -> None:
    model = preset(args.model)
    mix = _checked_mix(model, args.hardware, args.tp, parse_workload(args.workload), args.b_dense)
    table = _load_profile(args.profile, model, args.hardware, args.tp, [mix])
    outcome = _solve(args, model, table, mix)
    costing = outcome.costings[outcome.plan.partition]
    simulate(outcome.plan, costing)
    print(plan_table(outcome))
    if args.out:
        args.out.write_bytes(plan_files.encode(outcome.plan))
    if args.plot:
        from search.plots import draw

        draw(outcome.plan, costing, args.plot)
    print(json.dumps(plan_record(outcome.plan, outcome.solve_s)))


def _hand(args: argparse.Namespace) -> None:
    # Imported here because the solvers come with it, which the other commands do not need.
    from search.hand_pipeline import hand_pipeline

    model = preset(args.model)
    mix = _checked_mix(model, args.hardware, args.tp, parse_workload(args.workload), args.b_dense, args.decode_tokens)
    table = _load_profile(args.profile, model, args.hardware, args.tp, [mix])
    partition = "none" if args.tp == 1 else "gemm_all_reduce"
    costing = Costing(model=model, table=table, mix=mix, partition=partition)
    plan = hand_pipeline(costing, args.border, args.attention_sms)
    simulate(plan, costing)
    args.out.write_bytes(plan_files.encode(plan))
    print(json.dumps(plan_record(plan, 0.0)))


def _join(args: argparse.Namespace) -> None:
    found = [plan_files.decode_plan(path.read_bytes()) for path in args.plans]
    if bool(args.profile) != bool(args.workload):
        raise plans.PlanError(f"--profile={args.profile} and --workload={args.workload} go together")
    sequential: list[plans.SequentialTime] = []
    workloads = [parse_workload(w) for w in args.workload or ()]
    if args.profile:
        model, first = preset(found[0].model), found[0]
        mixes = mixes_of_all_sizes(workloads[0], max(plan.b_dense for plan in found))
        sequential = sequential_times(model, _load_profile(args.profile, model, first.device, first.tp, mixes), mixes)
    plan_set = join_plans(found, sequential)
    if args.profile:
        _replay(found, args.profile, workloads)
    args.out.write_bytes(plan_files.encode(plan_set))
    record = {
        "model": plan_set.model, "hardware": plan_set.device, "tp": plan_set.tp, "plans": len(plan_set.plans),
        "crossover_tokens": plan_set.crossover_tokens,
    }  # fmt: skip
    print(json.dumps(record))


def _plan_set(args: argparse.Namespace) -> None:
    model = preset(args.model)
    workloads = [parse_workload(w) for w in args.workload]
    mixes = [_checked_mix(model, args.hardware, args.tp, w, b) for w in workloads for b in sorted(args.b_dense)]
    # The runtime compares plans with sequential execution at the size it really has, so that is recorded for every size.
    sizes = range(plans.TILE, max(args.b_dense) + 1, plans.TILE)
    grid = [steady_mix(w, b) for w in workloads for b in sizes]
    table = _load_profile(args.profile, model, args.hardware, args.tp, grid)
    found, seconds = [], 0.0
    for mix in mixes:
        outcome = _solve(args, model, table, mix)
        simulate(outcome.plan, outcome.costings[outcome.plan.partition])
        found.append(outcome.plan)
        seconds += outcome.solve_s
        p = outcome.plan
        print(
            f"b_dense {p.b_dense:5d}, {p.decode_tokens:5d} decoding: {p.period_us:8.1f} us, {p.speedup:.3f} x sequential",
            flush=True,
        )
    plan_set = make_plan_set(model, table, found, grid)
    args.out.write_bytes(plan_files.encode(plan_set))
    record = {
        "model": model.name, "hardware": table.device, "tp": table.tp, "plans": len(plan_set.plans),
        "crossover_tokens": plan_set.crossover_tokens, "solve_s": round(seconds, 2),
    }  # fmt: skip
    print(json.dumps(record))


def _replay(
    found: Sequence[plans.PipelinePlan], profile: str, workloads: Sequence[Workload]
) -> list[tuple[plans.PipelinePlan, Costing, Replay]]:
    """Replays plans of one model and machine, each with its own mix."""
    first, model = found[0], preset(found[0].model)
    mixes = [mix_of(plan, workloads) for plan in found]
    table = _load_profile(profile, model, first.device, first.tp, mixes)
    replays = []
    for plan, mix in zip(found, mixes, strict=True):
        costing = Costing(model=model, table=table, mix=mix, partition=plan.partition)
        try:
            replays.append((plan, costing, simulate(plan, costing)))
        except plans.PlanError as error:
            raise plans.PlanError(
                f"plan for {plan.b_dense} tokens, {plan.decode_tokens} decoding, on profile {profile}: {error}"
            ) from error
    return replays


def _simulate(args: argparse.Namespace) -> None:
    found = plan_files.read_plans(args.plan).plans
    if not found:
        raise plans.PlanError(f"{args.plan}: this plan set holds no plan")
    if args.plot and len(found) != 1:
        raise plans.PlanError(f"--plot={args.plot} is for one plan, {args.plan} holds {len(found)}")
    replays = _replay(found, args.profile, [parse_workload(w) for w in args.workload])
    if args.plot:
        from search.plots import draw

        draw(*replays[0][:2], args.plot)
    for plan, _, replay in replays:
        print(
            f"b_dense {plan.b_dense:5d}, {plan.decode_tokens:5d} decoding: planned {plan.period_us:.3f} us per layer, "
            f"replayed {replay.period_us:.3f} us"
        )
    record = {
        "model": found[0].model, "hardware": found[0].device, "tp": found[0].tp,
        "plans": [
            {
                "b_dense": plan.b_dense, "decode_tokens": plan.decode_tokens, "period_us": plan.period_us,
                "replayed_us": replay.period_us,
            }
            for plan, _, replay in replays
        ],
    }  # fmt: skip
    print(json.dumps(record))


def _evaluate(args: argparse.Namespace) -> None:
    from search.evaluate import evaluate

    evaluate(args.only, work=args.work, time_limit_s=args.time_limit)


def _profile(args: argparse.Namespace) -> None:
    from search.profiling import profile_command

    device = hardware(args.hardware)
    profile_command(preset(args.model), device, args.tp, args.b_dense, args.context, args.out, args.time_limit)


if __name__ == "__main__":
    sys.exit(main())

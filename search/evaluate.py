"""The tables of docs/search.md, as markdown on standard output; progress on standard error."""

import sys
import time
from collections.abc import Sequence

from nanoflow_jax.config import preset
from nanoflow_jax.plan import Partition
from nanoflow_jax.workload import parse_workload, steady_mix
from search.analytic import analytic_profile
from search.auto_search import Options, Outcome, auto_search
from search.hardware import hardware
from search.problem import Costing, build_problem
from search.simulate import simulate
from search.stage_one import Limits, search_structure
from search.structure import Objective

Case = tuple[str, int, str, int, str]  # model, ranks, device, b_dense, workload

PAPER_MODELS: tuple[Case, ...] = (
    ("llama2-70b", 8, "a100-80g", 2048, "1024:512"),
    ("llama3-70b", 8, "a100-80g", 2048, "1024:512"),
    ("qwen2-72b", 8, "a100-80g", 2048, "1024:512"),
    ("deepseek-67b", 8, "a100-80g", 2048, "1024:512"),
    ("mixtral-8x7b", 8, "a100-80g", 2048, "1024:512"),
    ("llama3-8b", 1, "a100-80g", 1024, "1024:512"),
)
WORKLOADS: tuple[Case, ...] = tuple(("llama2-70b", 8, "a100-80g", 2048, w) for w in ("512:0", "512:512", "512:1024"))
H200: tuple[Case, ...] = (
    ("llama3-8b", 1, "h200", 2048, "512:512"),
    ("llama3-8b", 1, "h200", 2048, "1024:512"),
    ("llama3-8b", 1, "h200", 1024, "512:1024"),
    ("llama3-70b", 4, "h200", 2048, "1024:512"),
)


def evaluate(only: Sequence[str] | None, *, work: float, time_limit_s: float) -> None:
    """Prints the tables named in `only`, by default all."""
    tables = {"models": PAPER_MODELS, "workloads": WORKLOADS, "h200": H200}
    for name, cases in tables.items():
        if not only or name in only:
            print(f"\n### {name}\n")
            _plans(cases, Options(work=work, time_limit_s=time_limit_s))
    if not only or "counts" in only:
        print("\n### counts\n")
        _counts(WORKLOADS[2], work, time_limit_s)


def _search(case: Case, options: Options) -> Outcome:
    model, tp, device, b_dense, workload = case
    config, mix = preset(model), steady_mix(parse_workload(workload), b_dense)
    outcome = auto_search(config, analytic_profile(config, hardware(device), tp, [mix]), mix, options)
    for plan in outcome.plans.values():
        simulate(plan, outcome.costings[plan.partition])
    return outcome


def _plans(cases: Sequence[Case], options: Options) -> None:
    columns = "model, device, tokens, workload", "sequential", "stage I (bound, gap, counts)", "phased", "constant"
    columns = *columns, "lower bound", "W", "CPU s", "s"
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for case in cases:
        model, tp, device, b_dense, workload = case
        outcome = _search(case, options)
        p = outcome.plan.prediction
        forms = [f"{q.period_us:.0f} ({q.speedup:.3f} x)" for q in (outcome.plans["phased"], outcome.plans["constant"])]
        ideal = f"{p.ideal_us:.0f} ({p.sequential_us / p.ideal_us:.3f} x; {p.ideal_bound_us:.0f}, {100 * p.gap:.1f} %"
        ideal = f"{ideal}, {p.bound_counts})"
        watts = f"{p.mean_power_w:.0f}" if p.mean_power_w else "-"
        late = " (cut short)" if outcome.timed_out else ""
        print(
            f"| {model}, {tp} x {device}, {b_dense}, {workload} | {p.sequential_us:.0f} | {ideal} | {forms[0]} | {forms[1]} | "
            f"{p.lower_bound_us:.0f} | {watts} | {outcome.cpu_s:.0f} | {outcome.solve_s:.0f}{late} |",
            flush=True,
        )


def _counts(case: Case, work: float, time_limit_s: float) -> None:
    """Which split counts the search keeps for the steady period and for one layer's makespan."""
    model, tp, device, b_dense, workload = case
    config, mix = preset(model), steady_mix(parse_workload(workload), b_dense)
    table = analytic_profile(config, hardware(device), tp, [mix])
    partitions: tuple[Partition, ...] = ("all_reduce", "all_gather")
    objectives: tuple[Objective, ...] = ("period", "makespan")
    print(f"{model}, {tp} x {device}, {b_dense} tokens, {workload}; counts are qkv/decode/prefill/o/ffn\n")
    print("| objective | partition | at the starting counts | kept | tried (period or -, bound), us |")
    print("|---|---|---|---|---|")
    for objective in objectives:
        for partition in partitions:
            problem = build_problem(Costing(model=config, table=table, mix=mix, partition=partition))
            limits = Limits(work=10 * work, deadline=time.monotonic() + time_limit_s, seed=0)
            found = search_structure(problem, limits, objective=objective)
            tick = problem.tick_us
            tried = ", ".join(
                f"{'/'.join(map(str, c))} ({f'{t * tick:.0f}' if t else '-'}, {b * tick:.0f})" for c, t, b in found.tried
            )
            kept = f"{'/'.join(map(str, found.best.counts))}: {found.best.period * tick:.0f} (bound {found.bound * tick:.0f})"
            base = f"{found.base.period * tick:.0f} (bound {found.base_bound * tick:.0f})"
            print(f"| {objective} | {partition} | {base} | {kept} | {tried} |", flush=True)
    print(f"any counts, any order: at least {problem.load_bound() * tick:.0f} us ({partition})", file=sys.stderr)

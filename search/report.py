"""Tables and progress for people, and the JSON record for programs."""

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from nanoflow_jax.plan import PipelinePlan
from search.assemble import mean_utilization
from search.cost_model import Classification, OperationCost
from search.hardware import Hardware

if TYPE_CHECKING:  # solvers come with it, which no other command needs
    from search.auto_search import Outcome


class Progress:
    """Prints an improvement at most every half second, from whichever thread solves."""

    def __init__(self) -> None:
        self._begun = self._printed = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, what: str, incumbent_us: float, bound_us: float) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._printed < 0.5:
                return
            self._printed = now
            gap = 100 * (1 - bound_us / incumbent_us)
            line = f"{now - self._begun:6.1f} s  {what:24s} incumbent {incumbent_us:8.1f} us  bound {bound_us:8.1f} us"
            print(f"{line}  gap {gap:4.1f} %", file=sys.stderr, flush=True)


def cost_table(costs: list[OperationCost], verdict: Classification, device: Hardware, tp: int, b_dense: int) -> str:
    """The paper's Table 2 and what follows from it."""
    head = (
        f"{'operation':18s} {'GFLOP':>10s} {'GB':>8s} {'net GB':>8s} {'compute ms':>11s} {'memory ms':>10s} {'network ms':>11s}"
    )
    lines = [head]
    for c in costs:
        times = [1e3 * t for t in c.times_s(device, tp, device.peak_flops)]
        lines.append(
            f"{c.name:18s} {c.flops / 1e9:10.1f} {c.bytes_moved / 1e9:8.1f} {c.network_bytes / 1e9:8.1f} "
            f"{times[0]:11.2f} {times[1]:10.2f} {times[2]:11.2f}"
        )
    total = (1e3 * t for t in (verdict.t_compute, verdict.t_memory, verdict.t_network))
    lines.append("{:46s} {:11.2f} {:10.2f} {:11.2f}".format("total (T_compute, T_mem, T_net)", *total))
    lines += [
        "",
        f"bottleneck of this batch         {verdict.bottleneck}",
        f"T_mem / T_compute of this batch  {verdict.t_memory / verdict.t_compute:.3f}",
        f"TR at full memory (equation 4)   {verdict.tr:.3f}",
        f"KV cache fits                    {verdict.budget.kv_tokens:,.0f} tokens, {verdict.budget.max_sequences:,} sequences",
        f"largest B_dense                  {verdict.budget.max_b_dense:,} tokens" + (
            "" if b_dense <= verdict.budget.max_b_dense else f"  (asked for {b_dense:,}: does not fit)"
        ),
        f"optimal throughput               {verdict.optimal_datasheet:,.0f} tokens/s per device at the datasheet's "
        f"{device.peak_flops / 1e12:.0f} TFLOP/s",
    ]  # fmt: skip
    if verdict.optimal_measured is not None and device.gemm_flops is not None:
        lines.append(
            f"                                 {verdict.optimal_measured:,.0f} tokens/s per device at a measured "
            f"{device.gemm_flops / 1e12:.0f} TFLOP/s ({device.gemm_source})"
        )
    return "\n".join(lines)


def plan_table(outcome: "Outcome") -> str:
    """The plan in order of start, then what it promises."""
    plan = outcome.plan
    left = f"{'start us':>9s} {'takes us':>9s} {'alone us':>9s}  {'operation':24s}"
    lines = [f"{left} {'tokens':>12s} {'lane':8s} {'layer':>5s} {'R':>5s} {'SMs':>4s}"]
    for n in plan.nano_operations:
        b = plan.batch_of(n)
        lines.append(
            f"{n.start_us:9.1f} {n.duration_us:9.1f} {n.best_us:9.1f}  {n.operation + ' ' + str(n.nano_batch + 1):24s} "
            f"{f'{b.start}-{b.stop}':>12s} {n.resource.value:8s} {-n.layer_offset:5d} {n.share:5.2f} {n.num_sms:4d}"
        )
    p = plan.prediction
    lines += [
        "",
        f"sequential                {p.sequential_us:9.1f} us per layer",
        f"split, without overlap    {p.nano_us:9.1f} us",
        f"stage I, no interference  {p.ideal_us:9.1f} us   {p.sequential_us / p.ideal_us:.3f} x",
        f"  bound                   {p.ideal_bound_us:9.1f} us   gap {100 * p.gap:.1f} %, for {p.bound_counts}",
    ]
    for form in ("phased", "constant"):
        if form in outcome.plans:
            period = outcome.plans[form].period_us
            line = f"stage II, {form:8s} shares {period:9.1f} us   {p.sequential_us / period:.3f} x"
            unlimited = outcome.unlimited_us[form]
            limited = period > unlimited * (1 + 1e-6)
            lines.append(f"{line}   power is the limit, without it {unlimited:.1f} us" if limited else line)
    lines.append(f"lower bound of any plan   {p.lower_bound_us:9.1f} us")
    if p.mean_power_w:
        lines.append(f"mean power                {p.mean_power_w:9.1f} W")
    if p.estimated:
        lines.append("times are estimated: the profile is analytic or was interpolated")
    if outcome.timed_out:
        lines.append("the wall-clock limit cut the search short: this result need not repeat")
    if plan.speedup <= 1:
        lines.append("sequential execution is predicted to be as fast: do not use this plan")
    return "\n".join(lines)


def plan_record(plan: PipelinePlan, solve_s: float) -> dict[str, Any]:
    """The last line of standard output."""
    return {
        "model": plan.model,
        "hardware": plan.device,
        "b_dense": plan.b_dense,
        "nano_ops": len(plan.nano_operations),
        "period_us": round(plan.period_us, 3),
        "sequential_us": round(plan.prediction.sequential_us, 3),
        "speedup": round(plan.speedup, 4),
        "lower_bound_us": round(plan.prediction.lower_bound_us, 3),
        "gap": round(plan.prediction.gap, 4),
        "solve_s": round(solve_s, 2),
        "utilization": {k: round(v, 4) for k, v in mean_utilization(plan).items()},
    }

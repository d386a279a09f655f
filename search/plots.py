"""Pictures of a plan: a Gantt chart with one lane per resource, and utilisation over time beside the sequential layer.

After Figures 6 and 10 of the NanoFlow paper.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import matplotlib.patches
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nanoflow_jax.plan import NanoOperation, Phase, PipelinePlan, Resource
from search.build_plan import sequential_phases
from search.problem import Costing

SHORT = {
    "qkv_proj": "QKV", "decode_attention": "decode attn", "prefill_attention": "prefill", "o_proj": "O",
    "attention_all_gather": "AG attn", "o_all_gather": "AG o", "o_all_reduce": "AR o",
    "gate_up_proj": "gate+up", "down_proj": "down", "experts": "experts", "ffn_all_reduce": "AR ffn",
}  # fmt: skip
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
LINES = {"compute": "#b22222", "memory": "#1f6f8b", "network": "#6b8e23"}


def draw(plan: PipelinePlan, costing: Costing, path: Path) -> None:
    """Writes the picture to `path`; the suffix chooses the format (svg, png, pdf)."""
    sequential = sequential_phases(costing)
    lanes = [r for r in Resource if any(n.resource is r for n in plan.nano_operations)]
    figure = Figure(figsize=(14, 1.5 + 1.25 * len(lanes) + 3.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(0.6 + 1.25 * len(lanes), 3.4))
    _gantt(figure.add_subplot(grid[0, :]), plan, lanes)
    horizon = max(plan.period_us, sum(p.duration_us for _, p in sequential))
    left, right = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    _utilization(left, [p for _, p in sequential], horizon, f"sequential layer, {horizon_of(sequential):.0f} us")
    _utilization(right, plan.phases, horizon, f"plan, {plan.period_us:.0f} us per layer (repeats)", repeat=plan.period_us)
    mix = f"{plan.b_dense} tokens, {plan.decode_tokens} of them decoding"
    title = f"{plan.model} on {plan.tp} x {plan.device}, {mix}: {plan.speedup:.3f} x sequential ({plan.shares} shares"
    figure.suptitle(f"{title}, {plan.partition})" if plan.tp > 1 else f"{title})", fontsize=12)
    with matplotlib.rc_context({"svg.hashsalt": "plan"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)


def horizon_of(sequential: Sequence[tuple[str, Phase]]) -> float:
    """The end of the sequential layer."""
    return sum(p.duration_us for _, p in sequential)


def _gantt(axes: Axes, plan: PipelinePlan, lanes: Sequence[Resource]) -> None:
    """A bar is as high as the share it holds; hue tells nano-batches, a dashed edge an operation of the layer before."""
    for row, resource in enumerate(lanes):
        base = len(lanes) - 1 - row
        axes.axhspan(base, base + 0.9, color="#f4f4f4", zorder=0)
        for index, nano in enumerate(plan.nano_operations):
            if nano.resource is resource:
                _bar(axes, plan, index, nano, base)
    for phase in plan.phases:
        axes.axvline(phase.start_us, color="#dddddd", linewidth=0.6, zorder=0.5)
    axes.set(xlim=(0, plan.period_us), ylim=(-0.05, len(lanes)), xlabel="time in the window (us)")
    axes.set_yticks([len(lanes) - 0.55 - i for i in range(len(lanes))], [r.value for r in lanes])
    axes.set_title(
        "one window of the steady state; bar height and R: share of the device; dashed: of an earlier layer",
        fontsize=9,
        loc="right",
    )
    axes.spines[["top", "right"]].set_visible(False)
    most = max(n.nano_batch for n in plan.nano_operations) + 1
    swatches = [matplotlib.patches.Patch(color=COLORS[i], label=f"nano-batch {i + 1}") for i in range(min(most, len(COLORS)))]
    axes.legend(handles=swatches, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=most, fontsize=8, frameon=False)


def _bar(axes: Axes, plan: PipelinePlan, index: int, nano: NanoOperation, base: float) -> None:
    color = COLORS[nano.nano_batch % len(COLORS)]
    stretches = [(p, r) for p in plan.phases for r in p.running if r.nano_operation == index]
    earlier = nano.layer_offset > 0
    for phase, held in stretches:
        axes.bar(
            phase.start_us, 0.9 * held.share, phase.duration_us, bottom=base, align="edge", color=color, linewidth=0, zorder=2,
            alpha=0.85,
        )  # fmt: skip
    for start, stop in _spans(plan, nano):
        axes.plot(
            [start, start, stop, stop], [base, base + 0.9, base + 0.9, base], color="#222222", linewidth=0.8,
            linestyle="--" if earlier else "-", zorder=3,
        )  # fmt: skip
    start, stop = max(_spans(plan, nano), key=lambda s: s[1] - s[0])
    middle = base + 0.45 * max(0.5, sum(r.share * p.duration_us for p, r in stretches) / nano.duration_us)
    shares = sorted({round(r.share, 2) for _, r in stretches})
    share = f"R={shares[0]:.2g}" if len(shares) == 1 else f"R={shares[0]:.2g}-{shares[-1]:.2g}"
    text = f"{SHORT[nano.operation]} {nano.nano_batch + 1}"
    narrow = (stop - start) / plan.period_us
    wide = narrow > 0.009 * len(max(text, share, key=len))
    if narrow > 0.008:
        label = f"{text}\n{share}" if wide else f"{text} {share}"
        axes.text(
            (start + stop) / 2, middle if wide else base + 0.45, label, ha="center", va="center", fontsize=7.5 if wide else 6,
            rotation=0 if wide else 90, zorder=4, clip_on=True,
        )  # fmt: skip


def _spans(plan: PipelinePlan, nano: NanoOperation) -> list[tuple[float, float]]:
    """Where a nano-operation lies inside the window: two stretches if it runs over the end."""
    stop = nano.start_us + nano.duration_us
    if stop <= plan.period_us * (1 + 1e-9):
        return [(nano.start_us, stop)]
    return [(nano.start_us, plan.period_us), (0.0, stop - plan.period_us)]


def _utilization(axes: Axes, phases: Sequence[Phase], horizon: float, title: str, repeat: float | None = None) -> None:
    times, values = [0.0], {name: [] for name in LINES}
    for p in phases:
        times.append(p.start_us + p.duration_us)
        for name in LINES:
            values[name].append(100 * getattr(p, name))
    for name, color in LINES.items():
        if not any(values[name]):
            continue
        label = f"{name}, mean {_mean(values[name], times):.0f} %"
        axes.stairs(values[name], times, color=color, linewidth=1.4, label=label, baseline=None)
        axes.stairs(values[name], times, color=color, alpha=0.12, fill=True)
        if repeat is not None:
            axes.stairs(values[name], [t + repeat for t in times], color=color, linewidth=1.0, alpha=0.3, baseline=None)
    axes.set(xlim=(0, horizon), ylim=(0, 105), xlabel="time (us)", ylabel="% of the datasheet's rate")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="upper right", fontsize=8, framealpha=0.85)
    axes.spines[["top", "right"]].set_visible(False)


def _mean(values: Sequence[float], times: Sequence[float]) -> float:
    spans = [b - a for a, b in itertools.pairwise(times)]
    return sum(v * s for v, s in zip(values, spans, strict=True)) / sum(spans)

"""A traced mode as a picture, after Figure 10 of the NanoFlow paper, and as a trace for Perfetto."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nanoflow_jax.compare.names import Label
from nanoflow_jax.compare.trace import Event, by_device, resources
from nanoflow_jax.plan import Resource

LANES = (*(str(resource) for resource in Resource), "other")
# Of a kernel's time, how much of its end may be under the kernel that is launched to follow it.
_EARLY = 0.05
_COLORS = {
    "qkv_proj": "#4c78a8", "decode_attention": "#e45756", "prefill_attention": "#b279a2", "o_proj": "#72b7b2",
    "gate_up_proj": "#f58518", "down_proj": "#eeca3b", "experts": "#f58518", "attention_all_gather": "#54a24b",
    "o_all_gather": "#88d27a", "o_all_reduce": "#88d27a", "ffn_all_reduce": "#2f7d32", "logits": "#9d755d", "gemm": "#4c78a8",
    "grouped_gemm": "#f58518", "collective": "#54a24b", "fused": "#ff9da6", "other": "#bab0ac",
}  # fmt: skip
_SHORT = {
    "qkv_proj": "QKV", "decode_attention": "decode", "prefill_attention": "prefill", "o_proj": "O", "gate_up_proj": "gate+up",
    "down_proj": "down", "attention_all_gather": "AG attn", "o_all_gather": "AG o", "o_all_reduce": "AR o",
    "ffn_all_reduce": "AR ffn",
}  # fmt: skip


def middle_of_step(events: Sequence[Event], steps: int, layers_us: float, shown_us: float) -> tuple[float, float]:
    """(start, stop) in ns: `shown_us` around the middle of the layers of one step, of the trace's middle step.

    Args:
      layers_us: time of all layers; embedding before them is short, the rest of the step lies behind.
    """
    begin, end = min(e.start_ns for e in events), max(e.end_ns for e in events)
    step_start = begin + (end - begin) * (steps // 2) / steps
    middle = step_start + 1e3 * layers_us / 2
    return middle - 500 * shown_us, middle + 500 * shown_us


def draw(
    events: Sequence[Event], labels: Mapping[Event, Label], window: tuple[float, float], *, num_sms: int, title: str, path: Path
) -> None:
    """Kernels of one device in the window, a row per resource, and more where kernels of one ran side by side.

    A bar is as high as the share of the SMs that its grid can hold, where the trace says so, and full otherwise.
    """
    start_ns, stop_ns = window
    shown = [event for event in events if event.end_ns > start_ns and event.start_ns < stop_ns]
    held = {lane: [event for event in shown if lane in _lanes(event)] for lane in LANES}
    rows = [(lane, row) for lane, of_lane in held.items() for row in (side_by_side(of_lane) if lane != "other" else [of_lane])]
    figure = Figure(figsize=(14, 1.6 + 0.8 * max(1, len(rows))), layout="constrained")
    axes = figure.add_subplot()
    for index, (lane, row) in enumerate(rows):
        base = len(rows) - 1 - index
        axes.axhspan(base, base + 0.9, color="#f4f4f4", zorder=0)
        for event in row:
            _bar(axes, event, _in_lane(labels[event], lane), base, window, num_sms)
    axes.set(xlim=(0, (stop_ns - start_ns) / 1e3), ylim=(-0.05, max(1, len(rows))), xlabel="us")
    middles = [len(rows) - 0.55 - i for i in range(len(rows))]
    axes.set_yticks(middles, [lane for lane, _ in rows], fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    roles = {_in_lane(labels[event], lane) for event in shown for lane in _lanes(event)}
    present = [name for name in _COLORS if any(_color_name(label) == name for label in roles)]
    if present:
        swatches = [Patch(color=_COLORS[name], label=name) for name in present]
        figure.legend(handles=swatches, loc="outside lower center", ncols=min(8, len(swatches)), fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def side_by_side(events: Sequence[Event]) -> list[list[Event]]:
    """The events in as few rows as let none overlap another of its row, but for what is launched just before the other ends.

    Streams are no rows: a CUDA graph has them by dozens.
    """
    rows: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event.start_ns):
        free = next((row for row in rows if row[-1].end_ns - _EARLY * row[-1].duration_ns <= event.start_ns), None)
        if free is None:
            rows.append([event])
        else:
            free.append(event)
    return rows


def _bar(axes: Axes, event: Event, label: Label, base: float, window: tuple[float, float], num_sms: int) -> None:
    start_us, width_us = (event.start_ns - window[0]) / 1e3, event.duration_ns / 1e3
    share = 1.0 if event.ctas is None else min(1.0, event.ctas / num_sms)
    color = _COLORS[_color_name(label)]
    axes.bar(
        start_us, 0.9 * share, width_us, bottom=base, align="edge", color=color, linewidth=0.4, edgecolor="#222222", zorder=2
    )
    visible = min(start_us + width_us, (window[1] - window[0]) / 1e3) - max(0.0, start_us)
    if visible < 0.012 * (window[1] - window[0]) / 1e3 or _color_name(label) == "other":
        return
    text = _SHORT.get(label.operation, label.operation) + ("" if label.nano_batch is None else f" {label.nano_batch + 1}")
    sms = "" if event.ctas is None else f"\n{event.ctas}"
    wide = visible / ((window[1] - window[0]) / 1e3) > 0.007 * len(text)
    axes.text(
        max(0.0, start_us) + visible / 2, base + 0.45, text + sms if wide else text, ha="center", va="center", clip_on=True,
        fontsize=7 if wide else 6, rotation=0 if wide else 90, zorder=3,
    )  # fmt: skip


def write_perfetto(events: Iterable[Event], labels: Mapping[Event, Label], path: Path) -> None:
    """A gzipped Chrome trace: a process per GPU, a thread per stream, microseconds from the first kernel."""
    devices = by_device(events)
    begin = min((event.start_ns for of_device in devices.values() for event in of_device), default=0.0)
    records: list[dict] = []
    for device, of_device in devices.items():
        streams = {stream: number for number, stream in enumerate(sorted({event.stream for event in of_device}))}
        records.append({"ph": "M", "pid": device, "name": "process_name", "args": {"name": f"GPU {device}"}})
        for stream, number in streams.items():
            records.append({"ph": "M", "pid": device, "tid": number, "name": "thread_name", "args": {"name": stream}})
        for event in of_device:
            label = labels[event]
            records.append({
                "ph": "X", "pid": device, "tid": streams[event.stream], "ts": (event.start_ns - begin) / 1e3,
                "dur": event.duration_ns / 1e3, "name": str(label) if label.operation != "other" else event.name,
                "cat": "+".join(_lanes(event)),
                "args": {"kernel": event.name, "op": event.op, "ctas": event.ctas, "layer": label.layer},
            })  # fmt: skip
    text = json.dumps({"traceEvents": records, "displayTimeUnit": "ns"}).encode()
    path.write_bytes(gzip.compress(text, mtime=0))


def _lanes(event: Event) -> tuple[str, ...]:
    return tuple(str(resource) for resource in resources(event.name)) or ("other",)


def _in_lane(label: Label, lane: str) -> Label:
    """Of a fused kernel, the role that the lane shows."""
    return label.beside if label.beside and lane == Resource.MEMORY else label


def _color_name(label: Label) -> str:
    name = label.operation.removesuffix("_combine")
    return name if name in _COLORS else "other"

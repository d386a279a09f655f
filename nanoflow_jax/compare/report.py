"""From seconds at two depths to the figures of the table."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from nanoflow_jax.compare.measure import Setup, Timing

Row = dict[str, Any]


def figures(setup: Setup, timings: Mapping[int, Timing], optimal: float | None) -> Row:
    """Period, step, throughput of the whole model, percent of optimal and power of one mode.

    The period is what a layer adds between the depths; a step of the whole model is its layers' periods and the rest that both
    depths share (embedding, logits, the pipeline's filling and draining). Throughput counts all tokens of the batch. All of
    them are None where noise made the deeper model no slower than the other.
    """
    shallow, deep = sorted(timings)
    row: Row = {}
    for kind in ("burst", "sustained"):
        step_s = {depth: getattr(timing, f"{kind}_s") for depth, timing in timings.items()}
        period_s = (step_s[deep] - step_s[shallow]) / (deep - shallow)
        row[kind] = dict.fromkeys(("period_us", "step_ms", "rest_ms", "tokens_per_s_per_gpu", "percent_of_optimal"))
        row[kind]["deep_step_ms"] = 1e3 * step_s[deep]
        if period_s <= 0:
            continue
        whole_s = step_s[deep] + period_s * (setup.config.num_layers - deep)
        throughput = setup.plan.b_dense / whole_s / setup.plan.tp
        row[kind] |= {
            "period_us": 1e6 * period_s,
            "step_ms": 1e3 * whole_s,
            "rest_ms": 1e3 * (step_s[deep] - deep * period_s),
            "tokens_per_s_per_gpu": throughput,
            "percent_of_optimal": 100 * throughput / optimal if optimal else None,
        }
    watts = timings[deep].watts
    row["watts"] = sum(watts) / len(watts) if watts else None
    row["watts_per_gpu"] = watts
    return row


def header(width: int) -> str:
    """Above `lines`, for labels of at most `width` characters."""
    return (
        f"{'mode':{width}}{'us/layer':>11}{'speed-up':>9}{'sustained':>11}{'speed-up':>9}{'predicted':>11}"
        f"{'step ms':>9}{'tok/s/GPU':>11}{'optimal':>9}{'W':>6}"
    )


def title(report: Row) -> str:
    """What was compared, in a line."""
    return (
        f"{report['model']} on {report['tp']} x {report['device']}: {report['b_dense']} tokens, {report['decode_tokens']} "
        f"decoding at {report['context']} tokens; step, throughput and power are sustained"
    )


def lines(label: str, row: Row, rows: Mapping[str, Row], width: int) -> list[str]:
    """A mode's line of the table and, below it, its overlap. Speed-ups are over the best sequential mode in `rows`."""
    if "error" in row:
        return [f"{label:{width}}  {row['error']}"]

    def cells(kind: str) -> str:
        sequential = [r[kind]["period_us"] for name, r in rows.items() if name.startswith("sequential") and kind in r]
        best = min((us for us in sequential if us), default=None)
        us = row[kind]["period_us"]
        return f"{_or_dash(us, '.1f'):>11}{_or_dash(best / us if best and us else None, '.3f'):>9}"

    whole = row["sustained"]
    text = (
        f"{label:{width}}{cells('burst')}{cells('sustained')}{_or_dash(row['predicted_period_us'], '.1f'):>11}"
        f"{_or_dash(whole['step_ms'], '.2f'):>9}"
        f"{_or_dash(whole['tokens_per_s_per_gpu'], '.0f'):>11}{_or_dash(whole['percent_of_optimal'], '.1f', ' %'):>9}"
        f"{_or_dash(row['watts'], '.0f'):>6}"
    )
    return [text, *_overlap_lines(row["overlap"]), _logits_line(label, row["logits"])]


def difference(logits: Float[np.ndarray, "rows V"], expected: Float[np.ndarray, "rows V"]) -> float | None:
    """Root mean square of the difference, relative to that of what is expected; None if either is not finite."""
    relative = float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))
    return relative if math.isfinite(relative) else None


def _logits_line(label: str, logits: Row) -> str:
    other = logits["compared_with"]
    percent = "NOT FINITE" if logits["difference"] is None else f"{100 * logits['difference']:.2g} %"
    apart = "" if other == label else f"{percent} from those of {other}, "
    return f"    logits: {apart}{'the same' if logits['repeats'] else 'NOT THE SAME'} bits after every step looked at"


def _overlap_lines(overlap: Row) -> list[str]:
    if "unavailable" in overlap:
        return [f"    overlap not available: {overlap['unavailable']}"]
    found, apart = [], {}
    for pair, entry in overlap["pairs"].items():
        if "why_none" in entry:
            apart.setdefault(entry["why_none"], []).append(pair)
            continue
        found.append(f"    {pair}: {entry['us']:.1f} us per layer together, {entry['percent']:.1f} % of the shorter")
    found += [f"    {', '.join(pairs)}: no overlap; {why}" for why, pairs in apart.items()]
    if overlap["network_hidden_percent"] is not None:
        found.append(f"    {overlap['network_hidden_percent']:.1f} % of the network's time is hidden under compute or memory")
    return found


def _or_dash(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"

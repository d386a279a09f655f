"""What `bench` and `bench_predicted` print of the steps of a run."""

from collections.abc import Sequence
from typing import Any

_COLUMNS = ("steps", "step_ms", "form_ms", "launch_ms", "consume_ms", "wait_ms", "total_tokens_per_s", "output_tokens_per_s")


def print_table(report: dict[str, Any]) -> None:
    """Rates of the whole run, its steady state and each kind of step, then idle time and a peer where the report has them."""
    print(f"{report['model']} on {report['device']} x {report['tp_size']}, {report['mode']}, {report['stepping']}: "
          f"{report['requests']} requests, {report['input_tokens']} tokens in, {report['output_tokens']} out")  # fmt: skip
    print(" " * 10 + "".join(f"{name.replace('_tokens_per_s', ' tok/s').replace('_ms', ' ms'):>14}" for name in _COLUMNS))
    rows = {"whole": report["whole"], "steady": report["steady"], **report["by_kind"]}
    for name, row in rows.items():
        cells = (
            "".join(f"{row[c]:>14.0f}" if c == "steps" else f"{row[c]:>14.2f}" for c in _COLUMNS) if row else f"{'none':>14}"
        )
        print(f"{name:<10}{cells}")
    print(
        f"scheduling {report['whole']['scheduling_share']:.2%} of step time, batch fill {report['batch_fill']:.1%}, "
        f"{report['preemptions']} preemptions"
    )
    for line in _idle_lines(report["gpu_idle"]):
        print(line)
    if peer := report["peer"]:
        ours = report["whole"]["output_tokens_per_s"]
        theirs = peer["output_tokens_per_s"]
        print(f"{peer['peer']}: {theirs:.2f} output tokens/s; this engine: {ours:.2f}, {ours / theirs:.2f} times as many")


def _idle_lines(idle: dict[str, Any] | None) -> list[str]:
    if not idle:
        return []
    if "why_none" in idle:
        return [idle["why_none"]]
    share = (
        f"GPU idle between steps {idle['between_steps']:.2%} of {idle['seconds']:.2f} s traced from the first finished request "
        f"on; with gaps between kernels {idle['idle']:.2%}"
    )
    return [share, *map(_gaps_line, idle["gaps"])]


def _gaps_line(gaps: dict[str, Any]) -> str:
    mean_us = 1e6 * gaps["seconds"] / gaps["count"]
    return f"    {gaps['count']} gaps of {mean_us:.0f} us between {gaps['before'][:50]} and {gaps['after'][:50]}"


def print_shares(shares: Sequence[dict[str, Any]]) -> None:
    """Where the time goes; see `step_records.shares`. A row may have `least_seconds`, what power alone would allow."""
    capped = any("least_seconds" in row for row in shares)
    names = f"{'kind':<14}{'decoding':>12}{'steps':>8}{'by plan':>9}{'tokens':>11}{'seconds':>10}"
    print(f"\n{names}{'at the cap':>12}" if capped else f"\n{names}")
    for row in shares:
        cells = f"{row['kind']:<14}{row['decoding']:>12}{row['steps']:>8}{row['planned']:>9}{row['tokens']:>11,}"
        print(f"{cells}{row['seconds']:>10.2f}{row['least_seconds']:>12.2f}" if capped else f"{cells}{row['seconds']:>10.2f}")

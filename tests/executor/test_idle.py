"""Idle time of GPUs from a trace: gaps between kernels, long ones apart; and the profiler around a loop of steps."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax.compare.idle import Gaps, idle_time
from nanoflow_jax.compare.step_trace import StepTrace
from nanoflow_jax.compare.trace import Event
from nanoflow_jax.runtime.step_tables import _idle_lines


def _events(device: int, start: float, steps: list[tuple[float, float]], stream: str = "Stream #1") -> list[Event]:
    """Kernels of (duration, gap before) in us, one after the other."""
    events, clock = [], start
    for duration, gap in steps:
        clock += gap
        events.append(Event(device, stream, "kernel", 1e3 * clock, 1e3 * duration))
        clock += duration
    return events


@given(
    steps=st.lists(st.tuples(st.integers(1, 500), st.one_of(st.integers(0, 9), st.integers(10, 300))), min_size=1, max_size=30),
    start=st.integers(0, 1000),
)
def test_gaps_add_up(steps: list[tuple[int, int]], start: int) -> None:
    found = idle_time(_events(0, start, [(float(d), float(g)) for d, g in steps]))
    gaps = [gap for _, gap in steps[1:]]
    span = sum(duration for duration, _ in steps) + sum(gaps)
    assert found.seconds == pytest.approx(1e-6 * span)
    assert found.idle == pytest.approx(sum(gaps) / span, abs=1e-9)
    assert found.between_steps == pytest.approx(sum(gap for gap in gaps if gap >= 10) / span, abs=1e-9)


def test_another_stream_fills_gaps_and_devices_are_averaged() -> None:
    sparse = _events(0, 0.0, [(50, 0), (50, 100)])
    beside = _events(0, 40.0, [(120, 0)], stream="Stream #2")
    assert idle_time([*sparse, *beside]).idle == 0
    both = idle_time([*sparse, *_events(1, 0.0, [(200, 0)])])
    assert both.idle == pytest.approx(0.25)
    with pytest.raises(ValueError, match="no kernels"):
        idle_time([])


def test_long_gaps_are_told_by_what_they_lie_between() -> None:
    def event(name: str, start: float, duration: float, device: int = 0) -> Event:
        return Event(device, "Stream #1", name, 1e3 * start, 1e3 * duration)

    own = [
        event("layers", 0, 50),
        event("sample", 90, 10),
        event("layers", 105, 50),
        event("sample", 175, 10),
        event("copy", 300, 5),
    ]
    found = idle_time([*own, event("layers", 0, 50, device=1), event("sample", 80, 10, device=1)])
    assert found.gaps == (
        Gaps("sample", "copy", 1, pytest.approx(115e-6)),
        Gaps("layers", "sample", 3, pytest.approx(90e-6)),
    )
    line = _idle_lines(dataclasses.asdict(found))[2]
    assert line.strip() == "3 gaps of 30 us between layers and sample"


def test_copies_while_a_step_from_before_the_trace_goes_on_are_no_gap() -> None:
    def event(name: str, start: float, duration: float) -> Event:
        return Event(0, "Stream #1", name, 1e3 * start, 1e3 * duration)

    copy = event("MemcpyH2D", 0, 5)
    kernels = [event("layers", 9000, 50), event("MemcpyH2D", 9060, 40), event("layers", 9120, 80)]
    found = idle_time([copy, *kernels])
    assert found == idle_time(kernels)
    assert (found.seconds, found.gaps) == (
        pytest.approx(200e-6),
        (Gaps("MemcpyH2D", "layers", 1, pytest.approx(20e-6)), Gaps("layers", "MemcpyH2D", 1, pytest.approx(10e-6))),
    )
    with pytest.raises(ValueError, match="no kernels"):
        idle_time([copy])


def test_the_profiler_runs_for_the_steps_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, profiler_options: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    with StepTrace(2) as trace:
        for step in range(5):
            trace.before_step()
            calls.append(f"step {step}")
    assert calls == ["start", "step 0", "step 1", "stop", "step 2", "step 3", "step 4"]
    calls.clear()
    with StepTrace(10) as trace:
        trace.before_step()
    assert calls == ["start", "stop"], "a run that ends sooner"


def test_on_a_cpu_it_says_why_there_is_no_figure() -> None:
    with StepTrace(1) as trace:
        trace.before_step()
        jax.jit(lambda x: x @ x)(jnp.ones((64, 64))).block_until_ready()
    assert "no idle time" in trace.idle["why_none"]
    with StepTrace(1) as unused:
        pass
    assert "0 xplane files" in unused.idle["why_none"]

"""How the profiler times programs: several in flight, power from the counter, each failure on its own; without a GPU."""

import pathlib
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.power import Mean, PowerError, PowerMeter
from search import profiler
from search.measurement import Alone, Load, Program
from search.profile_table import Kernel, ProfileError

GEMM = Kernel(name="gemm", shape=(4096, 4096))
PROGRAM = Alone(kernel=GEMM, tokens=128, num_sms=132)


def test_steady_runs_fill_their_time_and_end_when_told() -> None:
    x = jnp.ones(8)
    started = []

    def run() -> Any:
        started.append(time.perf_counter())
        return x + 1

    count, seconds = profiler.steady(run, 0.05)
    assert count == len(started) >= 3
    assert seconds >= 0.05
    assert profiler.steady(run, 60.0, lambda: len(started) > count + 10)[0] == 11


@pytest.mark.parametrize("moves", [True, False])
def test_power_of_steady_running(moves: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs until steps of the counter span ENERGY_S; a counter that stands still ends it, too, and is said."""
    asked: list[tuple[float, float]] = []

    class Meter(PowerMeter):
        def __enter__(self) -> "Meter":
            return self

        def spans(self, seconds: float, since: float) -> bool:
            asked.append((seconds, since))
            return moves and len(asked) == 5

        def means(self, start: float, end: float) -> list[Mean]:
            assert asked[0] == (profiler.ENERGY_S, start)
            assert start < end
            if not moves:
                raise PowerError("the energy counter moved 0 times")
            return [Mean(500.0, 1500.0)]

    monkeypatch.setattr(profiler, "PowerMeter", Meter)
    monkeypatch.setattr(profiler, "ENERGY_S", 0.05)
    gpu: Any = object()
    assert profiler.watts_of(lambda: jnp.ones(1), gpu, "gemm") == (500 if moves else None)
    said = "" if moves else "no energy of gemm: the energy counter moved 0 times\n"
    assert capsys.readouterr().err == said
    assert len(asked) == 5 or not moves


def test_the_digest_is_of_sources_and_tuned_tables(tmp_path: pathlib.Path) -> None:
    source, table = tmp_path / "gemm.py", tmp_path / "tunings" / "h200.json"
    table.parent.mkdir()
    source.write_text("tile = 128")
    table.write_text("{}")
    seen = [profiler.kernels_digest(tmp_path)]
    (tmp_path / "notes.md").write_text("neither")
    assert profiler.kernels_digest(tmp_path) == seen[0]
    source.write_text("tile = 256")
    seen.append(profiler.kernels_digest(tmp_path))
    table.write_text('{"gemm": []}')
    seen.append(profiler.kernels_digest(tmp_path))
    source.rename(tmp_path / "grouped_gemm.py")
    seen.append(profiler.kernels_digest(tmp_path))
    (tmp_path / "power.py").write_text("")
    seen.append(profiler.kernels_digest(tmp_path))
    assert len(set(seen)) == 5
    assert {len(digest) for digest in seen} == {12}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The first of two GPUs that jax pretends to see, of one driver, with programs that run on this CPU."""
    gpus = [types.SimpleNamespace(platform="gpu", core_count=132) for _ in range(2)]
    pretended = types.SimpleNamespace(
        devices=lambda: gpus, __version_info__=(0, 11, 2), __version__="0.11.2", block_until_ready=jax.block_until_ready
    )
    monkeypatch.setattr(profiler, "jax", pretended)
    monkeypatch.setattr(profiler, "make_mesh", lambda _: None)
    bench = types.SimpleNamespace(mesh=None, trace=lambda _: jax.jit(jnp.sin).trace(jnp.ones(8)))
    monkeypatch.setattr(profiler, "Workbench", lambda _: bench)
    monkeypatch.setattr(profiler, "Inputs", lambda _: types.SimpleNamespace(arguments=lambda *_: (jnp.ones(8),)))
    monkeypatch.setattr(profiler, "driver_version", lambda: "580.1")
    monkeypatch.setattr(profiler, "watts_of", lambda run, device, label: 500.0)
    for name in ("SETTLE_S", "MEASURE_S", "REST_S", "BURST_S"):
        monkeypatch.setattr(profiler, name, 1e-3)
    return gpus[0]


@pytest.mark.parametrize(("idle_w", "above"), [(90.0, 410.0), (None, 380.0), (600.0, 0.0)])
def test_energy_counts_above_the_idle_power_given_or_else_measured(
    idle_w: float | None, above: float, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def idle_watts(device: Any) -> float:
        measured.append(device)
        return 120.0

    monkeypatch.setattr(profiler, "idle_watts", idle_watts)
    machine = profiler.GpuMachine(2, idle_w)
    assert machine.compile([PROGRAM]) == {}
    reading = machine.time(PROGRAM, Load(), energy=True)
    assert reading.time_us > 0
    assert reading.burst_us is None
    assert reading.energy_j == pytest.approx(above * 1e-6 * reading.time_us)
    assert measured == ([gpu] if idle_w is None else [])


def test_idle_power_is_measured_with_the_context_made(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not used the GPU yet draws less."""
    order = []
    monkeypatch.setattr(profiler.jax, "block_until_ready", lambda _: order.append("context"))
    monkeypatch.setattr(profiler, "idle_watts", lambda _: order.append("idle") or 120.0)
    profiler.GpuMachine(1, None)
    assert order == ["context", "idle"]


def test_a_gpu_without_power_cannot_be_profiled(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def idle_watts(_: Any) -> float:
        raise PowerError("nvmlInit: not found")

    monkeypatch.setattr(profiler, "idle_watts", idle_watts)
    with pytest.raises(ProfileError, match="nvmlInit: not found"):
        profiler.GpuMachine(1, None)
    with pytest.raises(ProfileError, match="needs 3 GPU"):
        profiler.GpuMachine(3, 90.0)


def test_programs_are_compiled_once(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that failed again when they are asked for again."""
    machine = profiler.GpuMachine(1, 90.0)
    broken = Alone(kernel=GEMM, tokens=256, num_sms=132)
    traced: list[Program] = []

    def trace(program: Program) -> Any:
        traced.append(program)
        if program == broken:
            raise ValueError("cannot be traced")
        return jax.jit(jnp.sin).trace(jnp.ones(8))

    monkeypatch.setattr(machine._bench, "trace", trace)
    for _ in range(2):
        assert machine.compile([PROGRAM, broken, PROGRAM]) == {broken: "ValueError: cannot be traced"}
    assert traced == [PROGRAM, broken, broken]


def test_what_times_depend_on_is_on_record(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = profiler.GpuMachine(1, 90.0)
    monkeypatch.setattr(profiler, "kernels_digest", lambda package: (package / "gemm.py").exists() and "0123456789ab")
    monkeypatch.setenv("NCCL_MAX_NCHANNELS", "8")
    found = machine.libraries()
    assert (found["jax"], found["driver"], found["kernels"]) == (jax.__version__, "580.1", "0123456789ab")
    assert found["NCCL_MAX_NCHANNELS"] == "8"

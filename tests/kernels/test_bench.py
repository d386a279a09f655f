"""The benchmark's own machinery, on the CPU: what is timed is what was asked for, and nothing hangs or gets lost."""

import functools
import json
import math
import os
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _mosaic, tune
from pallas_kernels._tuning import GemmConfig
from pallas_kernels.bench import __main__ as command
from pallas_kernels.bench import attention, parallel, timing
from pallas_kernels.bench import gemm as cases
from pallas_kernels.power import Mean, PowerError


def test_steady_jobs_are_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    [job, *_] = tune.jobs("gemm", (132,), (64,), "8b o", all_sms=132, steady=True)
    monkeypatch.setattr(cases, "_wrong_results", lambda *_: {"b": "wrong"})
    monkeypatch.setattr(timing, "steady_seconds", lambda chain, inputs: chain.calls * inputs[0])
    chains = {name: timing.Chain(None, calls) for name, calls in (("a", 2), ("b", 3), ("c", 4))}  # pyright: ignore[reportArgumentType]
    prepared = cases._Prepared(chains, {"d": "spilled"}, lambda: [0.5])  # pyright: ignore[reportArgumentType]
    assert cases._measure(job, prepared) == {"a": 1.0, "b": "wrong", "c": 2.0, "d": "spilled"}


def test_chain_computes_every_call():
    sets = [(jnp.full((8,), float(i)),) for i in range(3)]
    c = timing.chain(jnp.sin, sets, calls=7)
    np.testing.assert_allclose(c.run(sets), [np.sin(np.full(8, i % 3)) for i in range(7)], rtol=1e-6)


def test_chain_drops_no_call():
    # Compiled for CPUs equal calls are merged, as barriers go early there; so as many calls as there are inputs.
    sets = [(jnp.full((8,), float(i)),) for i in range(3)]
    compiled = timing.chain(jnp.sin, sets, calls=3).run
    assert compiled.as_text().count(" sine(") == 3  # pyright: ignore[reportFunctionMemberAccess]


def test_turns_time_every_chain():
    sets = [(jnp.ones((8, 8)),)] * 2
    seconds = timing.device_seconds({"a": jnp.sin, "b": jnp.cos}, sets, calls=2, reps=2)
    assert set(seconds) == {"a", "b"}
    assert all(s > 0 for s in seconds.values())


def test_programs_compile_side_by_side_under_their_keys():
    x = jnp.arange(4.0)
    lowered = {f.__name__: functools.partial(jax.jit(f).lower, x) for f in (jnp.sin, jnp.cos)}
    compiled = timing.compile_side_by_side(lowered, {})
    np.testing.assert_allclose([compiled[name](x) for name in ("cos", "sin")], [np.cos(x), np.sin(x)], rtol=1e-6)
    with pytest.raises(TypeError, match="sin"):
        timing.compile_side_by_side({**lowered, "sin of nothing": jax.jit(jnp.sin).lower}, {})


def test_steady_time_is_one_call_of_a_program_that_has_settled(monkeypatch):
    now = 0.0

    def run(_: object) -> None:
        nonlocal now
        now += 10e-3 if now < 50e-3 else 2e-3

    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now))
    assert timing.steady_seconds(timing.Chain(run, 2), [()], settle=0.05, measure=0.1) == pytest.approx(1e-3)


def _preallocates(job: str, prepared: str) -> str | None:
    return os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE")


def _prepare(job: str, quiet: object) -> str:
    if job == "unprepared":
        raise ValueError(job)
    return job.upper()


def _measure(job: str, prepared: str) -> str:
    if job == "broken":
        raise ValueError(job)
    if job == "stuck":
        time.sleep(600)
    return prepared


def test_workers_leave_each_other_room_on_the_device():
    [(_, preallocate)] = parallel.run(["a"], _prepare, _preallocates, workers=1)
    assert preallocate == "false"


def test_parallel_keeps_order_and_outlives_failures():
    jobs = ["a", "stuck", "unprepared", "lost with stuck", "broken", "c"]
    results = list(parallel.run(jobs, _prepare, _measure, workers=2, job_seconds=2.0))
    assert [job for job, _ in results] == ["a", "stuck", "unprepared", "broken"]
    by_job = dict(results)
    assert by_job["a"] == "A"
    assert isinstance(by_job["stuck"], TimeoutError)
    assert isinstance(by_job["unprepared"], RuntimeError)
    assert isinstance(by_job["broken"], RuntimeError)


def test_group_sizes_add_up():
    for skew in cases.SKEWS["grouped_gemm"]:
        sizes = cases.group_sizes(4096 - 5, skew)
        assert sum(sizes) == 4096 - 5
        for size, share in zip(sizes, skew, strict=True):
            assert abs(size - (4096 - 5) * share / sum(skew)) <= 1


@pytest.mark.parametrize("kernel", list(cases.ROWS))
def test_candidates_fit_and_have_names_of_their_own(kernel):
    for job in tune.jobs(kernel, (132, 100), (64, 256, 1024), "8b,70b/8,mixtral", all_sms=132):
        names = [v.name for v in job.variants]
        assert len(set(names)) == len(names) >= 2
        for v in job.variants[1:]:
            assert v.config is not None
            assert v.config.stages(job.projection.swiglu) >= 2
            assert v.num_sms == 132 or v.config.cluster == 1


def test_candidates_hold_no_clusters_that_would_wait_for_others():
    p = cases.Projection(name="70b/4 qkv", k=8192, n=2560)
    shares = [c for c in tune.candidates(p, 256, 132) if c.cluster_along == "k"]
    assert shares
    for c in shares:
        assert -(-256 // c.tile_m) * -(-2560 // c.tile_n) <= {2: 66, 3: 32, 4: 28}[c.cluster]


def test_table_keeps_the_fastest_that_ran():
    config, other = GemmConfig(tile_m=128, tile_n=128), GemmConfig(tile_m=256, tile_n=128)
    p = cases.Projection(name="x", k=64, n=128)
    job = cases.Job(p, 512, (cases.Variant("cublas"), cases.Variant("a", 132, config), cases.Variant("b", 132, other)))
    assert tune.best_entry(job, {"cublas": 1e-6, "a": "spilled", "b": "wrong"}) is None
    entry = tune.best_entry(job, {"cublas": 1e-6, "a": 3e-6, "b": 2e-6})
    assert entry is not None
    assert GemmConfig(**entry["config"]) == other
    assert (entry["us"], entry["baseline_us"]) == (2.0, 1.0)
    newer = {**entry, "us": 1.5}
    table = json.loads(tune.dumps({"gemm": tune.merged([entry, {**entry, "m": 64}], [newer]), "grouped_gemm": []}))
    assert [(e["m"], e["us"]) for e in table["gemm"]] == [(64, 2.0), (512, 1.5)]


def test_rows_print_with_and_without_baseline():
    row = timing.Row(kernel="gemm", case="c", num_sms=132, seconds=2e-4, flops=1e11, hbm_bytes=1e8)
    assert row.roofline == pytest.approx(1e11 / timing.PEAK_FLOPS / 2e-4)
    assert math.isnan(row.speedup)
    beside = timing.Row(
        kernel="gemm", case="c", num_sms=1, seconds=2e-4, flops=1e11, baseline="cublas", baseline_seconds=1e-4,
        sustained=timing.Sustained(seconds=3e-4, watts=700.0, sm_mhz=1500.0),
    )  # fmt: skip
    assert beside.speedup == pytest.approx(0.5)
    plain, full = timing.line(row), timing.line(beside)
    assert timing.header().startswith("kernel")
    assert "cublas" not in plain
    assert "0.50" in full
    assert "2.10 pJ/FLOP" in full
    assert json.loads(timing.json_line([row, beside], command="x"))["command"] == "x"


def test_tuner_stops_at_its_limit_and_keeps_what_it_found(monkeypatch, tmp_path, capsys):
    def measure(jobs, *, workers, compile_seconds):
        for i, job in enumerate(jobs):
            yield job, {v.name: (1 + i) * 1e-6 for v in job.variants}
            time.sleep(0.2)

    monkeypatch.setattr(tune._mosaic, "require_hopper", lambda *_: _mosaic.Device("NVIDIA H200", 132))
    monkeypatch.setattr(cases, "measure", measure)
    out = tmp_path / "table.json"
    tune.main(
        ["gemm", "--rows", "64,512,1024", "--names", "8b qkv", "--num-sms", "132,100", "--time-limit", "0.3", "--out", str(out)]
    )
    entries = json.loads(out.read_text())["gemm"]
    assert 1 <= len(entries) < 6
    assert {(e["num_sms"], e["us"]) for e in entries} <= {(132, 1.0), (132, 2.0), (132, 3.0)}
    assert capsys.readouterr().out.count("8b qkv") == len(entries)


def test_sustained_looks_at_the_power_of_the_steady_part(monkeypatch):
    asked = []

    class Meter:
        def __init__(self, devices):
            assert devices == jax.devices()[:1]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def means(self, start, end):
            asked.append(end - start)
            return [Mean(600.0, 1500.0)]

    monkeypatch.setattr(timing, "PowerMeter", Meter)
    held = timing.sustained(jnp.sin, [(jnp.ones((64, 64)),)] * 2, seconds=0.3)
    assert (held.watts, held.sm_mhz) == (600.0, 1500.0)
    assert asked[0] > 0
    assert held.seconds > 0


def test_sustained_on_a_cpu_says_that_it_has_no_power():
    with pytest.raises(PowerError, match="is no GPU"):
        timing.sustained(jnp.sin, [(jnp.ones((64, 64)),)] * 2, seconds=0.01)


def test_command_refuses_joules_without_nvml(monkeypatch, capsys):
    def idle_watts(_):
        raise PowerError("nvmlInit: not found")

    monkeypatch.setattr(command._mosaic, "require_hopper", lambda *_: _mosaic.Device("NVIDIA H200", 132))
    monkeypatch.setattr(command, "idle_watts", idle_watts)
    with pytest.raises(SystemExit):
        command.main(["--sustained"])
    assert "--sustained: nvmlInit: not found" in capsys.readouterr().err


def test_names_select_projections():
    found = cases.selected(cases.PROJECTIONS, "8b gate_up,70b/8 o")
    assert [p.name for p in found] == ["8b gate_up", "70b/8 o"]
    assert cases.selected(cases.PROJECTIONS, "") == list(cases.PROJECTIONS)


@pytest.mark.parametrize("main", [command.main, tune.main])
def test_commands_refuse_devices_and_names(main, capsys):
    with pytest.raises(SystemExit):
        main(["gemm"])
    assert f"{jax.devices()[0].device_kind!r}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["gemmm"])
    assert "unknown kernels gemmm" in capsys.readouterr().err


def test_append_kv_counts_one_of_its_series(monkeypatch):
    case = attention.Append(name="tiny", tokens=16, kv_heads=1, group=1, page_size=8, head_dim=16)
    monkeypatch.setattr(timing, "device_seconds", lambda functions, _: dict.fromkeys(functions, 12e-6) | {"XLA": 18e-6})
    monkeypatch.setattr(timing, "sustained", lambda *_: timing.Sustained(seconds=24e-6, watts=300.0, sm_mhz=1980.0))
    monkeypatch.setattr(attention, "APPEND", (case,))
    rows = list(attention.benchmark("append_kv", (132, 48), sustained=True))
    assert [row.num_sms for row in rows] == [n for n in (132, 48) for _ in attention.APPEND_CONFIGS]
    for row in rows:
        assert row.sustained is not None
        assert (row.seconds, row.baseline_seconds, row.sustained.seconds) == pytest.approx((1e-6, 1.5e-6, 2e-6))
        assert row.hbm_bytes == 2 * 2 * 16 * 3 * 16  # qkv in bfloat16, read and written

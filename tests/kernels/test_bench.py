"""The benchmark's own machinery, on the CPU: what is timed is what was asked for, and nothing hangs or gets lost."""

import functools
import json
import math
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _mosaic, reference, tune
from pallas_kernels._tuning import GemmConfig
from pallas_kernels.bench import __main__ as command
from pallas_kernels.bench import attention, beside, parallel, timing
from pallas_kernels.bench import gemm as cases
from pallas_kernels.power import Mean, PowerError
from tests.kernels import aot, paged


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


def test_steady_time_is_one_call_of_a_program_that_has_settled(monkeypatch):
    now = 0.0

    def run(_: object) -> None:
        nonlocal now
        now += 10e-3 if now < 50e-3 else 2e-3

    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: now))
    assert timing.steady_seconds(timing.Chain(run, 2), [()], settle=0.05, measure=0.1) == pytest.approx(1e-3)


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
    header, plain, full = timing.table([row, beside]).splitlines()
    assert header.startswith("kernel")
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
    case = attention.Append(name="tiny", tokens=16, kv_heads=1, group=1, page_size=8, head_dim=8)
    monkeypatch.setattr(timing, "device_seconds", lambda *_: {"f": 12e-6})
    monkeypatch.setattr(timing, "sustained", lambda *_: timing.Sustained(seconds=24e-6, watts=300.0, sm_mhz=1980.0))
    monkeypatch.setattr(attention, "APPEND", (case,))
    (row,) = attention.benchmark("append_kv", (132, 48), sustained=True)
    assert row.sustained is not None
    assert (row.seconds, row.baseline_seconds, row.sustained.seconds) == pytest.approx((1e-6, 1e-6, 2e-6))
    assert row.hbm_bytes == 2 * 2 * 16 * 3 * 8  # qkv in bfloat16, read and written


# GEMMs beside decode attention.

_TINY = cases.Projection(name="tiny", k=256, n=512)


def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small projection and small attention, and phases of four GEMMs."""
    decode = attention.Decode(name="tiny", rows=64, mean_kv_len=32, kv_heads=2, group=2, page_size=16, head_dim=16)
    monkeypatch.setattr(beside, "PROJECTIONS", (_TINY,))
    monkeypatch.setattr(beside, "DECODE", decode)
    monkeypatch.setattr(beside, "_PHASE_SECONDS", 4 * _TINY.flops(512) / (100 * beside._FLOPS_PER_SM))


def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain reference in the place of the kernels, on no streams, two phases a program."""
    monkeypatch.setattr(beside, "gemm", lambda a, b, *, swiglu, num_sms, config=None: reference.gemm(a, b, swiglu=swiglu))
    monkeypatch.setattr(beside, "decode_attention", lambda *args, num_sms, config=None: reference.decode_attention(*args))
    monkeypatch.setattr(beside, "on_stream", lambda number, f: f)
    monkeypatch.setattr(beside, "PHASES", 2)


def test_phases_hold_all_gemms_and_attention_of_the_rows_asked_for(monkeypatch):
    _tiny(monkeypatch)
    _stand_in(monkeypatch)
    case = beside.Case(_TINY, 512, 100, 32)
    sets, attend = beside._gemm_sets(case), beside._attention_set()
    inputs = beside.with_rows([*sets, attend], 5)
    outs = jax.jit(beside.phases(case, GemmConfig(tile_m=128, tile_n=128)))(inputs)
    assert [len(products) for products, _ in outs] == [4, 4]
    wanted = reference.decode_attention(*attend)
    for i, (products, attended) in enumerate(outs):
        for j, product in enumerate(products):
            paged.assert_close(product, reference.gemm(*sets[(4 * i + j) % len(sets)]))
        paged.assert_close(attended[:5], wanted[:5])
        assert not attended[5:].any()


def test_beside_runs_what_it_compiles(monkeypatch):
    _tiny(monkeypatch)
    _stand_in(monkeypatch)
    monkeypatch.setattr(beside, "_OPTIONS", {})
    # More calls a phase than weights that suffice for a GEMM alone.
    monkeypatch.setattr(timing, "copies_beyond_l2", lambda _: 2)
    monkeypatch.setattr(timing, "steady_seconds", functools.partial(timing.steady_seconds, settle=0.0, measure=0.0))
    rows = list(beside.benchmark("beside", [132], rows=(512,), names="tiny", attention_sms=(32,)))
    assert rows[0].kernel == "beside chosen"
    assert all(row.seconds > 0 and row.baseline_seconds > 0 for row in rows)


def _modelled_us(key: tuple[Any, Any], attention_rows: int) -> float:
    """A call or phase: attention of 3 us and 2 us a row on all SMs; a GEMM of 40 us there, of 60 cut and 50 whole on fewer."""
    kind, which = key
    if kind == "attention":
        return 3 + 2 * attention_rows * 132 / which / (1 if which == 132 else 2)
    if isinstance(which, int):
        return 40
    gemms = kind.calls * (60 if beside._is_cut(kind, which) else 50)
    return max(1.2 * gemms, _modelled_us(("attention", kind.attention_sms), attention_rows)) if attention_rows else gemms


def test_beside_reports_the_amount_of_attention_that_gains_most(monkeypatch, capsys):
    def steady_seconds(chain: timing.Chain, sets: list[timing.Inputs]) -> float:
        *_, kv_lens = sets[-1]
        return 1e-6 * _modelled_us(chain.run, np.count_nonzero(kv_lens) if kv_lens.ndim == 1 else 0)  # pyright: ignore

    _tiny(monkeypatch)
    monkeypatch.setattr(command._mosaic, "require_hopper", lambda *_: _mosaic.Device("NVIDIA H200", 132))
    monkeypatch.setattr(timing, "compile_side_by_side", lambda lowered, _: {key: key for key in lowered})
    monkeypatch.setattr(timing, "steady_seconds", steady_seconds)
    command.main(["beside", "--names", "tiny", "--rows", "512", "--attention-sms", "32,24"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["figures"]["gemm_sms"], row["figures"]["attention_sms"]) for row in rows[:: len(rows) // 2]] == [
        (100, 32),
        (108, 24),
    ]
    assert {row["kernel"] for row in rows} >= {"beside chosen", "beside cut"}
    for row in rows:
        found, cut = row["figures"], "cut" in row["case"]
        case = beside.Case(_TINY, 512, found["gemm_sms"], found["attention_sms"])
        assert found["gemm_us"] == pytest.approx(60 if cut else 50)
        together = {int(n): us for n, us in found["together_us"].items() if n != "0"}
        config = GemmConfig(**found["config"])
        gains = {n: (found["gemms"] * 40 + 3 + 2 * n) / _modelled_us((case, config), n) for n in together}
        best = max(gains, key=lambda n: gains[n])
        assert found["attention_rows"] == best
        assert row["baseline_seconds"] / row["seconds"] == pytest.approx(gains[best])
        assert row["seconds"] == pytest.approx(1e-6 * together[best])
        assert row["hbm_bytes"] == 2 * 2 * 2 * 16 * 32 * best  # K and V in bfloat16, 2 heads of 16, 32 tokens


@pytest.mark.parametrize("projection", cases.selected(cases.PROJECTIONS, beside.NAMES), ids=lambda p: p.name)
def test_variants_are_different_launches(projection, monkeypatch):
    monkeypatch.setattr(beside._mosaic, "target_device", lambda: _mosaic.Device("NVIDIA H200", 132))
    for m in beside.ROWS:
        case = beside.Case(projection, m, 100, 32)
        found = beside.variants(case)
        assert next(iter(found)) == "chosen"
        assert len(found) >= 2
        assert {c.cluster for name, c in found.items() if name.startswith("paired")} == {2}
        assert all(beside._is_cut(case, c) == (name == "cut") for name, c in found.items() if name != "chosen")
        tables = [(c.tile_m, c.tile_n, beside._table(case, c).tobytes()) for c in found.values()]
        assert len(set(tables)) == len(tables)


def test_beside_refuses_shares_that_leave_no_sms():
    with pytest.raises(ValueError, match=r"attention_sms=\(32, 132\)"):
        next(beside.benchmark("beside", [132], attention_sms=(32, 132)))


def aot_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    (down,) = cases.selected(cases.PROJECTIONS, "8b down")
    case = beside.Case(down, 1024, 100, 32)
    arguments = [*beside.gemm_shapes(case), jax.eval_shape(beside._attention_set)]
    return {name: (beside.phases(case, config), (arguments,)) for name, config in beside.variants(case).items()}


@pytest.mark.aot
def test_pairs_compile_for_h200_on_streams_of_their_own():
    found = aot.resources(__name__)
    assert {"chosen", "cut"} < set(found)
    assert all(name.startswith("paired") for name in found.keys() - {"chosen", "cut"})
    assert all(resources.spill_bytes == 0 for resources in found.values())

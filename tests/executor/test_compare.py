"""The comparison of modes, end to end on a small model on a CPU."""

import dataclasses
import gzip
import json
import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanoflow_jax.compare import command, measure, report
from nanoflow_jax.compare.searched import SearchError, find_plan, optimal_throughput
from nanoflow_jax.compare.steady import steady_batch
from nanoflow_jax.config import preset
from nanoflow_jax.executor.step import ExecutionMode
from nanoflow_jax.plan import Partition, PipelinePlan
from nanoflow_jax.plan_files import decode_plan, encode
from nanoflow_jax.workload import parse_workload, steady_mix
from pallas_kernels.power import PowerMeter
from tests.executor.made_up_trace import planned_trace
from tests.executor.plans import random_plan
from tests.model.test_golden import small_config

SMALL = ("--layers", "2", "--fewer-layers", "1", "--page-size", "4", "--dtype", "float32", "--seconds", "0.01")


def small_plan(
    *, tp: int = 1, partition: Partition | None = None, b_dense: int = 16, decode_tokens: int = 8, seed: int = 3
) -> PipelinePlan:
    partition = partition or ("none" if tp == 1 else "all_reduce")
    return random_plan(
        np.random.default_rng(seed), tp=tp, moe=False, partition=partition, b_dense=b_dense, decode_tokens=decode_tokens,
        tile=8, model="small",
    )  # fmt: skip


@pytest.fixture
def plan_file(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "preset", lambda _: small_config())
    path = tmp_path / "plan.json"
    path.write_bytes(encode(small_plan()))
    return path


@pytest.fixture
def light_steps(monkeypatch):
    """Steps that do nothing, for what does not depend on what a step does."""

    def step_function(*_, **__):
        return jax.jit(lambda weights, cache, last_tokens, packed: (jnp.ones((64, 128)), cache), donate_argnums=1)

    monkeypatch.setattr(measure, "step_function", step_function)


@pytest.mark.parametrize("modes", [("sequential", "streams"), pytest.param(get_args(ExecutionMode), marks=pytest.mark.slow)])
def test_modes_are_measured_beside_each_other(plan_file, modes, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    line = ["--plan", str(plan_file), "--workload", "8:8", "--modes", ",".join(modes), "--out", str(out), "--keep-xplane"]
    assert command.main([*line, *SMALL]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out.splitlines()[-1])
    assert list(found["modes"]) == [f"{mode} (reference)" for mode in modes]
    for label, row in found["modes"].items():
        assert row["sustained"]["deep_step_ms"] > 0
        assert row["watts"] is None
        # A CPU's profile has no streams, and the row says so.
        assert "only /host:CPU" in row["overlap"]["unavailable"]
        assert any(line.startswith(label) for line in captured.out.splitlines())
        assert row["logits"]["repeats"]
        assert row["logits"]["compared_with"] == "sequential (reference)"
        assert row["logits"]["difference"] < 1e-5
        assert f"compiled {label}, 2 layers" in captured.err
    assert json.loads((out / "report.json").read_text()) == found
    assert len(list((out / "streams-reference-xplane").rglob("*.xplane.pb"))) == 2
    assert found["optimal"]["tokens_per_s_per_gpu"] is None


def test_traces_become_figures_and_pictures(plan_file, light_steps, monkeypatch, tmp_path, capsys) -> None:
    """What needs a GPU's trace, on one that is made up: `streams` keeps to the plan, `nano` runs on one stream."""

    def made_up(folder):
        trace = planned_trace(small_plan(), int(folder.name), measure.TRACED_STEPS)
        traced.append(folder)
        return trace if len(traced) > 2 else [dataclasses.replace(event, stream="Stream #1") for event in trace]

    traced = []
    monkeypatch.setattr(command, "read_events", made_up)
    out = tmp_path / "out"
    line = ["--plan", str(plan_file), "--workload", "8:8", "--modes", "nano,streams", "--out", str(out), *SMALL]
    assert command.main(line) == 0
    captured = capsys.readouterr().out
    nano, streams = (row["overlap"] for row in json.loads(captured.splitlines()[-1])["modes"].values())
    assert nano["busy_us"] == streams["busy_us"]
    assert streams["pairs"]["compute+memory"]["us"] > 0
    assert "none of the" in streams["pairs"]["compute+network"]["why_none"]
    for mode in ("nano", "streams"):
        assert (out / f"{mode}-reference.png").stat().st_size > 1000
        records = json.loads(gzip.decompress((out / f"{mode}-reference.trace.json.gz").read_bytes()))["traceEvents"]
        assert any(record["name"] == "decode_attention 1" for record in records)
    assert "of the shorter" in captured and "no overlap; none of the" in captured


def test_plans_of_one_batch_are_rows_beside_each_other(plan_file, tmp_path, capsys) -> None:
    other = tmp_path / "other.json"
    other.write_bytes(encode(small_plan(seed=5)))
    line = ["--plan", str(plan_file), str(other), "--workload", "8:8", "--modes", "sequential,nano", "--out", str(tmp_path)]
    assert command.main([*line, *SMALL]) == 0
    out = capsys.readouterr().out
    rows = json.loads(out.splitlines()[-1])["modes"]
    assert list(rows) == ["sequential (reference)", "nano plan (reference)", "nano other (reference)"]
    for label, plan in (("nano plan (reference)", small_plan()), ("nano other (reference)", small_plan(seed=5))):
        assert rows[label]["predicted_period_us"] == plan.prediction.nano_us
        assert rows[label]["logits"]["difference"] < 1e-5
    assert rows["sequential (reference)"]["predicted_period_us"] == small_plan().prediction.sequential_us
    shown = [line for line in out.splitlines() if line.startswith(("mode", "sequential", "nano"))]
    assert len(shown) == 4 and len({len(line) for line in shown}) == 1


def test_plans_of_different_batches_are_no_rows_of_one_table(plan_file, tmp_path, capsys) -> None:
    other = tmp_path / "other.json"
    for changes, message in (
        ({"b_dense": 32, "decode_tokens": 16}, "other.json has b_dense=32, "),
        ({"tp": 2, "partition": "all_reduce"}, "other.json has tp=2, "),
        ({"decode_tokens": 4}, "other.json has decode_tokens=4, "),
    ):
        other.write_bytes(encode(small_plan(**changes)))
        assert command.main(["--plan", str(plan_file), str(other), "--workload", "8:8", *SMALL]) == 2
        assert message in capsys.readouterr().err
    plan_file.write_bytes(encode(small_plan(tp=2)))
    other.write_bytes(encode(small_plan(tp=2, partition="all_gather")))
    assert command.main(["--plan", str(plan_file), str(other), "--workload", "8:8", *SMALL]) == 2
    assert "other.json divides o_proj for all_gather, " in capsys.readouterr().err
    other.write_bytes(b"{}")
    assert command.main(["--plan", str(plan_file), str(other), "--workload", "8:8", *SMALL]) == 2
    assert "other.json: not a PipelinePlan" in capsys.readouterr().err
    (tmp_path / "same").mkdir()
    same = tmp_path / "same" / plan_file.name
    same.write_bytes(plan_file.read_bytes())
    assert command.main(["--plan", str(plan_file), str(same), "--workload", "8:8", *SMALL]) == 2
    assert "two plans are named plan" in capsys.readouterr().err


def test_ranks_share_a_step(plan_file, light_steps, capsys) -> None:
    plan_file.write_bytes(encode(small_plan(tp=2)))
    assert command.main(["--plan", str(plan_file), "--workload", "8:8", "--modes", "streams", *SMALL]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["tp"] == 2
    assert found["modes"]["streams (reference)"]["burst"]["deep_step_ms"] > 0
    assert found["modes"]["streams (reference)"]["logits"]["repeats"]


def test_modes_that_fail_leave_the_others_their_turn(plan_file, light_steps, monkeypatch, capsys) -> None:
    lower, time = measure.Bench.lower, measure.Bench.time
    timed = []

    def lower_all_but_sequential(self, variant, num_layers):
        if variant.mode == "sequential":
            raise NotImplementedError("no such kernel")
        return lower(self, variant, num_layers)

    def fail_once(self, run, num_layers, seconds):
        timed.append(num_layers)
        if len(timed) == 1:
            # As a step that fails on a device does.
            for pages in self._cache.k_pages:
                pages.delete()
            raise RuntimeError("out of memory")
        return time(self, run, num_layers, seconds)

    monkeypatch.setattr(measure.Bench, "lower", lower_all_but_sequential)
    monkeypatch.setattr(measure.Bench, "time", fail_once)
    assert command.main(["--plan", str(plan_file), "--workload", "8:8", "--modes", "sequential,nano,xla", *SMALL]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["modes"]
    assert rows["sequential (reference)"] == {"error": "NotImplementedError: no such kernel"}
    assert rows["nano (reference)"] == {"error": "RuntimeError: out of memory"}
    assert "error" not in rows["xla (reference)"]


def test_no_mode_starts_after_the_time_limit(plan_file, light_steps, capsys) -> None:
    line = ["--plan", str(plan_file), "--workload", "8:8", "--modes", "sequential", "--time-limit", "0.001", *SMALL]
    assert command.main(line) == 1
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["modes"]
    assert rows["sequential (reference)"] == {"error": "not started: the time limit of 0.001 s has passed"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--workload", "9:7"], "has decode_tokens=8, asked for 7"),
        (["--workload", "8:8", "--tp", "2"], "has tp=1, asked for 2"),
        (["--workload", "8:8", "--model", "llama3-8b"], "has model=small, asked for llama3-8b"),
    ],
)
def test_a_plan_for_something_else_is_refused(plan_file, line, message, capsys) -> None:
    assert command.main(["--plan", str(plan_file), *line, *SMALL]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--b-dense", "128"], "without --plan, --model and --b-dense are needed"),
        (["--model", "llama3-8b", "--b-dense", "128", "--modes", "nano,warp"], "unknown modes warp"),
        (["--model", "llama3-8b", "--b-dense", "128", "--workload", "1024"], "expected PROMPT:OUTPUT"),
        (["--model", "llama3-8b", "--b-dense", "128", "--workload", "0:512"], "'0:512' has no prompt"),
        (["--model", "llama3-8b", "--b-dense", "128", "--layers", "2"], "--fewer-layers 2 must lie between"),
        (["--model", "llama3-8b", "--b-dense", "128", "--keep-xplane"], "--keep-xplane needs --out"),
        (["--model", "llama3-8b", "--b-dense", "128", "--time-limit", "0"], "--time-limit 0.0 must be positive"),
    ],
)
def test_unfit_arguments_are_refused(line, message, capsys) -> None:
    with pytest.raises(SystemExit):
        command.main(line)
    assert message in capsys.readouterr().err


def test_a_device_that_the_search_does_not_know_is_refused(capsys) -> None:
    assert command.main(["--model", "smollm2-135m", "--b-dense", "128"]) == 2
    assert "search plan: unknown hardware 'cpu'" in capsys.readouterr().err


def test_the_search_finds_the_plan_and_the_optimum(tmp_path) -> None:
    workload = parse_workload("512:512")
    text = find_plan(
        "smollm2-135m", "h200", 1, 256, workload, profile="analytic", shares="constant", out=tmp_path / "plan.json"
    )
    plan = decode_plan(text)
    assert (plan.model, plan.device, plan.tp, plan.b_dense) == ("smollm2-135m", "h200", 1, 256)
    assert plan.decode_tokens == steady_mix(workload, 256).decode_tokens
    throughput, rate = optimal_throughput("llama3-8b", "h200", 1, 2048, workload)
    assert throughput == pytest.approx(655e12 / 2 / preset("llama3-8b").num_params, rel=0.01)
    assert rate == "measured sustained GEMM rate"
    with pytest.raises(SearchError, match="unknown hardware 'tpu'"):
        optimal_throughput("llama3-8b", "tpu", 1, 2048, workload)


def test_a_run_without_watts_keeps_its_time_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    cpu = jax.devices()[:1]
    with PowerMeter(cpu) as meter:
        pass
    assert measure._watts(meter, 0.0, 1.0) == []
    assert f"no watts: NVML knows no power of {cpu[0]}" in capsys.readouterr().err


def test_figures_are_those_of_the_whole_model() -> None:
    config = small_config(num_layers=10)
    setup = measure.Setup(config, {"": small_plan(tp=2)}, parse_workload("8:8"), (2, 6), 4, np.dtype("float32"))
    timings = {
        2: measure.Timing(burst_s=3e-3, sustained_s=4e-3, watts=[1.0, 2.0]),
        6: measure.Timing(burst_s=7e-3, sustained_s=12e-3, watts=[600.0, 700.0]),
    }
    row = report.figures(setup, timings, optimal=1000.0)
    assert row["burst"]["period_us"] == pytest.approx(1000)
    assert row["burst"]["rest_ms"] == pytest.approx(1)
    assert row["burst"]["step_ms"] == pytest.approx(11)
    assert row["sustained"]["step_ms"] == pytest.approx(20)
    assert row["sustained"]["tokens_per_s_per_gpu"] == pytest.approx(16 / 20e-3 / 2)
    assert row["sustained"]["percent_of_optimal"] == pytest.approx(40)
    assert row["watts"] == 650


def test_logits_that_are_not_numbers_have_no_difference() -> None:
    expected = np.array([[3.0, 4.0]])
    assert report.difference(np.array([[3.0, 4.5]]), expected) == pytest.approx(0.1)
    assert report.difference(np.array([[3.0, np.nan]]), expected) is None


def test_noise_is_no_period() -> None:
    setup = measure.Setup(small_config(), {"": small_plan()}, parse_workload("8:8"), (1, 2), 4, np.dtype("float32"))
    row = report.figures(setup, dict.fromkeys((1, 2), measure.Timing(burst_s=1e-3, sustained_s=2e-3, watts=[])), None)
    assert row["burst"]["period_us"] is None
    assert row["sustained"]["deep_step_ms"] == 2
    logits = {"repeats": True, "compared_with": "nano (x)", "difference": 0.0}
    rest = {"overlap": {"unavailable": "y"}, "logits": logits, "predicted_period_us": 5.0}
    text = report.lines("nano (x)", row | rest, {"sequential (x)": row}, 10)[0]
    assert text.split() == ["nano", "(x)", *"----", "5.0", *"----"]


def test_rows_of_the_table_show_overlap_and_reasons() -> None:
    kinds = {
        kind: {"period_us": us, "step_ms": 1.0, "rest_ms": 0.1, "tokens_per_s_per_gpu": 9.0, "percent_of_optimal": 51.0}
        for kind, us in (("burst", 50.0), ("sustained", 60.0))
    }
    absent = {"us": 0.0, "percent": None, "why_none": "none of the 7 kernels traced is of network"}
    overlap = {
        "pairs": {
            "compute+memory": {"us": 12.0, "percent": 60.0},
            **dict.fromkeys(("compute+network", "memory+network"), absent),
        },
        "network_hidden_percent": None,
    }
    logits = {"repeats": True, "compared_with": "sequential (cublas)", "difference": 0.00456}
    streams = {**kinds, "watts": 650.0, "overlap": overlap, "logits": logits, "predicted_period_us": 61.5}
    sequential = {kind: {**kinds[kind], "period_us": 75.0} for kind in kinds}
    lines = report.lines("streams (mosaic)", streams, {"sequential (cublas)": sequential, "nano (mosaic)": {"error": "x"}}, 18)
    assert "61.5" in lines[0] and "1.500" in lines[0] and "1.250" in lines[0] and "51.0 %" in lines[0] and "650" in lines[0]
    assert lines[1].strip() == "compute+memory: 12.0 us per layer together, 60.0 % of the shorter"
    assert lines[2].strip() == "compute+network, memory+network: no overlap; none of the 7 kernels traced is of network"
    assert lines[3].strip() == "logits: 0.46 % from those of sequential (cublas), the same bits after every step looked at"
    streams["logits"] = {**logits, "repeats": False, "difference": None}
    line = report.lines("streams (mosaic)", streams, {}, 18)[3]
    assert line.strip() == "logits: NOT FINITE from those of sequential (cublas), NOT THE SAME bits after every step looked at"
    assert report.lines("nano (mosaic)", {"error": "x"}, {}, 15) == ["nano (mosaic)    x"]


@pytest.mark.parametrize("modes", [("sequential", "streams"), ("xla",)])
def test_gpus_show_either_gemm_where_no_budgets_are_kept(modes: tuple[str, ...]) -> None:
    plan = random_plan(np.random.default_rng(0), tp=1, moe=False, partition="none", b_dense=16, decode_tokens=8, tile=4)
    rows = [variant.label for variant in measure.variants(True, "cublas", modes, {"": plan})]
    if "xla" in modes:
        assert rows == ["xla (cublas)", "xla (mosaic)"]
    else:
        assert rows == ["sequential (cublas)", "sequential (mosaic)", "streams (mosaic)"]


@pytest.mark.parametrize(("partition", "kernels"), [("all_reduce", "mosaic"), ("gemm_all_reduce", "mosaic_peers")])
def test_ranks_show_gemms_that_sum_over_them_too(partition: Partition, kernels: str) -> None:
    plan = random_plan(np.random.default_rng(0), tp=2, moe=False, partition=partition, b_dense=16, decode_tokens=8, tile=4)
    rows = [variant.label for variant in measure.variants(True, "cublas", get_args(ExecutionMode), {"": plan})]
    xla = ["xla (cublas)", "xla (mosaic)"] if partition == "all_reduce" else ["xla (mosaic_peers)"]
    budgeted = [f"{mode} ({kernels})" for mode in ("streams", "fused")]
    sequential = [f"sequential ({each})" for each in ("cublas", "mosaic", "mosaic_peers")]
    assert rows == [*sequential, f"nano ({kernels})", *xla, *budgeted]


def test_the_batch_is_the_workloads_mix() -> None:
    # 13 of 48 tokens decode at 16 + 3 tokens; two prompts fit whole.
    workload = parse_workload("16:6")
    batch, num_pages = steady_batch(small_config(), workload, b_dense=48, page_size=4)
    assert int(batch.num_decode) == 13
    assert batch.q_lens[:17].tolist() == [1] * 13 + [16, 16, 3, 0]
    assert batch.kv_lens[:16].tolist() == [19] * 13 + [16, 16, 3]
    assert batch.positions[:14].tolist() == [18] * 13 + [0]
    assert len(np.unique(batch.slots)) == 48
    assert batch.slots.min() >= 4
    assert np.unique(batch.block_tables).max() == num_pages - 1
    assert batch.shape.num_rows == 48
    # Rows beyond the sequences come in tiles only.
    large, _ = steady_batch(small_config(), parse_workload("1024:512"), b_dense=2048, page_size=64)
    assert large.shape.num_rows == 128 * math.ceil((683 + 2) / 128)

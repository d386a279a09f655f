import dataclasses
import functools
import io
import json
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax import bench, bench_predicted, kv_cache, plan_files
from nanoflow_jax.bench_predicted import LaunchedStep, Prices
from nanoflow_jax.config import PRESETS, preset
from nanoflow_jax.executor import runner
from nanoflow_jax.executor.runner import ModelRunner, RunnerConfig
from nanoflow_jax.parallel import parallel_layout
from nanoflow_jax.plan import PlanSet, SequentialTime, period_of_batch_us
from nanoflow_jax.runtime.bench import NullRunner
from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.workload import BatchMix, StepMix
from search import profile_table
from search.hardware import hardware
from search.problem import Costing
from search.profile_table import ProfileError
from search.step_times import load_table, step_prices
from search.step_times import main as step_times

_ROOT = Path(__file__).parents[2]
_PROFILE = str(_ROOT / "search/data/profiles/h200-llama3-8b-tp1.json")
_PLANS = _ROOT / "nanoflow_jax/plans/h200-llama3-8b-tp1.json"
_MODEL, _DEVICE = preset("llama3-8b"), hardware("h200")
_TABLE = profile_table.decode(Path(_PROFILE).read_bytes())
_MACHINE = ["--model", "llama3-8b", "--hardware", "h200", "--profile", _PROFILE]
_LOAD = ["--input", "96", "--output", "40", "--requests", "24", "--b-dense", "256", "--max-sequences", "16"]


def _command(capsys, *words: str) -> tuple[list[str], dict]:
    assert bench_predicted.main([*_MACHINE, *words]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    return lines, json.loads(lines[-1])


def _prices(*steps: StepMix, table=_TABLE):
    return step_prices(_MODEL, _DEVICE, table, steps)


def test_the_command_prints_both_tables_and_everything_adds_up(capsys):
    lines, report = _command(capsys, *_LOAD)
    assert lines[0] == "llama3-8b on h200 (predicted) x 1, sequential, async: 24 requests, 96 tokens in, 40 out"
    assert report["predicted"]
    assert any(line.startswith("predicted: ") and "0 of" in line for line in lines)
    whole, shares = report["whole"], report["shares"]
    assert (whole["prompt_tokens"], whole["output_tokens"]) == (24 * 96, 24 * 40)
    # The first token of an output comes with the last of its prompt.
    assert report["computed_tokens"] == 24 * (96 + 39)
    assert sum(row["tokens"] for row in shares) == report["computed_tokens"]
    # The first call of the engine launches a step and has none to read.
    assert sum(row["steps"] for row in shares) == whole["steps"] - 1
    assert sum(row["seconds"] for row in shares) == pytest.approx(whole["seconds"])
    assert sum(row["least_seconds"] for row in shares) == pytest.approx(report["power"]["least_seconds"])
    assert all(row["least_seconds"] <= row["seconds"] for row in shares)
    assert {row["kind"] for row in shares} == {"prefill", "mixed", "decode"}
    assert {row["decoding"] for row in shares} <= {"0", "1-4", "5-8", "9-12", "13-16"}
    padded = report["computed_tokens"] + report["padding_tokens"]
    assert padded >= 64 * (whole["steps"] - 1)
    assert 0 < report["most_pages"] < report["num_pages"]
    assert whole["total_tokens_per_s"] < report["power"]["total_tokens_per_s"]


def test_the_same_run_twice_is_the_same_to_the_last_digit(capsys):
    assert _command(capsys, *_LOAD) == _command(capsys, *_LOAD)


def test_a_larger_pool_serves_a_uniform_load_no_slower(capsys):
    pages = ("--page-size", "16", "--num-pages")
    reports = [_command(capsys, *_LOAD, *pages, str(n))[1] for n in (20, 40, 80, 160)]
    rates = [report["whole"]["total_tokens_per_s"] for report in reports]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    assert [report["most_pages"] < report["num_pages"] for report in reports] == [True] * 4
    # 16 sequences hold 135 tokens at most: the last of an output is never written.
    assert reports[-1]["most_pages"] <= 16 * 9 < reports[-1]["num_pages"]


@pytest.mark.parametrize("requests", [1, 40])
def test_prefix_reuse_as_in_bench_does_not_change_the_steps(requests):
    """`bench` runs with the prefix cache, which finds nothing in random prompts; the prediction runs without."""
    options = RunnerConfig(b_dense=128, max_sequences=16, page_size=16)
    model = dataclasses.replace(_MODEL, max_context=136)
    load = functools.partial(bench.make_requests, count=requests, input_tokens=96, output_tokens=40, seed=1)
    records, steps, stats = bench_predicted.simulate(model, options, 60, load)
    read = [(r.prompt_tokens, r.decode_tokens) for r in records if r.read_a_step]
    assert read == [(s.prefill_tokens, s.decode_tokens) for s in steps]
    seen = []
    null = NullRunner(
        model,
        shapes=bench_predicted.shapes_of(model, options),
        max_sequences=16,
        page_size=16,
        num_pages=60,
        launched=lambda batch, plan: seen.append((batch.shape.num_tokens, int(batch.num_decode), int(batch.q_lens.sum()))),
    )
    engine = Engine(null)
    bench.run(engine, load(engine))
    assert [(s.padded_tokens, s.decode_tokens, s.tokens) for s in steps] == seen[-len(steps) :]
    assert stats.preemptions == engine.stats().preemptions


@given(st.integers(1, 2048), st.data())
def test_a_step_without_padding_costs_what_the_search_says(tokens, data):
    decode = data.draw(st.integers(0, tokens))
    context, keys = data.draw(st.integers(1, 4000)), data.draw(st.integers(1, 2000))
    mix = BatchMix(b_dense=tokens, decode_tokens=decode, decode_context=context, prefill_context=keys)
    (found,) = _prices(StepMix(tokens, tokens, 1, 1, decode, context, tokens - decode, keys)).layer_us
    assert found == pytest.approx(Costing(model=_MODEL, table=_TABLE, mix=mix, partition="none").sequential_us())


@pytest.mark.parametrize("profile", [_PROFILE, "analytic"])
def test_longer_contexts_more_tokens_and_padding_cost_more(profile):
    base = StepMix(1024, 1024, 1024, 600, 512, 700.0, 256, 300.0)
    more = [
        msgspec.structs.replace(base, **change)
        for change in (
            {"decode_context": 800.0},
            {"prefill_context": 1000.0},
            {"decode_tokens": 600},
            {"prefill_tokens": 512},
            {"padded_tokens": 1536, "gemm_tokens": 1536},
            {"logit_rows": 1536},
        )
    ]
    table = load_table(profile, _MODEL, _DEVICE, 1, [base, *more])
    prices = _prices(base, *more, table=table)
    total = [32 * layer + rest for layer, rest in zip(prices.layer_us, prices.rest_us, strict=True)]
    assert all(each > total[0] for each in total[1:])
    # Energy follows what is computed, not padding.
    assert prices.least_us is not None
    assert all(each > prices.least_us[0] for each in prices.least_us[1:5])
    assert prices.least_us[5:] == (prices.least_us[0],) * 2


def test_logits_are_read_from_a_profile_that_has_them():
    step = StepMix(512, 512, 512, 512, 512, 700.0, 0, 0.0)
    series = profile_table.Series(
        kernel=profile_table.Kernel(name="gemm", shape=(4096, 128256)),
        points=(profile_table.Point(tokens=512, num_sms=132, time_us=5000.0),),
    )
    measured = msgspec.structs.replace(_TABLE, series=(*_TABLE.series, series))
    assert _prices(step).rest_us[0] < 1500
    assert 5000 < _prices(step, table=measured).rest_us[0] < 5300


def _step(plan: int | None) -> LaunchedStep:
    return LaunchedStep(2048, 2048, 1152, 1030, 1024, 700.0, 1024, 256.0, 10_000, plan)


def test_times_of_steps_follow_layers_plans_and_power():
    plans = plan_files.decode_plan_set(_PLANS.read_bytes())
    plans = msgspec.structs.replace(plans, plans=plans.plans[-1:])
    plan = plans.plans[0]
    steps = [_step(None), _step(0), _step(None), _step(0)]
    prices = Prices(0.0, [100.0] * 4, [7.0] * 4, [10.0, 10.0, 4000.0, 1e9])
    by_plan = 32 * period_of_batch_us(plan, 1024, 1024, 700.0) + 7.0
    assert bench_predicted.step_us(32, plans, steps, prices) == [3207.0, by_plan, 4000.0, 1e9]
    longer = msgspec.structs.replace(_step(0), decode_context=1400.0)
    period = period_of_batch_us(plan, 1024, 1024, 1400.0)
    assert 32 * period > by_plan
    assert bench_predicted.step_us(32, plans, [longer], Prices(0.0, [1.0], [7.0], None)) == [32 * period + 7.0]
    # A batch that fills fewer of the plan's places takes what the batcher chose the plan by.
    part = msgspec.structs.replace(_step(0), decode_tokens=700, prefill_tokens=400)
    period = period_of_batch_us(plan, 700, 400, 700.0)
    assert period < plan.period_us
    assert bench_predicted.step_us(32, plans, [part], Prices(0.0, [1.0], [7.0], None)) == [32 * period + 7.0]
    unlimited = dataclasses.replace(prices, least_us=None)
    assert bench_predicted.step_us(32, plans, steps, unlimited) == [3207.0, by_plan] * 2


def _eager_plans(tmp_path: Path) -> tuple[Path, PlanSet]:
    """The shipped plan for as many outputs as prompts, beside sequential execution said to be so slow that it always pays."""
    shipped = plan_files.decode_plan_set(_PLANS.read_bytes())
    slow = SequentialTime(b_dense=2048, decode_tokens=1024, layer_us=1e6)
    plans = msgspec.structs.replace(shipped, plans=shipped.plans[-1:], sequential=(slow,), crossover_tokens=128)
    path = tmp_path / "plans.json"
    path.write_bytes(plan_files.encode(plans))
    return path, plans


def test_a_record_is_of_the_step_that_its_call_read(tmp_path):
    """Asynchronous calls read the step that the call before launched."""
    _, plans = _eager_plans(tmp_path)
    # So fast that plans pay for large steps only.
    times = (msgspec.structs.replace(plans.sequential[0], layer_us=2.0 * 2048),)
    plans = msgspec.structs.replace(plans, sequential=times)
    options = RunnerConfig(b_dense=2048, max_sequences=128, page_size=16, mode="streams", plans=plans)
    model = dataclasses.replace(_MODEL, max_context=80)
    load = functools.partial(bench.make_requests, count=150, input_tokens=64, output_tokens=4, seed=1)
    records, steps, _ = bench_predicted.simulate(model, options, 2000, load)
    planned = [step.plan is not None for step in steps]
    assert [record.planned for record in records if record.read_a_step] == planned
    assert True in planned and False in planned


def test_steps_by_plan_are_counted_and_take_the_plans_time(capsys, tmp_path):
    path, plans = _eager_plans(tmp_path)
    load = ["--input", "64", "--output", "4", "--requests", "200", "--max-sequences", "128"]
    lines, report = _command(capsys, *load, "--plans", str(path))
    assert report["b_dense"] == 2048
    planned = [row for row in report["shares"] if row["planned"]]
    assert report["planned_steps"] == sum(row["planned"] for row in report["shares"]) > 0
    assert f"{report['planned_steps']} of {report['whole']['steps']} steps by plan" in "\n".join(lines)
    plan = plans.plans[0]
    # Every planned step decodes or begins prompts beside decoding, so none is shorter than one that fills hardly any place.
    least = 1e-6 * 32 * period_of_batch_us(plan, 1, 0)
    assert all(row["seconds"] > row["planned"] * least for row in planned)
    assert _command(capsys, *load)[1]["planned_steps"] == 0


def test_kernels_that_leave_padding_out_save_its_time_and_no_energy(capsys):
    """Every step has one size, so there is much padding."""
    left_out, multiplied = (
        _command(capsys, *_LOAD, "--step-sizes", "256", "--kernels", kernels)[1] for kernels in ("mosaic", "cublas")
    )
    assert left_out["padding_tokens"] == multiplied["padding_tokens"] > 0
    assert left_out["whole"]["steps"] == multiplied["whole"]["steps"]
    assert left_out["whole"]["seconds"] < multiplied["whole"]["seconds"]
    assert left_out["power"]["least_seconds"] == multiplied["power"]["least_seconds"]


def test_collectives_send_padding():
    model, device = preset("llama3-70b"), hardware("h200")
    steps = [StepMix(padded, 256, 16, 16, 16, 100.0, 240, 50.0) for padded in (256, 512)]
    table = load_table("analytic", model, device, 8, steps)
    narrow, wide = step_prices(model, device, table, steps).layer_us
    costing = Costing(
        model=model,
        table=table,
        mix=BatchMix(b_dense=512, decode_tokens=16, decode_context=100.0, prefill_context=50.0),
        partition="all_reduce",
    )
    added = [costing.time_of(name, 512) - costing.time_of(name, 256) for name in ("o_all_reduce", "ffn_all_reduce")]
    assert wide - narrow == pytest.approx(sum(added))


def test_without_a_power_model_nothing_is_said_of_power(capsys):
    words = ["--model", "llama2-7b", "--hardware", "a100-80g", "--input", "30", "--output", "5", "--requests", "4"]
    assert bench_predicted.main(words) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    report = json.loads(lines[-1])
    assert report["power"] is None
    assert not any("power alone" in line for line in lines)
    assert report["whole"]["output_tokens"] == 20


@pytest.mark.parametrize(("model", "tp"), [("llama3-8b", 1), ("llama3-70b", 8), ("mixtral-8x7b", 2)])
def test_the_pool_is_the_one_that_the_runner_would_make(model, tp, monkeypatch):
    """`ModelRunner` sizes its pool with weights on the device, the prediction by how large they are."""
    config, claimed = PRESETS[model], 134_000_000_000
    layout = parallel_layout(config, tp)
    options = RunnerConfig(b_dense=2048, max_sequences=1024, page_size=64, greedy_only=True)
    free = int(claimed - 2 * config.num_params / tp)
    monkeypatch.setattr(runner, "free_device_bytes", lambda device: free)
    made = SimpleNamespace(config=config, _layout=layout, mesh=SimpleNamespace(devices=SimpleNamespace(flat=[None])))
    made.pages_per_seq = -(-config.max_context // 64)
    made._bytes_beside_pool = lambda *sizes: ModelRunner._bytes_beside_pool(made, *sizes)  # pyright: ignore
    bytes_per_page = kv_cache.page_bytes(config, layout, 64, jnp.dtype(jnp.bfloat16))
    wanted = ModelRunner._pages_from_memory(made, options, bytes_per_page)  # pyright: ignore
    assert bench_predicted.pool_pages(config, options, tp, claimed) == wanted


def test_sizes_are_those_that_bench_takes_on_such_a_gpu(capsys):
    _, report = _command(capsys, "--input", "512", "--output", "8", "--requests", "3", "--device-memory-gb", "80")
    args = SimpleNamespace(model="llama3-8b", workload="uniform", tp_size=1, input=512, output=8)
    args.b_dense = args.max_sequences = args.page_size = None
    sizes = bench.sizes_for(args, None, int(0.95 * 80e9))  # pyright: ignore
    assert {name: report[name] for name in sizes} == sizes


def test_what_the_profile_does_not_cover_is_refused(capsys):
    with pytest.raises(ProfileError, match="up to 2048 tokens, not 2560"):
        _prices(StepMix(2560, 2560, 128, 10, 10, 100.0, 2000, 100.0))
    with pytest.raises(ProfileError, match=r"no gemm\(8192, 10240\)"):
        step_prices(preset("llama3-70b"), _DEVICE, _TABLE, [StepMix(256, 256, 16, 16, 16, 100.0, 0, 0.0)])
    load = ["--input", "2000", "--output", "2", "--requests", "3", "--b-dense", "4096"]
    assert bench_predicted.main([*_MACHINE, *load]) == 2
    assert "error: profile of llama3-8b on h200 has gemm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (b"[", "truncated"),
        (b"[[64, 64, 8, 1]]", "length 8, got 4"),
        (b"[[64, 64, 8, 8, 60, 10.0, 5, 10.0]]", "of 64 tokens"),
        (b"[[64, 32, 8, 8, 33, 10.0, 0, 0.0]]", "of 64 tokens"),
        (b"[[64, 64, 8, 8, 0, 0.0, 0, 0.0]]", "some must be computed"),
        (b"[[64, 64, 8, 9, 9, 10.0, 0, 0.0]]", "of 8 rows"),
    ],
)
def test_steps_that_cannot_be_are_not_priced(steps, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(steps)))
    assert step_times(_MACHINE) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err
    assert not captured.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hardware", "h1000"], "unknown hardware 'h1000'"),
        (["--model", "llama9"], "unknown model preset 'llama9'"),
        (["--hardware", "a100-80g"], "is of 1 x h200, asked for 1 x a100-80g"),
        (["--tp", "3"], "tp=3 does not divide"),
        (["--profile", "no-such-file.json"], "no-such-file.json"),
        (["--input", "9000"], "9512 tokens do not fit the context of llama3-8b"),
        (["--num-pages", "2"], "do not fit"),
        (["--memory-fraction", "2"], "memory_fraction=2.0 must lie in"),
        (["--device-memory-gb", "10"], "a pool of 0 tokens does not hold"),
        (["--plans", str(_PLANS), "--tp", "2"], "do not fit llama3-8b on 2 x h200"),
    ],
)
def test_what_makes_no_sense_is_refused(words, message, capsys):
    assert bench_predicted.main([*_MACHINE, "--requests", "2", *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err
    assert not captured.out


@pytest.mark.parametrize("flag", ["--input", "--output", "--requests", "--num-pages", "--device-memory-gb"])
def test_nothing_to_do_is_refused(flag, capsys):
    with pytest.raises(SystemExit):
        bench_predicted.main([*_MACHINE, flag, "0"])
    assert f"{flag} 0" in capsys.readouterr().err

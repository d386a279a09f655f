"""The command line end to end: contracts of its last line, files it writes, errors, limits; and what plans must look like."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanoflow_jax.config import preset
from nanoflow_jax.plan import PipelinePlan
from nanoflow_jax.plan_files import decode_plan, decode_plan_set
from nanoflow_jax.workload import parse_workload, steady_mix
from search import profile_table
from search.__main__ import main
from search.analytic import analytic_profile
from search.auto_search import Options, auto_search
from search.hardware import hardware
from search.simulate import simulate

KEYS = [
    "model", "hardware", "b_dense", "nano_ops", "period_us", "sequential_us", "speedup", "lower_bound_us", "gap", "solve_s",
    "utilization",
]  # fmt: skip
SMALL = ["--model", "llama3-8b", "--hardware", "a100-80g", "--b-dense", "512", "--workload", "512:512"]


def _run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[dict, str]:
    assert main(args) == 0
    out = capsys.readouterr().out
    return json.loads(out.strip().splitlines()[-1]), out


def test_cost(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "cost",
        "--model",
        "llama2-70b",
        "--hardware",
        "a100-80g",
        "--tp",
        "8",
        "--b-dense",
        "2048",
        "--workload",
        "sharegpt",
    ]
    record, out = _run(capsys, *args)
    assert record["bottleneck"] == "compute"
    assert record["operations"]["gate_up_proj"]["flops"] == pytest.approx(153931.6e9, rel=1e-5)
    for column in ("GFLOP", "TR at full memory", "largest B_dense", "datasheet", "measured"):
        assert column in out


@pytest.mark.parametrize("shares", ["constant", "phased"])
def test_plan_writes_a_valid_plan_and_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path, shares: str) -> None:
    out, plot = tmp_path / "plan.json", tmp_path / "plan.svg"
    args = ["plan", *SMALL, "--shares", shares, "--out", str(out), "--plot", str(plot), "--work", "0.1"]
    record, text = _run(capsys, *args)
    assert list(record) == KEYS
    plan = decode_plan(out.read_bytes())
    assert record["period_us"] == pytest.approx(plan.period_us, abs=1e-3)
    assert record["nano_ops"] == len(plan.nano_operations)
    assert record["speedup"] == pytest.approx(record["sequential_us"] / record["period_us"], abs=1e-3)
    assert set(record["utilization"]) == {"compute", "memory", "network", "power_w"}
    assert "decode_attention 2" in text
    assert plot.read_text().startswith("<?xml")
    assert "gate+up" in plot.read_text() or plot.stat().st_size > 20_000
    replayed, _ = _run(capsys, "simulate", str(out), "--workload", "512:512")
    assert replayed["plans"][0]["replayed_us"] <= plan.period_us * (1 + 1e-9)


def test_plan_reads_a_profile_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mix = steady_mix(parse_workload("512:512"), 512)
    path = tmp_path / "profile.json"
    path.write_bytes(profile_table.encode(analytic_profile(preset("llama3-8b"), hardware("a100-80g"), 1, [mix])))
    from_file, _ = _run(capsys, "plan", *SMALL, "--profile", str(path), "--work", "0.1")
    computed, _ = _run(capsys, "plan", *SMALL, "--work", "0.1")
    assert {**from_file, "solve_s": 0} == {**computed, "solve_s": 0}


def test_plan_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "plans.json"
    args = [
        "plan-set",
        *SMALL[:4],
        "--b-dense",
        "128",
        "512",
        "--workload",
        "512:512",
        "1024:512",
        "--out",
        str(out),
        "--work",
        "0.05",
    ]
    record, _ = _run(capsys, *args)
    plans = decode_plan_set(out.read_bytes())
    assert record["plans"] == len(plans.plans) > 0
    recorded = {(s.b_dense, s.decode_tokens) for s in plans.sequential}
    assert recorded == {(128 * n, d) for n in (1, 2, 3, 4) for d in (64 * n, round(128 * n / 3))}
    # Each plan of the set is replayed with the mix it was made for.
    assert len({plan.decode_context for plan in plans.plans}) == 2
    replayed, _ = _run(capsys, "simulate", str(out), "--workload", "512:512", "1024:512")
    assert [(r["b_dense"], r["decode_tokens"]) for r in replayed["plans"]] == [
        (p.b_dense, p.decode_tokens) for p in plans.plans
    ]
    for r, plan in zip(replayed["plans"], plans.plans, strict=True):
        assert 0.9 * plan.period_us < r["replayed_us"] <= r["period_us"] * (1 + 1e-6) == plan.period_us * (1 + 1e-6)
    assert main(["simulate", str(out), "--workload", "512:512"]) == 2
    assert "decode_context=1280.0" in capsys.readouterr().err
    picture = tmp_path / "plans.svg"
    assert main(["simulate", str(out), "--workload", "512:512", "1024:512", "--plot", str(picture)]) == 2
    assert f"is for one plan, {out} holds {len(plans.plans)}" in capsys.readouterr().err
    assert not picture.exists()


def _hand(out: Path, b_dense: int, workload: str, *more: str) -> str:
    command = ["hand", "--model", "llama3-8b", "--hardware", "h200", "--b-dense", str(b_dense), "--workload", workload, *more]
    assert main([*command, "--border", "512", "--attention-sms", "48", "--out", str(out)]) == 0
    return str(out)


def test_a_plan_of_any_decoding_tokens_is_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The mix is the plan's own; of the workload only the prompts' context is taken, and none is needed without prompts."""
    mixed = _hand(tmp_path / "mixed.json", 1024, "512:1024", "--decode-tokens", "512")
    replayed, _ = _run(capsys, "simulate", mixed, "--workload", "512:1024")
    assert (replayed["plans"][0]["b_dense"], replayed["plans"][0]["decode_tokens"]) == (1024, 512)
    assert replayed["plans"][0]["replayed_us"] == pytest.approx(replayed["plans"][0]["period_us"])
    decoding = _hand(tmp_path / "decoding.json", 1024, "512:512", "--decode-tokens", "1024")
    replayed, _ = _run(capsys, "simulate", decoding)
    assert replayed["plans"][0]["replayed_us"] == pytest.approx(replayed["plans"][0]["period_us"])
    for workload, message in (([], "none is given"), (["--workload", "512:512"], "512:512 has 768.0")):
        assert main(["simulate", mixed, *workload]) == 2
        captured = capsys.readouterr()
        assert "1024 tokens, 512 decoding at decode_context=1024.0" in captured.err
        assert message in captured.err
        assert captured.out == ""


def test_a_file_without_plans_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    path.write_text(
        '{"model": "llama3-8b", "device": "h200", "tp": 1, "plans": [], "sequential": [], "crossover_tokens": null}'
    )
    assert main(["simulate", str(path)]) == 2
    assert "holds no plan" in capsys.readouterr().err
    path.write_text('{"model": "llama3-8b"}')
    assert main(["simulate", str(path)]) == 2
    assert f"{path}: neither a plan set" in capsys.readouterr().err


def test_hand_states_bounds_and_its_limits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "hand.json"
    _hand(out, 1024, "512:512")
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(record) == KEYS
    assert 0 <= record["gap"] < 0.2
    assert 0.5 * record["period_us"] < record["lower_bound_us"] <= record["period_us"]
    machine = ["--model", "mixtral-8x7b", "--hardware", "h200", "--tp", "4", "--b-dense", "1024", "--workload", "512:512"]
    assert main(["hand", *machine, "--border", "512", "--attention-sms", "48", "--out", str(tmp_path / "moe.json")]) == 2
    assert "mixtral-8x7b" in capsys.readouterr().err


def test_join_replays_the_plans_on_the_profile(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [_hand(tmp_path / "1.json", 1024, "512:512"), _hand(tmp_path / "2.json", 1536, "1024:512")]
    out = tmp_path / "set.json"
    join = ["join", *files, "--out", str(out)]
    assert main([*join, "--profile", "analytic", "--workload", "512:512"]) == 2
    assert "1536 tokens, 512 decoding at decode_context=1280.0" in capsys.readouterr().err
    measured = str(Path(__file__).parents[2] / "search/data/profiles/h200-llama3-8b-tp1.json")
    assert main([*join, "--profile", measured, "--workload", "512:512", "1024:512"]) == 2
    assert re.search(r"1024 tokens, 512 decoding, on profile .*best_us=.*the profile says", capsys.readouterr().err)
    assert not out.exists()
    assert main([*join, "--profile", "analytic", "--workload", "512:512", "1024:512"]) == 0
    found = decode_plan_set(out.read_bytes())
    assert len(found.plans) == 2
    assert {s.decode_context for s in found.sequential if s.b_dense == 256} == {768.0}  # the first workload's


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--model": "llama9"}, "unknown model preset 'llama9'"),
        ({"--hardware": "abacus"}, "unknown hardware 'abacus'"),
        ({"--b-dense": "500"}, "b_dense=500 is not a positive multiple of 128"),
        ({"--b-dense": "4096"}, "needs more memory"),
        ({"--model": "llama2-70b"}, "leaves no room"),
        ({"--workload": "chat"}, "unknown workload 'chat'"),
        ({"--tp": "3"}, "tp=3 does not divide"),
        ({"--profile": "/nowhere.json"}, "nowhere.json"),
    ],
)
def test_errors_name_the_value(capsys: pytest.CaptureFixture[str], changes: dict[str, str], message: str) -> None:
    options = dict(zip(SMALL[::2], SMALL[1::2], strict=True)) | changes
    assert main(["plan", *(x for pair in options.items() for x in pair)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_profiling_needs_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import jax

    if jax.default_backend() == "gpu":
        pytest.skip("this machine has one")
    assert main(["profile", "--model", "llama3-8b", "--hardware", "h200", "--out", str(tmp_path / "profile.json")]) == 2
    assert "profiling needs 1 GPU(s)" in capsys.readouterr().err


def _search(name: str, tp: int, device: str, workload: str, b_dense: int, options: Options):
    model, mix = preset(name), steady_mix(parse_workload(workload), b_dense)
    return auto_search(model, analytic_profile(model, hardware(device), tp, [mix]), mix, options)


def test_the_same_seed_gives_the_same_plan() -> None:
    options = Options(work=0.02, time_limit_s=300, seed=5)
    one, two = (_search("llama2-70b", 8, "a100-80g", "512:512", 512, options) for _ in range(2))
    assert not one.timed_out
    assert one.plan == two.plan


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_time_limit_is_kept_and_leaves_a_valid_plan(limit: float) -> None:
    begun = time.process_time()
    outcome = _search("llama2-70b", 8, "a100-80g", "512:1024", 2048, Options(time_limit_s=limit))
    assert outcome.timed_out
    # A full search takes tens of CPU seconds; building the problems and the last solver calls under way are allowed for.
    assert time.process_time() - begun < 12 + 2 * limit
    simulate(outcome.plan, outcome.costings[outcome.plan.partition])


def _beside(plan: PipelinePlan, operation: str) -> dict[str, float]:
    """Microseconds that each operation of the compute lane runs together with `operation`."""
    together: dict[str, float] = {}
    for phase in plan.phases:
        names = [plan.nano_operations[r.nano_operation].operation for r in phase.running]
        if operation in names:
            for name in set(names) - {operation}:
                together[name] = together.get(name, 0.0) + phase.duration_us
    return together


def test_two_nano_batches_suffice_for_8b_and_attention_lies_beside_the_feed_forward() -> None:
    outcome = _search("llama3-8b", 1, "a100-80g", "512:512", 1024, Options())
    stage = outcome.stage_one["none"]
    assert stage.best.period == stage.bound
    assert set(stage.best.counts) <= {1, 2}
    plan = outcome.plans["phased"]
    assert all(len(b) <= 2 for b in plan.nano_batches.values())
    beside = _beside(plan, "decode_attention")
    assert sum(beside.get(x, 0.0) for x in ("gate_up_proj", "down_proj")) > 0.5 * sum(beside.values())
    assert 1.1 < plan.speedup < 1.3


@pytest.mark.parametrize(("workload", "b_dense"), [("1024:512", 2048), ("512:512", 2048), ("512:1024", 1024)])
def test_h200_gains_stay_under_what_power_allows(workload: str, b_dense: int) -> None:
    outcome = _search("llama3-8b", 1, "h200", workload, b_dense, Options())
    for form in ("constant", "phased"):
        plan = outcome.plans[form]
        assert plan.speedup > 1.0
        assert plan.prediction.mean_power_w <= 700.001
        if workload == "1024:512":
            assert plan.speedup < 1.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp", "b_dense"),
    [
        ("llama2-70b", 8, 2048),
        ("qwen2-72b", 8, 2048),
        ("deepseek-67b", 8, 2048),
        ("mixtral-8x7b", 8, 2048),
        ("llama3-8b", 1, 1024),
    ],
)
def test_paper_models(name: str, tp: int, b_dense: int) -> None:
    """Stage I ends within 5 % of the bound for its counts or for the starting counts; the work fits 2 x 60 CPU seconds."""
    outcome = _search(name, tp, "a100-80g", "1024:512", b_dense, Options(time_limit_s=600))
    assert not outcome.timed_out
    assert outcome.cpu_s < 120
    best = min(outcome.stage_one.values(), key=lambda s: s.best.period * s.best.problem.tick_us)
    assert min(best.best.period / best.bound, best.best.period / best.base_bound) <= 1.05
    for plan in outcome.plans.values():
        simulate(plan, outcome.costings[plan.partition])
    assert outcome.plan.speedup > 1


def test_costs_need_no_solver() -> None:
    """Machines that only measure or compare go without OR-Tools."""
    without = "import sys; sys.modules['ortools'] = None; from search.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", without, "cost", "--model", "llama3-8b", "--hardware", "h200",
         "--b-dense", "2048", "--workload", "1024:512"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_plans_made_one_by_one_join_into_a_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = []
    for b_dense, workload, border in ((1920, "1024:512", 640), (1024, "0:1536", 512)):
        files.append(str(tmp_path / f"{b_dense}.json"))
        command = ["hand", "--model", "llama3-8b", "--hardware", "h200", "--b-dense", str(b_dense), "--workload", workload]
        assert main([*command, "--border", str(border), "--attention-sms", "48", "--out", files[-1]]) == 0
    out = tmp_path / "set.json"
    assert main(["join", *files, "--out", str(out)]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = decode_plan_set(out.read_bytes())
    assert record["plans"] == len(found.plans) == 2
    assert [p.b_dense for p in found.plans] == [1024, 1920]
    assert len(found.sequential) == 2
    # With a profile there are sequential times for batches of all sizes, from prompts alone to decoding alone.
    profiled = [*files, "--profile", "analytic", "--workload", "1024:512", "--out", str(out)]
    assert main(["join", *profiled]) == 0
    times = {(s.b_dense, s.decode_tokens): s.layer_us for s in decode_plan_set(out.read_bytes()).sequential}
    assert len(times) == 7 * 5 + 1  # the smaller plan has one of these mixes itself
    assert times[256, 0] < times[1792, 0] < times[1792, 896] < times[1792, 1792]
    assert main(["join", *profiled[:4], "--out", str(out)]) == 2
    assert "go together" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_bytes(Path(files[0]).read_bytes().replace(b'"llama3-8b"', b'"llama2-7b"'))
    assert main(["join", files[1], str(other), "--out", str(out)]) == 2
    assert "one model" in capsys.readouterr().err


def test_the_shipped_plans_are_what_their_commands_make(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """docs/performance.md has the commands; profile, power model and plans must not part ways."""
    root = Path(__file__).parents[2]
    name = "h200-llama3-8b-tp1.json"
    profile = str(root / "search/data/profiles" / name)
    by_hand = {
        "steady": "--b-dense 2048 --workload 512:512 --border 1024",
        "prompts": "--b-dense 2048 --workload 1024:512 --decode-tokens 640 --border 1024",
        "outputs": "--b-dense 1024 --workload 1:1535 --decode-tokens 1024 --border 512",
    }
    paths = {mix: str(tmp_path / f"{mix}.json") for mix in by_hand}
    for mix, options in by_hand.items():
        _run(
            capsys, "hand", "--model", "llama3-8b", "--hardware", "h200", "--profile", profile, "--attention-sms", "32",
            *options.split(), "--out", paths[mix],
        )  # fmt: skip
    workloads = ("--workload", "512:512", "1024:512")
    _run(capsys, "join", *paths.values(), "--profile", profile, *workloads, "--out", str(tmp_path / name))
    made, shipped = (_leaves(json.loads((folder / name).read_bytes())) for folder in (tmp_path, root / "nanoflow_jax/plans"))
    assert made.keys() == shipped.keys()
    # Times are sums, and the last digit of a sum depends on the Python version (3.12 compensates) and on the processor.
    expected = {k: pytest.approx(v, rel=1e-9) if isinstance(v, float) else v for k, v in shipped.items()}
    wrong = {k: (made[k], shipped[k]) for k, v in expected.items() if made[k] != v}
    assert not wrong
    # The plan for outputs is left out: its context is that of no workload with prompts.
    for mix, workload in (("steady", "512:512"), ("prompts", "1024:512")):
        replayed, _ = _run(capsys, "simulate", paths[mix], "--profile", profile, "--workload", workload)
        assert [r["replayed_us"] for r in replayed["plans"]] == pytest.approx(
            [decode_plan(Path(paths[mix]).read_bytes()).period_us]
        )


def _leaves(value: object, path: str = "") -> dict[str, object]:
    """The values of a JSON document by path; numbers of SMs, tokens and phases are whole and so compare exactly."""
    if not isinstance(value, dict | list):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {k: v for key, inner in items for k, v in _leaves(inner, f"{path}/{key}").items()}

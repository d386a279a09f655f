import json
from pathlib import Path

import pytest

from nanoflow_jax import bench
from nanoflow_jax.runtime import bench as host_bench
from nanoflow_jax.runtime.engine import Engine
from tests.runtime.mock_runner import MockRunner

_TINY = str(Path(__file__).parents[1] / "data" / "tiny" / "llama2-tiny")


def _records(sync: bool, **sizes):
    engine = Engine(MockRunner(**sizes), sync=sync)
    requests = bench.make_requests(engine, 30, 20, 10, seed=0)
    return engine, bench.run(engine, requests)


@pytest.mark.parametrize("sync", [False, True])
def test_every_token_is_counted_once(sync):
    engine, records = _records(sync, b_dense=32, max_sequences=8, num_pages=100)
    report = bench.summarise(records, engine.stats())
    assert report["whole"]["prompt_tokens"] == 30 * 20
    assert report["whole"]["output_tokens"] == 30 * 10
    by_kind = [row for row in report["by_kind"].values() if row]
    assert sum(row["output_tokens"] for row in by_kind) == 300
    assert sum(row["prompt_tokens"] for row in by_kind) == 600
    assert report["by_kind"]["decode"]["prompt_tokens"] == 0
    steady = report["steady"]
    assert 0 < steady["steps"] < report["whole"]["steps"]
    parts = sum(report["whole"][part] for part in ("form_ms", "launch_ms", "consume_ms", "wait_ms"))
    assert parts <= report["whole"]["step_ms"]


def test_a_run_without_a_queue_has_no_steady_state():
    engine, records = _records(False, b_dense=64, max_sequences=30, num_pages=400)
    assert bench.summarise(records, engine.stats())["steady"] is None


def test_what_does_not_fit_is_refused():
    engine = Engine(MockRunner(num_pages=10))
    with pytest.raises(ValueError, match="the pool holds 36"):
        bench.make_requests(engine, 1, 30, 10, seed=0)


def test_the_command_prints_a_table_and_ends_with_one_json_object(capsys, tmp_path):
    """The peer is an interpreter that notes how it was called and answers as bench_transformers.py does."""
    peer = tmp_path / "python"
    report = '{"peer": "stand-in", "output_tokens_per_s": 2.0}'
    peer.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/call\necho loading\necho '{report}'\n")
    peer.chmod(0o755)
    load = ["--input", "9", "--output", "5", "--requests", "6"]
    bench.main(["--model", _TINY, *load, "--b-dense", "16", "--max-sequences", "4", "--peer-python", str(peer)])
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[0].startswith("llama2-tiny on cpu x 1, sequential, async: 6 requests, 9 tokens in, 5 out")
    assert lines[-2].startswith("stand-in: 2.00 output tokens/s; this engine: ")
    report = json.loads(lines[-1])
    assert report["whole"]["output_tokens"] == 30
    assert report["shapes"] == [[16, 4, 1]]
    assert report["peer"]["output_tokens_per_s"] == 2.0
    assert {"device", "jax", "commit", "num_compilations", "batch_fill"} <= report.keys()
    call = (tmp_path / "call").read_text()
    assert call.startswith("-I ")
    assert f"bench_transformers.py {_TINY} --threads " in call
    assert " ".join(load) in call


@pytest.mark.parametrize("model", [["--model", "llama2-7b"], ["--model", _TINY, "--random-weights"]])
def test_a_peer_needs_weights(model, capsys):
    with pytest.raises(SystemExit):
        bench.main([*model, "--peer-python", "python"])
    assert "needs a model with weights" in capsys.readouterr().err


def test_a_preset_without_weights_runs_on_random_ones(capsys, monkeypatch):
    from nanoflow_jax import config

    small = config.ModelConfig(
        name="small",
        vocab_size=128,
        d_model=64,
        d_ff=128,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        max_context=64,
    )
    monkeypatch.setitem(config.PRESETS, "small", small)
    bench.main(
        ["--model", "small", "--random-weights", "--input", "4", "--output", "3", "--requests", "3", "--b-dense", "16",
         "--max-sequences", "2", "--sync"]
    )  # fmt: skip
    report = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (report["random_weights"], report["stepping"], report["whole"]["output_tokens"]) == (True, "sync", 9)


@pytest.mark.parametrize("flag", ["--input", "--output", "--requests"])
def test_nothing_to_do_is_refused(flag, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--model", _TINY, flag, "0"])
    assert f"{flag} 0 must be at least 1" in capsys.readouterr().err


def test_the_host_benchmark_prints_percentiles_and_ends_with_one_json_object(capsys):
    host_bench.main(["--sequences", "8", "--b-dense", "64", "--steps", "5", "--context", "2048"])
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["whole", "streamed"]
    report = json.loads(lines[-1])
    assert report["sequences"] == 8
    for kind in ("whole", "streamed"):
        times = report["milliseconds"][kind]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"]


@pytest.mark.parametrize("words", [["--steps", "0"], ["--sequences", "9", "--b-dense", "8"], ["--context", "1000"]])
def test_the_host_benchmark_refuses_what_cannot_run(words, capsys):
    with pytest.raises(SystemExit):
        host_bench.main(words)
    assert words[0] in capsys.readouterr().err

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from nanoflow_jax import bench
from nanoflow_jax.runtime import bench as host_bench
from nanoflow_jax.runtime import multi_round
from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.kv_tiers import TierOptions
from nanoflow_jax.runtime.step_records import shares, summarise
from tests.runtime.mock_runner import MockRunner

_TINY = str(Path(__file__).parents[1] / "data" / "tiny" / "llama2-tiny")


def _records(sync: bool, **sizes):
    engine = Engine(MockRunner(**sizes), sync=sync)
    requests = bench.make_requests(engine, 30, 20, 10, seed=0)
    return engine, bench.run(engine, requests)


@pytest.mark.parametrize("sync", [False, True])
def test_every_token_is_counted_once(sync):
    engine, records = _records(sync, b_dense=32, max_sequences=8, num_pages=100)
    report = summarise(records, engine.stats())
    assert report["whole"]["prompt_tokens"] == 30 * 20
    assert report["whole"]["output_tokens"] == 30 * 10
    by_kind = [row for row in report["by_kind"].values() if row]
    assert sum(row["output_tokens"] for row in by_kind) == 300
    assert sum(row["prompt_tokens"] for row in by_kind) == 600
    assert report["by_kind"]["decode"]["prompt_tokens"] == 0
    rows = shares(records, 8)
    assert sum(row["tokens"] for row in rows) == 30 * (20 + 9)
    assert sum(row["steps"] for row in rows) == sum(record.read_a_step for record in records)
    assert sum(row["seconds"] for row in rows) <= report["whole"]["seconds"]
    assert {row["decoding"] for row in rows} == {"0", "1-2", "3-4", "5-6", "7-8"}
    assert {row["planned"] for row in rows} == {0}
    steady = report["steady"]
    assert 0 < steady["steps"] < report["whole"]["steps"]
    parts = sum(report["whole"][part] for part in ("form_ms", "launch_ms", "consume_ms", "wait_ms"))
    assert parts <= report["whole"]["step_ms"]


def test_a_run_without_a_queue_has_no_steady_state():
    engine, records = _records(False, b_dense=64, max_sequences=30, num_pages=400)
    assert summarise(records, engine.stats())["steady"] is None


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
    assert any(line.startswith("stand-in: 2.00 output tokens/s; this engine: ") for line in lines)
    assert lines[-2].startswith("0 steps by a plan; ready to serve after ")
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


def _lengths(words: str) -> list[multi_round.Lengths]:
    parser = argparse.ArgumentParser()
    for name in ("input", "output", "requests", "seed"):
        parser.add_argument(f"--{name}", type=int)
    multi_round.add_arguments(parser)
    return multi_round.draw_lengths(parser.parse_args(["--seed", "1", *words.split()]))


def test_conversations_have_the_lengths_of_the_trace_or_those_asked_for():
    drawn = _lengths("--requests 500")
    assert 2.7 < np.mean([len(each.messages) for each in drawn]) < 3.1
    assert 8e3 < np.mean([each.messages[0] for each in drawn]) < 12e3
    assert 300 < np.mean([n for each in drawn for n in each.answers]) < 400
    assert all(len(each.messages) == len(each.answers) >= 2 for each in drawn)
    assert max(each.messages[0] for each in _lengths("--requests 500 --scale 0.001")) == 35
    asked = _lengths("--requests 2 --rounds 3 --input 10 --message 4 --output 5")
    assert asked == [multi_round.Lengths((10, 4, 4), (5, 5, 5))] * 2
    assert asked[0].total == 33


@pytest.mark.parametrize("sync", [False, True])
def test_multi_round_counts_what_reuse_saves(sync):
    runner = MockRunner(page_size=4, num_pages=400, b_dense=64)
    report = multi_round.measure(
        runner, _lengths("--requests 6 --rounds 3 --input 40 --message 8 --output 12"), seed=0, sync=sync
    )
    # Prompts of 40, 60 and 80 tokens; their first 51 and 71 are cached, the last of which may be read too late: 48 and 68.
    assert report["off"]["prompt_tokens"] == report["off"]["prefill_tokens"] == 6 * (40 + 60 + 80)
    assert report["on"]["prefill_tokens"] == 6 * (40 + 12 + 12)
    assert report["prefill_saved"] == 180 / 64
    assert (report["answers"], report["equal_answers"]) == (18, 18)
    assert len(report["first_token_gain"]) == 3


@pytest.mark.parametrize("ssd", [False, True])
def test_multi_round_with_memory_tiers(tmp_path, ssd):
    runner = MockRunner(page_size=4, num_pages=60, b_dense=64)
    options = {"ssd_directory": tmp_path / "kv", "ssd_bytes": 1 << 20} if ssd else {}
    tiers = TierOptions(host_bytes=1 << 16, **options)
    lengths = _lengths("--requests 6 --rounds 3 --input 40 --message 8 --output 12")
    report = multi_round.measure(runner, lengths, seed=0, sync=False, tiers=tiers)
    assert report["tiers_equal_answers"] == 18
    kv = report["tiers"]["kv"]
    assert kv["offloaded_tokens"] > 6 * 40
    assert kv["ssd"]["capacity"] > 0 if ssd else kv["ssd"]["capacity"] == 0
    assert list(report["second_round_ms"]) == ["none", "device", "host", *(["ssd"] if ssd else [])]
    multi_round.print_table(report | {"model": "mock", "device": "none", "tp_size": 1})
    if ssd:
        assert not list((tmp_path / "kv").iterdir()), "what was measured is gone"


def test_bench_refuses_tiers_that_make_no_sense(capsys):
    for options in (["--kv-ssd-gb", "1"], ["--kv-host-gb", "1", "--workload", "uniform"]):
        with pytest.raises(SystemExit):
            bench.main(["--model", "smollm2", *options])
    assert "multi-round" in capsys.readouterr().err


def test_requests_that_do_not_fit_the_pool_are_said_in_a_line():
    sizes = ["--b-dense", "16", "--max-sequences", "2", "--page-size", "16", "--num-pages", "3"]
    with pytest.raises(SystemExit) as ended:
        bench.main(["--model", _TINY, "--input", "40", "--output", "20", "--requests", "1", *sizes])
    assert str(ended.value.code) == "error: 40 tokens in and 20 out do not fit: the context is 60, the pool holds 32"


def test_a_conversation_that_does_not_fit_is_refused():
    runner = MockRunner(page_size=4, num_pages=20)
    lengths = _lengths("--requests 1 --rounds 2 --input 40 --message 20 --output 12")
    with pytest.raises(ValueError, match="a conversation has 84 tokens: the context is 512, the pool holds 76"):
        multi_round.measure(runner, lengths, seed=0, sync=False)


@pytest.mark.slow
def test_the_multi_round_command_prints_both_runs_and_ends_with_one_json_object(capsys):
    load = ["--workload", "multi-round", "--requests", "2", "--rounds", "2", "--input", "30", "--message", "5", "--output", "6"]
    bench.main(["--model", _TINY, *load, "--b-dense", "16", "--max-sequences", "4", "--page-size", "4"])
    lines = capsys.readouterr().out.strip().splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["off", "on"]
    report = json.loads(lines[-1])
    assert report["workload"] == "multi-round"
    assert report["equal_answers"] == report["answers"] == 4
    assert report["on"]["prefill_tokens"] < report["off"]["prefill_tokens"] == 2 * (30 + 41)
    assert {"device", "jax", "commit", "shapes"} <= report.keys()


@pytest.mark.parametrize("words", [["--scale", "0"], ["--rounds", "0"], ["--message", "-1"], ["--peer-python", "python"]])
def test_multi_round_refuses_what_cannot_run(words, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--model", _TINY, "--workload", "multi-round", *words])
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--model", "no/such/folder"], "'no/such/folder' is not a model"),
        (["--model", _TINY, "--plan", "no/such/plan"], "no/such/plan"),
        (["--model", _TINY, "--plan", __file__], "neither a plan set"),
        (["--model", _TINY, "--num-pages", "1"], "num_pages"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_a_line(options, why):
    with pytest.raises(SystemExit) as ended:
        bench.main(options)
    assert str(ended.value.code).startswith("error: ")
    assert why in str(ended.value.code)


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

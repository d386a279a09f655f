"""`python -m serve` with real models: what Hugging Face transformers computed comes out of the other end of the socket."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from nanoflow_jax.runtime.request import FinishReason, SamplingParams
from serve.__main__ import main
from serve.client import Client, ServerError
from serve.protocol import ErrorCode
from tests.serve.processes import Process, served

DATA = Path(__file__).parent.parent / "data"
TINY = DATA / "tiny" / "llama3-tiny"
SMALL = ("--b-dense", "16", "--max-sequences", "4", "--dtype", "float32")
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, cache):
    with served(tmp_path_factory.mktemp("serve"), "--model", str(TINY), *SMALL, "--cache-dir", str(cache)) as process:
        yield process


def test_tiny_checkpoint_gives_the_golden_tokens(tiny: Process):
    golden = np.load(TINY / "golden.npz")
    prompt, expected = golden["input_ids"].tolist(), golden["greedy_ids"].tolist()
    params = SamplingParams(max_tokens=len(expected), ignore_eos=True, logprobs=5)
    with tiny.client() as client:
        streams = [client.stream(prompt[:n] if n else prompt, params) for n in (0, 3, 17, 0, 29, 0)]
        for stream in streams:
            list(stream)
        answers = [stream.result for stream in streams]
        assert answers[0].token_ids == answers[3].token_ids == answers[5].token_ids == expected
        assert client.generate(prompt, params).token_ids == expected
        logits = golden["logits"][-1].astype(np.float64)
        log_softmax = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        top = answers[0].logprobs[0].top
        assert [token for token, _ in top] == np.argsort(-logits, kind="stable")[:5].tolist()
        np.testing.assert_allclose([logprob for _, logprob in top], log_softmax[[t for t, _ in top]], atol=5e-5)
        assert client.stats().engine["num_compilations"] == 7  # one forward and six samplers, all made at the start


def test_the_next_start_loads_what_the_first_compiled(tmp_path, tiny: Process, cache):
    assert "7 compiled" in tiny.log
    with served(tmp_path, "--model", str(TINY), *SMALL, "--cache-dir", str(cache)) as process, process.client() as client:
        assert client.stats().engine["num_compilations"] == 0
        assert "7 executables loaded, 0 compiled" in process.log
        golden = np.load(TINY / "golden.npz")
        params = SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1)
        assert client.generate(golden["input_ids"].tolist(), params).token_ids == golden["greedy_ids"].tolist()[:20]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--tp", "2"),
        ("--sync",),
        ("--no-prefix-cache",),
        ("--page-size", "5", "--b-dense", "7"),
        ("--num-pages", "9", "--max-context", "64"),
    ],
)
def test_options_change_no_token(tmp_path, options):
    golden = np.load(TINY / "golden.npz")
    prompt, expected = golden["input_ids"].tolist(), golden["greedy_ids"].tolist()
    params = SamplingParams(max_tokens=len(expected), ignore_eos=True)
    with served(tmp_path, "--model", str(TINY), *SMALL, *options, "--no-cache") as process, process.client() as client:
        streams = [client.stream(prompt, params) for _ in range(4)]
        for stream in streams:
            list(stream)
        assert [stream.result.token_ids for stream in streams] == [expected] * 4
        reused = client.generate(prompt, params).usage.cached_tokens
        assert (reused == 0) == ("--no-prefix-cache" in options)
        process.signal()
        assert process.wait() == 0


@pytest.mark.slow
def test_random_weights(tmp_path, cache):
    options = ("--model", str(TINY), "--random-weights", *SMALL, "--cache-dir", str(cache))
    with served(tmp_path, *options, "--seed", "5") as process, process.client() as client:
        assert client.model_info().name == "llama3-tiny"
        one = client.generate("Hello", SamplingParams(max_tokens=9, ignore_eos=True))
        assert len(one.token_ids) == 9
    with served(tmp_path / "again", *options, "--seed", "5") as process, process.client() as client:
        assert client.generate("Hello", SamplingParams(max_tokens=9, ignore_eos=True)).token_ids == one.token_ids


def test_the_ready_line_and_the_log(tiny: Process):
    assert tiny.popen.stdout.readline() == f"ready {tiny.address}\n"
    assert "Traceback" not in tiny.log


def test_the_client_command_talks_to_it(tiny: Process):
    command = [sys.executable, "-m", "serve.client", "--address-file", str(tiny.folder / "address")]
    asked = [*command, "--chat", "Hello", "--max-tokens", "5", "--json", "--session", "s", "--cache-salt", "mine"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    assert 1 <= json.loads(done.stdout)["usage"]["output_tokens"] <= 5


def test_a_client_process_that_is_killed_frees_its_pages(tiny: Process):
    command = [sys.executable, "-u", "-m", "serve.client", "--address-file", str(tiny.folder / "address")]
    asked = [*command, "Hello", "--max-tokens", "400", "--ignore-eos"]
    with tiny.client() as client, subprocess.Popen(asked, stdout=subprocess.PIPE) as killed:
        assert killed.stdout.read(1)
        killed.kill()
        killed.wait()
        for _ in range(1000):
            engine = client.stats().engine
            if engine["free_pages"] == engine["num_pages"] - 1:
                break
        assert engine["free_pages"] == engine["num_pages"] - 1


def test_a_reader_of_the_client_command_may_leave(tiny: Process):
    command = [sys.executable, "-u", "-m", "serve.client", "--address-file", str(tiny.folder / "address")]
    asked = [*command, "Hello", "--max-tokens", "400", "--ignore-eos"]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as left:
        left.stdout.read(1)
        left.stdout.close()
        assert left.stderr.read() == b""
        assert left.wait(60.0) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_drains(tmp_path, cache, number):
    with served(tmp_path, "--model", str(TINY), *SMALL, "--cache-dir", str(cache)) as process, process.client() as client:
        stream = client.stream([5, 6, 7], ENDLESS)
        next(stream)
        process.signal(number)
        list(stream)
        assert stream.result.finish_reason is FinishReason.LENGTH
        assert len(stream.result.token_ids) == 400
        assert process.wait() == 0
        with pytest.raises(OSError):
            Client(process.address)
        assert not (tmp_path / "address").exists()


def test_a_second_signal_stops_at_once(tmp_path, cache):
    with served(tmp_path, "--model", str(TINY), *SMALL, "--cache-dir", str(cache)) as process, process.client() as client:
        streams = [client.stream([5, 6, i], ENDLESS) for i in range(60)]
        codes = []

        def consume(stream) -> None:
            try:
                list(stream)
            except ServerError as error:
                codes.append(error.code)

        threads = [threading.Thread(target=consume, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        process.signal()
        while client.health().state != "draining":
            pass
        process.signal()
        for thread in threads:
            thread.join(60.0)
        assert set(codes) == {ErrorCode.SHUTTING_DOWN}
        assert process.wait() == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no-such-model", "--port", "0"], "no-such-model"),
        (["--model", "llama3-8b", "--port", "0"], "weights"),
        (["--model", str(TINY), "--port", "0", "--num-pages", "1"], "num_pages"),
        (["--model", str(TINY), "--host", "0.0.0.0"], "token"),
        (["--model", str(TINY), "--b-dense", "0"], "b_dense"),
        (["--model", str(TINY), "--port", "99999"], "port"),
        (["--model", str(TINY), "--unix", "socket", "--port", "1"], "--unix"),
        (["--model", str(TINY), "--token-file", "/no/such/file"], "/no/such/file"),
        (["--model", str(TINY), "--token", ""], "token"),
        (["--model", str(TINY), "--queue", "0"], "--queue"),
        (["--model", str(TINY), "--max-frame-bytes", "-1"], "max_frame_bytes"),
    ],
)
def test_what_cannot_be_served_is_a_clear_error(arguments, words, capsys):
    assert main([*arguments, "--no-cache"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last


def test_a_model_that_cannot_be_divided_is_refused_without_a_traceback():
    command = [sys.executable, "-m", "serve", "--model", str(TINY), "--tp", "3", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "error: llama3-tiny: num_heads=4 cannot be divided over tp_size=3" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_known_before_the_model_is_loaded(tiny: Process, capsys):
    port = tiny.address.rpartition(":")[2]
    assert main(["--model", "no-such-model", "--port", port, "--no-cache"]) == 1
    assert "in use" in capsys.readouterr().err

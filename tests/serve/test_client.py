"""The blocking client and the commands, against a server in a thread."""

import asyncio
import contextlib
import io
import json
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from nanoflow_jax.runtime.request import FinishReason, SamplingParams
from serve import bench
from serve import client as client_module
from serve.async_client import as_prompt
from serve.client import ChatMessage, Client, ConnectionLostError, ErrorCode, ServerError
from serve.connection import ConnectionLimits
from tests.runtime.mock_runner import plain_decode
from tests.serve.serving import Serving, mock_runner, serving, tokenizer


@contextlib.contextmanager
def serving_in_thread(runner=None, **options) -> Iterator[Serving]:
    started, holder = threading.Event(), {}

    def run() -> None:
        async def serve() -> None:
            async with serving(runner, **options) as s:
                holder["serving"], holder["loop"], holder["stop"] = s, asyncio.get_running_loop(), asyncio.Event()
                started.set()
                await asyncio.wait((asyncio.create_task(holder["stop"].wait()), s.ending), return_when=asyncio.FIRST_COMPLETED)

        asyncio.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10.0)
    try:
        yield holder["serving"]
    finally:
        with contextlib.suppress(RuntimeError):  # its loop may have ended by itself
            holder["loop"].call_soon_threadsafe(holder["stop"].set)
        thread.join(10.0)
        assert not thread.is_alive()


def test_the_blocking_client_does_what_the_asynchronous_one_does():
    with serving_in_thread() as s, Client(s.address, answer_timeout_s=20.0) as client:
        params = SamplingParams(max_tokens=20)
        expected = plain_decode(s.runner.config, [3, 4], params)
        assert client.welcome.model == "mock"
        assert client.generate(np.array([3, 4]), params).token_ids == expected
        with client.stream([3, 4], params) as stream:
            tokens = [token for chunk in stream for token in chunk.token_ids]
        assert tokens == stream.result.token_ids == expected
        assert client.generate([ChatMessage(role="user", content="Hi")], params).usage.prompt_tokens > 3
        assert client.detokenize(client.tokenize("Hello"), skip_special_tokens=True) == "Hello"
        assert client.model_info().name == "mock"
        assert client.health().state == "running"
        assert client.stats().engine["finished"]["length"] == 3
        with pytest.raises(ServerError) as caught:
            client.generate("")
        assert caught.value.code is ErrorCode.EMPTY_PROMPT


def test_several_threads_share_a_blocking_client():
    with serving_in_thread() as s, Client(s.address, answer_timeout_s=20.0) as client:
        params = SamplingParams(max_tokens=12)
        answers = {}

        def ask(i: int) -> None:
            answers[i] = [token for chunk in client.stream([3, i], params) for token in chunk.token_ids]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
        assert answers == {i: plain_decode(s.runner.config, [3, i], params) for i in range(8)}


def test_a_blocking_stream_can_be_cancelled_or_left():
    with serving_in_thread(mock_runner(step_time_s=0.002)) as s, Client(s.address, answer_timeout_s=20.0) as client:
        params = SamplingParams(max_tokens=250)
        stream = client.stream([3, 4], params)
        next(stream)
        stream.cancel()
        assert len(list(stream)) < 250
        assert stream.result.finish_reason is FinishReason.CANCELLED
        with client.stream([3, 4], params) as stream:
            next(stream)
        with pytest.raises(RuntimeError):
            _ = stream.result
        assert client.generate([3], SamplingParams(max_tokens=1)).token_ids


def test_timeouts_and_lost_connections():
    runner = mock_runner()
    with serving_in_thread(runner) as s:
        with Client(s.address, answer_timeout_s=0.1) as client:
            runner.step_gate = threading.Event()
            with pytest.raises(TimeoutError):
                client.generate([3, 4])
            runner.step_gate.set()
            runner.step_gate = None
        with pytest.raises(ConnectionLostError):
            client.health()
        client.close()  # again, harmless
        client = Client(s.address)
        s.ending.get_loop().call_soon_threadsafe(s.server.shut_down)
        with pytest.raises(OSError):
            ask_forever(client)
        client.close()
    with pytest.raises(OSError):
        Client(s.address)


def ask_forever(client: Client) -> None:
    while True:
        client.health()


def test_prompts():
    assert as_prompt("x").text == "x"
    assert as_prompt([1, np.int64(2)]).token_ids == [1, 2]
    assert as_prompt([]).token_ids == []
    assert as_prompt((ChatMessage(role="user", content="x"),)).messages[0].content == "x"
    for bad in ([1, "x"], [1.5], ["x"], [None]):
        with pytest.raises(TypeError):
            as_prompt(bad)


def test_the_command(tmp_path, capsys, monkeypatch):
    limits = ConnectionLimits(token="secret", goodbye_timeout_s=1.0)
    (tmp_path / "token").write_text("secret\n")
    with serving_in_thread(limits=limits) as s:
        (tmp_path / "address").write_text(s.address + "\n")
        common = ["--address-file", str(tmp_path / "address"), "--token-file", str(tmp_path / "token")]
        expected = plain_decode(s.runner.config, tokenizer().encode("Hello"), SamplingParams(max_tokens=9))
        assert client_module.main(["Hello", "--max-tokens", "9", *common]) == 0
        assert capsys.readouterr().out == tokenizer().decode(expected) + "\n"
        monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
        assert client_module.main(["-", "--json", "--max-tokens", "9", "--logprobs", "2", *common]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["token_ids"] == expected
        assert answer["finish_reason"] == "length"
        assert len(answer["logprobs"]) == 9
        assert client_module.main(["Hi", "--chat", "--system", "Be brief.", "--json", *common]) == 0
        assert json.loads(capsys.readouterr().out)["usage"]["prompt_tokens"] > 10
        for what, key in (("model", "vocab_size"), ("stats", "engine"), ("health", "state")):
            assert client_module.main(["--show", what, *common]) == 0
            assert key in json.loads(capsys.readouterr().out)
        for wrong in (["x", "--temperature", "-1", *common], ["x", "--seed", "9" * 30, *common], ["x", "--address", s.address]):
            assert client_module.main(wrong) == 1
            assert "error: " in capsys.readouterr().err
    assert client_module.main(["x", *common]) == 1
    for wrong in ([], ["x", "--show", "stats"], ["x", "--system", "y"]):
        with pytest.raises(SystemExit):
            client_module.main(wrong)


def test_bench_measures_every_request(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0.0,3,4\n0.05,5,1\n0.1,8,6\n")
    with serving_in_thread(mock_runner(b_dense=32)) as s:
        for load, requests, tokens in (
            (["--rate", "500", "--requests", "20", "--input", "6", "--output", "5"], 20, 100),
            (["--concurrency", "4", "--requests", "20", "--input", "6", "--output", "5"], 20, 100),
            (["--replay", "--trace", str(trace)], 3, 11),
            (["--rate", "100", "--trace", str(trace), "--requests", "2"], 2, 5),
        ):
            assert bench.main([*load, "--address", s.address]) == 0
            lines = capsys.readouterr().out.splitlines()
            result = json.loads(lines[-1])
            assert result["completed"] == requests
            assert result["output_tokens"] == tokens
            assert result["ttft_s"]["p50"] <= result["latency_s"]["max"]
            assert result["engine"]["num_compilations"] == 0
            assert any(line.startswith("TPOT") for line in lines)
        assert bench.main(["--rate", "9", "--requests", "1", "--input", "999", "--address", s.address]) == 1
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["errors"] == {"prompt_too_long": 1}


def test_bench_refuses_bad_loads(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    header = "input_tokens,output_tokens\n"
    for text in ("", "a,b\n1,2\n", header, header + "1,x\n", header + "0,1\n", header + "1\n"):
        trace.write_text(text)
        assert bench.main(["--replay", "--trace", str(trace)]) == 1
        assert "trace.csv" in capsys.readouterr().err
    for wrong in (["--rate", "0"], ["--rate", "nan"], ["--concurrency", "-1"], ["--replay"], ["--rate", "1", "--input", "0"]):
        assert bench.main(wrong) == 1
        assert "error: " in capsys.readouterr().err


def test_percentiles_and_arrivals():
    values = [float(v) for v in range(101)]
    assert [bench.percentile(values, p) for p in (0, 50, 99, 100)] == [0, 50, 99, 100]
    assert bench.percentile([1.0, 2.0], 50) == np.percentile([1.0, 2.0], 50)
    jobs = bench.poisson_jobs([(1, 1)] * 5000, 10.0, random.Random(0))
    gaps = np.diff([0.0, *(job.arrival_s for job in jobs)])
    assert gaps.mean() == pytest.approx(0.1, rel=0.05)
    assert gaps.std() == pytest.approx(0.1, rel=0.05)

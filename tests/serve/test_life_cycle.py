"""How a server ends: drained, cut short, or with its engine."""

import asyncio
import threading

import pytest

from nanoflow_jax.runtime.request import FinishReason, SamplingParams
from nanoflow_jax.tokenizer import Tokenizer
from serve import protocol
from serve.async_client import ServerError
from serve.protocol import ErrorCode
from serve.server import Ending
from tests.runtime.mock_runner import plain_decode
from tests.serve.serving import eventually, mock_runner, run, serving

LONG = SamplingParams(max_tokens=120)


def test_drain_refuses_new_requests_and_finishes_running_ones():
    async def test() -> None:
        async with serving(mock_runner(step_time_s=0.003)) as s, await s.client() as client, await s.client() as whole:
            stream = await client.stream([3, 4], LONG)
            waiting = asyncio.create_task(whole.generate([3, 5], LONG))
            await anext(stream)
            s.server.shut_down()
            await eventually(lambda: s.backend.service.health().state == "draining")
            with pytest.raises(ServerError) as caught:
                await client.generate([3])
            assert caught.value.code is ErrorCode.SHUTTING_DOWN
            assert (await client.health()).state == "draining"
            with pytest.raises(OSError):
                await s.client()
            assert [c async for c in stream]
            assert stream.result.token_ids == plain_decode(s.runner.config, [3, 4], LONG)
            assert (await waiting).token_ids == plain_decode(s.runner.config, [3, 5], LONG)
            assert await s.ending is Ending.DRAINED

    run(test())


def test_an_idle_server_ends_at_once_with_clients_connected():
    async def test() -> None:
        async with serving() as s, await s.client() as client:
            s.server.shut_down()
            assert await s.ending is Ending.DRAINED
            with pytest.raises(ConnectionError):
                await client.health()

    run(test())


@pytest.mark.parametrize("second_signal", [False, True])
def test_what_does_not_finish_in_time_is_told_why(second_signal):
    async def test() -> None:
        drain_timeout_s = 60.0 if second_signal else 0.1
        async with serving(mock_runner(step_time_s=0.05), drain_timeout_s=drain_timeout_s) as s, await s.client() as client:
            stream = await client.stream([3, 4], LONG)
            await anext(stream)
            s.server.shut_down()
            if second_signal:
                await eventually(lambda: s.backend.service.health().state == "draining")
                s.server.shut_down()
            with pytest.raises(ServerError) as caught:
                async for _ in stream:
                    pass
            assert caught.value.code is ErrorCode.SHUTTING_DOWN
            assert await s.ending is Ending.CUT_SHORT

    run(test())


def test_when_the_engine_fails_every_request_is_told_and_the_server_ends():
    async def test() -> None:
        runner = mock_runner(step_time_s=0.002)
        async with serving(runner) as s, await s.client() as client:
            streams = [await client.stream([3, i], LONG) for i in range(4)]
            await asyncio.gather(*map(anext, streams))
            runner.fail_result_at = runner.num_results + 5
            for stream in streams:
                with pytest.raises(ServerError) as caught:
                    async for _ in stream:
                        pass
                assert caught.value.code is ErrorCode.INTERNAL
                assert "told to fail" in caught.value.message
            assert await s.ending is Ending.FAILED

    run(test())


def test_a_hung_device_does_not_keep_the_server_from_ending(monkeypatch):
    async def test() -> None:
        monkeypatch.setattr("serve.server._STOP_TIMEOUT_S", 0.1)
        runner = mock_runner()
        async with serving(runner) as s, await s.client() as client:
            stream = await client.stream([3, 4], LONG)
            await anext(stream)
            runner.step_gate = threading.Event()  # the device stops here
            await eventually(lambda: s.backend.service.health().step_age_s > 0.02)
            assert (await client.health()).step_age_s > 0.02
            s.server.shut_down()
            await eventually(lambda: s.backend.service.health().state == "draining")
            s.server.shut_down()
            assert await s.ending is Ending.HUNG
            runner.step_gate.set()

    run(test())


def test_a_long_tokenization_delays_nobody_and_starts_nothing_once_its_client_was_shown_out(monkeypatch):
    gate = threading.Event()

    def slow(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        gate.wait(20.0)
        return [3]

    monkeypatch.setattr(Tokenizer, "encode", slow)

    async def test() -> None:
        async with serving() as s, await s.client() as other:
            raw = await s.raw()
            raw.write({"type": "generate", "id": 1, "prompt": {"type": "text", "text": "x"}})
            await eventually(lambda: s.backend.counters.requests_total == 1)
            assert (await other.generate([3, 4], SamplingParams(max_tokens=3))).token_ids
            list(s.server._connections)[-1].close()
            gate.set()
            assert await raw.read() is None
            await eventually(lambda: s.backend.counters.connections_open == 1)
            raw.writer.close()
            await s.idle()
            assert s.backend.service.stats().finished == {"stop": 0, "length": 1, "cancelled": 0, "error": 0}

    run(test())


def test_events_that_nobody_waits_for_any_more_are_dropped():
    async def test() -> None:
        async with serving(mock_runner(step_time_s=0.001)) as s:
            raw = await s.raw()
            generate = {"type": "generate", "prompt": {"type": "token_ids", "token_ids": [3]}, "params": {"max_tokens": 200}}
            for request_id in range(5):
                raw.write(generate | {"id": request_id})
                raw.write({"type": "cancel", "id": 100 + request_id, "target": request_id})
                finished = await raw.read_until(protocol.Finished)
                assert (finished.id, finished.finish_reason) == (request_id, FinishReason.CANCELLED)
            raw.writer.close()
            await s.idle()

    run(test())

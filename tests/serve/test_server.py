"""A server on a real socket, with the real engine over a mock of the device: what well-behaved clients get."""

import asyncio

import pytest

from nanoflow_jax.runtime.request import FinishReason, SamplingParams
from serve.async_client import ServerError
from serve.protocol import ChatMessage, ErrorCode
from tests.runtime.mock_runner import plain_decode
from tests.serve.serving import VOCAB_SIZE, mock_runner, run, serving, tokenizer


def test_streamed_and_whole_answers_are_the_same_tokens_and_text():
    async def test() -> None:
        async with serving() as s, await s.client() as client:
            params = SamplingParams(max_tokens=30)
            whole = await client.generate([5, 6, 7], params)
            stream = await client.stream([5, 6, 7], params)
            chunks = [chunk async for chunk in stream]
            assert len(chunks) > 5
            streamed = stream.result
            expected = plain_decode(s.runner.config, [5, 6, 7], params)
            assert whole.token_ids == streamed.token_ids == expected
            assert whole.text == streamed.text == tokenizer().decode(expected)
            assert whole.finish_reason is FinishReason.LENGTH
            assert (whole.usage.prompt_tokens, whole.usage.output_tokens) == (3, 30)
            assert whole.timing.finished_s >= whole.timing.first_token_s >= 0
            await s.idle()

    run(test())


def test_text_token_ids_and_chat_are_the_same_prompt():
    async def test() -> None:
        async with serving() as s, await s.client() as client:
            params = SamplingParams(max_tokens=8)
            for prompt, ids in (
                ("Hello there", tokenizer().encode("Hello there")),
                (
                    [ChatMessage(role="user", content="Hi")],
                    tokenizer().apply_chat_template([{"role": "user", "content": "Hi"}]),
                ),
            ):
                answer = await client.generate(prompt, params)
                assert answer.usage.prompt_tokens == len(ids)
                assert answer.token_ids == plain_decode(s.runner.config, ids, params)

    run(test())


def test_many_requests_on_many_connections_at_once():
    async def test() -> None:
        async with serving(mock_runner(b_dense=32, max_sequences=16)) as s:
            clients = [await s.client() for _ in range(5)]
            params = SamplingParams(max_tokens=20)
            prompts = [[i + 3, i + 4, i + 5] for i in range(50)]

            async def ask(i: int) -> list[int]:
                client = clients[i % len(clients)]
                if i % 2:
                    return (await client.generate(prompts[i], params)).token_ids
                stream = await client.stream(prompts[i], params)
                return [token for chunk in [c async for c in stream] for token in chunk.token_ids]

            answers = await asyncio.gather(*map(ask, range(50)))
            assert answers == [plain_decode(s.runner.config, prompt, params) for prompt in prompts]
            await s.idle()
            for client in clients:
                await client.close()

    run(test())


def test_a_second_round_says_what_was_cached_and_salts_keep_apart():
    async def test() -> None:
        async with serving() as s, await s.client() as client, await s.client() as other:
            params = SamplingParams(max_tokens=20)
            prompt = list(range(3, 40))
            first = await client.generate(prompt, params, session_id="chat", cache_salt="us")
            assert first.usage.cached_tokens == 0
            prompt += [*first.token_ids, 7, 8]
            stream = await other.stream(prompt, params, session_id="chat", cache_salt="us")
            tokens = [token for chunk in [c async for c in stream] for token in chunk.token_ids]
            assert tokens == plain_decode(s.runner.config, prompt, params)
            assert 48 <= stream.result.usage.cached_tokens < 57
            for salt in (None, "them"):
                answer = await other.generate(prompt, params, cache_salt=salt)
                assert (answer.token_ids, answer.usage.cached_tokens) == (tokens, 0)
            engine = (await client.stats()).engine
            assert (engine["prefix_hits"], engine["prefix_misses"], engine["kept_sessions"]) == (1, 3, 1)
            assert engine["reused_tokens"] == stream.result.usage.cached_tokens
            await s.idle()

    run(test())


def test_logprobs_come_with_every_token():
    async def test() -> None:
        async with serving() as s, await s.client() as client:
            for streamed in (False, True):
                params = SamplingParams(max_tokens=6, logprobs=3)
                if streamed:
                    stream = await client.stream([9, 8], params)
                    async for chunk in stream:
                        assert len(chunk.logprobs) == len(chunk.token_ids)
                    answer = stream.result
                else:
                    answer = await client.generate([9, 8], params)
                assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
                assert all(len(entry.top) == 3 for entry in answer.logprobs)
            assert (await client.generate([9, 8], SamplingParams(max_tokens=2))).logprobs is None

    run(test())


def test_the_other_requests():
    async def test() -> None:
        async with serving() as s, await s.client() as client:
            text = "naïve café 😀 漢字"
            ids = await client.tokenize(text)
            assert ids == tokenizer().encode(text)
            assert await client.tokenize(text, add_special_tokens=False) == tokenizer().encode(text, False)
            assert await client.detokenize(ids, skip_special_tokens=True) == text
            info = await client.model_info()
            assert (info.name, info.vocab_size, info.max_context, info.has_chat_template) == ("mock", VOCAB_SIZE, 256, True)
            await client.generate([3], SamplingParams(max_tokens=2))
            with pytest.raises(ServerError):
                await client.generate([])
            stats = await client.stats()
            assert stats.engine["output_tokens"] == 2
            assert stats.server["connections_open"] == 1
            assert stats.server["errors"] == {"empty_prompt": 1}
            assert (await client.health()).state == "running"

    run(test())


def test_cancel_ends_a_generation_and_keeps_its_tokens():
    async def test() -> None:
        async with serving(mock_runner(step_time_s=0.002)) as s, await s.client() as client:
            stream = await client.stream([4, 4], SamplingParams(max_tokens=200))
            tokens = []
            async for chunk in stream:
                tokens += chunk.token_ids
                if len(tokens) == 3:
                    stream.cancel()
            result = stream.result
            assert result.finish_reason is FinishReason.CANCELLED
            assert 3 <= len(result.token_ids) < 200
            assert result.token_ids == plain_decode(s.runner.config, [4, 4], SamplingParams(max_tokens=200))[: len(tokens)]
            await s.idle()

    run(test())


def test_leaving_a_stream_early_cancels_it():
    async def test() -> None:
        async with serving(mock_runner(step_time_s=0.002)) as s, await s.client() as client:
            async with await client.stream([4, 4], SamplingParams(max_tokens=250)) as stream:
                async for _ in stream:
                    break
            await s.idle()
            assert (await client.stats()).engine["finished"]["cancelled"] == 1
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.generate([4, 4], SamplingParams(max_tokens=250))
            await s.idle()
            assert (await client.stats()).engine["finished"]["cancelled"] == 2

    run(test())


def test_beyond_the_queue_a_request_is_told_overloaded():
    async def test() -> None:
        runner = mock_runner(b_dense=4, max_sequences=2, step_time_s=0.005)
        async with serving(runner, max_waiting=3) as s, await s.client() as client:
            params = SamplingParams(max_tokens=100)
            streams = [await client.stream([i + 3], params) for i in range(12)]

            async def outcome(stream) -> str:
                try:
                    return stream.result.finish_reason.value if [c async for c in stream] else "nothing"
                except ServerError as error:
                    return error.code.value

            outcomes = await asyncio.gather(*map(outcome, streams))
            assert set(outcomes) == {"length", "overloaded"}
            assert outcomes[0] == "length"
            await s.idle()
            assert (await client.generate([3], SamplingParams(max_tokens=2))).finish_reason is FinishReason.LENGTH

    run(test())


def test_a_preset_without_tokenizer_takes_token_ids_only():
    async def test() -> None:
        async with serving(with_tokenizer=False) as s, await s.client() as client:
            answer = await client.generate([3, 4], SamplingParams(max_tokens=5))
            assert len(answer.token_ids) == 5
            assert answer.text == ""
            for attempt in (
                client.generate("text"),
                client.generate([ChatMessage(role="user", content="Hi")]),
                client.tokenize("text"),
                client.detokenize([3]),
            ):
                with pytest.raises(ServerError) as caught:
                    await attempt
                assert caught.value.code is ErrorCode.NO_TOKENIZER
            with pytest.raises(ServerError) as caught:
                await client.generate([3], SamplingParams(stop=("x",)))
            assert caught.value.code is ErrorCode.INVALID_REQUEST

    run(test())

"""Faults that users of other engines met, as a client of the server would meet them: case 10 to 14 and 21 to 24 of the kinds
that the engine's own tests number in the same way. Cases 11 and 12 are in test_misuse."""

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoflow_jax.batch import Batch
from nanoflow_jax.runtime.request import FinishReason, SamplingParams
from serve.async_client import AsyncClient, Generation
from tests.runtime.mock_runner import MockResult, MockRunner, plain_decode, tiny_config
from tests.serve.serving import VOCAB_SIZE, eventually, mock_runner, run, serving, tokenizer


class ScriptedRunner(MockRunner):
    """After a prompt of one token, says what it is told to."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(tiny_config(VOCAB_SIZE, max_context=256, eos_token_ids=()), num_pages=257)
        self.script = script

    def _execute(self, batch: Batch, num_logprobs: int) -> tuple[MockResult, np.ndarray]:
        result, numbers = super()._execute(batch, num_logprobs)
        for row in np.flatnonzero(batch.sequence_rows >= 0):
            token = self.script[(batch.kv_lens[row] - 1) % len(self.script)]
            result.token_ids[row] = self._last_tokens[batch.sequence_rows[row]] = token
        return result, numbers


async def both_ways(client: AsyncClient, prompt, params: SamplingParams) -> tuple[Generation, list[str]]:
    """The answer, which is the same streamed and whole, and the pieces of text that were streamed."""
    stream = await client.stream(prompt, params)
    pieces = [chunk.text async for chunk in stream]
    whole = await client.generate(prompt, params)
    streamed = stream.result
    assert (streamed.text, streamed.token_ids, streamed.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)
    assert streamed.usage.output_tokens == len(streamed.token_ids)
    assert "".join(pieces) == whole.text
    return streamed, pieces


def test_case_10_one_token_is_one_token():
    async def test() -> None:
        async with serving() as s, await s.client() as client:
            answer, _ = await both_ways(client, [3, 4], SamplingParams(max_tokens=1))
            assert answer.token_ids == plain_decode(s.runner.config, [3, 4], SamplingParams(max_tokens=1))
            assert answer.finish_reason is FinishReason.LENGTH

    run(test())


@pytest.mark.parametrize("eos", [9, 77])
def test_case_13_and_14_any_eos_ends_a_request_and_nothing_after_it_is_sent_or_billed(eos):
    async def test() -> None:
        runner = ScriptedRunner([20, 21, 22, eos, 23, 24])
        runner.config = tiny_config(VOCAB_SIZE, max_context=256, eos_token_ids=(9, 77))
        async with serving(runner) as s, await s.client() as client:
            long = asyncio.create_task(client.generate([3], SamplingParams(max_tokens=100, ignore_eos=True)))
            answer, _ = await both_ways(client, [3], SamplingParams(max_tokens=100))
            assert answer.token_ids == [20, 21, 22, eos]
            assert answer.text == tokenizer().decode([20, 21, 22])
            assert answer.finish_reason is FinishReason.STOP
            ignoring = await long
            assert (len(ignoring.token_ids), ignoring.finish_reason) == (100, FinishReason.LENGTH)
            await s.idle()

    run(test())


def test_case_21_cancelled_or_abandoned_in_any_state_every_page_comes_back():
    async def test() -> None:
        rng = random.Random(0)
        runner = mock_runner(b_dense=8, max_sequences=4, num_pages=65)
        async with serving(runner, max_waiting=1000) as s:
            for _ in range(20):
                client = await s.client()
                streams = [
                    await client.stream(
                        [rng.randrange(3, 99) for _ in range(rng.randrange(1, 60))], SamplingParams(max_tokens=90)
                    )
                    for _ in range(10)
                ]
                await asyncio.sleep(rng.random() * 0.01)
                for stream in rng.sample(streams, 5):
                    stream.cancel()
                await asyncio.sleep(rng.random() * 0.01)
                await client.close()
            await s.idle()
            assert s.backend.counters.generations_open == 0
            stats = s.backend.service.stats()
            assert stats.finished["cancelled"] > 100
            assert stats.finished["error"] == 0

    run(test())


def test_case_22_a_soak_of_2000_requests_leaves_the_pool_as_it_was():
    async def test() -> None:
        rng = random.Random(1)
        async with serving(mock_runner(b_dense=64, max_sequences=32, num_pages=200), max_waiting=2000) as s:
            clients = [await s.client() for _ in range(4)]

            async def ask(i: int) -> None:
                prompt = [rng.randrange(3, 99) for _ in range(rng.choice((1, 3, 4, 5, 8, 16)))]
                params = SamplingParams(max_tokens=rng.choice((1, 2, 3, 4, 7, 8)))
                async with await clients[i % 4].stream(prompt, params) as stream:
                    async for _ in stream:
                        if rng.random() < 0.05:
                            return
                assert stream.result.token_ids == plain_decode(s.runner.config, prompt, params)

            for start in range(0, 2000, 200):
                await asyncio.gather(*(ask(start + i) for i in range(200)))
            await s.idle()
            for client in clients:
                await client.close()
            await eventually(lambda: s.backend.counters.connections_open == 0)

    run(test())


LETTERS = tokenizer().encode("ABCDEFGHIJKLMNOPQRSTUVWXYZ", add_special_tokens=False)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("DEFGHIJ",), "ABC"),
        (("A",), ""),
        (("XYZ", "JKL"), "ABCDEFGHI"),
        (("BX", "CDX", "EFGX"), "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
        (("YZ!",), "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    ],
)
def test_case_23_no_part_of_a_stop_string_is_ever_sent(stop, expected):
    async def test() -> None:
        async with serving(ScriptedRunner(LETTERS)) as s, await s.client() as client:
            answer, pieces = await both_ways(client, [3], SamplingParams(max_tokens=len(LETTERS), stop=stop))
            assert answer.text == expected
            assert answer.finish_reason is (FinishReason.LENGTH if expected.endswith("Z") else FinishReason.STOP)
            for end in range(len(pieces)):
                assert expected.startswith("".join(pieces[:end]))
            await s.idle()

    run(test())


characters = st.sampled_from(["a", " ", "é", "漢", "字", "😀", "👨‍👩‍👧", "🇩🇪", "\N{COMBINING ACUTE ACCENT}", "\ufffd"])


@settings(max_examples=25)
@given(st.lists(characters, min_size=1, max_size=20).map("".join), st.integers(1, 60))
def test_case_24_characters_are_never_cut_in_the_stream(text, max_tokens):
    script = tokenizer().encode(text, add_special_tokens=False)

    async def test() -> None:
        async with serving(ScriptedRunner(script)) as s, await s.client() as client:
            answer, pieces = await both_ways(client, [3], SamplingParams(max_tokens=max_tokens))
            assert answer.text == tokenizer().decode(answer.token_ids)
            whole_characters = (text * max_tokens)[: len("".join(pieces[:-1]))]
            assert "".join(pieces[:-1]) == whole_characters

    run(test())

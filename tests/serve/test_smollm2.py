"""SmolLM2-135M through the whole server against what transformers computed in float32; `python -m serve.demo`."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nanoflow_jax.runtime.request import FinishReason, SamplingParams
from serve.client import ChatMessage
from tests.serve.processes import served

pytestmark = pytest.mark.slow
GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "smollm2_golden.json").read_text())
STEPS = 40


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    options = ("--b-dense", "32", "--max-sequences", "4", "--max-context", "512", "--dtype", "float32")
    with served(folder, "--model", "smollm2", *options, ready_timeout_s=1200.0) as process, process.client() as client:
        yield client


def as_prompt(golden: dict) -> str | list[ChatMessage]:
    return golden["prompt"] if golden["messages"] is None else [ChatMessage(**message) for message in golden["messages"]]


def test_tokens_text_and_logits_of_all_prompts_at_once(client):
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True, logprobs=5)
    streams = [client.stream(as_prompt(golden), params) for golden in GOLDEN["prompts"]]
    for golden, stream in zip(GOLDEN["prompts"], streams, strict=True):
        deltas = "".join(chunk.text for chunk in stream)
        answer = stream.result
        assert answer.usage.prompt_tokens == len(golden["prompt_ids"])
        assert answer.token_ids == golden["generated_ids"]
        assert deltas == answer.text == client.detokenize(golden["generated_ids"])
        for entry, expected in zip(answer.logprobs, golden["top5_first_steps"], strict=False):
            assert [token for token, _ in entry.top] == [token for token, _ in expected]
            # Log-probabilities and logits differ by one number per step.
            ours, theirs = (np.array([value for _, value in top]) for top in (entry.top, expected))
            np.testing.assert_allclose(ours - ours[0], theirs - theirs[0], atol=1e-4)
        gaps = [entry.top[0][1] - entry.top[1][1] for entry in answer.logprobs]
        np.testing.assert_allclose(gaps, golden["top1_top2_gap"], atol=1e-4)


def test_eos_ends_the_answers_that_have_one(client):
    for golden in GOLDEN["prompts"]:
        answer = client.generate(as_prompt(golden), SamplingParams(max_tokens=STEPS))
        ids = golden["generated_ids"]
        end = ids.index(GOLDEN["eos"]) + 1 if GOLDEN["eos"] in ids else STEPS
        assert answer.token_ids == ids[:end]
        assert answer.finish_reason is (FinishReason.STOP if end < STEPS else FinishReason.LENGTH)


def test_the_second_round_of_a_chat_is_the_same_from_the_cache_and_computed_anew(client):
    params = SamplingParams(max_tokens=STEPS, ignore_eos=True)
    chat = [ChatMessage(role="user", content="Tell me about the ocean. " + "It is deep and blue and full of fish. " * 10)]
    first = client.generate(chat, params, session_id="chat")
    chat += [
        ChatMessage(role="assistant", content=first.text),
        ChatMessage(role="user", content="And about the mountains?"),
    ]
    again, anew = client.generate(chat, params, session_id="chat"), client.generate(chat, params, cache_salt="nobody else's")
    assert again.token_ids == anew.token_ids
    assert again.usage.prompt_tokens == anew.usage.prompt_tokens
    assert again.usage.cached_tokens > first.usage.prompt_tokens - 16
    assert anew.usage.cached_tokens == 0


@pytest.mark.parametrize("check", GOLDEN["tokenizer_checks"] + GOLDEN["tokenizer_checks_llama_cpp"], ids=lambda c: c["text"])
def test_tokenizer(client, check):
    assert client.tokenize(check["text"]) == check["ids"]
    assert client.detokenize(check["ids"]) == check.get("decoded", check["text"])


def test_demo():
    done = subprocess.run([sys.executable, "-m", "serve.demo"], capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "the server stopped cleanly" in done.stdout

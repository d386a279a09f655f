"""The whole engine on a real, tiny model: golden tokens through paging, chunking, preemption and asynchronous steps."""

from pathlib import Path

import numpy as np
import pytest

from nanoflow_jax.executor.runner import RunnerConfig
from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.kv_tiers import KVTierStats, open_store
from nanoflow_jax.runtime.llm import LLM, TierOptions, generate
from nanoflow_jax.runtime.request import FinishReason, RejectCode, RequestRejected, SamplingParams
from tests.runtime.test_engine import Optimist

_TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama3-tiny"


@pytest.fixture(scope="module")
def golden():
    with np.load(_TINY / "golden.npz") as arrays:
        return {name: arrays[name] for name in arrays}


@pytest.fixture(scope="module")
def llm():
    """Small steps and a pool of 4 prompts, so that prompts are chunked and requests wait or are preempted."""
    options = RunnerConfig(b_dense=20, max_sequences=6, page_size=4, num_pages=65, max_context=128)
    return LLM(_TINY, dtype="float32", options=options)


@pytest.fixture
def engines(llm):
    """Fresh engines on the compiled runner; whatever it ran before must not matter."""

    def make(*, preempting: bool = False, **options) -> Engine:
        engine = Engine(llm.engine.runner, llm.engine.tokenizer, **options)
        if preempting:
            engine.batcher.admission.output_lengths = Optimist()
        return engine

    return make


def _continuations(golden) -> tuple[list[list[int]], list[SamplingParams], list[list[int]]]:
    """Prompts that end at every point of the golden sequence, and what must follow."""
    known = [*golden["input_ids"].tolist(), *golden["greedy_ids"].tolist()]
    prompts, params, expected = [], [], []
    for end in range(37, len(known)):
        prompts.append(known[:end])
        params.append(SamplingParams(max_tokens=len(known) - end))
        expected.append(known[end:])
    for end in range(1, 37):
        top = np.sort(golden["logits"][end - 1])[-2:]
        if top[1] - top[0] > 1e-3:
            prompts.append(known[:end])
            params.append(SamplingParams(max_tokens=1))
            expected.append([int(golden["logits"][end - 1].argmax())])
    return prompts, params, expected


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("preempting", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
def test_golden_tokens_from_every_prefix_at_once(engines, golden, sync, preempting, reuse):
    engine = engines(preempting=preempting, sync=sync, prefix_cache=reuse)
    compiled = engine.stats().num_compilations
    prompts, params, expected = _continuations(golden)
    completions = generate(engine, prompts, params)
    for completion, prompt, tokens in zip(completions, prompts, expected, strict=True):
        assert completion.prompt_token_ids == prompt
        assert completion.token_ids == tokens
        eos = engine.runner.config.eos_token_ids
        assert completion.finish_reason is (FinishReason.STOP if tokens[-1] in eos else FinishReason.LENGTH)
        assert completion.usage.output_tokens == len(tokens)
    stats = engine.stats()
    assert stats.num_compilations == compiled, "nothing compiles while serving"
    assert stats.free_pages == stats.num_pages - 1
    if reuse:
        assert stats.reused_tokens > stats.prompt_tokens / 2, "the prompts are prefixes of each other"
    else:
        assert (stats.preemptions > 0) == preempting


def test_case_7_logprobs_are_those_of_the_golden_logits_with_a_cached_prefix_too(engines, golden):
    prompts = [golden["input_ids"][:end].tolist() for end in (1, 5, 20, 37)]
    engine = engines()
    completions = generate(engine, prompts, SamplingParams(max_tokens=1, logprobs=5))
    again = generate(engine, prompts, SamplingParams(max_tokens=1, logprobs=5))
    assert [completion.usage.cached_tokens for completion in again] == [0, 4, 16, 36]
    for completion, prompt in zip([*completions, *again], [*prompts, *prompts], strict=True):
        logits = golden["logits"][len(prompt) - 1].astype(np.float64)
        exact = logits - np.log(np.exp(logits).sum())
        assert completion.logprobs is not None
        entry = completion.logprobs[0]
        assert entry.logprob == pytest.approx(exact[entry.token_id], abs=1e-4)
        assert [token for token, _ in entry.top] == np.argsort(-exact)[:5].tolist()
        np.testing.assert_allclose([logprob for _, logprob in entry.top], np.sort(exact)[::-1][:5], atol=1e-4)


def test_seeded_sampling_is_the_same_in_any_company(engines):
    target = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=20, ignore_eos=True)
    crowd = [SamplingParams(temperature=1.0, seed=i, max_tokens=15) for i in range(8)]
    alone = generate(engines(), [[5, 6, 7]], target)[0].token_ids
    within = generate(engines(sync=True), [[9, i] for i in range(8)] + [[5, 6, 7]], [*crowd, target])[-1].token_ids
    assert within == alone
    other = generate(
        engines(), [[5, 6, 7]], SamplingParams(temperature=1.0, top_p=0.95, seed=8, max_tokens=20, ignore_eos=True)
    )
    assert other[0].token_ids != alone


def test_text_chat_and_token_prompts(llm):
    tokenizer = llm.engine.tokenizer
    chat = [{"role": "user", "content": "hello"}]
    text, ids, messages = llm.generate(
        ["hello", tokenizer.encode("hello"), chat], SamplingParams(max_tokens=6, ignore_eos=True)
    )
    assert text.token_ids == ids.token_ids
    assert text.text == tokenizer.decode(text.token_ids)
    assert messages.prompt_token_ids == tokenizer.apply_chat_template(chat)


def test_a_stop_string_of_the_real_tokenizer(llm):
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    plain = llm.generate(["hello"], params)[0]
    stop = plain.text[4:6]
    stopped = llm.generate(["hello"], SamplingParams(max_tokens=20, ignore_eos=True, stop=(stop,)))[0]
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]


def test_one_bad_prompt_refuses_the_call_and_leaves_the_engine_clean(llm):
    with pytest.raises(RequestRejected, match="prompt 1: the prompt has no tokens") as refusal:
        llm.generate([[1, 2], [], [3]])
    assert refusal.value.code is RejectCode.EMPTY_PROMPT
    with pytest.raises(RequestRejected, match="prompt 0: temperature"):
        llm.generate([[1, 2]], SamplingParams(temperature=-1.0))
    assert not llm.engine.busy


def test_misuse_is_explained(llm, engines):
    with pytest.raises(ValueError, match="list of prompts"):
        llm.generate("hello")
    with pytest.raises(ValueError, match="2 prompts and 1 sampling parameters"):
        llm.generate([[1], [2]], [SamplingParams()])
    engine = engines()
    engine.tokenizer = None
    with pytest.raises(ValueError, match="prompt 0: this model has no tokenizer"):
        generate(engine, ["hello"])
    assert llm.generate([]) == []


def test_an_interrupted_call_leaves_the_engine_clean(engines, monkeypatch):
    engine = engines()
    step, calls = engine.step, []

    def interrupted():
        calls.append(None)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(engine, [[1, 2, 3]] * 10, SamplingParams(max_tokens=50, ignore_eos=True))
    assert engine.stats().free_pages == engine.stats().num_pages - 1
    monkeypatch.undo()
    assert len(generate(engine, [[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


@pytest.fixture(scope="module", params=[1, 2])
def offloading_runner(request):
    options = RunnerConfig(b_dense=16, max_sequences=6, page_size=4, num_pages=65, max_context=128, kv_offload="on")
    return LLM(_TINY, dtype="float32", options=options, tp_size=request.param).engine.runner


@pytest.mark.parametrize("sync", [False, True])
def test_golden_tokens_from_pages_that_left_the_pool(offloading_runner, golden, tmp_path, sync):
    """Through host memory, and after a restart through SSD; the steps and the loads of the real executor."""
    known = [*golden["input_ids"].tolist(), *golden["greedy_ids"].tolist()]
    tiers = TierOptions(host_bytes=1 << 24, ssd_directory=tmp_path, ssd_bytes=1 << 26)
    compiled = offloading_runner.num_compilations

    def start() -> Engine:
        store = open_store(offloading_runner, tiers)
        return Engine(offloading_runner, sync=sync, kv_store=store, worth_loading=lambda *_: True)

    def check(engine: Engine, end: int, least: int) -> KVTierStats:
        [completion] = generate(engine, [known[:end]], SamplingParams(max_tokens=len(known) - end))
        assert completion.token_ids == known[end:]
        assert completion.usage.cached_tokens >= least
        assert engine.tiers is not None
        assert engine.tiers.drain(20.0)
        engine.clear_prefix_cache()
        return engine.tiers.stats()

    engine = start()
    check(engine, 37, 0)
    assert check(engine, 50, 36).loads == 1
    assert engine.close()
    again = start()
    assert check(again, 50, 36).ssd.hits > 0
    assert again.close()
    assert offloading_runner.num_compilations == compiled

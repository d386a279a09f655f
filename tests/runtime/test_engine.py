"""The engine against plain full-recompute decoding: tokens, pages, limits, statistics. Field cases carry their numbers."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.request import FinishReason, Request, RequestEvent, SamplingParams
from tests.runtime.mock_runner import MockRunner, plain_decode, tiny_config


@dataclasses.dataclass
class Output:
    """All events of one request, joined."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    logprobs: list = dataclasses.field(default_factory=list)
    last: RequestEvent | None = None
    num_events: int = 0

    def take(self, event: RequestEvent) -> None:
        assert self.last is None, "an event after the last"
        self.token_ids += event.token_ids
        self.text += event.text
        self.logprobs += event.logprobs or []
        self.num_events += 1
        if event.finish_reason is not None:
            self.last = event

    @property
    def reason(self) -> FinishReason | None:
        return self.last.finish_reason if self.last else None


def run(
    engine: Engine, requests, *, cancels=None, arrivals=None, clears=(), on_step=None, max_steps: int = 20_000
) -> dict[str, Output]:
    """Runs requests to the end, checking pages after every step.

    `cancels` and `arrivals` map request ids to step numbers; at the steps in `clears` the prefix cache is cleared.
    """
    outputs = {request.request_id: Output() for request in requests}
    arrivals = arrivals or {}
    waiting = sorted(requests, key=lambda request: arrivals.get(request.request_id, 0))
    step = 0
    while waiting or engine.busy:
        while waiting and arrivals.get(waiting[0].request_id, 0) <= step:
            engine.add(waiting.pop(0))
        for request_id, at in (cancels or {}).items():
            if at == step and (event := engine.cancel(request_id)) is not None:
                outputs[request_id].take(event)
        if step in clears:
            engine.clear_prefix_cache()
        for event in engine.step():
            outputs[event.request_id].take(event)
        engine.batcher.check_integrity()
        if on_step is not None:
            on_step()
        step += 1
        assert step < max_steps, "does not end"
    assert engine.batcher.cache.num_available == engine.batcher.cache.num_pages - 1
    assert engine.batcher.table.num_running == 0
    return outputs


def prompt(rng: np.random.Generator, length: int, vocab_size: int = 97) -> list[int]:
    return rng.integers(0, vocab_size, length).tolist()


def request(name: str, tokens, stream: bool = True, **params) -> Request:
    return Request(request_id=name, prompt_token_ids=tokens, params=SamplingParams(**params), stream=stream)


def assert_plain(runner: MockRunner, requests, outputs) -> None:
    """Every request that was not cancelled has exactly the tokens of plain decoding; a cancelled one has a prefix of them."""
    pool_tokens = (runner.num_pages - 1) * runner.page_size
    for r in requests:
        expected = plain_decode(runner.config, r.prompt_token_ids, r.params, pool_tokens=pool_tokens)
        output = outputs[r.request_id]
        assert output.last is not None
        assert output.last.usage is not None
        assert output.last.usage.output_tokens == len(output.token_ids)
        assert output.last.usage.prompt_tokens == len(r.prompt_token_ids)
        if output.reason is FinishReason.CANCELLED:
            assert output.token_ids == expected[: len(output.token_ids)]
        else:
            assert output.token_ids == expected
            stops = set(r.params.stop_token_ids) | (set() if r.params.ignore_eos else set(runner.config.eos_token_ids))
            assert output.reason is (FinishReason.STOP if expected[-1] in stops else FinishReason.LENGTH)


@st.composite
def workloads(draw):
    """A runner's sizes, requests, arrival steps and cancels; pools small enough to preempt."""
    page_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    b_dense = draw(st.sampled_from([1, 2, 5, 16, 33]))
    num_pages = draw(st.integers(3, 24)) + 1
    pool_tokens = (num_pages - 1) * page_size
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    requests, arrivals, cancels = [], {}, {}
    for i in range(draw(st.integers(1, 12))):
        length = draw(st.integers(1, max(1, min(pool_tokens, 60))))
        params = {
            "max_tokens": draw(st.integers(1, 40)),
            "ignore_eos": draw(st.booleans()),
            "temperature": draw(st.sampled_from([0.0, 1.0])),
            "seed": draw(st.integers(0, 3)),
            "stop_token_ids": tuple(draw(st.lists(st.integers(0, 96), max_size=2))),
            "logprobs": draw(st.sampled_from([None, None, 0, 2])),
        }
        requests.append(request(f"r{i}", prompt(rng, length), draw(st.booleans()), **params))
        arrivals[f"r{i}"] = draw(st.integers(0, 12))
        if draw(st.integers(0, 4)) == 0:
            cancels[f"r{i}"] = draw(st.integers(0, 30))
    sizes = {"page_size": page_size, "b_dense": b_dense, "num_pages": num_pages, "max_sequences": draw(st.integers(1, 8))}
    return sizes, requests, arrivals, cancels


class Optimist:
    """Expects every output to end with the next token, so that admission fails to foresee anything."""

    def record(self, num_tokens: int) -> None:
        pass

    def expected_total(self, num_so_far: np.ndarray, limits: np.ndarray) -> np.ndarray:
        return np.minimum(num_so_far + 1, limits)


def optimistic(runner: MockRunner, **options) -> Engine:
    """An engine that preempts: its requests must not ignore EOS, for those it counts in full."""
    engine = Engine(runner, **options)
    engine.batcher.admission.output_lengths = Optimist()
    return engine


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(workloads(), st.sampled_from(["sync", "eager", "lazy"]), st.booleans())
def test_tokens_equal_plain_decoding_whatever_the_mix(workload, mode, preempting):
    sizes, requests, arrivals, cancels = workload
    runner = MockRunner(**sizes, lazy=mode == "lazy")
    engine = (optimistic if preempting else Engine)(runner, sync=mode == "sync")
    outputs = run(engine, requests, cancels=cancels, arrivals=arrivals)
    assert_plain(runner, requests, outputs)
    for r in requests:
        output = outputs[r.request_id]
        assert len(output.logprobs) == (0 if r.params.logprobs is None else len(output.token_ids))
        assert all(entry.token_id == token for entry, token in zip(output.logprobs, output.token_ids, strict=False))
        assert all(len(entry.top) == r.params.logprobs for entry in output.logprobs)
        assert r.stream or output.num_events == 1
    stats = engine.stats()
    assert stats.output_tokens == sum(len(output.token_ids) for output in outputs.values())
    sampled = sum(int((batch.sequence_rows >= 0).sum()) for batch in runner.batches)
    assert sampled == stats.output_tokens + stats.dropped_tokens, "no token is computed twice, none is lost"
    assert sum(stats.finished.values()) == len(requests)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(workloads())
def test_modes_run_the_same_number_of_tokens(workload):
    """Asynchronous steps cost at most one extra token per request that ends early, and none per request that ends by length."""
    sizes, requests, arrivals, _ = workload
    stats = {}
    for mode in ("sync", "lazy"):
        engine = Engine(MockRunner(**sizes, lazy=mode == "lazy"), sync=mode == "sync")
        run(engine, requests, arrivals=arrivals)
        stats[mode] = engine.stats()
    assert stats["sync"].dropped_tokens == 0
    assert stats["sync"].output_tokens == stats["lazy"].output_tokens
    assert stats["lazy"].dropped_tokens <= stats["lazy"].finished["stop"]


def test_case_1_prompts_of_whole_pages_sent_twice():
    rng = np.random.default_rng(1)
    runner = MockRunner(page_size=4, num_pages=40)
    engine = Engine(runner)
    requests = [
        request(f"{k}-{again}", p, max_tokens=9) for k in (1, 2, 3, 4) for p in [prompt(rng, 4 * k)] for again in (0, 1)
    ]
    assert_plain(runner, requests, run(engine, requests))


def test_case_2_many_requests_with_a_shared_prefix_in_a_fifth_of_the_pool_they_need():
    rng = np.random.default_rng(2)
    shared = prompt(rng, 12)
    requests = [
        request(
            f"r{i}", shared + prompt(rng, int(rng.integers(1, 9))), max_tokens=int(rng.integers(1, 30)), ignore_eos=bool(i % 2)
        )
        for i in range(256)
    ]
    runner = MockRunner(b_dense=128, max_sequences=64, page_size=4, num_pages=64 * 10 // 5)
    engine = optimistic(runner)
    assert_plain(runner, requests, run(engine, requests))
    assert engine.stats().preemptions > 0


@pytest.mark.parametrize("mode", ["sync", "eager", "lazy"])
def test_case_3_and_4_preempted_with_output_in_a_tiny_pool(mode):
    """A preempted request prefills its prompt and output again, the token still in flight included."""
    rng = np.random.default_rng(3)
    requests = [request(f"r{i}", prompt(rng, 6), max_tokens=30) for i in range(64)]
    runner = MockRunner(tiny_config(eos_token_ids=(1,)), page_size=2, num_pages=33, lazy=mode == "lazy")
    engine = optimistic(runner, sync=mode == "sync")
    assert_plain(runner, requests, run(engine, requests))
    assert engine.stats().preemptions > 5
    assert engine.stats().prefill_tokens > engine.stats().prompt_tokens


def test_case_5_admission_that_fails_once_leaves_nothing_behind():
    rng = np.random.default_rng(5)
    runner = MockRunner(page_size=4, num_pages=11, b_dense=64)
    engine = Engine(runner)
    requests = [request("big", prompt(rng, 24), max_tokens=12, ignore_eos=True), request("next", prompt(rng, 20), max_tokens=9)]
    for r in requests:
        engine.add(r)
    engine.step()
    assert engine.num_running == 1, "the second does not fit beside the first"
    outputs = {r.request_id: Output() for r in requests}
    while engine.busy:
        for event in engine.step():
            outputs[event.request_id].take(event)
        engine.batcher.check_integrity()
    assert_plain(runner, requests, outputs)


@pytest.mark.parametrize("make", [Engine, optimistic])
@pytest.mark.parametrize("b_dense", [3, 16, 256])
def test_case_6_two_prompts_of_60_percent_of_the_pool_both_finish(make, b_dense):
    rng = np.random.default_rng(6)
    runner = MockRunner(page_size=4, num_pages=41, b_dense=b_dense)
    requests = [request(name, prompt(rng, 96), max_tokens=40, ignore_eos=name == "a") for name in "ab"]
    engine = make(runner)
    assert_plain(runner, requests, run(engine, requests))
    assert engine.stats().preemptions < 3


def test_case_8_lengths_around_a_page_give_every_page_back():
    rng = np.random.default_rng(8)
    runner = MockRunner(page_size=4, num_pages=20)
    for length in (1, 3, 4, 5, 8):
        for max_tokens in (1, 2, 4, 5):
            requests = [request("r", prompt(rng, length), max_tokens=max_tokens, ignore_eos=True)]
            engine = Engine(runner)
            assert_plain(runner, requests, run(engine, requests))


def test_case_9_prefill_steps_queued_behind_decodes():
    rng = np.random.default_rng(9)
    requests = [request("early", prompt(rng, 3), max_tokens=40, ignore_eos=True)]
    requests += [request(f"r{i}", prompt(rng, 50), max_tokens=5, ignore_eos=True) for i in range(6)]
    outputs = {}
    for mode in ("sync", "lazy"):
        runner = MockRunner(num_pages=200, lazy=mode == "lazy")
        outputs[mode] = run(Engine(runner, sync=mode == "sync"), requests, arrivals={f"r{i}": 3 for i in range(6)})
        assert_plain(runner, requests, outputs[mode])
    assert all(outputs["sync"][r.request_id].token_ids == outputs["lazy"][r.request_id].token_ids for r in requests)


def test_case_10_one_token_uses_no_decode_slot():
    rng = np.random.default_rng(10)
    runner = MockRunner(num_pages=100)
    requests = [request(f"r{i}", prompt(rng, 10), max_tokens=1, ignore_eos=True) for i in range(8)]
    outputs = run(Engine(runner), requests)
    assert all(len(o.token_ids) == 1 and o.reason is FinishReason.LENGTH for o in outputs.values())
    assert all(int(batch.num_decode) == 0 for batch in runner.batches)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_case_13_every_eos_of_the_model_counts_unless_ignored(ignore_eos):
    rng = np.random.default_rng(13)
    config = tiny_config(vocab_size=13, eos_token_ids=(3, 7, 11))
    runner = MockRunner(config, num_pages=100)
    requests = [request(f"r{i}", prompt(rng, 5, 13), max_tokens=60, ignore_eos=ignore_eos) for i in range(30)]
    outputs = run(Engine(runner), requests)
    assert_plain(runner, requests, outputs)
    last_tokens = {o.token_ids[-1] for o in outputs.values() if o.reason is FinishReason.STOP}
    assert last_tokens == (set() if ignore_eos else {3, 7, 11})
    assert not ignore_eos or all(len(o.token_ids) == 60 for o in outputs.values())


def test_case_14_a_request_that_ends_early_leaves_the_batch_within_two_steps():
    rng = np.random.default_rng(14)
    runner = MockRunner(num_pages=200, lazy=True)
    first = plain_decode(runner.config, p := prompt(rng, 5), SamplingParams(max_tokens=3, ignore_eos=True))
    engine = Engine(runner)
    engine.add(request("early", p, stop_token_ids=(first[2],), max_tokens=100, ignore_eos=True))
    for i in range(3):
        engine.add(request(f"long{i}", prompt(rng, 5), max_tokens=50, ignore_eos=True))
    finished_at = None
    for step in range(20):
        events = engine.step()
        if any(e.request_id == "early" and e.finish_reason for e in events):
            finished_at = step
            assert engine.num_running == 3
    assert finished_at is not None
    stopping_step = next(i for i, b in enumerate(runner.batches) if int((b.sequence_rows >= 0).sum()) == 4) + first.index(
        first[2]
    )
    assert finished_at <= stopping_step + 2
    assert engine.stats().dropped_tokens == 1
    assert all(int(batch.num_decode) == 3 for batch in runner.batches[finished_at + 1 :])


def test_case_22_a_soak_of_2000_requests_with_cancels_brings_every_page_back():
    num_requests = 2000
    rng = np.random.default_rng(22)
    runner = MockRunner(b_dense=64, max_sequences=24, page_size=4, num_pages=120, lazy=True)
    requests, arrivals, cancels = [], {}, {}
    for i in range(num_requests):
        name = f"r{i}"
        requests.append(
            request(name, prompt(rng, int(rng.integers(1, 90))), bool(i % 2), max_tokens=int(rng.integers(1, 60)),
                    ignore_eos=bool(rng.integers(2)), seed=i, temperature=float(i % 3 == 0))
        )  # fmt: skip
        arrivals[name] = int(rng.integers(0, num_requests * 2))
        if rng.integers(3) == 0:
            cancels[name] = arrivals[name] + int(rng.integers(0, 60))
    engine = optimistic(runner)
    outputs = run(engine, requests, arrivals=arrivals, cancels=cancels)
    assert_plain(runner, requests, outputs)
    assert engine.stats().finished["cancelled"] > num_requests // 10
    assert engine.stats().preemptions > 0


def test_case_17_and_26_the_batch_around_a_request_changes_nothing():
    """Padding writes nowhere (the mock checks every batch), and a seeded request has the same tokens alone and in a crowd."""
    rng = np.random.default_rng(26)
    target = request("target", prompt(rng, 9), temperature=1.0, seed=42, max_tokens=30)
    crowd = [request(f"r{i}", prompt(rng, 12), temperature=1.0, seed=i, max_tokens=20) for i in range(40)]
    alone = run(Engine(MockRunner(num_pages=40)), [target])["target"].token_ids
    within = run(Engine(MockRunner(num_pages=300, b_dense=64, max_sequences=48)), [*crowd[:20], target, *crowd[20:]])
    assert within["target"].token_ids == alone


def test_requests_without_a_seed_get_different_ones():
    p = prompt(np.random.default_rng(0), 6)
    requests = [request(f"r{i}", p, temperature=1.0, max_tokens=10, ignore_eos=True) for i in range(6)]
    outputs = run(Engine(MockRunner(num_pages=100)), requests)
    assert len({tuple(o.token_ids) for o in outputs.values()}) == 6


def test_exact_lengths_are_never_preempted():
    """When every output runs to max_tokens the predicted peak is the real one."""
    rng = np.random.default_rng(0)
    requests = [
        request(f"r{i}", prompt(rng, int(rng.integers(1, 40))), max_tokens=int(rng.integers(1, 50)), ignore_eos=True)
        for i in range(120)
    ]
    runner = MockRunner(b_dense=64, max_sequences=32, page_size=4, num_pages=90)
    engine = Engine(runner)
    assert_plain(runner, requests, run(engine, requests))
    assert engine.stats().preemptions == 0
    assert engine.stats().prefill_tokens == sum(len(r.prompt_token_ids) for r in requests)


def test_the_dense_batch_is_full_while_prompts_wait():
    rng = np.random.default_rng(0)
    runner = MockRunner(b_dense=32, max_sequences=16, num_pages=400)
    engine = Engine(runner)
    for i in range(40):
        engine.add(request(f"r{i}", prompt(rng, 40), max_tokens=20, ignore_eos=True))
    while engine.batcher.admission.waiting:
        engine.step()
        tokens = int(runner.batches[-1].q_lens.sum())
        assert tokens == 32 or engine.batcher.table.num_running == 16
    smallest = runner.shapes[0]
    while engine.busy:
        engine.step()
    assert runner.batches[-1].shape == smallest, "little work takes a small step"


def test_a_failing_tokenizer_ends_one_request_only():
    class Broken:
        def decode(self, ids):
            raise RuntimeError("no such token")

    rng = np.random.default_rng(0)
    engine = Engine(MockRunner(num_pages=60))
    requests = [request("bad", prompt(rng, 4), False, max_tokens=5), request("good", prompt(rng, 4), True, max_tokens=5)]
    engine.tokenizer = Broken()
    engine.add(requests[0])
    engine.tokenizer = None
    engine.add(requests[1])
    outputs = {r.request_id: Output() for r in requests}
    engine.tokenizer = Broken()
    while engine.busy:
        for event in engine.step():
            outputs[event.request_id].take(event)
    assert outputs["bad"].reason is FinishReason.ERROR
    assert "no such token" in outputs["bad"].last.error
    assert outputs["good"].reason is not FinishReason.ERROR
    assert engine.batcher.cache.num_available == engine.batcher.cache.num_pages - 1


def test_a_pool_of_exactly_what_all_need_runs_all_at_once():
    rng = np.random.default_rng(0)
    runner = MockRunner(b_dense=64, max_sequences=8, page_size=4, num_pages=8 * 10 + 1)
    requests = [request(f"r{i}", prompt(rng, 20), max_tokens=21, ignore_eos=True) for i in range(8)]
    engine = Engine(runner)
    assert_plain(runner, requests, run(engine, requests))
    assert max(int((b.q_lens > 0).sum()) for b in runner.batches) == 8
    assert engine.stats().preemptions == 0


def test_first_tokens_come_in_order_of_arrival():
    """Whichever rows are free: table rows are used again in another order."""
    rng = np.random.default_rng(0)
    engine = Engine(MockRunner(b_dense=12, max_sequences=6, num_pages=200))
    for i in range(40):
        engine.add(request(f"r{i}", prompt(rng, 10), max_tokens=int(rng.integers(1, 30)), ignore_eos=True))
    order = []
    while engine.busy:
        order += [event.request_id for event in engine.step() if event.request_id not in order]
    assert order == [f"r{i}" for i in range(40)]

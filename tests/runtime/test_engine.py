"""The engine against plain full-recompute decoding: tokens, pages, limits, statistics. Field cases carry their numbers."""

import dataclasses

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.request import FinishReason, Request, RequestEvent, SamplingParams
from tests.runtime.mock_runner import MockRunner, plain_decode


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


def run(engine: Engine, requests, *, cancels=None, arrivals=None, max_steps: int = 20_000) -> dict[str, Output]:
    """Runs requests to the end, checking pages after every step. `cancels` and `arrivals` map request ids to step numbers."""
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
        for event in engine.step():
            outputs[event.request_id].take(event)
        engine.batcher.check_integrity()
        step += 1
        assert step < max_steps, "does not end"
    assert engine.batcher.allocator.num_used == 0
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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(workloads(), st.sampled_from(["sync", "eager", "lazy"]))
def test_tokens_equal_plain_decoding_whatever_the_mix(workload, mode):
    sizes, requests, arrivals, cancels = workload
    runner = MockRunner(**sizes, lazy=mode == "lazy")
    outputs = run(Engine(runner, sync=mode == "sync"), requests, cancels=cancels, arrivals=arrivals)
    assert_plain(runner, requests, outputs)
    for r in requests:
        output = outputs[r.request_id]
        assert len(output.logprobs) == (0 if r.params.logprobs is None else len(output.token_ids))
        assert all(entry.token_id == token for entry, token in zip(output.logprobs, output.token_ids, strict=False))
        assert all(len(entry.top) == r.params.logprobs for entry in output.logprobs)
        assert r.stream or output.num_events == 1

"""The engine thread: concurrency, cancels, back pressure, failures and shutdown. Events and conditions decide, never time."""

import threading

import numpy as np
import pytest

from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.request import FinishReason, RejectCode, RequestRejected
from nanoflow_jax.runtime.service import EngineService
from tests.runtime.mock_runner import MockRunner
from tests.runtime.test_engine import Output, assert_plain, prompt, request

_PATIENCE_S = 60


class Client:
    """Collects the events of its requests; `done(id)` is set with the last one."""

    def __init__(self, service: EngineService) -> None:
        self.service = service
        self.outputs: dict[str, Output] = {}
        self.done: dict[str, threading.Event] = {}
        self.started: dict[str, threading.Event] = {}

    def submit(self, r) -> None:
        self.outputs[r.request_id] = Output()
        self.done[r.request_id] = threading.Event()
        self.started[r.request_id] = threading.Event()
        self.service.submit(r, self._on_event)

    def wait(self, request_id: str) -> Output:
        assert self.done[request_id].wait(_PATIENCE_S), f"{request_id} did not finish"
        return self.outputs[request_id]

    def _on_event(self, event) -> None:
        self.outputs[event.request_id].take(event)
        self.started[event.request_id].set()
        if event.finish_reason is not None:
            self.done[event.request_id].set()


@pytest.fixture
def runner():
    return MockRunner(num_pages=60, lazy=True)


@pytest.fixture
def service(runner):
    service = EngineService(Engine(runner), max_waiting=200)
    yield service
    if runner.step_gate is not None:
        runner.step_gate.set()
    assert service.stop(_PATIENCE_S)


def _rejection(service, r) -> RejectCode:
    with pytest.raises(RequestRejected) as refusal:
        service.submit(r, lambda event: None)
    return refusal.value.code


def test_requests_from_many_threads_get_their_own_tokens(runner, service):
    client = Client(service)
    rng = np.random.default_rng(0)
    requests = [request(f"r{i}", prompt(rng, 1 + i % 17), max_tokens=1 + i % 23) for i in range(80)]
    threads = [threading.Thread(target=lambda i=i: [client.submit(r) for r in requests[i::8]]) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outputs = {r.request_id: client.wait(r.request_id) for r in requests}
    assert_plain(runner, requests, outputs)
    for r in requests:
        timing = outputs[r.request_id].last.timing
        assert 0 <= timing.admitted_s <= timing.first_token_s <= timing.finished_s
    assert service.drain(_PATIENCE_S)
    assert service.stats().free_pages == service.stats().num_pages - 1
    assert service.stats().finished["stop"] + service.stats().finished["length"] == 80


def test_case_11_an_empty_prompt_harms_no_other(runner, service):
    client = Client(service)
    client.submit(good := request("good", [1, 2, 3], max_tokens=20))
    assert _rejection(service, request("bad", [])) is RejectCode.EMPTY_PROMPT
    assert_plain(runner, [good], {"good": client.wait("good")})


def test_case_12_a_prompt_beyond_the_pool_is_refused_and_the_next_served(service):
    client = Client(service)
    assert _rejection(service, request("long", [1] * 237)) is RejectCode.EXCEEDS_POOL
    assert _rejection(service, request("longer", [1] * 513)) is RejectCode.PROMPT_TOO_LONG
    client.submit(request("short", [1, 2]))
    assert client.wait("short").reason is not None


def test_overload_duplicates_and_recovery(runner):
    runner.step_gate = threading.Event()
    service = EngineService(Engine(runner), max_waiting=12)
    client = Client(service)
    taken = []
    for i in range(100):
        try:
            client.submit(request(f"r{i}", [i % 97], max_tokens=3, ignore_eos=True))
        except RequestRejected:
            break
        taken.append(f"r{i}")
    assert _rejection(service, request("r100", [1])) is RejectCode.OVERLOADED
    assert 12 <= len(taken) <= 12 + runner.max_sequences
    assert _rejection(service, request("r0", [1])) in (RejectCode.DUPLICATE_ID, RejectCode.OVERLOADED)
    runner.step_gate.set()
    for request_id in taken:
        assert client.wait(request_id).reason is FinishReason.LENGTH
    client.submit(request("r0", [5], max_tokens=2, ignore_eos=True))
    assert client.wait("r0").reason is FinishReason.LENGTH
    assert service.stop(_PATIENCE_S)


def test_a_duplicate_id_is_refused_while_the_first_is_open(runner):
    runner.step_gate = threading.Event()
    service = EngineService(Engine(runner))
    client = Client(service)
    client.submit(request("r", [1], max_tokens=5, ignore_eos=True))
    assert _rejection(service, request("r", [2])) is RejectCode.DUPLICATE_ID
    runner.step_gate.set()
    assert client.wait("r").reason is FinishReason.LENGTH
    assert service.stop(_PATIENCE_S)


def test_cancel_frees_pages_and_keeps_the_others(runner, service):
    client = Client(service)
    client.submit(request("endless", [3, 4], max_tokens=200, ignore_eos=True))
    client.submit(kept := request("kept", [5, 6], max_tokens=50, ignore_eos=True))
    assert client.started["endless"].wait(_PATIENCE_S)
    service.cancel("endless")
    cancelled = client.wait("endless")
    assert cancelled.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert_plain(runner, [kept], {"kept": client.wait("kept")})
    assert not service.cancel("endless")
    assert not service.cancel("never")
    assert service.drain(_PATIENCE_S)
    assert service.stats().free_pages == runner.num_pages - 1


def test_case_21_cancels_at_any_moment_bring_every_page_back(runner, service):
    """Waiting, between prompt chunks, decoding, or finished: whichever state the cancel meets."""
    client = Client(service)
    rng = np.random.default_rng(21)
    requests = [request(f"r{i}", prompt(rng, 1 + i % 60), max_tokens=1 + i % 40, ignore_eos=bool(i % 2)) for i in range(200)]

    def churn(mine, rng):
        for r in mine:
            client.submit(r)
            if rng.integers(2):
                client.service.cancel(mine[int(rng.integers(len(mine)))].request_id)

    threads = [threading.Thread(target=churn, args=(requests[i::4], np.random.default_rng(i))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_plain(runner, requests, {r.request_id: client.wait(r.request_id) for r in requests})
    assert service.drain(_PATIENCE_S)
    assert service.stats().free_pages == runner.num_pages - 1


def test_cancel_before_the_first_step(runner):
    runner.step_gate = threading.Event()
    service = EngineService(Engine(runner))
    client = Client(service)
    client.submit(request("first", [1], max_tokens=4, ignore_eos=True))
    client.submit(request("second", [2], max_tokens=4, ignore_eos=True))
    assert service.cancel("second")
    runner.step_gate.set()
    assert client.wait("second").reason is FinishReason.CANCELLED
    assert client.wait("first").reason is FinishReason.LENGTH
    assert service.stop(_PATIENCE_S)


def test_a_callback_that_raises_loses_only_its_own_request(runner, service, caplog):
    client = Client(service)
    calls = []

    def broken(event):
        calls.append(event)
        raise RuntimeError("client is gone")

    service.submit(request("broken", [1, 2], max_tokens=100, ignore_eos=True), broken)
    client.submit(kept := request("kept", [5, 6], max_tokens=60, ignore_eos=True))
    assert_plain(runner, [kept], {"kept": client.wait("kept")})
    assert len(calls) == 1
    assert service.drain(_PATIENCE_S)
    assert service.stats().free_pages == runner.num_pages - 1
    assert "client is gone" in caplog.text
    assert service.health().state == "draining"


def test_a_callback_may_submit_and_cancel(service):
    client = Client(service)
    chained = threading.Event()

    def on_event(event):
        if event.finish_reason is None and not chained.is_set():
            chained.set()
            assert service.cancel("first")
            client.submit(request("second", [7], max_tokens=2, ignore_eos=True))

    service.submit(request("first", [1], max_tokens=200, ignore_eos=True), on_event)
    assert chained.wait(_PATIENCE_S)
    assert client.wait("second").reason is FinishReason.LENGTH
    assert service.drain(_PATIENCE_S)


def test_a_failed_engine_answers_every_open_request_and_says_so(runner, caplog):
    runner.fail_result_at = 3
    service = EngineService(Engine(runner))
    client = Client(service)
    for i in range(20):
        try:
            client.submit(request(f"r{i}", [i], max_tokens=30, ignore_eos=True))
        except RequestRejected:  # it failed before this one came
            del client.outputs[f"r{i}"]
    for request_id in client.outputs:
        output = client.wait(request_id)
        assert output.reason is FinishReason.ERROR
        assert "told to fail" in output.last.error
    assert service.stop(_PATIENCE_S)
    health = service.health()
    assert (health.state, health.error) == ("failed", "RuntimeError: the mock device was told to fail")
    assert _rejection(service, request("late", [1])) is RejectCode.SHUTTING_DOWN
    assert service.drain(0)
    assert "the engine failed" in caplog.text


def test_drain_finishes_what_is_open_and_refuses_the_rest(runner):
    runner.step_gate = threading.Event()
    service = EngineService(Engine(runner))
    client = Client(service)
    client.submit(request("open", [1], max_tokens=20, ignore_eos=True))
    assert not service.drain(0), "not finished yet"
    assert service.health().state == "draining"
    assert _rejection(service, request("late", [1])) is RejectCode.SHUTTING_DOWN
    runner.step_gate.set()
    assert service.drain(_PATIENCE_S)
    assert len(client.wait("open").token_ids) == 20
    assert service.stop(_PATIENCE_S)
    assert service.health().state == "stopped"


def test_stop_cancels_what_is_open(runner):
    service = EngineService(Engine(runner))
    client = Client(service)
    for i in range(30):
        client.submit(request(f"r{i}", [i], max_tokens=200, ignore_eos=True))
    assert service.stop(_PATIENCE_S)
    assert service.stop(_PATIENCE_S)
    reasons = {client.wait(f"r{i}").reason for i in range(30)}
    assert reasons <= {FinishReason.CANCELLED, FinishReason.LENGTH}
    assert service.stats().free_pages == runner.num_pages - 1


def test_a_hung_step_shows_in_health_and_does_not_hang_stop(runner):
    runner.step_gate = threading.Event()
    service = EngineService(Engine(runner))
    client = Client(service)
    client.submit(request("r", [1], max_tokens=5))
    assert runner.gate_reached.wait(_PATIENCE_S)
    assert service.health().step_age_s > 0
    assert not service.stop(0.01)
    runner.step_gate.set()
    assert service.stop(_PATIENCE_S)
    assert client.wait("r").reason is not None
    assert service.health().step_age_s == 0


def test_an_idle_service_burns_no_steps(runner, service):
    client = Client(service)
    client.submit(request("r", [1], max_tokens=3, ignore_eos=True))
    client.wait("r")
    assert service.drain(_PATIENCE_S)
    assert service.stats().steps <= 4
    assert service.stats().waiting == service.stats().running == 0


def test_a_queue_of_nothing_is_refused(runner):
    with pytest.raises(ValueError, match="max_waiting=0"):
        EngineService(Engine(runner), max_waiting=0)

"""Memory tiers behind the engine: the tokens of plain decoding, whatever is offloaded, loaded, evicted, lost or cancelled."""

import contextlib
import random
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.kv_store import KVStore
from nanoflow_jax.runtime.request import Request
from tests.runtime.mock_runner import MockRunner
from tests.runtime.test_engine import Optimist, Output, assert_plain, prompt, run
from tests.runtime.test_prefix_reuse import ask, assert_empty, conversations

FINGERPRINT = bytes(32)


def always(load_s: float, compute_s: float) -> bool:
    return True


def make_store(runner: MockRunner, host_pages: int = 10_000, **options) -> KVStore:
    return KVStore(FINGERPRINT, runner.page_format.page_bytes, host_bytes=host_pages * runner.page_format.page_bytes, **options)


@contextlib.contextmanager
def tiered(runner: MockRunner, store: KVStore | None = None, *, worth=always, **options):
    """An engine with tiers, which are at rest in the end: nothing pinned, nothing under way, no fault that was not expected."""
    engine = Engine(runner, kv_store=store or make_store(runner), worth_loading=worth, **options)
    yield engine
    at_rest(engine)
    assert engine.close(20.0)


def at_rest(engine: Engine) -> None:
    tiers = engine.tiers
    assert tiers.drain(20.0)
    assert wait_until(lambda: tiers.store.num_pinned == 0), f"{tiers.store.num_pinned} host pages are held for ever"
    assert tiers.loads._in_flight == 0
    assert not tiers.loads._active
    assert "internal error" not in engine.stats().kv_tiers.faults


def wait_until(condition, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def finish(engine: Engine, r: Request) -> Output:
    """Runs one request alone."""
    return run(engine, [r])[r.request_id]


def settle(engine: Engine) -> None:
    """Lets everything offloaded arrive and empties the pool's cache, so that whatever is reused comes from the tiers."""
    assert engine.tiers.drain(20.0)
    engine.clear_prefix_cache()


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    conversations(),
    st.sampled_from(["sync", "eager", "lazy"]),
    st.booleans(),
    st.sampled_from([2, 7, 40, 1000]),
    st.sampled_from([None, None, 3, 60]),
    st.integers(0, 2**32 - 1),
)
def test_conversations_have_the_tokens_of_plain_decoding(tmp_path_factory, conversation, mode, preempting, host, ssd, seed):
    sizes, requests, arrivals, cancels, clears = conversation
    runner = MockRunner(**sizes, lazy=mode == "lazy")
    # Copies take their time, now and then, and loading is worth it or not by chance.
    chance = random.Random(seed)
    runner.before_copy = lambda: time.sleep(chance.choice([0, 0, 0, 0.0005]))
    options = {}
    if ssd is not None:
        options = {
            "ssd_directory": str(tmp_path_factory.mktemp("kv")),
            "ssd_bytes": (1 << 16) + ssd * runner.page_format.page_bytes,
        }
    store = make_store(runner, host, **options)
    with tiered(runner, store, worth=lambda *_: chance.random() < 0.8, sync=mode == "sync") as engine:
        if preempting:
            engine.batcher.admission.output_lengths = Optimist()
        clears = clears | {step for step in range(0, 80, 7)}
        outputs = run(engine, requests, arrivals=arrivals, cancels=cancels, clears=clears)
        assert_plain(runner, requests, outputs)
        stats = engine.stats()
        if not stats.preemptions and not cancels:
            assert stats.prefill_tokens + stats.reused_tokens == stats.prompt_tokens
        for r in requests:
            assert outputs[r.request_id].last.usage.cached_tokens < len(r.prompt_token_ids)
        assert_empty(engine)


@pytest.mark.parametrize("mode", ["sync", "eager", "lazy"])
@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_what_left_the_pool_comes_back_from_host_memory(mode, page_size):
    rng = np.random.default_rng(0)
    runner = MockRunner(page_size=page_size, num_pages=400 // page_size, b_dense=16, lazy=mode == "lazy")
    with tiered(runner, sync=mode == "sync") as engine:
        first = ask("first", prompt(rng, 61), max_tokens=30, ignore_eos=True)
        answer = finish(engine, first)
        history = first.prompt_token_ids + answer.token_ids
        settle(engine)
        second = ask("second", history + prompt(rng, 5), max_tokens=20, ignore_eos=True)
        output = finish(engine, second)
        assert_plain(runner, [second], {"second": output})
        # The last token of the answer never entered the cache.
        assert output.last.usage.cached_tokens == (len(history) - 1) // page_size * page_size
        stats = engine.stats().kv_tiers
        assert (stats.loads, stats.failed_loads, stats.dropped_tokens) == (1, 0, 0)
        assert stats.loaded_pages == (len(history) - 1) // page_size == stats.host.hits
        assert stats.offloaded_tokens == engine.stats().batch_tokens


def test_what_left_host_memory_comes_back_from_ssd_and_survives_a_restart(tmp_path):
    rng = np.random.default_rng(0)
    runner = MockRunner(page_size=4, num_pages=60)
    first = ask("first", prompt(rng, 61), max_tokens=30, ignore_eos=True)
    options = {"ssd_directory": str(tmp_path), "ssd_bytes": 1 << 20}
    with tiered(runner, make_store(runner, 200, **options)) as engine:
        history = first.prompt_token_ids + finish(engine, first).token_ids
    fresh = MockRunner(page_size=4, num_pages=60)
    with tiered(fresh, make_store(fresh, 200, **options)) as engine:
        second = ask("second", history + prompt(rng, 5), max_tokens=20, ignore_eos=True)
        output = finish(engine, second)
        assert_plain(fresh, [second], {"second": output})
        assert output.last.usage.cached_tokens == (len(history) - 1) // 4 * 4
        stats = engine.stats().kv_tiers
        assert stats.ssd.hits == stats.loaded_pages == 22
        assert stats.ssd.load_s > 0


def test_a_store_without_prefix_cache_is_refused():
    runner = MockRunner()
    with pytest.raises(ValueError, match="prefix cache"):
        Engine(runner, prefix_cache=False, kv_store=make_store(runner))


def test_computing_is_preferred_where_it_is_faster():
    rng = np.random.default_rng(0)
    runner = MockRunner(page_size=4, num_pages=60)
    seen = []
    with tiered(runner, worth=lambda load_s, compute_s: seen.append((load_s, compute_s)) or False) as engine:
        tokens = prompt(rng, 41)
        finish(engine, ask("first", tokens, max_tokens=1))
        settle(engine)
        output = finish(engine, ask("second", tokens, max_tokens=1))
        assert output.last.usage.cached_tokens == 0
        stats = engine.stats().kv_tiers
        assert stats.loads == 0
        assert stats.declined_loads >= 1
        (load_s, compute_s), *_ = seen
        assert load_s == 0.0, "host memory costs nothing, and no copy has been measured"
        assert 0 < compute_s < 100, "40 tokens at the rate of the first request"

"""Prefix reuse in the engine: the same tokens as plain decoding, whatever is shared, evicted, preempted or cancelled."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.request import FinishReason, Request, SamplingParams
from tests.runtime.mock_runner import MockRunner, plain_decode, tiny_config
from tests.runtime.test_engine import Output, assert_plain, optimistic, prompt, run


def assert_empty(engine: Engine) -> None:
    """Once its cache is cleared, an idle engine is as it was at the start."""
    engine.clear_prefix_cache()
    stats = engine.stats()
    assert (stats.cached_pages, stats.kept_sessions, stats.running) == (0, 0, 0)
    assert stats.free_pages == stats.num_pages - 1
    engine.batcher.check_integrity()


def finish(engine: Engine, r: Request) -> Output:
    """Runs one request alone."""
    return run(engine, [r])[r.request_id]


def ask(name: str, tokens, *, session: str | None = None, salt: str | None = None, stream: bool = True, **params) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        params=SamplingParams(**params),
        stream=stream,
        session_id=session,
        cache_salt=salt,
    )


@st.composite
def conversations(draw):
    """Sizes, requests, arrivals, cancels and steps at which the cache is cleared.

    Conversations begin with one of a few system prompts or fork off anywhere inside an earlier one; a round's prompt is the
    round before, its answer and some new tokens. Rounds may come before the ones they continue have been answered.
    """
    page_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    num_pages = draw(st.integers(3, 40)) + 1
    pool_tokens = (num_pages - 1) * page_size
    longest = max(1, min(pool_tokens, 90))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    config = tiny_config()
    histories = [prompt(rng, n) for n in draw(st.lists(st.integers(1, 30), min_size=1, max_size=2))]
    requests, arrivals, cancels = [], {}, {}
    for i in range(draw(st.integers(1, 4))):
        origin = draw(st.sampled_from(histories))
        history = origin[: draw(st.integers(0, len(origin)))]
        salt, session = draw(st.sampled_from([None, None, "a"])), draw(st.sampled_from([None, "x", f"c{i}"]))
        step = draw(st.integers(0, 10))
        for j in range(draw(st.integers(1, 4))):
            tokens = (history + prompt(rng, draw(st.integers(1, 12))))[:longest]
            name = f"r{i}.{j}"
            params = {
                "max_tokens": draw(st.integers(1, 20)),
                "ignore_eos": draw(st.booleans()),
                "temperature": draw(st.sampled_from([0.0, 0.0, 1.0])),
                "seed": 3,
                "logprobs": draw(st.sampled_from([None, None, 1])),
            }
            requests.append(ask(name, tokens, session=session, salt=salt, stream=draw(st.booleans()), **params))
            arrivals[name] = step
            if draw(st.integers(0, 5)) == 0:
                cancels[name] = step + draw(st.integers(0, 25))
            history = tokens + plain_decode(config, tokens, requests[-1].params, pool_tokens=pool_tokens)
            histories.append(history)
            step += draw(st.integers(0, 25))
    sizes = {
        "page_size": page_size, "num_pages": num_pages, "b_dense": draw(st.sampled_from([1, 2, 5, 16, 33])),
        "max_sequences": draw(st.integers(1, 8)),
    }  # fmt: skip
    return sizes, requests, arrivals, cancels, draw(st.sets(st.integers(0, 60), max_size=3))


@settings(max_examples=250, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(conversations(), st.sampled_from(["sync", "eager", "lazy"]), st.booleans())
def test_conversations_have_the_tokens_of_plain_decoding(conversation, mode, preempting):
    sizes, requests, arrivals, cancels, clears = conversation
    runner = MockRunner(**sizes, lazy=mode == "lazy")
    engine = (optimistic if preempting else Engine)(runner, sync=mode == "sync")
    outputs = run(engine, requests, arrivals=arrivals, cancels=cancels, clears=clears)
    assert_plain(runner, requests, outputs)
    stats = engine.stats()
    for r in requests:
        cached = outputs[r.request_id].last.usage.cached_tokens
        assert cached % runner.page_size == 0
        assert cached < len(r.prompt_token_ids)
    if not stats.preemptions:
        assert stats.reused_tokens == sum(output.last.usage.cached_tokens for output in outputs.values())
    if not stats.preemptions and not cancels:
        assert stats.prefill_tokens + stats.reused_tokens == stats.prompt_tokens
    assert_empty(engine)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(conversations(), st.booleans())
def test_reuse_changes_no_event_but_what_was_cached(conversation, sync):
    sizes, requests, arrivals, _, _ = conversation
    on, off = (Engine(MockRunner(**sizes), sync=sync, prefix_cache=reuse) for reuse in (True, False))
    with_reuse, without = run(on, requests, arrivals=arrivals), run(off, requests, arrivals=arrivals)
    for r in requests:
        a, b = with_reuse[r.request_id], without[r.request_id]
        assert (a.token_ids, a.text, a.reason) == (b.token_ids, b.text, b.reason)
        assert [entry.token_id for entry in a.logprobs] == [entry.token_id for entry in b.logprobs]
        assert b.last.usage.cached_tokens == 0
    assert (off.stats().cached_pages, off.stats().reused_tokens, off.stats().prefix_hits) == (0, 0, 0)
    assert on.stats().prefill_tokens <= off.stats().prefill_tokens or on.stats().preemptions


@pytest.mark.parametrize("mode", ["sync", "eager", "lazy"])
def test_a_second_round_computes_only_what_is_new(mode):
    rng = np.random.default_rng(0)
    runner = MockRunner(page_size=4, num_pages=200, lazy=mode == "lazy")
    engine = Engine(runner, sync=mode == "sync")
    first = finish(engine, one := ask("1", prompt(rng, 101), max_tokens=30, ignore_eos=True))
    tokens = [*one.prompt_token_ids, *first.token_ids, *prompt(rng, 9)]
    before = engine.stats().prefill_tokens
    second = finish(engine, two := ask("2", tokens, max_tokens=10))
    assert_plain(runner, [two], {"2": second})
    # 131 tokens, of which the last was never computed and, read late, the one before not known in time.
    assert second.last.usage.cached_tokens == 128
    assert engine.stats().prefill_tokens - before == len(tokens) - 128
    assert (engine.stats().prefix_hits, engine.stats().prefix_misses, engine.stats().reused_tokens) == (1, 1, 128)
    assert_empty(engine)
    assert finish(engine, ask("3", tokens, max_tokens=10)).token_ids == second.token_ids


@pytest.mark.parametrize("mode", ["sync", "eager", "lazy"])
@pytest.mark.parametrize("pages", [1, 2, 3, 4])
def test_case_1_a_prompt_that_is_cached_as_a_whole(mode, pages):
    rng = np.random.default_rng(pages)
    runner = MockRunner(page_size=4, num_pages=40, lazy=mode == "lazy")
    engine = Engine(runner, sync=mode == "sync")
    tokens = prompt(rng, 4 * pages)
    for again in range(3):
        output = finish(engine, r := ask(f"{again}", tokens, max_tokens=9))
        assert_plain(runner, [r], {r.request_id: output})
        assert output.last.usage.cached_tokens == (4 * (pages - 1) if again else 0), "its last token is always computed"


@pytest.mark.parametrize("mode", ["sync", "lazy"])
def test_case_2_preempted_requests_find_their_prefix_again(mode):
    rng = np.random.default_rng(2)
    shared = prompt(rng, 12)
    requests = [
        ask(f"r{i}", shared + prompt(rng, int(rng.integers(1, 9))), max_tokens=int(rng.integers(1, 30))) for i in range(256)
    ]
    runner = MockRunner(b_dense=128, max_sequences=64, page_size=4, num_pages=64 * 8 // 5, lazy=mode == "lazy")
    engine = optimistic(runner, sync=mode == "sync")
    outputs = run(engine, requests)
    assert_plain(runner, requests, outputs)
    stats = engine.stats()
    assert stats.preemptions > 10
    assert stats.prefix_hits > 200
    assert stats.reused_tokens > sum(output.last.usage.cached_tokens for output in outputs.values()), "when admitted again, too"
    assert_empty(engine)


def test_case_5_what_a_failed_admission_found_is_found_anew():
    """A prefix is cached when a request first asks for room, and evicted before it gets any."""
    rng = np.random.default_rng(5)
    runner = MockRunner(page_size=4, num_pages=13, b_dense=64)
    engine = Engine(runner)
    start = prompt(rng, 16)
    finish(engine, ask("before", [*start, 1], max_tokens=1))
    assert engine.stats().cached_pages == 4
    requests = [
        ask("big", prompt(rng, 30), max_tokens=14, ignore_eos=True),
        ask("late", start + prompt(rng, 4), max_tokens=9, ignore_eos=True),
    ]
    evictions = []
    outputs = run(engine, requests, on_step=lambda: evictions.append(engine.stats().evicted_pages))
    assert_plain(runner, requests, outputs)
    assert outputs["late"].last.usage.cached_tokens < 16
    assert evictions[0] < evictions[-1]
    assert engine.stats().reused_tokens == outputs["late"].last.usage.cached_tokens


def test_case_7_logprobs_with_a_cached_prefix_are_those_without():
    rng = np.random.default_rng(7)
    tokens = prompt(rng, 11)
    entries = []
    for reuse in (True, False):
        engine = Engine(MockRunner(page_size=4, num_pages=40), prefix_cache=reuse)
        for again in range(2):
            output = finish(engine, ask(f"{again}", tokens, max_tokens=6, logprobs=3, ignore_eos=True))
            assert output.last.usage.cached_tokens == (8 if reuse and again else 0)
            entries.append(output.logprobs)
    assert all(each == entries[0] and len(each) == 6 for each in entries)


def test_case_8_lengths_around_a_page_sent_twice():
    rng = np.random.default_rng(8)
    runner = MockRunner(page_size=4, num_pages=20)
    engine = Engine(runner)
    for length, max_tokens in itertools.product((1, 3, 4, 5, 8, 9), (1, 2, 4, 5)):
        tokens = prompt(rng, length)
        for again in range(2):
            output = finish(engine, r := ask(f"{again}", tokens, max_tokens=max_tokens, ignore_eos=True))
            assert_plain(runner, [r], {r.request_id: output})
            assert engine.stats().free_pages == 19
    assert_empty(engine)


@pytest.mark.parametrize("mode", ["sync", "lazy"])
def test_case_22_a_soak_with_shared_prefixes_and_cancels_brings_every_page_back(mode):
    rng = np.random.default_rng(22)
    runner = MockRunner(b_dense=64, max_sequences=16, page_size=4, num_pages=100, lazy=mode == "lazy")
    systems = [prompt(rng, n) for n in (5, 16, 40)]
    requests, arrivals, cancels = [], {}, {}
    for i in range(800):
        name = f"r{i}"
        tokens = systems[i % 3] + prompt(rng, int(rng.integers(1, 30)))
        requests.append(
            ask(
                name,
                tokens,
                session=f"s{i % 7}" if i % 2 else None,
                salt=[None, "a"][i % 4 == 0],
                max_tokens=int(rng.integers(1, 40)),
            )
        )
        arrivals[name] = int(rng.integers(0, 1600))
        if rng.integers(4) == 0:
            cancels[name] = arrivals[name] + int(rng.integers(0, 40))
    engine = optimistic(runner, sync=mode == "sync")
    assert_plain(runner, requests, run(engine, requests, arrivals=arrivals, cancels=cancels))
    stats = engine.stats()
    assert min(stats.finished["cancelled"], stats.preemptions, stats.evicted_pages, stats.prefix_hits) > 20
    assert_empty(engine)


def test_two_that_begin_alike_in_the_same_step_both_compute_and_a_third_finds_it():
    rng = np.random.default_rng(0)
    runner = MockRunner(page_size=4, num_pages=100, b_dense=128, lazy=True)
    engine = Engine(runner)
    shared = prompt(rng, 20)
    requests = [ask(f"r{i}", shared + prompt(rng, 3), max_tokens=12, ignore_eos=True) for i in range(3)]
    outputs = run(engine, requests, arrivals={"r2": 1})
    assert_plain(runner, requests, outputs)
    assert [outputs[f"r{i}"].last.usage.cached_tokens for i in range(3)] == [0, 0, 20]
    assert not runner.batches[0].block_tables[:2].all(axis=0).all()
    assert_empty(engine)


def test_a_long_prompt_is_shared_chunk_by_chunk_as_its_steps_are_launched():
    """The second asks while the first is half computed, and reads pages that no result has been read of yet."""
    rng = np.random.default_rng(0)
    runner = MockRunner(page_size=4, num_pages=100, b_dense=16, lazy=True)
    engine = Engine(runner)
    tokens = prompt(rng, 60)
    requests = [ask("a", tokens, max_tokens=5), ask("b", [*tokens, 3, 4], max_tokens=5)]
    outputs = run(engine, requests, arrivals={"b": 2})
    assert_plain(runner, requests, outputs)
    assert 0 < outputs["b"].last.usage.cached_tokens < 60


@pytest.mark.parametrize("mode", ["sync", "eager", "lazy"])
def test_a_page_that_fills_while_decoding_can_be_shared_at_once(mode):
    rng = np.random.default_rng(0)
    runner = MockRunner(page_size=4, num_pages=100, lazy=mode == "lazy")
    engine = Engine(runner, sync=mode == "sync")
    a = ask("a", prompt(rng, 6), max_tokens=60, ignore_eos=True)
    answer = plain_decode(runner.config, a.prompt_token_ids, a.params)
    b = ask("b", [*a.prompt_token_ids, *answer[:24], 9], max_tokens=10, ignore_eos=True)
    outputs = run(engine, [a, b], arrivals={"b": 35})
    assert_plain(runner, [a, b], outputs)
    assert outputs["b"].last.usage.cached_tokens == 28
    assert_empty(engine)


def test_forks_share_what_they_have_in_common():
    rng = np.random.default_rng(0)
    runner = MockRunner(page_size=4, num_pages=200)
    engine = Engine(runner)
    trunk = ask("trunk", prompt(rng, 30), session="s", max_tokens=20, ignore_eos=True)
    history = [*trunk.prompt_token_ids, *finish(engine, trunk).token_ids]
    forks = [ask(f"f{cut}", history[:cut] + prompt(rng, 7), session="s", max_tokens=20) for cut in (3, 4, 29, 41, 50)]
    outputs = run(engine, forks)
    assert_plain(runner, forks, outputs)
    assert [outputs[r.request_id].last.usage.cached_tokens for r in forks] == [0, 4, 28, 40, 48]
    assert_empty(engine)


def test_salts_keep_tenants_apart():
    rng = np.random.default_rng(0)
    engine = Engine(MockRunner(page_size=4, num_pages=100))
    tokens = prompt(rng, 30)
    cached = [
        finish(engine, ask(f"{i}", tokens, salt=salt, session="same", max_tokens=2)).last.usage.cached_tokens
        for i, salt in enumerate([None, "a", "b", "a", None, "b", "c"])
    ]
    assert cached == [0, 0, 0, 28, 28, 28, 0]
    assert engine.stats().kept_sessions == 4


def _crowd(engine: Engine, rng: np.random.Generator, tokens: int) -> None:
    """Pushes everything out of the cache that is not kept."""
    finish(engine, ask("crowd", prompt(rng, tokens), max_tokens=1))


def test_a_session_outlives_others_until_its_next_request():
    rng = np.random.default_rng(0)
    runner = MockRunner(page_size=4, num_pages=41, b_dense=64)
    engine = Engine(runner)
    kept, loose = prompt(rng, 21), prompt(rng, 21)
    finish(engine, ask("kept", kept, session="s", max_tokens=8, ignore_eos=True))
    finish(engine, ask("loose", loose, max_tokens=8, ignore_eos=True))
    _crowd(engine, rng, 4 * 34)
    assert finish(engine, ask("again", loose, max_tokens=1)).last.usage.cached_tokens == 0
    _crowd(engine, rng, 4 * 34)
    # The session goes another way after three pages: the rest of its past is like any other's from now on.
    assert finish(engine, ask("next", [*kept[:13], 1, 2], session="s", max_tokens=1)).last.usage.cached_tokens == 12
    _crowd(engine, rng, 4 * 37)
    assert finish(engine, ask("probe", kept, max_tokens=1)).last.usage.cached_tokens == 12
    # A session is a preference, not a reservation.
    _crowd(engine, rng, 4 * 40)
    assert finish(engine, ask("gone", kept, max_tokens=1)).last.usage.cached_tokens == 0
    assert engine.stats().kept_sessions == 0


def test_a_session_keeps_nothing_while_its_next_request_runs():
    rng = np.random.default_rng(0)
    engine = Engine(MockRunner(page_size=4, num_pages=60, lazy=True))
    finish(engine, ask("first", prompt(rng, 21), session="s", max_tokens=8))
    kept = []
    run(
        engine,
        [ask("next", prompt(rng, 10), session="s", max_tokens=8, ignore_eos=True)],
        on_step=lambda: kept.append(engine.stats().kept_sessions),
    )
    assert kept[0] == kept[-3] == 0
    assert engine.stats().kept_sessions == 1


def test_a_page_is_not_named_before_its_last_token_is_known():
    """A request that ends by length gives its pages back while the step before its last is still running. The table still has
    another request's id where that step's token will go."""
    rng = np.random.default_rng(0)
    runner = MockRunner(page_size=4, num_pages=60, max_sequences=1, lazy=True)
    engine = Engine(runner)
    start = prompt(rng, 6)
    params = SamplingParams(max_tokens=11, ignore_eos=True)
    answer = plain_decode(runner.config, start, params)
    assert (len(start) + len(answer) - 1) % 4 == 0
    stale = [*start, *answer[:-2], (answer[-2] + 1) % 97]
    finish(engine, ask("stale", [*stale, 1, 2], max_tokens=1))
    engine.clear_prefix_cache()
    assert finish(engine, ask("short", start, max_tokens=11, ignore_eos=True)).token_ids == answer
    output = finish(engine, r := ask("probe", [*stale, 3], max_tokens=9, ignore_eos=True))
    assert_plain(runner, [r], {"probe": output})
    assert output.last.usage.cached_tokens == 12


@pytest.mark.parametrize("arrival", range(6))
def test_cached_pages_that_a_request_takes_over_are_no_room_for_its_other_pages(arrival):
    """At step 2 the running request has just got its third page: 7 of 10 are left, 2 of them cached. The next begins with these
    2 and needs 6 more."""
    rng = np.random.default_rng(0)
    runner = MockRunner(tiny_config(eos_token_ids=()), page_size=4, num_pages=11, b_dense=64)
    engine = optimistic(runner)
    cached = prompt(rng, 8)
    finish(engine, ask("before", [*cached, 1], max_tokens=1))
    requests = [ask("running", prompt(rng, 7), max_tokens=9), ask("next", cached + prompt(rng, 22), max_tokens=3)]
    assert_plain(runner, requests, run(engine, requests, arrivals={"next": arrival}))


def test_shared_pages_count_once_when_room_is_foreseen():
    """Eight conversations over one long system prompt run at once in a pool that holds it once and their own tokens exactly."""
    rng = np.random.default_rng(0)
    shared = prompt(rng, 80)
    runner = MockRunner(b_dense=128, max_sequences=8, page_size=4, num_pages=1 + 20 + 8 * 5)
    requests = [ask(f"r{i}", shared + prompt(rng, 4), max_tokens=17, ignore_eos=True) for i in range(8)]
    engine = Engine(runner)
    finish(engine, ask("first", [*shared, 1], max_tokens=1))
    outputs = run(engine, requests)
    assert_plain(runner, requests, outputs)
    assert engine.stats().preemptions == 0
    assert max(int((batch.q_lens > 0).sum()) for batch in runner.batches) == 8
    assert all(output.last.usage.cached_tokens == 80 for output in outputs.values())
    without = Engine(MockRunner(b_dense=128, max_sequences=8, page_size=4, num_pages=1 + 20 + 8 * 5), prefix_cache=False)
    run(without, requests)
    assert max(int((batch.q_lens > 0).sum()) for batch in without.runner.batches) == 2


def test_exact_lengths_are_never_preempted_when_prefixes_are_shared():
    rng = np.random.default_rng(1)
    systems = [prompt(rng, n) for n in (8, 17, 30)]
    requests = [
        ask(
            f"r{i}",
            systems[i % 3] + prompt(rng, int(rng.integers(1, 20))),
            max_tokens=int(rng.integers(1, 50)),
            ignore_eos=True,
        )
        for i in range(150)
    ]
    runner = MockRunner(b_dense=64, max_sequences=32, page_size=4, num_pages=90)
    engine = Engine(runner)
    assert_plain(runner, requests, run(engine, requests))
    assert engine.stats().preemptions == 0
    assert engine.stats().prefix_hits > 100
    assert_empty(engine)


@pytest.mark.parametrize("mode", ["sync", "eager", "lazy"])
@pytest.mark.parametrize("cancel_at", [0, 1, 2, 4, 5, 6, 9, 20, 40])
def test_a_cancel_in_any_state_leaves_what_was_computed_for_others(mode, cancel_at):
    """Waiting, between prompt chunks, at the first token, decoding, finished."""
    rng = np.random.default_rng(0)
    runner = MockRunner(page_size=4, num_pages=60, b_dense=8, lazy=mode == "lazy")
    engine = Engine(runner, sync=mode == "sync")
    a = ask("a", prompt(rng, 33), session="s", max_tokens=30, ignore_eos=True)
    b = ask("b", [*a.prompt_token_ids, 5], session="s", max_tokens=8)
    outputs = run(engine, [a, b], cancels={"a": cancel_at}, arrivals={"b": cancel_at + 1})
    assert_plain(runner, [a, b], outputs)
    assert outputs["a"].reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert outputs["b"].last.usage.cached_tokens == min(32, 8 * cancel_at)
    assert_empty(engine)


def test_the_cache_can_be_turned_off():
    rng = np.random.default_rng(0)
    engine = Engine(MockRunner(page_size=4, num_pages=40), prefix_cache=False)
    tokens = prompt(rng, 20)
    for again in range(2):
        output = finish(engine, ask(f"{again}", tokens, max_tokens=4))
        assert output.last.usage.cached_tokens == 0
    stats = engine.stats()
    assert (stats.prefix_hits, stats.prefix_misses, stats.reused_tokens) == (0, 0, 0)
    assert (stats.cached_pages, stats.evicted_pages) == (0, 0)

"""The plan of a step: chosen by tokens per second, laid out as it wants, and without influence on any token."""

import dataclasses
import types
from collections.abc import Iterator

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoflow_jax.config import preset
from nanoflow_jax.executor.runner import ModelRunner, RunnerConfig
from nanoflow_jax.plan import (
    NanoBatch,
    Phase,
    PipelinePlan,
    PlanSet,
    Resource,
    SequentialTime,
    period_of_batch_us,
    sequential_time_of,
)
from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.llm import generate
from nanoflow_jax.runtime.plan_choice import choose_plan, largest_b_dense, shipped_plans
from nanoflow_jax.runtime.request import SamplingParams
from tests.executor.plans import random_plan
from tests.model.steps import tiny_model

SIZES = {"tp": 1, "moe": False, "partition": "none", "tile": 4}


def plan_set(model: str, mixes: list[tuple[int, int, float]], sequential_us: float, crossover: int | None = 0) -> PlanSet:
    """Plans for (b_dense, decode tokens) that claim the given period; in turn, 4096 tokens, half decoding, take the other."""
    rng = np.random.default_rng(0)
    plans = []
    for b_dense, decode_tokens, period_us in mixes:
        plan = random_plan(rng, b_dense=b_dense, decode_tokens=decode_tokens, model=model, **SIZES)
        plans.append(scaled(plan, period_us))
    times = (SequentialTime(b_dense=4096, decode_tokens=2048, layer_us=sequential_us),)
    return PlanSet(model=model, device="none", tp=1, plans=tuple(plans), sequential=times, crossover_tokens=crossover)


# Indices into the shipped plans, which are sorted by size.
OUTPUTS_ONLY, FEWER_OUTPUTS, AS_MANY_OUTPUTS = range(3)


def shipped_set() -> PlanSet:
    """Plans by hand, for 1024 decoding tokens alone, 640 beside 1408 prompt tokens, and 1024 beside as many."""
    plans = shipped_plans(preset("llama3-8b"), types.SimpleNamespace(device_kind="NVIDIA H200"), 1)
    assert plans is not None
    return plans


def shipped() -> PipelinePlan:
    return shipped_set().plans[AS_MANY_OUTPUTS]


def shipped_alone() -> PlanSet:
    return msgspec.structs.replace(shipped_set(), plans=(shipped(),))


def scaled(plan, period_us: float):
    factor = period_us / plan.period_us
    nano = tuple(
        msgspec.structs.replace(n, start_us=n.start_us * factor, duration_us=n.duration_us * factor, best_us=n.best_us * factor)
        for n in plan.nano_operations
    )
    phases = tuple(
        msgspec.structs.replace(p, start_us=p.start_us * factor, duration_us=p.duration_us * factor) for p in plan.phases
    )
    return msgspec.structs.replace(plan, period_us=period_us, nano_operations=nano, phases=phases)


@pytest.mark.parametrize(
    ("decode", "prefill", "expected"),
    [
        (16, 24, (0, 24)),  # fits the first exactly
        (16, 32, (0, 24)),  # 40 tokens in 10 us beat 48 sequentially in 16 us
        (17, 23, (1, 8)),  # too many decoding for the first; 25 tokens in 9 us beat 40 in 16 us
        (33, 7, (None, 7)),  # too many for either
        (2, 38, (0, 24)),  # 26 tokens in 10 us still win, by a hair
        (2, 0, (None, 0)),  # hardly anything to do
    ],
)
def test_the_highest_rate_wins(decode: int, prefill: int, expected: tuple[int | None, int]) -> None:
    plans = plan_set("m", [(40, 16, 10.0), (40, 32, 9.0)], sequential_us=4096 / 2.55)
    assert choose_plan(plans, decode, prefill) == expected


def test_plans_below_the_crossover_are_not_executed() -> None:
    for crossover, chosen in [(40, 0), (41, None), (None, None)]:
        plans = plan_set("m", [(40, 16, 10.0)], sequential_us=4096.0, crossover=crossover)
        assert choose_plan(plans, 16, 24) == (chosen, 24)
        assert choose_plan(plans, 0, 0) == (None, 0)


def large_plan(seed: int) -> PipelinePlan:
    rng = np.random.default_rng(seed)
    tp, partition = [(1, "none"), (4, "all_reduce"), (4, "all_gather")][seed % 3]
    sizes = {"b_dense": 2048, "decode_tokens": int(rng.choice([0, 384, 1000, 2048])), "tile": 128}
    return random_plan(rng, tp=tp, moe=bool(rng.integers(2)), partition=partition, model="m", **sizes)


@given(seed=st.integers(0, 999), data=st.data())
@settings(max_examples=60)
def test_a_plan_is_priced_for_the_places_that_a_batch_fills(seed: int, data: st.DataObject) -> None:
    plan = large_plan(seed)
    decoding, prompt = plan.decode_tokens, plan.b_dense - plan.decode_tokens
    assert period_of_batch_us(plan, decoding, prompt) == plan.period_us
    few = data.draw(st.integers(0, decoding)), data.draw(st.integers(0, prompt))
    more = data.draw(st.integers(few[0], decoding)), data.draw(st.integers(few[1], prompt))
    assert period_of_batch_us(plan, *few) <= period_of_batch_us(plan, *more) <= plan.period_us
    # GEMMs are launched and collectives send in any case.
    floors = dict.fromkeys(Resource, 0.0)
    for nano in plan.nano_operations:
        tokens = plan.batch_of(nano).tokens
        share = 0.0 if "attention" in nano.operation else 96 / (tokens + 96)
        floors[nano.resource] += nano.duration_us * (1.0 if nano.resource == Resource.NETWORK else share)
    assert period_of_batch_us(plan, *few) >= max(floors.values()) * (1 - 1e-9)
    for beyond in ((decoding + 1, 0), (0, prompt + 1), (-1, 0)):
        with pytest.raises(ValueError, match="do not fit a plan"):
            period_of_batch_us(plan, *beyond)


def test_what_a_range_multiplies_ends_with_its_last_token() -> None:
    """Behind decoding tokens there is a gap before the prompts at 1024; a nano-batch that spans it multiplies it, too."""
    plan = shipped()
    whole = (NanoBatch(start=0, stop=2048),)
    for operation, batches, decode_tokens, prompt_tokens, rows in [
        ("o_proj", whole, 500, 0, 500),
        ("o_proj", whole, 500, 1, 1025),
        ("o_proj", whole, 10, 0, 256),
        ("o_proj", (NanoBatch(start=0, stop=1152), NanoBatch(start=1152, stop=2048)), 500, 64, 1088),  # nothing, no weights
        ("decode_attention", (NanoBatch(start=0, stop=1024),), 500, 1000, 500),
        ("prefill_attention", (NanoBatch(start=1024, stop=2048),), 500, 100, 100),
    ]:
        node = next(n for n in plan.nano_operations if n.operation == operation)
        launch = 0 if "attention" in operation else 96  # what a GEMM takes besides its rows
        durations = [float(tokens.tokens + launch) for tokens in batches]
        nano = tuple(msgspec.structs.replace(node, nano_batch=i, duration_us=us) for i, us in enumerate(durations))
        alone = msgspec.structs.replace(
            plan, nano_operations=nano, nano_batches=plan.nano_batches | {operation: batches}, period_us=sum(durations),
            phases=tuple(one_by_one(plan.phases[0], durations)),
        )  # fmt: skip
        found = period_of_batch_us(alone, decode_tokens, prompt_tokens)
        assert found == pytest.approx(rows + launch * len(batches)), (operation, rows)


def one_by_one(phase: Phase, durations: list[float]) -> Iterator[Phase]:
    for index, duration in enumerate(durations):
        running = (msgspec.structs.replace(phase.running[0], nano_operation=index),)
        yield msgspec.structs.replace(phase, duration_us=duration, running=running)


def test_what_has_nobody_beside_it_overlaps_nothing() -> None:
    """Decoding tokens alone: their attention runs beside GEMMs of no tokens, and their GEMMs beside no attention."""
    plan = shipped()
    assert period_of_batch_us(plan, 1024, 0) > 0.9 * plan.period_us


def test_longer_contexts_are_longer_attention_for_plans_and_for_sequential_steps() -> None:
    """On few SMs attention has room up to what runs beside it; far beyond, the plan is worse than no overlap at all."""
    plans, plan = shipped_alone(), shipped()
    assert plan.decode_context == 768
    assert period_of_batch_us(plan, 1024, 1024, 768) == plan.period_us
    periods = [period_of_batch_us(plan, 1024, 1024, context) for context in (100, 768, 1536, 3072)]
    assert periods[0] <= periods[1] < periods[2] < periods[3]
    assert choose_plan(plans, 1024, 1024, 768)[0] == choose_plan(plans, 1024, 1024)[0] == 0
    assert choose_plan(plans, 1024, 1024, 3072)[0] is None
    assert choose_plan(plans, 1024, 1024, 100)[0] is None, "hardly anything to hide"


def test_contexts_count_only_where_both_sides_know_their_cost() -> None:
    """A plan alone in a file says nothing of sequential steps in other contexts, so neither side may change with them."""
    alone = msgspec.structs.replace(shipped_alone(), sequential=(sequential_time_of(shipped()),))
    without = msgspec.structs.replace(shipped_set(), plans=(msgspec.structs.replace(shipped(), decode_context=None),))
    for plans in (alone, without):
        assert [choose_plan(plans, 1024, 1024, context)[0] for context in (None, 100, 768, 3072)] == [0] * 4


@given(st.integers(0, 1200), st.integers(0, 2048))
def test_no_plan_is_chosen_that_is_predicted_to_be_slower(decode_tokens: int, prefill_tokens: int) -> None:
    plans = shipped_set()
    index, taken = choose_plan(plans, decode_tokens, prefill_tokens)
    if index is None:
        assert taken == prefill_tokens
        return
    tokens = decode_tokens + prefill_tokens
    usual = np.mean([s.decode_context or 0.0 for s in plans.sequential])
    records = np.array(
        [(1.0, s.b_dense, s.decode_tokens * (s.decode_context or 0.0) / usual, s.layer_us) for s in plans.sequential]
    )
    fit = np.linalg.lstsq(records[:, :3] / records[:, 3:], np.ones(len(records)), rcond=None)[0]
    sequential_us = fit @ (1.0, tokens, decode_tokens)
    period_us = period_of_batch_us(plans.plans[index], decode_tokens, taken)
    assert (decode_tokens + taken) / period_us > 0.999 * tokens / sequential_us


@pytest.mark.parametrize(("decode_tokens", "prefill_tokens"), [(1024, 1024), (980, 1068), (1024, 980), (980, 980), (950, 1024)])
def test_a_batch_a_little_off_the_mix_takes_its_plan(decode_tokens: int, prefill_tokens: int) -> None:
    assert choose_plan(shipped_set(), decode_tokens, prefill_tokens) == (AS_MANY_OUTPUTS, min(prefill_tokens, 1024))


@pytest.mark.parametrize(("decode_tokens", "prefill_tokens"), [(640, 1408), (600, 1408), (620, 1428)])
def test_a_batch_with_fewer_outputs_takes_the_plan_with_room_for_its_prompts(decode_tokens: int, prefill_tokens: int) -> None:
    found = choose_plan(shipped_set(), decode_tokens, prefill_tokens, 1280)
    assert found == (FEWER_OUTPUTS, min(prefill_tokens, 1408))


def test_a_batch_far_off_the_mix_does_not() -> None:
    assert choose_plan(shipped_alone(), 1024, 0) == (None, 0)
    assert choose_plan(shipped_set(), 1024, 0) == (OUTPUTS_ONLY, 0)
    assert choose_plan(shipped_set(), 300, 0) == (None, 0)
    assert choose_plan(shipped_set(), 30, 1000) == (None, 1000)


def test_prompt_tokens_are_cheaper_than_decoding_ones() -> None:
    """A plan for many that decode is no gain in a step of mostly prompt tokens, whatever mixes were recorded."""
    plans = plan_set("m", [(2048, 1024, 1900.0)], sequential_us=1.0)
    times = tuple(
        SequentialTime(b_dense=b, decode_tokens=d, layer_us=0.7 * b + 0.8 * d)
        for b, d in ((512, 256), (2048, 1024), (512, 128), (2048, 512))
    )
    plans = msgspec.structs.replace(plans, sequential=times)
    assert choose_plan(plans, 1024, 1024) == (0, 1024)
    assert choose_plan(plans, 200, 1848) == (None, 1848)


@pytest.mark.parametrize("mode", ["nano", "streams"])
def test_an_engine_with_plans_gives_the_tokens_of_one_without(mode: str) -> None:
    model = tiny_model("llama3-tiny")
    plans = plan_set(model.config.name, [(32, 8, 10.0), (32, 16, 10.0), (16, 8, 5.0)], sequential_us=4096.0)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 512, int(rng.integers(1, 60))).tolist() for _ in range(14)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    options = RunnerConfig(b_dense=32, max_sequences=16, page_size=4, max_context=128, num_pages=200)
    outputs = {}
    for kind, choice in {"sequential": options, mode: dataclasses.replace(options, mode=mode, plans=plans)}.items():
        runner = ModelRunner(model.config, model.layout, model.mesh, model.decoder, choice, jnp.dtype(jnp.float32))
        runner.warm_up()
        engine = Engine(runner)
        outputs[kind] = [completion.token_ids for completion in generate(engine, prompts, params)]
        planned = engine.stats().planned_steps
        assert (planned > 0) == (kind != "sequential")
    assert outputs[mode] == outputs["sequential"]


def test_the_largest_planned_batch() -> None:
    assert largest_b_dense(None) is None
    assert largest_b_dense(plan_set("m", [(40, 16, 10.0), (80, 16, 10.0)], sequential_us=4096.0)) == 80

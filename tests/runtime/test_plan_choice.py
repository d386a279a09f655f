"""The plan of a step: chosen by tokens per second, laid out as it wants, and without influence on any token."""

import dataclasses

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from nanoflow_jax.executor.runner import ModelRunner, RunnerConfig
from nanoflow_jax.plan import PlanSet, SequentialTime
from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.llm import generate
from nanoflow_jax.runtime.plan_choice import choose_plan, largest_b_dense
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


def test_small_batches_run_sequentially() -> None:
    plans = plan_set("m", [(40, 16, 10.0)], sequential_us=4096.0, crossover=20)
    assert choose_plan(plans, 9, 10) == (None, 10)
    assert choose_plan(plans, 9, 11) == (0, 11)
    assert choose_plan(plan_set("m", [(40, 16, 10.0)], sequential_us=4096.0, crossover=None), 16, 24) == (None, 24)


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

"""The runner: compiled once, pool in place, tokens fed back on the device, refusals at the edge."""

import os
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax import kernels
from nanoflow_jax.batch import BatchShape, empty_batch
from nanoflow_jax.config import preset
from nanoflow_jax.executor.runner import MAX_LOGPROBS, ModelRunner, RunnerConfig, step_shapes, step_sizes
from nanoflow_jax.kernels import best_choice, check_choice
from nanoflow_jax.kv_cache import claim_device_memory, claimed_memory, create_kv_cache, pages_that_fit, step_bytes
from nanoflow_jax.parallel import parallel_layout
from nanoflow_jax.plan import PlanSet
from tests.executor.plans import random_plan
from tests.model.steps import golden, tiny_model


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    model = tiny_model("llama3-tiny", 2)
    options = RunnerConfig(b_dense=48, max_sequences=4, page_size=4, num_pages=4096, max_context=128)
    runner = ModelRunner(model.config, model.layout, model.mesh, model.decoder, options, jnp.float32)
    seen = []
    runner.warm_up(lambda *progress: seen.append(progress))
    assert seen[-1][0] == "ready"
    assert [done for _, done, _ in seen] == list(range(seen[-1][2] + 1))
    return runner


def prompt_batch(runner: ModelRunner, ids: np.ndarray):
    batch = empty_batch(runner.shapes[-1])
    n = len(ids)
    batch.token_ids[:n], batch.positions[:n] = ids, np.arange(n)
    batch.slots[:n] = 4 + np.arange(n)
    batch.block_tables[0, :20] = np.arange(1, 21)
    batch.q_lens[0] = batch.kv_lens[0] = n
    batch.sequence_rows[0] = 2
    return batch


def decode_batch(runner: ModelRunner, position: int):
    """The token is the device's: the host does not know it."""
    batch = empty_batch(runner.shapes[0])
    batch.num_decode = np.int32(1)
    batch.token_rows[0], batch.positions[0], batch.slots[0] = 2, position, 4 + position
    batch.block_tables[0, :20] = np.arange(1, 21)
    batch.q_lens[0], batch.kv_lens[0], batch.sequence_rows[0] = 1, position + 1, 2
    return batch


def test_greedy_tokens_are_fed_back_without_the_host(runner: ModelRunner) -> None:
    expected = golden("llama3-tiny")
    ids = expected["input_ids"]
    compiled = runner.num_compilations
    steps = [runner.launch(prompt_batch(runner, ids))]
    steps += [runner.launch(decode_batch(runner, len(ids) + i)) for i in range(23)]
    assert [int(step.result().token_ids[0]) for step in steps] == expected["greedy_ids"].tolist()
    assert runner.num_compilations == compiled


def test_logprobs_are_of_the_raw_logits(runner: ModelRunner) -> None:
    expected = golden("llama3-tiny")
    batch = prompt_batch(runner, expected["input_ids"])
    batch.temperature[0], batch.top_k[0] = 0.7, 3
    result = runner.launch(batch, num_logprobs=5).result()
    raw = expected["logits"][-1].astype(np.float64)
    raw -= np.log(np.exp(raw - raw.max()).sum()) + raw.max()
    order = np.argsort(-raw)[:MAX_LOGPROBS]
    np.testing.assert_array_equal(result.top_ids[0], order)
    np.testing.assert_allclose(result.top_logprobs[0], raw[order], atol=5e-5)
    assert result.token_ids[0] in order[:3]
    np.testing.assert_allclose(result.logprobs[0], raw[result.token_ids[0]], atol=5e-5)


def test_the_pool_is_updated_in_place(runner: ModelRunner) -> None:
    per_rank = runner.pool_bytes // 2
    for shape in runner.shapes:
        memory = runner.forward_memory(shape)
        assert memory.alias_size_in_bytes >= per_rank
        assert memory.temp_size_in_bytes < per_rank / 8


def test_a_shape_that_was_not_compiled_is_refused(runner: ModelRunner) -> None:
    with pytest.raises(KeyError):
        runner.launch(empty_batch(BatchShape(7, 4, runner.pages_per_seq)))
    with pytest.raises(ValueError, match="num_logprobs=21"):
        runner.launch(empty_batch(runner.shapes[0]), num_logprobs=21)


@pytest.mark.parametrize("mode", ["nano", "streams"])
def test_steps_by_a_plan_give_the_same_tokens_in_place(mode: str) -> None:
    model, expected = tiny_model("llama3-tiny"), golden("llama3-tiny")
    rng = np.random.default_rng(5)
    sizes = {"tp": 1, "moe": False, "partition": "none", "tile": 4, "model": model.config.name}
    plans = (
        random_plan(rng, b_dense=48, decode_tokens=8, **sizes),
        random_plan(rng, b_dense=16, decode_tokens=16, **sizes),
    )
    plan_set = PlanSet(model=model.config.name, device="none", tp=1, plans=plans, sequential=(), crossover_tokens=0)
    options = RunnerConfig(b_dense=48, max_sequences=4, page_size=4, num_pages=4096, max_context=128, mode=mode, plans=plan_set)
    runner = ModelRunner(model.config, model.layout, model.mesh, model.decoder, options, jnp.float32)
    runner.warm_up()
    ids = expected["input_ids"]
    prompt = prompt_batch(runner, ids)
    for name in ("token_ids", "positions", "slots"):
        setattr(prompt, name, np.roll(getattr(prompt, name), 8))
    prompt.q_starts[0] = 8
    steps = [runner.launch(prompt, plan=0)]
    steps += [runner.launch(decode_batch(runner, len(ids) + i), plan=1) for i in range(5)]
    assert [int(step.result().token_ids[0]) for step in steps] == expected["greedy_ids"][:6].tolist()
    for index, shape in ((0, runner.shapes[-1]), (1, runner.shapes[0])):
        memory = runner.forward_memory(shape, index)
        assert memory.alias_size_in_bytes >= runner.pool_bytes
        # Where prompts and reads and writes of the pool share a phase, the reference's loops over pages keep XLA on CPUs from
        # updating in place; the schedule compiled for GPUs is held to it in test_h200_schedule.
        if mode == "nano" or plans[index].decode_tokens == plans[index].b_dense:
            assert memory.temp_size_in_bytes < runner.pool_bytes / 8


def test_plans_that_do_not_fit_are_refused() -> None:
    model = tiny_model("llama3-tiny")
    sizes = {"moe": False, "tile": 4, "decode_tokens": 8}
    for change, message in [
        ({"model": "other", "b_dense": 48, "tp": 1, "partition": "none"}, "other"),
        ({"model": model.config.name, "b_dense": 52, "tp": 1, "partition": "none"}, "larger than steps"),
        ({"model": model.config.name, "b_dense": 48, "tp": 2, "partition": "all_gather"}, "does not fit"),
    ]:
        plan = random_plan(np.random.default_rng(0), **sizes, **change)
        plan_set = PlanSet(model=plan.model, device="none", tp=plan.tp, plans=(plan,), sequential=(), crossover_tokens=0)
        options = RunnerConfig(b_dense=48, max_sequences=4, num_pages=8, mode="nano", plans=plan_set)
        with pytest.raises(ValueError, match=message):
            ModelRunner(model.config, model.layout, model.mesh, model.decoder, options, jnp.float32)


def test_step_sizes() -> None:
    assert step_sizes(200, on_gpu=False) == [16, 32, 64, 128, 200]
    assert step_sizes(16, on_gpu=False) == [16]
    assert step_sizes(5, on_gpu=False) == [5]
    assert step_sizes(2048, on_gpu=True) == [64, 128, 256, 384, 512, 640, 768, 896, 1024, 1536, 2048]
    assert step_sizes(2000, on_gpu=True) == [64, 128, 256, 384, 512, 640, 768, 896, 1024, 1536, 2000]
    assert step_sizes(4000, on_gpu=True)[-3:] == [2048, 3072, 4000]
    assert step_sizes(48, on_gpu=True) == [48]


@given(st.integers(1, 300), st.integers(1, 300), st.lists(st.integers(1, 300), max_size=3), st.booleans())
def test_shapes_on_gpus_are_multiples_of_8(b_dense: int, sequences: int, sizes: list[int], on_gpu: bool) -> None:
    asked = [size for size in sizes if size <= b_dense]
    options = RunnerConfig(b_dense=b_dense, max_sequences=min(sequences, b_dense), step_sizes=(*asked, b_dense))
    shapes = step_shapes(options, 4, on_gpu=on_gpu)
    assert shapes == tuple(sorted(set(shapes), key=lambda shape: shape.num_tokens))
    for size in options.step_sizes or ():
        tokens, rows = next((s.num_tokens, s.num_rows) for s in shapes if s.num_tokens >= size)
        assert rows >= min(size, options.max_sequences)
        assert tokens - size < 8 if on_gpu else tokens == size
    assert not on_gpu or all(s.num_tokens % 8 == 0 and s.num_rows % 8 == 0 for s in shapes)


def test_shapes_are_those_asked_for_and_those_of_plans() -> None:
    model = tiny_model("llama3-tiny")
    plan = random_plan(
        np.random.default_rng(0),
        moe=False,
        tile=4,
        decode_tokens=8,
        model=model.config.name,
        b_dense=48,
        tp=1,
        partition="none",
    )
    plans = PlanSet(model=plan.model, device="none", tp=1, plans=(plan,), sequential=(), crossover_tokens=0)
    options = RunnerConfig(b_dense=64, max_sequences=20, num_pages=8, mode="nano", plans=plans, step_sizes=(16, 24))
    runner = ModelRunner(model.config, model.layout, model.mesh, model.decoder, options, jnp.float32)
    assert [(s.num_tokens, s.num_rows) for s in runner.shapes] == [(16, 16), (24, 20), (48, 20), (64, 20)]


def test_a_plan_serves_a_model_of_another_name_with_the_same_layers() -> None:
    model = tiny_model("llama3-tiny")
    plan = random_plan(
        np.random.default_rng(0), moe=False, tile=4, decode_tokens=8, model="llama3-8b", b_dense=48, tp=1, partition="none"
    )
    plans = PlanSet(model=plan.model, device="none", tp=1, plans=(plan,), sequential=(), crossover_tokens=0)
    options = RunnerConfig(b_dense=48, max_sequences=4, num_pages=8, mode="nano", plans=plans)
    with pytest.raises(ValueError, match="llama3-8b"):
        ModelRunner(model.config, model.layout, model.mesh, model.decoder, options, jnp.float32)
    assert preset("llama3-8b").same_layer(preset("llama3.1-8b"))
    assert not preset("llama3-8b").same_layer(preset("llama2-7b"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"b_dense": 0}, "b_dense=0"),
        ({"b_dense": 8, "max_sequences": 9}, "max_sequences=9 exceeds b_dense=8"),
        ({"memory_fraction": 0.0}, "memory_fraction=0.0"),
        ({"page_size": -1}, "page_size=-1"),
        ({"b_dense": 64, "step_sizes": (16, 65)}, "step_sizes=\\(16, 65\\)"),
        ({"mode": "nano"}, "needs plans"),
        ({"mode": "fast"}, "mode='fast'"),
    ],
)
def test_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunnerConfig(**options)


def test_kernels_that_sum_over_ranks_need_several() -> None:
    model = tiny_model("llama3-tiny")
    options = RunnerConfig(b_dense=16, max_sequences=4, num_pages=8, max_context=32, kernels="mosaic_peers")
    with pytest.raises(ValueError, match="of which there is one"):
        ModelRunner(model.config, model.layout, model.mesh, model.decoder, options, jnp.float32)


def test_pool_sizes() -> None:
    assert pages_that_fit(1000, 100, reserve_bytes=250) == 7
    with pytest.raises(ValueError, match="does not fit"):
        pages_that_fit(1000, 600, reserve_bytes=0)
    model = tiny_model("llama3-tiny")
    for num_pages, page_size, message in [(1, 16, "num_pages=1"), (2**27, 16, "do not fit in int32")]:
        with pytest.raises(ValueError, match=message):
            create_kv_cache(model.config, model.layout, model.mesh, num_pages=num_pages, page_size=page_size, dtype=jnp.float32)


def test_memory_is_claimed_unless_the_environment_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    for tp_size in (1, 2):
        monkeypatch.setenv(name, "")  # so that it is as it was once the test is over
        monkeypatch.delenv(name)
        claim_device_memory(tp_size)
        assert float(os.environ[name]) == claimed_memory(tp_size)
    assert claimed_memory(2) < claimed_memory(1) < 1, "NCCL wants memory of its own"
    monkeypatch.setenv(name, "0.5")
    claim_device_memory(1)
    assert os.environ[name] == "0.5"


def test_a_step_is_given_memory_for_its_logits_and_their_sampling() -> None:
    config = preset("llama3-8b")
    layout = parallel_layout(config, 1)

    def needed(**sizes: Any) -> int:
        return step_bytes(config, layout, **({"b_dense": 2048, "num_rows": 1024, "greedy_only": True} | sizes))

    logits = 4 * 1024 * config.vocab_size
    assert needed(greedy_only=False) - needed() == 3 * logits
    assert needed(num_rows=2048) - needed() == 2 * logits
    assert needed(b_dense=4096) - needed() > 4 * 2048 * 2 * config.d_ff


def test_automatic_kernels_are_those_of_the_platform_and_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = (types.SimpleNamespace(platform=name) for name in ("gpu", "cpu"))
    monkeypatch.setattr(kernels, "signal_each_other", lambda devices: True)
    assert [best_choice([gpu] * tp_size) for tp_size in (1, 2, 4)] == ["mosaic", "mosaic_peers", "mosaic"]
    assert best_choice([cpu] * 2) == "reference"
    check_choice("mosaic_peers", [gpu] * 4)
    monkeypatch.setattr(kernels, "signal_each_other", lambda devices: False)
    assert best_choice([gpu] * 2) == "mosaic"
    with pytest.raises(ValueError, match="'mosaic_peers' need NVLink between all of"):
        check_choice("mosaic_peers", [gpu] * 2)
    check_choice("mosaic", [gpu] * 2)

"""What kernels leave undefined, rows of padding above all, reaches no token, page or request."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from nanoflow_jax.batch import Batch, BatchShape, empty_batch, pack, unpack
from nanoflow_jax.config import PRESETS
from nanoflow_jax.executor import nano_batch, sequential, step
from nanoflow_jax.executor.kv_transfer import NEW_KV_PARTITION, LeavingKV
from nanoflow_jax.executor.nano_batch import Mode
from nanoflow_jax.executor.runner import ModelRunner, RunnerConfig
from nanoflow_jax.kernels import REFERENCE, cublas
from nanoflow_jax.kv_cache import KV_PARTITION
from nanoflow_jax.models.decoder import decoder_partition
from nanoflow_jax.operations import experts, step_inputs
from nanoflow_jax.parallel import parallel_layout
from nanoflow_jax.plan import PlanSet, SequentialTime
from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.llm import generate
from nanoflow_jax.runtime.request import SamplingParams
from nanoflow_jax.sampling import SamplingMode
from tests.executor.padded import leaving_undefined
from tests.executor.plans import random_plan
from tests.executor.test_nano_batch import B_DENSE, SHAPE, TILE, mixed_batch, model_of
from tests.model.steps import Host, tiny_model

GARBAGE = (0.0, np.nan, -np.inf)
NUM_DECODE = 10
LAYOUTS = [(1, "none"), (2, "all_reduce"), (2, "all_gather"), (4, "all_reduce")]
FAST = [("dense", 1, "none", None), ("moe", 2, "all_reduce", Mode.STREAMS), ("dense", 2, "gemm_all_reduce", None)]
# Every mode meets every layout, half of them with experts.
SLOW = [
    (kind, *LAYOUTS[(number + turn) % 4], mode)
    for number, mode in enumerate((None, *Mode))
    for kind, turns in {"dense": (0, 2), "moe": (1, 3)}.items()
    for turn in turns
    if (kind, *LAYOUTS[(number + turn) % 4], mode) not in FAST
] + [("dense", 2, "gemm_all_reduce", Mode.STREAMS)]


def interference(kind: str, tp_size: int, partition: str, mode: Mode | None) -> None:
    """One compiled step, given different garbage for what is undefined, gives the same bits wherever anybody looks."""
    rng = np.random.default_rng([tp_size, len(partition)])
    sizes = {"tp": tp_size, "moe": kind == "moe", "partition": partition, "b_dense": B_DENSE, "tile": TILE}
    plan = random_plan(rng, decode_tokens=NUM_DECODE, **sizes)
    model = model_of(kind, tp_size, partition == "all_gather")
    told: list[bool] = []
    graph, weights = nnx.split(model.decoder)

    def body(weights, cache, last_tokens, packed, value):
        kernels = leaving_undefined(value, told.append)
        kernels = dataclasses.replace(kernels, reduces_in_gemm=partition == "gemm_all_reduce")
        new_kv = LeavingKV(model.config.num_layers, 1, to_host=False)
        if mode is None:
            forward = functools.partial(sequential.forward, kernels=kernels)
        else:
            forward = functools.partial(
                nano_batch.forward, plan=plan, mode=mode, kernels_for=lambda _: kernels, on_streams=False,
                in_graph=mode is Mode.STREAMS,
            )  # fmt: skip
        batch = unpack(packed, SHAPE)
        out = forward(model.config, model.layout, nnx.merge(graph, weights), cache, last_tokens, batch, new_kv=new_kv)
        return (*out, new_kv.groups[0])

    replicated = PartitionSpec()
    in_specs = (decoder_partition(model.config, model.layout), KV_PARTITION, replicated, replicated, replicated)
    out_specs = (replicated, KV_PARTITION, NEW_KV_PARTITION)
    run = jax.jit(jax.shard_map(body, mesh=model.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
    unused = 0
    for seed in range(4):
        host = Host(model, SHAPE, page_size=4, num_pages=96, seed=seed)
        batch = mixed_batch(np.random.default_rng(seed), host, plan)
        found = [run(weights, host.cache, host.last_tokens, pack(batch), np.float32(value)) for value in GARBAGE]
        rows, tokens = batch.q_lens > 0, batch.slots >= 0
        unused += int((~tokens).sum())
        (truth, pool, kv), *others = jax.tree.map(np.asarray, found)
        for other, other_pool, other_kv in others:
            np.testing.assert_array_equal(other[rows], truth[rows])
            np.testing.assert_array_equal(other_kv[tokens], kv[tokens])
            jax.tree.map(np.testing.assert_array_equal, other_pool, pool)
        assert np.isfinite(truth[rows, : model.config.vocab_size]).all() and np.isfinite(kv[tokens]).all()
        check_pages(host, batch, pool)
    assert unused > 20, "batches without padding prove nothing"
    assert told and all(told), "a GEMM multiplies padding"


def check_pages(host: Host, batch: Batch, pool) -> None:
    """Slots of tokens that a sequence has hold numbers; the dummy page is as it was."""
    for pages in (*pool.k_pages, *pool.v_pages):
        np.testing.assert_array_equal(pages[0], 0)
        for row in np.flatnonzero(batch.kv_lens):
            position = np.arange(batch.kv_lens[row])
            owned = pages[batch.block_tables[row, position // host.page_size], :, position % host.page_size]
            assert np.isfinite(owned).all()


@pytest.mark.parametrize(("kind", "tp_size", "partition", "mode"), FAST)
def test_garbage_stays_where_it_is(kind: str, tp_size: int, partition: str, mode: Mode | None) -> None:
    interference(kind, tp_size, partition, mode)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tp_size", "partition", "mode"), SLOW)
def test_garbage_stays_where_it_is_in_every_mode(kind: str, tp_size: int, partition: str, mode: Mode | None) -> None:
    interference(kind, tp_size, partition, mode)


def test_an_engine_gives_the_same_tokens_whatever_padding_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps by a plan and sequential ones; the second half of the prompts finds pages of the first in the cache."""
    model = tiny_model("llama3-tiny")
    sizes = {"tp": 1, "moe": False, "partition": "none", "tile": 4, "model": model.config.name}
    plan = random_plan(np.random.default_rng(3), b_dense=32, decode_tokens=12, **sizes)
    times = (SequentialTime(b_dense=32, decode_tokens=12, layer_us=1.5 * plan.period_us),)
    plans = PlanSet(model=plan.model, device="none", tp=1, plans=(plan,), sequential=times, crossover_tokens=16)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 512, int(rng.integers(1, 60))).tolist() for _ in range(8)]
    prompts += [[*prompt, 7] for prompt in prompts]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    options = RunnerConfig(
        b_dense=32, max_sequences=12, page_size=4, max_context=128, num_pages=200, greedy_only=True, mode="nano", plans=plans,
        step_sizes=(32,),
    )  # fmt: skip
    outputs = {}
    for value in (None, np.nan):
        kernels = REFERENCE if value is None else leaving_undefined(value)
        monkeypatch.setattr(step, "kernels_for", lambda _, kernels=kernels: lambda _: kernels)
        runner = ModelRunner(model.config, model.layout, model.mesh, model.decoder, options, jnp.dtype(jnp.float32))
        runner.warm_up()
        engine = Engine(runner)
        outputs[value is None] = [completion.token_ids for completion in generate(engine, prompts, params)]
        stats = engine.stats()
        assert 0 < stats.planned_steps < stats.steps
    assert outputs[False] == outputs[True]


@pytest.mark.parametrize("num_logprobs", [0, 3])
@pytest.mark.parametrize("mode", list(SamplingMode))
def test_logits_of_unused_rows_are_not_looked_at(mode: SamplingMode, num_logprobs: int) -> None:
    shape = BatchShape(16, 8, 4)
    batch = empty_batch(shape)
    used = np.array([True, True, False, True, False, False, False, False])
    batch.q_lens[used], batch.kv_lens[used] = 1, 5
    batch.sequence_rows[[0, 3]] = [2, 6]  # row 1 is a chunk in the middle of a prompt
    batch.temperature[used], batch.top_p[used], batch.top_k[used] = 0.7, 0.9, 5
    clean = np.random.default_rng(0).standard_normal((8, 40)).astype(np.float32)
    last = np.arange(8, dtype=np.int32)
    results = []
    for value in GARBAGE:
        row_logits = np.where(used[:, None], clean, np.float32(value))
        sampled, last_tokens = step.sample_step(
            jnp.asarray(row_logits),
            jnp.asarray(last),
            jnp.asarray(pack(batch)),
            shape=shape,
            mode=mode,
            num_logprobs=num_logprobs,
        )
        results.append((np.asarray(sampled)[used], np.asarray(last_tokens)))
    for sampled, last_tokens in results[1:]:
        np.testing.assert_array_equal(sampled, results[0][0])
        np.testing.assert_array_equal(last_tokens, results[0][1])
    changed = results[0][1] != last
    assert set(np.flatnonzero(changed)) <= {2, 6}


def test_tokens_in_use_end_with_the_last_of_a_range() -> None:
    """Decoding tokens 0 to 4, a gap, prompt tokens 10 to 16, and padding."""
    batch = empty_batch(BatchShape(24, 8, 4))
    batch.num_decode = np.int32(5)
    batch.slots[:5], batch.slots[10:17] = 4 + np.arange(5), 20 + np.arange(7)
    config = model_of("dense", 1, False).config
    for (start, stop), wanted in {
        (0, 24): 17, (0, 10): 5, (0, 4): 4, (5, 10): 0, (8, 12): 4, (10, 24): 7, (16, 17): 1, (17, 24): 0,
    }.items():  # fmt: skip
        assert int(step_inputs(config, batch, start, stop).used_tokens) == wanted, (start, stop)


def test_padding_goes_to_no_expert() -> None:
    model = model_of("moe", 1, False)
    layer, config = model.decoder.layers[0], model.config
    batch = empty_batch(BatchShape(12, 4, 4))
    real = np.array([0, 1, 2, 6, 7])
    batch.slots[real] = 4 + np.arange(5)
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.permutation(config.num_experts)[: config.experts_per_token] for _ in range(12)]).astype(np.int32)
    h = rng.standard_normal((12, config.d_model)).astype(np.float32)
    weights = rng.random(chosen.shape).astype(np.float32)
    seen = []

    def grouped_gemm(x, w, group_sizes, *, swiglu=False):
        seen.append(np.asarray(group_sizes))
        return leaving_undefined(np.nan).grouped_gemm(x, w, group_sizes, swiglu=swiglu)

    def mixture(inputs):
        return np.asarray(experts(config, inputs, layer, jnp.asarray(h), jnp.asarray(chosen), jnp.asarray(weights)))

    inputs = step_inputs(config, batch, kernels=dataclasses.replace(REFERENCE, grouped_gemm=grouped_gemm))
    everything = dataclasses.replace(inputs, slots=jnp.zeros(12, jnp.int32), kernels=REFERENCE)
    np.testing.assert_array_equal(mixture(inputs)[real], mixture(everything)[real])
    for sizes in seen:
        np.testing.assert_array_equal(sizes, np.bincount(chosen[real].ravel(), minlength=config.num_experts))


@pytest.mark.parametrize("kernels", [REFERENCE, cublas(132)], ids=["reference", "cublas"])
def test_logits_of_a_plain_product_are_xla_s_own(kernels) -> None:
    """One product into float32 and nothing else, whether or not the rows in use are told."""
    model = model_of("dense", 1, False)
    x, head = jnp.ones((4, model.config.d_model), jnp.bfloat16), jnp.ones((model.config.d_model, 512), jnp.bfloat16)
    ours = jax.make_jaxpr(lambda x, head: kernels.gemm(x, head, rows=jnp.int32(2), out_dtype=jnp.float32))(x, head)
    plain = jax.make_jaxpr(lambda x, head: jnp.matmul(x, head, preferred_element_type=jnp.float32))(x, head)
    compiled = [jax.jit(jaxpr_as_fun(each)).lower(x, head).compile().as_text() for each in (ours, plain)]
    instructions = [[line.split(", metadata")[0] for line in text.splitlines() if " = " in line] for text in compiled]
    assert instructions[0] == instructions[1]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_kernels_can_multiply_by_the_vocabulary_of_every_preset(name: str) -> None:
    """What `pallas_kernels.gemm` asks of K and N."""
    config = PRESETS[name]
    for tp_size in (1, 2, 4, 8):
        if config.num_heads % tp_size == 0 and (config.num_kv_heads % tp_size == 0 or tp_size % config.num_kv_heads == 0):
            padded = parallel_layout(config, tp_size).padded_vocab_size
            assert config.d_model % 64 == padded // tp_size % 64 == padded % tp_size == 0

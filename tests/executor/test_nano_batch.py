"""Plans in every mode agree with the sequential executor, at every operation's border, for random plans and batches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from nanoflow_jax.batch import Batch, BatchShape, empty_batch, pack, unpack
from nanoflow_jax.executor import nano_batch, sequential
from nanoflow_jax.executor.dataflow import known_as
from nanoflow_jax.executor.nano_batch import Mode
from nanoflow_jax.executor.segments import Segments
from nanoflow_jax.kernels import REFERENCE
from nanoflow_jax.kv_cache import KV_PARTITION
from nanoflow_jax.models.decoder import decoder_partition
from nanoflow_jax.operations import OPERATIONS
from nanoflow_jax.plan import PipelinePlan, plan_graph
from tests.executor.plans import random_plan
from tests.model.steps import Chunk, Host, Model, random_model
from tests.model.test_golden import small_config

B_DENSE, TILE, MAX_DECODE = 40, 4, 9
SHAPE = BatchShape(B_DENSE, 12, 16)
# Each example compiles two steps: a pair is enough at a time, and shrinking would take hours.
COMPILED = settings(max_examples=2, phases=[Phase.explicit, Phase.generate], suppress_health_check=[HealthCheck.too_slow])
CONFIGS = {
    "dense": small_config(),
    "bias": small_config(qkv_bias=True, tie_embeddings=True),
    "moe": small_config(num_experts=4, experts_per_token=2),
}


@functools.cache
def model_of(kind: str, tp_size: int, gathered: bool) -> Model:
    return random_model(CONFIGS[kind], tp_size, gathered_o_proj=gathered)


def mixed_batch(rng: np.random.Generator, host: Host, plan: PipelinePlan) -> Batch:
    """Decoding sequences with a past, then prompt chunks from `plan.decode_tokens` on; both ranges may end in padding."""
    num_decode = int(rng.integers(0, min(plan.decode_tokens, MAX_DECODE) + 1))
    vocab = host.model.config.vocab_size
    past = rng.integers(1, 9, num_decode)
    for start in range(0, num_decode, 4):
        rows = range(start, min(start + 4, num_decode))
        host.step([Chunk(row, rng.integers(0, vocab, past[row]).tolist(), 0) for row in rows])
    chunks = [Chunk(row, [int(rng.integers(vocab))], int(past[row]), decode=True) for row in range(num_decode)]
    room = B_DENSE - plan.decode_tokens
    for sequence in range(100, 103):
        n = int(rng.integers(0, room + 1))
        if n:
            chunks.append(Chunk(sequence, rng.integers(0, vocab, n).tolist(), 0))
        room -= n
    batch = host.batch(chunks or [Chunk(0, [1], 0)])
    return shift_prompts(batch, plan.decode_tokens) if chunks else empty_batch(SHAPE)


def shift_prompts(batch: Batch, to: int) -> Batch:
    """Moves the prompt tokens so that they begin at token `to`."""
    n = int(batch.num_decode)
    moved = empty_batch(batch.shape)
    for name in ("token_ids", "positions", "slots", "token_rows"):
        getattr(moved, name)[:n] = getattr(batch, name)[:n]
        getattr(moved, name)[to:] = getattr(batch, name)[n : n + B_DENSE - to]
    prompts = (batch.q_lens > 0) & (np.arange(len(batch.q_lens)) >= n)
    q_starts = np.where(prompts, batch.q_starts + to - n, batch.q_starts).astype(np.int32)
    return dataclasses.replace(
        moved,
        num_decode=batch.num_decode,
        kv_lens=batch.kv_lens,
        q_starts=q_starts,
        q_lens=batch.q_lens,
        block_tables=batch.block_tables,
    )


def run(model: Model, host: Host, batch: Batch, forward, *, watched: bool = True) -> tuple[np.ndarray, list[np.ndarray], dict]:
    """Row logits, the pool, and what the probe saw, if there was one: {(layer, name): {value: [ranks, ...]}}."""
    graph, weights = nnx.split(model.decoder)

    def body(weights, cache, last_tokens, packed):
        seen = {}

        def probe(layer, name, values):
            seen[f"{layer} {name}"] = {key: value[None] for key, value in values.items() if not key.endswith("_pages")}

        decoder = nnx.merge(graph, weights)
        arguments = (model.config, model.layout, decoder, cache, last_tokens, unpack(packed, SHAPE))
        out = forward(*arguments, probe if watched else None)
        return (*out, seen)

    replicated = PartitionSpec()
    in_specs = (decoder_partition(model.config, model.layout), KV_PARTITION, replicated, replicated)
    out_specs = (replicated, KV_PARTITION, PartitionSpec("tp"))
    mapped = jax.shard_map(body, mesh=model.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    row_logits, cache, seen = jax.jit(mapped)(weights, host.cache, host.last_tokens, pack(batch))
    pool = [np.asarray(pages) for pages in (*cache.k_pages, *cache.v_pages)]
    return np.asarray(row_logits), pool, jax.tree.map(np.asarray, seen)


def compare(kind: str, tp_size: int, partition: str, mode: Mode, seed: int) -> int:
    """Holds a random plan against sequential execution; returns how many rows the batch had."""
    rng = np.random.default_rng(seed)
    plan = random_plan(
        rng, tp=tp_size, moe=kind == "moe", partition=partition, b_dense=B_DENSE, tile=TILE,
        decode_tokens=int(rng.choice([0, 5, 16, B_DENSE])),
    )  # fmt: skip
    host = Host(model_of(kind, tp_size, False), SHAPE, page_size=4, num_pages=96, seed=seed)
    batch = mixed_batch(rng, host, plan)
    # Borders are compared where the same values exist; that all partitions agree, another test says.
    kernels = dataclasses.replace(REFERENCE, reduces_in_gemm=partition == "gemm_all_reduce")
    expected, expected_pool, truth = run(host.model, host, batch, functools.partial(sequential.forward, kernels=kernels))
    forward = functools.partial(nano_batch.forward, plan=plan, mode=mode, kernels_for=lambda _: REFERENCE, on_streams=False)
    planned = model_of(kind, tp_size, partition == "all_gather")
    rows = batch.q_lens > 0
    # Nobody looks on in an engine: several nano-operations may then be one region of a stream, and all of them one graph.
    for watched in (True, False) if mode is Mode.STREAMS else (True,):
        got, pool, seen = run(planned, host, batch, functools.partial(forward, in_graph=not watched), watched=watched)
        np.testing.assert_allclose(got[rows], expected[rows], atol=1e-5)
        np.testing.assert_array_equal(got[rows].argmax(1), expected[rows].argmax(1))
        for mine, reference in zip(pool, expected_pool, strict=True):
            np.testing.assert_allclose(mine, reference, atol=1e-5)
        if watched:
            compare_borders(plan, host.model.config.num_layers, batch, truth, seen)
    return int(rows.sum())


def compare_borders(plan: PipelinePlan, num_layers: int, batch: Batch, truth: dict, seen: dict) -> None:
    """What every nano-operation wrote, against the same tokens of the sequential run. Padding is not compared."""
    covered = np.zeros(B_DENSE, bool)
    for start, length in zip(batch.q_starts, batch.q_lens, strict=True):
        covered[start : start + length] = True
    compared = 0
    for layer in range(num_layers):
        for node in plan_graph(plan):
            # "o" and what is gathered differ per partition until the residual is added.
            names = [n for n in node.runs if plan.partition != "all_gather" or not n.startswith(("o_", "attention_all"))]
            for name in names:
                for value in OPERATIONS[name].writes:
                    for batch_range in plan.nano_batches[node.name]:
                        result = seen[f"{layer} {node.name}[{batch_range.start}:{batch_range.stop}]"]
                        later = [n for n in node.runs[node.runs.index(name) + 1 :] if value in OPERATIONS[n].writes]
                        if value not in result or later:
                            continue
                        tokens = np.arange(batch_range.start, batch_range.stop)
                        live = covered[tokens] & _served(value, tokens, batch)
                        reference = truth[f"{layer} {_IN_SEQUENCE.get(name, name)}"]
                        reference = reference[known_as(value)][:, tokens]
                        np.testing.assert_allclose(result[value][:, live], reference[:, live], atol=1e-5)
                        compared += int(live.sum())
    assert compared > 0 or not covered.any()


# In sequence the two kinds of attention have one result.
_IN_SEQUENCE = {"decode_attention": "prefill_attention_into_decoded", "prefill_attention": "prefill_attention_into_decoded"}


def _served(value: str, tokens: np.ndarray, batch: Batch) -> np.ndarray:
    """Attention of a kind is defined for tokens of that kind only."""
    decoding = tokens < int(batch.num_decode)
    return {"decoded": decoding, "prefilled": ~decoding}.get(value, np.ones_like(decoding))


@COMPILED
@given(seed=st.integers(0, 2**31))
@pytest.mark.parametrize("mode", list(Mode))
def test_one_rank(mode: Mode, seed: int) -> None:
    compare("dense", 1, "none", mode, seed)


@pytest.mark.slow
@COMPILED
@given(seed=st.integers(0, 2**31))
@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize(("tp_size", "partition"), [(1, "none"), (2, "gemm_all_reduce"), (4, "all_gather"), (8, "all_reduce")])
def test_every_kind_and_partition(kind: str, tp_size: int, partition: str, seed: int) -> None:
    compare(kind, tp_size, partition, list(Mode)[seed % len(Mode)], seed)


@pytest.mark.parametrize(
    ("partition", "mode"), [("all_reduce", Mode.FUSED), ("all_gather", Mode.NANO), ("gemm_all_reduce", Mode.FUSED)]
)
def test_two_ranks(partition: str, mode: Mode) -> None:
    assert compare("bias", 2, partition, mode, 5) > 0


def test_gemms_that_sum_over_the_ranks_change_nothing() -> None:
    rng = np.random.default_rng(5)
    plan = random_plan(rng, tp=2, moe=False, partition="gemm_all_reduce", b_dense=B_DENSE, tile=TILE, decode_tokens=16)
    host = Host(model_of("dense", 2, False), SHAPE, page_size=4, num_pages=96, seed=5)
    batch = mixed_batch(rng, host, plan)
    calls = []

    def gemm_all_reduce(a: jax.Array, b: jax.Array, residual: jax.Array) -> jax.Array:
        calls.append(b.shape)
        return REFERENCE.gemm_all_reduce(a, b, residual)

    kernels = dataclasses.replace(REFERENCE, gemm_all_reduce=gemm_all_reduce, reduces_in_gemm=True)
    expected, _, _ = run(host.model, host, batch, sequential.forward)
    in_sequence = functools.partial(sequential.forward, kernels=kernels)
    planned = functools.partial(
        nano_batch.forward, plan=plan, mode=Mode.STREAMS, kernels_for=lambda _: kernels, on_streams=False
    )
    rows = batch.q_lens > 0
    for forward in (in_sequence, planned):
        calls.clear()
        got, _, _ = run(host.model, host, batch, forward, watched=False)
        np.testing.assert_allclose(got[rows], expected[rows], atol=1e-5)
        assert len(calls) >= 2 * host.model.config.num_layers


def test_on_streams_a_gemm_needs_a_kernel_that_sums_over_the_ranks() -> None:
    rng = np.random.default_rng(0)
    plan = random_plan(rng, tp=2, moe=False, partition="gemm_all_reduce", b_dense=B_DENSE, tile=TILE, decode_tokens=8)
    host = Host(model_of("dense", 2, False), SHAPE, page_size=4, num_pages=96)
    forward = functools.partial(
        nano_batch.forward, plan=plan, mode=Mode.STREAMS, kernels_for=lambda _: REFERENCE, on_streams=True
    )
    with pytest.raises(ValueError, match="kernels 'mosaic_peers'"):
        run(host.model, host, empty_batch(SHAPE), forward)


def test_a_plan_of_another_size_is_refused() -> None:
    rng = np.random.default_rng(0)
    plan = random_plan(rng, tp=1, moe=False, partition="none", b_dense=48, tile=4, decode_tokens=8)
    host = Host(model_of("dense", 1, False), SHAPE, page_size=4, num_pages=96)
    forward = functools.partial(
        nano_batch.forward, plan=plan, mode=Mode.NANO, kernels_for=lambda _: REFERENCE, on_streams=False
    )
    with pytest.raises(ValueError, match="a batch of 40 tokens does not fit a plan"):
        run(host.model, host, empty_batch(SHAPE), forward)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 19), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=8), st.data())
def test_segments_behave_like_one_array(writes: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """Arrays may have rows of no account before and behind the tokens that are written."""
    segments, plain = Segments(), np.full(20, -1)
    for value, (start, length, more) in enumerate(writes):
        stop = min(20, start + length)
        array = np.full(stop - start + 2 * more, 99)
        array[more : more + stop - start] = value
        segments.write(start, stop, jnp.asarray(array), first_row=more)
        plain[start:stop] = value
    start = data.draw(st.integers(0, 19))
    stop = data.draw(st.integers(start + 1, 20))
    if (plain[start:stop] < 0).any():
        with pytest.raises(KeyError, match="was never written"):
            segments.read(start, stop)
    else:
        np.testing.assert_array_equal(segments.read(start, stop), plain[start:stop])

"""K and V that a step hands out are, to the bit, what it wrote to the pool, and pages made of them read back the same."""

import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax.batch import empty_batch
from nanoflow_jax.executor.kv_transfer import PageFormat, page_format, transfer_memory, weights_checksum
from nanoflow_jax.executor.runner import ModelRunner, RunnerConfig
from nanoflow_jax.plan import PlanSet
from tests.executor.plans import random_plan
from tests.kernels.aot import child_environment
from tests.model.steps import tiny_model

PAGES, PAGE_SIZE, TOKENS = [3, 7, 5, 9], 4, 14


def make_runner(tp_size: int, mode: str, **options) -> ModelRunner:
    model = tiny_model("llama3-tiny", tp_size)
    plans = None
    if mode != "sequential":
        plan = random_plan(
            np.random.default_rng(0), tp=tp_size, moe=False, partition="all_reduce", b_dense=16, tile=4, decode_tokens=4,
            model=model.config.name,
        )  # fmt: skip
        plans = PlanSet(
            model=model.config.name, device="none", tp=tp_size, plans=(plan,), sequential=(), crossover_tokens=0
        )  # fmt: skip
    config = RunnerConfig(
        b_dense=16, max_sequences=4, page_size=PAGE_SIZE, num_pages=33, max_context=64, mode=mode, plans=plans, **options
    )
    return ModelRunner(model.config, model.layout, model.mesh, model.decoder, config, jnp.dtype(jnp.float32))


def pool(runner: ModelRunner) -> np.ndarray:
    """`[P, page_size, L, K, 2, H]`."""
    both = [[np.asarray(pages) for pages in pools] for pools in (runner._cache.k_pages, runner._cache.v_pages)]
    return np.moveaxis(np.array(both), (0, 1, 2, 3, 4, 5), (4, 2, 0, 3, 1, 5))


@pytest.mark.parametrize(("tp_size", "mode"), [(1, "sequential"), (2, "sequential"), (2, "nano")])
def test_what_leaves_a_step_comes_back_as_pages(tp_size, mode):
    runner = make_runner(tp_size, mode, kv_offload="on")
    runner.warm_up()
    compiled = runner.num_compilations
    plan = None if mode == "sequential" else 0
    first = 0 if plan is None else runner.plans[0].decode_tokens
    count = min(TOKENS, 16 - first)
    batch = empty_batch(runner.shapes[-1])
    span = slice(first, first + count)
    batch.token_ids[span] = batch.positions[span] = np.arange(count)
    batch.slots[span] = [PAGES[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for i in range(count)]
    batch.kv_lens[0] = batch.q_lens[0] = count
    batch.q_starts[0], batch.sequence_rows[0] = first, 0
    batch.block_tables[0, :4] = PAGES
    step = runner.launch(batch, plan=plan, offload=True)
    step.result()
    [new_kv] = [np.asarray(array)[span] for array in step.new_kv]
    before = pool(runner)
    for i in range(count):
        np.testing.assert_array_equal(new_kv[i], before[PAGES[i // PAGE_SIZE], i % PAGE_SIZE])
    form, full = runner.page_format, count // PAGE_SIZE
    assert form is not None
    size = next(size for size in form.chunk_sizes if size >= full)
    pages = np.full((size, form.page_bytes), 255, np.uint8)
    pages[:full] = new_kv[: full * PAGE_SIZE].reshape(full, -1).view(np.uint8)
    runner.write_pages(runner.stage_pages(pages), np.arange(20, 20 + full, dtype=np.int32))
    after = pool(runner)
    np.testing.assert_array_equal(after[20 : 20 + full], before[PAGES[:full]])
    others = np.setdiff1d(np.arange(33), np.arange(20, 20 + full))
    np.testing.assert_array_equal(after[others], before[others])
    assert runner.num_compilations == compiled


class PretendedGPU:
    """A device whose driver maps `limit` bytes at most."""

    platform = "gpu"

    def __init__(self, limit: int) -> None:
        self.client, self.limit, self.mapped = self, limit, {}

    def dma_map(self, address: int, size: int) -> None:
        if size > self.limit:
            raise jax.errors.JaxRuntimeError("out of memory")
        self.mapped[address] = size

    def dma_unmap(self, address: int) -> None:
        del self.mapped[address]


def test_transfer_memory_is_mapped_for_as_long_as_somebody_has_it():
    device = PretendedGPU(limit=4096)
    mesh = types.SimpleNamespace(devices=np.array([device], object))
    memory = transfer_memory(4096, mesh)  # pyright: ignore[reportArgumentType]
    assert device.mapped == {memory.ctypes.data: 4096}
    pages = np.frombuffer(memory, np.uint8)[:2048].reshape(2, 1024)  # as the host tier takes it
    del memory
    assert device.mapped == {pages.ctypes.data: 4096}
    del pages
    assert not device.mapped
    with pytest.raises(MemoryError, match="cannot be mapped for the GPU: out of memory"):
        transfer_memory(4097, mesh)  # pyright: ignore[reportArgumentType]
    assert not device.mapped


@pytest.mark.parametrize(("tp_size", "mode"), [(1, "sequential"), (2, "nano")])
def test_a_rehearsal_changes_nothing(tp_size, mode):
    runner = make_runner(tp_size, mode, kv_offload="both")
    runner.warm_up()
    compiled, before = runner.num_compilations, pool(runner)
    runner.rehearse()
    np.testing.assert_array_equal(pool(runner)[1:], before[1:])
    np.testing.assert_array_equal(np.asarray(runner._last_tokens), np.zeros(4))
    assert runner.num_compilations == compiled


def test_without_offload_a_step_has_no_other_results():
    runner = make_runner(1, "sequential")
    assert runner.page_format is None
    lowered = runner._lower_forward(runner.shapes[0], None, False)
    assert len(lowered.out_tree.children()) == 2


@given(layers=st.integers(1, 90), heads=st.sampled_from([1, 2, 8]), page_size=st.sampled_from([1, 16, 64]))
def test_formats(layers, heads, page_size):
    model = tiny_model("llama3-tiny", 1)
    form = PageFormat(1, layers, page_size, heads, 128, np.dtype(jnp.bfloat16))
    assert form.page_bytes == 2 * layers * heads * 128 * page_size * 2
    assert form.token_bytes * page_size == form.page_bytes
    assert all(size >= 1 for size in form.chunk_sizes)
    assert form.chunk_sizes[-1] * form.page_bytes <= max(64 << 20, form.page_bytes)
    on_gpu = page_format(model.config, model.layout, page_size, jnp.float32, on_gpu=True)
    assert on_gpu.num_groups * on_gpu.layers_per_group == model.config.num_layers
    assert on_gpu.num_groups == 2, "two layers"


def test_weights_are_told_apart():
    """By path, by value, by dtype and by order."""
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    different = [
        {"a": x}, {"b": x}, {"a": x[::-1].copy()}, {"a": x[:, ::-1].copy()}, {"a": x.T.copy()}, {"a": x + 1},
        {"a": x.astype(np.int32)}, {"a": np.asarray(jnp.asarray(x, jnp.bfloat16))}, {"a": x, "b": x},
    ]  # fmt: skip
    checksums = [weights_checksum({name: jnp.asarray(value) for name, value in case.items()}) for case in different]
    assert len(set(checksums)) == len(checksums)
    assert weights_checksum({"a": jnp.asarray(x)}) == checksums[0]


@pytest.mark.aot
@pytest.mark.parametrize("mode", ["sequential", "nano"])
def test_on_gpus_copies_run_beside_the_layers_that_follow(mode):
    """Between start and end of each group's copy to pinned memory, but the last one's, a layer's kernels are launched."""
    command = [sys.executable, "-m", "tests.executor.h200_offload", mode]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    events = json.loads(done.stdout.splitlines()[-1])
    for group in range(3):
        between = events[events.index(f"start {group}") : events.index(f"done {group}")]
        assert between.count("kernel") >= 4, (group, events)

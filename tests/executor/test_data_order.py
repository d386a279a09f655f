"""Counts that come after results are the same counts, whatever the results are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoflow_jax.batch import BatchShape, empty_batch
from nanoflow_jax.executor.data_order import not_before
from nanoflow_jax.operations import StepInputs, step_inputs
from tests.model.test_golden import small_config

COUNTS = ("used_tokens", "decode_kv_lens", "kv_lens", "slots")


def inputs(counts: list[int]) -> StepInputs:
    step = step_inputs(small_config(), empty_batch(BatchShape(16, 4, 2)))
    lens = jnp.asarray(counts, jnp.int32)
    return dataclasses.replace(step, used_tokens=lens[0], decode_kv_lens=lens, kv_lens=lens + 1, slots=lens - 1)


@settings(max_examples=50, deadline=None)
@given(
    counts=st.lists(st.integers(0, 2**30), min_size=4, max_size=4),
    values=st.lists(st.floats(width=16), min_size=1, max_size=4),
    dtype=st.sampled_from(["bfloat16", "float32"]),
)
def test_counts_stay_as_they_are(counts: list[int], values: list[float], dtype: str) -> None:
    step = inputs(counts)
    after = not_before(step, [jnp.full((2, 3), value, dtype) for value in values])
    for name in COUNTS:
        np.testing.assert_array_equal(getattr(after, name), getattr(step, name))
        assert getattr(after, name).dtype == jnp.int32


@pytest.mark.parametrize("name", COUNTS)
def test_xla_keeps_the_dependence(name: str) -> None:
    def count(lens: jax.Array, result: jax.Array) -> jax.Array:
        step = dataclasses.replace(inputs([1, 2, 3, 4]), used_tokens=lens[0], decode_kv_lens=lens, kv_lens=lens, slots=lens)
        return getattr(not_before(step, [result]), name)

    lens, result = jnp.arange(4, dtype=jnp.int32), jnp.ones((8, 8), jnp.bfloat16)
    text = jax.jit(count).lower(lens, result).compile().as_text()
    entry = text[text.index("ENTRY") :]
    parameters = {line.split(" = ")[0].split()[-1] for line in entry.splitlines() if " parameter(1)" in line}
    assert any(entry.count(parameter) > 1 for parameter in parameters), entry


def test_ranges_that_end_before_a_row_begins_have_counts_too() -> None:
    batch = empty_batch(BatchShape(48, 4, 8))
    batch.q_starts[:3], batch.q_lens[:3], batch.kv_lens[:3] = [0, 10, 30], [10, 20, 18], [12, 20, 18]
    for start, stop in ((0, 16), (16, 32), (32, 48)):
        step = step_inputs(small_config(), batch, start, stop)
        for result in (-1.0, 1.0):
            after = not_before(step, [jnp.full((2, 2), result, jnp.bfloat16)])
            for name in COUNTS:
                np.testing.assert_array_equal(getattr(after, name), getattr(step, name))

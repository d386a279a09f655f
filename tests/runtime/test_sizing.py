"""Step sizes follow from memory and the lengths of requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax.config import preset
from nanoflow_jax.runtime.sizing import pool_tokens, steady_sizes


@given(pool=st.integers(1, 3_000_000), given_tokens=st.integers(1, 4096), output=st.integers(1, 4096))
def test_sizes_keep_their_bounds(pool: int, given_tokens: int, output: int) -> None:
    if given_tokens + output > pool:
        with pytest.raises(ValueError, match=f"{pool} tokens"):
            steady_sizes(pool, given_tokens, output)
        return
    sizes = steady_sizes(pool, given_tokens, output)
    assert sizes.b_dense % 128 == 0
    assert 1 <= sizes.max_sequences <= sizes.b_dense <= 2048


def test_llama3_8b_on_an_h200() -> None:
    """0.95 of 150 GB hold the weights and some 950,000 tokens: the paper's kind of batch."""
    tokens = pool_tokens(preset("llama3-8b"), 1, int(0.95 * 150e9), 2)
    assert 900_000 < tokens < 1_000_000
    assert steady_sizes(tokens, 512, 512).b_dense == 2048
    assert steady_sizes(tokens, 1024, 512).b_dense == 2048
    assert 1280 <= steady_sizes(tokens, 512, 1024).b_dense <= 1408

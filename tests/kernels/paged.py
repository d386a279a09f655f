"""Paged caches for the attention tests: permuted pages, NaN in pages that no sequence owns, garbage behind the last token."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

GARBAGE = 1000.0


def cache(
    kv_lens: Sequence[int], kv_heads: int, page_size: int, head_dim: int, *, seed: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(k_pages, v_pages, block_tables) of sequences of the given lengths, random-normal where there are tokens.

    Pages that no sequence owns, page 0 among them, are NaN; behind a sequence's end its last page holds finite garbage.
    """
    rng = np.random.default_rng(seed)
    pages = [-(-n // page_size) for n in kv_lens]
    owned = rng.permutation(np.arange(1, sum(pages) + 4))[: sum(pages)]
    shape = (sum(pages) + 4, kv_heads, page_size, head_dim)
    k, v = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    for x in (k, v):
        x[owned] = rng.normal(size=(len(owned), *shape[1:]))
    tables = np.zeros((len(kv_lens), max(pages, default=0) + 1), np.int32)
    begin = 0
    for row, (n, count) in enumerate(zip(kv_lens, pages, strict=True)):
        tables[row, :count] = owned[begin : begin + count]
        if n % page_size:
            for x in (k, v):
                x[tables[row, count - 1], :, n % page_size :] = GARBAGE
        begin += count
    return jnp.asarray(k, jnp.bfloat16), jnp.asarray(v, jnp.bfloat16), jnp.asarray(tables)


def assert_close(actual: jax.Array, wanted: jax.Array) -> None:
    """Within what bfloat16 operands with float32 sums allow: weights and results are rounded to 8 bits, once each.

    The rounding errors of the weights are independent, so they average out over the tokens; outputs are weighted means of
    unit normals, so an absolute bound fits.
    """
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(wanted, np.float32), rtol=2**-6, atol=2**-6)

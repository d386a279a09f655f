"""The batch of a workload's steady state, as arrays that a step can run on."""

import dataclasses

import numpy as np

from nanoflow_jax.batch import Batch, BatchShape, empty_batch
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import TILE
from nanoflow_jax.workload import Workload, steady_mix


def steady_batch(
    config: ModelConfig, workload: Workload, b_dense: int, page_size: int, decode_tokens: int | None = None
) -> tuple[Batch, int]:
    """A full batch of the workload's mix with pages in shuffled order, and the pages that its pool must have.

    The workload has a prompt. Decoding sequences, `decode_tokens` or the workload's share, all have the mean context; prompts
    come whole, the last one cut where the batch ends. Rows are as many as there are sequences, rounded up to a tile: what an
    engine sized for this workload compiles.
    """
    rng = np.random.default_rng(0)
    mix = steady_mix(workload, b_dense)
    if decode_tokens is not None:
        mix = dataclasses.replace(mix, decode_tokens=decode_tokens)
    num_decode = mix.decode_tokens
    whole, rest = divmod(mix.prefill_tokens, workload.prompt_tokens)
    q_lens = [1] * num_decode + [workload.prompt_tokens] * whole + [rest] * (rest > 0)
    kv_lens = np.array([int(mix.decode_context)] * num_decode + q_lens[num_decode:], np.int32)
    pages_per_seq = -(-int(kv_lens.max()) // page_size)
    rows = len(q_lens)
    batch = empty_batch(BatchShape(b_dense, min(b_dense, -(-rows // TILE) * TILE), pages_per_seq))
    owned = -(-kv_lens // page_size)
    pages = rng.permutation(np.arange(1, 1 + int(owned.sum()), dtype=np.int32))
    batch.block_tables[:rows][np.arange(pages_per_seq) < owned[:, None]] = pages
    batch.num_decode[...] = num_decode
    batch.q_lens[:rows], batch.kv_lens[:rows] = q_lens, kv_lens
    batch.q_starts[:rows] = np.cumsum([0, *q_lens])[:-1]
    batch.sequence_rows[:rows] = np.arange(rows)
    row = np.repeat(np.arange(rows), q_lens)
    batch.positions[:] = np.arange(b_dense) - np.repeat(batch.q_starts[:rows] - kv_lens + q_lens, q_lens)
    page, offset = np.divmod(batch.positions, page_size)
    batch.slots[:] = batch.block_tables[row, page] * page_size + offset
    batch.token_ids[:] = rng.integers(0, config.vocab_size, b_dense)
    return batch, 1 + len(pages)

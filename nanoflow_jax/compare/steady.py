"""The batch of a workload's steady state, as arrays that a step can run on."""

import dataclasses

import numpy as np

from nanoflow_jax.batch import Batch, BatchShape, empty_batch
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import TILE


@dataclasses.dataclass(frozen=True)
class Workload:
    """Lengths of every request, in tokens."""

    prompt: int
    output: int

    def __str__(self) -> str:
        return f"{self.prompt}:{self.output}"

    @property
    def decode_context(self) -> int:
        """Mean tokens of a decoding sequence: its prompt and half of its output."""
        return self.prompt + self.output // 2

    def decode_tokens(self, b_dense: int) -> int:
        """Decoding tokens of a full batch: a request decodes for `output` of its tokens (paper, section 3.1)."""
        return round(b_dense * self.output / (self.prompt + self.output))


def parse_workload(text: str) -> Workload:
    """PROMPT:OUTPUT in tokens.

    Raises:
      ValueError: anything else, or no prompt.
    """
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[0]) < 1:
        raise ValueError(f"workload {text!r} is not PROMPT:OUTPUT in tokens with a prompt of at least one")
    return Workload(int(parts[0]), int(parts[1]))


def steady_batch(config: ModelConfig, workload: Workload, b_dense: int, page_size: int) -> tuple[Batch, int]:
    """A full batch of the workload's mix with pages in shuffled order, and the pages that its pool must have.

    Decoding sequences all have the mean context; prompts come whole, the last one cut where the batch ends. Rows are as many as
    there are sequences, rounded up to a tile: what an engine sized for this workload would compile.
    """
    rng = np.random.default_rng(0)
    num_decode = workload.decode_tokens(b_dense)
    whole, rest = divmod(b_dense - num_decode, workload.prompt)
    q_lens = [1] * num_decode + [workload.prompt] * whole + [rest] * (rest > 0)
    kv_lens = np.array([workload.decode_context] * num_decode + q_lens[num_decode:], np.int32)
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

"""One step's arrays: built in numpy by the batcher, sent to the device as one int32 array, unpacked inside jit."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# A field of `Batch`: np.ndarray while the host fills it, jax.Array inside a step.
HostOrTraced = Any


@dataclasses.dataclass(frozen=True, order=True)
class BatchShape:
    """A compiled shape: tokens on the flat token axis, sequences at most, columns of the block table."""

    num_tokens: int
    num_rows: int
    pages_per_seq: int

    def __post_init__(self) -> None:
        if not 0 < self.num_rows <= self.num_tokens or self.pages_per_seq <= 0:
            raise ValueError(f"bad BatchShape: {self.num_tokens=} {self.num_rows=} {self.pages_per_seq=}")


# name -> (axis of BatchShape, dtype); the order is the order in the packed array.
_TOKEN_FIELDS = ("token_ids", "token_rows", "positions", "slots")
_ROW_FIELDS = {
    "kv_lens": np.int32,
    "q_starts": np.int32,
    "q_lens": np.int32,
    "sequence_rows": np.int32,
    "seeds": np.uint32,
    "top_k": np.int32,
    "temperature": np.float32,
    "top_p": np.float32,
    "min_p": np.float32,
}


@dataclasses.dataclass(kw_only=True)
class Batch:
    """A dense batch. Row i < num_decode is decoding and owns token i; the other rows are prefill chunks, in token order.

    The same fields hold numpy arrays on the host and traced arrays inside a step. T tokens, S rows.

    Attributes:
      num_decode: scalar, decoding rows.
      token_ids: int32[T], used where token_rows is -1.
      token_rows: int32[T], index into the device's last_tokens to take the token from, or -1.
      positions: int32[T], 0-based position in the sequence.
      slots: int32[T], where the token's K and V go; -1 for padding.
      kv_lens: int32[S], tokens in the cache after this step; 0 for an unused row.
      q_starts, q_lens: int32[S], the row's token range in this step; q_len 0 for an unused row.
      sequence_rows: int32[S], index into last_tokens that receives the row's sampled token; -1: the row samples nothing
        (unused, or a prompt chunk that is not the last).
      seeds: uint32[S]; the random key of a sampled token is (seed, kv_len), so it does not depend on the batch.
      temperature: float32[S]; 0 is greedy.
      top_k: int32[S]; 0 is off.
      top_p, min_p: float32[S]; 1 and 0 are off.
      block_tables: int32[S, pages_per_seq].
    """

    num_decode: HostOrTraced
    token_ids: HostOrTraced
    token_rows: HostOrTraced
    positions: HostOrTraced
    slots: HostOrTraced
    kv_lens: HostOrTraced
    q_starts: HostOrTraced
    q_lens: HostOrTraced
    sequence_rows: HostOrTraced
    seeds: HostOrTraced
    top_k: HostOrTraced
    temperature: HostOrTraced
    top_p: HostOrTraced
    min_p: HostOrTraced
    block_tables: HostOrTraced

    @property
    def shape(self) -> BatchShape:
        return BatchShape(self.token_ids.shape[0], self.kv_lens.shape[0], self.block_tables.shape[1])


jax.tree_util.register_dataclass(Batch, [f.name for f in dataclasses.fields(Batch)], [])


def empty_batch(shape: BatchShape) -> Batch:
    """A host batch in which every token is padding and every row unused."""
    rows = {name: np.zeros(shape.num_rows, dtype) for name, dtype in _ROW_FIELDS.items()}
    rows["sequence_rows"][:] = -1
    rows["top_p"][:] = 1.0
    tokens = {name: np.zeros(shape.num_tokens, np.int32) for name in _TOKEN_FIELDS}
    tokens["token_rows"][:] = -1
    tokens["slots"][:] = -1
    tables = np.zeros((shape.num_rows, shape.pages_per_seq), np.int32)
    return Batch(num_decode=np.zeros((), np.int32), block_tables=tables, **tokens, **rows)


# Every field starts at a multiple of this many words: XLA on GPUs hands a kernel a pointer into the packed array where it
# reads a slice of it, and kernels want their arguments aligned to 256 bytes.
_ALIGNMENT = 64


def pack(batch: Batch) -> np.ndarray:
    """int32[n]: every field of a host batch in one array, floats and unsigned integers by their bits."""
    packed = np.zeros(packed_size(batch.shape), np.int32)
    for name, start, _, dtype in _sections(batch.shape):
        field = np.asarray(getattr(batch, name), dtype).view(np.int32)
        packed[start : start + field.size] = field.reshape(-1)
    return packed


def packed_size(shape: BatchShape) -> int:
    """Length of the array that `pack` returns."""
    _, start, field, _ = _sections(shape)[-1]
    return start + _aligned(math.prod(field))


def unpack(packed: jax.Array, shape: BatchShape) -> Batch:
    """The traced inverse of `pack`."""
    fields = {}
    for name, start, field, dtype in _sections(shape):
        bits = packed[start : start + math.prod(field)].reshape(field)
        fields[name] = bits if dtype is np.int32 else jax.lax.bitcast_convert_type(bits, jnp.dtype(dtype))
    return Batch(**fields)


@functools.cache
def _sections(shape: BatchShape) -> list[tuple[str, int, tuple[int, ...], type]]:
    """(field, first word in the packed array, its shape, its dtype)."""
    fields: list[tuple[str, tuple[int, ...], type]] = [("num_decode", (), np.int32)]
    fields += [(name, (shape.num_tokens,), np.int32) for name in _TOKEN_FIELDS]
    fields += [(name, (shape.num_rows,), dtype) for name, dtype in _ROW_FIELDS.items()]
    fields.append(("block_tables", (shape.num_rows, shape.pages_per_seq), np.int32))
    starts = itertools.accumulate((_aligned(math.prod(field)) for _, field, _ in fields), initial=0)
    return [(name, start, field, dtype) for (name, field, dtype), start in zip(fields, starts, strict=False)]


def _aligned(words: int) -> int:
    return -(-words // _ALIGNMENT) * _ALIGNMENT

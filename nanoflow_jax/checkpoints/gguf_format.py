"""The GGUF container: a header of typed metadata and tensor places, then tensor data. Written to distrust the file.

The gguf package's own reader takes counts and offsets as they come and spends seconds on token lists, so the header is read
here; its tables of types and its dequantisation are used.
"""

import dataclasses
import functools
import math
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from nanoflow_jax.checkpoints.layout import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
# Far above any real file: vocabularies have less than 2^19 entries, chat templates less than 2^16 characters.
_MAX_ARRAY = 1 << 24
_MAX_STRING = 1 << 26
_MAX_ENTRIES = 1 << 20


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """Metadata by key (numbers, texts, lists), and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, "GgufTensor"]


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor in the mapped file: `raw` holds the bytes of each row, quantised as `kind`."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    raw: np.ndarray

    def read(self) -> np.ndarray:
        """The values, dequantised to float32."""
        return gguf.quants.dequantize(self.raw, self.kind)

    def unstacked(self) -> list["GgufTensor"]:
        """The tensors that are stacked along the first axis."""
        return [GgufTensor(self.shape[1:], self.kind, part) for part in self.raw]


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of `path` and maps its data.

    Raises:
      CheckpointError: the file is missing, torn or malformed, its version or byte order is not handled, or a tensor has a
        type that cannot be dequantised; the message names the part.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    if path.stat().st_size < 24:
        raise CheckpointError(f"{path}: too short to be a GGUF file")
    data = np.memmap(path, np.uint8, mode="r")
    try:
        return _parse(data)
    except (_MalformedError, UnicodeDecodeError, struct.error) as error:
        raise CheckpointError(f"{path}: not a sound GGUF file: {error}") from error


class _MalformedError(Exception):
    pass


class _Cursor:
    """A position in the mapped file that never passes its end."""

    def __init__(self, data: np.ndarray):
        self._data = data
        self.position = 0

    def take(self, count: int) -> memoryview:
        if count > len(self._data) - self.position:
            raise _MalformedError(f"the header ends early: {count} bytes wanted at {self.position} of {len(self._data)}")
        start, self.position = self.position, self.position + count
        return self._data.data[start : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        length = self.scalar("Q")
        if length > _MAX_STRING:
            raise _MalformedError(f"a text of {length} bytes at {self.position}")
        return str(self.take(length), "utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise _MalformedError(f"unknown value type {kind} at {self.position}")
        item, count = self.scalar("I"), self.scalar("Q")
        if count > _MAX_ARRAY:
            raise _MalformedError(f"an array of {count} values at {self.position}")
        if item == _STRING:
            return [self.text() for _ in range(count)]
        if item in _SCALARS:
            code = "<" + _SCALARS[item]
            return np.frombuffer(self.take(count * struct.calcsize(code)), code).tolist()
        raise _MalformedError(f"an array of type {item} at {self.position} is not handled")


def _parse(data: np.ndarray) -> GgufFile:
    cursor = _Cursor(data)
    if bytes(cursor.take(4)) != b"GGUF":
        raise _MalformedError("it does not start with GGUF")
    version, num_tensors, num_keys = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    if version not in (2, 3):
        raise _MalformedError(f"version {version} is not handled, only little-endian 2 and 3")
    if num_tensors > _MAX_ENTRIES or num_keys > _MAX_ENTRIES:
        raise _MalformedError(f"it claims {num_tensors} tensors and {num_keys} metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if key in metadata:
            raise _MalformedError(f"metadata key {key!r} twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise _MalformedError(f"general.alignment={alignment!r}")
    places = [_read_place(cursor) for _ in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    _check_places(places, start, len(data))
    if len({place.name for place in places}) != len(places):
        raise _MalformedError("two tensors have the same name")
    return GgufFile(metadata, {place.name: place.tensor(data[start:]) for place in places})


@dataclasses.dataclass(frozen=True)
class _Place:
    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int

    @property
    def row_bytes(self) -> int:
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * block_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    def tensor(self, data: np.ndarray) -> GgufTensor:
        raw = np.asarray(data[self.offset : self.offset + self.num_bytes])
        return GgufTensor(self.shape, self.kind, raw.reshape(*self.shape[:-1], self.row_bytes))


def _read_place(cursor: _Cursor) -> _Place:
    name, num_dims = cursor.text(), cursor.scalar("I")
    if not 0 < num_dims <= _MAX_DIMS:
        raise _MalformedError(f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    kind, offset = cursor.scalar("I"), cursor.scalar("Q")
    try:
        kind = gguf.GGMLQuantizationType(kind)
        _check_dequantises(kind)
    except (ValueError, NotImplementedError) as error:
        raise _MalformedError(f"tensor {name!r} has type {kind!r}, which cannot be dequantised") from error
    if 0 in shape or shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        raise _MalformedError(f"tensor {name!r} has shape {shape}, which type {kind.name} cannot have")
    return _Place(name, shape, kind, offset)


@functools.cache
def _check_dequantises(kind: gguf.GGMLQuantizationType) -> None:
    """Raises NotImplementedError if the gguf package has no dequantisation for `kind`; tries it on one block of zeros."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)


def _check_places(places: list[_Place], start: int, file_bytes: int) -> None:
    end, previous = 0, ""
    for place in sorted(places, key=lambda place: place.offset):
        if place.offset < end:
            raise _MalformedError(f"tensors {previous!r} and {place.name!r} overlap")
        end, previous = place.offset + place.num_bytes, place.name
        if start + end > file_bytes:
            raise _MalformedError(f"tensor {place.name!r} ends at byte {start + end} of {file_bytes}")

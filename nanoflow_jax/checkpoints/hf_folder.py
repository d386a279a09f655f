"""Hugging Face folders: config.json, generation_config.json, and safetensors in one file or in shards with an index."""

import dataclasses
import functools
import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from nanoflow_jax.checkpoints.layout import CheckpointError, Tensor
from nanoflow_jax.config import ModelConfig, from_hf

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Far above any real config or index (Mixtral's index has 100 KB), far below what would hurt.
_MAX_JSON_BYTES = 64 << 20


def is_hf_folder(path: Path) -> bool:
    return (path / "config.json").is_file()


def read_config(folder: Path) -> ModelConfig:
    """The model's config; end-of-sequence ids of generation_config.json are added to those of config.json.

    Raises:
      CheckpointError: a file cannot be read, or the config is not of a model that is handled.
    """
    try:
        config = from_hf(read_json(folder / "config.json"), folder.resolve().name)
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    more = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ids = tuple(dict.fromkeys((*config.eos_token_ids, *more)))
    if not all(type(token) is int and 0 <= token < config.vocab_size for token in ids):
        raise CheckpointError(f"{folder}: eos_token_id={list(ids)} are not all token ids below {config.vocab_size}")
    return dataclasses.replace(config, eos_token_ids=ids)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
      CheckpointError: the file is missing, is not JSON, is not an object or is absurdly large.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes are too many for this file")
        value = json.loads(path.read_bytes())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Tensors of the folder by name, mapped and not read.

    Raises:
      CheckpointError: a file is missing, torn or malformed, or index and shards disagree.
    """
    if (folder / _SINGLE).is_file():
        return safetensors_file(folder / _SINGLE)
    if not (folder / _INDEX).is_file():
        raise CheckpointError(f"{folder}: has neither {_SINGLE} nor {_INDEX}; weights in other formats must be converted first")
    return _sharded(folder)


def _sharded(folder: Path) -> dict[str, Tensor]:
    weight_map = read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{folder / _INDEX}: weight_map must map tensor names to file names")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        if file != Path(file).name:
            raise CheckpointError(f"{folder / _INDEX}: {file!r} is not the name of a file in the folder")
        found = safetensors_file(folder / file)
        listed = {name for name, home in weight_map.items() if home == file}
        if odd := sorted(found.keys() ^ listed):
            raise CheckpointError(f"{folder / file}: index and file disagree about {', '.join(odd[:8])}")
        tensors.update(found)
    return tensors


def safetensors_file(path: Path) -> dict[str, Tensor]:
    """Tensors of one file by name, mapped and not read.

    The safetensors library checks the header: its length, that the parts are dense, do not overlap and end with the file, and
    that they fit shapes and types. The data is mapped here because numpy has no bfloat16 of its own to read it through.

    Raises:
      CheckpointError: the file is missing, torn or malformed, or a tensor has a type that is not handled.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a sound safetensors file: {error}") from error
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    odd = [f"{name} ({spec['dtype']})" for name, spec in header.items() if spec["dtype"] not in _DTYPES]
    if odd:
        raise CheckpointError(f"{path}: types not handled, only {', '.join(_DTYPES)}: {', '.join(odd[:8])}")
    mapped = np.memmap(path, np.uint8, mode="r", offset=0)[8 + header_bytes :]

    def tensor(spec: dict[str, Any]) -> Tensor:
        start, stop = spec["data_offsets"]
        shape = tuple(spec["shape"])
        return Tensor(shape, functools.partial(_view, mapped[start:stop], _DTYPES[spec["dtype"]], shape))

    return {name: tensor(spec) for name, spec in header.items()}


def _view(raw: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(raw).view(dtype).reshape(shape)

"""Folders written by `nanoflow_jax.convert`: what the model is, its tokenizer, and weights as Orbax checkpoints.

    model.json             format, version and ModelConfig; written last
    tokenizer.json, tokenizer_config.json
    weights/ends           embed, final_norm, lm_head
    weights/layers.<i>     the parameters of one layer

Each item under `weights` is an Orbax checkpoint of its own, so that converting and restoring hold one layer at a time. Arrays
are in the plain layout of `relayout`, so that a folder restores onto any number of ranks.
"""

import dataclasses
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from nanoflow_jax.checkpoints.hf_folder import read_json
from nanoflow_jax.checkpoints.layout import CheckpointError
from nanoflow_jax.config import ModelConfig, RopeScaling

MANIFEST = "model.json"
_FORMAT = {"format": "nanoflow-jax", "version": 1}


def is_converted_folder(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def item_of(path: str) -> str:
    """The item that holds the parameter `path`."""
    return path.rpartition(".")[0] or "ends"


def items(paths: Mapping[str, Any]) -> dict[str, list[str]]:
    """Item -> paths of its parameters."""
    table: dict[str, list[str]] = {}
    for path in paths:
        table.setdefault(item_of(path), []).append(path)
    return table


def item_folder(folder: Path, item: str) -> Path:
    return folder.resolve() / "weights" / item


def read_manifest(folder: Path) -> ModelConfig:
    """Raises CheckpointError: the manifest is malformed or of another version."""
    manifest = read_json(folder / MANIFEST)
    if {key: manifest.get(key) for key in _FORMAT} != _FORMAT:
        raise CheckpointError(f"{folder / MANIFEST}: not a manifest of version {_FORMAT['version']}")
    config = manifest.get("config")
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / MANIFEST}: config={config!r:.80} is not an object")
    try:
        _refuse_unknown(config, ModelConfig)
        _refuse_unknown(config.get("rope_scaling"), RopeScaling)
        return msgspec.convert(config, ModelConfig)
    except (msgspec.ValidationError, ValueError) as error:
        raise CheckpointError(f"{folder / MANIFEST}: not a model config: {error}") from error


def _refuse_unknown(values: Any, kind: type) -> None:
    unknown = set(values or ()) - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"unknown fields {', '.join(sorted(unknown))}")


def write_manifest(folder: Path, config: ModelConfig) -> None:
    manifest = _FORMAT | {"config": dataclasses.asdict(config)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A folder to fill that becomes `destination` when the block ends well, and disappears when it fails.

    A process that is killed leaves a hidden folder beside the destination, which nothing takes for a model.

    Raises:
      CheckpointError: the destination exists and is not an empty folder.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise CheckpointError(f"{destination} exists already")
    destination.parent.mkdir(parents=True, exist_ok=True)
    scratch = destination.parent / f".{destination.name}.partial-{uuid.uuid4().hex[:8]}"
    scratch.mkdir()
    try:
        yield scratch
        os.replace(scratch, destination)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise

"""What can be loaded: `open_source` tells a Hugging Face folder from a GGUF file from a converted folder from a preset."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from nanoflow_jax.checkpoints import gguf_model, hf_folder
from nanoflow_jax.checkpoints.converted_folder import is_converted_folder, read_manifest
from nanoflow_jax.checkpoints.gguf_format import read_gguf
from nanoflow_jax.checkpoints.layout import CheckpointError, Tensor
from nanoflow_jax.checkpoints.smollm2 import resolve_smollm2
from nanoflow_jax.config import PRESETS, ModelConfig
from nanoflow_jax.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

SMOLLM2 = "smollm2"
_SMOLLM2_PRESET = "smollm2-135m"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A model whose small files are read. Its weights are `tensors` by Hugging Face name, or in the converted folder
    `converted`, or it has none."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    description: str
    tensors: Callable[[], Mapping[str, Tensor]] | None = None
    converted: Path | None = None


def open_source(source: str, models_dir: Path | None = None, *, needs_weights: bool = True) -> Source:
    """`source` is `smollm2` (kept in `models_dir`, downloaded once), a preset's name, a folder or a GGUF file.

    Without `needs_weights`, `smollm2` is only its sizes and nothing is downloaded.

    Raises:
      CheckpointError: there is no such source, or its config is unsound or not handled.
      TokenizerError, ChatTemplateError: its tokenizer or chat template is unsound or not handled.
    """
    opened = _open(source, models_dir, needs_weights)
    tokenizer, vocab_size = opened.tokenizer, opened.config.vocab_size
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"{opened.description}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model only {vocab_size} of them"
        )
    return opened


def _open(source: str, models_dir: Path | None, needs_weights: bool) -> Source:
    if source == SMOLLM2 and not needs_weights:
        source = _SMOLLM2_PRESET
    if source in PRESETS:
        return Source(config=PRESETS[source], tokenizer=None, description=f"preset {source}")
    if source == SMOLLM2:
        return _open_gguf(resolve_smollm2(models_dir), _SMOLLM2_PRESET)
    path = Path(source)
    if is_converted_folder(path):
        return Source(
            config=read_manifest(path), tokenizer=_tokenizer_in(path), description=f"converted {path}", converted=path
        )
    if hf_folder.is_hf_folder(path):
        return Source(
            config=hf_folder.read_config(path),
            tokenizer=_tokenizer_in(path),
            description=f"safetensors in {path}",
            tensors=lambda: hf_folder.read_tensors(path),
        )
    if path.is_file():
        return _open_gguf(path, path.name.removesuffix(".gguf"))
    raise CheckpointError(
        f"{source!r} is not a model: neither {SMOLLM2!r}, nor a folder with a config.json or converted by this program, nor a "
        f"GGUF file, nor a preset ({', '.join(PRESETS)})"
    )


def _tokenizer_in(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


def _open_gguf(path: Path, name: str) -> Source:
    file = read_gguf(path)
    config = gguf_model.model_config(file, name)
    has_tokenizer = "tokenizer.ggml.model" in file.metadata
    return Source(
        config=config,
        tokenizer=tokenizer_from_gguf(file.metadata) if has_tokenizer else None,
        description=str(path),
        tensors=lambda: gguf_model.model_tensors(config, file),
    )

"""One way in for every source of weights: `load_model`."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from nanoflow_jax.checkpoints import gguf_model, hf_folder
from nanoflow_jax.checkpoints.gguf_format import read_gguf
from nanoflow_jax.checkpoints.layout import CheckpointError, Tensor, full_index, packed, recipes, select_tensors
from nanoflow_jax.checkpoints.random_weights import random_parameters
from nanoflow_jax.checkpoints.smollm2 import resolve_smollm2
from nanoflow_jax.config import PRESETS, ModelConfig
from nanoflow_jax.models.decoder import Decoder, build_decoder, parameter_specs
from nanoflow_jax.parallel import TP, ParallelLayout, parallel_layout
from nanoflow_jax.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

SMOLLM2 = "smollm2"
_SMOLLM2_PRESET = "smollm2-135m"

# Called with the name of the parameter that has just arrived, how many have, and how many there are.
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model on its mesh. `tokenizer` is None where the source has none (presets); `source` says where weights came from."""

    config: ModelConfig
    layout: ParallelLayout
    decoder: Decoder
    tokenizer: Tokenizer | None
    name: str
    source: str


def place_parameters(
    config: ModelConfig,
    layout: ParallelLayout,
    mesh: jax.sharding.Mesh,
    dtype: jnp.dtype,
    tensors: Mapping[str, Tensor],
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Parameter path -> array on the mesh; one parameter at a time, each rank's part built from its slice of the tensors.

    Raises:
      CheckpointError: the tensors are not those of the model.
    """
    table = recipes(config, layout)
    tensors = select_tensors(config, table, tensors)
    specs = parameter_specs(config, layout)
    arrays = {}
    for done, (path, recipe) in enumerate(table.items(), start=1):
        shape = specs[path].shape
        sources = [tensors[name].read() for name in recipe.sources]

        def part(index, recipe=recipe, shape=shape, sources=sources) -> np.ndarray:
            return packed(recipe.build(sources, full_index(shape, index)), dtype)

        arrays[path] = jax.make_array_from_callback(shape, specs[path].sharding(mesh), part)
        if progress:
            progress(path, done, len(table))
    return arrays


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A source whose small files are read: the model, its tokenizer, and how to put its weights on a mesh, if it has any."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    source: str
    parameters: Callable[[ParallelLayout, jax.sharding.Mesh, jnp.dtype, Progress | None], dict[str, jax.Array]] | None


def load_model(
    source: str | Path,
    *,
    mesh: jax.sharding.Mesh,
    dtype: jnp.dtype | str,
    random_weights: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    models_dir: Path | None = None,
) -> LoadedModel:
    """Puts a model on `mesh`, divided over its axis `tp`, with weights of `dtype`.

    `source` is `smollm2` (kept in `models_dir`, downloaded once), a Hugging Face folder, a GGUF file, a folder written by
    `nanoflow_jax.convert`, or the name of a preset. `random_weights` takes the sizes and the tokenizer of the source and makes
    the weights on the devices, the same for the same `seed`; presets have no others.

    Raises:
      CheckpointError: the source is unknown or unsound, its weights are not those of its config, or it has none.
      TokenizerError, ChatTemplateError: its tokenizer or chat template is not handled.
      ValueError: the model cannot be divided over the mesh.
    """
    dtype = jnp.dtype(dtype)
    opened = _open(str(source), models_dir, random_weights)
    _check_tokenizer(opened)
    layout = parallel_layout(opened.config, mesh.shape[TP])
    if random_weights:
        arrays = random_parameters(opened.config, layout, mesh, dtype, seed, progress)
    elif opened.parameters is None:
        raise CheckpointError(
            f"{source} is a preset: it gives sizes and has no weights. Give the folder or the GGUF file of a checkpoint, "
            "or ask for random weights"
        )
    else:
        arrays = opened.parameters(layout, mesh, dtype, progress)
    return LoadedModel(
        config=opened.config,
        layout=layout,
        decoder=build_decoder(opened.config, layout, arrays),
        tokenizer=opened.tokenizer,
        name=opened.config.name,
        source=f"random weights, seed {seed}, sizes of {opened.source}" if random_weights else opened.source,
    )


def _open(source: str, models_dir: Path | None, random_weights: bool) -> _Opened:
    if source == SMOLLM2 and random_weights:  # its sizes need no download
        source = _SMOLLM2_PRESET
    if source in PRESETS:
        return _Opened(PRESETS[source], None, f"preset {source}", None)
    if source == SMOLLM2:
        return _open_gguf(resolve_smollm2(models_dir), _SMOLLM2_PRESET)
    path = Path(source)
    if hf_folder.is_hf_folder(path):
        return _open_hf(path)
    if path.is_file():
        return _open_gguf(path, path.name.removesuffix(".gguf"))
    raise CheckpointError(
        f"{source!r} is not a model: it is neither {SMOLLM2!r}, nor a folder with a config.json, nor a GGUF file, nor a preset "
        f"({', '.join(PRESETS)})"
    )


def _open_hf(folder: Path) -> _Opened:
    config = hf_folder.read_config(folder)
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None

    def parameters(layout, mesh, dtype, progress) -> dict[str, jax.Array]:
        return place_parameters(config, layout, mesh, dtype, hf_folder.read_tensors(folder), progress)

    return _Opened(config, tokenizer, f"safetensors in {folder}", parameters)


def _open_gguf(path: Path, name: str) -> _Opened:
    file = read_gguf(path)
    config = gguf_model.model_config(file, name)
    has_tokenizer = "tokenizer.ggml.model" in file.metadata

    def parameters(layout, mesh, dtype, progress) -> dict[str, jax.Array]:
        return place_parameters(config, layout, mesh, dtype, gguf_model.model_tensors(config, file), progress)

    return _Opened(config, tokenizer_from_gguf(file.metadata) if has_tokenizer else None, str(path), parameters)


def _check_tokenizer(opened: _Opened) -> None:
    if opened.tokenizer is not None and opened.tokenizer.vocab_size > opened.config.vocab_size:
        raise CheckpointError(
            f"{opened.source}: the tokenizer has ids up to {opened.tokenizer.vocab_size - 1}, the model's vocabulary ends at "
            f"{opened.config.vocab_size - 1}"
        )

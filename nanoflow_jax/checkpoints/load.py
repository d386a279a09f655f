"""One way in for every source of weights: `load_model`."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from nanoflow_jax import tokenizer as tokenizers
from nanoflow_jax.checkpoints import hf_folder
from nanoflow_jax.checkpoints.layout import CheckpointError, Tensor, full_index, packed, recipes, select_tensors
from nanoflow_jax.checkpoints.random_weights import random_parameters
from nanoflow_jax.config import PRESETS, ModelConfig
from nanoflow_jax.models.decoder import Decoder, build_decoder, parameter_specs
from nanoflow_jax.parallel import TP, ParallelLayout, parallel_layout
from nanoflow_jax.tokenizer import Tokenizer

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
) -> LoadedModel:
    """Puts a model on `mesh`, divided over its axis `tp`, with weights of `dtype`.

    `source` is the name of a preset or a Hugging Face folder. `random_weights` takes the sizes and the tokenizer of the
    source and makes weights on the devices, the same for the same `seed`.

    Raises:
      CheckpointError: the source is unknown or unsound, its weights are not those of its config, or it has none.
      TokenizerError, ChatTemplateError: its tokenizer or chat template is not handled.
      ValueError: the model cannot be divided over the mesh.
    """
    opened = _open(str(source))
    dtype = jnp.dtype(dtype)
    layout = parallel_layout(opened.config, mesh.shape[TP])
    if random_weights:
        arrays = random_parameters(opened.config, layout, mesh, dtype, seed, progress)
    elif opened.parameters is None:
        raise CheckpointError(
            f"{source} is a preset: it gives sizes and has no weights. Give the folder of a checkpoint instead, or ask for "
            "random weights"
        )
    else:
        arrays = opened.parameters(layout, mesh, dtype, progress)
    return LoadedModel(
        config=opened.config,
        layout=layout,
        decoder=build_decoder(opened.config, layout, arrays),
        tokenizer=opened.tokenizer,
        name=opened.config.name,
        source=f"random weights, seed {seed}" if random_weights else opened.source,
    )


def _open(source: str) -> _Opened:
    path = Path(source)
    if source in PRESETS:
        return _Opened(PRESETS[source], None, f"preset {source}", None)
    if hf_folder.is_hf_folder(path):
        return _open_hf(path)
    raise CheckpointError(f"{source!r} is neither a preset ({', '.join(PRESETS)}) nor a folder with a config.json")


def _open_hf(folder: Path) -> _Opened:
    config = hf_folder.read_config(folder)
    tokenizer = tokenizers.load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None

    def parameters(layout, mesh, dtype, progress) -> dict[str, jax.Array]:
        return place_parameters(config, layout, mesh, dtype, hf_folder.read_tensors(folder), progress)

    return _Opened(config, tokenizer, f"safetensors in {folder}", parameters)

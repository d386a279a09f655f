"""One way in for every source of weights: `load_model`."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from nanoflow_jax.checkpoints.layout import CheckpointError
from nanoflow_jax.checkpoints.placing import Progress, place_parameters
from nanoflow_jax.checkpoints.random_weights import random_parameters
from nanoflow_jax.checkpoints.sources import Source, open_source
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.models.decoder import Decoder, build_decoder
from nanoflow_jax.parallel import TP, ParallelLayout, parallel_layout
from nanoflow_jax.tokenizer import Tokenizer

_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model on its mesh. `tokenizer` is None where the source has none (presets); `source` says where weights came from."""

    config: ModelConfig
    layout: ParallelLayout
    decoder: Decoder
    tokenizer: Tokenizer | None
    name: str
    source: str


def read_config(source: str | Path, models_dir: Path | None = None) -> ModelConfig:
    """The config of a `source` as `load_model` takes it; reads no weights. Raises as `load_model`."""
    return open_source(str(source), models_dir, needs_weights=False).config


def load_model(
    source: str | Path,
    *,
    mesh: jax.sharding.Mesh,
    dtype: jnp.dtype | str,
    random_weights: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
    models_dir: Path | None = None,
    gathered_o_proj: bool = False,
) -> LoadedModel:
    """Puts a model on `mesh`, divided over its axis `tp`, with weights of `dtype`.

    `source` is `smollm2` (kept in `models_dir`, downloaded once), a Hugging Face folder, a GGUF file, a folder written by
    `nanoflow_jax.convert`, or the name of a preset. `random_weights` takes the sizes and the tokenizer of the source and makes
    the weights on the devices, the same for the same `seed`; presets have no others.

    Raises:
      CheckpointError: the source is unknown or unsound, its weights are not those of its config, or it has none.
      TokenizerError, ChatTemplateError: its tokenizer or chat template is unsound or not handled.
      ValueError: the model cannot be divided over the mesh, or `dtype` is not one of bfloat16, float16 and float32.
    """
    dtype = weight_dtype(dtype)
    opened = open_source(str(source), models_dir, needs_weights=not random_weights)
    layout = dataclasses.replace(parallel_layout(opened.config, mesh.shape[TP]), gathered_o_proj=gathered_o_proj)
    if random_weights:
        arrays = random_parameters(opened.config, layout, mesh, dtype, seed, progress)
    else:
        arrays = _stored_parameters(opened, layout, mesh, dtype, progress)
    return LoadedModel(
        config=opened.config,
        layout=layout,
        decoder=build_decoder(opened.config, layout, arrays),
        tokenizer=opened.tokenizer,
        name=opened.config.name,
        source=f"random weights, seed {seed}, sizes of {opened.description}" if random_weights else opened.description,
    )


def weight_dtype(dtype: jnp.dtype | str) -> jnp.dtype:
    """Raises ValueError: weights cannot have this type."""
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    if name not in _DTYPES:
        raise ValueError(f"{dtype=} is not a type of weights: {', '.join(_DTYPES)}")
    return jnp.dtype(name)


def _stored_parameters(
    source: Source, layout: ParallelLayout, mesh: jax.sharding.Mesh, dtype: jnp.dtype, progress: Progress | None
) -> dict[str, jax.Array]:
    if source.tensors is not None:
        return place_parameters(source.config, layout, mesh, dtype, source.tensors(), progress)
    if source.converted is None:
        raise CheckpointError(
            f"{source.description} gives sizes and has no weights: give the folder or the GGUF file of a checkpoint, or ask "
            "for random weights"
        )
    from nanoflow_jax.checkpoints.orbax_items import restore_parameters  # importing Orbax is slow, and few need it

    return restore_parameters(source.converted, source.config, layout, mesh, dtype, progress)

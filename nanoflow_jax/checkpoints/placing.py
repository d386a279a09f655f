"""Parameters from checkpoint tensors: onto a mesh part by part, or whole on the host."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nanoflow_jax.checkpoints.layout import Recipe, Tensor, fitting_recipes, full_index, packed
from nanoflow_jax.checkpoints.relayout import plain_layout, plain_specs
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.models.decoder import parameter_specs
from nanoflow_jax.parallel import ParallelLayout

# Called with the name of the parameter that has just arrived, how many have, and how many there are.
Progress = Callable[[str, int, int], None]


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
    table = fitting_recipes(config, layout, tensors)
    specs = parameter_specs(config, layout)
    arrays = {}
    for done, (path, recipe) in enumerate(table.items(), start=1):
        shape = specs[path].shape
        sources = [tensors[name].read() for name in recipe.sources]
        part = functools.partial(_part, recipe, sources, shape, dtype)
        arrays[path] = jax.make_array_from_callback(shape, specs[path].sharding(mesh), part)
        if progress:
            progress(path, done, len(table))
    return arrays


def _part(
    recipe: Recipe, sources: Sequence[np.ndarray], shape: tuple[int, ...], dtype: jnp.dtype, index: Sequence[slice] | None
) -> np.ndarray:
    return packed(recipe.build(sources, full_index(shape, index)), dtype)


def plain_parameters(config: ModelConfig, tensors: Mapping[str, Tensor], dtype: jnp.dtype) -> Callable[[str], np.ndarray]:
    """A function from parameter path to host array in the plain layout, which reads only what it is asked for.

    Raises:
      CheckpointError: the tensors are not those of the model.
    """
    table = fitting_recipes(config, plain_layout(config), tensors)
    specs = plain_specs(config)

    def parameter(path: str) -> np.ndarray:
        sources = [tensors[name].read() for name in table[path].sources]
        return _part(table[path], sources, specs[path].shape, dtype, None)

    return parameter

"""Parameters from checkpoint tensors onto a mesh, one at a time, each rank's part from its slice of the tensors."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from nanoflow_jax.checkpoints.layout import Recipe, Tensor, bits, fitting_recipes, full_index
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.models.decoder import ParameterSpec, parameter_specs
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
    """Parameter path -> array on the mesh.

    Raises:
      CheckpointError: the tensors are not those of the model.
    """
    read = parameter_reader(config, layout, mesh, dtype, tensors)
    specs, arrays = parameter_specs(config, layout), {}
    for path in specs:
        arrays[path] = read(path)
        if progress:
            progress(path, len(arrays), len(specs))
    return arrays


def parameter_reader(
    config: ModelConfig, layout: ParallelLayout, mesh: jax.sharding.Mesh, dtype: jnp.dtype, tensors: Mapping[str, Tensor]
) -> Callable[[str], jax.Array]:
    """A function from parameter path to array on the mesh, which reads only what it is asked for.

    Raises:
      CheckpointError: the tensors are not those of the model.
    """
    table, specs, dtype = fitting_recipes(config, layout, tensors), parameter_specs(config, layout), jnp.dtype(dtype)

    @functools.cache
    def finish(axes: tuple[int, ...], sharding: jax.sharding.NamedSharding) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(lambda stored: stored.transpose(axes).astype(dtype), out_shardings=sharding)

    def read(path: str) -> jax.Array:
        recipe, spec = table[path], specs[path]
        stored = _place_stored(recipe, spec, mesh, [tensors[name].read() for name in recipe.sources])
        in_order = stored.dtype == dtype and recipe.axes == tuple(range(stored.ndim))
        # Waiting keeps the host from running ahead with copies of tensors that the device has not taken yet.
        return jax.block_until_ready(stored if in_order else finish(recipe.axes, spec.sharding(mesh))(stored))

    return read


def _place_stored(recipe: Recipe, spec: ParameterSpec, mesh: jax.sharding.Mesh, sources: Sequence[np.ndarray]) -> jax.Array:
    """The parameter in stored type and order of axes, divided like the finished one."""
    dtype = sources[0].dtype
    stored = ParameterSpec(recipe.stored_order(spec.shape), recipe.stored_order(spec.partition))
    arrays = [bits(source) for source in sources]

    def part(index: Sequence[slice] | None) -> np.ndarray:
        built = recipe.build(arrays, full_index(stored.shape, index))
        # A view is copied, because jax may keep the memory that it is given, and this may be a mapped file.
        return (built if built.flags.owndata else built.copy(order="C")).view(dtype)

    return jax.make_array_from_callback(stored.shape, stored.sharding(mesh), part)

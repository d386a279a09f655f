"""Saving and restoring the items of a converted folder with Orbax. Apart from the rest because importing Orbax is slow."""

from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from nanoflow_jax.checkpoints.converted_folder import item_folder, items
from nanoflow_jax.checkpoints.layout import CheckpointError
from nanoflow_jax.checkpoints.placing import Progress
from nanoflow_jax.checkpoints.relayout import plain_specs, replicate_kv_heads
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.models.decoder import ParameterSpec, parameter_specs
from nanoflow_jax.parallel import ParallelLayout

# A rank reads the chunks that its part touches: chunks well below a part keep that close to the part itself.
_CHUNK_BYTES = 16 << 20


def save_item(folder: Path, item: str, arrays: Mapping[str, jax.Array]) -> None:
    """Writes one item; `arrays` maps parameter paths to arrays in the plain layout."""
    tree = {_attribute(path): array for path, array in arrays.items()}
    save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tree}
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(item_folder(folder, item), args=ocp.args.PyTreeSave(tree, save_args=save_args))


def restore_parameters(
    folder: Path,
    config: ModelConfig,
    layout: ParallelLayout,
    mesh: jax.sharding.Mesh,
    dtype: jnp.dtype,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Parameter path -> array, read by each device straight into its part.

    The vocabulary is padded while it is read. Where KV heads are held by several ranks, `qkv_proj` of one layer at a time is
    read whole by every device and cut there.

    Raises:
      CheckpointError: an item is missing or torn, or does not hold the model's parameters.
    """
    num_items = len(list((folder / "weights").glob("*")))
    if num_items != config.num_layers + 1:
        raise CheckpointError(f"{folder}: weights has {num_items} items, expected {config.num_layers} layers and the ends")
    specs, plain = parameter_specs(config, layout), plain_specs(config)
    arrays: dict[str, jax.Array] = {}
    with ocp.PyTreeCheckpointer() as checkpointer:
        for item, paths in items(specs).items():
            place = item_folder(folder, item)
            try:
                _check_shapes(checkpointer, place, {_attribute(path): plain[path].shape for path in paths})
                targets = {_attribute(path): (plain[path], specs[path]) for path in paths}
                restored = _restore_item(checkpointer, place, targets, mesh, dtype)
            except CheckpointError:
                raise
            except (ValueError, OSError, KeyError, TypeError) as error:
                raise CheckpointError(f"{place}: cannot be restored: {error}") from error
            arrays |= {path: restored[_attribute(path)] for path in paths}
            if progress:
                progress(paths[-1], len(arrays), len(specs))
    return arrays


def _attribute(path: str) -> str:
    return path.rpartition(".")[2]


def _check_shapes(checkpointer: ocp.PyTreeCheckpointer, place: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    if not place.is_dir():
        raise CheckpointError(f"{place}: no such item")
    saved = checkpointer.metadata(place).item_metadata
    if saved is None:
        raise CheckpointError(f"{place}: not an Orbax checkpoint")
    shapes = {name: tuple(array.shape) for name, array in saved.tree.items()}
    if shapes != dict(expected):
        raise CheckpointError(f"{place}: holds {shapes}, expected {dict(expected)}")


def _restore_item(
    checkpointer: ocp.PyTreeCheckpointer,
    place: Path,
    targets: Mapping[str, tuple[ParameterSpec, ParameterSpec]],
    mesh: jax.sharding.Mesh,
    dtype: jnp.dtype,
) -> dict[str, jax.Array]:
    """`targets` gives the plain spec and the wanted one of every parameter of the item."""
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def restore_args(name: str, plain: ParameterSpec, wanted: ParameterSpec) -> ocp.ArrayRestoreArgs:
        if _has_replicas(name, plain, wanted):
            return ocp.ArrayRestoreArgs(sharding=replicated, global_shape=plain.shape, dtype=dtype)
        # Not strict: vocabulary and feed-forward width are continued with zeros.
        return ocp.ArrayRestoreArgs(sharding=wanted.sharding(mesh), global_shape=wanted.shape, dtype=dtype, strict=False)

    args = {name: restore_args(name, *specs) for name, specs in targets.items()}
    structs = {name: jax.ShapeDtypeStruct(arg.global_shape, dtype) for name, arg in args.items()}
    arrays = checkpointer.restore(place, args=ocp.args.PyTreeRestore(structs, restore_args=args))
    for name, (plain, wanted) in targets.items():
        if _has_replicas(name, plain, wanted):
            replicas = (plain.shape[-2] - 2) // (wanted.shape[-2] - 2)
            relayout = jax.jit(replicate_kv_heads, static_argnums=1, out_shardings=wanted.sharding(mesh))
            arrays[name] = relayout(arrays[name], replicas)
    return arrays


def _has_replicas(name: str, plain: ParameterSpec, wanted: ParameterSpec) -> bool:
    return name in ("qkv_proj", "qkv_bias") and plain.shape != wanted.shape

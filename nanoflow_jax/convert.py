"""Converts a checkpoint to a folder that restores onto a mesh without work on the host.

    python -m nanoflow_jax.convert SRC DST [--dtype bfloat16]

The folder holds the weights as Orbax checkpoints in a layout that fits any number of ranks, and the tokenizer.
"""

import argparse
import sys
from pathlib import Path

import jax.numpy as jnp
from tqdm import tqdm

from nanoflow_jax.checkpoints.converted_folder import items, new_folder, write_manifest
from nanoflow_jax.checkpoints.layout import CheckpointError
from nanoflow_jax.checkpoints.load import weight_dtype
from nanoflow_jax.checkpoints.orbax_items import save_item
from nanoflow_jax.checkpoints.placing import Progress, parameter_reader
from nanoflow_jax.checkpoints.relayout import plain_layout, plain_specs
from nanoflow_jax.checkpoints.sources import open_source
from nanoflow_jax.parallel import make_mesh
from nanoflow_jax.tokenizer import ChatTemplateError, TokenizerError


def convert(
    source: str,
    destination: Path,
    dtype: jnp.dtype | str = "bfloat16",
    progress: Progress | None = None,
    models_dir: Path | None = None,
) -> None:
    """Writes `source`, as in `load_model`, to the new folder `destination`; holds one layer in memory at a time.

    The destination appears when it is complete and not before.

    Raises:
      CheckpointError: the source cannot be loaded or is converted already, or the destination exists.
    """
    dtype = weight_dtype(dtype)
    opened = open_source(source, models_dir)
    if opened.tensors is None:
        raise CheckpointError(f"{opened.description}: there are no weights to convert")
    read = parameter_reader(opened.config, plain_layout(opened.config), make_mesh(1), dtype, opened.tensors())
    specs, done = plain_specs(opened.config), 0
    with new_folder(destination) as folder:
        for item, paths in items(specs).items():
            save_item(folder, item, {path: read(path) for path in paths})
            done += len(paths)
            if progress:
                progress(item, done, len(specs))
        if opened.tokenizer is not None:
            opened.tokenizer.save(folder)
        write_manifest(folder, opened.config)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nanoflow_jax.convert", description="Converts a checkpoint to Orbax.")
    parser.add_argument("source", help="Hugging Face folder, GGUF file, or smollm2")
    parser.add_argument("destination", type=Path, help="folder to make")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"), help="type of the weights")
    parser.add_argument("--models-dir", type=Path, help="where smollm2 is kept; default: in the user's cache directory")
    arguments = parser.parse_args()
    with tqdm(unit="parameter", desc="converting") as bar:

        def progress(_item: str, done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        try:
            convert(arguments.source, arguments.destination, arguments.dtype, progress, arguments.models_dir)
        except (CheckpointError, TokenizerError, ChatTemplateError) as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

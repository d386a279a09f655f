"""Runs Mosaic GPU kernels on the CPU: jax's GPU interpreter, traced as if for an H200, with its race detector on."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

# The interpreter is private up to jax 0.10.2 and in part public from 0.11: this is the only place that imports it.
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as _interpreter
from jax._src.pallas.mosaic_gpu.interpret import params as _params

from pallas_kernels import _mosaic

_DEVICE = jax.sharding.AbstractDevice(_mosaic.INTERPRETED, 132, "gpu")
_MESH = jax.sharding.AbstractMesh((), (), abstract_device=_DEVICE)


@contextlib.contextmanager
def interpreted(*, zero_fill: bool = False, detect_races: bool = True) -> Iterator[None]:
    """Kernels traced and run inside are interpreted. Memory starts as NaN, so reading what nothing wrote shows.

    `zero_fill` gives copies that reach past the end of an array zeros there, as the TMA does, and then all memory starts as
    zero; without it such a copy raises IndexError. Compiled functions remember how they were traced: jit inside.

    Raises:
      AssertionError: the last kernel run inside had a data race between warpgroups or TMA copies of a CTA. The interpreter
        runs CTAs one after the other and knows no semaphores, so it cannot judge data that CTAs hand to each other: from jax
        0.11 on it takes that for a race, and `detect_races=False` is for kernels that do so.
    """
    beyond: dict[str, Any] = {"out_of_bounds_reads": "uninitialized_value", "uninitialized_memory": "zero"} if zero_fill else {}
    params = _params.InterpretGPUParams(detect_races=detect_races, **beyond)
    try:
        with jax.sharding.use_abstract_mesh(_MESH), _params.force_gpu_interpret_mode(params):
            yield
    except Exception:
        _interpreter.reset_gpu_interpret_mode_state()  # a failed kernel leaves its memory behind
        raise
    assert not detect_races or not _interpreter.get_races().races_found, (
        "data race in an interpreted kernel; see standard output"
    )

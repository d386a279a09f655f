"""Compiled programs as the benchmarks and the profiler use them: compiled side by side, run back to back, inputs from HBM."""

import functools
import math
import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import metadata
from typing import Any, TypeVar

import jax

L2_BYTES = 60e6
"""Upper bound of the L2 cache of a Hopper GPU."""

IN_FLIGHT = 3

Key = TypeVar("Key", bound=Hashable)


def copies_beyond_l2(set_bytes: float, *, most: int) -> int:
    """Input sets of `set_bytes` each, two or more and at most `most`, that make a rotation miss the L2 cache."""
    return min(most, max(2, math.ceil(3 * L2_BYTES / set_bytes)))


def compile_side_by_side(
    lowered: Mapping[Key, Callable[[], jax.stages.Lowered]],
    compiler_options: dict[str, Any] | None = None,
    *,
    threads: int | None = None,
) -> tuple[dict[Key, jax.stages.Compiled], dict[Key, Exception]]:
    """Executables, and what went wrong with the others.

    Lowering is Python and takes turns; XLA compiles the programs before meanwhile, in `threads`, by default one a core.
    """
    ready: dict[Key, jax.stages.Compiled] = {}
    errors: dict[Key, Exception] = {}
    compiling: dict[Key, Future[jax.stages.Compiled]] = {}
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for key, lower in lowered.items():
            try:
                compiling[key] = pool.submit(lower().compile, compiler_options)
            except Exception as error:  # belongs to this program; the others still run
                errors[key] = error
    for key, future in compiling.items():
        try:
            ready[key] = future.result()
        except Exception as error:
            errors[key] = error
    return ready, errors


def run_back_to_back(run: Callable[[], Any], more: Callable[[int], bool]) -> int:
    """Launches `run` while `more` of the launches so far, and returns their number when all have ended.

    At most three are in flight: the device never idles, and few results are alive at a time.
    """
    flying: list[Any] = []
    launched = 0
    while more(launched):
        flying.append(run())
        launched += 1
        if len(flying) == IN_FLIGHT:
            jax.block_until_ready(flying.pop(0))
    jax.block_until_ready(flying)
    return launched


@functools.cache
def versions() -> dict[str, str]:
    """Of jax and what it compiles with."""
    names = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin")
    found = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return {name: found[name] for name in names if name in found}

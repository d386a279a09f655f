"""Runs a function on a GPU stream of its own, inside one compiled program."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import compute_on

# XLA spreads its own asynchronous work over streams 0 to 3.
COMPUTE_STREAM, MEMORY_STREAM = 5, 6


def on_stream(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, asynchronous on the GPU stream `number`. Needs jax 0.11 or newer."""
    transform: Any = compute_on.compute_on
    return transform(function, compute_type=f"gpu_stream:{number}", out_memory_spaces=jax.memory.Space.Device)

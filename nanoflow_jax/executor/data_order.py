"""Order as data, for CUDA graphs: XLA lets a graph's kernels wait for what they read and write, and for nothing else.

Barriers and the order of kernels on a stream are lost there. Yet they are what a plan's budgets rest on: of two persistent
kernels that together claim more SMs than there are, one gets fewer than it has CTAs, and where CTAs of a kernel wait for each
other neither might end. So kernels that must come later read something that was made from the results of those before.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from nanoflow_jax.operations import StepInputs


def not_before(step: StepInputs, results: Sequence[Array]) -> StepInputs:
    """`step` with the same values, which do not exist before all of `results` do.

    They are the counts that our kernels read before anything else, of tokens and of the cache's, and the slots, by which
    experts count theirs. A count is no less than 0 and a slot no less than -1, so the larger of it and of what is at most that
    is the same; XLA does not know, or it would leave out what has no effect. Writes of the pool are not held back: their
    CTAs wait for none. Nor is what has few CTAs.
    """
    some = functools.reduce(jnp.maximum, [_some_of(result) for result in results])

    def after(counts: Array, least: int = 0) -> Array:
        return jnp.maximum(counts, jnp.minimum(some, least))

    return dataclasses.replace(
        step,
        used_tokens=after(step.used_tokens),
        decode_kv_lens=after(step.decode_kv_lens),
        kv_lens=after(step.kv_lens),
        slots=after(step.slots, least=-1),
    )


def _some_of(result: Array) -> Int[Array, ""]:
    """A number made from the first element, whatever that is: results of padding are undefined."""
    first = lax.slice(result, (0,) * result.ndim, (1,) * result.ndim).reshape(())
    bits = lax.bitcast_convert_type(first, {2: jnp.int16, 4: jnp.int32}[first.dtype.itemsize])
    return bits.astype(jnp.int32)

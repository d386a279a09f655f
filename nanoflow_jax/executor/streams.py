"""Runs a function on a GPU stream of its own, inside one jitted step."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util

from nanoflow_jax.plan import Resource
from pallas_kernels import streams

# Collectives are asynchronous by themselves.
_STREAM_OF = {Resource.COMPUTE: streams.COMPUTE_STREAM, Resource.MEMORY: streams.MEMORY_STREAM}
# Primitives that call a jaxpr in one of their parameters and mean no more than its equations.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}


def on_stream(resource: Resource, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function` of one pytree, asynchronous on the stream of its resource. Needs jax 0.11 or newer."""
    if resource not in _STREAM_OF:
        return function
    return streams.on_stream(_STREAM_OF[resource], _without_calls(function))


def where_it_is(_: Resource, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function` itself, in the place of `on_stream`."""
    return function


def _without_calls(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`function` without jitted functions in it (many of jax.numpy are): XLA cannot place a call within a call on a stream."""

    def inlined(argument: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(argument)
        results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(argument))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return inlined


def _evaluate(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [value(atom) for atom in equation.invars]
        called = equation.params.get(_CALLS.get(equation.primitive.name, ""))
        # Names of scopes within the function would be lost, by which a profile is read.
        source = equation.source_info
        name_stack = source_info_util.current_name_stack() + source.name_stack
        with source_info_util.user_context(source.traceback, name_stack=name_stack):
            if called is not None:
                results = _evaluate(called.jaxpr, called.consts, inputs)
            else:
                results = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
                results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]

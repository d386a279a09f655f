"""How benchmarks and the profiler compile and run programs, on the CPU."""

import functools
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import programs


def test_programs_compile_side_by_side_and_fail_alone() -> None:
    """Two compilations that wait for each other end only if they run at once."""
    met = threading.Barrier(2, timeout=20)
    asked = []

    def lowered(key: str) -> Any:
        if key == "unlowered":
            raise ValueError("cannot be lowered")

        def compile_it(options: Any) -> str:
            asked.append(options)
            if key == "uncompiled":
                raise RuntimeError("cannot be compiled")
            met.wait()
            return key.upper()

        return types.SimpleNamespace(compile=compile_it)

    lower = {key: functools.partial(lowered, key) for key in ("a", "unlowered", "uncompiled", "b")}
    ready, errors = programs.compile_side_by_side(lower, {"an option": True}, threads=2)
    assert ready == {"a": "A", "b": "B"}
    assert {key: repr(error) for key, error in errors.items()} == {
        "unlowered": "ValueError('cannot be lowered')",
        "uncompiled": "RuntimeError('cannot be compiled')",
    }
    assert asked == [{"an option": True}] * 3


def test_programs_compile_without_options() -> None:
    x = jnp.arange(4.0)
    ready, errors = programs.compile_side_by_side({2: functools.partial(jax.jit(jnp.square).lower, x)})
    assert not errors
    assert ready[2](x).tolist() == [0, 1, 4, 9]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
def test_three_runs_are_in_flight_and_the_oldest_is_waited_for(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, waited, most = [], [], 0

    def run() -> int:
        nonlocal most
        launched.append(len(launched))
        most = max(most, len(launched) - len(waited))
        return launched[-1]

    def block_until_ready(result: int | list[int]) -> None:
        waited.extend([result] if isinstance(result, int) else result)

    monkeypatch.setattr(programs, "jax", types.SimpleNamespace(block_until_ready=block_until_ready))
    assert programs.run_back_to_back(run, lambda n: n < count) == count
    assert launched == waited == list(range(count))
    assert most == min(count, 3)


@given(st.floats(1e3, 1e10), st.integers(2, 32))
def test_copies_are_beyond_the_l2_cache_as_far_as_they_may(set_bytes: float, most: int) -> None:
    copies = programs.copies_beyond_l2(set_bytes, most=most)
    assert 2 <= copies <= most
    assert copies == most or copies * set_bytes >= 3 * programs.L2_BYTES
    assert copies == 2 or (copies - 1) * set_bytes < 3 * programs.L2_BYTES

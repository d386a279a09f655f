"""The profiler's programs on a CPU and for an H200."""

import functools
import json
import subprocess
import sys
import tempfile
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax.executor.streams import where_it_is
from nanoflow_jax.kernels import REFERENCE
from nanoflow_jax.parallel import make_mesh
from pallas_kernels import reference
from search import profiler_programs
from search.measurement import Alone, Load, Program, Together
from search.profile_table import Kernel
from tests.kernels.aot import child_environment


def _on_cpu(program: Program, load: Load, ranks: int = 1) -> Any:
    mesh = make_mesh(ranks)
    bench = profiler_programs.Workbench(mesh, kernels_for=lambda _: REFERENCE, annotate=where_it_is, options=None)
    arguments = profiler_programs.Inputs(mesh).arguments(program, load)
    return bench.trace(program).lower().compile()(*arguments), arguments


@pytest.fixture(autouse=True)
def _small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler_programs, "_POOL_BYTES", 1 << 16)
    monkeypatch.setattr(profiler_programs, "repeats", lambda program: 3)


@pytest.mark.parametrize(
    ("kernel", "load"),
    [
        (Kernel(name="gemm", shape=(64, 128)), Load()),
        (Kernel(name="swiglu_gemm", shape=(64, 128)), Load()),
        (Kernel(name="experts", shape=(4, 2, 64, 32)), Load()),
        (Kernel(name="decode_attention", shape=(2, 2, 64)), Load(context=100, rows=77)),
        (Kernel(name="prefill_attention", shape=(2, 2, 64)), Load(context=64)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_programs_call_their_kernel_on_inputs_that_fit(kernel: Kernel, load: Load) -> None:
    program = Alone(kernel=kernel, tokens=256, num_sms=16, max_context=128 if load.context else 0)
    outs, (sets,) = _on_cpu(program, load)
    assert len(outs) == 3
    function = profiler_programs.Workbench(make_mesh(1), kernels_for=lambda _: REFERENCE)._function(program)
    for i, out in enumerate(outs):
        expected = np.asarray(function(*sets[i % len(sets)]), np.float32)
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.02)
        assert float(jnp.abs(out).max()) > 0
    if kernel.name == "decode_attention":
        assert not np.asarray(outs[0][77:], np.float32).any()
        assert np.asarray(outs[0][:77], np.float32).any(axis=(1, 2, 3)).all()


def test_a_pair_runs_all_of_both_sides() -> None:
    gemm = Alone(kernel=Kernel(name="gemm", shape=(64, 128)), tokens=256, num_sms=100)
    attention = Alone(kernel=Kernel(name="decode_attention", shape=(2, 2, 64)), tokens=128, num_sms=32, max_context=128)
    (outs, last), (sets, other) = _on_cpu(Together(gemm=gemm, calls=3, other=attention), Load(context=128, rows=9))
    assert last == ()
    assert [len(phase) for phase in outs] == [4, 4, 4]
    assert len({id(one[1]) for one in sets}) >= 3, "weights in turn"
    for i, phase in enumerate(outs):
        for j in range(3):
            x, w = sets[(3 * i + j) % len(sets)]
            np.testing.assert_array_equal(np.asarray(phase[j]), np.asarray(reference.gemm(x, w)))
        np.testing.assert_allclose(
            np.asarray(phase[3], np.float32), np.asarray(reference.decode_attention(*other), np.float32), atol=0.02
        )


def test_collectives_run_on_all_ranks() -> None:
    reduce, gather = (Alone(kernel=Kernel(name=n, shape=(4, 64)), tokens=128, num_sms=32) for n in ("all_reduce", "all_gather"))
    (x,), (((given,),),) = _on_cpu(reduce, Load(), ranks=4)
    np.testing.assert_allclose(np.asarray(x, np.float32), 64 * np.asarray(given, np.float32))  # three times over four ranks
    outs, (((part,),),) = _on_cpu(gather, Load(), ranks=4)
    assert part.shape == (128, 16)
    np.testing.assert_array_equal(np.asarray(outs[2]), np.tile(np.asarray(part), (1, 4)))
    gemm = Alone(kernel=Kernel(name="gemm", shape=(64, 128)), tokens=256, num_sms=100)
    (outs, (x,)), (sets, (given,)) = _on_cpu(Together(gemm=gemm, calls=2, other=reduce), Load(), ranks=4)
    np.testing.assert_allclose(np.asarray(x, np.float32), 64 * np.asarray(given, np.float32))
    np.testing.assert_array_equal(np.asarray(outs[1][0]), np.asarray(reference.gemm(*sets[2 % len(sets)])))


@given(st.integers(1, 2048), st.integers(64, 1024))
def test_prompts_see_the_context_on_average(tokens: int, context: int) -> None:
    kv_lens, starts, q_lens = profiler_programs.prefill_lengths(tokens, float(context))
    assert q_lens.sum() == tokens
    assert (q_lens <= kv_lens).all() and kv_lens.max() <= 2 * context
    assert (starts[q_lens > 0] == np.cumsum(q_lens)[q_lens > 0] - q_lens[q_lens > 0]).all()
    seen = sum(float(kv - q) * q + q * (q + 1) / 2 for kv, q in zip(kv_lens.tolist(), q_lens.tolist(), strict=True))
    assert seen / tokens == pytest.approx(context, abs=1.5)


@functools.cache
def compiled_for_h200() -> dict[str, Any]:
    environment = child_environment()
    with tempfile.TemporaryDirectory() as dump:
        environment["XLA_FLAGS"] = f"--xla_dump_to={dump}/xla"
        command = [sys.executable, "-m", "tests.search.h200_profile", f"{dump}/xla"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.aot
def test_programs_of_every_kind_compile_for_h200() -> None:
    found = compiled_for_h200()
    kinds = {name.split(" ", 1)[1].split(" beside ")[0].split(" ")[0] for name in found}
    assert kinds == {"gemm", "swiglu_gemm", "decode_attention", "prefill_attention", "all_reduce", "all_gather"}
    for name, program in found.items():
        assert program["kernels"] + program["collectives"] >= 4, name
        # One copy of an all-reduce's first argument; anything else would be timed along.
        assert program["copies"] <= ("all_reduce" in name), (name, program)


@pytest.mark.aot
def test_pairs_are_in_flight_together() -> None:
    pairs = {name: program for name, program in compiled_for_h200().items() if " beside " in name}
    assert len(pairs) == 4
    for name, program in pairs.items():
        lanes = "compute+network" if "all_reduce" in name else "compute+memory"
        assert program["pairs"].get(lanes, 0) >= 4, (name, program)
    assert not any(program["pairs"] for name, program in compiled_for_h200().items() if " beside " not in name)

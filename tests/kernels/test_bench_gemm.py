"""The benchmark of GEMMs whose rows in use are data, on the CPU with the reference in the kernel's place."""

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _mosaic, reference
from pallas_kernels.bench import __main__ as command
from pallas_kernels.bench import gemm as cases
from pallas_kernels.bench import timing

_TINY = cases.Projection(name="tiny", k=32, n=16)
_SWIGLU = cases.Projection(name="tiny swiglu", k=32, n=16, swiglu=True)
_LOGITS = cases.Projection(name="tiny logits", k=32, n=48, out_dtype="float32")


def _stand_in(monkeypatch: pytest.MonkeyPatch, wrong: bool = False) -> None:
    """The reference, with NaN in rows that are not in use; or, if `wrong`, in one that is."""

    def gemm(a, b, *, swiglu, rows=None, out_dtype, num_sms, config):
        out = reference.gemm(a, b, swiglu=swiglu, out_dtype=out_dtype)
        if rows is None:
            return out
        return jnp.where(jnp.arange(a.shape[0])[:, None] < rows - int(wrong), out, jnp.nan)

    monkeypatch.setattr(cases, "gemm", gemm)
    monkeypatch.setattr(cases, "_OPTIONS", {"cublas": {}})
    monkeypatch.setattr(timing, "copies_beyond_l2", lambda _: 2)


def _jobs(monkeypatch: pytest.MonkeyPatch, projection: cases.Projection, *parts: float, m: int = 128) -> list[cases.Job]:
    """What the benchmark asks to be measured for `m` rows and `parts` of them."""
    asked: list[cases.Job] = []
    monkeypatch.setattr(cases, "measure", lambda jobs, **_: asked.extend(jobs) or [])
    monkeypatch.setattr(cases, "PROJECTIONS", (projection,))
    assert list(cases.benchmark("gemm", [132], rows=(m,), rows_in_use=parts)) == []
    return asked


@pytest.mark.parametrize("projection", [_TINY, _SWIGLU, _LOGITS], ids=lambda p: p.name)
def test_every_variant_is_right_in_the_rows_in_use(projection, monkeypatch):
    _stand_in(monkeypatch)
    monkeypatch.setattr(timing, "take_turns", lambda chains, inputs, **_: dict.fromkeys(chains, 1e-6))
    for job in _jobs(monkeypatch, projection, 0.5, 1.0):
        prepared = cases._prepare(job, contextlib.nullcontext())
        assert not prepared.errors
        assert cases._measure(job, prepared) == dict.fromkeys(("cublas", "in use", "all", "just"), 1e-6)
        outs = {name: chain.run(prepared.inputs())[0] for name, chain in prepared.chains.items()}
        assert {name: out.shape[0] for name, out in outs.items()} == {
            "cublas": 128,
            "in use": 128,
            "all": 128,
            "just": job.in_use,
        }
        assert all(out.dtype == projection.out_dtype for out in outs.values())


def test_rows_in_use_are_whole_blocks_near_their_part(monkeypatch):
    found = {}
    for m in (64, 384, 1024):
        found[m] = [job.in_use for job in _jobs(monkeypatch, _TINY, 0.01, 0.5, 0.9, 1.0, m=m)]
    assert found == {64: [64], 384: [64, 192, 320, 384], 1024: [64, 512, 896, 1024]}


def test_a_wrong_row_in_use_is_found(monkeypatch):
    _stand_in(monkeypatch, wrong=True)
    monkeypatch.setattr(timing, "take_turns", lambda chains, inputs, **_: dict.fromkeys(chains, 1e-6))
    (job,) = _jobs(monkeypatch, _TINY, 0.5)
    assert "relative error" in cases._measure(job, cases._prepare(job, contextlib.nullcontext()))["in use"]


def test_rows_in_use_stand_beside_all_rows_and_just_those(monkeypatch, capsys):
    def measure(jobs, *, workers):
        for job in jobs:
            yield job, {"cublas": 144e-6, "all": 128e-6, "in use": 1e-6 * job.in_use, "just": 32e-6}

    monkeypatch.setattr(command._mosaic, "require_hopper", lambda *_: _mosaic.Device("NVIDIA H200", 132))
    monkeypatch.setattr(cases, "measure", measure)
    command.main(["gemm", "--rows", "128", "--names", "8b qkv,logits", "--rows-in-use", "0.5,1"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["kernel"], row["case"].split()[-1]) for row in rows[:4]] == [
        ("gemm in use / all", "64/128x4096x6144"),
        ("gemm in use / just", "64/128x4096x6144"),
        ("gemm in use / all", "128/128x4096x6144"),
        ("gemm in use / just", "128/128x4096x6144"),
    ]
    np.testing.assert_allclose([row["baseline_seconds"] / row["seconds"] for row in rows[:4]], [2, 0.5, 1, 0.25])
    qkv, logits = rows[0], rows[4]
    assert qkv["flops"] == 2 * 64 * 4096 * 6144
    assert qkv["hbm_bytes"] == 2 * (64 * 4096 + 4096 * 6144 + 64 * 6144)
    assert logits["case"].startswith("logits")
    assert logits["hbm_bytes"] == 2 * (64 * 4096 + 4096 * 128256) + 4 * 64 * 128256


def test_command_refuses_more_rows_than_there_are(monkeypatch, capsys):
    for text in ("0.5,1.5", "0", "half"):
        with pytest.raises(SystemExit):
            command.main(["gemm", "--rows-in-use", text])
        assert "--rows-in-use" in capsys.readouterr().err


def test_logits_run_where_they_are_named(monkeypatch):
    asked: list[cases.Job] = []
    monkeypatch.setattr(cases, "measure", lambda jobs, **_: asked.extend(jobs) or [])
    list(cases.benchmark("gemm", [132], rows=(64,)))
    assert cases.LOGITS not in [job.projection for job in asked]
    asked.clear()
    list(cases.benchmark("gemm", [132], rows=(64,), names="logits"))
    (job,) = asked
    assert job.projection == cases.LOGITS
    a, b = jax.eval_shape(lambda: cases._inputs(job))[0]
    assert jax.eval_shape(cases._function(job, cases.Variant("cublas")), a, b).dtype == jnp.float32

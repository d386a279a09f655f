"""The benchmark of GEMMs beside decode attention, and the tuner that uses it: on the CPU, with kernels or times made up."""

import dataclasses
import functools
import json
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels import _mosaic, reference, tune
from pallas_kernels._tuning import GemmConfig
from pallas_kernels.bench import __main__ as command
from pallas_kernels.bench import attention, beside, timing
from pallas_kernels.bench import gemm as cases
from tests.kernels import aot, paged

_TINY = cases.Projection(name="tiny", k=256, n=512)


def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small projection and small attention, and phases of four GEMMs."""
    decode = attention.Decode(name="tiny", rows=64, mean_kv_len=32, kv_heads=2, group=2, page_size=16, head_dim=16)
    monkeypatch.setattr(beside, "PROJECTIONS", (_TINY,))
    monkeypatch.setattr(beside, "DECODE", decode)
    monkeypatch.setattr(beside, "_PHASE_SECONDS", 4 * _TINY.flops(512) / (100 * beside._FLOPS_PER_SM))


def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain reference in the place of the kernels, on no streams, two phases a program."""
    monkeypatch.setattr(beside, "gemm", lambda a, b, *, swiglu, num_sms, config=None: reference.gemm(a, b, swiglu=swiglu))
    monkeypatch.setattr(beside, "decode_attention", lambda *args, num_sms: reference.decode_attention(*args))
    monkeypatch.setattr(beside, "on_stream", lambda number, f: f)
    monkeypatch.setattr(beside, "PHASES", 2)


def test_phases_hold_all_gemms_and_attention_of_the_rows_asked_for(monkeypatch):
    _tiny(monkeypatch)
    _stand_in(monkeypatch)
    case = beside.Case(_TINY, 512, 100, 32)
    sets, attend = beside._gemm_sets(case), beside._attention_set()
    inputs = beside.with_rows([*sets, attend], 5)
    outs = jax.jit(beside.phases(case, GemmConfig(tile_m=128, tile_n=128)))(inputs)
    assert [len(products) for products, _ in outs] == [4, 4]
    wanted = reference.decode_attention(*attend)
    for i, (products, attended) in enumerate(outs):
        for j, product in enumerate(products):
            paged.assert_close(product, reference.gemm(*sets[(4 * i + j) % len(sets)]))
        paged.assert_close(attended[:5], wanted[:5])
        assert not attended[5:].any()


def test_beside_runs_what_it_compiles(monkeypatch):
    _tiny(monkeypatch)
    _stand_in(monkeypatch)
    monkeypatch.setattr(beside, "_OPTIONS", {})
    # More calls a phase than weights that suffice for a GEMM alone.
    monkeypatch.setattr(timing, "copies_beyond_l2", lambda _: 2)
    monkeypatch.setattr(timing, "steady_seconds", functools.partial(timing.steady_seconds, settle=0.0, measure=0.0))
    rows = list(beside.benchmark("beside", [132], rows=(512,), names="tiny", attention_sms=(32,)))
    assert rows[0].kernel == "beside chosen"
    assert all(row.seconds > 0 and row.baseline_seconds > 0 for row in rows)


def _modelled_us(key: tuple[Any, Any], attention_rows: int) -> float:
    """A call or phase: attention of 3 us and 2 us a row on all SMs; a GEMM of 40 us there, of 60 cut and 50 whole on fewer."""
    kind, which = key
    if kind == "attention":
        return 3 + 2 * attention_rows * 132 / which / (1 if which == 132 else 2)
    if isinstance(which, int):
        return 40
    gemms = kind.calls * (60 if beside._is_cut(kind, which) else 50)
    return max(1.2 * gemms, _modelled_us(("attention", kind.attention_sms), attention_rows)) if attention_rows else gemms


def test_beside_reports_the_amount_of_attention_that_gains_most(monkeypatch, capsys):
    def steady_seconds(chain: timing.Chain, sets: list[timing.Inputs]) -> float:
        *_, kv_lens = sets[-1]
        return 1e-6 * _modelled_us(chain.run, np.count_nonzero(kv_lens) if kv_lens.ndim == 1 else 0)  # pyright: ignore

    _tiny(monkeypatch)
    monkeypatch.setattr(command._mosaic, "require_hopper", lambda *_: _mosaic.Device("NVIDIA H200", 132))
    monkeypatch.setattr(timing, "compile_side_by_side", lambda lowered, _: {key: key for key in lowered})
    monkeypatch.setattr(timing, "steady_seconds", steady_seconds)
    command.main(["beside", "--names", "tiny", "--rows", "512", "--attention-sms", "32,24"])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["figures"]["gemm_sms"], row["figures"]["attention_sms"]) for row in rows[:: len(rows) // 2]] == [
        (100, 32),
        (108, 24),
    ]
    assert {row["kernel"] for row in rows} >= {"beside chosen", "beside cut"}
    for row in rows:
        found, cut = row["figures"], row["case"].endswith("cut")
        case = beside.Case(_TINY, 512, found["gemm_sms"], found["attention_sms"])
        assert found["gemm_us"] == pytest.approx(60 if cut else 50)
        together = {int(n): us for n, us in found["together_us"].items() if n != "0"}
        config = GemmConfig(**found["config"])
        gains = {n: (found["gemms"] * 40 + 3 + 2 * n) / _modelled_us((case, config), n) for n in together}
        best = max(gains, key=lambda n: gains[n])
        assert found["attention_rows"] == best
        assert row["baseline_seconds"] / row["seconds"] == pytest.approx(gains[best])
        assert row["seconds"] == pytest.approx(1e-6 * together[best])
        assert row["hbm_bytes"] == 2 * 2 * 2 * 16 * 32 * best  # K and V in bfloat16, 2 heads of 16, 32 tokens


def test_tuning_beside_keeps_what_gains_most(monkeypatch, tmp_path, capsys):
    def row(m: int, tile_n: int, gain: float) -> timing.Row:
        figures = {
            "m": m, "n": 512, "k": 256, "swiglu": False, "config": dataclasses.asdict(GemmConfig(tile_m=128, tile_n=tile_n)),
            "gemm_sms": 100, "attention_sms": 32, "gemm_us": 50.0,
        }  # fmt: skip
        return timing.Row(
            kernel="beside",
            case="tiny",
            num_sms=132,
            seconds=1.0,
            baseline="one by one",
            baseline_seconds=gain,
            figures=figures,
        )

    rows = [row(512, 64, 1.1), row(512, 128, 1.3), row(512, 192, 1.2), row(1024, 64, 0.9)]
    monkeypatch.setattr(beside, "benchmark", lambda *_, **given: iter(rows))
    monkeypatch.setattr(tune._mosaic, "require_hopper", lambda *_: _mosaic.Device("NVIDIA H200", 132))
    table = tmp_path / "h200.json"
    tune.main(["beside", "--rows", "512,1024", "--out", str(table)])
    entries = json.loads(table.read_text())["gemm"]
    assert [(e["m"], e["num_sms"], e["config"]["tile_n"], e["gain_beside"]) for e in entries] == [
        (512, 100, 128, {"32": 1.3}),
        (1024, 100, 64, {"32": 0.9}),
    ]
    assert len(capsys.readouterr().out.splitlines()) == 2
    for refused in (["--steady"], ["--num-sms", "132,100"]):
        with pytest.raises(SystemExit):
            tune.main(["beside", *refused, "--out", str(table)])
        assert "beside divides one number of SMs" in capsys.readouterr().err


@pytest.mark.parametrize("projection", cases.selected(cases.PROJECTIONS, beside.NAMES), ids=lambda p: p.name)
def test_variants_are_different_launches(projection, monkeypatch):
    monkeypatch.setattr(beside._mosaic, "target_device", lambda: _mosaic.Device("NVIDIA H200", 132))
    for m in beside.ROWS:
        case = beside.Case(projection, m, 100, 32)
        found = beside.variants(case)
        assert next(iter(found)) == "chosen"
        assert len(found) >= 2
        assert all(beside._is_cut(case, c) == (name == "cut") for name, c in found.items() if name in ("cut", "whole"))
        tables = [(c.tile_m, c.tile_n, beside._table(case, c).tobytes()) for c in found.values()]
        assert len(set(tables)) == len(tables)


def test_beside_refuses_shares_that_leave_no_sms():
    with pytest.raises(ValueError, match=r"attention_sms=\(32, 132\)"):
        next(beside.benchmark("beside", [132], attention_sms=(32, 132)))


def aot_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    (down,) = cases.selected(cases.PROJECTIONS, "8b down")
    case = beside.Case(down, 1024, 100, 32)
    arguments = [*beside.gemm_shapes(case), jax.eval_shape(beside._attention_set)]
    return {name: (beside.phases(case, config), (arguments,)) for name, config in beside.variants(case).items()}


@pytest.mark.aot
def test_pairs_compile_for_h200_on_streams_of_their_own():
    found = aot.resources(__name__)
    assert set(found) == {"chosen", "cut"}
    assert all(resources.spill_bytes == 0 for resources in found.values())

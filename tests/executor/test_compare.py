"""The comparison of modes, end to end on a small model on a CPU."""

import json

import numpy as np

from nanoflow_jax import compare
from tests.executor.plans import random_plan
from tests.model.test_golden import small_config


def test_every_mode_is_measured_beside_the_others(monkeypatch, tmp_path, capsys) -> None:
    rng = np.random.default_rng(0)
    plan = random_plan(rng, tp=1, moe=False, partition="none", b_dense=16, decode_tokens=8, tile=4, model="small")
    monkeypatch.setattr(compare, "preset", lambda _: small_config())
    monkeypatch.setattr(compare, "decode_plan", lambda _: plan)
    path = tmp_path / "plan.json"
    path.write_bytes(b"{}")
    compare.main([
        "--plan", str(path), "--layers", "2", "--fewer-layers", "1", "--context", "9", "--prompt", "5", "--page-size", "4",
        "--dtype", "float32", "--seconds", "0.01",
    ])  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert list(report["modes"]) == [f"{mode} (reference)" for mode in ("sequential", "nano", "xla", "streams")]
    assert all("error" not in times and times["step_ms"] > 0 for times in report["modes"].values())


def test_the_batch_is_the_plans_mix() -> None:
    rng = np.random.default_rng(0)
    plan = random_plan(rng, tp=1, moe=False, partition="none", b_dense=48, decode_tokens=13, tile=4)
    batch, num_pages = compare.steady_batch(small_config(), plan, context=30, prompt=16, page_size=4)
    assert int(batch.num_decode) == 13
    assert batch.q_lens[:16].tolist() == [1] * 13 + [16, 16, 3]
    assert batch.kv_lens[:16].tolist() == [30] * 13 + [16, 16, 3]
    assert batch.positions[:14].tolist() == [29] * 13 + [0]
    assert len(np.unique(batch.slots)) == 48
    assert batch.slots.min() >= 4
    used = np.unique(batch.block_tables)
    assert used.max() == num_pages - 1

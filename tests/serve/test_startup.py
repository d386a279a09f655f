"""What the options leave open is decided by the device: sizes of steps, mode and plans."""

import argparse
import types
from pathlib import Path

import pytest

import nanoflow_jax
from nanoflow_jax.config import preset
from nanoflow_jax.runtime.plan_choice import resolve_mode, shipped_plans
from serve.__main__ import _parser, engine_options
from serve.startup import runner_config

CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu")
H200 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")


def config_for(device: types.SimpleNamespace, *words: str):
    args: argparse.Namespace = _parser().parse_args(words)
    return runner_config(engine_options(args), device)


def test_sizes_are_the_device_s_unless_told() -> None:
    small, large = (config_for(device, "--model", "llama3-8b") for device in (CPU, H200))
    assert (small.b_dense, small.max_sequences, small.page_size) == (256, 64, 16)
    assert (large.b_dense, large.max_sequences, large.page_size) == (2048, 1024, 64)
    told = config_for(H200, "--model", "llama3-8b", "--b-dense", "512", "--page-size", "16", "--step-sizes", "64,256")
    assert (told.b_dense, told.max_sequences, told.page_size, told.step_sizes) == (512, 512, 16, (64, 256))


def test_auto_takes_shipped_plans_where_there_are_any() -> None:
    planned = config_for(H200, "--model", "llama3.1-8b", "--mode", "auto")
    assert planned.mode == "streams"
    assert planned.plans is not None
    assert planned.b_dense >= max(plan.b_dense for plan in planned.plans.plans)
    for device, model, tp in [(CPU, "llama3-8b", "1"), (H200, "llama2-7b", "1"), (H200, "llama3-8b", "2")]:
        other = config_for(device, "--model", model, "--tp", tp, "--mode", "auto")
        assert (other.mode, other.plans) == ("sequential", None)


def test_auto_executes_given_plans_as_the_device_can() -> None:
    plans = shipped_plans(preset("llama3-8b"), H200, 1)
    assert plans is not None
    assert resolve_mode("auto", plans, preset("llama3-8b"), CPU, 1) == ("nano", plans)
    assert resolve_mode("auto", plans, preset("llama3-8b"), H200, 1) == ("streams", plans)
    assert resolve_mode("fused", plans, preset("llama3-8b"), H200, 1) == ("fused", plans)


def test_who_gives_plans_wants_them_used() -> None:
    plan = str(Path(nanoflow_jax.__file__).parent / "plans" / "h200-llama3-8b-tp1.json")
    assert config_for(H200, "--model", "llama3-8b").mode == "sequential"
    assert config_for(H200, "--model", "llama3-8b", "--plan", plan).mode == "streams"
    assert config_for(CPU, "--model", "llama3-8b", "--plan", plan).mode == "nano"
    with pytest.raises(ValueError, match="'sequential' takes no plans; nano, xla, streams, fused do"):
        config_for(H200, "--model", "llama3-8b", "--plan", plan, "--mode", "sequential")


@pytest.mark.parametrize("words", [("--b-dense", "0"), ("--mode", "streams"), ("--step-sizes", "64,4096")])
def test_nonsense_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="RunnerConfig"):
        config_for(H200, "--model", "llama3-8b", *words)

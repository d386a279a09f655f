"""Pipelines by hand: valid, two phases a layer as executors see them, and refused where they make no sense."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax.config import preset
from nanoflow_jax.executor.phases import group
from nanoflow_jax.plan import TILE, PlanError, Resource
from nanoflow_jax.workload import BatchMix
from search.analytic import analytic_profile
from search.hand_pipeline import hand_pipeline
from search.hardware import hardware
from search.problem import Costing


def costing(b_dense: int, decode_tokens: int) -> Costing:
    model = preset("llama3-8b")
    mix = BatchMix(b_dense=b_dense, decode_tokens=decode_tokens, decode_context=1280.0, prefill_context=512.0)
    table = analytic_profile(model, hardware("h200"), 1, [mix])
    return Costing(model=model, table=table, mix=mix, partition="none")


@given(data=st.data(), tiles=st.integers(2, 16), sms=st.integers(1, 131))
def test_any_border_and_budget_make_a_valid_plan(data: st.DataObject, tiles: int, sms: int) -> None:
    b_dense = tiles * TILE
    decode_tokens = data.draw(st.integers(1, b_dense))
    border = TILE * data.draw(st.integers(1, tiles - 1))
    plan = hand_pipeline(costing(b_dense, decode_tokens), border, sms)  # validated inside
    for nano in plan.nano_operations:
        beside = plan.num_sms - sms if nano.resource is Resource.COMPUTE else sms
        assert nano.num_sms == beside or (nano.resource is Resource.COMPUTE and nano.num_sms == plan.num_sms)


@pytest.mark.parametrize(("b_dense", "decode_tokens", "border"), [(2048, 704, 768), (2048, 1024, 1024), (1024, 1024, 512)])
def test_executors_see_two_phases_a_layer(b_dense: int, decode_tokens: int, border: int) -> None:
    plan = hand_pipeline(costing(b_dense, decode_tokens), border, 40)
    assert 300 < plan.prediction.mean_power_w < 700.01, "no more than the cap"
    layers = 8
    phases = group(plan, layers)
    assert len(phases) <= 2 * layers + 3
    attention = [i for i, phase in enumerate(phases) if any(p.nano.operation == "decode_attention" for p in phase)]
    beside = [sum(p.nano.operation in ("gate_up_proj", "down_proj") for p in phases[i]) for i in attention]
    assert Counter(beside)[2] >= len(attention) - 2, "attention runs beside a feed-forward, but in the first and last layer"


@pytest.mark.parametrize(("border", "sms", "named"), [(0, 40, "border=0"), (2048, 40, "border=2048"), (1024, 132, "=132")])
def test_nonsense_is_refused(border: int, sms: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        hand_pipeline(costing(2048, 704), border, sms)


def test_a_border_inside_a_tile_is_refused() -> None:
    with pytest.raises(PlanError, match="tile"):
        hand_pipeline(costing(2048, 704), 1000, 40)

"""Pipelines by hand: valid, two phases a layer as executors see them, and refused where they make no sense."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax.config import preset
from nanoflow_jax.executor.phases import group
from nanoflow_jax.plan import TILE, Partition, PlanError, Resource, token_range
from nanoflow_jax.workload import BatchMix
from search.analytic import analytic_profile
from search.hand_pipeline import hand_pipeline
from search.hardware import hardware
from search.problem import GROUP_OF, Costing


def costing(b_dense: int, decode_tokens: int, tp: int = 1, partition: Partition = "none") -> Costing:
    model = preset("llama3-8b")
    mix = BatchMix(b_dense=b_dense, decode_tokens=decode_tokens, decode_context=1280.0, prefill_context=512.0)
    table = analytic_profile(model, hardware("h200"), tp, [mix])
    return Costing(model=model, table=table, mix=mix, partition=partition)


@given(data=st.data(), tiles=st.integers(2, 16), sms=st.integers(1, 131))
def test_any_border_and_budget_make_a_valid_plan(data: st.DataObject, tiles: int, sms: int) -> None:
    b_dense = tiles * TILE
    decode_tokens = data.draw(st.integers(1, b_dense))
    border = TILE * data.draw(st.integers(1, tiles - 1))
    plan = hand_pipeline(costing(b_dense, decode_tokens), border, sms)  # validated inside
    for nano in plan.nano_operations:
        beside = plan.num_sms - sms if nano.resource is Resource.COMPUTE else sms
        assert nano.num_sms == beside or (nano.resource is Resource.COMPUTE and nano.num_sms == plan.num_sms)


def _splits(start: int, stop: int) -> Iterator[Sequence[int]]:
    """Sizes of the nano-batches for every choice of cuts at tiles."""
    inner = range(start // TILE * TILE + TILE, stop, TILE)
    for chosen in itertools.product((False, True), repeat=len(inner)):
        cuts = [start, *itertools.compress(inner, chosen), stop]
        yield [b - a for a, b in itertools.pairwise(cuts)]


def _least_load_us(costing: Costing, count: dict[str, int] | None) -> float:
    """The busiest lane's least load, by trying all cuts: into `count` nano-batches per group, or into any number."""
    loads = dict.fromkeys(Resource, 0.0)
    graph = costing.graph()
    for name in dict.fromkeys(GROUP_OF[op.name] for op in graph):
        ops = [op for op in graph if GROUP_OF[op.name] == name]
        covered = token_range(ops[0].tokens, costing.mix.b_dense, costing.mix.decode_tokens)
        splits = [s for s in _splits(covered.start, covered.stop) if count is None or len(s) == count[name]]
        loads[ops[0].resource] += min(sum(costing.time_of(op.name, n) for op in ops for n in split) for split in splits)
    return max(loads.values())


@given(data=st.data(), tiles=st.integers(2, 6))
def test_bounds_are_those_of_all_cuts(data: st.DataObject, tiles: int) -> None:
    b_dense = tiles * TILE
    decode_tokens = data.draw(st.integers(1, b_dense))
    prices = costing(b_dense, decode_tokens)
    plan = hand_pipeline(prices, TILE * data.draw(st.integers(1, tiles - 1)), data.draw(st.integers(1, 131)))
    p, power = plan.prediction, prices.table.power
    assert power is not None
    count = {GROUP_OF[name]: len(parts) for name, parts in plan.nano_batches.items()}
    assert p.ideal_bound_us == pytest.approx(_least_load_us(prices, count), rel=1e-4)
    assert p.bound_counts == "none " + " ".join(f"{name}={n}" for name, n in count.items())
    joules = sum(prices.energy_of(n.operation, plan.batch_of(n).tokens) or 0.0 for n in plan.nano_operations)
    energy_us = 1e6 * joules / (power.cap_w - power.idle_w)
    assert p.lower_bound_us == pytest.approx(max(_least_load_us(prices, None), energy_us), rel=1e-4)
    assert p.lower_bound_us <= plan.period_us * (1 + 1e-4)
    assert p.ideal_bound_us * (1 - 1e-4) <= p.ideal_us <= min(plan.period_us, p.nano_us) * (1 + 1e-9)
    assert p.gap == pytest.approx(1 - p.ideal_bound_us / p.ideal_us, abs=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("b_dense", "decode_tokens", "border"), [(2048, 704, 768), (2048, 1024, 1024), (1024, 1024, 512)])
def test_executors_see_two_phases_a_layer(b_dense: int, decode_tokens: int, border: int, tp: int) -> None:
    plan = hand_pipeline(costing(b_dense, decode_tokens, tp, "none" if tp == 1 else "gemm_all_reduce"), border, 40)
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


def test_a_gemm_pays_for_the_sum_over_the_ranks() -> None:
    inside, apart = (costing(2048, 704, 2, partition) for partition in ("gemm_all_reduce", "all_reduce"))
    for gemm, reduce in (("o_proj", "o_all_reduce"), ("down_proj", "ffn_all_reduce")):
        together, own, network = (inside.time_of(gemm, 2048), apart.time_of(gemm, 2048), apart.time_of(reduce, 2048))
        assert max(own, network) < together < own + network
        joules = [apart.energy_of(name, 2048) or 0.0 for name in (gemm, reduce)]
        assert min(joules) > 0
        assert inside.energy_of(gemm, 2048) == pytest.approx(sum(joules))
    assert inside.time_of("gate_up_proj", 2048) == apart.time_of("gate_up_proj", 2048)


def test_collectives_are_refused() -> None:
    with pytest.raises(ValueError, match="all_gather, llama3-8b"):
        hand_pipeline(costing(2048, 704, 2, "all_gather"), 1024, 40)

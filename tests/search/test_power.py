"""Where power is the limit: plans slow down as a whole, and among those that it makes equal the search takes the fastest."""

import dataclasses
import functools
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax.config import preset
from nanoflow_jax.plan import NanoBatch, PipelinePlan, Resource, Shares
from nanoflow_jax.workload import parse_workload, steady_mix
from search import profile_table
from search.analytic import analytic_profile
from search.auto_search import LAUNCH_US, TIED, Options, _Candidate, _improves, _ranked, auto_search
from search.build_plan import build_plan
from search.constant import constant
from search.hand_pipeline import hand_pipeline
from search.hardware import PowerModel, hardware
from search.interference import shipped_maps
from search.problem import Costing, build_problem
from search.resources import Allocation, Device, ideal, phased, serial, slowed
from search.schedule import Node, Schedule, as_solved, dependency_arcs, tighten
from search.simulate import simulate
from search.stage_one import Limits, StageOne, add_shared_cuts, lane_orders, search_structure

POWER = PowerModel(cap_w=700, idle_w=100, pj_per_flop=1, pj_per_byte=1, pj_per_attention_byte=1, source="made up")
A100 = Device(num_sms=108, interference=shipped_maps()["paper-table3"])
MEASURED = Path(__file__).parents[2] / "search/data/profiles/h200-llama3-8b-tp1.json"


def _costing(power: PowerModel | None, b_dense: int = 1024, workload: str = "512:1024") -> Costing:
    """Llama-3-8B on one H200 with an analytic profile and the power model given."""
    model, mix = preset("llama3-8b"), steady_mix(parse_workload(workload), b_dense)
    table = msgspec.structs.replace(analytic_profile(model, hardware("h200"), 1, [mix]), power=power)
    return Costing(model=model, table=table, mix=mix, partition="none")


@functools.cache
def _stage() -> StageOne:
    return search_structure(build_problem(_costing(None)), Limits(work=1.0, deadline=time.monotonic() + 60, seed=0))


@functools.cache
def _allocations() -> dict[str, Allocation]:
    """Each form for one structure whose energy is known."""
    costing = _costing(hardware("h200").power)
    schedule = tighten(as_solved(_stage().best, costing), costing)
    device = Device(num_sms=costing.table.num_sms, interference=costing.table.interference)
    found = phased(schedule, device)
    one_share = constant(
        schedule, dependency_arcs(schedule.nodes, costing), device, work_limit=0.2, time_limit_s=60, first=found.mean_shares()
    )
    assert one_share is not None
    return {"phased": found, "constant": one_share, "serial": serial(schedule)}


def _work(allocation: Allocation) -> list[float]:
    done = [0.0] * len(allocation.schedule.nodes)
    for g in allocation.grants:
        done[g.node] += (g.stop_us - g.start_us) * g.performance
    return done


@pytest.mark.parametrize(("form", "shares"), [("phased", "phased"), ("constant", "constant"), ("serial", "constant")])
@given(cap_w=st.floats(250, 1000))
def test_slowing_down_keeps_a_plan_valid_and_ends_at_the_floor(form: str, shares: Shares, cap_w: float) -> None:
    model = hardware("h200").power
    assert model is not None
    costing = _costing(msgspec.structs.replace(model, cap_w=cap_w))
    found = _allocations()[form]
    allocation = slowed(found, costing.table.power)
    joules = sum(n.energy_j or 0.0 for n in found.schedule.nodes)
    floor_us = 1e6 * joules / (cap_w - model.idle_w)
    assert allocation.period_us == pytest.approx(max(found.period_us, floor_us), rel=1e-12)
    assert _work(allocation) == pytest.approx(_work(found))
    device = Device(num_sms=costing.table.num_sms, interference=costing.table.interference)
    plan = build_plan(costing, allocation, shares, device, {"none": _stage()}, {"none": costing})
    assert plan.period_us == allocation.period_us
    assert plan.prediction.lower_bound_us <= plan.period_us
    watts = simulate(plan, costing).mean_power_w
    assert watts == pytest.approx(plan.prediction.mean_power_w)
    assert watts == pytest.approx(model.idle_w + 1e6 * joules / max(found.period_us, floor_us))


def test_without_a_power_model_nothing_slows_down() -> None:
    for allocation in _allocations().values():
        assert slowed(allocation, None) is allocation


def _candidate(period_us: float, floor_us: float, nodes: int = 1, power: PowerModel | None = POWER) -> _Candidate:
    """Nano-operations that together take so long, and whose energy takes at least `floor_us` at the cap."""
    joules = 1e-6 * floor_us * (POWER.cap_w - POWER.idle_w)
    each = Node(
        operation="qkv_proj", nano_batch=0, batch=NanoBatch(start=0, stop=128), resource=Resource.COMPUTE,
        best_us=period_us / nodes, energy_j=joules / nodes, estimated=False,
    )  # fmt: skip
    schedule = Schedule(
        nodes=(each,) * nodes, starts=tuple(i * each.best_us for i in range(nodes)), durations=(each.best_us,) * nodes,
        period_us=period_us,
    )  # fmt: skip
    return _Candidate(costing=_costing(power), allocation=ideal(schedule))


def test_of_two_that_power_makes_equal_the_faster_one_wins() -> None:
    fast, slow = _candidate(900.0, 1000.0), _candidate(950.0, 1000.0)
    assert fast.period_us == slow.period_us == pytest.approx(1000.0)
    assert _ranked([slow, fast])[0] is fast
    assert _improves(fast, slow)
    assert not _improves(slow, fast)


def test_launches_count_among_equals_only() -> None:
    few, many = _candidate(920.0, 1000.0, nodes=2), _candidate(920.0 - 2 * LAUNCH_US, 1000.0, nodes=5)
    assert _ranked([many, few])[0] is few
    free = _candidate(920.0, 0.0, nodes=2), _candidate(919.0, 0.0, nodes=5)
    assert _ranked(free)[0] is free[1]


def test_energy_ranks_first_but_for_rounding() -> None:
    thrifty, fast = _candidate(990.0, 1000.0), _candidate(900.0, 1000.0 * (1 + 3 * TIED))
    assert _ranked([fast, thrifty])[0] is thrifty
    nearly = _candidate(900.0, 1000.0 * (1 + TIED / 2))
    assert _ranked([thrifty, nearly])[0] is nearly


@given(st.lists(st.tuples(st.floats(100, 1000), st.integers(1, 12)), min_size=1, max_size=8))
def test_without_power_periods_alone_rank(found: list[tuple[float, int]]) -> None:
    for power, floor_us in ((None, 2000.0), (POWER, 50.0)):
        candidates = [_candidate(period, floor_us, nodes, power) for period, nodes in found]
        assert _ranked(candidates) == sorted(candidates, key=lambda c: c.allocation.period_us)


def test_only_where_power_is_the_limit_are_more_structures_tried() -> None:
    model, options = preset("llama3-8b"), Options(work=0.1, time_limit_s=120)
    limited, free = (
        auto_search(model, c.table, c.mix, options)
        for c in (_costing(hardware("h200").power, 2048, "512:512"), _costing(None, 2048, "512:512"))
    )
    met = len(free.stage_one["none"].pool)
    assert len(limited.stage_one["none"].pool) > met
    assert limited.stage_one["none"].pool[:met] == free.stage_one["none"].pool
    assert limited.stage_one["none"].tried == free.stage_one["none"].tried
    assert all(plan.period_us == free.unlimited_us[form] for form, plan in free.plans.items())
    assert limited.plans["phased"].period_us > limited.unlimited_us["phased"]


def test_shared_cuts_leave_groups_whole_that_lie_on_one_side() -> None:
    costing = _costing(None, 2048, "512:512")
    limits = Limits(work=2.0, deadline=time.monotonic() + 60, seed=0)
    first = search_structure(build_problem(costing), limits)
    found = add_shared_cuts(first, limits)
    assert found.pool[: len(first.pool)] == first.pool
    assert found.bound <= found.best.period <= first.best.period
    added = found.pool[len(first.pool) :]
    hand = ((0, 8, 16), (0, 8), (8, 16), (0, 8, 16), (0, 8, 16))
    assert hand in [s.cuts for s in added]
    assert all(len({t for c in s.cuts for t in c[1:-1]}) == 1 for s in added)
    assert len({(s.cuts, lane_orders(s)) for s in added}) == len(added)


def _rank_of(period_us: float, unlimited_us: float, plan: PipelinePlan) -> tuple[float, float]:
    return round(period_us, 3), unlimited_us + LAUNCH_US * len(plan.nano_operations)


def _best_by_hand(costing: Costing) -> tuple[float, float]:
    free = dataclasses.replace(costing, table=msgspec.structs.replace(costing.table, power=None))
    ranks = []
    for border in range(128, costing.mix.b_dense, 128):
        plan = hand_pipeline(costing, border, 32)
        ranks.append(_rank_of(plan.period_us, hand_pipeline(free, border, 32).period_us, plan))
    return min(ranks)


@pytest.mark.parametrize(
    ("b_dense", "workload"),
    [(2048, "512:512"), (2048, "1024:512"), (1280, "512:1024"), (1024, "1:1535")],
)
def test_the_search_is_no_worse_than_the_best_pipeline_by_hand(b_dense: int, workload: str) -> None:
    model, mix = preset("llama3-8b"), steady_mix(parse_workload(workload), b_dense)
    table = profile_table.read(MEASURED, "h200", 1)
    outcome = auto_search(model, table, mix, Options(time_limit_s=600))
    assert not outcome.timed_out
    costing = outcome.costings["none"]
    found = _rank_of(outcome.plan.period_us, outcome.unlimited_us["constant"], outcome.plan)
    assert found <= _best_by_hand(costing)
    # Beside each other they have 32 SMs, as measured, and all of the rest.
    budgets = {(n.resource, n.num_sms) for n in outcome.plan.nano_operations if n.share < 1}
    assert budgets == {(Resource.MEMORY, 32), (Resource.COMPUTE, 100)}

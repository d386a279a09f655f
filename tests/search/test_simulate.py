"""The replay reproduces what the search promises, and refuses schedules from a solver that lost one of its constraints."""

import dataclasses
import time

import msgspec
import pytest

from nanoflow_jax.config import preset
from nanoflow_jax.plan import PipelinePlan, PlanError, edges
from nanoflow_jax.workload import parse_workload, steady_mix
from search.analytic import analytic_profile
from search.assemble import fold
from search.auto_search import Options, Outcome, auto_search
from search.build_plan import build_plan, place
from search.hardware import hardware
from search.problem import Costing, build_problem
from search.resources import Device, ideal, phased, serial
from search.schedule import as_solved, tighten
from search.simulate import mix_of, simulate
from search.stage_one import Limits, StageOne, search_structure
from search.structure import Structure, _Model, solve

replace = msgspec.structs.replace
QUICK = Options(work=0.05, time_limit_s=120)


def _costing(partition: str = "all_gather", b_dense: int = 768, workload: str = "512:512") -> Costing:
    """Llama-2-70B on eight A100, a small batch so that everything is solved in a second."""
    model, tp = preset("llama2-70b"), 8
    mix = steady_mix(parse_workload(workload), b_dense)
    return Costing(model=model, table=analytic_profile(model, hardware("a100-80g"), tp, [mix]), mix=mix, partition=partition)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    found = {}
    for name, tp, device, workload, b_dense in (
        ("llama2-70b", 8, "a100-80g", "512:512", 512),
        ("mixtral-8x7b", 8, "a100-80g", "512:1024", 512),
        ("llama3-8b", 1, "h200", "1024:512", 1024),
    ):
        model, mix = preset(name), steady_mix(parse_workload(workload), b_dense)
        table = analytic_profile(model, hardware(device), tp, [mix])
        found[name] = auto_search(model, table, mix, QUICK)
    return found


@pytest.mark.parametrize("model", ["llama2-70b", "mixtral-8x7b", "llama3-8b"])
@pytest.mark.parametrize("shares", ["ideal", "phased", "constant"])
def test_replay_reproduces_the_period(outcomes: dict[str, Outcome], model: str, shares: str) -> None:
    plan = outcomes[model].plans[shares]
    measured = simulate(plan, outcomes[model].costings[plan.partition])
    if shares == "constant":
        # Streams may issue earlier than the solver's coarser ticks foresaw; never later.
        assert 0.99 * plan.period_us < measured.period_us <= plan.period_us * (1 + 1e-9)
    else:
        assert measured.period_us == pytest.approx(plan.period_us, rel=1e-9)


def test_forms_are_ordered_and_bounded(outcomes: dict[str, Outcome]) -> None:
    for outcome in outcomes.values():
        ideal_us, phased_us, constant_us = (outcome.plans[form].period_us for form in ("ideal", "phased", "constant"))
        assert ideal_us <= phased_us * (1 + 1e-9)
        assert phased_us <= constant_us * (1 + 1e-6)
        # The bound knows power, which the ideal form does not.
        assert all(p.prediction.lower_bound_us <= p.period_us for p in outcome.plans.values() if p.shares != "ideal")


def test_power_cap_holds(outcomes: dict[str, Outcome]) -> None:
    for shares in ("phased", "constant"):
        plan = outcomes["llama3-8b"].plans[shares]
        watts = simulate(plan, outcomes["llama3-8b"].costings["none"]).mean_power_w
        assert watts is not None
        assert watts == pytest.approx(plan.prediction.mean_power_w)
        assert watts <= 700.001
    hot = outcomes["llama3-8b"].plans["ideal"]
    assert hot.prediction.mean_power_w > 700


def test_solver_ticks_are_reproduced_exactly() -> None:
    """In the solver's own ticks the replay's period is the solver's integer."""
    costing = _costing()
    problem = build_problem(costing)
    rounded = dataclasses.replace(costing, tick_us=problem.tick_us)
    solved = solve(problem, (2, 2, 1, 2, 2), work_limit=4, time_limit_s=60)
    assert solved.best is not None
    assert solved.best.period == solved.bound
    plan = _plan_of(solved.best, rounded)
    assert simulate(plan, rounded).period_us / problem.tick_us == pytest.approx(solved.best.period, rel=1e-12)


def _plan_of(structure: Structure, costing: Costing) -> PipelinePlan:
    """The plan at the solver's own starts, unvalidated: what `simulate` has to judge."""
    schedule = as_solved(structure, costing)
    table = costing.table
    allocation = ideal(schedule)
    device = Device(num_sms=table.num_sms, interference=table.interference)
    sane = tighten(
        as_solved(solve(structure.problem, structure.counts, work_limit=2, time_limit_s=60).pool[0], costing), costing
    )
    stage = StageOne(
        best=structure,
        bound=1,
        base=structure,
        base_bound=1,
        any_bound=1,
        pool=(structure,),
        tried=(),
        work=0.0,
        timed_out=False,
    )
    plan = build_plan(costing, ideal(sane), "ideal", device, {costing.partition: stage}, {costing.partition: costing})
    nanos, phases = fold(place(costing, allocation, device), allocation.period_us, 0.0)
    batches: dict = {}
    for n in sorted(schedule.nodes, key=lambda n: n.nano_batch):
        batches[n.operation] = (*batches.get(n.operation, ()), n.batch)
    return replace(plan, period_us=allocation.period_us, nano_operations=nanos, phases=phases, nano_batches=batches)


def _no_waits_across_groups(self: _Model, edge) -> None:
    if self.problem.blocks[edge.producer].group == self.problem.blocks[edge.consumer].group:
        _ADD_EDGE(self, edge)


def _no_waits_for_the_layer_before(self: _Model, edge) -> None:
    if not edge.previous_layer:
        _ADD_EDGE(self, edge)


def _no_lanes(self: _Model, resource, objective) -> None:
    pass


def _durations_of_one_tile(self: _Model, b: int, i: int):
    group = self.problem.groups[self.problem.blocks[b].group]
    return self.problem.blocks[b].duration(group, group.first, group.first + 1)


_ADD_EDGE = _Model._add_edge


@pytest.mark.parametrize(
    ("method", "broken", "message"),
    [
        ("_add_edge", _no_waits_across_groups, "dependency"),
        ("_add_edge", _no_waits_for_the_layer_before, "dependency"),
        ("_add_lane", _no_lanes, "overlap|layer_offset"),
        ("_duration", _durations_of_one_tile, "overlap|dependency|takes|is not in"),
    ],
)
def test_a_model_without_one_constraint_is_caught(monkeypatch: pytest.MonkeyPatch, method: str, broken, message: str) -> None:
    costing = _costing()
    problem = build_problem(costing)
    rounded = dataclasses.replace(costing, tick_us=problem.tick_us)
    monkeypatch.setattr(_Model, method, broken)
    monkeypatch.setattr("search.problem.Problem.load_bound", lambda self, counts=None: 1)
    bad = solve(problem, (2, 2, 1, 2, 2), work_limit=2, time_limit_s=60).best
    monkeypatch.undo()
    assert bad is not None
    with pytest.raises(PlanError, match=message):
        simulate(_plan_of(bad, rounded), rounded)


def test_constant_shares_without_their_sum_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, mix = preset("llama3-8b"), steady_mix(parse_workload("512:512"), 512)
    table = analytic_profile(model, hardware("a100-80g"), 1, [mix])
    monkeypatch.setattr("search.constant._add_shares", lambda *_: None)
    with pytest.raises(PlanError, match=r"shares sum|SMs in use"):
        auto_search(model, table, mix, QUICK)


def _running(plan: PipelinePlan, **changes) -> PipelinePlan:
    phases = [replace(p, running=tuple(replace(r, **changes) for r in p.running)) for p in plan.phases]
    return replace(plan, phases=tuple(phases))


def test_replay_refuses_foreign_and_impossible_plans(outcomes: dict[str, Outcome]) -> None:
    plan = outcomes["llama2-70b"].plans["phased"]
    costing = outcomes["llama2-70b"].costings[plan.partition]
    with pytest.raises(PlanError, match="replayed with"):
        simulate(plan, _costing(costing.partition, b_dense=1024))
    slower = dataclasses.replace(costing, tick_us=7.0)
    with pytest.raises(PlanError, match="the profile says"):
        simulate(plan, slower)
    with pytest.raises(PlanError, match=r"shares sum|SMs in use"):
        simulate(_running(plan, share=0.9), costing)
    with pytest.raises(PlanError, match="the profile allows"):
        simulate(_running(plan, share=0.01), costing)
    hurried = replace(plan, period_us=0.9 * plan.period_us)
    with pytest.raises(PlanError):
        simulate(hurried, costing)


def test_the_mix_of_a_plan(outcomes: dict[str, Outcome]) -> None:
    plan = outcomes["llama3-8b"].plan  # 1024 tokens of 1024:512
    own, others = parse_workload("1024:512"), [parse_workload(w) for w in ("512:512", "512:1536", "1280:0", "0:2560")]
    assert [w.decode_context for w in others] == [768.0, *[1280.0] * 3], "as long as the plan's, but for the first"
    assert mix_of(plan, [*others, own]) == mix_of(plan, [own, *others]) == steady_mix(own, plan.b_dense)
    with pytest.raises(PlanError, match=r"decode_context=1280\.0.*512:512 has 768\.0"):
        mix_of(plan, others[:1])
    without = replace(plan, decode_context=None)
    assert mix_of(without, [own]) == steady_mix(own, plan.b_dense)
    with pytest.raises(PlanError, match="none is given"):
        mix_of(without, [])
    decoding = mix_of(replace(plan, decode_tokens=plan.b_dense), [])
    assert (decoding.decode_tokens, decoding.prefill_tokens, decoding.decode_context) == (1024, 0, 1280.0)


def test_serial_is_the_sum_of_its_parts() -> None:
    costing = _costing()
    problem = build_problem(costing)
    stage = search_structure(problem, Limits(work=0.5, deadline=time.monotonic() + 60, seed=0))
    schedule = tighten(as_solved(stage.best, costing), costing)
    device = Device(num_sms=108, interference=costing.table.interference)
    both = {costing.partition: stage}, {costing.partition: costing}
    one_by_one = build_plan(costing, serial(schedule), "constant", device, *both)
    assert one_by_one.period_us == pytest.approx(one_by_one.prediction.nano_us)
    assert simulate(one_by_one, costing).period_us == pytest.approx(one_by_one.period_us)
    assert phased(schedule, device).period_us < one_by_one.period_us
    assert len(list(edges(one_by_one)))

"""Stage II and its parts: exact shortest periods, phase programs with known optima, constant shares, the plan set."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax.config import preset
from nanoflow_jax.plan import NanoBatch, Resource
from nanoflow_jax.plan_files import validate
from nanoflow_jax.runtime.plan_choice import choose_plan
from nanoflow_jax.workload import parse_workload, steady_mix
from search.analytic import analytic_profile
from search.assemble import Intensity, Placed, Segment, fold
from search.auto_search import Options, auto_search
from search.constant import constant, descend, issue_in_order
from search.hardware import PowerModel, hardware
from search.interference import Interference, InterferencePoint, performance, shipped_maps, sms_of_share, useful_shares
from search.plan_set import crossover, make_plan_set
from search.resources import (
    Allocation,
    Device,
    _Phase,
    _phased_allocation,
    ideal,
    phased,
    serial,
    share_patterns,
    slowed,
)
from search.schedule import Arc, CyclicOrderError, Node, Schedule, shortest_period

C, M, N = Resource.COMPUTE, Resource.MEMORY, Resource.NETWORK
TABLE_3 = shipped_maps()["paper-table3"]
A100 = Device(num_sms=108, interference=TABLE_3)
POWER = PowerModel(cap_w=700, idle_w=100, pj_per_flop=1, pj_per_byte=1, pj_per_attention_byte=1, source="made up")


def _node(resource: Resource, best_us: float, energy_j: float = 0.0, index: int = 0) -> Node:
    return Node(
        operation=resource.value, nano_batch=index, batch=NanoBatch(start=0, stop=128), resource=resource, best_us=best_us,
        energy_j=energy_j, estimated=False,
    )  # fmt: skip


def _side_by_side(compute_us: float, memory_us: float, energy_j: float = 0.0) -> Schedule:
    """A GEMM and a memory kernel without dependencies, both starting at 0."""
    nodes = _node(C, compute_us, energy_j), _node(M, memory_us, energy_j)
    durations = compute_us, memory_us
    return Schedule(nodes=nodes, starts=(0.0, 0.0), durations=durations, period_us=max(durations))


LOOPS = [Arc(tail=0, head=0, layers=1), Arc(tail=1, head=1, layers=1)]


def test_shortest_period_is_the_worst_cycle() -> None:
    """0 -> 1 -> 2 -> 0 over two layers takes (3 + 4 + 5) / 2 = 6 per layer; node 2 alone repeats every 5."""
    arcs = [
        Arc(tail=0, head=1, layers=0),
        Arc(tail=1, head=2, layers=1),
        Arc(tail=2, head=0, layers=1),
        Arc(tail=2, head=2, layers=1),
    ]
    period, starts = shortest_period([3.0, 4.0, 5.0], arcs)
    assert period == pytest.approx(6.0)
    assert starts[0] == 0
    with pytest.raises(CyclicOrderError):
        shortest_period([1.0, 1.0], [Arc(tail=0, head=1, layers=0), Arc(tail=1, head=0, layers=0)])


@given(st.data())
def test_shortest_period_agrees_with_all_simple_cycles(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    durations = [data.draw(st.integers(1, 9)) * 1.0 for _ in range(count)]
    pairs = [(u, v) for u in range(count) for v in range(count)]
    arcs = [
        Arc(tail=u, head=v, layers=data.draw(st.integers(1, 3)))
        for u, v in data.draw(st.lists(st.sampled_from(pairs), max_size=7))
    ]
    arcs += [Arc(tail=v, head=v, layers=1) for v in range(count)]
    ratios = []
    for length in range(1, count + 1):
        for nodes in itertools.permutations(range(count), length):
            choices = [
                [a for a in arcs if (a.tail, a.head) == (u, v)] for u, v in zip(nodes, (*nodes[1:], nodes[0]), strict=True)
            ]
            for cycle in itertools.product(*choices):
                ratios.append(sum(durations[a.tail] for a in cycle) / sum(a.layers for a in cycle))
    period, starts = shortest_period(durations, arcs)
    assert period == pytest.approx(max(ratios))
    assert all(starts[a.head] >= starts[a.tail] + durations[a.tail] - a.layers * period - 1e-6 for a in arcs)


def test_phase_program_hand_worked() -> None:
    """GEMM of 100 us beside 40 us of memory work. While both run, R = 0.4 is best: the memory kernel at 0.8 needs 50 us,
    in which the GEMM does 30; the other 70 follow alone: 120 in all. Near misses: at 0.2 memory takes 133 us, in which the GEMM
    could do 107, so that memory ends last; one after the other takes 140."""
    schedule = Schedule(nodes=(_node(C, 100.0), _node(M, 40.0)), starts=(0.0, 0.0), durations=(100.0, 40.0), period_us=100.0)
    found = phased(schedule, A100)
    assert found.period_us == pytest.approx(120.0)
    assert serial(schedule).period_us == 140.0
    assert ideal(schedule).period_us == 100.0


def test_the_power_floor_slows_everything_down_alike() -> None:
    """0.12 J in all at 600 W above idle need 200 us, which interference makes 120: everything is 5 / 3 slower."""
    free = phased(_side_by_side(100.0, 40.0, energy_j=0.06), A100)
    found = slowed(free, POWER)
    assert free.period_us == pytest.approx(120.0)
    assert found.period_us == pytest.approx(200.0)
    for g, was in zip(found.grants, free.grants, strict=True):
        assert (g.node, g.share) == (was.node, was.share)
        assert (g.start_us, g.stop_us) == (pytest.approx(was.start_us * 5 / 3), pytest.approx(was.stop_us * 5 / 3))
        assert g.performance == pytest.approx(was.performance * 3 / 5)
    assert slowed(found, POWER) is found


def test_constant_shares_hand_worked() -> None:
    """One share for life: the GEMM of 100 us at 0.8 takes 125, memory at 0.2 133; at 0.6 and 0.4, 167; serially 140."""
    schedule = _side_by_side(100.0, 40.0)
    best = math.inf
    for i, j in itertools.product(range(1, 11), repeat=2):
        r, m = i / 10, j / 10
        c, d = 100 / r, 40 / performance(TABLE_3, M, m)
        best = min(best, max(c, d) if r + m <= 1 + 1e-9 else c + d)
    found = constant(schedule, [], A100, work_limit=2, time_limit_s=20, first=[0.6, 0.4])
    assert found is not None
    assert found.period_us == pytest.approx(best, rel=2e-3)
    assert best == pytest.approx(40 / 0.3)


@given(
    work=st.lists(st.floats(1, 1000), min_size=2, max_size=2),
    slivers=st.lists(st.floats(0, 2e-6), min_size=1, max_size=8),
    measured=st.booleans(),
)
def test_dropped_slivers_make_phases_longer_not_speeds_higher(work: list[float], slivers: list[float], measured: bool) -> None:
    device = Device(num_sms=132, interference=shipped_maps()["h200-sustained"]) if measured else A100
    schedule = _side_by_side(*work)
    pattern = share_patterns((C, M), device)[0]
    speeds = [performance(device.interference, r, s) for r, s in zip((C, M), pattern, strict=True)]
    length = max(us / speed for us, speed in zip(work, speeds, strict=True))
    parts = [(1 - sum(slivers)) * length, *(s * length for s in slivers)]
    phase = _Phase(nodes=(0, 1), windows=(0, 0))
    found = _phased_allocation(schedule, device, [phase] * len(parts), [[pattern]] * len(parts), [[part] for part in parts])
    for node, speed in enumerate(speeds):
        own = [g for g in found.grants if g.node == node]
        assert max(g.performance for g in own) <= speed * (1 + 1e-12)
        assert sum((g.stop_us - g.start_us) * g.performance for g in own) == pytest.approx(work[node])
        assert own[-1].stop_us == pytest.approx(found.period_us)
    assert found.period_us == pytest.approx(length, rel=1e-4)


def test_memory_kernels_get_measured_numbers_of_sms_and_gemms_what_these_leave() -> None:
    measured = shipped_maps()["h200-sustained"]
    memory = useful_shares(measured, M, 132, 0.1)
    assert [sms_of_share(measured, M, share, 132) for share in memory] == [8, 16, 24, 32, 48, 132]
    alone, with_collectives = (useful_shares(measured, C, 132, 0.1, beside_network=network) for network in (False, True))
    assert alone == sorted([*(1 - share for share in memory[:-1]), 1.0])
    assert set(with_collectives) == {*alone, *(round(0.1 * i, 6) for i in range(1, 10))}
    # A map without numbers of SMs, as the paper has, leaves all of the grid.
    assert useful_shares(TABLE_3, C, 108, 0.1, beside_network=False) == pytest.approx([0.1 * i for i in range(1, 11)])


def test_patterns_fit_the_device() -> None:
    for resources in ((C, M), (M, N), (C, M, N), (N,), (C,)):
        patterns = share_patterns(resources, A100)
        assert patterns
        assert all(sum(p) <= 1 + 1e-9 and min(p) > 0 for p in patterns)
        if C in resources:
            assert all(sum(p) == pytest.approx(1) for p in patterns)


def _lone(allocation: Allocation) -> float:
    return max(g.stop_us for g in allocation.grants)


def test_in_order_issue_respects_shares_and_waits() -> None:
    schedule = _side_by_side(100.0, 40.0)
    together = issue_in_order(schedule, LOOPS, [0.6, 0.4], A100)
    apart = issue_in_order(schedule, LOOPS, [1.0, 1.0], A100)
    assert together is not None
    assert apart is not None
    assert together.period_us == pytest.approx(100 / 0.6)
    assert apart.period_us == pytest.approx(140.0)
    found = descend(schedule, LOOPS, [0.6, 0.4], A100)
    assert found is not None
    assert found[0].period_us <= 140.0 + 1e-9
    assert _lone(serial(schedule)) == 140.0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 2)), min_size=1, max_size=3))
def test_folding_keeps_every_microsecond(jobs: list[tuple[int, int, int]]) -> None:
    """However a nano-operation lies over windows, its phases add up to its time and start where it starts."""
    period = 10.0
    placed = [
        Placed(
            operation=f"op{i}", nano_batch=0, resource=list(Resource)[i], best_us=0.5 * d, intensity=Intensity(compute=1.0),
            segments=(Segment(start_us=s + w * period, stop_us=s + w * period + d, share=0.3, num_sms=3, performance=0.5),),
        )
        for i, (s, d, w) in enumerate(jobs)
    ]  # fmt: skip
    nanos, phases = fold(placed, period, idle_w=7.0)
    assert sum(p.duration_us for p in phases) == pytest.approx(period)
    for n in nanos:
        s, d, w = jobs[int(n.operation[2:])]
        assert (n.layer_offset, n.start_us, n.duration_us) == (w, pytest.approx(s), pytest.approx(d))
    busy = sum(p.duration_us * p.compute for p in phases)
    assert busy == pytest.approx(sum(0.5 * d for _, d, _ in jobs))
    assert all(p.power_w == 7.0 for p in phases)


def test_a_map_without_interference_gives_the_ideal_back() -> None:
    free = Interference(
        name="free", source="made up", memory=(InterferencePoint(share=0.01, performance=1.0),),
        network=(InterferencePoint(share=0.01, performance=1.0),),
    )  # fmt: skip
    device = Device(num_sms=1000, interference=free)
    assert phased(_side_by_side(100.0, 40.0), device).period_us == pytest.approx(100.4, rel=1e-3)


def test_plan_set_and_its_crossover() -> None:
    """Small batches of 8B are not worth splitting on one A100; the set finds from where on they are, and selects by it."""
    model, table_of = preset("llama3-8b"), hardware("a100-80g")
    mixes = [steady_mix(parse_workload("512:512"), b) for b in (128, 256, 512, 1024)]
    table = analytic_profile(model, table_of, 1, mixes)
    plans = [auto_search(model, table, m, Options(work=0.05, time_limit_s=60)).plan for m in mixes]
    for plan in plans:
        validate(plan)
    found = make_plan_set(model, table, plans, mixes)
    assert found.crossover_tokens == crossover(plans)
    assert found.crossover_tokens is not None
    index, _ = choose_plan(found, 500, 500)
    assert index is not None
    assert found.plans[index].b_dense == 1024
    assert choose_plan(found, 20, 20) == (None, 20)
    assert all(p.speedup > 1 for p in found.plans)

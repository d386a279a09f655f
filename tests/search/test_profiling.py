"""What profiling measures, resumes and records on a pretended machine."""

import collections
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax.config import preset
from nanoflow_jax.plan import Partition, Resource
from nanoflow_jax.plan_files import decode_plan
from nanoflow_jax.workload import parse_workload, steady_mix
from search import analytic, profile_table, profiler
from search.__main__ import main
from search.hardware import hardware
from search.interference import performance, shipped_maps
from search.measurement import (
    Alone,
    Load,
    Program,
    Reading,
    Together,
    interference_points,
    measured_maps,
    share_and_performance,
)
from search.problem import Costing
from search.profile_points import fewer_sms_requests, kernels_of, pairs_to_measure, requests
from search.profile_table import Kernel, Pair, ProfileError, ProfileTable, lookup
from search.profiling import BATCH, FAILURES_IN_A_ROW, Outcome, measure_profile, profile_command

SLOWER = 1.1  # what everything in a pair takes more than alone on its SMs
GEMM = Kernel(name="gemm", shape=(4096, 4096))
ATTENTION = Kernel(name="decode_attention", shape=(8, 4, 128))
ALL_REDUCE = Kernel(name="all_reduce", shape=(4, 8192))


class Pretended:
    """A machine with the analytic times of an H200, on which each side of a pair is slowed down by a tenth.

    `broken` do not compile and `failing` fail when they run. A measurement takes `seconds` of its clock, a compilation none.
    """

    num_sms = 132
    conditions = "pretended"

    def __init__(self, seconds: float = 0.25) -> None:
        self.broken: set[Program] = set()
        self.failing: set[Program] = set()
        self.runs: collections.Counter[Program] = collections.Counter()
        self.batches: list[int] = []
        self.now = 0.0
        self._seconds = seconds
        self._ready: set[Program] = set()

    def libraries(self) -> dict[str, str]:
        return {"jax": "pretended"}

    def compile(self, programs: Sequence[Program]) -> dict[Program, str]:
        assert len(set(programs)) == len(programs)
        self.batches.append(len(programs))
        self._ready |= set(programs) - self.broken
        return {p: "out of registers" for p in programs if p in self.broken}

    def time(self, program: Program, load: Load, *, burst: bool = False, energy: bool = False) -> Reading:
        assert program in self._ready
        self.now += self._seconds
        self.runs[program] += 1
        if program in self.failing:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")
        if isinstance(program, Together):
            sides = program.calls * self._us(program.gemm, Load()), self._us(program.other, load)
            return Reading(time_us=max(sides) * (SLOWER if min(sides) > 0 else 1))
        us = self._us(program, load)
        return Reading(time_us=us, burst_us=0.9 * us if burst else None, energy_j=1e-3 if energy else None)

    def _us(self, alone: Alone, load: Load) -> float:
        tokens = alone.tokens if load.rows is None else load.rows
        if tokens == 0:
            return 0.0
        sms = 32 if alone.kernel.name.startswith("all_") else alone.num_sms
        return analytic._time(hardware("h200"), alone.kernel, tokens, load.context, sms)[0] - analytic.LAUNCH_US


def profile(
    machine: Pretended, known: ProfileTable | None = None, saved: list[ProfileTable] | None = None, *, tp: int = 4,
    time_limit_s: float = math.inf,
) -> Outcome:  # fmt: skip
    model = preset("llama3-70b" if tp == 4 else "llama3-8b")
    save = [].append if saved is None else saved.append
    return measure_profile(
        model, hardware("h200"), tp, 2048, [1024, 2048], machine, known, save, lambda *_: None,
        time_limit_s=time_limit_s, clock=lambda: machine.now,
    )  # fmt: skip


@functools.cache
def complete(tp: int) -> ProfileTable:
    outcome = profile(Pretended(), tp=tp)
    assert outcome.left == 0
    return outcome.table


def contents(table: ProfileTable) -> tuple[dict[Any, Any], set[Any], dict[str, str]]:
    """What a table holds, in no order."""
    return {s.kernel: {p for p in s.points} for s in table.series}, set(table.pairs), table.failures


@pytest.mark.parametrize("tp", [1, 4])
def test_everything_is_measured_once_in_few_programs(tp: int) -> None:
    machine, saved = Pretended(), []
    table = profile(machine, saved=saved, tp=tp).table
    sizes = preset("llama3-70b" if tp == 4 else "llama3-8b"), tp, 2048, [1024, 2048], 132
    wanted = [*requests(*sizes), *fewer_sms_requests(*sizes)]
    have = {(s.kernel, p.tokens, p.num_sms, p.context): p for s in table.series for p in s.points}
    assert all((r.program.kernel, *r.key) in have for r in wanted)
    assert {s.kernel for s in table.series} == set(kernels_of(sizes[0], tp))
    for request in wanted:
        point = have[(request.program.kernel, *request.key)]
        assert (point.burst_us is not None, point.energy_j is not None) == (request.full, request.energy)
    assert {(p.gemm, p.other, p.other_sms) for p in table.pairs} == set(pairs_to_measure(*sizes))
    assert saved[-1] == table
    assert max(machine.batches) <= BATCH + 4
    # What a run on a GPU takes: see docs/search.md.
    assert sum(machine.batches) <= {1: 130, 4: 220}[tp]
    assert sum(machine.runs.values()) <= {1: 250, 4: 360}[tp]


def test_a_second_run_measures_nothing() -> None:
    machine = Pretended()
    assert profile(machine, complete(4)).table == complete(4)
    assert not machine.runs


@given(st.floats(0.1, 80.0))
def test_after_the_time_limit_nothing_is_begun_and_the_next_run_goes_on(limit: float) -> None:
    machine, saved = Pretended(), []
    part = profile(machine, saved=saved, time_limit_s=limit)
    longest = 8 * 0.25  # measurements of one pair
    assert machine.now <= limit + longest
    assert saved[-1] == part.table
    assert part.left > 0 or contents(part.table) == contents(complete(4))
    rest = Pretended()
    done = profile(rest, part.table)
    assert done.left == 0
    assert contents(done.table) == contents(complete(4))
    again = {p for p in rest.runs if p in machine.runs and isinstance(p, Together)}
    assert not again, "pairs that were measured twice"


def test_a_killed_run_continues_from_what_it_saved() -> None:
    machine, saved = Pretended(), []

    def killed(table: ProfileTable) -> None:
        saved.append(table)
        if len(saved) == 4:
            raise KeyboardInterrupt

    model = preset("llama3-70b")
    with pytest.raises(KeyboardInterrupt):
        measure_profile(
            model, hardware("h200"), 4, 2048, [1024, 2048], machine, None, killed, lambda *_: None, clock=lambda: machine.now
        )
    assert sum(len(s.points) for s in saved[-1].series) > 40
    rest = Pretended()
    assert contents(profile(rest, saved[-1]).table) == contents(complete(4))
    assert sum(rest.runs.values()) < sum(machine.runs.values()) + 300


def test_what_fails_is_on_record_and_tried_again() -> None:
    sizes = preset("llama3-8b"), 1, 2048, [1024, 2048], 132
    machine = Pretended()
    does_not_compile, does_not_run = requests(*sizes)[3].program, fewer_sms_requests(*sizes)[0].program
    machine.broken, machine.failing = {does_not_compile}, {does_not_run}
    table = profile(machine, tp=1).table
    assert len(table.failures) == 2
    assert "out of registers" in table.failures[str(does_not_compile)]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in table.failures[str(does_not_run)]
    lost = [(k, p.tokens, p.num_sms) for k, points in contents(complete(1))[0].items() for p in points - contents(table)[0][k]]
    assert set(lost) == {(p.kernel, p.tokens, p.num_sms) for p in (does_not_compile, does_not_run)}
    assert profile_table.decode(profile_table.encode(table)) == table
    assert contents(profile(Pretended(), table, tp=1).table) == contents(complete(1))


def test_pairs_whose_kernels_failed_alone_fail_alone() -> None:
    machine = Pretended()
    sizes = preset("llama3-70b"), 4, 2048, [1024, 2048], 132
    machine.broken = {r.program for r in requests(*sizes) if r.program.kernel == ALL_REDUCE}
    table = profile(machine).table
    assert not [p for p in table.pairs if p.other == ALL_REDUCE]
    assert len([p for p in table.pairs if p.other != ALL_REDUCE]) == len(
        [p for p in pairs_to_measure(*sizes) if p[1] != ALL_REDUCE]
    )
    # The network's map is then the shipped one, which the source says.
    shipped = shipped_maps()["h200-sustained"]
    assert table.interference.network == shipped.network
    assert table.interference.memory != shipped.memory
    assert "network from h200-sustained" in table.interference.source


@pytest.mark.parametrize("b_dense", [256, 1024, 4096])
def test_attention_lasts_as_long_as_the_gemms_also_where_contexts_are_short(b_dense: int) -> None:
    model, machine = preset("llama3-70b"), Pretended()
    table = measure_profile(model, hardware("h200"), 4, b_dense, [128], machine, None, [].append, lambda *_: None).table
    assert not table.failures
    for pair in table.pairs:
        if pair.other != ALL_REDUCE:
            assert share_and_performance(pair)[1] == pytest.approx(min(1.0, pair.other_sms / 48) / SLOWER, rel=0.05)


def test_a_lost_device_ends_the_run_with_what_was_measured() -> None:
    machine, saved = Pretended(), []
    known = profile(Pretended(), time_limit_s=10.0).table
    sizes = preset("llama3-70b"), 4, 2048, [1024, 2048], 132
    machine.failing = {r.program for r in requests(*sizes)}
    with pytest.raises(ProfileError, match=f"{FAILURES_IN_A_ROW} measurements in a row"):
        profile(machine, known, saved)
    assert contents(saved[-1])[0] == contents(known)[0]
    assert len(saved[-1].failures) == FAILURES_IN_A_ROW


def test_machines_are_not_mixed() -> None:
    with pytest.raises(ProfileError, match="older"):
        profile(Pretended(), profile_table.msgspec.structs.replace(complete(4), libraries={"jax": "older"}))
    with pytest.raises(ProfileError, match="taken under 'bursts'"):
        profile(Pretended(), profile_table.msgspec.structs.replace(complete(4), conditions="bursts"))


def _pair(gemm_us: float, other_us: float, time_us: float, sms: int = 32, other: Kernel = ATTENTION) -> Pair:
    return Pair(
        gemm=GEMM, gemm_tokens=1024, gemm_sms=132 - sms, calls=1, other=other, other_tokens=512, other_sms=sms, context=896.0,
        time_us=time_us, gemm_us=gemm_us, other_us=other_us,
    )  # fmt: skip


def test_share_and_performance_by_hand() -> None:
    """Gate and up of 8B takes 754 us alone, attention 445 us; beside each other, on 100 and 32 SMs, 1027 us (H200, sustained).

    The GEMM keeps 754 / 1027 = 0.734 of its speed, so attention holds 0.266, at which it keeps 445 / 1027 = 0.433 of its own:
    together 1.167 of what either can do alone, and 1199 / 1027 = 1.167 times as fast as one after the other.
    """
    share, speed = share_and_performance(_pair(754.0, 445.0, 1027.0))
    assert share == pytest.approx(0.2658, abs=1e-4)
    assert speed == pytest.approx(0.4333, abs=1e-4)
    assert 1 - share + speed == pytest.approx((754 + 445) / 1027)
    # Noise must not make a share negative or a speed larger than alone.
    assert share_and_performance(_pair(100.0, 101.0, 100.0)) == (0.005, 1.0)


def test_maps_are_means_over_gemms_of_what_nothing_beats() -> None:
    pairs = [
        _pair(90.0, 30.0, 100.0, sms=16), _pair(80.0, 40.0, 100.0, sms=16),  # R 0.1 and 0.2, P 0.3 and 0.4
        _pair(60.0, 30.0, 100.0, sms=24),  # R 0.4, P 0.3: beaten by 16 SMs
        _pair(70.0, 60.0, 100.0, sms=32),  # R 0.3, P 0.6
    ]  # fmt: skip
    points = interference_points(pairs)
    assert [p.num_sms for p in points] == [16, 32]
    assert (points[0].share, points[0].performance, points[0].spread) == pytest.approx((0.15, 0.35, 0.05))
    assert (points[1].share, points[1].performance, points[1].spread) == pytest.approx((0.3, 0.6, 0.0))
    maps = measured_maps("m", "s", pairs, shipped_maps()["paper-table3"])
    assert performance(maps, Resource.MEMORY, 0.225) == pytest.approx((0.35 + 0.6) / 2)
    assert maps.network == shipped_maps()["paper-table3"].network
    assert measured_maps("m", "s", [], shipped_maps()["paper-table3"]) == shipped_maps()["paper-table3"]


def test_the_interference_of_a_known_machine_is_found() -> None:
    """On the pretended machine a GEMM on 132 - n SMs and what is beside it take SLOWER times as long as alone on their SMs."""
    for pair in complete(4).pairs:
        share, speed = share_and_performance(pair)
        on_few = lookup(complete(4), pair.gemm, pair.gemm_tokens, num_sms=pair.gemm_sms).time_us * pair.calls
        if pair.other == ALL_REDUCE:
            # NCCL takes its channels whatever the GEMM leaves it; sizes are whole tiles, so one side waits a little.
            assert 0.8 / SLOWER <= speed <= 1 / SLOWER + 1e-9
        else:
            own = min(1.0, pair.other_sms / 48)
            assert own / SLOWER * 0.96 <= speed <= own / SLOWER + 1e-9, "the amount of attention fits the GEMM"
            assert share == pytest.approx(1 - pair.gemm_us / (SLOWER * on_few), abs=0.04)
    memory = complete(4).interference.memory
    assert [p.num_sms for p in memory] == [16, 24, 32, 40, 48]
    assert complete(4).interference.network


@pytest.mark.parametrize(("model", "tp"), [("llama3-8b", 1), ("llama3-70b", 4)])
def test_the_search_plans_from_a_measured_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, tp: int
) -> None:  # fmt: skip
    """The file has few SM counts, contexts other than the workload's, and not every size."""
    path, out = tmp_path / "profile.json", tmp_path / "plan.json"
    path.write_bytes(profile_table.encode(complete(tp)))
    args = ["--model", model, "--hardware", "h200", "--tp", str(tp), "--b-dense", "512", "--workload", "1024:512"]
    assert main(["plan", *args, "--profile", str(path), "--out", str(out), "--work", "0.1", "--quiet"]) == 0
    plan = decode_plan(out.read_bytes())
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    mix = steady_mix(parse_workload("1024:512"), 512)
    costing = Costing(model=preset(model), table=complete(tp), mix=mix, partition=plan.partition)
    partitions: list[Partition] = ["none"] if tp == 1 else ["all_reduce", "all_gather"]
    sequential = [Costing(model=preset(model), table=complete(tp), mix=mix, partition=p).sequential_us() for p in partitions]
    assert record["sequential_us"] == pytest.approx(min(sequential), abs=0.01)
    assert record["speedup"] > 1
    # The plan's SM counts come from the measured map, in between its points too.
    allowed = complete(tp).interference
    for phase in plan.phases:
        for r in phase.running:
            if plan.nano_operations[r.nano_operation].resource is Resource.MEMORY:
                assert r.performance <= performance(allowed, Resource.MEMORY, r.share) * (1 + 1e-4)
    qkv, decode = (next(op for op in costing.graph() if op.name == name) for name in ("qkv_proj", "decode_attention"))
    assert not costing.timing(qkv, 512).estimated
    for sms in (8, 20, 48, 100, 132):
        found = costing.timing(decode, 171, num_sms=sms)
        assert found.estimated
        assert found.time_us == pytest.approx(costing.timing(decode, 171).time_us * max(1.0, 48 / sms), rel=0.25)


def test_the_command_refuses_sizes_that_it_cannot_measure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ["profile", "--model", "llama3-8b", "--hardware", "h200", "--out", str(tmp_path / "p.json")]
    assert main([*args, "--b-dense", "200"]) == 2
    assert "multiple of 128" in capsys.readouterr().err


def test_the_command_writes_resumes_and_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "p.json"
    monkeypatch.setattr(profiler, "GpuMachine", lambda tp, idle_w: Pretended())
    profile_command(preset("llama3-8b"), hardware("h200"), 1, 512, [512], out, math.inf)
    lines = capsys.readouterr().out.splitlines()
    record = json.loads(lines[-1])
    assert (record["failures"], record["left"]) == (0, 0)
    assert record["points"] == sum(len(s.points) for s in profile_table.decode(out.read_bytes()).series)
    assert any("compiling" in line and " %" in line for line in lines)
    before = out.read_bytes()
    profile_command(preset("llama3-8b"), hardware("h200"), 1, 512, [512], out, math.inf)
    assert out.read_bytes() == before

"""Profiles: JSON, interpolation, the analytic table's physics, interference maps."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax.config import preset
from nanoflow_jax.parallel import parallel_layout
from nanoflow_jax.plan import Resource
from nanoflow_jax.workload import parse_workload, steady_mix
from search import profile_table
from search.analytic import analytic_profile, kernel_work
from search.hardware import hardware
from search.interference import (
    Interference,
    InterferencePoint,
    performance,
    share_of_sms,
    shipped_maps,
    sms_of_share,
    useful_shares,
)
from search.problem import Costing
from search.profile_table import Kernel, Point, ProfileError, ProfileTable, Series, kernel_of, lookup

PROFILES = Path(profile_table.__file__).parent / "data/profiles"
TABLE_3 = shipped_maps()["paper-table3"]
H200 = shipped_maps()["h200-sustained"]
GEMM = Kernel(name="gemm", shape=(4096, 4096))
ATTENTION = Kernel(name="decode_attention", shape=(8, 4, 128))


def _table(points: list[Point], kernel: Kernel = GEMM) -> ProfileTable:
    return ProfileTable(
        model="m", device="h200", tp=1, num_sms=132, source="measured", libraries={"jax": "0"},
        series=(Series(kernel=kernel, points=tuple(points)),), interference=TABLE_3,
    )  # fmt: skip


def _point(tokens: int, time_us: float, num_sms: int = 132, context: float = 0.0) -> Point:
    return Point(tokens=tokens, num_sms=num_sms, context=context, time_us=time_us, implementation=f"i{tokens}")


@pytest.mark.parametrize(
    ("resource", "share", "speed"),
    [(Resource.MEMORY, 0.2, 0.3), (Resource.MEMORY, 0.4, 0.8), (Resource.MEMORY, 0.8, 0.85), (Resource.NETWORK, 0.2, 0.5),
     (Resource.NETWORK, 0.8, 0.9), (Resource.COMPUTE, 0.7, 0.7), (Resource.MEMORY, 1.0, 1.0), (Resource.MEMORY, 0.1, 0.15)],
)  # fmt: skip
def test_table_3_of_the_paper(resource: Resource, share: float, speed: float) -> None:
    assert performance(TABLE_3, resource, share) == pytest.approx(speed)


def test_h200_map_is_the_measured_table() -> None:
    """GEMM 487 of 655 TFLOP/s beside a stream of 2.24 of 4.46 TB/s on 32 SMs."""
    at = next(p for p in H200.memory if p.num_sms == 32)
    assert at.share == pytest.approx(1 - 487 / 655, abs=1e-3)
    assert at.performance == pytest.approx(2.24 / 4.46, abs=1e-3)
    assert sms_of_share(H200, Resource.MEMORY, at.share, 132) == 32
    assert share_of_sms(H200, Resource.MEMORY, 32, 132) == pytest.approx(at.share)
    assert share_of_sms(H200, Resource.MEMORY, 132, 132) == 1.0
    assert share_of_sms(TABLE_3, Resource.MEMORY, 27, 108) == pytest.approx(0.25)
    assert sms_of_share(H200, Resource.NETWORK, 1.0, 132) == 32
    assert sms_of_share(TABLE_3, Resource.MEMORY, 0.4, 108) == 43


@given(st.sampled_from([TABLE_3, H200]), st.sampled_from(list(Resource)), st.floats(0, 1), st.floats(0, 1))
def test_speed_rises_with_share(maps: Interference, resource: Resource, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert performance(maps, resource, low) <= performance(maps, resource, high) + 1e-12
    shares = useful_shares(maps, resource, 132, 0.1)
    assert shares[-1] == 1.0
    assert all(performance(maps, resource, x) < performance(maps, resource, y) for x, y in itertools.pairwise(shares))


def test_falling_maps_are_refused() -> None:
    points = (InterferencePoint(share=0.2, performance=0.5), InterferencePoint(share=0.4, performance=0.4))
    with pytest.raises(ValueError, match="must rise"):
        Interference(name="x", source="x", memory=points, network=())


def test_lookup_interpolates_and_says_so() -> None:
    table = _table([_point(128, 10.0), _point(256, 16.0), _point(512, 28.0)])
    assert lookup(table, GEMM, 256) == profile_table.Timing(time_us=16.0, energy_j=None, implementation="i256", estimated=False)
    between = lookup(table, GEMM, 384)
    assert (between.time_us, between.estimated) == (22.0, True)
    assert lookup(table, GEMM, 64).time_us == pytest.approx(7.0)
    with pytest.raises(ProfileError, match="up to 512 tokens, not 1024"):
        lookup(table, GEMM, 1024)
    with pytest.raises(ProfileError, match="has no decode_attention"):
        lookup(table, ATTENTION, 128)


def test_lookup_by_sms_and_context() -> None:
    by_sms = _table([_point(128, 40.0, 33), _point(128, 20.0, 66), _point(128, 10.0, 132)])
    assert lookup(by_sms, GEMM, 128, num_sms=66) == lookup(by_sms, GEMM, 128, num_sms=66)
    assert lookup(by_sms, GEMM, 128, num_sms=99).time_us == pytest.approx(1 / 0.075)
    assert lookup(by_sms, GEMM, 128, num_sms=11).time_us == pytest.approx(120.0)
    assert lookup(by_sms, GEMM, 128).time_us == 10.0
    by_context = _table([_point(128, 10.0, context=512.0), _point(128, 18.0, context=1024.0)], ATTENTION)
    assert lookup(by_context, ATTENTION, 128, context=768.0).time_us == pytest.approx(14.0)
    one = _table([_point(128, 10.0, context=512.0)], ATTENTION)
    assert lookup(one, ATTENTION, 128, context=1024.0).time_us == pytest.approx(20.0)


def test_lookup_on_fewer_sms_than_were_measured_at_this_size() -> None:
    """A kernel that needs 32 SMs only slows down at every size as at the size where that was measured, not with its SMs."""
    few = [_point(1024, t, sms, context=2048.0) for sms, t in ((16, 160.0), (32, 90.0), (132, 80.0))]
    table = _table([*few, _point(512, 20.0, context=1024.0), _point(1024, 40.0, context=1024.0)], ATTENTION)
    found = lookup(table, ATTENTION, 512, num_sms=32, context=1024.0)
    assert (found.time_us, found.estimated) == (pytest.approx(20.0 * 90 / 80), True)
    assert lookup(table, ATTENTION, 1024, num_sms=16, context=1024.0).time_us == pytest.approx(80.0)
    assert lookup(table, ATTENTION, 768, num_sms=16, context=1024.0).time_us == pytest.approx(60.0)
    # Between measured counts speeds are interpolated; below the smallest there is only proportion left.
    assert lookup(table, ATTENTION, 512, num_sms=24, context=1024.0).time_us == pytest.approx(20 / 80 * 2 / (1 / 160 + 1 / 90))
    assert lookup(table, ATTENTION, 512, num_sms=8, context=1024.0).time_us == pytest.approx(20.0 * 160 / 80 * 2)
    alone = _table([_point(512, 20.0, context=1024.0)], ATTENTION)
    assert lookup(alone, ATTENTION, 512, num_sms=33, context=1024.0).time_us == pytest.approx(80.0)


def test_profiles_survive_json_and_refuse_others() -> None:
    table = _table([_point(128, 10.0)])
    text = profile_table.encode(table)
    assert profile_table.decode(text) == table
    with pytest.raises(ProfileError):
        profile_table.decode(text.replace(b'"tp"', b'"ranks"'))
    with pytest.raises(ProfileError):
        profile_table.decode(text.replace(b'"format_version": 1', b'"format_version": 9'))
    with pytest.raises(ProfileError, match="impossible"):
        _table([_point(128, -1.0)])


def test_a_profile_of_one_model_serves_another_of_the_same_shapes() -> None:
    mix = steady_mix(parse_workload("512:512"), 512)
    table = analytic_profile(preset("llama2-70b"), hardware("a100-80g"), 8, [mix])
    for name in ("llama3-70b", "llama3.1-70b"):
        Costing(model=preset(name), table=table, mix=mix, partition="all_gather").sequential_us()
    with pytest.raises(ProfileError, match="has no"):
        Costing(model=preset("qwen2-72b"), table=table, mix=mix, partition="all_gather").sequential_us()


def test_shapes_of_one_rank() -> None:
    model = preset("llama3-70b")
    assert kernel_of(model, 4, "all_reduce", "qkv_proj").shape == (8192, (16 + 4) * 128)
    assert kernel_of(model, 4, "all_reduce", "o_proj").shape == (2048, 8192)
    assert kernel_of(model, 4, "all_gather", "o_proj").shape == (8192, 2048)
    # Eight KV heads on sixteen ranks: every rank holds one, shared by two.
    assert kernel_of(model, 16, "all_reduce", "decode_attention").shape == (1, 4, 128)
    # The feed-forward width as the ranks hold it: 29568 / 8 is no multiple of 64.
    qwen = preset("qwen2-72b")
    assert kernel_of(qwen, 8, "all_reduce", "gate_up_proj").shape == (8192, 2 * 3712)
    for tp in (1, 2, 4, 8):
        width = parallel_layout(qwen, tp).padded_d_ff // tp
        assert kernel_of(qwen, tp, "all_reduce", "down_proj").shape == (width, 8192)


def test_analytic_times_follow_the_roofline() -> None:
    """No kernel beats the device's rates, more tokens never take less time, fewer SMs never help."""
    for name, tp, device in (("llama2-70b", 8, "a100-80g"), ("mixtral-8x7b", 8, "h100"), ("llama3-8b", 1, "h200")):
        mix = steady_mix(parse_workload("512:512"), 1024)
        machine = hardware(device)
        table = analytic_profile(preset(name), machine, tp, [mix], by_sms=True)
        for series in table.series:
            full = sorted((p.tokens, p.time_us) for p in series.points if p.num_sms == machine.num_sms)
            for p in series.points:
                flops, moved, sent = kernel_work(series.kernel, p.tokens, p.context)
                seconds = 1e-6 * p.time_us
                assert flops <= machine.peak_flops * seconds
                assert moved <= machine.memory_bandwidth * seconds
                assert sent <= machine.network_bandwidth * seconds
                same = next(t for tokens, t in full if tokens == p.tokens)
                assert same <= p.time_us * (1 + 1e-9)
            if series.kernel.name != "experts":
                assert [t for _, t in full] == sorted(t for _, t in full), str(series.kernel)


def test_analytic_h200_is_near_what_was_measured() -> None:
    """Measured, sustained: gate and up of 8B 0.73-0.75 ms at 2048 tokens; an all-reduce of 2048 x 8192 on 4 GPUs 0.200 ms."""
    mix = steady_mix(parse_workload("1024:512"), 2048)
    small = analytic_profile(preset("llama3-8b"), hardware("h200"), 1, [mix])
    assert lookup(small, Kernel(name="swiglu_gemm", shape=(4096, 28672)), 2048).time_us == pytest.approx(743, rel=0.05)
    large = analytic_profile(preset("llama3-70b"), hardware("h200"), 4, [mix])
    assert lookup(large, Kernel(name="all_reduce", shape=(4, 8192)), 2048).time_us == pytest.approx(200, rel=0.05)


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_profiles_are_whole_and_within_the_rooflines(path: Path) -> None:
    measured = profile_table.decode(path.read_bytes())
    machine = hardware(measured.device)
    assert not measured.failures and measured.pairs and measured.interference.memory
    for series in measured.series:
        for p in series.points:
            flops, moved, sent = kernel_work(series.kernel, p.tokens, p.context)
            rates = (machine.peak_flops, machine.memory_bandwidth, machine.network_bandwidth)
            least_us = 1e6 * max(work / rate for work, rate in zip((flops, moved, sent), rates, strict=True))
            assert least_us < p.time_us
            if p.num_sms == machine.num_sms and p.tokens >= 1024 and series.kernel.name != "prefill_attention":
                assert p.time_us < 2.2 * least_us, (series.kernel, p)

"""Reading traces and schedules, the arithmetic of overlap, and the reasons for its absence, on small made-up traces."""

import dataclasses
import gzip
import itertools
import json
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax.compare import overlap, pictures
from nanoflow_jax.compare.names import Label, fused_kernels, label_events, planned_kernels, scopes, sequential_kernels
from nanoflow_jax.compare.schedule import read_schedule
from nanoflow_jax.compare.trace import (
    Event,
    NoDeviceTraceError,
    device_events,
    intersection,
    kind,
    length,
    merged,
    read_events,
    resources,
)
from nanoflow_jax.executor import fused as fused_executor
from nanoflow_jax.executor.phases import group
from nanoflow_jax.parallel import parallel_layout
from nanoflow_jax.plan import Resource
from tests.executor.made_up_trace import planned_trace
from tests.executor.plans import random_plan
from tests.model.test_golden import small_config

C, M, N = Resource.COMPUTE, Resource.MEMORY, Resource.NETWORK
NAMES = {C: "gemm_mosaic_gpu_kernel", M: "decode_attention_mosaic_gpu_kernel", N: "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"}
interval_lists = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda t: (t[0], t[0] + t[1])), max_size=8)


def points(intervals) -> set[int]:
    return {t for start, stop in intervals for t in range(start, stop)}


@given(interval_lists, interval_lists)
def test_intervals_agree_with_points(a: list, b: list) -> None:
    union_a, union_b = merged(a), merged(b)
    both = intersection(union_a, union_b)
    assert points(union_a) == points(a)
    assert points(both) == points(a) & points(b)
    assert length(both) == len(points(a) & points(b))
    for intervals in (union_a, both):
        assert all(start < stop for start, stop in intervals)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(intervals))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(union_a))


def event(resource: Resource, start: float, duration: float, *, stream: str = "", device: int = 0, ctas: int | None = 132):
    return Event(device, stream or f"Stream #{list(Resource).index(resource)}", NAMES[resource], start, duration, ctas=ctas)


kernels = st.builds(
    event, st.sampled_from(list(Resource)), st.integers(0, 40), st.integers(1, 12), device=st.integers(0, 2)
)  # fmt: skip


@given(st.lists(kernels, min_size=1, max_size=20), st.integers(1, 4))
def test_overlap_agrees_with_points(events: list[Event], steps: int) -> None:
    found = overlap.measure(events, steps)
    devices = {e.device for e in events}
    when = {
        (d, r): points([(int(e.start_ns), int(e.end_ns)) for e in events if e.device == d and r in resources(e.name)])
        for d in devices
        for r in Resource
    }
    share = 1e-3 / (steps * len(devices))
    for r in Resource:
        assert found.alone[r] == pytest.approx(share * sum(len(when[d, r]) for d in devices))
    for a, b in overlap.PAIRS:
        assert found.both[a, b] == pytest.approx(share * sum(len(when[d, a] & when[d, b]) for d in devices))
    assert found.hidden == pytest.approx(share * sum(len(when[d, N] & (when[d, C] | when[d, M])) for d in devices))


def test_what_layers_share_cancels() -> None:
    head = [event(C, 0, 500)]
    layer = [event(C, 1000, 3000), event(M, 1000, 2000), event(N, 3500, 1000)]
    shift = 10_000
    second = [event(r, e.start_ns + shift, e.duration_ns) for r, e in zip((C, M, N), layer, strict=True)]
    deep, shallow = overlap.measure([*head, *layer, *second], 1), overlap.measure([*head, *layer], 1)
    one = deep.per_layer(shallow, 1)
    assert one.alone == pytest.approx({C: 3.0, M: 2.0, N: 1.0})
    assert one.both == pytest.approx({(C, M): 2.0, (C, N): 0.5, (M, N): 0.0})
    told = overlap.record(one, [*head, *layer], phases=None, schedule=None, num_sms=132)
    assert told["pairs"]["compute+memory"] == {"us": 2.0, "percent": 100.0}
    assert told["network_hidden_percent"] == 50.0
    assert "why_none" in told["pairs"]["memory+network"]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_trace_that_keeps_to_a_plan_overlaps_as_its_phases(seed: int, tp: int) -> None:
    partition = "none" if tp == 1 else ("all_reduce", "all_gather")[seed % 2]
    plan = random_plan(
        np.random.default_rng(seed), tp=tp, moe=False, partition=partition, b_dense=32, decode_tokens=16, tile=4
    )  # fmt: skip
    shallow, deep = plan.max_layer_offset + 1, plan.max_layer_offset + 3
    busy = {layers: overlap.measure(planned_trace(plan, layers, 2), 2) for layers in (shallow, deep)}
    found = busy[deep].per_layer(busy[shallow], 2)
    held = [(p.duration_us, {plan.nano_operations[r.nano_operation].resource for r in p.running}) for p in plan.phases]
    for resource in Resource:
        assert found.alone[resource] == pytest.approx(sum(us for us, of in held if resource in of), abs=1e-6)
    for pair in overlap.PAIRS:
        assert found.both[pair] == pytest.approx(sum(us for us, of in held if set(pair) <= of), abs=1e-6)
    assert found.hidden == pytest.approx(sum(us for us, of in held if N in of and len(of) > 1), abs=1e-6)


def test_nano_operations_of_a_planned_trace_are_all_named() -> None:
    plan = random_plan(np.random.default_rng(5), tp=2, moe=False, partition="all_gather", b_dense=32, decode_tokens=16, tile=4)
    events = [e for e in planned_trace(plan, 4, 3) if e.device == 0]
    labels = label_events(events, planned_kernels(plan, 4), 3)
    named = [label for e, label in labels.items() if label.layer is not None and kind(e.name) != "decode_attention_combine"]
    assert sorted(map(str, named)) == sorted(
        f"{n.operation} {n.nano_batch + 1}" for n in plan.nano_operations for _ in range(4 * 3)
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected", "held"),
    [
        ("gemm_mosaic_gpu_kernel", "gemm", {C}),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "gemm", {C}),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "gemm", {C}),
        ("void cutlass::device_kernel<...>", "gemm", {C}),
        ("gemm_fusion_dot_general_3", "gemm", {C}),
        ("grouped_gemm_mosaic_gpu_kernel", "grouped_gemm", {C}),
        ("prefill_attention_mosaic_gpu_kernel", "prefill_attention", {C}),
        ("decode_attention_mosaic_gpu_kernel", "decode_attention", {M}),
        ("decode_attention_combine_mosaic_gpu_kernel", "decode_attention_combine", {M}),
        ("fused_gemm_attention_mosaic_gpu_kernel", "fused", {C, M}),
        ("gemm_reduce_scatter_mosaic_gpu_kernel", "fused", {C, N}),
        ("ncclDevKernel_AllGather_RING_LL", "collective", {N}),
        ("splitKreduce_kernel<32, 16, int>", "other", set()),
        ("append_kv_mosaic_gpu_kernel", "other", set()),
        ("loop_add_fusion", "other", set()),
        ("MemcpyD2D", "other", set()),
    ],
)
def test_kernels_are_known_by_name(name: str, expected: str, held: set[Resource]) -> None:
    assert kind(name) == expected
    assert set(resources(name)) == held


def plane(name: str, **lines: list):
    return SimpleNamespace(name=name, lines=[SimpleNamespace(name=line, events=events) for line, events in lines.items()])


def recorded(name: str, start: float, duration: float, **stats: object):
    return SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=list(stats.items()))


def test_events_come_from_streams_of_gpus() -> None:
    details = "regs:168 static_shared:0 dynamic_shared:200000 grid:66,2,1 block:384,1,1 occ_pct:18.75"
    gemm = recorded("b", 5, 2, hlo_op="gemm.2", kernel_details=details)
    found = device_events([
        plane("/host:CPU", python=[recorded("call", 0, 9)]),
        plane("/device:GPU:1", **{
            "Stream #20(Compute,MemcpyD2D)": [gemm, recorded("c", 3, 1)],
            "XLA Ops": [recorded("not a kernel", 0, 100)],
        }),
        plane("/device:GPU:0", **{"Stream #7(Compute)": [recorded("a", 8, 1)]}),
    ])  # fmt: skip
    assert found == [
        Event(0, "Stream #7", "a", 8, 1),
        Event(1, "Stream #20", "c", 3, 1),
        Event(1, "Stream #20", "b", 5, 2, op="gemm.2", ctas=132),
    ]


def test_a_profile_of_a_cpu_has_no_streams(tmp_path) -> None:
    with jax.profiler.trace(tmp_path):
        jax.jit(lambda x: x @ x)(jnp.ones((64, 64))).block_until_ready()
    with pytest.raises(NoDeviceTraceError, match="/host:CPU"):
        read_events(tmp_path)


def test_no_profile_at_all(tmp_path) -> None:
    with pytest.raises(NoDeviceTraceError, match="0 xplane files"):
        read_events(tmp_path)


# --- reasons


def reason(events: list[Event], a: Resource, b: Resource, phases=None, text: str = "") -> str:
    schedule = read_schedule(text)
    return overlap.why_none(events, a, b, phases=phases, schedule=schedule, num_sms=132)


def test_a_resource_without_kernels() -> None:
    assert reason([event(C, 0, 5)], C, N) == "none of the 1 kernels traced is of network"


def test_one_stream() -> None:
    events = [event(C, 0, 5, stream="Stream #13"), event(M, 5, 5, stream="Stream #13"), event(M, 10, 5, stream="Stream #13")]
    assert reason(events, C, M) == "all 1 compute and 2 memory kernels ran on one stream, Stream #13"


def test_phases_without_the_pair() -> None:
    plan = random_plan(np.random.default_rng(0), tp=1, moe=False, partition="none", b_dense=16, decode_tokens=0, tile=4)
    phases = group(plan, 2)
    assert f"none of the plan's {len(phases)} phases holds compute beside memory" in reason(
        [event(C, 0, 5), event(M, 5, 5)], C, M, phases
    )


SCHEDULED = """HloModule jit_forward, is_scheduled=true

%region (a: f32[]) -> f32[] {{
  ROOT %custom.1 = bf16[8] custom-call(%a), custom_call_target="__cublas$gemm"
}}

%compute_on.1 (p: bf16[8]) -> bf16[8] {{
  ROOT %mpmd_map.1 = bf16[8]{{0}} custom-call(%p), custom_call_target="mosaic_gpu_v2", backend_config={{x\\0Bgemm_mosaic_gpu}}
}}

%fused (p: bf16[8]) -> bf16[8] {{
  ROOT %mpmd_map.2 = bf16[8]{{0}} custom-call(%p), custom_call_target="mosaic_gpu_v2", x="decode_attention_mosaic_gpu"
}}

%compute_on.2 (p: bf16[8]) -> bf16[8] {{
  ROOT %f = bf16[8]{{0}} fusion(%p), kind=kCustom, calls=%fused
}}

ENTRY %main (p: bf16[8]) -> bf16[8] {{
{entry}
}}
"""
GEMM_START = "  %call-start = ((bf16[8]{0}), bf16[8]{0}) call-start(%p), to_apply=%compute_on.1"
GEMM_DONE = "  %call-done = bf16[8]{0} call-done(%call-start)"
DECODE_START = (
    "  %call-start.1 = ((bf16[8]{0}), bf16[8]{0}) call-start(%p), to_apply=%compute_on.2, "
    'metadata={op_name="jit(forward)/decode_attention.0.1/compute_on"}'
)
DECODE_DONE = "  ROOT %call-done.1 = bf16[8]{0} call-done(%call-start.1)"
REDUCE = "  %psum = bf16[8]{0} all-reduce(%p), channel_id=1, to_apply=%region"


def scheduled(*entry: str) -> str:
    return SCHEDULED.format(entry="\n".join(entry))


def test_schedules_tell_what_is_in_flight_together() -> None:
    schedule = read_schedule(scheduled(GEMM_START, DECODE_START, REDUCE, GEMM_DONE, DECODE_DONE))
    assert schedule is not None
    assert [schedule.together(a, b) for a, b in overlap.PAIRS] == [1, 1, 1]
    assert [schedule.apart(a, b) for a, b in overlap.PAIRS] == [[], [], []]


def test_a_schedule_that_waits_is_the_reason() -> None:
    text = scheduled(GEMM_START, GEMM_DONE, DECODE_START, DECODE_DONE, REDUCE)
    told = reason([event(C, 0, 5000), event(M, 7000, 5000)], C, M, text=text)
    assert "as call-done (compute) comes before call-start.1 (memory, decode_attention 2);" in told
    assert "came within 2.0 us, with 132 and 132 CTAs, more than the 132 SMs" in told


def test_only_scheduled_modules_have_a_schedule() -> None:
    assert read_schedule("HloModule jit_forward, entry_computation_layout={}\n") is None


def test_kernels_that_fit_but_did_not_meet() -> None:
    text = scheduled(GEMM_START, DECODE_START, GEMM_DONE, DECODE_DONE)
    told = reason([event(C, 0, 5000, ctas=100), event(M, 5500, 5000, ctas=32)], C, M, text=text)
    assert told == "compute on Stream #0 and memory on Stream #1 came within 0.5 us, with 100 and 32 CTAs, within the 132 SMs"


# --- names and pictures


def step_events(expected: dict[str, list[Label]], begin: float) -> list[Event]:
    resource = {"gemm": C, "prefill_attention": C, "decode_attention": M}
    return [
        event(resource[each], begin + 10 * i, 10) if each != "prefill_attention" else Event(0, "s", each, begin + 10 * i, 10)
        for each in resource
        for i in range(len(expected[each]))
    ]


@pytest.mark.parametrize("planned", [False, True])
def test_kernels_of_a_kind_are_named_in_order(planned: bool) -> None:
    plan = random_plan(np.random.default_rng(1), tp=1, moe=False, partition="none", b_dense=16, decode_tokens=8, tile=4)
    config = small_config()
    sequential = sequential_kernels(config, parallel_layout(config, 1))
    expected = planned_kernels(plan, config.num_layers) if planned else sequential
    first = step_events(expected, 0)
    events = first + step_events(expected, 1000)
    labels = label_events(events, expected, 2)
    wanted = [label for each in ("gemm", "prefill_attention", "decode_attention") for label in expected[each]]
    assert [labels[e] for e in first] == wanted
    assert [labels[e] for e in events[len(first) :]] == wanted
    gemms = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    assert [label.operation for label in sequential["gemm"]] == [*gemms, *gemms, "logits"]


def test_gemms_that_sum_over_the_ranks_are_fused_kernels() -> None:
    rng = np.random.default_rng(1)
    plan = random_plan(rng, tp=2, moe=False, partition="gemm_all_reduce", b_dense=16, decode_tokens=8, tile=4)
    config = small_config()
    sequential = sequential_kernels(config, parallel_layout(config, 2), reduce_in_gemm=True)
    assert [label.operation for label in sequential["fused"]] == ["o_proj", "down_proj"] * config.num_layers
    assert {label.operation for label in sequential["collective"]} == {"embed", "logits"}
    gathered = dataclasses.replace(parallel_layout(config, 2), gathered_o_proj=True)
    sequential = sequential_kernels(config, gathered, reduce_in_gemm=True)
    assert [label.operation for label in sequential["fused"]] == ["down_proj"] * config.num_layers
    assert [label.operation for label in sequential["gemm"]][:3] == ["qkv_proj", "o_proj", "gate_up_proj"]
    assert "fused" not in sequential_kernels(config, parallel_layout(config, 1), reduce_in_gemm=True)
    for planned in (planned_kernels(plan, 3), fused_kernels(plan, 3)):
        summed = [label for label in planned["fused"] if label.operation in ("o_proj", "down_proj")]
        assert len(summed) == 3 * (len(plan.nano_batches["o_proj"]) + len(plan.nano_batches["down_proj"]))
        assert not any(label.beside for label in summed)
        assert {label.operation for label in planned["gemm"]} <= {"qkv_proj", "gate_up_proj", "logits"}


def test_what_does_not_match_is_told_by_kind() -> None:
    expected = {"gemm": [Label("qkv_proj", 0), Label("logits")], "decode_attention": [Label("decode_attention", 0)]}
    events = [event(C, 0, 1), event(M, 1, 1)]
    labels = label_events(events, expected, 1)
    assert [str(labels[e]) for e in events] == ["gemm", "decode_attention"]
    assert labels[events[1]].layer == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_fused_kernel_has_two_names(seed: int) -> None:
    plan = random_plan(np.random.default_rng(seed), tp=1, moe=False, partition="none", b_dense=32, decode_tokens=16, tile=4)
    alone, fused = planned_kernels(plan, 3), fused_kernels(plan, 3)
    besides = [label.beside for label in fused["fused"]]
    gemms = [Label(label.operation, label.layer, label.nano_batch) for label in fused["fused"]]
    assert Counter([*fused["gemm"], *gemms]) == Counter(alone["gemm"])
    by_second = {
        Label("decode_attention", phase[part.attention].layer, phase[part.attention].nano.nano_batch)
        for phase in group(plan, 3)
        for parts in fused_executor.beside(phase, fused_executor.gemms(plan)).values()
        for part in parts[1:]
    }
    assert {*fused["decode_attention"], *besides} | by_second == set(alone["decode_attention"])
    assert all(str(label).endswith(f"+ {label.beside}") for label in fused["fused"])


def test_scopes_in_the_module_name_kernels_whatever_their_order() -> None:
    text = """
  ROOT %mpmd_map.3 = bf16[8]{0} custom-call(%p), metadata={op_name="jit(forward)/shard_map/o_proj.1.2/compute_on/gemm/mpmd_map"}
  %mpmd_map.4 = bf16[8]{0} custom-call(%p), metadata={op_name="jit(forward)/qkv_proj.10.0/mpmd_map" stack_frame_id=9}
  %dot.5 = bf16[8]{0} custom-call(%p), metadata={op_name="jit(forward)/dot_general"}
"""
    found = scopes(text)
    assert found == {"mpmd_map.3": Label("o_proj", 1, 2), "mpmd_map.4": Label("qkv_proj", 10, 0)}
    events = [
        dataclasses.replace(event(C, i, 1), op=op, name=name)
        for i, (op, name) in enumerate([
            ("mpmd_map.3", "gemm"), ("mpmd_map.4", "gemm"), ("dot.5", "gemm"), ("mpmd_map.4", "fusion_3"),
        ])
    ]  # fmt: skip
    labels = label_events(events, {}, 1, found)
    assert [str(labels[e]) for e in events] == ["o_proj 3", "qkv_proj 1", "gemm", "other"]


def test_the_window_lies_in_the_middle_step() -> None:
    events = [event(C, 1000.0 * i, 1000) for i in range(30)]
    start, stop = pictures.middle_of_step(events, steps=3, layers_us=8, shown_us=2)
    assert (start, stop) == (13_000, 15_000)


def test_rows_hold_what_does_not_overlap() -> None:
    first, beside, behind, early, late = (
        event(C, 0, 100),
        event(C, 50, 100),
        event(C, 100, 100),
        event(C, 196, 9),
        event(C, 300, 1),
    )
    rows = pictures.side_by_side([late, first, beside, behind, early])
    assert rows == [[first, behind, early, late], [beside]]
    assert pictures.side_by_side([]) == []


def test_pictures_and_perfetto_traces(tmp_path) -> None:
    pair = Label("o_proj", 0, 0, beside=Label("decode_attention", 0, 0))
    expected = {
        "gemm": [Label("qkv_proj", 0, 0)], "decode_attention": [Label("decode_attention", 0, 1)],
        "collective": [Label("ffn_all_reduce", 0, 0)], "fused": [pair],
    }  # fmt: skip
    events = [event(C, 0, 900, ctas=100), event(M, 100, 700, ctas=32), event(N, 500, 900, ctas=None), event(C, 0, 10, device=1)]
    fused = Event(0, "Stream #0", "gemm_decode_attention_kernel", 1000, 500, ctas=132)
    other = Event(0, "Stream #0", "loop_fusion", 1500, 100)
    events += [fused, other]
    labels = label_events([e for e in events if e.device == 0], expected, 1) | {events[3]: Label("gemm")}
    first = [e for e in events if e.device == 0]
    pictures.draw(first, labels, (0, 1600), num_sms=132, title="test", path=tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    pictures.draw([], {}, (0, 1600), num_sms=132, title="nothing", path=tmp_path / "b.png")
    pictures.write_perfetto(events, labels, tmp_path / "t.json.gz")
    records = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    spans = [r for r in records if r["ph"] == "X"]
    assert len(spans) == len(events)
    assert {(r["pid"], r["name"], r["cat"]) for r in spans} == {
        (0, "qkv_proj 1", "compute"), (0, "decode_attention 2", "memory"), (0, "ffn_all_reduce 1", "network"),
        (1, "gemm", "compute"), (0, "o_proj 1 + decode_attention 1", "compute+memory"), (0, "loop_fusion", "other"),
    }  # fmt: skip
    assert next(r for r in spans if r["cat"] == "network")["ts"] == 0.5

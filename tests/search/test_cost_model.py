"""The cost model against the figures that the NanoFlow paper publishes (Tables 1 and 2, Figure 3)."""

import pytest

from nanoflow_jax.config import preset
from nanoflow_jax.workload import parse_workload, steady_mix
from search.cost_model import InfeasibleError, check_batch, classify, memory_budget, operation_costs
from search.hardware import HardwareError, devices, hardware

A100 = hardware("a100-80g")
LLAMA_70B = preset("llama2-70b")
PAPER_WORKLOADS = ("512:512", "1024:512", "512:1024", "sharegpt", "lmsys", "splitwise")


def _classify(model: str, tp: int, b_dense: int, workload: str):
    w = parse_workload(workload)
    return classify(preset(model), A100, tp, steady_mix(w, b_dense), w)


@pytest.mark.parametrize(
    ("device", "ratio"), [("v100", 139), ("a100-40g", 201), ("a100-80g", 156), ("h100", 295), ("b200", 281)]
)
def test_compute_to_bandwidth_ratios_of_table_1(device: str, ratio: float) -> None:
    assert hardware(device).flops_per_byte == pytest.approx(ratio, abs=0.7)


def test_every_device_of_table_1_has_a_source() -> None:
    known = {"v100", "a100-40g", "a100-80g", "h100", "h200", "b200", "mi250", "mi300x", "mi325x", "gaudi2", "gaudi3"}
    assert set(devices()) == known
    assert all(d.source and (d.gemm_flops is None) == (d.gemm_source is None) for d in devices().values())


def test_times_of_table_2() -> None:
    c = _classify("llama2-70b", 8, 2048, "512:1024")
    # The paper counts prompt attention without the causal mask, hence 114.17 there and 113.99 here.
    assert c.t_compute * 1e3 == pytest.approx(114.17, rel=0.002)
    assert c.t_memory * 1e3 == pytest.approx(45.09, rel=0.001)
    assert c.t_network * 1e3 == pytest.approx(31.33, rel=0.001)
    assert c.bottleneck == "compute"


@pytest.mark.parametrize(
    ("operation", "gflop"),
    [
        ("gate_up_proj", 153931.6),
        ("decode_attention", 3665.9),
        ("qkv_proj", 27487.8),
        ("o_proj", 21990.2),
        ("down_proj", 76965.8),
    ],
)
def test_flops_of_table_2(operation: str, gflop: float) -> None:
    costs = {c.name: c for c in operation_costs(LLAMA_70B, steady_mix(parse_workload("512:1024"), 2048), 8)}
    assert costs[operation].flops / 1e9 == pytest.approx(gflop, rel=1e-3)


def test_memory_to_compute_ratio_of_figure_3() -> None:
    ratios = [_classify("llama2-70b", 8, 2048, w).tr for w in PAPER_WORKLOADS]
    assert min(ratios) == pytest.approx(0.07, abs=0.005)
    assert 0.3 < max(ratios) <= 0.37
    assert _classify("llama3-8b", 1, 512, "512:1024").tr == pytest.approx(1.0, abs=0.1)


def test_both_optimal_throughputs_are_shown() -> None:
    c = _classify("llama2-70b", 8, 2048, "512:512")
    assert c.optimal_datasheet == pytest.approx(312e12 / (2 * LLAMA_70B.num_params))
    assert c.optimal_measured == pytest.approx(280e12 / (2 * LLAMA_70B.num_params))


def test_mixture_counts_the_routed_experts_only() -> None:
    mixtral = preset("mixtral-8x7b")
    costs = {c.name: c for c in operation_costs(mixtral, steady_mix(parse_workload("512:512"), 2048), 8)}
    per_token = 2 * 3 * mixtral.d_model * mixtral.d_ff * mixtral.experts_per_token * mixtral.num_layers
    assert costs["experts"].flops == pytest.approx(2048 * per_token)


def test_no_network_on_one_device() -> None:
    assert _classify("llama3-8b", 1, 512, "512:512").t_network == 0


@pytest.mark.parametrize(("b_dense", "match"), [(2000, "multiple of 128"), (0, "multiple of 128"), (4096, "more memory")])
def test_infeasible_batches_are_named(b_dense: int, match: str) -> None:
    with pytest.raises(InfeasibleError, match=match):
        check_batch(LLAMA_70B, A100, 8, parse_workload("512:1024"), b_dense)


def test_only_what_decodes_needs_memory() -> None:
    """A batch of more prompts than the steady state has needs less: sequences count, and only as many as fit."""
    given = (preset("llama3-8b"), hardware("h200"), 1, parse_workload("512:512"), 3072)
    with pytest.raises(InfeasibleError, match="more memory"):
        check_batch(*given)
    most = check_batch(*given, decode_tokens=1024).max_sequences
    for beyond in (most + 1, -1):
        with pytest.raises(InfeasibleError, match=f"decode_tokens={beyond}"):
            check_batch(*given, decode_tokens=beyond)


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(InfeasibleError, match="leaves no room"):
        memory_budget(LLAMA_70B, A100, 1, parse_workload("512:512"))
    with pytest.raises(InfeasibleError, match="does not divide"):
        check_batch(LLAMA_70B, A100, 7, parse_workload("512:512"), 2048)


def test_unknown_hardware() -> None:
    with pytest.raises(HardwareError, match="a100-80g"):
        hardware("abacus")

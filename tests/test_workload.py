"""Workloads as users write them, and the batch that they come to."""

import pytest

from nanoflow_jax.workload import BatchMix, WorkloadError, parse_workload, steady_mix


def test_lengths_make_a_mix() -> None:
    workload = parse_workload("1024:512")
    assert str(workload) == "1024:512"
    mix = steady_mix(workload, 2048)
    assert mix == BatchMix(b_dense=2048, decode_tokens=683, decode_context=1280, prefill_context=512)
    assert mix.prefill_tokens == 1365


@pytest.mark.parametrize(("text", "decode_tokens"), [("512:0", 0), ("0:512", 2048), ("sharegpt", 1161), ("splitwise", 316)])
def test_shares_of_decoding(text: str, decode_tokens: int) -> None:
    assert steady_mix(parse_workload(text), 2048).decode_tokens == decode_tokens


@pytest.mark.parametrize("text", ["", "512", "512:512:1", "a:b", "-1:5", "0:0", "\u00b2:5"])
def test_unknown_workloads(text: str) -> None:
    with pytest.raises(WorkloadError, match="workload"):
        parse_workload(text)

"""Which GEMM of a phase goes with decode attention, and that the two operations see the fused kernel's results."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from nanoflow_jax.executor import fused
from nanoflow_jax.executor.phases import Placed
from nanoflow_jax.kernels import REFERENCE, Kernels, cublas, mosaic
from nanoflow_jax.plan import NanoOperation, Resource

_RESOURCES = {"decode_attention": Resource.MEMORY, "o_all_reduce": Resource.NETWORK}


def _placed(operation: str, start: float, stop: float, num_sms: int = 1) -> Placed:
    nano = NanoOperation(
        operation=operation, nano_batch=0, resource=_RESOURCES.get(operation, Resource.COMPUTE), layer_offset=0,
        start_us=start, duration_us=stop - start, best_us=stop - start, phase=0, share=1.0, num_sms=num_sms,
    )  # fmt: skip
    return Placed(0, nano, start)


def test_attention_goes_with_the_gemm_that_it_meets_longest() -> None:
    phase = (
        _placed("o_proj", 0, 10),
        _placed("decode_attention", 2, 30),
        _placed("gate_up_proj", 10, 40),
        _placed("down_proj", 40, 60),
    )
    assert fused.partners(phase) == {1: 2}


def test_each_gemm_has_one_partner_and_only_what_meets_is_paired() -> None:
    phase = (
        _placed("gate_up_proj", 0, 40),
        _placed("decode_attention", 0, 30),
        _placed("decode_attention", 30, 45),
        _placed("prefill_attention", 40, 50),
        _placed("down_proj", 50, 60),
    )
    assert fused.partners(phase) == {1: 0}
    assert fused.partners(phase[3:]) == {}


def test_streams_stay_where_something_is_left_to_overlap() -> None:
    phase = (_placed("gate_up_proj", 0, 40), _placed("decode_attention", 0, 30), _placed("down_proj", 40, 50))
    assert not fused.needs_streams(phase, {1: 0})
    assert fused.needs_streams(phase, {})
    assert fused.needs_streams((*phase, _placed("o_all_reduce", 0, 5)), {1: 0})


@pytest.mark.parametrize(("gemm_sms", "attention_sms", "wanted"), [(100, 32, 100), (132, 32, 100), (80, 32, 80), (132, 132, 1)])
def test_the_gemm_has_what_attention_leaves(gemm_sms: int, attention_sms: int, wanted: int) -> None:
    gemm, attention = _placed("o_proj", 0, 1, gemm_sms), _placed("decode_attention", 0, 1, attention_sms)
    assert fused.gemm_share(gemm, attention, 132) == wanted


def _recording(calls: list[dict]) -> Kernels:
    def both(a, b, *operands, attention_sms, **epilogue):
        calls.append({"attention_sms": attention_sms, "operands": operands, **epilogue})
        return a + b, operands[0] * 2

    return dataclasses.replace(REFERENCE, gemm_with_decode_attention=both)


def test_a_pair_is_one_call_with_the_operands_of_both() -> None:
    calls: list[dict] = []
    kernels = _recording(calls)
    x, q = jnp.ones((2, 2)), jnp.full((3,), 5.0)

    def gemm(kernels: Kernels) -> dict:
        return {"ffn": kernels.gemm(x * 3, x, swiglu=True) + 1}

    def attention(kernels: Kernels) -> dict:
        return {"decoded": jnp.pad(kernels.decode_attention(q[:2], x), (0, 1))}

    ffn, decoded = fused.run_pair(gemm, attention, kernels, REFERENCE, 24)
    np.testing.assert_array_equal(ffn["ffn"], 5.0)
    np.testing.assert_array_equal(decoded["decoded"], [10.0, 10.0, 0.0])
    (call,) = calls
    assert call["attention_sms"] == 24
    assert call["swiglu"]
    assert len(call["operands"]) == 2


def test_without_rows_that_can_decode_the_gemm_runs_alone() -> None:
    calls: list[dict] = []
    x = jnp.ones((2, 2))
    product, attended = fused.run_pair(
        lambda kernels: {"o": kernels.gemm(x, x)}, lambda _: {"decoded": x * 0}, _recording(calls), REFERENCE, 24
    )
    np.testing.assert_array_equal(product["o"], 2.0)
    np.testing.assert_array_equal(attended["decoded"], 0.0)
    assert not calls


def test_only_kernels_that_keep_to_a_budget_can_be_fused() -> None:
    assert mosaic(100).gemm_with_decode_attention is not None
    assert cublas(100).gemm_with_decode_attention is None

"""Which GEMM of a phase goes with decode attention, and that the two operations see the fused kernel's results."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from nanoflow_jax.executor import fused
from nanoflow_jax.executor.fused import Part, SplitAttention
from nanoflow_jax.executor.phases import Placed
from nanoflow_jax.kernels import REFERENCE, Kernels, cublas, mosaic
from nanoflow_jax.plan import NanoOperation, Resource

GEMMS = frozenset({"qkv_proj", "o_proj", "gate_up_proj", "down_proj"})

_RESOURCES = {"decode_attention": Resource.MEMORY, "o_all_reduce": Resource.NETWORK}


def _placed(operation: str, start: float, stop: float, num_sms: int = 1) -> Placed:
    nano = NanoOperation(
        operation=operation, nano_batch=0, resource=_RESOURCES.get(operation, Resource.COMPUTE), layer_offset=0,
        start_us=start, duration_us=stop - start, best_us=stop - start, phase=0, share=1.0, num_sms=num_sms,
    )  # fmt: skip
    return Placed(0, nano, start)


def _whole(attention: int) -> tuple[Part, ...]:
    return (Part(attention, 0.0, 1.0),)


def test_attention_is_divided_among_the_gemms_that_it_meets_by_the_time_they_meet() -> None:
    phase = (
        _placed("o_proj", 0, 10),
        _placed("decode_attention", 2, 34),
        _placed("gate_up_proj", 10, 26),
        _placed("down_proj", 26, 60),
    )
    assert fused.beside(phase, GEMMS) == {0: (Part(1, 0.0, 0.25),), 2: (Part(1, 0.25, 0.75),), 3: (Part(1, 0.75, 1.0),)}


def test_a_gemm_takes_the_ends_of_several_attentions_of_one_layer() -> None:
    phase = (
        _placed("gate_up_proj", 0, 40),
        _placed("decode_attention", 0, 30),
        _placed("decode_attention", 30, 50),
        _placed("prefill_attention", 40, 45),
        _placed("down_proj", 45, 60),
    )
    assert fused.beside(phase, GEMMS) == {0: (Part(1, 0.0, 1.0), Part(2, 0.0, 2 / 3)), 4: (Part(2, 2 / 3, 1.0),)}
    other_layer = (*phase[:2], dataclasses.replace(phase[2], layer=1), *phase[3:])
    assert fused.beside(other_layer, GEMMS) == {0: _whole(1), 4: _whole(2)}
    assert fused.beside(phase[3:], GEMMS) == {}


def test_streams_stay_where_something_is_left_to_overlap() -> None:
    phase = (_placed("gate_up_proj", 0, 40), _placed("decode_attention", 0, 30), _placed("down_proj", 40, 50))
    assert not fused.needs_streams(phase, {0: _whole(1)})
    assert fused.needs_streams(phase, {})
    assert fused.needs_streams((*phase, _placed("o_all_reduce", 0, 5)), {0: _whole(1)})


@pytest.mark.parametrize(("gemm_sms", "attention_sms", "wanted"), [(100, 32, 100), (132, 32, 100), (80, 32, 80), (132, 132, 1)])
def test_the_gemm_has_what_attention_leaves(gemm_sms: int, attention_sms: int, wanted: int) -> None:
    gemm, attention = _placed("o_proj", 0, 1, gemm_sms), _placed("decode_attention", 0, 1, attention_sms)
    assert fused.gemm_share(gemm, attention, 132) == wanted


def _recording(calls: list[dict]) -> Kernels:
    def both(a, b, *operands, attention_sms, **epilogue):
        calls.append({"attention_sms": attention_sms, "operands": operands, **epilogue})
        return a + b, operands[0] * 2

    return dataclasses.replace(REFERENCE, gemm_with_decode_attention=both)


def _attention(rows: int, first: float) -> SplitAttention:
    """Queries first, first + 1, ..., behind which one more token does not decode."""
    q, pages = first + jnp.arange(rows, dtype=jnp.float32), jnp.zeros(3)

    def apply(kernels: Kernels) -> dict:
        out = kernels.decode_attention(q, pages, pages, jnp.zeros((rows, 2)), jnp.ones(rows)) if rows else q
        return {"decoded": jnp.pad(out, (0, 1))}

    return SplitAttention(apply, REFERENCE)


def test_every_row_is_computed_once_and_lands_in_its_place() -> None:
    calls: list[dict] = []
    kernels, x = _recording(calls), jnp.ones((2, 2))
    one, other = _attention(5, 1.0), _attention(3, 10.0)

    def gemm(kernels: Kernels) -> dict:
        return {"ffn": kernels.gemm(x * 3, x, swiglu=True) + 1}

    for beside in ([(one, Part(0, 0.0, 0.5)), (other, Part(1, 0.0, 1.0))], [(one, Part(0, 0.5, 1.0))]):
        written = fused.run_gemm(gemm, kernels, beside, 24)
        np.testing.assert_array_equal(written["ffn"], 5.0)
    np.testing.assert_array_equal(one.result()["decoded"], [2, 4, 6, 8, 10, 0])
    np.testing.assert_array_equal(other.result()["decoded"], [20, 22, 24, 0])
    assert [call["attention_sms"] for call in calls] == [24, 24]
    assert all(call["swiglu"] for call in calls)
    assert [[len(array) for array in call["operands"]] for call in calls] == [[5, 3, 3, 5, 5], [3, 3, 3, 3, 3]]


def test_without_rows_that_can_decode_the_gemm_runs_alone() -> None:
    calls: list[dict] = []
    x, attention = jnp.ones((2, 2)), _attention(0, 0.0)
    product = fused.run_gemm(lambda k: {"o": k.gemm(x, x)}, _recording(calls), [(attention, Part(0, 0.0, 1.0))], 24)
    np.testing.assert_array_equal(product["o"], 2.0)
    np.testing.assert_array_equal(attention.result()["decoded"], [0.0])
    assert not calls


def test_only_kernels_that_keep_to_a_budget_can_be_fused() -> None:
    assert mosaic(100).gemm_with_decode_attention is not None
    assert cublas(100).gemm_with_decode_attention is None

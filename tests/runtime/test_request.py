import dataclasses

import msgspec
import numpy as np
import pytest

from nanoflow_jax.runtime.request import Limits, RejectCode, Request, RequestRejected, SamplingParams, validate

LIMITS = Limits(vocab_size=100, max_context=64, pool_tokens=40, has_tokenizer=True)


def _check(tokens=(1, 2, 3), limits=LIMITS, request_id="r", **params):
    return validate(Request(request_id=request_id, prompt_token_ids=tokens, params=SamplingParams(**params)), limits)


def test_a_valid_prompt_becomes_int32():
    prompt = _check(np.array([1, 99, 0]), temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=2**32 - 1, logprobs=20)
    assert prompt.dtype == np.int32
    assert prompt.tolist() == [1, 99, 0]


@pytest.mark.parametrize(
    ("tokens", "code"),
    [
        ([], RejectCode.EMPTY_PROMPT),
        (np.zeros(0, np.int32), RejectCode.EMPTY_PROMPT),
        ([0] * 64, RejectCode.PROMPT_TOO_LONG),
        ([0] * 41, RejectCode.EXCEEDS_POOL),
        ([100], RejectCode.BAD_PARAMETER),
        ([-1], RejectCode.BAD_PARAMETER),
        ([2**70], RejectCode.BAD_PARAMETER),
        ([1.5], RejectCode.BAD_PARAMETER),
        ([[1], [2]], RejectCode.BAD_PARAMETER),
        ([[1], [2, 3]], RejectCode.BAD_PARAMETER),
        (["a"], RejectCode.BAD_PARAMETER),
        ([True], RejectCode.BAD_PARAMETER),
    ],
)
def test_case_11_and_12_bad_prompts_are_refused_with_a_code(tokens, code):
    with pytest.raises(RequestRejected) as refusal:
        _check(tokens)
    assert refusal.value.code is code


def test_the_longest_prompts_that_fit():
    assert _check([0] * 40).size == 40
    assert _check([0] * 63, dataclasses.replace(LIMITS, pool_tokens=63)).size == 63


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", 1e9),
        ("temperature", "hot"), ("temperature", True), ("top_p", 1.1), ("top_p", -0.1), ("top_p", float("nan")),
        ("min_p", 2), ("min_p", -1), ("top_k", -1), ("top_k", 2**31), ("top_k", 1.0), ("max_tokens", 0), ("max_tokens", -5),
        ("max_tokens", 10**12), ("max_tokens", None), ("seed", -1), ("seed", 2**32), ("seed", 0.5), ("logprobs", 21),
        ("logprobs", -1), ("stop_token_ids", (100,)), ("stop_token_ids", (-1,)), ("stop_token_ids", tuple(range(33))),
        ("stop_token_ids", [1]), ("stop", ("",)), ("stop", "abc"), ("stop", ("x" * 1025,)), ("stop", ("a",) * 17),
        ("stop", (3,)), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused_by_name(field, value):
    with pytest.raises(RequestRejected, match=field) as refusal:
        _check(**{field: value})
    assert refusal.value.code is RejectCode.BAD_PARAMETER
    assert refusal.value.field == field
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("request_id", ["", 3, None])
def test_a_request_needs_a_name(request_id):
    with pytest.raises(RequestRejected, match="request_id"):
        _check(request_id=request_id)


@pytest.mark.parametrize("field", ["session_id", "cache_salt"])
def test_sessions_and_salts_are_short_printable_names(field):
    for name in (None, "a", "x" * 256, "naïve 你好"):
        validate(Request(request_id="r", prompt_token_ids=[1], **{field: name}), LIMITS)
    for name in ("", "x" * 257, "a\n", "\ud800", 3, b"a"):
        with pytest.raises(RequestRejected, match=field) as refusal:
            validate(Request(request_id="r", prompt_token_ids=[1], **{field: name}), LIMITS)
        assert (refusal.value.code, refusal.value.field) == (RejectCode.BAD_PARAMETER, field)


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(RequestRejected, match="tokenizer"):
        _check(limits=dataclasses.replace(LIMITS, has_tokenizer=False), stop=("a",))


def test_output_ends_at_the_first_limit():
    assert LIMITS.output_limit(10, 5) == 5
    assert LIMITS.output_limit(10, 60) == 31, "10 + 31 tokens, the last of which needs no slot"
    assert dataclasses.replace(LIMITS, pool_tokens=1000).output_limit(10, 60) == 54


def test_parameters_travel_and_refuse_unknown_fields():
    params = SamplingParams(temperature=0.5, stop=("a",), stop_token_ids=(3,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    with pytest.raises(msgspec.ValidationError, match="top_q"):
        msgspec.convert({"top_q": 1}, SamplingParams)

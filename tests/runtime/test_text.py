"""Stop strings across token borders and characters split over tokens, on a tokenizer of single bytes and odd pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, pre_tokenizers

from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.text import TextStream
from nanoflow_jax.tokenizer import Tokenizer
from tests.runtime.mock_runner import MockRunner, plain_decode, tiny_config
from tests.runtime.test_engine import request, run

# Every byte is a token, and a few tokens have two or three bytes, so that a text has many splits.
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def _tokenizer() -> Tokenizer:
    inner = HuggingFaceTokenizer(models.BPE(vocab={c: i for i, c in enumerate(_ALPHABET)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(inner)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return _tokenizer()


def _stream(tokenizer, ids, stop=()):
    stream = TextStream(tokenizer, stop)
    pieces = [stream.push(i) for i in ids if not stream.stopped]
    return [*pieces, stream.flush()], stream.stopped


@settings(max_examples=200)
@given(st.text(max_size=20))
def test_case_24_streamed_text_never_cuts_a_character(text):
    tokenizer = _SHARED
    ids = tokenizer.encode(text)
    pieces, _ = _stream(tokenizer, ids)
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


def test_case_24_an_unfinished_character_shows_at_the_end(tokenizer):
    ids = tokenizer.encode("a🙂")[:-1]
    pieces, _ = _stream(tokenizer, ids)
    assert pieces[0] == "a"
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces[:-1])


_SHARED = _tokenizer()
_small = st.text("abc", min_size=1, max_size=4)


@settings(max_examples=400)
@given(st.text("abcé", max_size=24), st.lists(_small, min_size=1, max_size=3))
def test_case_23_text_ends_before_the_first_complete_stop_string(text, stops):
    """Checked against the definition: characters come one by one, the first stop string to be complete ends the text."""
    expected, stopped = text, False
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            expected, stopped = text[: min(starts)], True
            break
    pieces, did_stop = _stream(_SHARED, _SHARED.encode(text), tuple(stops))
    assert "".join(pieces) == expected
    assert did_stop == stopped


def test_case_23_no_part_of_a_stop_string_is_shown(tokenizer):
    stream = TextStream(tokenizer, ("DEFGHIJ",))
    shown = [stream.push(i) for i in tokenizer.encode("ABCDEFGHIJKL")[:10]]
    assert shown == ["A", "B", "C", *[""] * 7]
    assert stream.stopped
    assert stream.flush() == ""


def test_held_text_comes_out_when_it_is_no_stop_string(tokenizer):
    stream = TextStream(tokenizer, ("DEFG",))
    shown = [stream.push(i) for i in tokenizer.encode("CDEXDE")]
    assert shown == ["C", "", "", "DEX", "", ""]
    assert stream.flush() == "DE"
    assert not stream.stopped


def _engine_case(lazy: bool):
    config = tiny_config(vocab_size=256, eos_token_ids=(0,))
    runner = MockRunner(config, num_pages=100, lazy=lazy)
    return Engine(runner, _SHARED), config


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_case_23_a_stop_string_ends_the_request_in_the_engine(lazy, stream):
    engine, config = _engine_case(lazy)
    plain = request("r", list(range(3, 9)), stream, max_tokens=40, ignore_eos=True)
    ids = plain_decode(config, plain.prompt_token_ids, plain.params)
    text = _SHARED.decode(ids)
    stop = text[11:14]
    stopping = request("r", plain.prompt_token_ids, stream, max_tokens=40, ignore_eos=True, stop=(stop, "not there"))
    output = run(engine, [stopping])["r"]
    assert output.reason is not None
    assert output.reason.value == "stop"
    assert output.text == text[: text.index(stop)]
    assert ids[: len(output.token_ids)] == output.token_ids
    assert stop in _SHARED.decode(output.token_ids)
    assert stop not in _SHARED.decode(output.token_ids[:-1])
    assert output.last.usage.output_tokens == len(output.token_ids)


def test_streamed_and_whole_text_agree_and_leave_the_stop_token_out():
    engine, config = _engine_case(lazy=True)
    requests = [
        request(f"{i}-{stream}", [i, 7], stream, max_tokens=30, stop_token_ids=tuple(range(65, 90)))
        for i in range(30)
        for stream in (False, True)
    ]
    outputs = run(engine, requests)
    assert {o.reason.value for o in outputs.values()} == {"stop", "length"}
    for i in range(30):
        whole, streamed = outputs[f"{i}-False"], outputs[f"{i}-True"]
        assert whole.text == streamed.text
        shown = whole.token_ids[:-1] if whole.reason.value == "stop" else whole.token_ids
        assert whole.text == _SHARED.decode(shown)
    assert config.eos_token_ids == (0,)

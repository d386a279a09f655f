"""Encoding, decoding and streaming, for byte-level and SentencePiece tokenizers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from nanoflow_jax.tokenizer import IncrementalDetokenizer, Tokenizer, TokenizerError, load_tokenizer
from nanoflow_jax.tokenizer.decoding import BYTE_ALPHABET, token_bytes_rule

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama3-tiny"


def byte_level_backend() -> tokenizers.Tokenizer:
    """A token for every byte, some merges, two special tokens and an added one that is not ASCII."""
    alphabet = sorted(BYTE_ALPHABET)
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = [("h", "e"), ("Ġ", "he"), ("ð", "Ł"), ("ðŁ", "Ļ"), ("æ", "Ĺ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("日本", normalized=False)])
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """Like Llama-2's: words with a leading mark, byte tokens for what has none, a prefix space that decoding drops."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijkl é日"]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "a"), ("▁a", "b"), ("▁", "▁")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


BACKENDS = {"byte-level": byte_level_backend(), "sentencepiece": sentencepiece_backend()}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in BACKENDS.items()}
TEXTS = st.text(st.one_of(st.sampled_from(" \nabhe日本é🙂👩‍👩‍👧‍👦<s>"), st.characters(exclude_categories=["Cs"])), max_size=40)


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300)
@given(text=TEXTS, skip=st.booleans())
def test_decoding_agrees_with_the_library_and_streams_exactly(name, text, skip):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    decoded = tokenizer.decode(ids, skip)
    assert decoded == BACKENDS[name].decode(ids, skip_special_tokens=skip)
    assert "".join(stream(tokenizer, ids, skip)) == decoded
    if not skip:
        assert decoded == text


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_in_any_split_stream_to_what_decode_gives(name, data, skip):
    """Field case 24: deltas and flush joined are the decoded text, wherever the tokens are cut."""
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=30))
    decoded = tokenizer.decode(ids, skip)
    assert "".join(stream(tokenizer, ids, skip)) == decoded
    if name == "byte-level":
        assert decoded == BACKENDS[name].decode(ids, skip_special_tokens=skip)
    # What has been streamed is final: it is a prefix of the text, whatever follows.
    cut = data.draw(st.integers(0, len(ids)))
    shown = "".join(stream(tokenizer, ids[:cut], skip)[:-1])
    assert decoded.startswith(shown)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["🙂", "日本語", "👩‍👩‍👧‍👦", "naïve 🙂🙂 é"])
def test_no_replacement_character_while_a_character_is_incomplete(name, text):
    tokenizer = TOKENIZERS[name]
    pieces = stream(tokenizer, tokenizer.encode(text), False)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_cut_character_shows_once_at_the_end(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("a🙂")
    assert stream(tokenizer, ids[:-1], False)[-1] == "\ufffd"


def test_valid_characters_survive_beside_invalid_bytes():
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in ["é".encode()[0], "é".encode()[1], 0xFF]]
    assert tokenizer.decode([i for i in ids if i is not None]) == "é\ufffd"


def test_only_the_prefix_space_is_dropped():
    tokenizer = TOKENIZERS["sentencepiece"]
    assert tokenizer.decode(tokenizer.encode("  a")) == "  a"
    assert tokenizer.decode(tokenizer.encode("a") + tokenizer.encode("b")) == "a b"


def test_streaming_costs_the_same_for_every_token():
    """A million bytes that never become a character: anything that decodes a window again would take hours."""
    tokenizer = TOKENIZERS["byte-level"]
    continuation = tokenizer.token_id({byte: c for c, byte in BYTE_ALPHABET.items()}[0x80])
    assert continuation is not None
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert sum(len(detokenizer.push(continuation)) for _ in range(1_000_000)) == 1_000_000


def test_special_tokens_are_known_by_their_names():
    tokenizer = load_tokenizer(TINY)
    assert tokenizer.vocab_size == 512
    assert tokenizer.encode("<s>a</s>") == [1, tokenizer.token_id("a"), 2]
    assert [tokenizer.is_special(i) for i in (0, 1, 2, 3)] == [True, True, True, False]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


def test_ids_and_texts_that_are_none():
    tokenizer = TOKENIZERS["byte-level"]
    assert tokenizer.decode([1 << 40, 10_000]) == ""
    with pytest.raises(TokenizerError, match="token_id=-1 is negative"):
        tokenizer.decode([-1])
    with pytest.raises(TokenizerError, match="UTF-8"):
        tokenizer.encode("\ud800")
    assert tokenizer.encode("") == []


def test_stored_truncation_and_padding_do_not_apply(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("x" * 10)) == 10


def test_saving_keeps_everything(tmp_path):
    original = load_tokenizer(TINY)
    original.save(tmp_path)
    again = load_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "日本 🙂"}]
    assert again.apply_chat_template(messages) == original.apply_chat_template(messages)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "CTC"}]},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}]},
        {"type": "Sequence", "decoders": [{"type": "Strip", "content": " ", "start": 1, "stop": 0}, {"type": "Fuse"}]},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "x"}, "content": ""}, {"type": "Fuse"}]},
    ],
)
def test_other_decoders_are_refused_by_name(decoder):
    with pytest.raises(TokenizerError, match="is not handled"):
        token_bytes_rule(decoder)


def test_unsound_folders_are_errors(tmp_path):
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="not a tokenizer"):
        load_tokenizer(tmp_path)


def test_digits_are_cut_out_first_for_smollm():
    """The order matters: a ByteLevel split before the digits are out would give other tokens for two spaces and a digit."""
    right = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    from nanoflow_jax.tokenizer.from_gguf import _PRE_TOKENIZERS

    ours = pre_tokenizers.Sequence(_PRE_TOKENIZERS["smollm"])
    late = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(False), pre_tokenizers.Digits(individual_digits=True)])
    text = "x   123"
    assert ours.pre_tokenize_str(text) == right.pre_tokenize_str(text)
    assert [piece for piece, _ in ours.pre_tokenize_str(text)] == ["x", "ĠĠĠ", "1", "2", "3"]
    assert [piece for piece, _ in late.pre_tokenize_str(text)] != ["x", "ĠĠĠ", "1", "2", "3"]


def test_importing_the_tokenizer_imports_no_jax():
    code = "import sys, nanoflow_jax.tokenizer; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60).returncode == 0


def test_chat_templates_by_name_or_file(tmp_path):
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}yes"}]
    config = {"chat_template": named, "bos_token": {"content": "<s>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).render_chat([]) == "<s>yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).render_chat([]) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TokenizerError, match="no chat template"):
        load_tokenizer(tmp_path).render_chat([])

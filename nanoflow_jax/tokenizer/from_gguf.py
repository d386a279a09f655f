"""The tokenizer that a GGUF file carries in its metadata."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from nanoflow_jax.tokenizer.adapter import Tokenizer
from nanoflow_jax.tokenizer.decoding import TokenizerError

_CONTROL, _USER_DEFINED = 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_TEMPLATE = (
    _CONTRACTIONS + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split_by(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


# How text is cut before merging, by `tokenizer.ggml.pre`. `smollm` cuts out every digit before anything else sees the text:
# doing it later gives other tokens for a number after two spaces.
_PRE_TOKENIZERS: Mapping[str, list[pre_tokenizers.PreTokenizer]] = {
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
    "qwen2": _split_by(_WORDS_TEMPLATE.format(digits=r"\p{N}")),
    "llama-bpe": _split_by(_WORDS_TEMPLATE.format(digits=r"\p{N}{1,3}")),
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer described by the `tokenizer.*` keys of a GGUF file.

    Raises:
      TokenizerError: a key is missing or malformed, or the kind of tokenizer is not handled; the message names it.
      ChatTemplateError: the chat template does not compile.
    """
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        raise TokenizerError(f"tokenizer.ggml.model={model!r} is not handled, only 'gpt2' (byte-level BPE)")
    if pre not in _PRE_TOKENIZERS:
        raise TokenizerError(f"tokenizer.ggml.pre={pre!r} is not handled, only {', '.join(_PRE_TOKENIZERS)}")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    merges = [_pair(merge) for merge in _strings(metadata, "tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise TokenizerError(f"tokenizer.ggml.tokens: {len(tokens) - len(vocab)} tokens are listed twice")
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"tokenizer.ggml.merges: not merges of tokenizer.ggml.tokens: {error}") from error
    backend = tokenizers.Tokenizer(bpe)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre])
    backend.decoder = decoders.ByteLevel()
    _add_marked_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type", []))
    named = _named_tokens(tokens, metadata)
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in named:
        backend.post_processor = _starting_with(named["bos_token"], vocab)
    return Tokenizer(backend, chat_template=metadata.get("tokenizer.chat_template"), special_tokens=named)


def _starting_with(bos: str, vocab: Mapping[str, int]) -> processors.TemplateProcessing:
    try:
        return processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, vocab[bos])])
    except ValueError as error:
        raise TokenizerError(f"tokenizer.ggml.bos_token_id: {bos!r} cannot be put before a text: {error}") from error


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TokenizerError(f"{key}: missing, or not a list of texts")
    return value


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _add_marked_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: Any) -> None:
    if not isinstance(types, list) or len(types) not in (0, len(tokens)):
        raise TokenizerError("tokenizer.ggml.token_type: not one type per token")
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    # One call for each run of a kind: the library numbers nothing anew, all of these are in the vocabulary.
    backend.add_special_tokens([AddedToken(token, normalized=False) for token, kind in marked if kind == _CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token, kind in marked if kind == _USER_DEFINED])


def _named_tokens(tokens: list[str], metadata: Mapping[str, Any]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    named = {}
    for name, key in keys.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise TokenizerError(f"tokenizer.ggml.{key}_token_id={token_id!r} is not a token id below {len(tokens)}")
        named[name] = tokens[token_id]
    return named

"""`Tokenizer` over the `tokenizers` library, and its incremental detokenizer.

Decoding is done here, from one table of token id -> bytes: the text of a sequence is its tokens' bytes, read as UTF-8 with
U+FFFD for what is not. Streaming is then exact by construction, whatever tokens a character is spread over, and costs the
same for every token.
"""

import codecs
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from nanoflow_jax.tokenizer.chat_template import ChatTemplate
from nanoflow_jax.tokenizer.decoding import TokenBytes, TokenizerError, token_bytes_rule

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """A model's tokenizer. Immutable and safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        """`special_tokens` gives the texts that the chat template calls `bos_token`, `eos_token`, `pad_token`, `unk_token`.

        Raises:
          TokenizerError: the tokenizer decodes in a way that is not handled; the message names it.
          ChatTemplateError: the chat template does not compile.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._rule: TokenBytes = token_bytes_rule(json.loads(backend.to_str()).get("decoder"))
        self._special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self.chat_template = None if chat_template is None else ChatTemplate(chat_template)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; names of special tokens in it become these tokens.

        `add_special_tokens` adds what the model expects around a text, such as a beginning-of-sequence token.

        Raises:
          TokenizerError: `text` holds lone surrogates, which are no text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text cannot be encoded as UTF-8: {error}") from error
        # Unlike `encode`, the batch form lets other threads run meanwhile, which for megabytes of text are seconds.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`. Ids that no token has (padding of the vocabulary) are empty.

        Raises:
          TokenizerError: an id is negative.
        """
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text.

        Raises:
          TokenizerError: the id is negative.
        """
        known = self._bytes.get(token_id)
        if known is None:
            if token_id < 0:
                raise TokenizerError(f"{token_id=} is negative")
            token = self._backend.id_to_token(token_id) if token_id < 1 << 32 else None
            if token is None:
                return b""
            known = self._bytes[token_id] = self._rule.of_token(token)
        return known

    def token_id(self, token: str) -> int | None:
        """The id of the token spelled `token`, or None."""
        return self._backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    @property
    def num_leading_stripped(self) -> int:
        """Spaces that decoding drops from the start of a text: the reverse of a prefix that encoding adds."""
        return self._rule.leading_stripped

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The chat as the one text that the model was trained on; `variables` are passed to the template.

        Raises:
          TokenizerError: the model has no chat template.
          ChatTemplateError: the template refuses the messages, fails, or runs too long.
        """
        if self.chat_template is None:
            raise TokenizerError("this model has no chat template; send text or token ids")
        given = {**self._special_tokens, "tools": None, "documents": None, **variables}
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, **given)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of `render_chat`; the template writes the special tokens itself, so none are added."""
        return self.encode(self.render_chat(messages, add_generation_prompt, **variables), add_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, from which `load_tokenizer` makes the same tokenizer."""
        self._backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = dict(self._special_tokens)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template.source
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False), encoding="utf-8")


class IncrementalDetokenizer:
    """Text of a growing sequence, piece by piece: the pieces and the flush joined are `Tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = False):
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._to_strip = tokenizer.num_leading_stripped

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often empty inside a character. Raises as `token_bytes`."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._strip(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """The rest, when no more tokens follow: U+FFFD for a character that never became complete."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != " ":
                self._to_strip = 0
                break
            self._to_strip -= 1
            text = text[1:]
        return text


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, with tokenizer_config.json and chat_template.jinja if there.

    Raises:
      TokenizerError: tokenizer.json is missing or malformed, or is of a kind that is not handled.
      ChatTemplateError: the chat template does not compile.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{folder}: has no tokenizer.json; other tokenizer formats must be converted first")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{path}: not a tokenizer: {error}") from error
    config = _read_config(folder / "tokenizer_config.json")
    named = {name: _token_text(config[name]) for name in _SPECIAL_NAMES if config.get(name) is not None}
    template_file = folder / "chat_template.jinja"
    template = (
        template_file.read_text(encoding="utf-8") if template_file.is_file() else _chat_template(config.get("chat_template"))
    )
    return Tokenizer(backend, chat_template=template, special_tokens=named)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{path}: holds a {type(config).__name__}, expected an object")
    return config


def _token_text(value: Any) -> str:
    """A special token is written as its text, or as an object that holds it."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise TokenizerError(f"tokenizer_config.json: {value!r} is not a token")
    return text


def _chat_template(value: Any) -> str | None:
    """One template, or several by name, of which the one called `default` is for plain chats."""
    if isinstance(value, list):
        by_name = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = by_name.get("default")
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"tokenizer_config.json: chat_template is a {type(value).__name__}, expected text")
    return value

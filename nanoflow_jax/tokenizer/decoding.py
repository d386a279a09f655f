"""Which bytes a token stands for, read from the `decoder` of a tokenizer.json."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class TokenizerError(ValueError):
    """A tokenizer that is malformed or of a kind that is not handled, or input that is not text."""


@dataclasses.dataclass(frozen=True)
class TokenBytes:
    """`of_token` maps a token's spelling to bytes; decoding drops up to `leading_stripped` spaces at the start of a text."""

    of_token: Callable[[str], bytes]
    leading_stripped: int = 0


def token_bytes_rule(decoder: Mapping[str, Any] | None) -> TokenBytes:
    """The rule of the two families there are: byte-level alphabets, and SentencePiece spellings with byte fallback.

    Where the bytes of a SentencePiece text are not UTF-8, the library replaces every byte of a run by U+FFFD, valid ones too;
    we keep what is valid.

    Raises:
      TokenizerError: another decoder; the message names it.
    """
    decoder = decoder or {"type": None}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return TokenBytes(_from_byte_alphabet)
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"} and "Fuse" in kinds:
        return _sentencepiece_rule(steps)
    raise TokenizerError(f"tokenizer.json: decoder {decoder!r} is not handled, only ByteLevel and SentencePiece's sequence")


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for the 256 bytes in byte-level BPE: themselves where printable, else 256 + n."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def _from_byte_alphabet(token: str) -> bytes:
    try:
        return bytes(BYTE_ALPHABET[c] for c in token)
    except KeyError:  # an added token, spelled as it reads
        return token.encode()


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _sentencepiece_rule(steps: Sequence[Mapping[str, Any]]) -> TokenBytes:
    replacements: list[tuple[str, str]] = []
    byte_fallback, fused, stripped = False, False, 0
    for step in steps:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or fused:
                raise TokenizerError(f"tokenizer.json: decoder step {step!r} is not handled")
            replacements.append((pattern, step["content"]))
        elif step["type"] == "Strip":
            if not fused or step["stop"] or step["content"] != " ":
                raise TokenizerError(f"tokenizer.json: decoder step {step!r} is not handled")
            stripped += step["start"]
        elif step["type"] == "ByteFallback":
            byte_fallback = True
        else:
            fused = True

    def of_token(token: str) -> bytes:
        if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return TokenBytes(of_token, stripped)

"""Text of a growing output: never half a character, never a part of a stop string."""

from nanoflow_jax.tokenizer import IncrementalDetokenizer, Tokenizer


class TextStream:
    """Token ids in, text that may be shown out.

    Text that could be the beginning of a stop string is held back until it is known not to be one, so what was given out never
    needs to be taken back: a match can only begin in the held part.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = stop
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that became certain with this token. Sets `stopped` when a stop string is complete; no text follows it."""
        return "" if self.stopped else self._advance(self._detokenizer.push(token_id), final=False)

    def flush(self) -> str:
        """What is left at the end of the output; an incomplete character becomes U+FFFD."""
        return "" if self.stopped else self._advance(self._detokenizer.flush(), final=True)

    def _advance(self, text: str, *, final: bool) -> str:
        if not self._stop:
            return text
        held = self._held + text
        # The match that is complete first counts, as if characters came one by one: token borders change nothing.
        matches = [(at + len(stop), at) for stop in self._stop if (at := held.find(stop)) >= 0]
        if matches:
            self.stopped = True
            self._held = ""
            return held[: min(matches)[1]]
        certain = len(held) if final else min(_first_possible_start(held, stop) for stop in self._stop)
        self._held = held[certain:]
        return held[:certain]


def _first_possible_start(text: str, stop: str) -> int:
    """Where the longest suffix of `text` that is a proper prefix of `stop` begins; len(text) if there is none."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)

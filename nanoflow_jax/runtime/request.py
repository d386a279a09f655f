"""What a caller sends to the engine and what comes back: requests, their limits, events, reasons to refuse or to finish.

The types are msgspec Structs, so that the server can put them on the wire as they are. This module imports no jax.
"""

import dataclasses
import enum
import numbers
from collections.abc import Sequence

import msgspec
import numpy as np

MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 32
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_NAME_CHARS = 256  # of a session, and of a cache salt


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen and when a request ends.

    Attributes:
      temperature: 0 is greedy.
      top_k: keep the k most likely tokens (and those tied with the last of them); 0 keeps all.
      top_p: keep the smallest set of most likely tokens that has this much probability; 1 keeps all, 0 only the likeliest.
      min_p: keep tokens at least this many times as likely as the likeliest; 0 keeps all.
      seed: the same seed gives the same tokens whatever else is in the batch; None draws one per request.
      logprobs: None is none; n gives the log-probability of each token and of the n likeliest in its place.
      max_tokens: most tokens to generate. A request also ends, with reason `length`, when it fills the context or the pool.
      stop_token_ids: tokens that end the request, beside the model's own EOS tokens.
      stop: strings that end the request; neither they nor what follows them is in the text.
      ignore_eos: do not end at the model's EOS tokens; stop_token_ids still end it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    max_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to continue.

    Attributes:
      stream: False asks for a single event at the end instead of one per step.
      session_id: names a conversation. A prompt finds what is cached of its beginning with or without it; but what a request
        of a session leaves in the cache, its output included, is evicted after everything that no session keeps, until the
        session's next request is admitted. Nothing else depends on it.
      cache_salt: the request shares cached pages with requests of the same salt only. Where one tenant must not learn, from how
        fast an answer comes or from `cached_tokens`, what another has sent, give each its own.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = SamplingParams()
    stream: bool = True
    session_id: str | None = None
    cache_salt: str | None = None


class FinishReason(enum.Enum):
    """Why a request ended: an EOS or stop token or a stop string; a length limit; its owner's wish; a failure."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class RejectCode(enum.Enum):
    """Why a request was refused before it started."""

    EMPTY_PROMPT = "empty_prompt"
    PROMPT_TOO_LONG = "prompt_too_long"  # for the model's context
    EXCEEDS_POOL = "exceeds_pool"  # more KV pages than there are
    BAD_PARAMETER = "bad_parameter"
    OVERLOADED = "overloaded"
    SHUTTING_DOWN = "shutting_down"
    DUPLICATE_ID = "duplicate_id"


class RequestRejected(ValueError):  # noqa: N818 (it is an answer, not a fault)
    """A request was refused; no event follows. `field` and `value` are set when one parameter is to blame."""

    def __init__(self, code: RejectCode, message: str, *, field: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.value = value


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-softmax of the raw logits (before temperature and filters) at one output position.

    `top` holds (token id, log-probability) of the likeliest tokens, likeliest first.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a request. `cached_tokens` counts prompt tokens whose K and V were found in the pool when the request was first
    admitted, and therefore not computed."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class Timing(msgspec.Struct, frozen=True, gc=False):
    """Seconds since submission; None for what did not happen."""

    admitted_s: float | None
    first_token_s: float | None
    finished_s: float


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """News of one request. The last event, and only that one, has a finish reason, usage and timing.

    Joining `token_ids` and `text` over a request's events gives its whole output. The token that ended a request (EOS or a stop
    token) is among the token ids but not in the text. `logprobs` has one entry per token id when they were asked for.
    """

    request_id: str
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    usage: Usage | None = None
    timing: Timing | None = None


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the engine can hold: vocabulary, prompt plus output of the model, tokens of the whole KV pool."""

    vocab_size: int
    max_context: int
    pool_tokens: int
    has_tokenizer: bool

    def output_limit(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Tokens that a request may generate. The last one never enters the cache, so it needs no slot in the pool."""
        return min(max_tokens, self.max_context - num_prompt_tokens, self.pool_tokens + 1 - num_prompt_tokens)


def validate(request: Request, limits: Limits) -> np.ndarray:
    """The prompt as int32[n], after every check that needs no engine state.

    Raises:
      RequestRejected: empty_prompt, prompt_too_long, exceeds_pool or bad_parameter.
    """
    if not isinstance(request.request_id, str) or not request.request_id:
        raise _bad("request_id", request.request_id, "must be a non-empty string")
    for field in ("session_id", "cache_salt"):
        _check_name(field, getattr(request, field))
    validate_params(request.params, limits)
    prompt = _prompt_array(request.prompt_token_ids, limits.vocab_size)
    if prompt.size >= limits.max_context:
        raise RequestRejected(
            RejectCode.PROMPT_TOO_LONG,
            f"the prompt has {prompt.size} tokens; the context of {limits.max_context} must hold it and one token of output",
        )
    if prompt.size > limits.pool_tokens:
        raise RequestRejected(
            RejectCode.EXCEEDS_POOL, f"the prompt has {prompt.size} tokens; the KV pool holds {limits.pool_tokens}"
        )
    return prompt


def validate_params(params: SamplingParams, limits: Limits) -> None:
    """Checks every sampling parameter.

    Raises:
      RequestRejected: bad_parameter, with the field and its value.
    """
    _check_real(params, "temperature", 0.0, 100.0)
    _check_real(params, "top_p", 0.0, 1.0)
    _check_real(params, "min_p", 0.0, 1.0)
    _check_integer(params, "top_k", 0, 2**31 - 1)
    _check_integer(params, "max_tokens", 1, 2**31 - 1)
    if params.seed is not None:
        _check_integer(params, "seed", 0, 2**32 - 1)
    if params.logprobs is not None:
        _check_integer(params, "logprobs", 0, min(MAX_LOGPROBS, limits.vocab_size))
    ids = params.stop_token_ids
    if not isinstance(ids, tuple) or len(ids) > MAX_STOP_TOKENS:
        raise _bad("stop_token_ids", ids, f"must be a tuple of at most {MAX_STOP_TOKENS} token ids")
    for token_id in ids:
        if not _is_integer(token_id) or not 0 <= token_id < limits.vocab_size:
            raise _bad("stop_token_ids", token_id, f"must be a token id below {limits.vocab_size}")
    _check_stop_strings(params.stop, limits)
    if not isinstance(params.ignore_eos, bool):
        raise _bad("ignore_eos", params.ignore_eos, "must be true or false")


def _check_stop_strings(stop: tuple[str, ...], limits: Limits) -> None:
    if not isinstance(stop, tuple) or len(stop) > MAX_STOP_STRINGS:
        raise _bad("stop", stop, f"must be a tuple of at most {MAX_STOP_STRINGS} strings")
    for text in stop:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
            raise _bad("stop", text, f"must be a string of 1 to {MAX_STOP_CHARS} characters")
    if stop and not limits.has_tokenizer:
        raise _bad("stop", stop, "needs a model with a tokenizer")


def _check_name(field: str, name: object) -> None:
    if name is not None and (not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable()):
        raise _bad(field, name, f"must be a string of 1 to {MAX_NAME_CHARS} printable characters")


def _prompt_array(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    if len(token_ids) == 0:
        raise RequestRejected(RejectCode.EMPTY_PROMPT, "the prompt has no tokens")
    try:
        prompt = np.asarray(token_ids)
    except (ValueError, OverflowError):
        prompt = np.empty((), object)
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise RequestRejected(
            RejectCode.BAD_PARAMETER, "prompt_token_ids must be a flat list of integers", field="prompt_token_ids"
        )
    outside = (prompt < 0) | (prompt >= vocab_size)
    if outside.any():
        raise _bad("prompt_token_ids", int(prompt[outside.argmax()]), f"must be a token id below {vocab_size}")
    return prompt.astype(np.int32)


def _is_integer(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _check_integer(params: SamplingParams, field: str, low: int, high: int) -> None:
    value = getattr(params, field)
    if not _is_integer(value) or not low <= value <= high:
        raise _bad(field, value, f"must be an integer from {low} to {high}")


def _check_real(params: SamplingParams, field: str, low: float, high: float) -> None:
    value = getattr(params, field)
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not low <= float(value) <= high:
        raise _bad(field, value, f"must be a number from {low:g} to {high:g}")


def _bad(field: str, value: object, why: str) -> RequestRejected:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return RequestRejected(RejectCode.BAD_PARAMETER, f"{field}={shown} {why}", field=field, value=value)

"""The wire: length-prefixed MessagePack frames of tagged structs. Imports no jax; docs/protocol.md explains every message.

A frame is a 4-byte big-endian payload length and that many bytes of MessagePack: a map whose "type" names the message. The
client opens with `Hello`, the server answers `Welcome`, then any number of requests may be under way at once, told apart by
ids that the client picks. Every request gets exactly one final answer (or an `Error`) with its id; a streamed `Generate` gets
`Delta`s before it.
"""

import asyncio
import enum
import struct
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from nanoflow_jax.runtime.request import FinishReason, SamplingParams, Timing, TokenLogprobs, Usage

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 4 << 20
MAX_HELLO_BYTES = 4096  # before a peer has shown its token, it may not make us hold more than this
HEADER = struct.Struct(">I")

MAX_REQUEST_ID = 2**63 - 1
RequestId = Annotated[int, Meta(ge=0, le=MAX_REQUEST_ID)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class ErrorCode(enum.StrEnum):
    """Why a request, or a connection, was refused."""

    # Of the connection: the server closes it afterwards (save after the first two).
    MALFORMED_FRAME = "malformed_frame"  # not MessagePack, or not a map with a request id
    FRAME_TOO_LARGE = "frame_too_large"  # the frame was skipped
    TORN_FRAME = "torn_frame"
    UNSUPPORTED_VERSION = "unsupported_version"
    UNAUTHORIZED = "unauthorized"
    HANDSHAKE_REQUIRED = "handshake_required"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    SLOW_READER = "slow_reader"
    # Of one request; everything else on the connection goes on.
    INVALID_REQUEST = "invalid_request"
    DUPLICATE_ID = "duplicate_id"
    EMPTY_PROMPT = "empty_prompt"
    PROMPT_TOO_LONG = "prompt_too_long"  # for the model's context
    EXCEEDS_POOL = "exceeds_pool"  # more KV pages than there are
    NO_TOKENIZER = "no_tokenizer"
    NO_CHAT_TEMPLATE = "no_chat_template"
    OVERLOADED = "overloaded"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL = "internal"


class _Message(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What all structs of the protocol share: unknown fields are refused, defaults travel as absence."""


class Hello(_Message, tag="hello"):
    """The client's first message."""

    version: int
    token: str | None = None


class Welcome(_Message, tag="welcome"):
    """The server accepts the connection. `max_frame_bytes` bounds the frames it will read."""

    version: int
    server: str
    model: str
    max_frame_bytes: int


class ChatMessage(_Message):
    role: str
    content: str


class Text(_Message, tag="text"):
    """A prompt as text; the tokenizer adds the model's own leading special tokens."""

    text: str


class TokenIds(_Message, tag="token_ids"):
    """A prompt as token ids, used as they are."""

    token_ids: list[TokenId]


class Chat(_Message, tag="chat"):
    """A prompt as a conversation, turned into text by the model's chat template."""

    messages: list[ChatMessage]


Prompt = Text | TokenIds | Chat


class Generate(_Message, tag="generate"):
    """Continues a prompt, as `params` say (nanoflow_jax.runtime.request describes them). `stream`: answer with `Delta`s as
    text appears, else with one `Finished`. `session_id` and `cache_salt` are those of `runtime.request.Request`."""

    id: RequestId
    prompt: Prompt
    params: SamplingParams = SamplingParams()
    stream: bool = True
    session_id: str | None = None
    cache_salt: str | None = None


class Cancel(_Message, tag="cancel"):
    """Ends the generation with id `target`, which then finishes with reason "cancelled"; its tokens so far are kept."""

    id: RequestId
    target: RequestId


class Tokenize(_Message, tag="tokenize"):
    id: RequestId
    text: str
    add_special_tokens: bool = True


class Detokenize(_Message, tag="detokenize"):
    id: RequestId
    token_ids: list[TokenId]
    skip_special_tokens: bool = False


class GetModelInfo(_Message, tag="model_info"):
    id: RequestId


class GetStats(_Message, tag="stats"):
    id: RequestId


class GetHealth(_Message, tag="health"):
    id: RequestId


Request = Generate | Cancel | Tokenize | Detokenize | GetModelInfo | GetStats | GetHealth
ClientMessage = Hello | Request


class Delta(_Message, tag="delta"):
    """The next piece of a streamed answer. Text is whole characters; it may be empty while a character or a possible stop
    string is incomplete, and `token_ids` may therefore run ahead of it."""

    id: RequestId
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


class Finished(_Message, tag="finished"):
    """The last message of a generation. Its text and tokens follow those of the deltas; without streaming they are all."""

    id: RequestId
    finish_reason: FinishReason
    text: str
    token_ids: list[int]
    usage: Usage
    timing: Timing
    logprobs: list[TokenLogprobs] | None = None


class Cancelled(_Message, tag="cancelled"):
    """Answer to `Cancel`; `was_running` is false if the target had already finished or never was."""

    id: RequestId
    was_running: bool


class Tokens(_Message, tag="tokens"):
    id: RequestId
    token_ids: list[int]


class Detokenized(_Message, tag="detokenized"):
    id: RequestId
    text: str


class ModelDescription(_Message):
    """What is being served. A prompt may have up to `max_context - 1` tokens, and not more than `pool_tokens`."""

    name: str
    vocab_size: int
    num_params: int
    num_layers: int
    max_context: int
    pool_tokens: int
    page_size: int
    b_dense: int
    tp_size: int
    dtype: str
    eos_token_ids: list[int]
    has_tokenizer: bool
    has_chat_template: bool


class ModelInfo(_Message, tag="model"):
    id: RequestId
    model: ModelDescription


class Stats(_Message, tag="statistics"):
    """Counters since the start, of the engine and of the server; docs/serving.md lists them."""

    id: RequestId
    engine: dict[str, Any]
    server: dict[str, Any]


class Health(_Message, tag="healthy"):
    """`state` is "running", "draining", "stopped" or "failed"; `error` says why it failed.

    `step_age_s` is how long the engine has been in its current step, 0 when idle: a large value means a hung device.
    """

    id: RequestId
    state: str
    error: str | None
    step_age_s: float


class Error(_Message, tag="error"):
    """A request, or with no id the connection, failed."""

    code: ErrorCode
    message: str
    id: RequestId | None = None


Answer = Delta | Finished | Cancelled | Tokens | Detokenized | ModelInfo | Stats | Health | Error
ServerMessage = Welcome | Answer

_encoder = msgspec.msgpack.Encoder()
_client_message_decoder = msgspec.msgpack.Decoder(ClientMessage)
_server_message_decoder = msgspec.msgpack.Decoder(ServerMessage)
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_any_decoder = msgspec.msgpack.Decoder()


class ProtocolError(Exception):
    """Bytes that are no valid message; carries what the answering `Error` says."""

    def __init__(self, code: ErrorCode, message: str, request_id: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.request_id = request_id


class FrameTooLargeError(ProtocolError):
    """A frame longer than the limit; its `size` payload bytes are still unread."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(ErrorCode.FRAME_TOO_LARGE, f"a frame of {size} bytes is over the limit of {limit}")
        self.size = size


def encode_frame(message: Hello | Request | ServerMessage) -> bytes:
    """The frame of `message`, ready to be written."""
    payload = _encoder.encode(message)
    return HEADER.pack(len(payload)) + payload


def decode_client_message(payload: bytes) -> ClientMessage:
    """The message in a frame's payload.

    Raises:
      ProtocolError: INVALID_REQUEST with the request's id if the payload is a map that has one, else MALFORMED_FRAME.
    """
    try:
        return _client_message_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        request_id = _find_request_id(payload)
        code = ErrorCode.MALFORMED_FRAME if request_id is None else ErrorCode.INVALID_REQUEST
        raise ProtocolError(code, str(error), request_id) from None


def decode_hello(payload: bytes) -> Hello:
    """The first message of a connection, of this version.

    Raises:
      ProtocolError: UNSUPPORTED_VERSION if it is the hello of another version, HANDSHAKE_REQUIRED if it is anything else.
    """
    untyped = _decode_map(payload)
    version = untyped.get("version")
    if untyped.get("type") == "hello" and isinstance(version, int) and version != PROTOCOL_VERSION:
        message = f"version {version} was asked for, this server speaks {PROTOCOL_VERSION}"
        raise ProtocolError(ErrorCode.UNSUPPORTED_VERSION, message)
    try:
        return _hello_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(ErrorCode.HANDSHAKE_REQUIRED, f"the first message is no valid hello: {error}") from None


def decode_server_message(payload: bytes) -> ServerMessage:
    """The message in a frame's payload.

    Raises:
      ProtocolError: it is none.
    """
    try:
        return _server_message_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(ErrorCode.MALFORMED_FRAME, f"the server sent no valid message: {error}") from None


def _find_request_id(payload: bytes) -> int | None:
    request_id = _decode_map(payload).get("id")
    valid = isinstance(request_id, int) and not isinstance(request_id, bool) and 0 <= request_id <= MAX_REQUEST_ID
    return request_id if valid else None


def _decode_map(payload: bytes) -> dict[Any, Any]:
    """The payload without types; empty if it is no map."""
    try:
        message = _any_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
        return {}
    return message if isinstance(message, dict) else {}


async def read_frame(reader: asyncio.StreamReader, max_bytes: int, timeout_s: float | None = None) -> bytes | None:
    """The payload of the next frame; None if the stream ended between frames. `timeout_s` runs once the length is known.

    Raises:
      FrameTooLargeError: the frame has more than `max_bytes`; the payload was not read (`skip_payload` does).
      ProtocolError: TORN_FRAME, the stream ended, or nothing came for too long, inside a frame.
    """
    header = await _read_exactly(reader, HEADER.size)
    if header is None:
        return None
    (size,) = HEADER.unpack(header)
    if size > max_bytes:
        raise FrameTooLargeError(size, max_bytes)
    try:
        async with asyncio.timeout(timeout_s):
            payload = await _read_exactly(reader, size)
    except TimeoutError:
        raise ProtocolError(ErrorCode.TORN_FRAME, f"a frame of {size} bytes was not complete after {timeout_s} s") from None
    if payload is None:
        raise ProtocolError(ErrorCode.TORN_FRAME, f"the stream ended before a frame of {size} bytes")
    return payload


async def skip_payload(reader: asyncio.StreamReader, size: int, timeout_s: float | None = None) -> None:
    """Reads and forgets `size` bytes, so that the next frame can be read.

    Raises:
      ProtocolError: TORN_FRAME, the stream ended first, or `timeout_s` passed without a byte.
    """
    while size:
        try:
            async with asyncio.timeout(timeout_s):
                chunk = await reader.read(min(size, 1 << 16))
        except TimeoutError:
            chunk = b""
        if not chunk:
            raise ProtocolError(ErrorCode.TORN_FRAME, f"{size} bytes of a frame that is too large never came")
        size -= len(chunk)


async def _read_exactly(reader: asyncio.StreamReader, size: int) -> bytes | None:
    """`size` bytes, or None at a clean end of the stream."""
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            message = f"the stream ended after {len(error.partial)} of {size} bytes"
            raise ProtocolError(ErrorCode.TORN_FRAME, message) from None
        return None

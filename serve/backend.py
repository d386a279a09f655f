"""What all connections share, and the answers that need no connection: token ids of prompts, tokenizing, information."""

import asyncio
import dataclasses
from typing import assert_never

import msgspec

from nanoflow_jax.runtime import request as runtime
from nanoflow_jax.runtime.service import EngineService
from nanoflow_jax.tokenizer import ChatTemplateError, Tokenizer
from serve import protocol
from serve.protocol import ErrorCode, ProtocolError

ImmediateRequest = protocol.Tokenize | protocol.Detokenize | protocol.GetModelInfo | protocol.GetStats | protocol.GetHealth

REJECTED = {
    runtime.RejectCode.EMPTY_PROMPT: ErrorCode.EMPTY_PROMPT,
    runtime.RejectCode.PROMPT_TOO_LONG: ErrorCode.PROMPT_TOO_LONG,
    runtime.RejectCode.EXCEEDS_POOL: ErrorCode.EXCEEDS_POOL,
    runtime.RejectCode.BAD_PARAMETER: ErrorCode.INVALID_REQUEST,
    runtime.RejectCode.OVERLOADED: ErrorCode.OVERLOADED,
    runtime.RejectCode.SHUTTING_DOWN: ErrorCode.SHUTTING_DOWN,
    runtime.RejectCode.DUPLICATE_ID: ErrorCode.DUPLICATE_ID,
}


class ServerCounters(msgspec.Struct):
    """What the server did since it started.

    Attributes:
      connections_open, connections_total: clients now, and ever (after a valid handshake).
      requests_total: messages that asked for something, refused ones too.
      generations_open: generations whose last message has not been written.
      errors: error code -> how often it was sent.
    """

    connections_open: int = 0
    connections_total: int = 0
    requests_total: int = 0
    generations_open: int = 0
    errors: dict[str, int] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """The engine, its words, and the server's counters. Used on the event loop's thread only."""

    service: EngineService
    tokenizer: Tokenizer | None
    description: protocol.ModelDescription
    counters: ServerCounters = dataclasses.field(default_factory=ServerCounters)


async def answer(backend: Backend, message: ImmediateRequest) -> protocol.Answer:
    """The answer to a request that does not generate.

    Raises:
      ProtocolError: the request cannot be answered; its code says why.
    """
    match message:
        case protocol.Tokenize(text=text, add_special_tokens=add_special_tokens):
            token_ids = await asyncio.to_thread(_tokenizer(backend).encode, text, add_special_tokens)
            return protocol.Tokens(id=message.id, token_ids=token_ids)
        case protocol.Detokenize(token_ids=token_ids, skip_special_tokens=skip_special_tokens):
            _check_vocabulary(token_ids, backend.description.vocab_size)
            text = await asyncio.to_thread(_tokenizer(backend).decode, token_ids, skip_special_tokens)
            return protocol.Detokenized(id=message.id, text=text)
        case protocol.GetModelInfo():
            return protocol.ModelInfo(id=message.id, model=backend.description)
        case protocol.GetStats():
            engine, server = msgspec.to_builtins(backend.service.stats()), msgspec.to_builtins(backend.counters)
            return protocol.Stats(id=message.id, engine=engine, server=server)
        case protocol.GetHealth():
            health = backend.service.health()
            return protocol.Health(id=message.id, state=health.state, error=health.error, step_age_s=health.step_age_s)
        case _:
            assert_never(message)


async def prompt_token_ids(backend: Backend, prompt: protocol.Prompt) -> list[int]:
    """The token ids of a prompt. Text is tokenized on another thread, so that no other client waits for it.

    Raises:
      ProtocolError: there is no tokenizer or template for this kind of prompt, or the template refuses the conversation.
    """
    match prompt:
        case protocol.TokenIds(token_ids=token_ids):
            return token_ids
        case protocol.Text(text=text):
            if not text:
                raise ProtocolError(ErrorCode.EMPTY_PROMPT, "the prompt has no text")
            return await asyncio.to_thread(_tokenizer(backend).encode, text)
        case protocol.Chat(messages=messages):
            if not messages:
                raise ProtocolError(ErrorCode.EMPTY_PROMPT, "the conversation has no messages")
            return await asyncio.to_thread(_encode_chat, backend, messages)
        case _:
            assert_never(prompt)


def _tokenizer(backend: Backend) -> Tokenizer:
    if backend.tokenizer is None:
        message = f"{backend.description.name} is served without a tokenizer; send token ids"
        raise ProtocolError(ErrorCode.NO_TOKENIZER, message)
    return backend.tokenizer


def _encode_chat(backend: Backend, messages: list[protocol.ChatMessage]) -> list[int]:
    tokenizer = _tokenizer(backend)
    if tokenizer.chat_template is None:
        raise ProtocolError(ErrorCode.NO_CHAT_TEMPLATE, f"{backend.description.name} has no chat template; send text")
    try:
        return tokenizer.apply_chat_template([{"role": m.role, "content": m.content} for m in messages])
    except ChatTemplateError as error:
        raise ProtocolError(ErrorCode.INVALID_REQUEST, str(error)) from None


def _check_vocabulary(token_ids: list[int], vocab_size: int) -> None:
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise ProtocolError(ErrorCode.INVALID_REQUEST, f"token id {largest} is not below {vocab_size}")

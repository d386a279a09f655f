"""The asyncio client. Imports no jax; `serve.client` has the one for everything else.

    async with await AsyncClient.connect("127.0.0.1:7433") as client:
        async with await client.stream("The capital of France is") as stream:
            async for chunk in stream:
                print(chunk.text, end="")

Any number of requests may be under way on one client. Errors of the server are raised as `ServerError`, which carries the code.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import numbers
from collections.abc import Sequence
from typing import Self, TypeVar

from nanoflow_jax.runtime.request import FinishReason, SamplingParams, Timing, TokenLogprobs, Usage
from serve import protocol
from serve.address import TcpAddress, parse_address
from serve.protocol import ChatMessage, ErrorCode

# Answers are the server's to bound; this only keeps a stream that is none of its from filling our memory.
_MAX_ANSWER_BYTES = 1 << 30

Prompt = str | Sequence[int] | Sequence[ChatMessage]
Answer = TypeVar("Answer", bound=protocol.Answer)


class ServerError(Exception):
    """The server refused a request or the connection."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message


class ConnectionLostError(ConnectionError):
    """The server went away; `ServerError` is raised instead if it said why."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The next piece of a stream. The text of several token ids may come late, with a later chunk."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None


@dataclasses.dataclass(frozen=True)
class Generation:
    """A whole answer."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    usage: Usage
    timing: Timing


class AsyncStream:
    """An answer as it comes: iterate for `Chunk`s; `result` is the whole once the iteration has ended.

    Leaving an `async with` block early cancels the generation; so does `cancel`, after which the iteration ends by itself.
    """

    def __init__(self, client: "AsyncClient", request_id: int, answers: "asyncio.Queue[protocol.Answer | Exception]") -> None:
        self._client = client
        self._id = request_id
        self._answers = answers
        self._chunks: list[Chunk] = []
        self._finished: protocol.Finished | None = None
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """Raises ServerError if the request failed, ConnectionLostError if the server went away."""
        if self._ended:
            raise StopAsyncIteration
        try:
            answer = await self._client._next_answer(self._answers)
        except TimeoutError:
            self._leave()
            raise
        except (ServerError, OSError):
            self._end()
            raise
        assert isinstance(answer, protocol.Delta | protocol.Finished)
        if isinstance(answer, protocol.Finished):
            self._finished = answer
            self._end()
            if not answer.text and not answer.token_ids:
                raise StopAsyncIteration
        chunk = Chunk(answer.text, answer.token_ids, answer.logprobs)
        self._chunks.append(chunk)
        return chunk

    @property
    def result(self) -> Generation:
        """Everything that came.

        Raises:
          RuntimeError: the stream has not ended, or ended with an error.
        """
        last = self._finished
        if last is None:
            raise RuntimeError("the stream has not finished; iterate over it first")
        asked = last.logprobs is not None or any(chunk.logprobs is not None for chunk in self._chunks)
        return Generation(
            text="".join(chunk.text for chunk in self._chunks),
            token_ids=[token_id for chunk in self._chunks for token_id in chunk.token_ids],
            logprobs=[entry for chunk in self._chunks for entry in chunk.logprobs or []] if asked else None,
            finish_reason=last.finish_reason,
            usage=last.usage,
            timing=last.timing,
        )

    def cancel(self) -> None:
        """Asks the server to end the generation; the iteration goes on to its last chunk."""
        if not self._ended:
            self._client._cancel(self._id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self.cancel()
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._client._forget(self._id)


class AsyncClient:
    """A connection to a server, for one event loop; any number of tasks may use it at once. `connect` makes one."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        welcome: protocol.Welcome,
        answer_timeout_s: float | None,
    ) -> None:
        self.welcome = welcome
        self._writer = writer
        self._answer_timeout_s = answer_timeout_s
        self._ids = itertools.count(1)
        self._queues: dict[int, asyncio.Queue[protocol.Answer | Exception]] = {}
        self._lost: Exception | None = None
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        token: str | None = None,
        connect_timeout_s: float = 10.0,
        answer_timeout_s: float | None = None,
    ) -> Self:
        """Connects and shakes hands.

        Args:
          address: "host:port", "[ipv6]:port" or "unix:/path".
          token: what a server that asks for one was started with.
          connect_timeout_s: for the connection and the handshake.
          answer_timeout_s: most seconds to wait for the next message of a request; None waits for ever.

        Raises:
          ServerError: the server refuses the version, the token, or one more client.
          OSError: nobody listens there; ConnectionLostError, TimeoutError: what listens there is no such server.
        """
        where = parse_address(address)
        async with asyncio.timeout(connect_timeout_s):
            if isinstance(where, TcpAddress):
                reader, writer = await asyncio.open_connection(where.host, where.port)
            else:
                reader, writer = await asyncio.open_unix_connection(where.path)
            try:
                writer.write(protocol.encode_frame(protocol.Hello(version=protocol.PROTOCOL_VERSION, token=token)))
                answer = await _read_message(reader)
            except BaseException:
                writer.close()
                raise
        if isinstance(answer, protocol.Welcome):
            return cls(reader, writer, answer, answer_timeout_s)
        writer.close()
        if isinstance(answer, protocol.Error):
            raise ServerError(answer.code, answer.message)
        raise ConnectionLostError(f"{address} did not answer the handshake")

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        *,
        session_id: str | None = None,
        cache_salt: str | None = None,
    ) -> Generation:
        """The whole answer to a prompt: text, token ids, or chat messages.

        Args:
          session_id: names a conversation, so that the server keeps what its next request begins with.
          cache_salt: share the server's cache with requests of the same salt only.

        Raises:
          ServerError: the request was refused or failed.
        """
        async with await self._start(prompt, params, session_id, cache_salt, stream=False) as stream:
            async for _ in stream:
                pass
        return stream.result

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        *,
        session_id: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncStream:
        """Starts a generation as `generate` does; iterate over what this returns. Errors are raised by the iteration."""
        return await self._start(prompt, params, session_id, cache_salt, stream=True)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        request = protocol.Tokenize(id=next(self._ids), text=text, add_special_tokens=add_special_tokens)
        return (await self._ask(request, protocol.Tokens)).token_ids

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        ids = list(token_ids)
        request = protocol.Detokenize(id=next(self._ids), token_ids=ids, skip_special_tokens=skip_special_tokens)
        return (await self._ask(request, protocol.Detokenized)).text

    async def model_info(self) -> protocol.ModelDescription:
        return (await self._ask(protocol.GetModelInfo(id=next(self._ids)), protocol.ModelInfo)).model

    async def stats(self) -> protocol.Stats:
        return await self._ask(protocol.GetStats(id=next(self._ids)), protocol.Stats)

    async def health(self) -> protocol.Health:
        return await self._ask(protocol.GetHealth(id=next(self._ids)), protocol.Health)

    async def close(self) -> None:
        """Hangs up; the server cancels what is still under way."""
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        self._fail(ConnectionLostError("the client was closed"))
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _start(
        self, prompt: Prompt, params: SamplingParams, session_id: str | None, cache_salt: str | None, *, stream: bool
    ) -> AsyncStream:
        request = protocol.Generate(
            id=next(self._ids),
            prompt=as_prompt(prompt),
            params=params,
            stream=stream,
            session_id=session_id,
            cache_salt=cache_salt,
        )
        return AsyncStream(self, request.id, await self._send(request))

    def _cancel(self, target: int) -> None:
        # Nobody waits for the answer, so `_read` drops it.
        if self._lost is None:
            self._writer.write(protocol.encode_frame(protocol.Cancel(id=next(self._ids), target=target)))

    async def _ask(self, request: protocol.Request, answer_type: type[Answer]) -> Answer:
        """Sends a request that has one answer, and waits for it."""
        answers = await self._send(request)
        try:
            answer = await self._next_answer(answers)
        finally:
            self._forget(request.id)
        assert isinstance(answer, answer_type)
        return answer

    async def _send(self, request: protocol.Request) -> "asyncio.Queue[protocol.Answer | Exception]":
        if self._lost is not None:
            raise self._lost
        frame = protocol.encode_frame(request)
        size = len(frame) - protocol.HEADER.size
        if size > self.welcome.max_frame_bytes:
            message = f"the request has {size} bytes, the server reads at most {self.welcome.max_frame_bytes}"
            raise ServerError(ErrorCode.FRAME_TOO_LARGE, message)
        answers = self._queues[request.id] = asyncio.Queue()
        self._writer.write(frame)
        try:
            await self._writer.drain()
        except OSError:
            self._forget(request.id)
            await asyncio.wait([self._reading])  # it has the server's reason, if there was one
            raise (self._lost or ConnectionLostError("the server went away")) from None
        return answers

    async def _next_answer(self, answers: "asyncio.Queue[protocol.Answer | Exception]") -> protocol.Answer:
        async with asyncio.timeout(self._answer_timeout_s):
            answer = await answers.get()
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, protocol.Error):
            raise ServerError(answer.code, answer.message)
        return answer

    def _forget(self, request_id: int) -> None:
        self._queues.pop(request_id, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Sorts answers to those who wait for them, until the server hangs up."""
        reason: Exception = ConnectionLostError("the server closed the connection")
        try:
            while (message := await _read_message(reader)) is not None:
                if isinstance(message, protocol.Welcome):
                    raise protocol.ProtocolError(ErrorCode.MALFORMED_FRAME, "a second welcome")
                if message.id is None:
                    reason = ServerError(message.code, message.message)
                elif message.id in self._queues:
                    self._queues[message.id].put_nowait(message)
        except (OSError, protocol.ProtocolError) as error:
            reason = ConnectionLostError(f"the connection broke: {error}")
        finally:
            self._fail(reason)
            self._writer.close()

    def _fail(self, reason: Exception) -> None:
        self._lost = self._lost or reason
        for queue in self._queues.values():
            queue.put_nowait(self._lost)


def as_prompt(prompt: Prompt) -> protocol.Prompt:
    """The prompt as a message of the protocol.

    Raises:
      TypeError: it is neither text, nor token ids, nor chat messages.
    """
    if isinstance(prompt, str):
        return protocol.Text(text=prompt)
    items = list(prompt)
    messages = [item for item in items if isinstance(item, ChatMessage)]
    if messages and len(messages) == len(items):
        return protocol.Chat(messages=messages)
    token_ids = [int(item) for item in items if isinstance(item, numbers.Integral)]
    if len(token_ids) == len(items):
        return protocol.TokenIds(token_ids=token_ids)
    raise TypeError("a prompt is a string, a sequence of token ids, or a sequence of ChatMessage")


async def _read_message(reader: asyncio.StreamReader) -> protocol.ServerMessage | None:
    payload = await protocol.read_frame(reader, _MAX_ANSWER_BYTES)
    return None if payload is None else protocol.decode_server_message(payload)

"""One client's connection: handshake, requests in order of arrival, answers as they come.

Nothing here waits for a client. Frames go to the transport's buffer; a client that leaves more than a limit of bytes unread is
told why and disconnected, and its requests are cancelled. Events of the engine's thread reach the event loop through an
`EventBridge`, whole batches at a time.
"""

import asyncio
import collections
import contextlib
import dataclasses
import hmac
import logging
from collections.abc import Callable
from typing import Protocol

from nanoflow_jax.runtime import request as runtime
from nanoflow_jax.runtime.request import FinishReason, RequestEvent, RequestRejected
from serve import backend as backends
from serve import protocol
from serve.backend import Backend
from serve.protocol import Error, ErrorCode, ProtocolError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What one client may cost.

    Attributes:
      token: what clients must show in their hello; None: nothing.
      max_frame_bytes: longest frame read; a longer one is skipped.
      max_unread_bytes: answers that may wait for a client that does not read; it is disconnected when more wait.
      hello_timeout_s: for the whole handshake.
      frame_timeout_s: from a frame's length to its last byte.
      goodbye_timeout_s: for a client to read what was written before the connection is closed.
    """

    token: str | None = None
    max_frame_bytes: int = protocol.MAX_FRAME_BYTES
    max_unread_bytes: int = 8 << 20
    hello_timeout_s: float = 10.0
    frame_timeout_s: float = 60.0
    goodbye_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "token" and not value > 0:
                raise ValueError(f"ConnectionLimits: {field.name}={value} must be positive")
        if self.token == "":
            raise ValueError("ConnectionLimits: the token is empty")


class EventBridge:
    """Carries events from the engine's thread to the event loop: one wake-up per batch, no waiting on either side."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called in the loop when the engine may have failed: a request did, or was not taken."""
        self._loop = loop
        self.on_failure = on_failure
        self._events: collections.deque[tuple[Connection, Generation, RequestEvent]] = collections.deque()
        self._scheduled = False

    def post(self, connection: "Connection", generation: "Generation", event: RequestEvent) -> None:
        """Called on the engine's thread."""
        self._events.append((connection, generation, event))
        # The loop clears the flag before it empties the queue, so an event that sees it set is one the loop will still find.
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        touched: dict[Connection, None] = {}
        failed = False
        while self._events:
            connection, generation, event = self._events.popleft()
            connection.on_event(generation, event)
            touched[connection] = None
            failed |= event.finish_reason is FinishReason.ERROR
        for connection in touched:
            connection.flush()
        if failed:
            self.on_failure()


class Transport(Protocol):
    """The part of asyncio.Transport that a connection uses."""

    def write(self, data: bytes) -> None: ...
    def write_eof(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def is_closing(self) -> bool: ...
    def get_write_buffer_size(self) -> int: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Generation:
    """An open `Generate`. `key` is the request's name inside the engine, unique over all connections."""

    id: int
    key: str


class Connection:
    """One client, from its hello to its end. `run` returns when the client has left or was shown out."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        bridge: EventBridge,
        reader: asyncio.StreamReader,
        transport: Transport,
        limits: ConnectionLimits,
    ) -> None:
        self._name = name
        self._backend = backend
        self._bridge = bridge
        self._reader = reader
        self._transport = transport
        self._limits = limits
        self._generations: dict[int, Generation] = {}
        self._unsent = bytearray()
        self._next_key = 0
        self._closing = False

    @property
    def num_open(self) -> int:
        """Generations whose last message has not been written."""
        return len(self._generations)

    async def run(self) -> None:
        counters = self._backend.counters
        try:
            await self._shake_hands()
            counters.connections_open += 1
            counters.connections_total += 1
            try:
                await self._serve()
            finally:
                counters.connections_open -= 1
        except ProtocolError as error:
            self.send(Error(code=error.code, message=error.message, id=error.request_id))
        except OSError as error:
            _log.info("%s: lost: %s", self._name, error)
        finally:
            self.close()
        await self._hang_up()

    async def refuse(self, error: Error) -> None:
        """Instead of `run`: says why the client is not served."""
        self.send(error)
        self.close()
        await self._hang_up()

    def send(self, message: protocol.ServerMessage) -> None:
        """Writes a message; never waits."""
        self._append(message)
        self.flush()

    def flush(self) -> None:
        """Hands the appended messages to the transport, or shows out a client that has left too much unread."""
        if self._closing or self._transport.is_closing():
            self._unsent.clear()
        if not self._unsent:
            return
        if self._transport.get_write_buffer_size() > self._limits.max_unread_bytes:
            self._unsent.clear()
            message = f"more than {self._limits.max_unread_bytes} bytes of answers were left unread"
            _log.warning("%s: disconnected: %s", self._name, message)
            self._append(Error(code=ErrorCode.SLOW_READER, message=message))
            self._transport.write(bytes(self._unsent))
            self.close()
            return
        self._transport.write(bytes(self._unsent))
        self._unsent.clear()

    def close(self) -> None:
        """Cancels what is under way and says goodbye; `run` then waits for the client to hang up, but not for long."""
        if self._closing:
            return
        self._closing = True
        for generation in self._generations.values():
            self._backend.service.cancel(generation.key)
        self._backend.counters.generations_open -= len(self._generations)
        self._generations.clear()
        try:
            self._transport.write_eof()
        except OSError:  # the client reset the connection, and the loop has not noticed yet
            self._transport.abort()
        asyncio.get_running_loop().call_later(self._limits.goodbye_timeout_s, self._transport.abort)

    def abort(self) -> None:
        """Ends the connection without waiting for anything; what was not sent yet is lost."""
        self.close()
        self._transport.abort()

    def refuse_open(self, code: ErrorCode, message: str) -> None:
        """Answers every open generation with an error; used when the server stops before they have finished."""
        for generation in list(self._generations.values()):
            self._backend.service.cancel(generation.key)
            self._finish(generation, Error(code=code, message=message, id=generation.id))
        self.flush()

    def on_event(self, generation: Generation, event: RequestEvent) -> None:
        """Appends the message that the event becomes; `flush` follows. Events of a closed connection are dropped."""
        if self._generations.get(generation.id) is not generation:
            return
        if event.finish_reason is None:
            self._append(protocol.Delta(id=generation.id, text=event.text, token_ids=event.token_ids, logprobs=event.logprobs))
        elif event.finish_reason is FinishReason.ERROR:
            self._finish(
                generation, Error(code=ErrorCode.INTERNAL, message=event.error or "the engine failed", id=generation.id)
            )
        elif event.usage is None or event.timing is None:
            message = "the engine stopped before it took the request"
            self._finish(generation, Error(code=ErrorCode.SHUTTING_DOWN, message=message, id=generation.id))
        else:
            finished = protocol.Finished(
                id=generation.id,
                finish_reason=event.finish_reason,
                text=event.text,
                token_ids=event.token_ids,
                logprobs=event.logprobs,
                usage=event.usage,
                timing=event.timing,
            )
            self._finish(generation, finished)

    def _finish(self, generation: Generation, message: protocol.Finished | Error) -> None:
        del self._generations[generation.id]
        self._backend.counters.generations_open -= 1
        self._append(message)

    def _append(self, message: protocol.ServerMessage) -> None:
        if isinstance(message, Error):
            errors = self._backend.counters.errors
            errors[message.code.value] = errors.get(message.code.value, 0) + 1
        self._unsent += protocol.encode_frame(message)

    async def _hang_up(self) -> None:
        """Waits for the client's end of stream; the abort that `close` has set bounds it."""
        # Closing a socket that holds unread input resets it, and the client would lose the answers it has not read yet.
        with contextlib.suppress(OSError):
            while await self._reader.read(1 << 16):
                pass
        self._transport.close()

    async def _shake_hands(self) -> None:
        try:
            async with asyncio.timeout(self._limits.hello_timeout_s):
                payload = await protocol.read_frame(self._reader, protocol.MAX_HELLO_BYTES)
        except TimeoutError:
            message = f"no hello within {self._limits.hello_timeout_s:g} s"
            raise ProtocolError(ErrorCode.HANDSHAKE_REQUIRED, message) from None
        if payload is None:
            raise ConnectionResetError("the client left before its hello")
        hello = protocol.decode_hello(payload)
        token = self._limits.token
        if token is not None and not hmac.compare_digest((hello.token or "").encode(), token.encode()):
            _log.warning("%s: wrong token", self._name)
            raise ProtocolError(ErrorCode.UNAUTHORIZED, "the token is missing or wrong")
        self.send(
            protocol.Welcome(
                version=protocol.PROTOCOL_VERSION,
                server="nanoflow-jax",
                model=self._backend.description.name,
                max_frame_bytes=self._limits.max_frame_bytes,
            )
        )

    async def _serve(self) -> None:
        while not self._closing:
            try:
                payload = await protocol.read_frame(self._reader, self._limits.max_frame_bytes, self._limits.frame_timeout_s)
                if payload is None:
                    return
                message = protocol.decode_client_message(payload)
            except protocol.FrameTooLargeError as error:
                self.send(Error(code=error.code, message=error.message))
                await protocol.skip_payload(self._reader, error.size, self._limits.frame_timeout_s)
                continue
            except ProtocolError as error:
                if error.code is ErrorCode.TORN_FRAME:
                    raise
                self._backend.counters.requests_total += 1
                self.send(Error(code=error.code, message=error.message, id=error.request_id))
                continue
            if isinstance(message, protocol.Hello):
                self.send(Error(code=ErrorCode.MALFORMED_FRAME, message="hello is only the first message"))
                continue
            self._backend.counters.requests_total += 1
            answer = await self._answer(message)
            if answer is not None:
                self.send(answer)

    async def _answer(self, message: protocol.Request) -> protocol.Answer | None:
        """The message's answer; None for a generation that has started."""
        if message.id in self._generations:
            return Error(code=ErrorCode.DUPLICATE_ID, message=f"id {message.id} belongs to a running request", id=message.id)
        try:
            match message:
                case protocol.Generate():
                    return await self._generate(message)
                case protocol.Cancel(target=target):
                    generation = self._generations.get(target)
                    was_running = generation is not None and self._backend.service.cancel(generation.key)
                    return protocol.Cancelled(id=message.id, was_running=was_running)
                case _:
                    return await backends.answer(self._backend, message)
        except RequestRejected as rejected:
            if rejected.code is runtime.RejectCode.SHUTTING_DOWN:
                self._bridge.on_failure()
            return Error(code=backends.REJECTED[rejected.code], message=str(rejected), id=message.id)
        except ProtocolError as error:
            return Error(code=error.code, message=error.message, id=message.id)
        except Exception as error:
            # A fault of ours while answering one request must not take the others with it.
            _log.exception("%s: request %d failed", self._name, message.id)
            return Error(code=ErrorCode.INTERNAL, message=f"{type(error).__name__}: {error}", id=message.id)

    async def _generate(self, message: protocol.Generate) -> None:
        token_ids = await backends.prompt_token_ids(self._backend, message.prompt)
        if self._closing:
            return  # nobody would cancel what starts now
        generation = Generation(message.id, f"{self._name}#{self._next_key}")
        self._next_key += 1
        request = runtime.Request(
            request_id=generation.key,
            prompt_token_ids=token_ids,
            params=message.params,
            stream=message.stream,
            session_id=message.session_id,
            cache_salt=message.cache_salt,
        )
        self._backend.service.submit(request, lambda event: self._bridge.post(self, generation, event))
        # Events wait in the bridge until this coroutine yields, so none is delivered before the generation is listed.
        self._generations[generation.id] = generation
        self._backend.counters.generations_open += 1

"""A server in the test's own event loop: the real engine, service and tokenizer, a mock of the device."""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.service import EngineService
from nanoflow_jax.tokenizer import Tokenizer, load_tokenizer
from serve import protocol
from serve.address import Address, TcpAddress, UnixAddress, parse_address
from serve.async_client import AsyncClient
from serve.backend import Backend
from serve.connection import ConnectionLimits
from serve.server import Ending, Server, ServerConfig, bind
from tests.runtime.mock_runner import MockRunner, tiny_config

TINY = Path(__file__).parent.parent / "data" / "tiny" / "llama3-tiny"
VOCAB_SIZE = 512


@functools.cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(TINY)


def mock_runner(**options: Any) -> MockRunner:
    """A mock of the device with the tiny tokenizer's vocabulary; no token ends a request unless asked to."""
    config = tiny_config(vocab_size=VOCAB_SIZE, max_context=options.pop("max_context", 256), eos_token_ids=())
    return MockRunner(config, **{"num_pages": 257} | options)


def make_backend(runner: MockRunner, *, with_tokenizer: bool = True, max_waiting: int = 64, sync: bool = False) -> Backend:
    words = tokenizer() if with_tokenizer else None
    service = EngineService(Engine(runner, words, sync=sync), max_waiting=max_waiting)
    description = protocol.ModelDescription(
        name="mock",
        vocab_size=VOCAB_SIZE,
        num_params=runner.config.num_params,
        num_layers=1,
        max_context=runner.max_context,
        pool_tokens=(runner.num_pages - 1) * runner.page_size,
        page_size=runner.page_size,
        b_dense=runner.shapes[-1].num_tokens,
        tp_size=1,
        dtype="float32",
        eos_token_ids=[],
        has_tokenizer=words is not None,
        has_chat_template=words is not None and words.chat_template is not None,
    )
    return Backend(service=service, tokenizer=words, description=description)


@dataclasses.dataclass
class Serving:
    server: Server
    backend: Backend
    runner: MockRunner
    address: str
    ending: asyncio.Task[Ending]

    async def client(self, **options: Any) -> AsyncClient:
        return await AsyncClient.connect(self.address, **{"answer_timeout_s": 20.0} | options)

    async def raw(self) -> "RawClient":
        """A client that can misbehave, after its handshake."""
        match parse_address(self.address):
            case TcpAddress(host=host, port=port):
                raw = RawClient(*await asyncio.open_connection(host, port))
            case UnixAddress(path=path):
                raw = RawClient(*await asyncio.open_unix_connection(path))
        raw.write({"type": "hello", "version": protocol.PROTOCOL_VERSION})
        assert isinstance(await raw.read(), protocol.Welcome)
        return raw

    async def idle(self) -> None:
        """Returns once no request is open and every page is free; fails after a while."""
        counters, stats = self.backend.counters, self.backend.service.stats
        await eventually(
            lambda: counters.generations_open == 0 and stats().running + stats().waiting == 0 and pages_free(stats())
        )


def pages_free(stats: Any) -> bool:
    return stats.free_pages == stats.num_pages - 1


class RawClient:
    """Writes any bytes, reads messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def write(self, message: Any) -> None:
        payload = msgspec.msgpack.encode(message)
        self.writer.write(protocol.HEADER.pack(len(payload)) + payload)

    async def read(self) -> protocol.ServerMessage | None:
        async with asyncio.timeout(20.0):
            payload = await protocol.read_frame(self.reader, 1 << 26)
        return None if payload is None else protocol.decode_server_message(payload)

    async def read_until(self, *kinds: type, request_id: int | None = None) -> Any:
        """The next message of one of these kinds, for this request if one is given."""
        while True:
            message = await self.read()
            assert message is not None, "the server hung up"
            if isinstance(message, kinds) and (request_id is None or message.id == request_id):
                return message


async def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(
    runner: MockRunner | None = None,
    *,
    address: Address = TcpAddress("127.0.0.1", 0),  # noqa: B008 (frozen)
    limits: ConnectionLimits = ConnectionLimits(goodbye_timeout_s=1.0),  # noqa: B008 (frozen)
    max_connections: int = 64,
    drain_timeout_s: float = 10.0,
    **backend_options: Any,
) -> AsyncIterator[Serving]:
    config = ServerConfig(address=address, limits=limits, max_connections=max_connections, drain_timeout_s=drain_timeout_s)
    bound = bind(address)
    runner = runner or mock_runner()
    backend = make_backend(runner, **backend_options)
    server = Server(backend, config, bound)
    ready: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
    ending = asyncio.create_task(server.run(ready.set_result))
    try:
        yield Serving(server, backend, runner, str(await ready), ending)
    finally:
        if not ending.done():
            server.shut_down()
            server.shut_down()
        await ending
        backend.service.stop()


def run(test: Coroutine[Any, Any, None]) -> None:
    """Runs an asynchronous test; nothing in it may hang."""

    async def bounded() -> None:
        async with asyncio.timeout(60.0):
            await test

    asyncio.run(bounded())

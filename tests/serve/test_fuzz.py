"""10,000 hostile clients, each a connection of its own over in-memory streams; afterwards everybody else is still served."""

import asyncio
import random
import threading
from typing import Any

import msgspec
import pytest

from nanoflow_jax.runtime.request import SamplingParams
from serve import protocol
from serve.connection import Connection, ConnectionLimits, EventBridge
from tests.runtime.mock_runner import plain_decode
from tests.serve.serving import eventually, make_backend, mock_runner, pages_free, run

HELLO = protocol.encode_frame(protocol.Hello(version=protocol.PROTOCOL_VERSION))
LIMITS = ConnectionLimits(max_frame_bytes=4096, frame_timeout_s=5.0, hello_timeout_s=5.0)
MESSAGES: list[dict[str, Any]] = [
    {
        "type": "generate",
        "id": 1,
        "prompt": {"type": "token_ids", "token_ids": [3, 4, 5]},
        "params": {
            "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 7, "logprobs": 2, "max_tokens": 3,
            "stop_token_ids": [9], "stop": ["end"], "ignore_eos": True,
        },
        "stream": True,
    },
    {"type": "generate", "id": 2, "prompt": {"type": "text", "text": "hello"}, "params": {"max_tokens": 2}},
    {
        "type": "generate",
        "id": 3,
        "prompt": {"type": "chat", "messages": [{"role": "user", "content": "hi"}]},
        "params": {"max_tokens": 2},
        "stream": False,
    },
    {"type": "cancel", "id": 4, "target": 1},
    {"type": "tokenize", "id": 5, "text": "some text", "add_special_tokens": False},
    {"type": "detokenize", "id": 6, "token_ids": [3, 4, 5], "skip_special_tokens": True},
    {"type": "model_info", "id": 7},
    {"type": "stats", "id": 8},
    {"type": "health", "id": 9},
]  # fmt: skip
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, -0.5, 1e308, float("nan"),
    float("inf"), "", "x", "x" * 3000, "\0", "\U0010ffff", b"\xff\xfe", [], [[]], [None] * 50, [-1], {}, {"type": "text"},
    {1: 2}, msgspec.msgpack.Ext(5, b"x"), [[[[[[[[]]]]]]]],
]  # fmt: skip


class MemoryTransport:
    """What the connection writes; `answered` is set by the first message after the welcome."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.written = bytearray()
        self.answered = asyncio.Event()
        self._reader = reader
        self._closing = False
        self._num_writes = 0

    def write(self, data: bytes) -> None:
        assert not self._closing
        self.written += data
        self._num_writes += 1
        if self._num_writes > 1:
            self.answered.set()

    def write_eof(self) -> None:
        self.answered.set()

    def close(self) -> None:
        self._closing = True

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return 0


def frame(payload: bytes) -> bytes:
    return protocol.HEADER.pack(len(payload)) + payload


def random_stream(rng: random.Random) -> tuple[bytes, bool]:
    """Bytes from anywhere, with or without a handshake and honest frame lengths. The flag: is an answer owed?"""
    junk = rng.randbytes(rng.randrange(64))
    if rng.random() < 0.5:
        junk = b"".join(frame(rng.randbytes(rng.randrange(24))) for _ in range(rng.randrange(1, 4))) + junk
    return (HELLO if rng.random() < 0.8 else b"") + junk, False


def torn_stream(rng: random.Random) -> tuple[bytes, bool]:
    """Valid messages, cut anywhere."""
    stream = HELLO + b"".join(frame(msgspec.msgpack.encode(rng.choice(MESSAGES))) for _ in range(rng.randrange(1, 5)))
    return stream[: rng.randrange(len(stream))], False


def mutated_message(rng: random.Random) -> tuple[bytes, bool]:
    """A valid message with one to three fields changed, removed, added or renamed, or some bits flipped."""
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(rng.choice(MESSAGES)))
    if rng.random() < 0.2:
        payload = bytearray(msgspec.msgpack.encode(message))
        for _ in range(rng.randrange(1, 4)):
            payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
        return HELLO + frame(bytes(payload)), True
    for _ in range(rng.randrange(1, 4)):
        mutate(message, rng)
    return HELLO + frame(msgspec.msgpack.encode(message)), True


def mutate(message: dict[str, Any], rng: random.Random) -> None:
    places = [(node, key) for node in containers(message) for key in (node if isinstance(node, dict) else range(len(node)))]
    if not places:
        return
    node, key = rng.choice(places)
    action = rng.choice(("replace", "replace", "replace", "remove", "add", "rename"))
    if action == "replace":
        node[key] = rng.choice(JUNK)
    elif action == "remove":
        del node[key]
    elif isinstance(node, list):
        node.append(rng.choice(JUNK))
    elif action == "add":
        node[rng.choice(("type", "id", "text", "extra", ""))] = rng.choice(JUNK)
    else:
        node[f"{key}_"] = node.pop(key)


def containers(node: Any) -> list[Any]:
    if not isinstance(node, dict | list):
        return []
    children = node.values() if isinstance(node, dict) else node
    return [node, *(found for child in children for found in containers(child))]


def messages_in(written: bytes) -> list[protocol.ServerMessage]:
    messages = []
    while written:
        (size,) = protocol.HEADER.unpack(written[:4])
        messages.append(protocol.decode_server_message(bytes(written[4 : 4 + size])))
        written = written[4 + size :]
    return messages


@pytest.mark.parametrize(
    ("make", "count", "seed"),
    [
        pytest.param(random_stream, 3000, 1, id="random bytes"),
        pytest.param(torn_stream, 3000, 2, id="torn frames"),
        pytest.param(mutated_message, 4000, 3, id="mutated messages"),
    ],
)
def test_no_client_ends_the_server(make, count, seed):
    async def one(name: str, backend, bridge: EventBridge, stream: bytes, answer_is_owed: bool) -> None:
        reader = asyncio.StreamReader()
        transport = MemoryTransport(reader)
        connection = Connection(name, backend, bridge, reader, transport, LIMITS)
        running = asyncio.create_task(connection.run())
        reader.feed_data(stream)
        if answer_is_owed:
            async with asyncio.timeout(20.0):
                await transport.answered.wait()
        reader.feed_eof()
        await running
        messages = messages_in(transport.written)
        assert connection.num_open == 0
        assert not answer_is_owed or len(messages) > 1, f"no answer to {stream!r}"
        internal = [m for m in messages if isinstance(m, protocol.Error) and m.code is protocol.ErrorCode.INTERNAL]
        assert not internal, f"{internal} answers {stream!r}"

    async def test() -> None:
        rng = random.Random(seed)
        backend = make_backend(mock_runner())
        bridge = EventBridge(asyncio.get_running_loop(), lambda: None)
        num_threads = threading.active_count()
        for start in range(0, count, 50):
            await asyncio.gather(*(one(f"{start + i}", backend, bridge, *make(rng)) for i in range(50)))
        assert backend.service.health().state == "running"
        assert backend.counters.generations_open == backend.counters.connections_open == 0
        await eventually(lambda: pages_free(backend.service.stats()))
        assert threading.active_count() < num_threads + 40
        await still_serving(backend, bridge)
        backend.service.stop()

    run(test())


async def still_serving(backend, bridge: EventBridge) -> None:
    reader = asyncio.StreamReader()
    transport = MemoryTransport(reader)
    running = asyncio.create_task(Connection("last", backend, bridge, reader, transport, LIMITS).run())
    params = SamplingParams(max_tokens=9)
    request = protocol.Generate(id=1, prompt=protocol.TokenIds(token_ids=[8, 9]), params=params, stream=False)
    reader.feed_data(HELLO + protocol.encode_frame(request))
    await transport.answered.wait()
    reader.feed_eof()
    await running
    assert messages_in(transport.written)[-1].token_ids == plain_decode(mock_runner().config, [8, 9], params)

"""Messages survive the wire, frames survive any cutting of the stream, and what is no message says which error it is."""

import asyncio
import itertools
import subprocess
import sys
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve import protocol
from serve.protocol import ErrorCode, ProtocolError
from tests.serve import messages


def read_all(pieces: list[bytes], max_bytes: int = protocol.MAX_FRAME_BYTES) -> list[bytes]:
    """Payloads of all frames in a stream that arrives in these pieces."""

    async def read() -> list[bytes]:
        reader = asyncio.StreamReader()
        feeding = asyncio.create_task(feed(reader))
        payloads = []
        while (payload := await protocol.read_frame(reader, max_bytes)) is not None:
            payloads.append(payload)
        await feeding
        return payloads

    async def feed(reader: asyncio.StreamReader) -> None:
        for piece in pieces:
            reader.feed_data(piece)
            await asyncio.sleep(0)
        reader.feed_eof()

    return asyncio.run(read())


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(borders) if b > a]


@given(messages.client_messages)
def test_client_messages_survive_the_wire(message):
    (payload,) = read_all([protocol.encode_frame(message)])
    assert protocol.decode_client_message(payload) == message


@given(messages.server_messages)
def test_server_messages_survive_the_wire(message):
    (payload,) = read_all([protocol.encode_frame(message)])
    assert protocol.decode_server_message(payload) == message


def test_strategies_cover_every_message():
    def tags(union) -> set[str]:
        return {member.__struct_config__.tag for member in typing.get_args(union)}

    assert tags(protocol.ClientMessage) == {
        "hello", "generate", "cancel", "tokenize", "detokenize", "model_info", "stats", "health",
    }  # fmt: skip
    assert tags(protocol.ServerMessage) == {
        "welcome", "delta", "finished", "cancelled", "tokens", "detokenized", "model", "statistics", "healthy", "error",
    }  # fmt: skip


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(0, 10_000), max_size=20))
def test_frames_survive_any_cutting(payloads, cuts):
    stream = b"".join(protocol.HEADER.pack(len(p)) + p for p in payloads)
    assert read_all(cut(stream, cuts)) == payloads


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=4), st.data())
def test_a_torn_frame_is_told_from_the_end(payloads, data):
    stream = b"".join(protocol.HEADER.pack(len(p)) + p for p in payloads)
    ends = {0}
    for payload in payloads:
        ends.add(max(ends) + protocol.HEADER.size + len(payload))
    length = data.draw(st.integers(0, len(stream)))
    if length in ends:
        assert read_all([stream[:length]]) == payloads[: sorted(ends).index(length)]
    else:
        with pytest.raises(ProtocolError) as caught:
            read_all([stream[:length]])
        assert caught.value.code is ErrorCode.TORN_FRAME


def test_an_oversized_frame_can_be_skipped():
    async def read() -> bytes | None:
        reader = asyncio.StreamReader()
        reader.feed_data(protocol.HEADER.pack(200_000) + bytes(200_000) + protocol.HEADER.pack(2) + b"ok")
        with pytest.raises(protocol.FrameTooLargeError) as caught:
            await protocol.read_frame(reader, 100)
        await protocol.skip_payload(reader, caught.value.size)
        return await protocol.read_frame(reader, 100)

    assert asyncio.run(read()) == b"ok"


def test_a_frame_that_stops_coming_is_torn():
    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(protocol.HEADER.pack(10) + b"abc")
        await protocol.read_frame(reader, 100, timeout_s=0.01)

    with pytest.raises(ProtocolError) as caught:
        asyncio.run(read())
    assert caught.value.code is ErrorCode.TORN_FRAME


GENERATE = {"type": "generate", "id": 7, "prompt": {"type": "text", "text": "hi"}}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"type": "no_such"}, "no_such"),
        ({"surprise": 1}, "surprise"),
        ({"prompt": "hi"}, "prompt"),
        ({"prompt": {"type": "text", "text": "hi", "token_ids": [1]}}, "token_ids"),
        ({"prompt": {"type": "token_ids", "token_ids": ["1"]}}, "token_ids"),
        ({"prompt": {"type": "token_ids", "token_ids": [-1]}}, "token_ids"),
        ({"prompt": {"type": "token_ids", "token_ids": [2**40]}}, "token_ids"),
        ({"prompt": {"type": "chat", "messages": [{"role": "user"}]}}, "content"),
        ({"params": {"temperatur": 1.0}}, "temperatur"),
        ({"params": {"temperature": "hot"}}, "temperature"),
        ({"params": {"max_tokens": 1.5}}, "max_tokens"),
        ({"params": {"stop": "END"}}, "stop"),
        ({"stream": 1}, "stream"),
        ({"session_id": 1}, "session_id"),
        ({"cache_salt": ["a"]}, "cache_salt"),
    ],
)
def test_an_invalid_request_keeps_its_id_and_names_what_is_wrong(change, word):
    with pytest.raises(ProtocolError) as caught:
        protocol.decode_client_message(msgspec.msgpack.encode(GENERATE | change))
    assert (caught.value.code, caught.value.request_id) == (ErrorCode.INVALID_REQUEST, 7)
    assert word in caught.value.message


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa4type\xa2\xff\xff",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode(GENERATE | {"id": -1}),
        msgspec.msgpack.encode(GENERATE | {"id": 2**63}),
        msgspec.msgpack.encode(GENERATE | {"id": True}),
        msgspec.msgpack.encode(GENERATE | {"id": "seven"}),
        msgspec.msgpack.encode({k: v for k, v in GENERATE.items() if k != "id"}),
        msgspec.msgpack.encode(GENERATE) + b"\x00",
    ],
)
def test_a_payload_without_an_id_is_malformed(payload):
    with pytest.raises(ProtocolError) as caught:
        protocol.decode_client_message(payload)
    assert caught.value.code in (ErrorCode.MALFORMED_FRAME, ErrorCode.INVALID_REQUEST)
    assert caught.value.request_id is None


def test_a_hello_of_another_version_is_told_so_whatever_else_it_says():
    with pytest.raises(ProtocolError) as caught:
        protocol.decode_hello(msgspec.msgpack.encode({"type": "hello", "version": 99, "new_field": {}}))
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION
    for first in ({"type": "hello"}, {"type": "hello", "version": "1"}, GENERATE, [], 3):
        with pytest.raises(ProtocolError) as caught:
            protocol.decode_hello(msgspec.msgpack.encode(first))
        assert caught.value.code is ErrorCode.HANDSHAKE_REQUIRED


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_protocol_errors(payload):
    for decode in (protocol.decode_client_message, protocol.decode_server_message, protocol.decode_hello):
        try:
            decode(payload)
        except ProtocolError as error:
            protocol.encode_frame(protocol.Error(code=error.code, message=error.message, id=error.request_id))


def test_protocol_and_client_import_without_jax():
    check = "import sys, serve.protocol, serve.client, serve.bench; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0

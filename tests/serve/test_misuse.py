"""Clients that misbehave: each gets a typed error or is shown out, and nobody else notices."""

import asyncio
import contextlib
import socket

import msgspec
import pytest

from nanoflow_jax.runtime.request import SamplingParams
from serve import protocol
from serve.address import TcpAddress, UnixAddress, parse_address
from serve.async_client import AsyncClient, ConnectionLostError, ServerError
from serve.connection import ConnectionLimits
from serve.protocol import ErrorCode
from serve.server import ServerConfig
from tests.runtime.mock_runner import plain_decode
from tests.serve.serving import Serving, eventually, mock_runner, run, serving


@contextlib.asynccontextmanager
async def undisturbed(s: Serving):
    """A client whose long generation runs through whatever happens inside, and is right."""
    params = SamplingParams(max_tokens=60)
    async with await s.client() as client:
        stream = await client.stream([11, 12], params)
        first = await anext(stream)
        yield
        rest = [token for chunk in [c async for c in stream] for token in chunk.token_ids]
        assert first.token_ids + rest == plain_decode(s.runner.config, [11, 12], params)
    await s.idle()


TOKENS = {"type": "token_ids", "token_ids": [3, 4]}
BAD_REQUESTS = [
    ({"prompt": {"type": "text", "text": ""}}, ErrorCode.EMPTY_PROMPT),  # field case 11
    ({"prompt": {"type": "token_ids", "token_ids": []}}, ErrorCode.EMPTY_PROMPT),  # field case 11
    ({"prompt": {"type": "chat", "messages": []}}, ErrorCode.EMPTY_PROMPT),
    ({"prompt": {"type": "token_ids", "token_ids": [3] * 256}}, ErrorCode.PROMPT_TOO_LONG),
    ({"prompt": {"type": "token_ids", "token_ids": [512]}}, ErrorCode.INVALID_REQUEST),
    ({"prompt": {"type": "token_ids", "token_ids": [3, -1]}}, ErrorCode.INVALID_REQUEST),
    ({"prompt": {"type": "token_ids", "token_ids": [3.5]}}, ErrorCode.INVALID_REQUEST),
    ({"prompt": {"type": "text", "text": 3}}, ErrorCode.INVALID_REQUEST),
    ({"prompt": None}, ErrorCode.INVALID_REQUEST),
    ({"params": {"max_tokens": 0}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"max_tokens": -5}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"max_tokens": 10**18}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"temperature": -1.0}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"temperature": float("nan")}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"temperature": float("inf")}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"top_p": 1.5}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"min_p": -0.1}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"top_k": -1}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"seed": -1}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"logprobs": 1000}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"stop": [""]}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"stop": ["x"] * 1000}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"stop_token_ids": [512]}}, ErrorCode.INVALID_REQUEST),
    ({"params": {"no_such": 1}}, ErrorCode.INVALID_REQUEST),
    ({"no_such": 1}, ErrorCode.INVALID_REQUEST),
    ({"stream": "yes"}, ErrorCode.INVALID_REQUEST),
    ({"session_id": ""}, ErrorCode.INVALID_REQUEST),
    ({"session_id": 7}, ErrorCode.INVALID_REQUEST),
    ({"session_id": "x" * 257}, ErrorCode.INVALID_REQUEST),
    ({"cache_salt": ""}, ErrorCode.INVALID_REQUEST),
    ({"cache_salt": "a\nb"}, ErrorCode.INVALID_REQUEST),
    ({"type": "no_such"}, ErrorCode.INVALID_REQUEST),
]


def test_every_bad_request_gets_a_typed_error_for_itself_only():
    async def test() -> None:
        async with serving() as s, undisturbed(s):
            raw = await s.raw()
            for request_id, (change, code) in enumerate(BAD_REQUESTS):
                raw.write({"type": "generate", "id": request_id, "prompt": TOKENS} | change)
                answer = await raw.read()
                assert isinstance(answer, protocol.Error), change
                assert (answer.id, answer.code) == (request_id, code), (change, answer.message)
                assert answer.message
            raw.write({"type": "generate", "id": 1000, "prompt": TOKENS, "params": {"max_tokens": 2}})
            assert (await raw.read_until(protocol.Finished)).id == 1000
            raw.writer.close()

    run(test())


def test_case_12_a_prompt_beyond_the_pool_is_refused_and_the_next_is_served():
    async def test() -> None:
        # 8 usable pages of 4 tokens; the context would allow more.
        async with serving(mock_runner(num_pages=9)) as s, await s.client() as client:
            long, short = client.generate([3] * 33), client.generate([3, 4], SamplingParams(max_tokens=3))
            refused, served = await asyncio.gather(long, short, return_exceptions=True)
            assert isinstance(refused, ServerError)
            assert refused.code is ErrorCode.EXCEEDS_POOL
            assert len(served.token_ids) == 3
            assert len((await client.generate([3] * 32, SamplingParams(max_tokens=9))).token_ids) == 1
            await s.idle()

    run(test())


def test_a_duplicate_id_leaves_the_running_request_alone():
    async def test() -> None:
        async with serving(mock_runner(step_time_s=0.002)) as s:
            raw = await s.raw()
            generate = {"type": "generate", "id": 1, "prompt": TOKENS, "params": {"max_tokens": 30}}
            raw.write(generate)
            await raw.read_until(protocol.Delta)
            for again in (generate, {"type": "health", "id": 1}, {"type": "cancel", "id": 1, "target": 1}):
                raw.write(again)
                assert (await raw.read_until(protocol.Error)).code is ErrorCode.DUPLICATE_ID
            finished = await raw.read_until(protocol.Finished)
            assert (finished.id, finished.usage.output_tokens) == (1, 30)
            raw.write(generate)  # the id is free again
            assert (await raw.read_until(protocol.Finished)).usage.output_tokens == 30
            raw.write({"type": "cancel", "id": 2, "target": 99})
            assert (await raw.read()) == protocol.Cancelled(id=2, was_running=False)
            raw.writer.close()

    run(test())


def test_malformed_oversized_and_torn_frames():
    async def test() -> None:
        async with serving(limits=ConnectionLimits(max_frame_bytes=1000, goodbye_timeout_s=1.0)) as s, undisturbed(s):
            raw = await s.raw()
            raw.writer.write(protocol.HEADER.pack(3) + b"\xc1\xc1\xc1")
            assert (await raw.read()).code is ErrorCode.MALFORMED_FRAME
            raw.writer.write(protocol.HEADER.pack(100_000))
            assert (await raw.read()).code is ErrorCode.FRAME_TOO_LARGE  # before the payload has come
            raw.writer.write(bytes(100_000))
            raw.write({"type": "hello", "version": 1})
            assert (await raw.read()).code is ErrorCode.MALFORMED_FRAME
            raw.write({"type": "health", "id": 5})
            assert (await raw.read()).id == 5  # all that cost only the bad frames
            raw.writer.write(protocol.HEADER.pack(500) + b"half")
            raw.writer.write_eof()
            assert (await raw.read()).code is ErrorCode.TORN_FRAME
            assert await raw.read() is None
            raw.writer.close()

    run(test())


def test_a_frame_that_never_ends_is_torn():
    async def test() -> None:
        async with serving(limits=ConnectionLimits(frame_timeout_s=0.05, goodbye_timeout_s=0.1)) as s, undisturbed(s):
            for announced in (500, 2**32 - 1):
                raw = await s.raw()
                raw.writer.write(protocol.HEADER.pack(announced) + b"x")
                answer = await raw.read()
                if answer.code is ErrorCode.FRAME_TOO_LARGE:
                    answer = await raw.read()
                assert answer.code is ErrorCode.TORN_FRAME
                assert await raw.read() is None
                raw.writer.close()

    run(test())


def test_the_handshake():
    async def test() -> None:
        limits = ConnectionLimits(token="secret", hello_timeout_s=0.2, goodbye_timeout_s=0.5)
        async with serving(limits=limits) as s:
            host, port = s.address.rsplit(":", 1)
            for first, code in (
                ({"type": "hello", "version": 99}, ErrorCode.UNSUPPORTED_VERSION),
                ({"type": "hello", "version": 1}, ErrorCode.UNAUTHORIZED),
                ({"type": "hello", "version": 1, "token": "Secret"}, ErrorCode.UNAUTHORIZED),
                ({"type": "hello", "version": 1, "token": "x" * 10_000}, ErrorCode.FRAME_TOO_LARGE),
                ({"type": "health", "id": 1}, ErrorCode.HANDSHAKE_REQUIRED),
                (None, ErrorCode.HANDSHAKE_REQUIRED),
            ):
                reader, writer = await asyncio.open_connection(host, int(port))
                if first is not None:
                    payload = msgspec.msgpack.encode(first)
                    writer.write(protocol.HEADER.pack(len(payload)) + payload)
                    # What follows must not be answered, nor keep the client from reading the error.
                    writer.write(protocol.encode_frame(protocol.GetHealth(id=1)))
                answer = protocol.decode_server_message(await protocol.read_frame(reader, 1000))
                assert (answer.code, answer.id) == (code, None)
                assert await protocol.read_frame(reader, 1000) is None
                writer.close()
            for token in (None, "wrong"):
                with pytest.raises(ServerError) as caught:
                    await s.client(token=token)
                assert caught.value.code is ErrorCode.UNAUTHORIZED
            async with await s.client(token="secret") as client:
                assert (await client.health()).state == "running"
            assert s.backend.counters.connections_total == 1

    run(test())


def test_one_client_too_many_is_told_so():
    async def test() -> None:
        async with serving(max_connections=2) as s:
            one, two = await s.client(), await s.client()
            with pytest.raises(ServerError) as caught:
                await s.client()
            assert caught.value.code is ErrorCode.TOO_MANY_CONNECTIONS
            await one.close()
            await eventually(lambda: s.backend.counters.connections_open == 1)
            await (await s.client()).close()
            await two.close()

    run(test())


def test_a_client_that_vanishes_frees_its_pages():
    async def test() -> None:
        async with serving(mock_runner(step_time_s=0.002)) as s, undisturbed(s):
            for reset in (False, True):
                raw = await s.raw()
                for request_id in range(6):
                    request = {"type": "generate", "id": request_id, "prompt": TOKENS, "params": {"max_tokens": 250}}
                    raw.write(request | {"stream": request_id % 2 == 0})
                await raw.read_until(protocol.Delta)
                if reset:
                    linger = (1).to_bytes(4, "little") + bytes(4)
                    raw.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    raw.writer.transport.abort()
                else:
                    raw.writer.close()
                await eventually(lambda: s.backend.counters.generations_open <= 1)

    run(test())


def test_a_reader_that_stops_reading_is_shown_out_and_harms_nobody(tmp_path):
    async def test() -> None:
        limits = ConnectionLimits(max_unread_bytes=20_000, goodbye_timeout_s=0.3)
        address = UnixAddress(tmp_path / "s")  # the kernel holds little for it
        runner = mock_runner(max_context=10_000, num_pages=20_000)
        async with serving(runner, address=address, limits=limits) as s, undisturbed(s):
            with contextlib.closing((await s.raw()).writer) as writer:
                writer.transport.pause_reading()
                for request_id in range(6):
                    params = SamplingParams(max_tokens=9_000, logprobs=20)
                    prompt = protocol.TokenIds(token_ids=[3])
                    writer.write(protocol.encode_frame(protocol.Generate(id=request_id, prompt=prompt, params=params)))
                await eventually(lambda: s.backend.counters.errors.get("slow_reader") == 1)
                assert s.backend.counters.generations_open <= 1
                await eventually(lambda: s.backend.counters.connections_open == 1)

    run(test())


def test_a_slow_reader_that_comes_back_learns_the_reason(tmp_path):
    async def test() -> None:
        limits = ConnectionLimits(max_unread_bytes=20_000, goodbye_timeout_s=20.0)
        address = UnixAddress(tmp_path / "s")
        async with serving(mock_runner(max_context=10_000, num_pages=20_000), address=address, limits=limits) as s:
            raw = await s.raw()
            raw.writer.transport.pause_reading()
            raw.write({"type": "generate", "id": 1, "prompt": TOKENS, "params": {"max_tokens": 9_000, "logprobs": 20}})
            await eventually(lambda: s.backend.counters.errors.get("slow_reader") == 1)
            raw.writer.transport.resume_reading()
            assert (await raw.read_until(protocol.Error)).code is ErrorCode.SLOW_READER
            assert await raw.read() is None
            raw.writer.close()
            await s.idle()

    run(test())


def test_a_request_larger_than_a_frame_is_refused_by_the_client():
    async def test() -> None:
        limits = ConnectionLimits(max_frame_bytes=2000, goodbye_timeout_s=1.0)
        async with serving(limits=limits) as s, await s.client() as client:
            with pytest.raises(ServerError) as caught:
                await client.generate("x" * 3000)
            assert caught.value.code is ErrorCode.FRAME_TOO_LARGE
            assert (await client.health()).state == "running"

    run(test())


def test_connecting_to_what_is_no_server_fails_in_time():
    async def test() -> None:
        async def mute(reader, writer) -> None:
            await reader.read()
            writer.close()

        async def rude(reader, writer) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        for handler, errors in ((mute, TimeoutError), (rude, (ConnectionLostError, protocol.ProtocolError))):
            listener = await asyncio.start_server(handler, "127.0.0.1", 0)
            port = listener.sockets[0].getsockname()[1]
            with pytest.raises(errors):
                await AsyncClient.connect(f"127.0.0.1:{port}", connect_timeout_s=0.3)
            listener.close()
        with pytest.raises(OSError):
            await AsyncClient.connect(f"127.0.0.1:{port}")

    run(test())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_another_address_than_loopback_needs_a_token(host):
    with pytest.raises(ValueError, match="token"):
        ServerConfig(address=TcpAddress(host, 0))
    ServerConfig(address=TcpAddress(host, 0), limits=ConnectionLimits(token="x"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(host):
    ServerConfig(address=TcpAddress(host, 0))


def test_addresses():
    for text in ("127.0.0.1:80", "[::1]:80", "unix:/some folder/socket", "localhost:0"):
        assert str(parse_address(text)) == text
    for text in ("", "80", "host", "host:", "host:x", "host:99999", "::1:80", ":80", "unix:", "host:-1", "host:٣"):
        with pytest.raises(ValueError):
            parse_address(text)


def test_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6 loopback: {error}")

    async def test() -> None:
        async with serving(address=TcpAddress("::1", 0)) as s, await s.client() as client:
            assert s.address.startswith("[::1]:")
            assert (await client.health()).state == "running"

    run(test())


def test_unix_socket(tmp_path):
    async def test() -> None:
        path = tmp_path / "s"
        async with serving(address=UnixAddress(path)) as s:
            assert path.stat().st_mode & 0o777 == 0o600
            async with await s.client() as client:
                assert len((await client.generate([3], SamplingParams(max_tokens=4))).token_ids) == 4
            with pytest.raises(OSError, match="listening"):
                async with serving(address=UnixAddress(path)):
                    pass
            assert path.exists()
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        async with serving(address=UnixAddress(path)) as s, await s.client() as client:
            assert (await client.health()).state == "running"
        path.write_text("no socket")
        with pytest.raises(FileExistsError):
            async with serving(address=UnixAddress(path)):
                pass

    run(test())

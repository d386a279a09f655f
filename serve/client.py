"""The blocking client, and `python -m serve.client "prompt"`. Imports no jax.

    with Client("127.0.0.1:7433") as client:
        for chunk in client.stream("The capital of France is"):
            print(chunk.text, end="")

`AsyncClient` does the work, on an event loop in a thread; a `Client` may be used from several threads at once.
"""

import argparse
import asyncio
import json
import os
import sys
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from nanoflow_jax.runtime.request import SamplingParams
from serve import protocol
from serve.address import DEFAULT_HOST, DEFAULT_PORT
from serve.async_client import AsyncClient as AsyncClient
from serve.async_client import AsyncStream, Chunk, Generation, Prompt, ServerError
from serve.async_client import ConnectionLostError as ConnectionLostError
from serve.protocol import ChatMessage as ChatMessage
from serve.protocol import ErrorCode as ErrorCode

T = TypeVar("T")


class Stream:
    """An answer as it comes: iterate for `Chunk`s; `result` is the whole once the iteration has ended.

    Leaving a `with` block early cancels the generation; so does `cancel`, after which the iteration ends by itself.
    """

    def __init__(self, client: "Client", stream: AsyncStream) -> None:
        self._client = client
        self._stream = stream

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        """Raises ServerError if the request failed, ConnectionLostError if the server went away."""
        chunk = self._client._wait(_next_or_none(self._stream))
        if chunk is None:
            raise StopIteration
        return chunk

    @property
    def result(self) -> Generation:
        """Everything that came. Raises RuntimeError if the stream has not ended, or ended with an error."""
        return self._stream.result

    def cancel(self) -> None:
        """Asks the server to end the generation; the iteration goes on to its last chunk."""
        self._client._loop.call_soon_threadsafe(self._stream.cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client._wait(self._stream.__aexit__(*exc))


class Client:
    """A connection to a server. Close it, or use it in a `with` block."""

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        connect_timeout_s: float = 10.0,
        answer_timeout_s: float | None = None,
    ) -> None:
        """Connects; arguments and errors are those of `AsyncClient.connect`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="serve-client", daemon=True)
        self._thread.start()
        connecting = AsyncClient.connect(
            address, token=token, connect_timeout_s=connect_timeout_s, answer_timeout_s=answer_timeout_s
        )
        try:
            self._client = self._wait(connecting)
        except BaseException:
            self._end_loop()
            raise

    @property
    def welcome(self) -> protocol.Welcome:
        return self._client.welcome

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        *,
        session_id: str | None = None,
        cache_salt: str | None = None,
    ) -> Generation:
        """The whole answer to a prompt, as `AsyncClient.generate` gives it."""
        return self._wait(self._client.generate(prompt, params, session_id=session_id, cache_salt=cache_salt))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),  # noqa: B008 (frozen)
        *,
        session_id: str | None = None,
        cache_salt: str | None = None,
    ) -> Stream:
        """Starts a generation; iterate over what this returns. Errors are raised by the iteration."""
        return Stream(self, self._wait(self._client.stream(prompt, params, session_id=session_id, cache_salt=cache_salt)))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._wait(self._client.tokenize(text, add_special_tokens=add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._wait(self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens))

    def model_info(self) -> protocol.ModelDescription:
        return self._wait(self._client.model_info())

    def stats(self) -> protocol.Stats:
        return self._wait(self._client.stats())

    def health(self) -> protocol.Health:
        return self._wait(self._client.health())

    def close(self) -> None:
        """Hangs up; the server cancels what is still under way."""
        if not self._loop.is_closed():
            self._wait(self._client.close())
            self._end_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop's thread; an interrupt (Ctrl-C) cancels it there."""
        if self._loop.is_closed():
            coroutine.close()
            raise ConnectionLostError("the client was closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next_or_none(stream: AsyncStream) -> Chunk | None:
    # StopAsyncIteration cannot travel through a future.
    async for chunk in stream:
        return chunk
    return None


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """The options by which every command finds its server; `connection_arguments` reads them."""
    where = parser.add_mutually_exclusive_group()
    default = f"{DEFAULT_HOST}:{DEFAULT_PORT}"
    where.add_argument("--address", default=default, help=f"host:port, [ipv6]:port or unix:/path (default {default})")
    where.add_argument("--address-file", type=Path, help="read the address from the file that `python -m serve` wrote")
    secret = parser.add_mutually_exclusive_group()
    secret.add_argument("--token", help="the server's token; others on this machine can see arguments, a file is safer")
    secret.add_argument("--token-file", type=Path, help="read the token from a file")


def connection_arguments(args: argparse.Namespace) -> tuple[str, str | None]:
    """Address and token. Raises OSError if a file cannot be read."""
    address = args.address_file.read_text().strip() if args.address_file else args.address
    token = args.token_file.read_text().strip() if args.token_file else args.token
    return address, token


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serve.client", description="Sends a prompt and streams the answer.")
    parser.add_argument("prompt", nargs="?", help="the prompt; - reads it from standard input")
    add_connection_arguments(parser)
    parser.add_argument("--chat", action="store_true", help="send the prompt as a chat message of the user")
    parser.add_argument("--system", help="with --chat: a system message before it")
    parser.add_argument("--session", metavar="ID", help="names a conversation, whose next request will begin like this one")
    parser.add_argument("--cache-salt", metavar="SALT", help="share the server's cache with requests of this salt only")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of streaming text")
    parser.add_argument("--show", choices=("model", "stats", "health"), help="print what the server says of itself, as JSON")
    defaults = SamplingParams()
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=defaults.max_tokens, help="(default %(default)s)")
    group.add_argument("--temperature", type=float, default=defaults.temperature, help="0 is greedy (default %(default)s)")
    group.add_argument("--top-k", type=int, default=defaults.top_k, help="0 is off (default)")
    group.add_argument("--top-p", type=float, default=defaults.top_p, help="1 is off (default)")
    group.add_argument("--min-p", type=float, default=defaults.min_p, help="0 is off (default)")
    group.add_argument("--seed", type=int, help="same seed, same tokens (default: one is drawn)")
    group.add_argument("--stop", action="append", default=[], help="end at this string; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end-of-sequence tokens")
    group.add_argument("--logprobs", type=int, metavar="N", help="with --json: log-probabilities of the N likeliest tokens")
    return parser


def _params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        logprobs=args.logprobs,
    )


def _prompt(args: argparse.Namespace) -> Prompt:
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not args.chat:
        return text
    system = [ChatMessage(role="system", content=args.system)] if args.system else []
    return [*system, ChatMessage(role="user", content=text)]


def _show(client: Client, what: str) -> None:
    answer = {"model": client.model_info, "stats": client.stats, "health": client.health}[what]()
    print(json.dumps({k: v for k, v in msgspec.to_builtins(answer).items() if k not in ("id", "type")}, indent=2))


def _generate(client: Client, args: argparse.Namespace) -> None:
    prompt, params = _prompt(args), _params(args)
    caching = {"session_id": args.session, "cache_salt": args.cache_salt}
    if args.json:
        print(msgspec.json.encode(client.generate(prompt, params, **caching)).decode())
        return
    with client.stream(prompt, params, **caching) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    print()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if (args.prompt is None) == (args.show is None):
        parser.error("give a prompt, or --show")
    if args.system and not args.chat:
        parser.error("--system needs --chat")
    try:
        address, token = connection_arguments(args)
        with Client(address, token=token) as client:
            if args.show:
                _show(client, args.show)
            else:
                _generate(client, args)
    except BrokenPipeError:  # whoever read the text has enough; nothing more can be printed, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ServerError, OSError, ValueError, OverflowError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

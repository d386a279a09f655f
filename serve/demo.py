"""`python -m serve.demo`: a real model answers three prompts at once, on this machine, from one command.

Starts `python -m serve` on SmolLM2-135M-Instruct (fetched once, 93 MB) and a free port, streams the three answers side by side,
prints time to first token and tokens per second of each, and stops the server by SIGTERM. Exit status 0 means that all of it
worked.
"""

import asyncio
import contextlib
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence

from nanoflow_jax.runtime.request import SamplingParams
from serve.async_client import AsyncClient, Generation, Prompt, ServerError
from serve.protocol import ChatMessage

PROMPTS: Sequence[tuple[str, Prompt]] = (
    ("The capital of France is", "The capital of France is"),
    ("What is gravity?", [ChatMessage(role="user", content="What is gravity? Answer in one sentence.")]),
    ("Why is the sky blue?", [ChatMessage(role="user", content="Why is the sky blue?")]),
)
PARAMS = SamplingParams(max_tokens=64)
SERVE = [sys.executable, "-m", "serve", "--model", "smollm2", "--port", "0", "--b-dense", "32", "--max-sequences", "4"]
READY_TIMEOUT_S = 1800.0  # a first run fetches the model and compiles
ANSWER_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
WIDTH = 100


class DemoError(Exception):
    """A part of the demonstration did not work."""


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server process; gives its address, and ends it by SIGTERM.

    Raises:
      DemoError: it did not become ready, or did not end cleanly.
    """
    process = subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(READY_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        word, _, address = process.stdout.readline().strip().partition(" ")
        watchdog.cancel()
        if word != "ready":
            raise DemoError(f"the server did not start; its exit status is {process.wait(STOP_TIMEOUT_S)}")
        yield address
        process.terminate()
        status = process.wait(STOP_TIMEOUT_S)
        if status != 0:
            raise DemoError(f"the server ended with exit status {status}")
    except subprocess.TimeoutExpired:
        raise DemoError(f"the server did not stop within {STOP_TIMEOUT_S:g} s") from None
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()


class Column:
    """One answer's lines, each printed when it is complete, behind a label that tells the answers apart."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._pending = ""

    def write(self, text: str) -> None:
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            self._print(line)
        # A line is full when a further word would not fit; the word itself may still be growing.
        while len(self._pending) > WIDTH and " " in self._pending[:WIDTH]:
            line, _, rest = self._pending[:WIDTH].rpartition(" ")
            self._pending = rest + self._pending[WIDTH:]
            self._print(line)

    def close(self) -> None:
        if self._pending:
            self._print(self._pending)

    def _print(self, line: str) -> None:
        for part in textwrap.wrap(line, WIDTH, drop_whitespace=False) or [""]:
            print(f"{self._label} | {part}", flush=True)


async def answer(client: AsyncClient, label: str, prompt: Prompt) -> Generation:
    """Streams one answer to the terminal."""
    column = Column(label)
    async with await client.stream(prompt, PARAMS) as stream:
        async for chunk in stream:
            column.write(chunk.text)
    column.close()
    return stream.result


async def ask_all(address: str) -> list[Generation]:
    async with await AsyncClient.connect(address, answer_timeout_s=ANSWER_TIMEOUT_S) as client:
        return await asyncio.gather(*(answer(client, str(i), prompt) for i, (_, prompt) in enumerate(PROMPTS, start=1)))


def print_timings(answers: Sequence[Generation]) -> None:
    print(f"\n{'':2}{'prompt':<28}{'tokens in':>10}{'tokens out':>11}{'first token':>13}{'tokens/s':>10}  ended by")
    for i, ((title, _), result) in enumerate(zip(PROMPTS, answers, strict=True), start=1):
        first_s = result.timing.first_token_s
        if not result.text.strip() or first_s is None:
            raise DemoError(f"prompt {i} got an empty answer")
        rate = (result.usage.output_tokens - 1) / max(result.timing.finished_s - first_s, 1e-9)
        print(
            f"{i:<2}{title:<28}{result.usage.prompt_tokens:>10}{result.usage.output_tokens:>11}"
            f"{first_s * 1e3:>10.0f} ms{rate:>10.1f}  {result.finish_reason.value}"
        )


def main() -> int:
    """The command; returns the exit status."""
    print(f"$ python {' '.join(SERVE[1:])}")
    print("A first run downloads 93 MB and compiles; later ones start in seconds.", flush=True)
    try:
        with server() as address:
            print(f"\nthe server is ready at {address}; three prompts at once:")
            for i, (title, _) in enumerate(PROMPTS, start=1):
                print(f"{i} > {title}")
            print(flush=True)
            print_timings(asyncio.run(ask_all(address)))
        print("\nthe server stopped cleanly")
    except (DemoError, ServerError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

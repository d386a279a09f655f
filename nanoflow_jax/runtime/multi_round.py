"""Conversations of several rounds, served with and without prefix reuse: `python -m nanoflow_jax.bench --workload multi-round`.

All conversations are there from the start. Each asks its next round, everything said so far and a new message, as soon as it
has the answer to the last. Messages are random tokens and answers run to their length, so that both runs have the same to do;
how many answers are equal is reported (rounding may differ between steps of different sizes).
"""

import argparse
import dataclasses
import time
from collections import defaultdict

import numpy as np

from nanoflow_jax.runtime.engine import Engine, EngineStats, Runner
from nanoflow_jax.runtime.request import Request, RequestEvent, SamplingParams

# Quantiles 0.05, 0.15, .. 0.95 of the 1875 conversations of two rounds and more in Mooncake's conversation trace (kvcache-ai/
# Mooncake, FAST25-release/traces/conversation_trace.jsonl; Qin et al., FAST 2025). The trace has no session ids; a request
# continues an earlier one here when its block hashes extend those of its whole input and its input is as long as both.
_ROUNDS = (2, 2, 2, 2, 2, 2, 3, 3, 4, 6)
_FIRST_MESSAGE = (1134, 1500, 2474, 4150, 5369, 6816, 9154, 12643, 19102, 35163)
_NEXT_MESSAGE = (6, 9, 12, 18, 28, 57, 167, 512, 3289, 7440)
_ANSWER = (12, 52, 162, 261, 326, 384, 436, 489, 564, 742)


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of a conversation's messages and of the answers to them, round by round."""

    messages: tuple[int, ...]
    answers: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.messages) + sum(self.answers)


@dataclasses.dataclass
class Outcome:
    """What serving all conversations took.

    Attributes:
      answers: token ids by (conversation, round).
      first_token_s: times to the first token, by round.
    """

    seconds: float
    stats: EngineStats
    answers: dict[tuple[int, int], list[int]]
    first_token_s: dict[int, list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "multi-round", "lengths come from a trace; --input and --output fix those of messages and answers"
    )
    group.add_argument("--rounds", type=int, metavar="N", help="rounds of each conversation")
    group.add_argument("--message", type=int, metavar="N", help="tokens of each message after the first, which --input gives")
    group.add_argument("--scale", type=float, default=1.0, help="multiplies the trace's lengths (default %(default)s)")


def draw_lengths(args: argparse.Namespace) -> list[Lengths]:
    """Lengths of `args.requests` conversations."""
    rng = np.random.default_rng(args.seed)

    def draw(quantiles: tuple[int, ...], count: int, fixed: int | None) -> tuple[int, ...]:
        drawn = np.maximum(1, np.rint(rng.choice(quantiles, count) * args.scale)).astype(int).tolist()
        return tuple(drawn) if fixed is None else (fixed,) * count

    lengths = []
    for _ in range(args.requests):
        rounds = args.rounds or int(rng.choice(_ROUNDS))
        messages = draw(_FIRST_MESSAGE, 1, args.input) + draw(_NEXT_MESSAGE, rounds - 1, args.message)
        lengths.append(Lengths(messages, draw(_ANSWER, rounds, args.output)))
    return lengths


def measure(runner: Runner, lengths: list[Lengths], *, seed: int, sync: bool) -> dict:
    """The report of two runs on one compiled runner, without reuse and then with it.

    Raises:
      ValueError: a conversation does not fit the context or the pool.
    """
    _warm_up(Engine(runner))
    outcomes = {}
    for name, reuse in (("off", False), ("on", True)):
        engine = Engine(runner, sync=sync, prefix_cache=reuse)
        outcomes[name] = serve(engine, lengths, seed)
    on, off = outcomes["on"], outcomes["off"]
    report = {name: _figures(outcome) for name, outcome in outcomes.items()}
    return {
        "conversations": len(lengths),
        "answers": len(on.answers),
        "tokens": sum(each.total for each in lengths),
        "equal_answers": sum(on.answers[key] == off.answers[key] for key in on.answers),
        **report,
        "prefill_saved": off.stats.prefill_tokens / on.stats.prefill_tokens,
        "throughput_gain": off.seconds / on.seconds,
        "first_token_gain": [
            a / b for a, b in zip(report["off"]["first_token_ms"], report["on"]["first_token_ms"], strict=True)
        ],
    }


def serve(engine: Engine, lengths: list[Lengths], seed: int) -> Outcome:
    """Serves all conversations, each round of one after the other.

    Raises:
      ValueError: a conversation does not fit the context or the pool.
    """
    limits = engine.limits
    longest = max(each.total for each in lengths)
    if limits.output_limit(longest - 1, 1) < 1:
        raise ValueError(
            f"a conversation has {longest} tokens: the context is {limits.max_context}, the pool holds {limits.pool_tokens}"
        )
    rng = np.random.default_rng(seed)
    messages = [[rng.integers(0, limits.vocab_size, n).tolist() for n in each.messages] for each in lengths]
    histories: list[list[int]] = [[] for _ in lengths]
    outcome = Outcome(0.0, engine.stats(), {}, defaultdict(list))

    def ask(i: int, turn: int) -> None:
        histories[i] += messages[i][turn]
        params = SamplingParams(max_tokens=lengths[i].answers[turn], ignore_eos=True)
        engine.add(
            Request(request_id=f"{i}.{turn}", prompt_token_ids=histories[i], params=params, stream=False, session_id=str(i))
        )

    def take(event: RequestEvent) -> None:
        i, turn = map(int, event.request_id.split("."))
        assert event.timing is not None and event.timing.first_token_s is not None
        outcome.answers[i, turn] = event.token_ids
        outcome.first_token_s[turn].append(event.timing.first_token_s)
        histories[i] += event.token_ids
        if turn + 1 < len(messages[i]):
            ask(i, turn + 1)

    start = time.perf_counter()
    for i in range(len(lengths)):
        ask(i, 0)
    while engine.busy:
        for event in engine.step():
            take(event)
    outcome.seconds = time.perf_counter() - start
    outcome.stats = engine.stats()
    return outcome


def _warm_up(engine: Engine) -> None:
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    engine.add(Request(request_id="warm-up", prompt_token_ids=[0], params=params, stream=False))
    while engine.busy:
        engine.step()


def _figures(outcome: Outcome) -> dict:
    stats = outcome.stats
    rounds = [outcome.first_token_s[turn] for turn in sorted(outcome.first_token_s)]
    return {
        "seconds": outcome.seconds,
        "prompt_tokens": stats.prompt_tokens,
        "prefill_tokens": stats.prefill_tokens,
        "reused_tokens": stats.reused_tokens,
        "output_tokens_per_s": stats.output_tokens / outcome.seconds,
        "total_tokens_per_s": (stats.prompt_tokens + stats.output_tokens) / outcome.seconds,
        "first_token_ms": [1e3 * float(np.median(seconds)) for seconds in rounds],
        "preemptions": stats.preemptions,
        "evicted_pages": stats.evicted_pages,
    }


def print_table(report: dict) -> None:
    print(
        f"{report['model']} on {report['device']} x {report['tp_size']}: {report['conversations']} conversations, "
        f"{report['answers']} answers, {report['tokens']} tokens"
    )
    columns = ("seconds", "prompt_tokens", "prefill_tokens", "output_tokens_per_s", "total_tokens_per_s", "evicted_pages")
    print(f"{'reuse':<6}" + "".join(f"{name.replace('_per_s', '/s').replace('_', ' '):>18}" for name in columns))
    for name in ("off", "on"):
        print(f"{name:<6}" + "".join(f"{report[name][column]:>18.2f}" for column in columns))
    print(f"{'round':<6}{'first token, off':>18}{'on':>12}{'gain':>9}")
    rows = zip(report["off"]["first_token_ms"], report["on"]["first_token_ms"], report["first_token_gain"], strict=True)
    for turn, (off, on, gain) in enumerate(rows, 1):
        print(f"{turn:<6}{off:>15.1f} ms{on:>9.1f} ms{gain:>8.2f}x")
    print(
        f"prompt compute saved: {report['prefill_saved']:.2f}x less; throughput {report['throughput_gain']:.2f}x; "
        f"{report['equal_answers']} of {report['answers']} answers equal"
    )

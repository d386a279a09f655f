"""Conversations of several rounds, with and without reuse: `python -m nanoflow_jax.bench --workload multi-round`.

All conversations are there from the start. Each asks its next round, everything said so far and a new message, as soon as it
has the answer to the last. Messages are random tokens and answers run to their length, so that both runs have the same to do;
how many answers are equal is reported (rounding may differ between steps of different sizes).

With memory tiers a third run offloads, and loads what the pool has lost. Then the first conversation is served alone, its
second round from each place that can hold the first: the pool, host memory, and, after a restart, the SSD, its files dropped
from the system's cache.
"""

import argparse
import contextlib
import dataclasses
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nanoflow_jax.runtime.engine import Engine, EngineStats
from nanoflow_jax.runtime.kv_store.files import drop_from_cache, sync_files
from nanoflow_jax.runtime.kv_tiers import TierOptions, open_store
from nanoflow_jax.runtime.request import Request, RequestEvent, SamplingParams
from nanoflow_jax.runtime.sizing import DoesNotFitError

# Of a second round alone, per place; the median counts.
_REPEATS = 3
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


def measure(runner: Any, lengths: list[Lengths], *, seed: int, sync: bool, tiers: TierOptions | None = None) -> dict:
    """The report of runs on one compiled runner: without reuse, with it, and with memory tiers, if they are asked for.

    Args:
      runner: with `tiers`, compiled for steps with and without offload.

    Raises:
      ValueError: a conversation does not fit the context or the pool.
    """
    _warm_up(Engine(runner))
    outcomes = {}
    for name, reuse in (("off", False), ("on", True)):
        engine = Engine(runner, sync=sync, prefix_cache=reuse)
        outcomes[name] = serve(engine, lengths, seed)
    on, off = outcomes["on"], outcomes["off"]
    report: dict[str, Any] = {name: _figures(outcome) for name, outcome in outcomes.items()}
    if tiers is not None:
        report |= _measure_tiers(runner, lengths, seed=seed, sync=sync, tiers=tiers, without=on)
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
        raise DoesNotFitError(
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


def _measure_tiers(
    runner: Any, lengths: list[Lengths], *, seed: int, sync: bool, tiers: TierOptions, without: Outcome
) -> dict[str, Any]:
    """The run with memory tiers, against the one `without`, and where a second round comes from."""
    with _fresh(tiers) as options:
        engine = Engine(runner, sync=sync, kv_store=open_store(runner, options))
        _warm_up(engine)
        outcome = serve(engine, lengths, seed)
        engine.close()
    assert outcome.stats.kv_tiers is not None
    report: dict[str, Any] = {
        "tiers": _figures(outcome) | {"kv": msgspec.to_builtins(outcome.stats.kv_tiers)},
        "offload_throughput": without.seconds / outcome.seconds,
        "tiers_equal_answers": sum(outcome.answers[key] == without.answers[key] for key in without.answers),
    }
    if len(lengths[0].messages) > 1:
        places = ("none", "device", "host") + (("ssd",) if tiers.ssd_directory else ())
        samples = {place: [second_round(runner, lengths[0], place, tiers, seed=i) for i in range(_REPEATS)] for place in places}
        report["second_round_ms"] = {place: 1e3 * float(np.median(seconds)) for place, seconds in samples.items()}
    return report


def second_round(runner: Any, lengths: Lengths, place: str, tiers: TierOptions, *, seed: int) -> float:
    """Seconds to the first token of a conversation's second round, alone, when K and V of the first are on "device", in "host"
    memory, on "ssd", or, "none", nowhere."""
    two = Lengths(lengths.messages[:1], lengths.answers[:1])
    with _fresh(tiers) as options:
        engine = Engine(runner, prefix_cache=place != "none", kv_store=None if place == "none" else open_store(runner, options))
        _warm_up(engine)
        [answer] = serve(engine, [two], seed).answers.values()
        if engine.tiers is not None and place != "device":
            assert engine.tiers.drain(60.0)
            engine.clear_prefix_cache()
        if place == "ssd":
            assert engine.close(600.0), "the SSD did not take the pages"
            sync_files(str(options.ssd_directory))
            drop_from_cache(str(options.ssd_directory))
            engine = Engine(runner, kv_store=open_store(runner, options))
            _warm_up(engine)
        rng = np.random.default_rng(seed)
        said, asked = (rng.integers(0, engine.limits.vocab_size, n).tolist() for n in lengths.messages[:2])
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        engine.add(Request(request_id="second", prompt_token_ids=[*said, *answer, *asked], params=params, stream=False))
        events: list[RequestEvent] = []
        while not events:
            events = engine.step()
        engine.close()
    assert events[0].timing is not None and events[0].timing.first_token_s is not None
    return events[0].timing.first_token_s


@contextlib.contextmanager
def _fresh(tiers: TierOptions) -> Iterator[TierOptions]:
    """The same sizes, in a directory of its own."""
    if tiers.ssd_directory is None:
        yield tiers
        return
    tiers.ssd_directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tiers.ssd_directory) as directory:
        yield dataclasses.replace(tiers, ssd_directory=Path(directory))


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
    for name in ("off", "on", *(["tiers"] if "tiers" in report else [])):
        print(f"{name:<6}" + "".join(f"{report[name][column]:>18.2f}" for column in columns))
    print(f"{'round':<6}{'first token, off':>18}{'on':>12}{'gain':>9}")
    rows = zip(report["off"]["first_token_ms"], report["on"]["first_token_ms"], report["first_token_gain"], strict=True)
    for turn, (off, on, gain) in enumerate(rows, 1):
        print(f"{turn:<6}{off:>15.1f} ms{on:>9.1f} ms{gain:>8.2f}x")
    print(
        f"prompt compute saved: {report['prefill_saved']:.2f}x less; throughput {report['throughput_gain']:.2f}x; "
        f"{report['equal_answers']} of {report['answers']} answers equal"
    )
    if "tiers" in report:
        _print_tiers(report)


def _print_tiers(report: dict) -> None:
    kv = report["tiers"]["kv"]
    print(
        f"memory tiers: {report['offload_throughput']:.3f} of the throughput without; {kv['offloaded_tokens']} tokens offloaded"
        f", {kv['dropped_tokens']} dropped;\n"
        f"{kv['loads']} loads of {kv['loaded_pages']} pages, {kv['declined_loads']} declined; "
        f"{report['tiers_equal_answers']} of {report['answers']} answers equal"
    )
    for place, ms in report.get("second_round_ms", {}).items():
        gain = report["second_round_ms"]["none"] / ms
        print(f"first token of a second round alone, first round on {place:<7}{ms:>9.1f} ms{gain:>8.2f}x")

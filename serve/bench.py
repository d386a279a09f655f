"""Online load: `python -m serve.bench` sends requests to a running server and reports what its users would feel.

Requests arrive as a Poisson process of a given rate, at the times of a trace, or as soon as one of a fixed number of users
has had its last answer (closed loop). Prompts are random token ids and answers ignore EOS, so lengths are exactly as asked.

    TTFT     seconds from sending a request to its first token
    TPOT     seconds per output token after the first, of requests with at least two
    latency  seconds from sending a request to its last token

All are taken at the client. The last line of the output is one JSON object. Imports no jax.
"""

import argparse
import asyncio
import csv
import dataclasses
import itertools
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from nanoflow_jax.runtime.request import SamplingParams
from serve.async_client import AsyncClient, ServerError
from serve.client import add_connection_arguments, connection_arguments

PERCENTILES = (50, 90, 99)


@dataclasses.dataclass(frozen=True)
class Job:
    """One request to send: when, counted from the start, and its lengths in tokens."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a job; times are on the client's clock. `error` is the code of the server's refusal."""

    job: Job
    sent_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def latency_s(self) -> float | None:
        return None if self.last_token_s is None else self.last_token_s - self.sent_s


def poisson_jobs(lengths: Sequence[tuple[int, int]], rate: float, rng: random.Random) -> list[Job]:
    """Jobs of these (input, output) lengths, `rate` a second on average."""
    arrivals_s = itertools.accumulate(rng.expovariate(rate) for _ in lengths)
    return [Job(arrival_s, *length) for arrival_s, length in zip(arrivals_s, lengths, strict=True)]


def read_trace(path: Path, max_requests: int | None) -> list[Job]:
    """The jobs of a CSV file with columns arrival_s, input_tokens and output_tokens; arrival_s may be missing (0).

    Raises:
      ValueError: a column is missing or a value is not a number of the right kind; the message names file and line.
    """
    jobs = []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = {"input_tokens", "output_tokens"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path}: no column {', '.join(sorted(missing))}")
        for row in itertools.islice(reader, max_requests):
            try:
                job = Job(float(row.get("arrival_s") or 0.0), int(row["input_tokens"]), int(row["output_tokens"]))
            except (TypeError, ValueError):
                raise ValueError(f"{path}, line {reader.line_num}: {row} has a value that is no number") from None
            if job.input_tokens < 1 or job.output_tokens < 1 or not job.arrival_s >= 0:
                raise ValueError(f"{path}, line {reader.line_num}: {row} has a value that is out of range")
            jobs.append(job)
    if not jobs:
        raise ValueError(f"{path}: no requests")
    return jobs


async def send(client: AsyncClient, job: Job, vocab_size: int, rng: random.Random) -> Outcome:
    """Sends one job and times its tokens."""
    prompt = [rng.randrange(vocab_size) for _ in range(job.input_tokens)]
    sent_s = time.perf_counter()
    first_token_s = last_token_s = None
    num_tokens = 0
    try:
        async for chunk in await client.stream(prompt, SamplingParams(max_tokens=job.output_tokens, ignore_eos=True)):
            if chunk.token_ids:
                last_token_s = time.perf_counter()
                first_token_s = first_token_s or last_token_s
                num_tokens += len(chunk.token_ids)
    except ServerError as error:
        return Outcome(job, sent_s, error=error.code.value)
    return Outcome(job, sent_s, first_token_s, last_token_s, num_tokens)


async def run_open(jobs: Sequence[Job], send_job: Callable[[Job], Awaitable[Outcome]]) -> list[Outcome]:
    """Sends each job when it arrives, however many are under way."""
    start_s = time.perf_counter()

    async def at_arrival(job: Job) -> Outcome:
        await asyncio.sleep(start_s + job.arrival_s - time.perf_counter())
        return await send_job(job)

    return list(await asyncio.gather(*map(at_arrival, jobs)))


async def run_closed(jobs: Sequence[Job], concurrency: int, send_job: Callable[[Job], Awaitable[Outcome]]) -> list[Outcome]:
    """Sends jobs in order, `concurrency` at a time; their arrival times are ignored."""
    pending = iter(jobs)
    outcomes: list[Outcome] = []

    async def user() -> None:
        for job in pending:
            outcomes.append(await send_job(job))

    await asyncio.gather(*(user() for _ in range(concurrency)))
    return outcomes


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the sorted `values` lie, between the two nearest."""
    position = (len(values) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def summarize(outcomes: Sequence[Outcome], elapsed_s: float) -> dict[str, Any]:
    """Counts, throughput and percentiles, ready for JSON."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    errors: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    input_tokens = sum(outcome.job.input_tokens for outcome in done)
    output_tokens = sum(outcome.output_tokens for outcome in done)
    summary: dict[str, Any] = {
        "requests": len(outcomes),
        "completed": len(done),
        "errors": errors,
        "elapsed_s": elapsed_s,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "requests_per_s": len(done) / elapsed_s,
        "output_tokens_per_s": output_tokens / elapsed_s,
        "total_tokens_per_s": (input_tokens + output_tokens) / elapsed_s,
    }
    for name in ("ttft_s", "tpot_s", "latency_s"):
        values = sorted(value for outcome in done if (value := getattr(outcome, name)) is not None)
        if values:
            mean = sum(values) / len(values)
            summary[name] = {"mean": mean, **{f"p{p}": percentile(values, p) for p in PERCENTILES}, "max": values[-1]}
    return summary


def print_table(summary: dict[str, Any]) -> None:
    columns = ("mean", *(f"p{p}" for p in PERCENTILES), "max")
    print(f"{summary['completed']} of {summary['requests']} requests completed in {summary['elapsed_s']:.2f} s", end="")
    print("".join(f", {count} {code}" for code, count in summary["errors"].items()))
    print(
        f"{summary['requests_per_s']:.2f} requests/s, {summary['output_tokens_per_s']:.1f} output tokens/s, "
        f"{summary['total_tokens_per_s']:.1f} tokens/s in and out"
    )
    print(f"{'ms':<10}" + "".join(f"{column:>11}" for column in columns))
    for name in ("ttft_s", "tpot_s", "latency_s"):
        if name in summary:
            label = name.removesuffix("_s")
            label = label.upper() if label != "latency" else label
            print(f"{label:<10}" + "".join(f"{summary[name][column] * 1e3:>11.1f}" for column in columns))


async def bench(address: str, token: str | None, jobs: Sequence[Job], options: argparse.Namespace) -> dict[str, Any]:
    """Runs the load over `options.connections` connections and sums it up."""
    clients = [await AsyncClient.connect(address, token=token) for _ in range(options.connections)]
    rng = random.Random(options.seed)
    turns = itertools.cycle(clients)
    try:
        model = await clients[0].model_info()
        for _ in range(options.warmup):
            await send(clients[0], jobs[0], model.vocab_size, rng)
        before = (await clients[0].stats()).engine

        def send_job(job: Job) -> Awaitable[Outcome]:
            return send(next(turns), job, model.vocab_size, rng)

        start_s = time.perf_counter()
        if options.concurrency:
            outcomes = await run_closed(jobs, options.concurrency, send_job)
        else:
            outcomes = await run_open(jobs, send_job)
        elapsed_s = time.perf_counter() - start_s
        after = (await clients[0].stats()).engine
    finally:
        for client in clients:
            await client.close()
    load = {"concurrency": options.concurrency} if options.concurrency else {"rate": options.rate, "trace": str(options.trace)}
    counters = {name: after[name] - before[name] for name in ("steps", "preemptions", "num_compilations")}
    described = {"model": model.name, "dtype": model.dtype, "tp_size": model.tp_size, "b_dense": model.b_dense}
    return described | load | summarize(outcomes, elapsed_s) | {"engine": counters}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serve.bench", description="Loads a running server and reports latencies.")
    add_connection_arguments(parser)
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--rate", type=float, help="requests per second, Poisson arrivals")
    load.add_argument("--concurrency", type=int, help="users who send their next request when they have their answer")
    load.add_argument("--replay", action="store_true", help="with --trace: send at the trace's arrival times")
    parser.add_argument("--requests", type=int, help="how many (default 100, or the whole trace)")
    parser.add_argument("--input", type=int, default=128, help="prompt tokens (default %(default)s)")
    parser.add_argument("--output", type=int, default=64, help="output tokens (default %(default)s)")
    parser.add_argument(
        "--trace", type=Path, help="CSV with columns arrival_s, input_tokens, output_tokens: lengths from there"
    )
    parser.add_argument("--time-scale", type=float, default=1.0, help="with --replay: multiplies arrival times")
    parser.add_argument("--connections", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="requests sent before the clock starts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and prompts (default %(default)s)")
    return parser


def make_jobs(args: argparse.Namespace) -> list[Job]:
    """The jobs that the options describe.

    Raises:
      ValueError: an option is out of range, or the trace is malformed.
    """
    for name in ("rate", "concurrency", "requests", "input", "output", "time_scale", "connections"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be positive")
    if args.replay and args.trace is None:
        raise ValueError("--replay needs --trace")
    if args.trace is None:
        lengths = [(args.input, args.output)] * (args.requests or 100)
        jobs = [Job(0.0, *length) for length in lengths]
    else:
        jobs = read_trace(args.trace, args.requests)
    if args.rate:
        return poisson_jobs([(job.input_tokens, job.output_tokens) for job in jobs], args.rate, random.Random(args.seed))
    return [dataclasses.replace(job, arrival_s=job.arrival_s * args.time_scale) for job in jobs]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status, 1 if a request failed."""
    args = _parser().parse_args(argv)
    try:
        jobs = make_jobs(args)
        address, token = connection_arguments(args)
        summary = asyncio.run(bench(address, token, jobs, args))
    except (ServerError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print_table(summary)
    print(json.dumps(summary))
    return 1 if summary["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())

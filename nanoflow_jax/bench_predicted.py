"""What `python -m nanoflow_jax.bench` would report on a GPU that is not at hand, predicted from the search's profile.

    P=search/data/profiles/h200-llama3-8b-tp1.json
    python -m nanoflow_jax.bench_predicted --model llama3-8b --hardware h200 --profile $P

The engine and its batcher run the whole load as always, over a device that takes no time. What each step computed is priced
afterwards, so scheduling is real and only durations are predicted:

    sequential step  L x layer_us + rest_us
    planned step     L x period_us + rest_us, the period being the plan's for the places that the batch fills
                     (`plan.period_of_batch_us`); while the pipeline fills and drains, phases are as short as what is in them

with layer_us and rest_us as `python -m search.step_times` prices them, and no step faster than the power cap allows for the
tokens that it computes. The host is taken to be never late.

The tables are for people; the last line of standard output is one JSON object.
"""

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import msgspec
import numpy as np

from nanoflow_jax.batch import Batch, BatchShape
from nanoflow_jax.bench import make_requests, run, sizes_for
from nanoflow_jax.compare.searched import SearchError
from nanoflow_jax.config import ModelConfig, preset
from nanoflow_jax.executor.runner import RunnerConfig, step_shapes
from nanoflow_jax.kv_cache import DUMMY_PAGE, claimed_memory, page_bytes, pages_that_fit, rounded_pages, step_bytes
from nanoflow_jax.parallel import parallel_layout
from nanoflow_jax.plan import TILE, PlanSet, period_of_batch_us
from nanoflow_jax.plan_files import read_plans
from nanoflow_jax.runtime.bench import NullRunner
from nanoflow_jax.runtime.engine import Engine, EngineStats
from nanoflow_jax.runtime.request import Request
from nanoflow_jax.runtime.sizing import sizes_from
from nanoflow_jax.runtime.step_records import StepRecord, shares, summarise
from nanoflow_jax.runtime.step_tables import print_shares, print_table
from nanoflow_jax.workload import StepMix

_ITEMSIZE = 2


class LaunchedStep(StepMix, frozen=True, array_like=True):
    """A step's mix, the pages of the pool that its rows hold, and the index of its plan, None if sequential."""

    pages: int
    plan: int | None


@dataclasses.dataclass(frozen=True)
class Prices:
    """What `python -m search.step_times` answers; see `search.step_times.StepPrices`."""

    memory_bytes: float
    layer_us: list[float]
    rest_us: list[float]
    least_us: list[float] | None


def main(argv: Sequence[str] | None = None) -> int:
    """Predicts and prints; 2 and a message on standard error for what cannot be predicted."""
    args = _parse(argv)
    try:
        report = predict(args)
    except (SearchError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_table(report)
    print_shares(report["shares"])
    print_prediction(report)
    print(json.dumps(report))
    return 0


def predict(args: argparse.Namespace) -> dict:
    """The report of a whole run.

    Raises:
      SearchError: unknown hardware, or steps that the profile does not cover.
      ValueError: sizes, lengths or plans that do not fit the model or the device.
      OSError: a file cannot be read.
    """
    model, price = preset(args.model), functools.partial(prices_of, args.model, args.hardware, args.tp_size, args.profile)
    longest = args.input + args.output
    if longest > model.max_context:
        raise ValueError(f"{longest} tokens do not fit the context of {args.model}, {model.max_context}")
    model = dataclasses.replace(model, max_context=longest)
    plans = read_plans(args.plans) if args.plans else None
    if plans is not None:
        _check_plans(plans, model, args)
    memory_bytes = price([]).memory_bytes if args.device_memory_gb is None else 1e9 * args.device_memory_gb
    claimed = int(claimed_memory(args.tp_size) * memory_bytes)
    sizes = sizes_for(args, plans, claimed)
    options = RunnerConfig(
        b_dense=sizes["b_dense"],
        max_sequences=sizes["max_sequences"],
        page_size=sizes["page_size"],
        step_sizes=args.step_sizes,
        num_pages=args.num_pages,
        memory_fraction=args.memory_fraction,
        mode="streams" if plans else "sequential",
        plans=plans,
        kernels=args.kernels,
        greedy_only=True,
    )
    num_pages = options.num_pages or pool_pages(model, options, args.tp_size, claimed)
    load = functools.partial(
        make_requests, count=args.requests, input_tokens=args.input, output_tokens=args.output, seed=args.seed
    )
    records, steps, stats = simulate(model, options, num_pages, load)
    prices = price(steps)
    seconds = [1e-6 * us for us in step_us(model.num_layers, plans, steps, prices)]
    return {
        "predicted": True,
        **summarise(with_times(records, seconds), stats),
        "model": model.name,
        "device": f"{args.hardware} (predicted)",
        "tp_size": args.tp_size,
        "mode": "by plans" if plans else "sequential",
        "stepping": "async",
        "profile": args.profile,
        "requests": args.requests,
        "input_tokens": args.input,
        "output_tokens": args.output,
        "max_sequences": options.max_sequences,
        "page_size": options.page_size,
        "pool_tokens": (num_pages - 1) * options.page_size,
        "shapes": [[s.num_tokens, s.num_rows, s.pages_per_seq] for s in shapes_of(model, options)],
        "planned_steps": sum(step.plan is not None for step in steps),
        "computed_tokens": sum(step.tokens for step in steps),
        "padding_tokens": sum(step.padded_tokens - step.tokens for step in steps),
        "most_pages": max(step.pages for step in steps),
        "shares": _shares_and_least(records, seconds, prices, options.max_sequences),
        "power": _power(args, sum(seconds), seconds, prices),
        "gpu_idle": None,
        "peer": None,
    }


def prices_of(model: str, hardware: str, tp: int, profile: str, steps: Sequence[LaunchedStep]) -> Prices:
    """Asks the search, a program of its own, for the times of steps.

    Raises:
      SearchError: it refuses; the message is its own.
    """
    options = {"--model": model, "--hardware": hardware, "--tp": str(tp), "--profile": profile}
    command = [sys.executable, "-m", "search.step_times", *(word for option in options.items() for word in option)]
    mixes = msgspec.json.encode(steps).decode()  # what a launched step has besides its mix comes last and is passed over
    done = subprocess.run(command, input=mixes, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise SearchError(last[0].removeprefix("error: "))
    return Prices(**json.loads(done.stdout))


def pool_pages(model: ModelConfig, options: RunnerConfig, tp: int, free_bytes: int) -> int:
    """Pages that `executor.runner.ModelRunner` would find room for on devices with `free_bytes` before the weights are there.

    Raises:
      ValueError: weights and what steps need leave no room for two pages.
    """
    layout = parallel_layout(model, tp)
    num_rows = options.max_sequences
    beside = step_bytes(model, layout, b_dense=options.b_dense, num_rows=num_rows, greedy_only=options.greedy_only)
    free = int(free_bytes - model.num_params * _ITEMSIZE / tp)
    one = page_bytes(model, layout, options.page_size, jnp.dtype(jnp.bfloat16))
    pages = pages_that_fit(int(free * options.memory_fraction), one, reserve_bytes=beside)
    useful = 1 + num_rows * -(-model.max_context // options.page_size)
    return min(useful, rounded_pages(pages))


def shapes_of(model: ModelConfig, options: RunnerConfig) -> tuple[BatchShape, ...]:
    """The shapes that `executor.runner.ModelRunner` would compile on a GPU."""
    return step_shapes(options, -(-model.max_context // options.page_size), on_gpu=True)


def simulate(
    model: ModelConfig, options: RunnerConfig, num_pages: int, load: Callable[[Engine], list[Request]]
) -> tuple[list[StepRecord], list[LaunchedStep], EngineStats]:
    """Runs the load as `bench` does: its records, with the host's times, and every step in order of launch."""
    steps: list[LaunchedStep] = []
    skips_padding = options.kernels != "cublas"
    runner = NullRunner(
        model,
        shapes=shapes_of(model, options),
        max_sequences=options.max_sequences,
        page_size=options.page_size,
        num_pages=num_pages,
        launched=lambda batch, plan: steps.append(_launched(batch, plan, skips_padding)),
        plans=options.plans,
    )
    # Prompts are random, so there is no prefix to find.
    engine = Engine(runner, prefix_cache=False)
    records = run(engine, load(engine))
    # `run` executes a short request first, which is in no record.
    return records, steps[-sum(record.read_a_step for record in records) :], engine.stats()


def _launched(batch: Batch, plan: int | None, skips_padding: bool) -> LaunchedStep:
    def multiplied(used: int, padded: int) -> int:
        return min(padded, -(-used // TILE) * TILE) if skips_padding else padded

    num_decode = int(batch.num_decode)
    present = batch.q_lens > 0
    queries, keys = batch.q_lens[present].astype(np.int64), batch.kv_lens[present].astype(np.int64)
    chunks, ends = queries[num_decode:], keys[num_decode:]
    prefill_tokens = int(chunks.sum())
    # Query j of a chunk sees the keys before the chunk and j + 1 of its own.
    prefill_keys = int((chunks * (ends - chunks) + chunks * (chunks + 1) // 2).sum())
    num_rows = int(present.sum())
    return LaunchedStep(
        padded_tokens=batch.shape.num_tokens,
        gemm_tokens=multiplied(num_decode + prefill_tokens, batch.shape.num_tokens),
        logit_rows=multiplied(num_rows, batch.shape.num_rows),
        rows=num_rows,
        decode_tokens=num_decode,
        decode_context=int(keys[:num_decode].sum()) / max(1, num_decode),
        prefill_tokens=prefill_tokens,
        prefill_context=prefill_keys / max(1, prefill_tokens),
        pages=int(np.count_nonzero(np.unique(batch.block_tables) != DUMMY_PAGE)),
        plan=plan,
    )


def step_us(num_layers: int, plans: PlanSet | None, steps: Sequence[LaunchedStep], prices: Prices) -> list[float]:
    """Microseconds of every step, never below what power allows."""
    least = prices.least_us or [0.0] * len(steps)

    def layers_us(step: LaunchedStep, layer_us: float) -> float:
        if step.plan is None or plans is None:
            return num_layers * layer_us
        batch = step.decode_tokens, step.prefill_tokens, step.decode_context or None
        return num_layers * period_of_batch_us(plans.plans[step.plan], *batch)

    return [
        max(layers_us(step, layer_us) + rest_us, floor_us)
        for step, layer_us, rest_us, floor_us in zip(steps, prices.layer_us, prices.rest_us, least, strict=True)
    ]


def with_times(records: Sequence[StepRecord], seconds: Sequence[float]) -> list[StepRecord]:
    """The records with the predicted time of the step that each of them read, all of it spent waiting for the device."""
    times = iter(seconds)
    waited = [next(times) if record.read_a_step else 0.0 for record in records]
    return [
        dataclasses.replace(record, total_s=s, form_s=0.0, launch_s=0.0, consume_s=0.0, wait_s=s)
        for record, s in zip(records, waited, strict=True)
    ]


def _shares_and_least(
    records: Sequence[StepRecord], seconds: Sequence[float], prices: Prices, max_sequences: int
) -> list[dict]:
    """`shares`, each with the `least_seconds` that the power cap allows where there is a power model."""
    rows = shares(with_times(records, seconds), max_sequences)
    if prices.least_us is None:
        return rows
    least = shares(with_times(records, [1e-6 * us for us in prices.least_us]), max_sequences)
    return [row | {"least_seconds": of_power["seconds"]} for row, of_power in zip(rows, least, strict=True)]


def _power(args: argparse.Namespace, total_s: float, seconds: Sequence[float], prices: Prices) -> dict | None:
    """The same work at the power cap, and how many steps take no longer than that; None without power model."""
    if prices.least_us is None:
        return None
    least_s = 1e-6 * sum(prices.least_us)
    return {
        "least_seconds": least_s,
        "total_tokens_per_s": args.requests * (args.input + args.output) / least_s,
        "share_of_time": least_s / total_s,
        "steps_at_cap": sum(s <= 1e-6 * us for s, us in zip(seconds, prices.least_us, strict=True)),
    }


def _check_plans(plans: PlanSet, model: ModelConfig, args: argparse.Namespace) -> None:
    if (plans.device, plans.tp) != (args.hardware, args.tp_size) or not preset(plans.model).same_layer(model):
        theirs, ours = f"{plans.model} on {plans.tp} x {plans.device}", f"{args.model} on {args.tp_size} x {args.hardware}"
        raise ValueError(f"plans for {theirs} do not fit {ours}")


def print_prediction(report: dict) -> None:
    """What is predicted, what power allows, and what padding and the pool came to."""
    whole, power = report["whole"], report["power"]
    rate = f"{whole['total_tokens_per_s']:,.0f} tokens/s in {whole['seconds']:.2f} s"
    print(f"predicted: {rate}, {report['planned_steps']} of {report['whole']['steps']} steps by plan")
    if power:
        print(
            f"power alone would allow {power['total_tokens_per_s']:,.0f} tokens/s; {power['steps_at_cap']} steps were priced "
            "below their least time at the cap and take that"
        )
    print(
        f"{report['padding_tokens']:,} padded tokens beside {report['computed_tokens']:,}, {report['preemptions']} "
        f"preemptions, {report['most_pages']:,} pages in use at most of {report['num_pages'] - 1:,}"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m nanoflow_jax.bench_predicted", description="Offline throughput of a model on a device not at hand."
    )
    parser.add_argument("--model", required=True, help="a preset, such as llama3-8b")
    parser.add_argument("--hardware", required=True, help="a device of the hardware table, such as h200")
    parser.add_argument("--profile", default="analytic", help="'analytic' (default) or a profile file of python -m search")
    parser.add_argument("--plans", type=Path, help="a plan or plan set of python -m search")
    kernels = ("mosaic", "cublas")
    parser.add_argument("--kernels", choices=kernels, default="mosaic", help="mosaic leaves padding out, cublas multiplies it")
    parser.add_argument("--input", type=int, default=512, metavar="N", help="tokens per prompt (default %(default)s)")
    parser.add_argument("--output", type=int, default=512, metavar="N", help="tokens per output (default %(default)s)")
    parser.add_argument("--requests", type=int, default=256, metavar="K", help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts (default %(default)s)")
    parser.add_argument("--tp", dest="tp_size", type=int, default=1, help="devices per model (default %(default)s)")
    parser.add_argument("--b-dense", type=int, help="tokens per step (default: as bench chooses on a GPU)")
    parser.add_argument("--step-sizes", type=sizes_from, metavar="N,N,..", help="tokens of the steps to compile")
    parser.add_argument("--max-sequences", type=int, help="requests running at once (default: as bench chooses on a GPU)")
    parser.add_argument("--page-size", type=int, help="tokens per KV page (default: as bench chooses on a GPU)")
    parser.add_argument("--num-pages", type=int, help="size of the KV pool, dummy page included (default: what fits)")
    fraction = RunnerConfig.memory_fraction
    parser.add_argument("--memory-fraction", type=float, default=fraction, help="as RunnerConfig has it (default %(default)s)")
    parser.add_argument("--device-memory-gb", type=float, help="10^9 bytes of a device (default: the hardware table's)")
    args = parser.parse_args(argv)
    for name in ("input", "output", "requests", "num_pages", "device_memory_gb"):
        value = getattr(args, name)
        if value is not None and not value >= 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least 1")
    args.workload = "uniform"  # what `sizes_for` knows how to keep the memory full for
    return args


if __name__ == "__main__":
    sys.exit(main())

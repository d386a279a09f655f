"""Prices steps of an engine: `python -m search.step_times --model llama3-8b --hardware h200 --profile FILE < steps.json`.

Standard input is a JSON array of steps, each an array that begins with `StepMix`'s fields; standard output one `StepPrices`.
The runtime's benchmarks ask for it in this way, because it is the profile and the hardware table that know.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from nanoflow_jax.config import ModelConfig, preset
from nanoflow_jax.plan import TILE, Operation, Partition, Resource, layer_graph
from nanoflow_jax.workload import BatchMix, StepMix
from search import profile_table
from search.analytic import LAUNCH_US, analytic_profile, gemm_rate, kernel_energy_j, kernel_work, streaming_bandwidth
from search.cost_model import InfeasibleError, check_split
from search.hardware import Hardware, HardwareError, hardware
from search.problem import Costing
from search.profile_table import Kernel, ProfileError, ProfileTable, Timing, kernel_of

_CONTEXTS_OF_ANALYTIC = 9
_LOGIT_BYTES = 4


class StepPrices(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per step, microseconds.

    Attributes:
      memory_bytes: of one device.
      layer_us: one layer, operation after operation.
      rest_us: what a step costs besides layers: logits, and choosing tokens from them.
      least_us: the shortest time that the power cap allows for the whole step, its padding left out; None without power model.
    """

    memory_bytes: float
    layer_us: tuple[float, ...]
    rest_us: tuple[float, ...]
    least_us: tuple[float, ...] | None


def step_prices(model: ModelConfig, device: Hardware, table: ProfileTable, steps: Sequence[StepMix]) -> StepPrices:
    """Times and power bounds of `steps` by a profile.

    Equal operations are priced once, with contexts rounded to whole tokens.

    Raises:
      ProfileError: the profile lacks a kernel, or was not measured up to so many tokens.
    """
    partition: Partition = "none" if table.tp == 1 else "all_reduce"
    graph = layer_graph(moe=model.is_moe, partition=partition)
    timing = functools.cache(_timing_of(model, table, partition))
    vocab = _padded_vocab(model, table.tp)

    @functools.cache
    def rest_us(rows: int) -> float:
        return _rest_us(model, device, table, vocab, rows)

    def layer_us(step: StepMix) -> float:
        return sum(
            timing(op, tokens, context).time_us
            for op, tokens, context in _work(graph, step, step.gemm_tokens, step.padded_tokens)
        )

    def least_us(step: StepMix) -> float:
        assert table.power is not None
        layer = sum(
            kernel_energy_j(table.power, kernel_of(model, table.tp, partition, op.name), tokens, context)
            for op, tokens, context in _work(graph, step, step.tokens, step.tokens)
        )
        logits = kernel_energy_j(table.power, _logits(model, vocab), step.rows, 0.0)
        return table.power.least_time_us(model.num_layers * layer + logits)

    return StepPrices(
        memory_bytes=device.memory_bytes,
        layer_us=tuple(map(layer_us, steps)),
        rest_us=tuple(rest_us(step.logit_rows) for step in steps),
        least_us=None if table.power is None else tuple(map(least_us, steps)),
    )


def _work(graph: Sequence[Operation], step: StepMix, multiplied: int, sent: int) -> list[tuple[Operation, int, int]]:
    """(operation, its tokens, its context) of a layer: attention has its own, GEMMs `multiplied`, collectives `sent`."""

    def of(op: Operation) -> tuple[int, int]:
        if op.tokens == "decode":
            return step.decode_tokens, round(step.decode_context)
        if op.tokens == "prefill":
            return step.prefill_tokens, round(step.prefill_context)
        return (sent if op.resource is Resource.NETWORK else multiplied), 0

    return [(op, tokens, context) for op in graph for tokens, context in [of(op)] if tokens]


def _timing_of(model: ModelConfig, table: ProfileTable, partition: Partition) -> Callable[[Operation, int, int], Timing]:
    def timing(op: Operation, tokens: int, context: int) -> Timing:
        mix = BatchMix(b_dense=tokens, decode_tokens=tokens, decode_context=context, prefill_context=context)
        return Costing(model=model, table=table, mix=mix, partition=partition).timing(op, tokens)

    return timing


def _padded_vocab(model: ModelConfig, tp: int) -> int:
    """One rank's part of the vocabulary, whole tiles of it (nanoflow_jax.parallel.parallel_layout, which needs jax)."""
    return -(-model.vocab_size // (TILE * tp)) * TILE


def _logits(model: ModelConfig, vocab: int) -> Kernel:
    return Kernel(name="gemm", shape=(model.d_model, vocab))


def _rest_us(model: ModelConfig, device: Hardware, table: ProfileTable, vocab: int, rows: int) -> float:
    """The logits of `rows` rows, measured or by the roofline; in float32 they are written once and read once."""
    kernel = _logits(model, vocab)
    if any(series.kernel == kernel for series in table.series):
        gemm_us = profile_table.lookup(table, kernel, rows).time_us
    else:
        flops, moved, _ = kernel_work(kernel, rows, 0.0)
        gemm_us = 1e6 * max(flops / gemm_rate(device), moved / streaming_bandwidth(device)) + LAUNCH_US
    return gemm_us + 1e6 * 2 * _LOGIT_BYTES * rows * vocab / streaming_bandwidth(device) + LAUNCH_US


def load_table(name: str, model: ModelConfig, device: Hardware, tp: int, steps: Sequence[StepMix]) -> ProfileTable:
    """The profile in a file, or with "analytic" one from the hardware table that covers `steps`.

    Raises:
      ProfileError: it is no profile, or one of other devices.
    """
    if name != "analytic":
        return profile_table.read(Path(name), device.name, tp)
    most = max((step.padded_tokens for step in steps), default=0)
    b_dense = max(2, -(-most // TILE)) * TILE
    longest = max((max(step.decode_context, step.prefill_context) for step in steps), default=0.0)
    contexts = [max(1.0, longest * i / (_CONTEXTS_OF_ANALYTIC - 1)) for i in range(_CONTEXTS_OF_ANALYTIC)]
    mixes = [
        BatchMix(b_dense=b_dense, decode_tokens=decoding, decode_context=context, prefill_context=context)
        for context in contexts
        for decoding in (0, b_dense)
    ]
    return analytic_profile(model, device, tp, mixes)


def main(argv: Sequence[str] | None = None) -> int:
    """Prices what standard input holds; 2 and a message on standard error for what cannot be priced."""
    parser = argparse.ArgumentParser(prog="python -m search.step_times", description="Times of steps, from JSON to JSON.")
    parser.add_argument("--model", required=True, help="a preset name, such as llama2-70b")
    parser.add_argument("--hardware", required=True, help="a device of the hardware table, such as a100-80g")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--profile", default="analytic", help="'analytic' or a profile file")
    args = parser.parse_args(argv)
    try:
        model, device = preset(args.model), hardware(args.hardware)
        check_split(model, args.tp)
        steps = msgspec.json.decode(sys.stdin.buffer.read(), type=list[StepMix])
        prices = step_prices(model, device, load_table(args.profile, model, device, args.tp, steps), steps)
    except (InfeasibleError, HardwareError, ProfileError, msgspec.MsgspecError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.encode(prices).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures kernels on the GPU at hand into a profile: alone by tokens and SMs, and in pairs for the interference maps.

The order of measurements, what is skipped because the file has it already, and how pairs become maps are plain functions over a
`Machine`; `profiler.py` has the one that runs kernels, and is the only part of the search that imports jax.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import TILE, Partition, Resource, layer_graph
from search import profile_table
from search.hardware import Hardware
from search.interference import Interference, InterferencePoint, shipped_maps
from search.profile_table import Kernel, Point, ProfileTable, Series, kernel_of, lookup

SM_FRACTIONS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
MEMORY_SMS = (8, 16, 24, 32, 48, 64)
NETWORK_CHANNELS = (4, 8, 16, 32)


class Machine(Protocol):
    """Runs kernels. Times are device time in steady repetition, inputs random normal."""

    num_sms: int

    def libraries(self) -> dict[str, str]:
        """Versions that the times depend on."""
        ...

    def alone(self, kernel: Kernel, tokens: int, num_sms: int, context: float) -> Point:
        """One kernel by itself."""
        ...

    def together_us(self, gemm: tuple[Kernel, int, int], other: tuple[Kernel, int, int, float]) -> float:
        """Microseconds until both have ended: (kernel, tokens, SMs) and (kernel, tokens, SMs or channels, context)."""
        ...


def kernels_of(model: ModelConfig, tp: int) -> dict[Kernel, tuple[Resource, str]]:
    """The kernels of a layer in all partitions, with resource and token kind; each once."""
    partitions: tuple[Partition, ...] = ("none",) if tp == 1 else ("all_reduce", "all_gather")
    found: dict[Kernel, tuple[Resource, str]] = {}
    for partition in partitions:
        for op in layer_graph(moe=model.is_moe, partition=partition):
            found.setdefault(kernel_of(model, tp, partition, op.name), (op.resource, op.tokens))
    return found


def points_to_measure(
    model: ModelConfig, tp: int, b_dense: int, contexts: Sequence[int], num_sms: int
) -> Iterator[tuple[Kernel, int, int, float]]:
    """(kernel, tokens, SMs, context), every multiple of 128 on all SMs, powers of two of it on fewer."""
    counts = sorted({round(f * num_sms) for f in SM_FRACTIONS})
    for kernel, (resource, kind) in kernels_of(model, tp).items():
        for context in [float(c) for c in contexts] if kind != "all" else [0.0]:
            for tokens in range(TILE, b_dense + 1, TILE):
                if resource is Resource.NETWORK:
                    yield kernel, tokens, max(NETWORK_CHANNELS), context
                    continue
                tiles = tokens // TILE
                power_of_two = tiles & (tiles - 1) == 0
                for sms in counts if power_of_two else [num_sms]:
                    yield kernel, tokens, sms, context


def measure_profile(
    model: ModelConfig,
    device: Hardware,
    tp: int,
    b_dense: int,
    contexts: Sequence[int],
    machine: Machine,
    known: ProfileTable | None,
    save: Callable[[ProfileTable], None],
    progress: Callable[[int, int, str], None],
) -> ProfileTable:
    """Measures what `known` lacks, saving after each kernel, then the pairs: an interrupted run is resumed.

    Raises:
      ProfileError: `known` is of another device, number of ranks or library versions, so that times would not compare.
    """
    if known is not None and (known.device, known.tp, known.libraries) != (device.name, tp, machine.libraries()):
        raise profile_table.ProfileError(
            f"the profile to resume is of {known.tp} x {known.device} with {known.libraries}, "
            f"this machine is {tp} x {device.name} with {machine.libraries()}"
        )
    series: dict[Kernel, dict[tuple[int, int, float], Point]] = {}
    for s in known.series if known else ():
        series[s.kernel] = {(p.tokens, p.num_sms, p.context): p for p in s.points}

    def table(interference: Interference) -> ProfileTable:
        return ProfileTable(
            model=model.name, device=device.name, tp=tp, num_sms=machine.num_sms, source="measured",
            libraries=machine.libraries(), interference=interference, power=device.power,
            series=tuple(Series(kernel=k, points=tuple(p.values())) for k, p in series.items()),
        )  # fmt: skip

    borrowed = known.interference if known else shipped_maps()[device.interference]
    todo = list(points_to_measure(model, tp, b_dense, contexts, machine.num_sms))
    for done, (kernel, tokens, sms, context) in enumerate(todo):
        points = series.setdefault(kernel, {})
        if (tokens, sms, context) not in points:
            progress(done, len(todo), str(kernel))
            points[tokens, sms, context] = machine.alone(kernel, tokens, sms, context)
        if done + 1 == len(todo) or todo[done + 1][0] != kernel:
            save(table(borrowed))
    progress(len(todo), len(todo), "pairs")
    measured = measure_interference(model, tp, b_dense, contexts, machine, table(borrowed))
    result = table(measured)
    save(result)
    return result


def measure_interference(
    model: ModelConfig, tp: int, b_dense: int, contexts: Sequence[int], machine: Machine, alone: ProfileTable
) -> Interference:
    """The maps R -> P: each GEMM of the layer beside decode attention, and beside a collective, at several SM counts.

    Of each pair both sides get about as much work as lasts equally long; with t the time until both have ended, R is
    1 - (GEMM alone) / t and P is (other alone) / t. Mean and standard deviation are over the GEMMs; points that do not rise are
    left out, since a larger share must not be slower. Source: NanoFlow paper, section 4.1.1.
    """
    kernels = kernels_of(model, tp)
    gemms = [k for k in kernels if k.name in ("gemm", "swiglu_gemm")]

    def rows(resource: Resource, counts: Sequence[int], context: float) -> tuple[InterferencePoint, ...]:
        others = [k for k, (r, _) in kernels.items() if r is resource]
        points: list[InterferencePoint] = []
        for sms in [n for n in counts if n < machine.num_sms] if others else ():
            pairs = [_pair(g, others[0], sms, context, b_dense, machine, alone) for g in gemms]
            share, speed = (statistics.fmean(p[i] for p in pairs) for i in range(2))
            spread = statistics.pstdev(p[1] for p in pairs)
            last = points[-1] if points else None
            if 0 < share <= 1 and 0 < speed <= 1 and (last is None or (share > last.share and speed >= last.performance)):
                points.append(InterferencePoint(share=share, performance=speed, spread=spread, num_sms=sms))
        return tuple(points)

    return Interference(
        name=f"{alone.device}-{model.name}-tp{tp}",
        source=f"measured on {alone.device} with {alone.libraries}",
        memory=rows(Resource.MEMORY, MEMORY_SMS, float(contexts[0])),
        network=rows(Resource.NETWORK, NETWORK_CHANNELS, 0.0),
    )


def _pair(
    gemm: Kernel, other: Kernel, sms: int, context: float, b_dense: int, machine: Machine, alone: ProfileTable
) -> tuple[float, float]:
    """(share, performance) of `other` on `sms` SMs beside `gemm` on the rest, with the tokens whose times match best."""
    sizes = range(TILE, b_dense + 1, TILE)
    network = other.name in ("all_reduce", "all_gather")

    def takes(kernel: Kernel, tokens: int, count: int, at: float) -> float:
        return lookup(alone, kernel, tokens, num_sms=count, context=at).time_us

    left = {a: takes(gemm, a, machine.num_sms - sms, 0.0) for a in sizes}
    right = {b: takes(other, b, sms, context) for b in sizes}
    tokens, beside = min(
        ((a, b) for a in sizes for b in sizes),
        key=lambda ab: (abs(left[ab[0]] / right[ab[1]] - 1), -ab[0]),
    )
    both = machine.together_us((gemm, tokens, machine.num_sms - sms), (other, beside, sms, context))
    whole = max(NETWORK_CHANNELS) if network else machine.num_sms
    return 1 - takes(gemm, tokens, machine.num_sms, 0.0) / both, takes(other, beside, whole, context) / both


@dataclasses.dataclass
class _Lines:
    """Progress as lines on standard output, one for each kernel begun."""

    last: str = ""

    def __call__(self, done: int, total: int, what: str) -> None:
        if what != self.last:
            print(f"{100 * done // total:3d} %  {what}", flush=True)
            self.last = what


def profile_command(model: ModelConfig, device: Hardware, tp: int, b_dense: int, contexts: Sequence[int], out: Path) -> None:
    """`python -m search profile`: measures on the GPUs at hand and prints a JSON line."""
    import json

    try:
        from search.profiler import GpuMachine
    except ModuleNotFoundError as error:
        raise profile_table.ProfileError(f"profiling needs the cuda extra of this package: {error}") from error
    known = profile_table.decode(out.read_bytes()) if out.exists() else None
    table = measure_profile(
        model, device, tp, b_dense, contexts, GpuMachine(tp), known, lambda t: _write(out, t), _Lines()
    )  # fmt: skip
    points = sum(len(s.points) for s in table.series)
    print(json.dumps({"model": model.name, "hardware": device.name, "tp": tp, "points": points, "out": str(out)}))


def _write(path: Path, table: ProfileTable) -> None:
    """Replaces the file in one step, so that an interrupted run leaves a whole one."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_bytes(profile_table.encode(table))
    part.replace(path)

"""Times of kernels alone, by tokens and SMs, keyed by shape, with the interference between them: what the search plans from.

A table is made by `analytic.py` from the hardware figures or by `profiler.py` on GPUs. Entries are keyed by the kernel's own
shape and not by the model, so a table of one model serves another whose kernels it covers.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import Partition
from search.hardware import PowerModel
from search.interference import Interference

FORMAT_VERSION = 1

# Ranks hold the feed-forward width padded to this, each (nanoflow_jax.parallel.parallel_layout, which needs jax).
_D_FF_MULTIPLE = 64


class ProfileError(ValueError):
    """A profile that cannot be read, or that does not cover what is asked of it."""


class Kernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A kernel and the sizes that its time depends on, per rank.

    gemm (K, N); swiglu_gemm (K, 2 N'); experts (experts, per token, D, F); decode_attention and prefill_attention (KV heads,
    query heads per KV head, head_dim); all_gather and all_reduce (ranks, D).
    """

    name: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}{self.shape}"


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One measurement: `tokens` rows on `num_sms` SMs (channels for collectives); `context` keys per token for attention.

    Measured times are sustained; `burst_us` is after a rest, as a short benchmark has it. `energy_j` is above idle. Both are
    None where they were not measured.
    """

    tokens: int
    num_sms: int
    context: float = 0.0
    time_us: float
    burst_us: float | None = None
    energy_j: float | None = None
    implementation: str = ""


class Series(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All measurements of one kernel."""

    kernel: Kernel
    points: tuple[Point, ...]


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`calls` GEMMs one after another, each on `gemm_tokens` rows and `gemm_sms` SMs, beside one call of another kernel.

    `other_sms` SMs are what the GEMMs left: the budget of attention; to a collective only room, it takes its own channels.
    `time_us` is the time until both have ended, `gemm_us` and `other_us` what each side takes alone on the whole device.
    """

    gemm: Kernel
    gemm_tokens: int
    gemm_sms: int
    calls: int
    other: Kernel
    other_tokens: int
    other_sms: int
    context: float = 0.0
    time_us: float
    gemm_us: float
    other_us: float


class ProfileTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A device's times. `device` is a name of the hardware table; `libraries` are versions that the times depend on.

    `conditions` says how times were taken, `pairs` what the interference was made from, `failures` what could not be measured.
    """

    format_version: int = FORMAT_VERSION
    model: str
    device: str
    tp: int
    num_sms: int
    source: Literal["analytic", "measured"]
    libraries: dict[str, str]
    series: tuple[Series, ...]
    interference: Interference
    power: PowerModel | None = None
    conditions: str = ""
    pairs: tuple[Pair, ...] = ()
    failures: dict[str, str] = {}

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ProfileError(f"profile has format_version={self.format_version}, this program reads {FORMAT_VERSION}")
        for series in self.series:
            for p in series.points:
                if not (p.tokens > 0 and p.num_sms > 0 and math.isfinite(p.time_us) and p.time_us > 0):
                    raise ProfileError(f"profile: {series.kernel} has an impossible point {p}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """A looked-up time; `estimated` if no measurement was made at exactly this point."""

    time_us: float
    energy_j: float | None
    implementation: str
    estimated: bool


def encode(table: ProfileTable) -> bytes:
    """JSON of a profile."""
    return msgspec.json.format(msgspec.json.encode(table), indent=1)


def decode(text: bytes) -> ProfileTable:
    """A profile from JSON.

    Raises:
      ProfileError: not JSON of a profile of this format version.
    """
    try:
        return msgspec.json.decode(text, type=ProfileTable)
    except msgspec.MsgspecError as error:
        raise ProfileError(f"not a profile of format version {FORMAT_VERSION}: {error}") from error


def read(path: Path, device: str, tp: int) -> ProfileTable:
    """The table in a file.

    Raises:
      ProfileError: it holds none, or one of other devices or another number of ranks.
      OSError: it cannot be read.
    """
    table = decode(path.read_bytes())
    if (table.device, table.tp) != (device, tp):
        raise ProfileError(f"profile {path} is of {table.tp} x {table.device}, asked for {tp} x {device}")
    return table


def kernel_of(model: ModelConfig, tp: int, partition: Partition, operation: str) -> Kernel:
    """The kernel that one rank runs for an operation of the layer graph."""
    D, H = model.d_model, model.head_dim
    F = math.ceil(model.d_ff / (_D_FF_MULTIPLE * tp)) * _D_FF_MULTIPLE * tp
    heads, kv_heads = model.num_heads // tp, max(model.num_kv_heads // tp, 1)
    columns = partition == "all_gather"
    attention = (kv_heads, heads // kv_heads, H)
    kernels = {
        "qkv_proj": ("gemm", (D, (heads + 2 * kv_heads) * H)),
        "decode_attention": ("decode_attention", attention),
        "prefill_attention": ("prefill_attention", attention),
        "o_proj": ("gemm", (model.q_dim, D // tp) if columns else (heads * H, D)),
        "gate_up_proj": ("swiglu_gemm", (D, 2 * F // tp)),
        "down_proj": ("gemm", (F // tp, D)),
        "experts": ("experts", (model.num_experts, model.experts_per_token, D, F // tp)),
        "attention_all_gather": ("all_gather", (tp, model.q_dim)),
        "o_all_gather": ("all_gather", (tp, D)),
        "o_all_reduce": ("all_reduce", (tp, D)),
        "ffn_all_reduce": ("all_reduce", (tp, D)),
    }
    name, shape = kernels[operation]
    return Kernel(name=name, shape=shape)


def lookup(table: ProfileTable, kernel: Kernel, tokens: int, *, num_sms: int | None = None, context: float = 0.0) -> Timing:
    """Time of a kernel, by default on as many SMs as its fastest measurement at each size used.

    Between measurements times are interpolated linearly in tokens and context, speeds linearly in SMs; below the smallest
    number of tokens the line through the two smallest is followed, and on fewer SMs than were measured at this size a kernel
    slows down as it does at the nearest size that has them. All of these are marked as estimated.

    Raises:
      ProfileError: the table has no such kernel, or more tokens are asked for than were measured.
    """
    points = [p for s in table.series if s.kernel == kernel for p in s.points]
    if not points:
        raise ProfileError(f"profile of {table.model} on {table.device} has no {kernel}")
    by_tokens: dict[int, list[Point]] = {}
    for p in points:
        by_tokens.setdefault(p.tokens, []).append(p)
    sizes = sorted(by_tokens)
    if tokens > sizes[-1]:
        raise ProfileError(f"profile of {table.model} on {table.device} has {kernel} up to {sizes[-1]} tokens, not {tokens}")

    def at(size: int) -> Timing:
        return _at_tokens(by_tokens[size], num_sms, context, points)

    i = bisect.bisect_left(sizes, tokens)
    if sizes[i] == tokens:
        return at(tokens)
    low, high = (sizes[i - 1], sizes[i]) if i else (sizes[0], sizes[min(1, len(sizes) - 1)])
    a, b = at(low), at(high)
    if low == high:
        return dataclasses.replace(a, estimated=True)
    mixed = _blend(a, b, (tokens - low) / (high - low))
    return dataclasses.replace(mixed, time_us=max(mixed.time_us, 0.25 * a.time_us)) if i == 0 else mixed


def _blend(a: Timing, b: Timing, weight: float) -> Timing:
    """a + weight (b - a), marked as estimated; the implementation is the nearer one's."""
    energy = None if a.energy_j is None or b.energy_j is None else a.energy_j + weight * (b.energy_j - a.energy_j)
    return Timing(
        time_us=a.time_us + weight * (b.time_us - a.time_us),
        energy_j=energy if energy is None else max(energy, 0.0),
        implementation=(a if weight < 0.5 else b).implementation,
        estimated=True,
    )


def _at_tokens(points: Sequence[Point], num_sms: int | None, context: float, everything: Sequence[Point]) -> Timing:
    """Along the context: measured contexts are interpolated, outside of them times follow the line of the two nearest."""
    contexts = sorted({p.context for p in points})

    def at(c: float) -> Timing:
        return _at_context([p for p in points if p.context == c], num_sms, everything)

    if context in contexts or contexts == [0.0]:
        return at(context if context in contexts else 0.0)
    if len(contexts) == 1:
        # Attention reads its context, so time is proportional to it but for a launch that is small beside it.
        return _scaled(at(contexts[0]), context / contexts[0])
    i = min(max(bisect.bisect_left(contexts, context), 1), len(contexts) - 1)
    low, high = contexts[i - 1], contexts[i]
    return _blend(at(low), at(high), (context - low) / (high - low))


def _scaled(t: Timing, factor: float) -> Timing:
    energy = None if t.energy_j is None else t.energy_j * factor
    return dataclasses.replace(t, time_us=t.time_us * factor, energy_j=energy, estimated=True)


def _at_context(points: Sequence[Point], num_sms: int | None, everything: Sequence[Point]) -> Timing:
    best = min(points, key=lambda p: p.time_us)
    if num_sms is None:
        return Timing(time_us=best.time_us, energy_j=best.energy_j, implementation=best.implementation, estimated=False)
    ordered = sorted(points, key=lambda p: p.num_sms)
    counts = [p.num_sms for p in ordered]
    i = bisect.bisect_left(counts, num_sms)
    if i < len(counts) and counts[i] == num_sms:
        p = ordered[i]
        return Timing(time_us=p.time_us, energy_j=p.energy_j, implementation=p.implementation, estimated=False)
    if i == len(counts):
        p, speed = ordered[-1], 1 / ordered[-1].time_us
    elif i == 0:
        p, speed = ordered[0], _speed_kept(ordered[0], num_sms, everything) / ordered[0].time_us
    else:
        a, p = ordered[i - 1], ordered[i]
        weight = (num_sms - a.num_sms) / (p.num_sms - a.num_sms)
        speed = 1 / a.time_us + weight * (1 / p.time_us - 1 / a.time_us)
    return Timing(time_us=1 / speed, energy_j=p.energy_j, implementation=p.implementation, estimated=True)


def _speed_kept(point: Point, num_sms: int, everything: Sequence[Point]) -> float:
    """The fraction of its speed that a kernel keeps on fewer SMs than `point` has, by the nearest size that has both.

    Below the fewest SMs that any size has, speed is taken to be in proportion to SMs.
    """
    cells: dict[tuple[int, float], list[Point]] = {}
    for p in everything:
        cells.setdefault((p.tokens, p.context), []).append(p)
    fewest = {key: min(p.num_sms for p in c) for key, c in cells.items() if max(p.num_sms for p in c) >= point.num_sms}
    low = max(num_sms, min(fewest.values(), default=point.num_sms))
    if low >= point.num_sms:
        return num_sms / point.num_sms
    both = [cells[key] for key, count in fewest.items() if count <= low]

    def distance(cell: Sequence[Point]) -> float:
        return abs(math.log(cell[0].tokens / point.tokens)) + abs(math.log((1 + cell[0].context) / (1 + point.context)))

    nearest = min(both, key=distance)
    whole, fewer = (_at_context(nearest, n, ()).time_us for n in (point.num_sms, low))
    return whole / fewer * num_sms / low

"""A profile from the hardware table alone: rooflines, waves of tiles over SMs, bandwidth by SMs. No GPU needed.

The rates are the hardware table's measured ones where it has them. What it does not have is assumed here, in one place, and
every plan made from such a profile is marked as estimated.
"""

import math
from collections.abc import Iterable, Sequence

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import TILE, Partition, Resource, layer_graph
from nanoflow_jax.workload import BatchMix
from search.cost_model import DTYPE_BYTES
from search.hardware import Hardware, PowerModel
from search.interference import performance, shipped_maps
from search.profile_table import Kernel, Point, ProfileTable, Series, kernel_of

LAUNCH_US = 4.0
GEMM_EFFICIENCY = 0.85  # of peak, where no rate was measured (A100: 0.90)
STREAM_EFFICIENCY = 0.85  # of memory bandwidth, for a bare read (H200: 0.93)
ATTENTION_EFFICIENCY = 0.8  # of memory bandwidth, for decode attention (H200: 0.88)
ATTENTION_SM_FRACTION = 0.4  # of the SMs saturate memory (H200: 48 of 132)
PREFILL_EFFICIENCY = 0.5  # of the GEMM rate
SATURATING_CHANNELS = 24

# Tiles of output with the fraction of the full rate that one SM reaches on them: smaller tiles reload more.
GEMM_TILES = (((256, 128), 1.0), ((128, 256), 1.0), ((128, 128), 0.93), ((128, 64), 0.8), ((64, 64), 0.65))
SPLITS = (1, 2, 4)


def gemm_rate(device: Hardware) -> float:
    """FLOP/s of a large GEMM on the whole device."""
    return device.gemm_flops or GEMM_EFFICIENCY * device.peak_flops


def streaming_bandwidth(device: Hardware) -> float:
    """Bytes per second of a bare read on the whole device."""
    return device.streaming_bandwidth or STREAM_EFFICIENCY * device.memory_bandwidth


def _gemm(device: Hardware, m_sizes: Sequence[int], k: int, n: int, weight_sets: float, sms: int) -> tuple[float, str]:
    """Seconds and implementation of GEMMs [m, k] x [k, n], one per entry of `m_sizes`, that share the SMs.

    Each wave of tiles takes one tile's time; a split of k adds the exchange of partial sums. `weight_sets` is how many
    different [k, n] weights are read.
    """
    bandwidth = streaming_bandwidth(device)
    rows = sum(m_sizes)
    moved = DTYPE_BYTES * (weight_sets * k * n + rows * (k + n))
    best = (math.inf, "")
    for (tm, tn), efficiency in GEMM_TILES:
        for split in SPLITS:
            tiles = sum(math.ceil(m / tm) for m in m_sizes) * math.ceil(n / tn) * split
            tile_s = 2.0 * tm * tn * k / split / (efficiency * gemm_rate(device) / device.num_sms)
            exchange_s = 8.0 * rows * n * split / bandwidth if split > 1 else 0.0
            seconds = max(math.ceil(tiles / sms) * tile_s, moved / bandwidth) + exchange_s
            best = min(best, (seconds, f"{tm}x{tn}" + (f"/k{split}" if split > 1 else "")))
    return best


def _experts(device: Hardware, shape: tuple[int, ...], tokens: int, sms: int) -> tuple[float, str]:
    num_experts, per_token, d, f = shape
    active = round(num_experts * (1 - (1 - per_token / num_experts) ** tokens))
    rows = [math.ceil(tokens * per_token / active)] * active
    up, name = _gemm(device, rows, d, 2 * f, active, sms)
    down, _ = _gemm(device, rows, f, d, active, sms)
    return up + down, name


def _decode_attention(device: Hardware, shape: tuple[int, ...], tokens: int, context: float, sms: int) -> float:
    peak = device.attention_bandwidth or ATTENTION_EFFICIENCY * device.memory_bandwidth
    enough = device.attention_sms or ATTENTION_SM_FRACTION * device.num_sms
    return attention_bytes(shape, tokens, context) / (peak * min(1.0, sms / enough))


def attention_bytes(shape: tuple[int, ...], tokens: int, context: float) -> float:
    """Bytes of keys and values, queries and outputs of decode attention on one rank."""
    kv_heads, group, head_dim = shape
    return DTYPE_BYTES * tokens * kv_heads * head_dim * (2.0 * context + 2.0 * group)


def collective_bytes(kernel: Kernel, tokens: int) -> float:
    """Bytes that each rank sends in a ring."""
    tp, d = kernel.shape
    return DTYPE_BYTES * tokens * d * (tp - 1) / tp * (2 if kernel.name == "all_reduce" else 1)


def kernel_work(kernel: Kernel, tokens: int, context: float) -> tuple[float, float, float]:
    """FLOPs, bytes of device memory and bytes sent of one kernel on one rank."""
    shape = kernel.shape
    if kernel.name in ("gemm", "swiglu_gemm"):
        k, n = shape
        return 2.0 * tokens * k * n, DTYPE_BYTES * (k * n + tokens * (k + n)), 0.0
    if kernel.name == "experts":
        num_experts, per_token, d, f = shape
        active = num_experts * (1 - (1 - per_token / num_experts) ** tokens)
        elements = 3.0 * active * d * f + tokens * per_token * (2 * d + 3 * f)
        return 6.0 * tokens * per_token * d * f, DTYPE_BYTES * elements, 0.0
    if kernel.name in ("decode_attention", "prefill_attention"):
        kv_heads, group, head_dim = shape
        flops = 4.0 * tokens * context * kv_heads * group * head_dim
        return flops, attention_bytes(shape, tokens, context if kernel.name == "decode_attention" else 1.0), 0.0
    sent = collective_bytes(kernel, tokens)
    return 0.0, 2.0 * sent, sent


def kernel_energy_j(power: PowerModel, kernel: Kernel, tokens: int, context: float) -> float:
    """Joules above idle of one kernel on one rank."""
    flops, moved, _ = kernel_work(kernel, tokens, context)
    if kernel.name == "decode_attention":
        return 1e-12 * power.pj_per_attention_byte * moved
    return 1e-12 * (power.pj_per_flop * flops if flops else power.pj_per_byte * moved)


def _time(device: Hardware, kernel: Kernel, tokens: int, context: float, sms: int) -> tuple[float, str]:
    """Microseconds and implementation of one kernel on one rank with `sms` SMs (channels for collectives)."""
    if kernel.name in ("gemm", "swiglu_gemm"):
        k, n = kernel.shape
        seconds, name = _gemm(device, [tokens], k, n, 1.0, sms)
    elif kernel.name == "experts":
        seconds, name = _experts(device, kernel.shape, tokens, sms)
    elif kernel.name == "decode_attention":
        seconds, name = _decode_attention(device, kernel.shape, tokens, context, sms), "stream"
    elif kernel.name == "prefill_attention":
        flops, moved, _ = kernel_work(kernel, tokens, context)
        rate = PREFILL_EFFICIENCY * gemm_rate(device) * sms / device.num_sms
        seconds, name = max(flops / rate, moved / streaming_bandwidth(device)), "flash"
    else:
        speed = performance(shipped_maps()[device.interference], Resource.NETWORK, min(1.0, sms / device.num_sms))
        if sms >= SATURATING_CHANNELS:
            speed = 1.0
        rate = device.network_bandwidth * device.network_efficiency * speed
        seconds, name = collective_bytes(kernel, tokens) / rate + 1e-6 * device.network_latency_us, "ring"
    return 1e6 * seconds + LAUNCH_US, name


def _sizes(mix: BatchMix, tokens: str) -> Iterable[int]:
    """Multiples of 128, and what a nano-batch holds that ends (or begins) at the border between decode and prompts."""
    if tokens == "all":
        return range(TILE, mix.b_dense + 1, TILE)
    whole = mix.decode_tokens if tokens == "decode" else mix.prefill_tokens
    # A decode nano-batch begins, a prompt nano-batch ends at a multiple of 128; the other end may be the border.
    return sorted({*range(TILE, whole + 1, TILE), *range(whole, 0, -TILE)})


def analytic_profile(
    model: ModelConfig, device: Hardware, tp: int, mixes: Sequence[BatchMix], *, by_sms: bool = False
) -> ProfileTable:
    """The table of one model on one device for the batches of `mixes`; on all SMs, with `by_sms` on every eighth count too."""
    counts = sorted({*range(8, device.num_sms, 8), device.num_sms}) if by_sms else [device.num_sms]
    partitions: tuple[Partition, ...] = ("none",) if tp == 1 else ("all_reduce", "all_gather")
    seen: dict[Kernel, dict[tuple[int, int, float], Point]] = {}
    for partition in partitions:
        for op in layer_graph(moe=model.is_moe, partition=partition):
            kernel = kernel_of(model, tp, partition, op.name)
            points = seen.setdefault(kernel, {})
            for mix in mixes:
                context = {"decode": mix.decode_context, "prefill": mix.prefill_context}.get(op.tokens, 0.0)
                for tokens in _sizes(mix, op.tokens):
                    for sms in counts:
                        time_us, name = _time(device, kernel, tokens, context, sms)
                        points[tokens, sms, context] = Point(
                            tokens=tokens, num_sms=sms, context=context, time_us=time_us, implementation=name,
                            energy_j=kernel_energy_j(device.power, kernel, tokens, context) if device.power else None,
                        )  # fmt: skip
    series = tuple(Series(kernel=k, points=tuple(p.values())) for k, p in seen.items() if p)
    return ProfileTable(
        model=model.name, device=device.name, tp=tp, num_sms=device.num_sms, source="analytic", libraries={}, series=series,
        interference=shipped_maps()[device.interference], power=device.power,
    )  # fmt: skip

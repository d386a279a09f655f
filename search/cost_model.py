"""FLOPs and bytes of each operation, the times they take at a device's rates, and what bounds a workload.

Figures are totals over the tensor-parallel group and all layers, each activation counted once, as in the paper's Table 2; the
analytic profile counts bytes per rank instead. Sources: NanoFlow paper, sections 3.1 to 3.5 (equations 1 to 5).
"""

import dataclasses

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import TILE
from nanoflow_jax.workload import BatchMix, Workload
from search.hardware import Hardware

DTYPE_BYTES = 2


class InfeasibleError(ValueError):
    """The request cannot be served: too little memory, or a batch that cannot be split."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationCost:
    """Work of one operation in one step: all layers, all ranks."""

    name: str
    flops: float
    bytes_moved: float
    network_bytes: float

    def times_s(self, device: Hardware, tp: int, flops_rate: float) -> tuple[float, float, float]:
        """Seconds on compute, memory and network if each ran at full rate."""
        return (
            self.flops / (tp * flops_rate),
            self.bytes_moved / (tp * device.memory_bandwidth),
            self.network_bytes / (tp * device.network_bandwidth),
        )


def active_experts(model: ModelConfig, tokens: int) -> float:
    """Expected number of experts that at least one of `tokens` is routed to, if the router is uniform."""
    if not model.is_moe:
        return 1.0
    return model.num_experts * (1 - (1 - model.experts_per_token / model.num_experts) ** tokens)


def operation_costs(model: ModelConfig, mix: BatchMix, tp: int) -> list[OperationCost]:
    """Cost of every operation of a step (embedding and logits left out, as in the paper's Table 2)."""
    B, D, F, L, S = mix.b_dense, model.d_model, model.d_ff, model.num_layers, DTYPE_BYTES
    qkv_width = model.q_dim + 2 * model.kv_dim

    def gemm(name: str, k: int, n: int, routed: int = 1, experts: float = 1.0) -> OperationCost:
        flops = 2.0 * B * routed * k * n * L
        return OperationCost(
            name=name, flops=flops, bytes_moved=S * L * (experts * k * n + B * routed * (k + n)), network_bytes=0.0
        )

    routed, experts = max(model.experts_per_token, 1), active_experts(model, B)
    costs = [gemm("qkv_proj", D, qkv_width)]
    costs += [
        _attention(model, "decode_attention", mix.decode_tokens, mix.decode_context, mix.decode_tokens * mix.decode_context),
        _attention(model, "prefill_attention", mix.prefill_tokens, mix.prefill_context, mix.prefill_tokens),
        gemm("o_proj", model.q_dim, D),
    ]
    if model.is_moe:
        # gate, up and down of the routed experts in one line; the widths add up because the bytes of each GEMM do.
        gate_up, down = gemm("", D, 2 * F, routed, experts), gemm("", F, D, routed, experts)
        flops, moved = gate_up.flops + down.flops, gate_up.bytes_moved + down.bytes_moved
        costs.append(OperationCost(name="experts", flops=flops, bytes_moved=moved, network_bytes=0.0))
    else:
        costs += [gemm("gate_up_proj", D, 2 * F), gemm("down_proj", F, D)]
    if tp > 1:
        costs.append(_collectives(model, B, tp))
    return costs


def _attention(model: ModelConfig, name: str, tokens: int, context: float, cached_tokens: float) -> OperationCost:
    """Scores and weighted sum over `context` keys per token; `cached_tokens` keys and values are read once each.

    Decode attention reads every sequence's cache, prompt attention its chunk's own keys (one tile of queries shares a read).
    """
    flops = 4.0 * tokens * context * model.q_dim * model.num_layers
    moved = 2 * tokens * model.q_dim + 2 * (cached_tokens + tokens) * model.kv_dim
    return OperationCost(name=name, flops=flops, bytes_moved=DTYPE_BYTES * model.num_layers * moved, network_bytes=0.0)


def _collectives(model: ModelConfig, b_dense: int, tp: int) -> OperationCost:
    """Two all-gathers and one all-reduce, or two all-reduces: 4 (tp - 1) activations cross links per layer (equation 3).

    The paper's formula has tp in place of tp - 1; its Table 2 (31.33 ms) fits tp - 1, the traffic of a ring.
    """
    activations = b_dense * model.d_model * DTYPE_BYTES * model.num_layers
    sent = 4.0 * (tp - 1) * activations
    reduce_flops = 2.0 * (tp - 1) * b_dense * model.d_model * model.num_layers
    return OperationCost(name="collectives", flops=reduce_flops, bytes_moved=sent, network_bytes=sent)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """What device memory allows: tokens of KV cache, decoding sequences and the dense batch they sustain (rounded down)."""

    weight_bytes: float
    kv_tokens: float
    max_sequences: int
    max_b_dense: int


def memory_budget(model: ModelConfig, device: Hardware, tp: int, workload: Workload) -> MemoryBudget:
    """The largest steady-state batch whose KV cache fits beside the weights, all memory usable (paper, section 3.1).

    Raises:
      InfeasibleError: the weights, or not even one request's cache, fit.
    """
    weight_bytes = float(model.num_params * DTYPE_BYTES)
    total = device.memory_bytes * tp
    kv_tokens = (total - weight_bytes) / model.kv_bytes_per_token(DTYPE_BYTES)
    sequences = int(kv_tokens / workload.decode_context)
    if kv_tokens <= 0 or sequences < 1:
        raise InfeasibleError(
            f"{model.name} with {weight_bytes / 1e9:.1f} GB of weights leaves no room for a {workload.name} request "
            f"on {tp} x {device.name} ({total / 1e9:.0f} GB)"
        )
    # Without decoding nothing bounds the batch but the prompts in flight.
    fraction = workload.decode_fraction
    b_dense = sequences / fraction if fraction else kv_tokens
    return MemoryBudget(weight_bytes=weight_bytes, kv_tokens=kv_tokens, max_sequences=sequences, max_b_dense=int(b_dense))


def check_batch(
    model: ModelConfig, device: Hardware, tp: int, workload: Workload, b_dense: int, decode_tokens: int | None = None
) -> MemoryBudget:
    """Refuses a batch that is no multiple of 128 or whose KV cache does not fit.

    Args:
      decode_tokens: how many of the batch decode; None: the workload's share of them.

    Raises:
      InfeasibleError: naming the value and the limit.
    """
    check_split(model, tp)
    if b_dense <= 0 or b_dense % TILE:
        raise InfeasibleError(f"b_dense={b_dense} is not a positive multiple of {TILE}")
    budget = memory_budget(model, device, tp, workload)
    if decode_tokens is not None:
        if not 0 <= decode_tokens <= min(b_dense, budget.max_sequences):
            raise InfeasibleError(
                f"decode_tokens={decode_tokens} must lie in [0, {min(b_dense, budget.max_sequences)}]: of {b_dense=}, and "
                f"{tp} x {device.name} hold no more than {budget.max_sequences} sequences of {model.name} at {workload.name}"
            )
    elif b_dense > budget.max_b_dense:
        raise InfeasibleError(
            f"b_dense={b_dense} needs more memory than {tp} x {device.name} has: {model.name} at {workload.name} "
            f"allows {budget.max_b_dense} tokens"
        )
    return budget


def check_split(model: ModelConfig, tp: int) -> None:
    """Refuses a tensor-parallel degree that does not divide heads and widths."""
    for field in ("num_heads", "d_model", "d_ff"):
        if tp < 1 or getattr(model, field) % tp:
            raise InfeasibleError(f"{model.name}: tp={tp} does not divide {field}={getattr(model, field)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification:
    """Which resource bounds a step. Seconds per step over the whole group; throughputs in tokens per second and device.

    `tr` is T_mem / T_compute with memory full (equation 4, as the paper's Figure 3), at the largest batch that fits.
    """

    t_compute: float
    t_memory: float
    t_network: float
    bottleneck: str
    tr: float
    budget: MemoryBudget
    optimal_datasheet: float
    optimal_measured: float | None


def classify(model: ModelConfig, device: Hardware, tp: int, mix: BatchMix, workload: Workload) -> Classification:
    """The cost model's verdict on one batch."""
    times = [c.times_s(device, tp, device.peak_flops) for c in operation_costs(model, mix, tp)]
    t_compute, t_memory, t_network = (sum(t[i] for t in times) for i in range(3))
    named = {"compute": t_compute, "memory": t_memory, "network": t_network}
    budget = memory_budget(model, device, tp, workload)
    params = model.active_params
    tr = device.flops_per_byte * tp * device.memory_bytes / params / (2.0 * budget.max_b_dense)
    return Classification(
        t_compute=t_compute,
        t_memory=t_memory,
        t_network=t_network,
        bottleneck=max(named, key=lambda name: named[name]),
        tr=tr,
        budget=budget,
        optimal_datasheet=device.peak_flops / (2.0 * params),
        optimal_measured=device.gemm_flops / (2.0 * params) if device.gemm_flops else None,
    )

"""Which kernels are measured on how many tokens and SMs, alone and in pairs.

A program is dear, since its kernels must be compiled, and measuring it with other data is cheap. So sizes and SM counts are
few, while contexts and the number of sequences of attention are data; lookups interpolate, and say so.
"""

import dataclasses
import math
from collections.abc import Sequence

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import TILE, Partition, Resource, layer_graph
from search.analytic import attention_bytes, kernel_work
from search.interference import MAX_CHANNELS
from search.measurement import Alone, Load
from search.profile_table import Kernel, kernel_of

# SMs of attention beside a GEMM, and SMs that a GEMM leaves to a collective (which takes NCCL's own number of channels).
MEMORY_SMS = (16, 24, 32, 40, 48)
NETWORK_SMS = (8, 16, 24, 32)
FEWER_SMS = (16, 32, 48)  # so many less for a GEMM or prompt attention alone
GEMMS_BESIDE_NETWORK = 3  # those with the most FLOPs
# Keys and values of attention in a pair, at least and for each token of the batch: lasts longer than a GEMM on 48 SMs too.
PAIR_BYTES, PAIR_BYTES_PER_TOKEN = 4e9, 2e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One measurement of a kernel alone; `full` if on the whole device, where a burst is timed too."""

    program: Alone
    load: Load
    full: bool
    energy: bool

    @property
    def key(self) -> tuple[int, int, float]:
        return self.program.tokens, self.program.num_sms, self.load.context


def kernels_of(model: ModelConfig, tp: int) -> dict[Kernel, tuple[Resource, str]]:
    """The kernels of a layer in all partitions, with resource and token kind; each once."""
    partitions: tuple[Partition, ...] = ("none",) if tp == 1 else ("all_reduce", "all_gather")
    found: dict[Kernel, tuple[Resource, str]] = {}
    for partition in partitions:
        for op in layer_graph(moe=model.is_moe, partition=partition):
            found.setdefault(kernel_of(model, tp, partition, op.name), (op.resource, op.tokens))
    return found


def dense_sizes(b_dense: int) -> list[int]:
    """Tokens of GEMMs: every tile up to 1024, where waves of output tiles show, then every second; and all."""
    return sorted({t for t in range(TILE, b_dense + 1, TILE) if t <= 1024 or t % (2 * TILE) == 0} | {b_dense})


def doubling_sizes(b_dense: int) -> list[int]:
    """Tokens of attention, experts and collectives, whose times are smooth: powers of two of a tile, and all."""
    return sorted({t for t in (TILE << i for i in range(b_dense.bit_length())) if t < b_dense} | {b_dense})


def pair_attention(kernel: Kernel, b_dense: int, contexts: Sequence[int], sms: int) -> Alone:
    """Decode attention as it runs beside GEMMs: as few rows as hold enough to last as long, each with `max_context` keys.

    Keys are the largest of `contexts` or, where `b_dense` rows of these are too few, as many as it takes.
    """
    enough = max(PAIR_BYTES, PAIR_BYTES_PER_TOKEN * b_dense)
    per_key = attention_bytes(kernel.shape, 1, 1.0) - attention_bytes(kernel.shape, 1, 0.0)
    keys = max(max(contexts), math.ceil(enough / per_key / b_dense / 512) * 512)
    rows = next(t for t in doubling_sizes(b_dense) if t * keys * per_key >= enough or t == b_dense)
    return Alone(kernel=kernel, tokens=rows, num_sms=sms, max_context=keys)


def requests(model: ModelConfig, tp: int, b_dense: int, contexts: Sequence[int], num_sms: int) -> list[Request]:
    """Kernels alone: on the whole device, then what else pairs are matched by (attention on few SMs)."""
    found: list[Request] = []
    with_energy = {b_dense // 4, b_dense // 2, b_dense}
    for kernel, (resource, kind) in kernels_of(model, tp).items():
        sms = MAX_CHANNELS if resource is Resource.NETWORK else num_sms
        smooth = kind != "all" or kernel.name == "experts" or resource is Resource.NETWORK
        keys = _contexts(kind, contexts)
        beside = pair_attention(kernel, b_dense, contexts, sms) if kind == "decode" else None
        longest = beside.max_context if beside else max(contexts) if kind == "prefill" else 0
        for tokens in doubling_sizes(b_dense) if smooth else dense_sizes(b_dense):
            program = Alone(kernel=kernel, tokens=tokens, num_sms=sms, max_context=longest)
            extra = {float(longest)} if program == beside else set()
            for context in sorted(extra.union(keys)):
                energy = tokens in with_energy and context == max(keys)
                found.append(Request(program=program, load=Load(context=context), full=True, energy=energy))
        if beside:
            few = [dataclasses.replace(beside, num_sms=n) for n in MEMORY_SMS if 2 * n <= num_sms]
            found += [Request(program=p, load=Load(context=float(longest)), full=False, energy=False) for p in few]
    return found


def fewer_sms_requests(model: ModelConfig, tp: int, b_dense: int, contexts: Sequence[int], num_sms: int) -> list[Request]:
    """GEMMs, experts and prompt attention alone on some of the SMs; other sizes slow down alike."""
    found = []
    for kernel, (resource, kind) in kernels_of(model, tp).items():
        if resource is Resource.COMPUTE:
            load, longest = Load(context=max(_contexts(kind, contexts))), max(contexts) if kind == "prefill" else 0
            for n in [n for n in FEWER_SMS if 2 * n <= num_sms]:
                program = Alone(kernel=kernel, tokens=b_dense, num_sms=num_sms - n, max_context=longest)
                found.append(Request(program=program, load=load, full=False, energy=False))
    return found


def _contexts(kind: str, contexts: Sequence[int]) -> list[float]:
    """Keys per token: a prompt as long as a decoding sequence's context sees half of it on average."""
    return {"all": [0.0], "decode": [float(c) for c in contexts], "prefill": [c / 2 for c in contexts]}[kind]


def pairs_to_measure(
    model: ModelConfig, tp: int, b_dense: int, contexts: Sequence[int], num_sms: int
) -> list[tuple[Kernel, Kernel, int]]:
    """(GEMM, kernel beside it, SMs that the GEMM leaves), memory first.

    Every GEMM of the first partition beside decode attention, the largest ones beside an all-reduce.
    """
    partition: Partition = "none" if tp == 1 else "all_reduce"
    kernels = [kernel_of(model, tp, partition, op.name) for op in layer_graph(moe=model.is_moe, partition=partition)]
    gemms = list(dict.fromkeys(k for k in kernels if k.name in ("gemm", "swiglu_gemm")))
    largest = sorted(gemms, key=lambda k: -kernel_work(k, b_dense, 0.0)[0])[:GEMMS_BESIDE_NETWORK]
    found = []
    for names, beside, counts in ((("decode_attention",), gemms, MEMORY_SMS), (("all_reduce",), largest, NETWORK_SMS)):
        others = list(dict.fromkeys(k for k in kernels if k.name in names))
        fitting = [n for n in counts if 2 * n <= num_sms]
        found += [(gemm, other, n) for other in others for gemm in beside for n in fitting]
    return found

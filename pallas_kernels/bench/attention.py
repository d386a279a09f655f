"""Benchmark cases of the attention kernels and of append_kv: shapes of Llama-3 models, as one rank sees them.

Pages lie in random order in a pool of just their number. The byte counts hold K and V, nearly all that decoding reads.
Baselines: for decoding, cuDNN over a contiguous cache of the same lengths; for prefill, cuDNN on the dense shape, causal where
the chunk is the whole sequence, else without a mask and scaled to the FLOPs of the causal chunk; for append_kv, XLA's fusions
of the same, beside which a row shows a pass that reads and writes as many bytes.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import reference
from pallas_kernels.append_kv import TuningConfig as AppendConfig
from pallas_kernels.append_kv import append_kv
from pallas_kernels.bench import timing
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.prefill_attention import prefill_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
    name: str
    rows: int
    mean_kv_len: int
    kv_heads: int
    group: int
    page_size: int
    ragged: bool = False
    head_dim: int = 128

    def kv_lens(self) -> np.ndarray:
        """All alike, or exponential with that mean (the longest are some eight times as long)."""
        if not self.ragged:
            return np.full(self.rows, self.mean_kv_len, np.int32)
        return np.maximum(np.random.default_rng(0).exponential(self.mean_kv_len, self.rows), 1).astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
    name: str
    chunk: int
    kv_len: int
    kv_heads: int
    group: int
    page_size: int
    head_dim: int = 128

    @property
    def flops(self) -> float:
        pairs = self.chunk * (self.kv_len - self.chunk) + self.chunk * (self.chunk + 1) / 2
        return 4.0 * self.kv_heads * self.group * self.head_dim * pairs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Append:
    name: str
    tokens: int
    kv_heads: int = 8
    group: int = 4
    page_size: int = 64
    head_dim: int = 128


DECODE = (
    Decode(name="8b 512 x 1024", rows=512, mean_kv_len=1024, kv_heads=8, group=4, page_size=64),
    Decode(name="8b 512 x 1024", rows=512, mean_kv_len=1024, kv_heads=8, group=4, page_size=32),
    Decode(name="8b 512 x 1024", rows=512, mean_kv_len=1024, kv_heads=8, group=4, page_size=16),
    Decode(name="8b 512 x exp 1024", rows=512, mean_kv_len=1024, kv_heads=8, group=4, page_size=64, ragged=True),
    Decode(name="70b/8 2048 x 1024", rows=2048, mean_kv_len=1024, kv_heads=1, group=8, page_size=16),
    Decode(name="70b/8 2048 x exp 1024", rows=2048, mean_kv_len=1024, kv_heads=1, group=8, page_size=16, ragged=True),
    Decode(name="70b/8 512 x exp 1024", rows=512, mean_kv_len=1024, kv_heads=1, group=8, page_size=16, ragged=True),
    Decode(name="8b 1 x 131072", rows=1, mean_kv_len=131072, kv_heads=8, group=4, page_size=64),
)
PREFILL = (
    Prefill(name="8b 2048 of 8192", chunk=2048, kv_len=8192, kv_heads=8, group=4, page_size=64),
    Prefill(name="8b 2048 behind 8192", chunk=2048, kv_len=10240, kv_heads=8, group=4, page_size=16),
    Prefill(name="8b 8192 of 8192", chunk=8192, kv_len=8192, kv_heads=8, group=4, page_size=64),
    Prefill(name="8b 2048 of 2048", chunk=2048, kv_len=2048, kv_heads=8, group=4, page_size=64),
)
APPEND = (Append(name="8b 512 tokens", tokens=512), Append(name="8b 2048 tokens", tokens=2048))
_BESIDE_QKV = 6  # arguments in front of the activations
APPEND_CONFIGS = tuple(AppendConfig(warpgroups=w, pairs=p) for w, p in ((4, 3), (6, 2), (8, 1)))
"""Beside each other, the default first: about as many bytes under way, by ever more warpgroups."""


def benchmark(kernel: str, num_sms: Sequence[int], *, names: str = "", sustained: bool = False) -> Iterator[timing.Row]:
    """`names` keeps the cases whose name contains one of them."""
    cases = {"decode_attention": DECODE, "prefill_attention": PREFILL, "append_kv": APPEND}[kernel]
    run = {"decode_attention": _decode, "prefill_attention": _prefill, "append_kv": _append}[kernel]
    for case in cases:
        if any(name in case.name for name in names.split(",")):
            yield from run(case, num_sms, sustained)


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def paged(kv_lens: np.ndarray, kv_heads: int, page_size: int, head_dim: int) -> tuple[jax.Array, ...]:
    """(k_pages, v_pages, block_tables) with permuted pages."""
    pages = -(-kv_lens // page_size)
    tables = np.zeros((len(kv_lens), pages.max()), np.int32)
    tables[np.arange(pages.max())[None] < pages[:, None]] = np.random.default_rng(1).permutation(pages.sum()) + 1
    shape = (int(pages.sum()) + 1, kv_heads, page_size, head_dim)
    return normal(2, shape), normal(3, shape), jnp.asarray(tables)


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")


def _seconds(f: Any, inputs: timing.Inputs) -> float:
    """Long chains: a run's start and end on the host count for little beside them."""
    return timing.device_seconds({"f": f}, [inputs], calls=32)["f"]


def _sustained(f: Any, inputs: timing.Inputs, wanted: bool) -> timing.Sustained | None:
    return timing.sustained(f, [inputs]) if wanted else None


def _decode(case: Decode, num_sms: Sequence[int], sustained: bool) -> Iterator[timing.Row]:
    kv_lens = case.kv_lens()
    K, G, H = case.kv_heads, case.group, case.head_dim
    q = normal(0, (case.rows, K, G, H))
    inputs = (q, *paged(kv_lens, K, case.page_size, H), jnp.asarray(kv_lens))
    baseline = {}
    if not case.ragged:
        shape = (case.rows, case.mean_kv_len, K, H)
        dense = (q.reshape(case.rows, 1, K * G, H), normal(4, shape), normal(5, shape))
        seconds = _seconds(functools.partial(_cudnn, causal=False), dense)
        baseline = {"baseline": "cuDNN", "baseline_seconds": seconds}
        del dense
    for n in num_sms:
        f = functools.partial(decode_attention, num_sms=n)
        yield timing.Row(
            kernel="decode_attention",
            case=f"{case.name} page {case.page_size}",
            num_sms=n,
            seconds=_seconds(f, inputs),
            flops=4.0 * K * G * H * float(kv_lens.sum()),
            hbm_bytes=4.0 * K * H * float(kv_lens.sum()),
            sustained=_sustained(f, inputs, sustained),
            **baseline,
        )


def _prefill(case: Prefill, num_sms: Sequence[int], sustained: bool) -> Iterator[timing.Row]:
    T, K, G, H = case.chunk, case.kv_heads, case.group, case.head_dim
    q = normal(0, (T, K, G, H))
    pages = paged(np.asarray([case.kv_len]), K, case.page_size, H)
    inputs = (q, *pages, *(jnp.asarray([x], jnp.int32) for x in (case.kv_len, 0, T)))
    shape = (1, case.kv_len, K, H)
    causal = case.kv_len == T
    dense = (q.reshape(1, T, K * G, H), normal(4, shape), normal(5, shape))
    seconds = _seconds(functools.partial(_cudnn, causal=causal), dense)
    if not causal:
        seconds *= case.flops / (4.0 * K * G * H * T * case.kv_len)
    for n in num_sms:
        f = functools.partial(prefill_attention, num_sms=n)
        yield timing.Row(
            kernel="prefill_attention",
            case=f"{case.name} page {case.page_size}",
            num_sms=n,
            seconds=_seconds(f, inputs),
            flops=case.flops,
            hbm_bytes=4.0 * K * H * case.kv_len,
            baseline="cuDNN causal" if causal else "cuDNN scaled",
            baseline_seconds=seconds,
            sustained=_sustained(f, inputs, sustained),
        )


def _append(case: Append, num_sms: Sequence[int], sustained: bool) -> Iterator[timing.Row]:
    """A call is a series of appends to one pool, as layer after layer does it: the pool's first copy is small beside them."""
    T, K, G, H, series = case.tokens, case.kv_heads, case.group, case.head_dim, 12
    pool = (2 * T // case.page_size, K, case.page_size, H)
    qkv = [normal(i, (T, K, G + 2, H)) for i in range(series)]
    angles = jax.random.uniform(jax.random.key(1), (T, H // 2), maxval=2 * np.pi)
    slots = jnp.asarray(np.random.default_rng(0).permutation(2 * T)[:T], jnp.int32)
    inputs = (jnp.cos(angles), jnp.sin(angles), slots, jnp.int32(T), normal(2, pool), normal(3, pool), *qkv)
    runs = {f"{n} {c.warpgroups} x {c.pairs}": (n, c) for n in num_sms for c in APPEND_CONFIGS}
    functions = {
        name: functools.partial(_appends, functools.partial(append_kv, with_kv=False, num_sms=n, config=config))
        for name, (n, config) in runs.items()
    }
    beside = {"XLA": functools.partial(_appends, reference.append_kv), "pass": _passes}
    seconds = {name: s / series for name, s in timing.device_seconds(functions | beside, [inputs]).items()}
    for name, (n, config) in runs.items():
        held = _sustained(functions[name], inputs, sustained)
        yield timing.Row(
            kernel="append_kv",
            case=f"{case.name} {config.warpgroups} x {config.pairs}",
            num_sms=n,
            seconds=seconds[name],
            hbm_bytes=2.0 * qkv[0].nbytes,
            baseline="XLA",
            baseline_seconds=seconds["XLA"],
            sustained=held and dataclasses.replace(held, seconds=held.seconds / series),
            note=f"a pass of as many bytes takes {1e6 * seconds['pass']:.1f} us",
        )


def _appends(
    append: Any,
    cos: jax.Array,
    sin: jax.Array,
    slots: jax.Array,
    rows: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    *qkv: jax.Array,
) -> Any:
    queries = []
    for i in range(len(qkv)):
        q, _, k_pages, v_pages = append(qkv[i], cos, sin, slots, k_pages, v_pages, rows=rows)
        # One append after the other, none merged with the next.
        q, k_pages, v_pages, qkv = lax.optimization_barrier((q, k_pages, v_pages, qkv))
        queries.append(q)
    return queries, k_pages, v_pages


def _passes(*inputs: jax.Array) -> list[jax.Array]:
    """Over the activations alone, of the arguments of `_appends`."""
    qkv = inputs[_BESIDE_QKV:]
    out = []
    for i in range(len(qkv)):
        y, qkv = lax.optimization_barrier((qkv[i] * jnp.bfloat16(1.5), qkv))
        out.append(y)
    return out

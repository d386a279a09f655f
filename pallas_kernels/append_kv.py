"""Rotary embedding on queries and keys, and keys and values to their slots, on exactly `num_sms` SMs (Mosaic GPU, Hopper).

One pass over the qkv activations. They are [T * K * (G + 2), H], and lie in memory as the kernel takes them: a thread loads 16
bytes of both halves of a head and the angles' cosines and sines, rotates, and stores to where the head belongs, which is the
queries' array, a page of keys or a page of values (values as they are). Each warpgroup loads all that it takes at a time before
it stores any of it, so that an SM has some 50 KB under way.

Limits: bfloat16, cosines and sines float32; head sizes that are multiples of 16.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _fragments as fragments
from pallas_kernels import _mosaic


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    warpgroups: int = 4
    """Of a CTA, 1 to 8; each takes blocks of its own."""
    pairs: int = 3
    """16 bytes of both halves of a head that a thread loads before it stores."""


def append_kv(
    qkv: Float[Array, "T K G_plus_2 H"],
    cos: Float[Array, "T H_2"],
    sin: Float[Array, "T H_2"],
    slots: Int[Array, " T"],
    k_pages: Float[Array, "P K page_size H"],
    v_pages: Float[Array, "P K page_size H"],
    *,
    rows: Int[Array, ""] | None = None,
    with_kv: bool = True,
    num_sms: int,
    config: TuningConfig | None = None,
) -> tuple[
    Float[Array, "T K G H"],
    Float[Array, "T K 2_or_0 H"],
    Float[Array, "P K page_size H"],
    Float[Array, "P K page_size H"],
]:
    """Rotated queries, each token's rotated key and value, and the pages with these in the tokens' slots.

    Slots are distinct; a token with slot -1 writes nothing. Pages are updated in place where they are donated or are
    temporaries of the surrounding computation.

    Args:
      rows: tokens up to the last that is no padding (None: T). Queries, keys and values behind are undefined.
      with_kv: whether keys and values by token are wanted, too; else that result is empty.

    Raises:
      UnsupportedDeviceError: the device is no Hopper GPU.
      ValueError: shapes do not fit each other, or `num_sms` is not between 1 and the device's SMs.
      NotImplementedError: dtype or head size outside the limits in the module's docstring.
    """
    T, K, J, H = qkv.shape
    _check(qkv, cos, sin, slots, k_pages, v_pages)
    device = _mosaic.require_hopper("append_kv", num_sms)
    if T * K == 0:
        return qkv[:, :, :-2], qkv[:, :, : 2 * with_kv], k_pages, v_pages
    plan = _Plan(
        tokens=T,
        kv_heads=K,
        heads=J,
        head_dim=H,
        page_size=k_pages.shape[2],
        with_kv=with_kv,
        num_sms=num_sms,
        interpreted=device.interpreted,
        config=config or TuningConfig(),
    )
    return _run(qkv, cos, sin, slots, k_pages, v_pages, T if rows is None else rows, plan=plan)


def _check(qkv: Array, cos: Array, sin: Array, slots: Array, k_pages: Array, v_pages: Array) -> None:
    T, K, J, H = qkv.shape
    if J < 3 or k_pages.shape != v_pages.shape or k_pages.shape[1] != K or k_pages.shape[3] != H:
        raise ValueError(f"{k_pages.shape=} and {v_pages.shape=} do not fit {qkv.shape=}")
    if cos.shape != (T, H // 2) or sin.shape != cos.shape or slots.shape != (T,):
        raise ValueError(f"{cos.shape=}, {sin.shape=} and {slots.shape=} do not fit {qkv.shape=}")
    if not qkv.dtype == k_pages.dtype == v_pages.dtype == jnp.bfloat16 or not cos.dtype == sin.dtype == jnp.float32:
        raise NotImplementedError(
            f"append_kv is for bfloat16 and angles in float32, not {qkv.dtype=}, {k_pages.dtype=}, {v_pages.dtype=}, "
            f"{cos.dtype=}, {sin.dtype=}"
        )
    if H % (2 * fragments.WIDE):
        raise NotImplementedError(f"append_kv has head sizes that are multiples of {2 * fragments.WIDE}, not {H}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Everything static about one launch."""

    tokens: int
    kv_heads: int
    heads: int
    """Of a KV head: its queries, its key, its value."""
    head_dim: int
    page_size: int
    with_kv: bool
    num_sms: int
    interpreted: bool
    config: TuningConfig

    @property
    def pairs_per_head(self) -> int:
        return self.head_dim // (2 * fragments.WIDE)

    @property
    def pairs_per_token(self) -> int:
        return self.kv_heads * self.heads * self.pairs_per_head

    @property
    def block(self) -> int:
        """Pairs that a warpgroup takes at a time."""
        return _mosaic.WARPGROUP * self.config.pairs


# Jitted so that every layer's call is the same traced kernel, which is lowered and compiled once; inlined because XLA cannot
# place a call within a call on a stream.
@functools.partial(jax.jit, static_argnames="plan", inline=True)
def _run(
    qkv: Array,
    cos: Array,
    sin: Array,
    slots: Array,
    k_pages: Array,
    v_pages: Array,
    rows: Array | int,
    *,
    plan: _Plan,
) -> tuple[Array, Array, Array, Array]:
    T, K, J, H = qkv.shape
    by_token = [(T * K * (J - 2), H), *[(T, K, 2, H)] * plan.with_kv]
    kernel: Any = pl.kernel(
        functools.partial(_append_kernel, plan=plan),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in by_token],
        mesh=plgpu.Mesh(
            grid=(plan.num_sms,),
            grid_names=("sm",),
            num_threads=plan.config.warpgroups,
            thread_name="wg",
            kernel_name="append_kv",
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        name="append_kv",
    )
    inputs = qkv.reshape(-1, H), cos, sin, slots, jnp.asarray(rows, jnp.int32).reshape(1)

    def run(references: Any) -> None:
        pages, results = references
        for reference, result in zip(results, kernel(*inputs, *pages), strict=True):
            reference[...] = result

    # Of what the results are before they are written nothing is left once the references are resolved.
    before = (k_pages, v_pages), [jnp.zeros(shape, jnp.bfloat16) for shape in by_token]
    pages, (q, *kv) = _mosaic.update(before, run, plan.interpreted)
    return q.reshape(T, K, J - 2, H), kv[0] if kv else jnp.zeros((T, K, 0, H), jnp.bfloat16), *pages


def _append_kernel(
    qkv_gmem: Any,  # [T * K * (G + 2), H]
    cos_gmem: Any,  # [T, H / 2]
    sin_gmem: Any,
    slots_gmem: Any,  # [T]
    rows_gmem: Any,  # [1]
    k_gmem: Any,  # [P, K, page_size, H]
    v_gmem: Any,
    q_gmem: Any,  # [T * K * G, H]
    *kv_gmem: Any,  # [T, K, 2, H], if wanted
    plan: _Plan,
) -> None:
    c, J, half = plan.config, plan.heads, plan.head_dim // 2
    load = functools.partial(fragments.wide_load, interpreted=plan.interpreted)
    store = functools.partial(fragments.wide_store, interpreted=plan.interpreted)
    layout = fragments.striped(plan.block)

    def fill(value: Any) -> Any:
        return fragments.filled((plan.block,), value, jnp.int32, layout, plan.interpreted)

    def divided(x: Any, by: int) -> tuple[Any, Any]:
        quotient = lax.div(x, fill(by))
        return quotient, x - quotient * by

    def move(block: Any) -> None:
        """The pairs of one block."""
        place = block * plan.block + fragments.counted((plan.block,), 0, layout, plan.interpreted)
        there = place < plan.tokens * plan.pairs_per_token
        row, part = divided(jnp.minimum(place, plan.tokens * plan.pairs_per_token - 1), plan.pairs_per_head)
        column = part * fragments.WIDE
        kv_row, head = divided(row, J)
        token, kv_head = divided(kv_row, plan.kv_heads)
        slot = fragments.take(slots_gmem, token, plan.interpreted)
        columns = column, column + half
        first, second = (load(qkv_gmem, row, x) for x in columns)
        cos, sin = load(cos_gmem, token, column), load(sin_gmem, token, column)
        as_it_is = list(zip(columns, (first, second), strict=True))
        first, second = first.astype(jnp.float32), second.astype(jnp.float32)
        turned = [x.astype(jnp.bfloat16) for x in (first * cos - second * sin, second * cos + first * sin)]
        rotated = list(zip(columns, turned, strict=True))
        page, offset = divided(jnp.maximum(slot, 0), plan.page_size)
        page = jnp.where((slot >= 0) & there, page, -1)
        store(q_gmem, [jnp.where((head < J - 2) & there, kv_row * (J - 2) + head, -1)], rotated)
        for number, (pages, x) in enumerate(((k_gmem, rotated), (v_gmem, as_it_is))):
            mine = head == J - 2 + number
            store(pages, [jnp.where(mine, page, -1), kv_head, offset], x)
            for kv in kv_gmem:
                store(kv, [jnp.where(mine & there, token, -1), kv_head, fill(number)], x)

    worker = lax.axis_index("wg") * plan.num_sms + lax.axis_index("sm")
    workers = plan.num_sms * c.warpgroups
    pairs = rows_gmem[0] * plan.pairs_per_token
    blocks = lax.div(pairs + (plan.block - 1), plan.block)

    # The first block without a look at how many there are, which comes from afar: at worst it is one of padding.
    @pl.when(worker * plan.block < plan.tokens * plan.pairs_per_token)
    def _() -> None:
        move(worker)

    lax.fori_loop(1, lax.div(blocks - worker + (workers - 1), workers), lambda i, _: move(worker + i * workers), None)

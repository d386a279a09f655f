"""Causal attention of ragged prompt chunks over paged KV, on exactly `num_sms` SMs (Pallas Mosaic GPU, Hopper).

A chunk's keys and values, and those of the prefix before it, are already in the cache. Queries of one KV head's group are packed:
row r of a tile is query r % G of token r // G, so every group size fills the 64 rows of wgmma with queries that share K and V.
Two warpgroups hold half a tile each and take turns on the tensor cores, one multiplying while the other is at its softmax, as in
FlashAttention-3 (Shah et al., 2024, section 3.1); a third copies K and V by TMA, page by page, and hands out the tiles.

Tiles of all rows of the batch and all KV heads are numbered row by row, head by head and from a chunk's last tokens to its
first, so that the long ones start first; CTA i takes every `num_sms`-th tile from i on, and finds it from `q_lens` on the device.

Limits: bfloat16; head sizes 64 and 128; at most 16 query heads a KV head; page sizes 16, 32, 64 and 128.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import _fragments as fragments
from pallas_kernels import _mosaic

PAGE_SIZES = (16, 32, 64, 128)
HEAD_SIZES = (64, 128)
MAX_GROUP = 16

_LOWEST = -1e30
_WORKERS = 2
_ORDER_SLOTS = 2
_STOP = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    rows: int = 64
    """Packed query rows of a warpgroup, a multiple of 64."""
    kv_tile: int = 128
    """Tokens of K and V in one step, a multiple of 64."""
    stages: int = 2
    """K tiles, and as many V tiles, that shared memory holds."""

    def __post_init__(self) -> None:
        if self.rows % 64 or self.kv_tile % 64:
            raise ValueError(f"{self}: rows and kv_tile are multiples of 64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Everything static about one launch."""

    tokens: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    num_sms: int
    interpreted: bool
    config: TuningConfig

    @property
    def tokens_per_worker(self) -> int:
        return self.config.rows // self.group

    @property
    def tokens_per_tile(self) -> int:
        return _WORKERS * self.tokens_per_worker

    @property
    def copy_rows(self) -> int:
        """Tokens of one TMA copy of K or V."""
        return min(self.page_size, self.config.kv_tile)

    @property
    def copies(self) -> int:
        return self.config.kv_tile // self.copy_rows


def prefill_attention(
    q: Float[Array, "T K G H"],
    k_pages: Float[Array, "P K page_size H"],
    v_pages: Float[Array, "P K page_size H"],
    block_tables: Int[Array, "S pages"],
    kv_lens: Int[Array, " S"],
    q_starts: Int[Array, " S"],
    q_lens: Int[Array, " S"],
    *,
    num_sms: int,
    config: TuningConfig | None = None,
) -> Float[Array, "T K G H"]:
    """Attention of `q_lens[s]` tokens from `q_starts[s]` on, the last tokens of a sequence of `kv_lens[s]`, for every row s.

    Query j of row s has position kv_lens[s] - q_lens[s] + j and sees the positions up to its own; scores are scaled by H^-1/2.
    Rows with q_len 0 cost nothing. Tokens that no row covers are left undefined. Every result is the same bits on every run and
    for every `num_sms`.

    Raises:
      UnsupportedDeviceError: the device is no Hopper GPU.
      ValueError: shapes do not fit each other, or `num_sms` is not between 1 and the device's SMs.
      NotImplementedError: dtype, head size, group or page size outside the limits in the module's docstring.
    """
    T, K, G, H = q.shape
    _check(q, k_pages, v_pages, block_tables, (kv_lens, q_starts, q_lens))
    device = _mosaic.require_hopper("prefill_attention", num_sms)
    if T * K * q_lens.shape[0] == 0:
        return jnp.zeros_like(q)
    plan = _Plan(
        tokens=T,
        kv_heads=K,
        group=G,
        head_dim=H,
        page_size=k_pages.shape[2],
        num_sms=num_sms,
        interpreted=device.interpreted,
        config=config or TuningConfig(),
    )
    flat = lambda pages: pages.reshape(-1, *pages.shape[2:])
    whole = jnp.pad(q_lens, (0, -q_lens.shape[0] % _mosaic.WARPGROUP))
    out = _launch(plan)(q.reshape(T, K * G, H), flat(k_pages), flat(v_pages), block_tables, kv_lens, q_starts, whole)
    return out.reshape(T, K, G, H)


def _check(q: Array, k_pages: Array, v_pages: Array, block_tables: Array, per_row: tuple[Array, ...]) -> None:
    _, K, G, H = q.shape
    if k_pages.shape != v_pages.shape or k_pages.shape[1] != K or k_pages.shape[3] != H:
        raise ValueError(f"{k_pages.shape=} and {v_pages.shape=} do not fit {q.shape=}")
    if any(x.shape != block_tables.shape[:1] for x in per_row):
        raise ValueError(f"{block_tables.shape=} does not fit the {[x.shape for x in per_row]} of kv_lens, q_starts and q_lens")
    if not q.dtype == k_pages.dtype == v_pages.dtype == jnp.bfloat16:
        raise NotImplementedError(f"prefill_attention is for bfloat16, not {q.dtype=}, {k_pages.dtype=}, {v_pages.dtype=}")
    if H not in HEAD_SIZES or k_pages.shape[2] not in PAGE_SIZES or not 1 <= G <= MAX_GROUP:
        raise NotImplementedError(
            f"prefill_attention has head sizes {HEAD_SIZES}, page sizes {PAGE_SIZES} and groups up to {MAX_GROUP}, "
            f"not head size {H}, page size {k_pages.shape[2]}, group {G}"
        )


def _launch(plan: _Plan) -> Any:
    c, H = plan.config, plan.head_dim
    ring = (c.stages, c.kv_tile, H)
    scratch = {
        # Queries as they lie in memory, and in the tiles that wgmma reads.
        "staged": plgpu.SMEM((_WORKERS, c.rows, H), jnp.bfloat16),
        "queries": _mosaic.swizzled_smem((_WORKERS, c.rows, H), jnp.bfloat16),
        "keys": _mosaic.swizzled_smem(ring, jnp.bfloat16),
        "values": _mosaic.swizzled_smem(ring, jnp.bfloat16),
        "orders": plgpu.SMEM((_ORDER_SLOTS, 5), jnp.int32),
        "ordered": plgpu.Barrier(num_barriers=_ORDER_SLOTS),
        "order_done": plgpu.Barrier(num_barriers=_ORDER_SLOTS, num_arrivals=_WORKERS),
        "staged_filled": plgpu.Barrier(num_barriers=_WORKERS, num_arrivals=plan.tokens_per_worker),
        "staged_freed": plgpu.Barrier(num_barriers=_WORKERS),
        "keys_filled": plgpu.Barrier(num_barriers=c.stages, num_arrivals=plan.copies),
        "keys_freed": plgpu.Barrier(num_barriers=c.stages, num_arrivals=_WORKERS),
        "values_filled": plgpu.Barrier(num_barriers=c.stages, num_arrivals=plan.copies),
        "values_freed": plgpu.Barrier(num_barriers=c.stages, num_arrivals=_WORKERS),
        "turns": plgpu.Barrier(num_barriers=_WORKERS),
    }

    def body(*refs: Any) -> None:
        pl.run_scoped(functools.partial(_prefill_kernel, *refs, plan=plan), collective_axes="wg", **scratch)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.tokens * plan.kv_heads * plan.group, H), jnp.bfloat16),
        grid=(plan.num_sms,),
        grid_names=("sm",),
        num_threads=_WORKERS + 1,
        thread_name="wg",
        kernel_name="prefill_attention",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )


def _prefill_kernel(
    q_gmem: Any,  # [T, K * G, H]
    k_gmem: Any,  # [P * K, page_size, H]
    v_gmem: Any,
    tables_gmem: Any,  # [S, pages]
    kv_lens_gmem: Any,  # [S]
    q_starts_gmem: Any,  # [S]
    q_lens_gmem: Any,  # [S rounded up to 128]
    out_gmem: Any,  # [T * K * G, H]
    *,
    plan: _Plan,
    **scratch: Any,
) -> None:
    wg = lax.axis_index("wg")

    @pl.when(wg == _WORKERS)
    def _feed() -> None:
        if not plan.interpreted:
            plgpu.set_max_registers(56, action="decrease")
        _hand_out_tiles(
            q_gmem, k_gmem, v_gmem, tables_gmem, kv_lens_gmem, q_starts_gmem, q_lens_gmem, plan=plan, **scratch
        )

    @pl.when(wg < _WORKERS)
    def _work() -> None:
        if not plan.interpreted:
            plgpu.set_max_registers(224, action="increase")
        _work_off_tiles(wg, out_gmem, plan=plan, **scratch)


def _hand_out_tiles(
    q_gmem: Any,
    k_gmem: Any,
    v_gmem: Any,
    tables_gmem: Any,
    kv_lens_gmem: Any,
    q_starts_gmem: Any,
    q_lens_gmem: Any,
    *,
    plan: _Plan,
    staged: Any,
    keys: Any,
    values: Any,
    orders: Any,
    ordered: Any,
    order_done: Any,
    staged_filled: Any,
    staged_freed: Any,
    keys_filled: Any,
    keys_freed: Any,
    values_filled: Any,
    values_freed: Any,
    **_: Any,
) -> None:
    c = plan.config
    sm = lax.axis_index("sm")
    padded = q_lens_gmem.shape[0]
    layout = plgpu.Layout.WG_STRIDED((padded,), vec_size=1)
    chunks = lambda q_len: lax.div(q_len + (plan.tokens_per_tile - 1), plan.tokens_per_tile)
    tiles_of_row = chunks(fragments.load(q_lens_gmem, layout, plan.interpreted)) * plan.kv_heads
    rows = fragments.counted((padded,), 0, layout, plan.interpreted)
    before = lambda row: jnp.where(rows < row, tiles_of_row, 0).sum()
    tiles = tiles_of_row.sum()

    def row_of(tile: Any) -> Any:
        def halve(_: Any, at: Any) -> Any:
            low, high = at
            middle = lax.div(low + high, 2)
            reached = before(middle) <= tile
            return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

        return lax.fori_loop(0, padded.bit_length(), halve, (jnp.int32(0), jnp.int32(padded)))[0]

    def give_order(i: Any, *fields: Any) -> None:
        slot = lax.rem(i, _ORDER_SLOTS)

        @pl.when(i >= _ORDER_SLOTS)
        def _() -> None:
            plgpu.barrier_wait(order_done.at[slot])

        for field, value in enumerate(fields):
            orders[slot, field] = value
        plgpu.barrier_arrive(ordered.at[slot])

    def load_queries(i: Any, first_token: Any, head: Any) -> None:
        for w in range(_WORKERS):

            @pl.when(i > 0)
            def _(w: int = w) -> None:
                plgpu.barrier_wait(staged_freed.at[w])

            def copy(j: Any, _: Any, w: int = w) -> None:
                # Behind the last token that token again; rows behind a chunk's end are computed along and dropped.
                token = jnp.minimum(first_token + w * plan.tokens_per_worker + j, plan.tokens - 1)
                plgpu.copy_gmem_to_smem(
                    q_gmem.at[token, pl.ds(head * plan.group, plan.group)],
                    staged.at[w, pl.ds(j * plan.group, plan.group)],
                    staged_filled.at[w],
                )

            lax.fori_loop(0, plan.tokens_per_worker, copy, None)

    def load_keys_and_values(row: Any, head: Any, last_page: Any, steps: Any, count: Any) -> None:
        def pages_of(step: Any) -> tuple[Any, ...]:
            # Behind the last page of the sequence, that page again: a page of no sequence must not be read.
            page = lax.div(step * c.kv_tile, plan.page_size)
            return tuple(tables_gmem[row, jnp.minimum(page + j, last_page)] for j in range(plan.copies))

        def one(step: Any, pages: Any) -> Any:
            following = pages_of(step + 1)
            offset = lax.rem(step * c.kv_tile, plan.page_size) if plan.page_size > c.kv_tile else 0
            number = count + step
            stage = lax.rem(number, c.stages)
            for src, dst, filled, freed in (
                (k_gmem, keys, keys_filled, keys_freed),
                (v_gmem, values, values_filled, values_freed),
            ):

                @pl.when(number >= c.stages)
                def _(freed: Any = freed) -> None:
                    plgpu.barrier_wait(freed.at[stage])

                for j in range(plan.copies):
                    plgpu.copy_gmem_to_smem(
                        src.at[pages[j] * plan.kv_heads + head, pl.ds(offset, plan.copy_rows)],
                        dst.at[stage, pl.ds(j * plan.copy_rows, plan.copy_rows)],
                        filled.at[stage],
                    )
            return following

        lax.fori_loop(0, steps, one, pages_of(0))

    def one_tile(i: Any, count: Any) -> Any:
        tile = sm + i * plan.num_sms
        row = row_of(tile)
        q_len, kv_len = q_lens_gmem[row], kv_lens_gmem[row]
        per_head = jnp.maximum(chunks(q_len), 1)
        number = tile - before(row)
        head = lax.div(number, per_head)
        # From the last tokens, which see the most, to the first.
        first = (per_head - 1 - lax.rem(number, per_head)) * plan.tokens_per_tile
        here = jnp.minimum(q_len - first, plan.tokens_per_tile)
        position = kv_len - q_len + first
        steps = lax.div(position + here + (c.kv_tile - 1), c.kv_tile)
        token = q_starts_gmem[row] + first
        give_order(i, here, token, position, head, steps)
        load_queries(i, token, head)
        load_keys_and_values(row, head, lax.div(kv_len - 1, plan.page_size), steps, count)
        return count + steps

    mine = lax.div(jnp.maximum(tiles - sm, 0) + (plan.num_sms - 1), plan.num_sms)
    count = lax.fori_loop(0, mine, one_tile, jnp.int32(0))
    give_order(mine, *[jnp.int32(_STOP)] * 5)
    # See the last release of every slot: a barrier must not be left with an unseen phase.
    for s in range(c.stages):

        @pl.when(s < count)
        def _(s: int = s) -> None:
            plgpu.barrier_wait(keys_freed.at[s])
            plgpu.barrier_wait(values_freed.at[s])

    for s in range(_ORDER_SLOTS):

        @pl.when(s <= mine)
        def _(s: int = s) -> None:
            plgpu.barrier_wait(order_done.at[s])

    @pl.when(mine > 0)
    def _() -> None:
        for w in range(_WORKERS):
            plgpu.barrier_wait(staged_freed.at[w])


def _work_off_tiles(
    wg: Any,
    out_gmem: Any,
    *,
    plan: _Plan,
    staged: Any,
    queries: Any,
    keys: Any,
    values: Any,
    orders: Any,
    ordered: Any,
    order_done: Any,
    staged_filled: Any,
    staged_freed: Any,
    keys_filled: Any,
    keys_freed: Any,
    values_filled: Any,
    values_freed: Any,
    turns: Any,
) -> None:
    c, M, H, interpreted = plan.config, plan.config.rows, plan.head_dim, plan.interpreted
    to_log2 = H**-0.5 * math.log2(math.e)
    fill = functools.partial(fragments.filled, interpreted=interpreted)
    row_number = fragments.counted((M,), 0, fragments.PER_ROW, interpreted)
    token_of_row = lax.div(row_number, jnp.full((M,), plan.group, jnp.int32))
    query = queries.at[wg]

    def along_rows(x: jax.Array, columns: int) -> jax.Array:
        return lax.broadcast_in_dim(x, (M, columns), [0])

    def softmax(scores: jax.Array, peak: jax.Array, total: jax.Array, seen: Any) -> tuple[jax.Array, ...]:
        """(weights, new peak, new total, factor that what was summed up before shrinks by)."""
        if seen is not None:
            token = fragments.counted((M, c.kv_tile), 1, fragments.ACCUMULATOR, interpreted)
            scores = jnp.where(token <= along_rows(seen, c.kv_tile), scores, _LOWEST)
        new_peak = jnp.maximum(peak, scores.max(axis=1) * to_log2)
        shrink = jnp.exp2(peak - new_peak)
        p = jnp.exp2(scores * to_log2 - along_rows(new_peak, c.kv_tile))
        return p.astype(jnp.bfloat16), new_peak, total * shrink + p.sum(axis=1), shrink

    def attend(here: Any, first_token: Any, first_position: Any, head: Any, steps: Any, count: Any) -> None:
        offset = wg * plan.tokens_per_worker
        # The last position that a row sees.
        position = token_of_row + (first_position + offset)

        def keys_of(i: Any) -> Any:
            stage = lax.rem(count + i, c.stages)
            plgpu.barrier_wait(keys_filled.at[stage])
            return keys.at[stage]

        def values_of(i: Any) -> Any:
            stage = lax.rem(count + i, c.stages)
            plgpu.barrier_wait(values_filled.at[stage])
            return values.at[stage]

        release_keys = lambda i: plgpu.barrier_arrive(keys_freed.at[lax.rem(count + i, c.stages)])
        release_values = lambda i: plgpu.barrier_arrive(values_freed.at[lax.rem(count + i, c.stages)])
        begin_turn = lambda: plgpu.barrier_wait(turns.at[wg])
        end_turn = lambda: plgpu.barrier_arrive(turns.at[1 - wg])

        def first_scores() -> jax.Array:
            if interpreted:
                begin_turn()
                scores = jnp.dot(query[...], keys_of(0)[...].T, preferred_element_type=jnp.float32)
                plgpu.commit_smem()
                end_turn()
                return scores

            def body(acc: Any) -> jax.Array:
                tile = keys_of(0)
                begin_turn()
                plgpu.wgmma(acc, query, tile.T)
                end_turn()
                return acc[...]

            return pl.run_scoped(body, plgpu.ACC((M, c.kv_tile), jnp.float32))

        def step(i: Any, carry: Any, *, masked: bool) -> Any:
            """Multiplies the weights of K tile i with its values while it makes those of tile i + 1."""
            out, weights, peak, total = carry
            seen = position - (i + 1) * c.kv_tile if masked else None
            if interpreted:
                begin_turn()
                scores = jnp.dot(query[...], keys_of(i + 1)[...].T, preferred_element_type=jnp.float32)
                out = out + jnp.dot(weights, values_of(i)[...], preferred_element_type=jnp.float32)
                plgpu.commit_smem()
                end_turn()
                release_keys(i + 1)
                release_values(i)
                weights, peak, total, shrink = softmax(scores, peak, total, seen)
                return out * along_rows(shrink, H), weights, peak, total

            def body(score_acc: Any, out_acc: Any) -> Any:
                out_acc[...] = out
                value_tile, key_tile = values_of(i), keys_of(i + 1)
                begin_turn()
                plgpu.wgmma(out_acc, weights, value_tile)
                plgpu.wgmma(score_acc, query, key_tile.T)
                end_turn()
                scores = score_acc[...]
                release_keys(i + 1)
                new = softmax(scores, peak, total, seen)
                multiplied = out_acc[...]
                release_values(i)
                return multiplied, *new

            multiplied, new_weights, peak, total, shrink = pl.run_scoped(
                body, plgpu.ACC((M, c.kv_tile), jnp.float32), plgpu.ACC((M, H), jnp.float32)
            )
            return multiplied * along_rows(shrink, H), new_weights, peak, total

        def last_step(out: jax.Array, weights: jax.Array) -> jax.Array:
            if interpreted:
                out = out + jnp.dot(weights, values_of(steps - 1)[...], preferred_element_type=jnp.float32)
                plgpu.commit_smem()
                return out

            def body(acc: Any) -> None:
                plgpu.wgmma(acc, weights, values_of(steps - 1))

            return pl.run_state(body)(plgpu.ACC.init(out))

        scores = first_scores()
        release_keys(0)
        weights, peak, total, _ = softmax(
            scores, fill((M,), _LOWEST, jnp.float32, fragments.PER_ROW), fill((M,), 0.0, jnp.float32, fragments.PER_ROW), position
        )
        carry = (fill((M, H), 0.0, jnp.float32, fragments.ACCUMULATOR), weights, peak, total)
        whole = jnp.clip(lax.div(first_position + offset + 1, c.kv_tile) - 1, 0, steps - 1)
        carry = lax.fori_loop(0, whole, functools.partial(step, masked=False), carry)
        out, weights, _, total = lax.fori_loop(whole, steps - 1, functools.partial(step, masked=True), carry)
        out = last_step(out, weights)
        release_values(steps - 1)
        mine = (token_of_row + offset < here) & (row_number < plan.tokens_per_worker * plan.group)
        token = token_of_row + (first_token + offset)
        query_head = row_number - token_of_row * plan.group + head * plan.group
        rows = jnp.where(mine, token * (plan.kv_heads * plan.group) + query_head, -1)
        fragments.scatter(out_gmem, rows, out / along_rows(total, H), 0, interpreted)

    def one_order(state: Any) -> Any:
        t, count, _ = state
        slot = lax.rem(t, _ORDER_SLOTS)
        plgpu.barrier_wait(ordered.at[slot])
        here, first_token, first_position, head, steps = (orders[slot, field] for field in range(5))
        plgpu.barrier_arrive(order_done.at[slot])

        @pl.when(here != _STOP)
        def _() -> None:
            plgpu.barrier_wait(staged_filled.at[wg])
            query[...] = fragments.load(staged.at[wg], fragments.ACCUMULATOR, interpreted)
            plgpu.commit_smem()
            plgpu.barrier_arrive(staged_freed.at[wg])
            attend(here, first_token, first_position, head, steps, count)

        return t + 1, count + steps, here != _STOP

    # The first turn is the first warpgroup's; at the end one turn is left over for it.
    @pl.when(wg == 1)
    def _() -> None:
        plgpu.barrier_arrive(turns.at[0])

    lax.while_loop(lambda state: state[2], one_order, (jnp.int32(0), jnp.int32(0), jnp.bool_(True)))

    @pl.when(wg == 0)
    def _() -> None:
        plgpu.barrier_wait(turns.at[0])

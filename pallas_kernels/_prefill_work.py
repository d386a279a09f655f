"""The arithmetic of prefill_attention: online softmax over the key and value tiles of one tile of queries."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _fragments as fragments
from pallas_kernels._prefill_plan import ORDER_SLOTS, STOP, Plan

_LOWEST = -1e30


def work_off_tiles(
    wg: Any,
    q_gmem: Any,
    out_gmem: Any,
    *,
    plan: Plan,
    queries: Any,
    keys: Any,
    values: Any,
    orders: Any,
    ordered: Any,
    order_done: Any,
    keys_filled: Any,
    keys_freed: Any,
    values_filled: Any,
    values_freed: Any,
    turns: Any,
    **_: Any,
) -> None:
    c, M, H, interpreted = plan.config, plan.config.rows, plan.head_dim, plan.interpreted
    to_log2 = H**-0.5 * math.log2(math.e)
    fill = functools.partial(fragments.filled, interpreted=interpreted)
    row_number = fragments.counted((M,), 0, fragments.PER_ROW, interpreted)
    token_of_row = lax.div(row_number, jnp.full((M,), plan.group, jnp.int32))
    query_head = row_number - token_of_row * plan.group
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

        def release(freed: Any, i: Any) -> None:
            plgpu.barrier_arrive(freed.at[lax.rem(count + i, c.stages)])

        def begin_turn() -> None:
            plgpu.barrier_wait(turns.at[wg])

        def end_turn() -> None:
            plgpu.barrier_arrive(turns.at[1 - wg])

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

            return pl.run_scoped(body, plgpu.WGMMAAccumulatorRef((M, c.kv_tile), jnp.float32))

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
                release(keys_freed, i + 1)
                release(values_freed, i)
                weights, peak, total, shrink = softmax(scores, peak, total, seen)
                return out * along_rows(shrink, H), weights, peak, total

            def body(score_acc: Any, out_acc: Any) -> Any:
                out_acc[...] = out
                value_tile, key_tile = values_of(i), keys_of(i + 1)
                begin_turn()
                plgpu.wgmma(out_acc, weights, value_tile)
                plgpu.wgmma(score_acc, query, key_tile.T)
                scores = score_acc[...]
                end_turn()
                release(keys_freed, i + 1)
                new = softmax(scores, peak, total, seen)
                multiplied = out_acc[...]
                release(values_freed, i)
                return multiplied, *new

            multiplied, new_weights, peak, total, shrink = pl.run_scoped(
                body, plgpu.WGMMAAccumulatorRef((M, c.kv_tile), jnp.float32), plgpu.WGMMAAccumulatorRef((M, H), jnp.float32)
            )
            return multiplied * along_rows(shrink, H), new_weights, peak, total

        def last_step(out: jax.Array, weights: jax.Array) -> jax.Array:
            if interpreted:
                out = out + jnp.dot(weights, values_of(steps - 1)[...], preferred_element_type=jnp.float32)
                plgpu.commit_smem()
                return out

            def body(acc: Any) -> None:
                plgpu.wgmma(acc, weights, values_of(steps - 1))

            return pl.run_state(body)(plgpu.WGMMAAccumulatorRef.init(out))  # pyright: ignore[reportReturnType]

        # Rows behind the chunk's end are computed along, with some token's queries, and dropped.
        token = jnp.minimum(token_of_row + (first_token + offset), plan.tokens - 1)
        rows = token * (plan.kv_heads * plan.group) + query_head + head * plan.group
        query[...] = fragments.gather(q_gmem, rows, interpreted)
        plgpu.commit_smem()
        scores = first_scores()
        release(keys_freed, 0)
        no_peak, nothing = (fill((M,), x, jnp.float32, fragments.PER_ROW) for x in (_LOWEST, 0.0))
        weights, peak, total, _ = softmax(scores, no_peak, nothing, position)
        carry = (fill((M, H), 0.0, jnp.float32, fragments.ACCUMULATOR), weights, peak, total)
        whole = jnp.clip(lax.div(first_position + offset + 1, c.kv_tile) - 1, 0, steps - 1)
        carry = lax.fori_loop(0, whole, functools.partial(step, masked=False), carry)
        out, weights, _, total = lax.fori_loop(whole, steps - 1, functools.partial(step, masked=True), carry)
        out = last_step(out, weights)
        release(values_freed, steps - 1)
        mine = (token_of_row + offset < here) & (row_number < plan.tokens_per_worker * plan.group)
        fragments.scatter(out_gmem, jnp.where(mine, rows, -1), out / along_rows(total, H), 0, interpreted)

    def one_order(state: Any) -> Any:
        t, count, _ = state
        slot = lax.rem(t, ORDER_SLOTS)
        plgpu.barrier_wait(ordered.at[slot])
        here, first_token, first_position, head, steps = (orders[slot, field] for field in range(5))
        plgpu.barrier_arrive(order_done.at[slot])

        @pl.when(here != STOP)
        def _() -> None:
            attend(here, first_token, first_position, head, steps, count)

        return t + 1, count + steps, here != STOP

    # The first turn is the first warpgroup's; at the end one turn is left over for it.
    @pl.when(wg == 1)
    def _() -> None:
        plgpu.barrier_arrive(turns.at[0])

    lax.while_loop(lambda state: state[2], one_order, (jnp.int32(0), jnp.int32(0), jnp.bool_(True)))

    @pl.when(wg == 0)
    def _() -> None:
        plgpu.barrier_wait(turns.at[0])

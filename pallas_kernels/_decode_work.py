"""The arithmetic of decode_attention: the workers of the main kernel, and the kernel that adds up the parts of cut items."""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _fragments as fragments
from pallas_kernels._decode_plan import QUERY_SLOTS, STOP, TILE, Plan, tiles_of

_COLUMNS = fragments.COLUMNS
_LOWEST, _HIGHEST = -1e30, 1e30
_PARTS_AT_ONCE = 8


def work_off_orders(
    wg: Any,
    out_gmem: Any,
    maxima_gmem: Any,
    sums_gmem: Any,
    parts_gmem: Any,
    *,
    plan: Plan,
    queries: Any,
    ring: Any,
    weights: Any,
    column_scratch: Any,
    orders: Any,
    ordered: Any,
    order_done: Any,
    filled: Any,
    freed: Any,
    **_: Any,
) -> None:
    """One worker: online softmax over the tiles of each order, four scores a thread and tile."""
    c, H, interpreted = plan.config, plan.head_dim, plan.interpreted
    to_log2 = H**-0.5 * math.log2(math.e)
    fill = functools.partial(fragments.filled, interpreted=interpreted)

    def attend(slot: Any, item: Any, tokens: Any, count: Any) -> tuple[Any, Any, Any]:
        """(maximum, sum, unscaled output) of `tokens` tokens whose tiles come through the ring from slot counter `count`."""
        query = queries.at[wg, slot]

        def await_tile(number: Any) -> Any:
            place = lax.rem(number, c.slots)
            plgpu.barrier_wait(filled.at[wg * c.slots + place])
            return ring.at[wg, place]

        def release(number: Any) -> None:
            plgpu.barrier_arrive(freed.at[wg * c.slots + lax.rem(number, c.slots)])

        def step(number: Any, width: int, valid: Any, carry: Any) -> Any:
            """`width` tiles of K from slot counter `number`, then as many of V; `valid` tokens are real, None: all."""
            peak, total, out = carry

            scores = fragments.products(
                [[lambda j=j: (await_tile(number + j), query)] for j in range(width)],
                (TILE, _COLUMNS),
                first_transposed=False,
                release=lambda j: release(number + j),
                interpreted=interpreted,
            )
            if valid is not None:
                token = fragments.counted((TILE, _COLUMNS), 0, fragments.ACCUMULATOR, interpreted)
                scores = [jnp.where(token < valid, s, _LOWEST) for s in scores]
            highest = fragments.reduce_columns(
                functools.reduce(jnp.maximum, scores), column_scratch.at[wg, 0], "max", interpreted
            )
            new_peak = jnp.maximum(peak, highest * to_log2)
            shrink = jnp.exp2(peak - new_peak)
            shift = fragments.across_rows(new_peak, TILE)
            p = [jnp.exp2(s * to_log2 - shift) for s in scores]
            total = total * fragments.across_rows(shrink, TILE) + functools.reduce(jnp.add, p)
            for j, x in enumerate(p):
                fragments.store_transposed(weights.at[wg, j], x.astype(jnp.bfloat16), interpreted)
            plgpu.commit_smem()

            (gain,) = fragments.products(
                [[lambda j=j: (await_tile(number + width + j), weights.at[wg, j]) for j in range(width)]],
                (H, _COLUMNS),
                first_transposed=True,
                release=lambda j: release(number + width + j),
                interpreted=interpreted,
            )
            return new_peak, total, out * fragments.across_rows(shrink, H) + gain

        # A peak that no score reaches: the weights of columns that belong to other heads stay 0, which saves power.
        carry = (
            jnp.where(_own_columns(item, plan)[1], _LOWEST, _HIGHEST),
            fill((TILE, _COLUMNS), 0.0, jnp.float32, fragments.ACCUMULATOR),
            fill((H, _COLUMNS), 0.0, jnp.float32, fragments.ACCUMULATOR),
        )
        width = c.tiles_per_step
        steps = lax.div(tokens, TILE * width)
        carry = lax.fori_loop(0, steps, lambda i, x: step(count + 2 * width * i, width, None, x), carry)
        carry = lax.fori_loop(steps * width, tiles_of(tokens), lambda i, x: step(count + 2 * i, 1, tokens - i * TILE, x), carry)
        peak, total, out = carry
        return peak, fragments.reduce_columns(total, column_scratch.at[wg, 1], "add", interpreted), out

    def one_order(state: Any) -> Any:
        t, count, _ = state
        slot = lax.rem(t, QUERY_SLOTS)
        plgpu.barrier_wait(ordered.at[wg * QUERY_SLOTS + slot])
        tokens, item, destination = (orders[wg, slot, field] for field in range(3))

        @pl.when(tokens != STOP)
        def _() -> None:
            peak, total, out = attend(slot, item, tokens, count)

            @pl.when(destination < 0)
            def _() -> None:
                _store_output(out_gmem, item, out / fragments.across_rows(total, H), plan)

            @pl.when(destination >= 0)
            def _() -> None:
                maxima_gmem.at[destination][...] = peak
                sums_gmem.at[destination][...] = total
                parts_gmem.at[destination][...] = out

        plgpu.barrier_arrive(order_done.at[wg * QUERY_SLOTS + slot])
        return t + 1, count + 2 * tiles_of(tokens), tokens != STOP

    lax.while_loop(lambda state: state[2], one_order, (jnp.int32(0), jnp.int32(0), jnp.bool_(True)))


def _own_columns(item: Any, plan: Plan) -> tuple[Any, Any]:
    """(which of an item's query for every column, whether the column is the item's at all)."""
    column = fragments.counted((_COLUMNS,), 0, fragments.PER_COLUMN, plan.interpreted)
    query = column - lax.rem(item * plan.columns_per_head, _COLUMNS)
    return query, (query >= 0) & (query < plan.group)


def _store_output(out_gmem: Any, item: Any, out: Any, plan: Plan) -> None:
    """The columns of `item`'s queries to its rows of the result."""
    query, own = _own_columns(item, plan)
    fragments.scatter(out_gmem, jnp.where(own, item * plan.group + query, -1), out, 1, plan.interpreted)


def combine_parts(
    lens_gmem: Any, splits_gmem: Any, maxima_gmem: Any, sums_gmem: Any, parts_gmem: Any, out_gmem: Any, *, plan: Plan
) -> None:
    """Adds up the parts of items that were cut, in the order of their workers; zeros for rows without tokens."""
    if not plan.interpreted:
        plgpu.griddepcontrol_wait()  # launched early, to hide the launch
    H, interpreted = plan.head_dim, plan.interpreted
    fill = functools.partial(fragments.filled, interpreted=interpreted)
    worker = lax.axis_index("sm") * plan.config.workers + lax.axis_index("wg")
    item, last = splits_gmem[worker, 0], splits_gmem[worker, 1]

    def part(i: Any) -> tuple[Any, Any, Any]:
        peak, total = (fragments.load(ref.at[i], fragments.PER_COLUMN, interpreted) for ref in (maxima_gmem, sums_gmem))
        return peak, total, fragments.load(parts_gmem.at[i], fragments.ACCUMULATOR, interpreted)

    @pl.when(item >= 0)
    def _() -> None:
        def add(i: Any, carry: Any) -> Any:
            """The parts of the next few workers; behind the last one its part again, with weight 0."""
            peak, total, out = carry
            first = worker + 1 + i * _PARTS_AT_ONCE
            more = []
            for j in range(_PARTS_AT_ONCE):
                m, s, o = part(2 * jnp.minimum(first + j, last))
                more.append((m + jnp.where(first + j <= last, 0.0, _LOWEST), s, o))
            new_peak = functools.reduce(jnp.maximum, [m for m, _, _ in more], peak)
            shrink = jnp.exp2(peak - new_peak)
            total, out = total * shrink, out * fragments.across_rows(shrink, H)
            for m, s, o in more:
                weight = jnp.exp2(m - new_peak)
                total, out = total + s * weight, out + o * fragments.across_rows(weight, H)
            return new_peak, total, out

        rounds = lax.div(last - worker + (_PARTS_AT_ONCE - 1), _PARTS_AT_ONCE)
        _, total, out = lax.fori_loop(0, rounds, add, part(2 * worker + 1))
        _store_output(out_gmem, item, out / fragments.across_rows(total, H), plan)

    def clear(i: Any, _: Any) -> None:
        row = worker + i * plan.num_workers

        @pl.when(lens_gmem[row] == 0)
        def _() -> None:
            zeros = fill((H, _COLUMNS), 0.0, jnp.float32, fragments.ACCUMULATOR)
            lax.fori_loop(0, plan.kv_heads, lambda h, _: _store_output(out_gmem, row * plan.kv_heads + h, zeros, plan), None)

    lax.fori_loop(0, lax.div(plan.rows - worker + plan.num_workers - 1, plan.num_workers), clear, None)

"""The feeding warpgroup of decode_attention: divides the work, gives orders and keeps the workers' rings full."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _fragments as fragments
from pallas_kernels import _mosaic
from pallas_kernels._decode_plan import QUERY_SLOTS, STOP, TILE, Plan, item_cost, tiles_of


def feed_rings(
    sm: Any,
    queries_gmem: Any,
    k_gmem: Any,
    v_gmem: Any,
    tables_gmem: Any,
    lens_gmem: Any,
    splits_gmem: Any,
    *,
    plan: Plan,
    queries: Any,
    ring: Any,
    scan_scratch: Any,
    orders: Any,
    ordered: Any,
    order_done: Any,
    filled: Any,
    freed: Any,
    **_: Any,
) -> None:
    """Divides the line of tiles; warp w then writes orders for worker w of this CTA and copies their tiles to its ring.

    `sm` is the CTA's number among the `plan.num_sms` that share the line.
    """
    c = plan.config
    share, total, first_row, last_row, first_start = _find_place(sm, lens_gmem, scan_scratch, plan)

    def feed(w: Any) -> None:
        worker = sm * c.workers + w
        begin = jnp.minimum(worker * share, total)
        end = jnp.minimum(begin + share, total)

        def load_tile(src: Any, page: Any, head: Any, offset: Any, count: Any) -> None:
            slot = lax.rem(count, c.slots)

            @pl.when(count >= c.slots)
            def _() -> None:
                plgpu.barrier_wait(freed.at[w * c.slots + slot])

            rows = TILE // plan.pages_per_tile
            for i in range(plan.pages_per_tile):
                plgpu.copy_gmem_to_smem(
                    src.at[page[i] * plan.kv_heads + head, pl.ds(offset, rows)],
                    ring.at[w, slot, pl.ds(i * rows, rows)],
                    filled.at[w * c.slots + slot],
                )

        def entries(row: Any, tile: Any, width: int) -> list[list[Any]]:
            """The table's entries for `width` tiles. They may lie behind a row's last page, see `pages_of`."""
            first = [lax.div((tile + j) * TILE, plan.page_size) for j in range(width)]
            last = tables_gmem.shape[1] - 1
            return [[tables_gmem[row, jnp.minimum(f + i, last)] for i in range(plan.pages_per_tile)] for f in first]

        def pages_of(entry: list[Any], tile: Any, last_page: Any) -> list[Any]:
            # Behind the last page of the row, the tile's first page again: a page of no sequence must not be read.
            page = lax.div(tile * TILE, plan.page_size)
            return [jnp.where(page + i <= last_page, e, entry[0]) for i, e in enumerate(entry)]

        def loadtiles_of(row: Any, head: Any, first: Any, tokens: Any, count: Any, ready: Any) -> None:
            """Loads the tiles of an order in the steps in which the worker takes them; `ready` are the first step's entries."""
            last_page = lax.div(first * TILE + tokens - 1, plan.page_size)

            def steps(begin: Any, tiles: Any, width: int, count: Any, ready: Any) -> tuple[Any, Any]:
                """Loads `tiles` // width steps of `width` tiles; table entries are read one step ahead."""
                number = lax.div(tiles, width)

                def one(i: Any, ready: Any) -> Any:
                    tile = begin + i * width
                    following = entries(row, tile + width, width)
                    for src, behind in ((k_gmem, 0), (v_gmem, width)):
                        for j in range(width):
                            offset = lax.rem((tile + j) * TILE, plan.page_size) if plan.page_size > TILE else 0
                            pages = pages_of(ready[j], tile + j, last_page)
                            load_tile(src, pages, head, offset, count + 2 * i * width + behind + j)
                    return following

                return number * width, lax.fori_loop(0, number, one, ready)

            whole, ready = steps(first, lax.div(tokens, TILE), c.tiles_per_step, count, ready)
            steps(first + whole, tiles_of(tokens) - whole, 1, count + 2 * whole, ready[:1])

        def give_order(t: Any, item: Any, tokens: Any, destination: Any) -> None:
            slot = w * QUERY_SLOTS + lax.rem(t, QUERY_SLOTS)

            @pl.when(t >= QUERY_SLOTS)
            def _() -> None:
                plgpu.barrier_wait(order_done.at[slot])

            for field, value in enumerate((tokens, item, destination)):
                orders[w, lax.rem(t, QUERY_SLOTS), field] = value
            plgpu.barrier_arrive(ordered.at[slot])
            plgpu.copy_gmem_to_smem(
                queries_gmem.at[lax.div(item * plan.columns_per_head, fragments.COLUMNS)],
                queries.at[w, lax.rem(t, QUERY_SLOTS)],
                ordered.at[slot],
            )

        def one_item(head: Any, state: Any, *, row: Any, row_start: Any) -> Any:
            t, count, split, split_end, _, ready = state
            kv_len = lens_gmem[row]
            tiles = tiles_of(kv_len)
            cost = tiles + c.item_overhead
            item, item_start = row * plan.kv_heads + head, row_start + head * cost
            # This worker's tiles of the item. The overhead comes before the first tile.
            first = jnp.maximum(begin - item_start - c.item_overhead, 0)
            behind = jnp.clip(end - item_start - c.item_overhead, 0, tiles)
            busy, starts = behind > first, first == 0
            destination = jnp.where(starts & (behind == tiles), -1, 2 * worker + starts.astype(jnp.int32))
            tokens = jnp.minimum(kv_len, behind * TILE) - first * TILE
            leads = busy & starts & (behind < tiles)
            split = jnp.where(leads, item, split)
            split_end = jnp.where(leads, lax.div(item_start + cost - 1, share), split_end)

            # Table entries of the next item, which come from afar: asked for before this item's tiles are copied.
            next_row = jnp.minimum(row + (head + 1 == plan.kv_heads).astype(jnp.int32), plan.rows - 1)
            following = entries(next_row, 0, c.tiles_per_step)

            @pl.when(busy)
            def _() -> None:
                give_order(t, item, tokens, destination)
                loadtiles_of(row, head, first, tokens, count, ready)

            grown = busy.astype(jnp.int32)
            return t + grown, count + 2 * grown * (behind - first), split, split_end, next_row, following

        def one_row(row: Any, state: Any) -> Any:
            row_start, *state = state
            cost = item_cost(lens_gmem[row], plan)
            divisor = jnp.maximum(cost, 1)
            first_head = lax.div(jnp.maximum(begin - row_start, 0), divisor)
            behind = lax.div(jnp.clip(end - row_start, 0, cost * plan.kv_heads) + divisor - 1, divisor)
            *state, ready_row, ready = state
            skipped = jnp.maximum(begin - row_start - first_head * cost - c.item_overhead, 0)
            ready = lax.cond(ready_row == row, lambda: ready, lambda: entries(row, skipped, c.tiles_per_step))
            one = functools.partial(one_item, row=row, row_start=row_start)
            return row_start + cost * plan.kv_heads, *lax.fori_loop(first_head, behind, one, (*state, row, ready))

        zero = jnp.int32(0)
        nothing = [[zero] * plan.pages_per_tile] * c.tiles_per_step
        none = jnp.int32(-1)
        _, t, count, split, split_end, _, _ = lax.fori_loop(
            first_row, last_row + 1, one_row, (first_start, zero, zero, none, zero, none, nothing)
        )
        give_order(t, zero, jnp.int32(STOP), zero)
        splits_gmem[worker, 0] = split
        splits_gmem[worker, 1] = split_end
        # See the last release of every slot: a barrier must not be left with an unseen phase.
        for s in range(c.slots):

            @pl.when(s < count)
            def _(s: int = s) -> None:
                plgpu.barrier_wait(freed.at[w * c.slots + s])

        for s in range(QUERY_SLOTS):

            @pl.when(s <= t)
            def _(s: int = s) -> None:
                plgpu.barrier_wait(order_done.at[w * QUERY_SLOTS + s])

    _mosaic.for_each_warp(feed, c.workers, plan.interpreted)


def _find_place(sm: Any, lens_gmem: Any, scan_scratch: Any, plan: Plan) -> tuple[Any, Any, Any, Any, Any]:
    """(cost of a worker's stretch, cost of all, this CTA's first and last row, position where the first of them starts)."""
    padded = lens_gmem.shape[0]
    layout = fragments.striped(padded)
    costs = item_cost(fragments.load(lens_gmem, layout, plan.interpreted), plan) * plan.kv_heads
    starts = fragments.exclusive_sums(costs, scan_scratch, plan.interpreted)
    rows = fragments.counted((padded,), 0, layout, plan.interpreted)
    total = costs.sum()
    share = jnp.maximum(lax.div(total + (plan.num_workers - 1), plan.num_workers), 1)
    begin = jnp.minimum(sm * plan.config.workers * share, total)
    end = jnp.minimum(begin + plan.config.workers * share, total)
    # The last row that starts at or before a position holds it: unused rows, which take no room, come before it.
    first_row, last_row = (jnp.where(starts <= position, rows, 0).max() for position in (begin, end - 1))
    first_start = jnp.where(starts <= begin, starts, 0).max()
    return share, total, first_row, last_row, first_start

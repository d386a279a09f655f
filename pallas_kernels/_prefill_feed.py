"""The feeding warpgroup of prefill_attention: hands out tiles and copies their keys and values to shared memory."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _fragments as fragments
from pallas_kernels import _mosaic
from pallas_kernels._prefill_plan import ORDER_SLOTS, STOP, Plan


def hand_out_tiles(
    k_gmem: Any,
    v_gmem: Any,
    tables_gmem: Any,
    kv_lens_gmem: Any,
    q_starts_gmem: Any,
    q_lens_gmem: Any,
    *,
    plan: Plan,
    keys: Any,
    values: Any,
    orders: Any,
    ordered: Any,
    order_done: Any,
    keys_filled: Any,
    keys_freed: Any,
    values_filled: Any,
    values_freed: Any,
    **_: Any,
) -> None:
    c = plan.config
    sm = lax.axis_index("sm")
    padded = q_lens_gmem.shape[0]
    layout = fragments.striped(padded)

    def chunks(q_len: Any) -> Any:
        return lax.div(q_len + (plan.tokens_per_tile - 1), plan.tokens_per_tile)

    tiles_of_row = chunks(fragments.load(q_lens_gmem, layout, plan.interpreted)) * plan.kv_heads
    scratch = orders.at[pl.ds(ORDER_SLOTS, padded // _mosaic.WARPGROUP)]
    starts = fragments.exclusive_sums(tiles_of_row, scratch, plan.interpreted)
    rows = fragments.counted((padded,), 0, layout, plan.interpreted)
    tiles = tiles_of_row.sum()

    def place(i: Any) -> Any:
        """This CTA's tile of round i: rounds run forth and back, as tiles get shorter along the way."""
        return i * plan.num_sms + jnp.where(lax.rem(i, 2) == 1, plan.num_sms - 1 - sm, sm)

    def give_order(i: Any, *fields: Any) -> None:
        slot = lax.rem(i, ORDER_SLOTS)

        @pl.when(i >= ORDER_SLOTS)
        def _() -> None:
            plgpu.barrier_wait(order_done.at[slot])

        for field, value in enumerate(fields):
            orders[slot, field] = value
        plgpu.barrier_arrive(ordered.at[slot])

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
        tile = place(i)
        # The last row that starts at or before the tile holds it: rows without queries, which have no tiles, come before it.
        row = jnp.where(starts <= tile, rows, 0).max()
        number = tile - jnp.where(starts <= tile, starts, 0).max()
        q_len, kv_len = q_lens_gmem[row], kv_lens_gmem[row]
        head = lax.rem(number, plan.kv_heads)
        # From the last tokens, which see the most, to the first.
        first = (chunks(q_len) - 1 - lax.div(number, plan.kv_heads)) * plan.tokens_per_tile
        here = jnp.minimum(q_len - first, plan.tokens_per_tile)
        position = kv_len - q_len + first
        steps = lax.div(position + here + (c.kv_tile - 1), c.kv_tile)
        token = q_starts_gmem[row] + first
        give_order(i, here, token, position, head, steps)
        load_keys_and_values(row, head, lax.div(kv_len - 1, plan.page_size), steps, count)
        return count + steps

    rounds = lax.div(tiles, plan.num_sms)
    mine = rounds + (place(rounds) < tiles).astype(jnp.int32)
    count = lax.fori_loop(0, mine, one_tile, jnp.int32(0))
    give_order(mine, *[jnp.int32(STOP)] * 5)
    # See the last release of every slot: a barrier must not be left with an unseen phase.
    for s in range(c.stages):

        @pl.when(s < count)
        def _(s: int = s) -> None:
            plgpu.barrier_wait(keys_freed.at[s])
            plgpu.barrier_wait(values_freed.at[s])

    for s in range(ORDER_SLOTS):

        @pl.when(s <= mine)
        def _(s: int = s) -> None:
            plgpu.barrier_wait(order_done.at[s])

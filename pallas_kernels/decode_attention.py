"""Attention of one query token per row over paged KV, on exactly `num_sms` SMs (Pallas Mosaic GPU, Hopper).

*Shape of the arithmetic.* A KV head has at most eight queries, far fewer than the 64 rows that a wgmma needs. So the tokens of
the cache are the rows and the queries the columns: S^T = K Q^T is [64 tokens, 8] and O^T = V^T P^T is [H, 8]. Every byte of K and
V is read once from device memory and once from shared memory, and the softmax keeps four scores a thread in place of 32.

*Work.* The cache of a (row, KV head) pair, an item, is cut into tiles of 64 tokens. All items laid end to end make a line of
tiles, and every compute warpgroup on the chip, a worker, gets an equal stretch of that line: balance is by tokens, whatever the
lengths, and one long sequence is spread over all SMs. A worker finds its place from `kv_lens` on the device. Where a border
cuts an item, the workers leave partial results (maximum, sum, unscaled output) and `_combine_kernel` adds them up in the order of
the workers, so the result does not depend on timing.

*Feed.* The fourth warpgroup does no arithmetic: each of its warps keeps the ring of one worker full with TMA copies, K and V
tiles in turn, a tile being one page, several, or part of one. The rings hold about 200 KB, because HBM answers so late
that each SM must have that much under way to draw its share from few SMs.

Limits: bfloat16; head sizes 64 and 128; at most 8 query heads a KV head; page sizes 16, 32, 64 and 128.
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

TILE = 64
"""Tokens of a tile: the rows of one wgmma."""

PAGE_SIZES = (16, 32, 64, 128)
HEAD_SIZES = (64, 128)

_COLUMNS = fragments.COLUMNS
_LOWEST = -1e30
_QUERY_SLOTS = 2
_STOP = 0
_PARTS_AT_ONCE = 4
_PDL = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    workers: int = 3
    """Compute warpgroups of a CTA; 1 to 4."""
    tiles_per_step: int = 2
    """Tiles under one softmax step: more of them share its reductions, fewer leave room for small rings."""
    slots: int = 4
    """Tiles of K or V that a worker's ring holds; at least 2 * tiles_per_step."""
    item_overhead: int = 1
    """What an item costs beside its tiles, in tiles, when work is divided."""

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= fragments.WARPS:
            raise ValueError(f"workers={self.workers} is not between 1 and {fragments.WARPS}: each has one feeding warp")
        if self.slots < 2 * self.tiles_per_step:
            raise ValueError(f"slots={self.slots} hold no whole step of 2 * {self.tiles_per_step} tiles")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """Everything static about one launch."""

    rows: int
    kv_heads: int
    group: int
    columns_per_head: int
    """Columns from one head's first query to the next head's in the query tiles; `group` rounded up to a power of two."""
    head_dim: int
    page_size: int
    num_sms: int
    interpreted: bool
    config: TuningConfig

    @property
    def num_workers(self) -> int:
        return self.num_sms * self.config.workers

    @property
    def pages_per_tile(self) -> int:
        return max(1, TILE // self.page_size)


def decode_attention(
    q: Float[Array, "B K G H"],
    k_pages: Float[Array, "P K page_size H"],
    v_pages: Float[Array, "P K page_size H"],
    block_tables: Int[Array, "B pages"],
    kv_lens: Int[Array, " B"],
    *,
    num_sms: int,
    config: TuningConfig | None = None,
) -> Float[Array, "B K G H"]:
    """Attention of one query token per row over the first `kv_lens[row]` tokens of its pages; scores are scaled by H^-1/2.

    Rows with kv_len 0 return zeros and cost nothing, wherever they are. Results are the same bits on every run, and differ
    between values of `num_sms` only by rounding. Groups of 3, 5, 6 or 7 queries cost a copy of q.

    Raises:
      UnsupportedDeviceError: the device is no Hopper GPU.
      ValueError: shapes do not fit each other, or `num_sms` is not between 1 and the device's SMs.
      NotImplementedError: dtype, head size, group or page size outside the limits in the module's docstring.
    """
    B, K, G, H = q.shape
    _check(q, k_pages, v_pages, block_tables, kv_lens)
    device = _mosaic.require_hopper("decode_attention", num_sms)
    plan = _Plan(
        rows=B,
        kv_heads=K,
        group=G,
        columns_per_head=1 << (G - 1).bit_length(),
        head_dim=H,
        page_size=k_pages.shape[2],
        num_sms=num_sms,
        interpreted=device.interpreted,
        config=config or TuningConfig(slots=4 * 128 // H),
    )
    if B * K == 0:
        return jnp.zeros_like(q)
    out, splits, maxima, sums, parts = _attend(plan)(
        _query_tiles(q, plan), _by_page_and_head(k_pages), _by_page_and_head(v_pages), block_tables, _padded(kv_lens)
    )
    finished = jax.new_ref(out, memory_space=plgpu.GMEM)
    _combine(plan)(kv_lens, splits, maxima, sums, parts, finished)
    return jax.freeze(finished).reshape(B, K, G, H)


def _check(q: Array, k_pages: Array, v_pages: Array, block_tables: Array, kv_lens: Array) -> None:
    B, K, G, H = q.shape
    if k_pages.shape != v_pages.shape or k_pages.shape[1] != K or k_pages.shape[3] != H:
        raise ValueError(f"{k_pages.shape=} and {v_pages.shape=} do not fit {q.shape=}")
    if block_tables.shape[0] != B or kv_lens.shape != (B,):
        raise ValueError(f"{block_tables.shape=} and {kv_lens.shape=} do not fit {q.shape=}")
    if not q.dtype == k_pages.dtype == v_pages.dtype == jnp.bfloat16:
        raise NotImplementedError(f"decode_attention is for bfloat16, not {q.dtype=}, {k_pages.dtype=}, {v_pages.dtype=}")
    if H not in HEAD_SIZES or k_pages.shape[2] not in PAGE_SIZES or not 1 <= G <= _COLUMNS:
        raise NotImplementedError(
            f"decode_attention has head sizes {HEAD_SIZES}, page sizes {PAGE_SIZES} and groups up to {_COLUMNS}, "
            f"not head size {H}, page size {k_pages.shape[2]}, group {G}"
        )


def _query_tiles(q: Array, plan: _Plan) -> Array:
    """[tiles, 8, H]: all queries in order, eight to a tile, so that a TMA copy brings them as a wgmma operand.

    A tile holds the queries of one head or of several whole heads. The columns of other heads are computed along and dropped.
    """
    q = jnp.pad(q, ((0, 0), (0, 0), (0, plan.columns_per_head - plan.group), (0, 0))).reshape(-1, plan.head_dim)
    return jnp.pad(q, ((0, -q.shape[0] % _COLUMNS), (0, 0))).reshape(-1, _COLUMNS, plan.head_dim)


def _by_page_and_head(pages: Array) -> Array:
    """[P * K, page_size, H], without a copy; a TMA descriptor has five axes, and the swizzled tiles need two of them."""
    return pages.reshape(-1, *pages.shape[2:])


def _padded(kv_lens: Array) -> Array:
    """Whole warpgroups of lengths, which the kernel keeps in registers."""
    return jnp.pad(kv_lens, (0, -kv_lens.shape[0] % _mosaic.WARPGROUP))


def _mesh(plan: _Plan, warpgroups: int, name: str) -> dict[str, Any]:
    return {
        "mesh": plgpu.Mesh(
            grid=(plan.num_sms,), grid_names=("sm",), num_threads=warpgroups, thread_name="wg", kernel_name=name
        ),
        "compiler_params": plgpu.CompilerParams(
            approx_math=True,
            # The kernels order shared memory by their own barriers; see reduce_columns.
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        "name": name,
    }


def _attend(plan: _Plan) -> Any:
    workers, items = plan.num_workers, plan.rows * plan.kv_heads
    c = plan.config
    block = (c.workers, c.slots, TILE, plan.head_dim)
    scratch = {
        "queries": _mosaic.swizzled_smem((c.workers, _QUERY_SLOTS, _COLUMNS, plan.head_dim), jnp.bfloat16),
        "ring": _mosaic.swizzled_smem(block, jnp.bfloat16),
        "weights": _mosaic.swizzled_smem((c.workers, c.tiles_per_step, _COLUMNS, TILE), jnp.bfloat16),
        "column_scratch": plgpu.SMEM((c.workers, 2, *fragments.COLUMN_SCRATCH), jnp.float32),
        "scan_scratch": plgpu.SMEM((_mosaic.cdiv(plan.rows, _mosaic.WARPGROUP), fragments.WARPS), jnp.int32),
        "orders": plgpu.SMEM((c.workers, _QUERY_SLOTS, 4), jnp.int32),
        # An order and its queries, which come by TMA.
        "ordered": plgpu.Barrier(num_barriers=c.workers * _QUERY_SLOTS, num_arrivals=2),
        "order_done": plgpu.Barrier(num_barriers=c.workers * _QUERY_SLOTS),
        "filled": plgpu.Barrier(num_barriers=c.workers * c.slots, num_arrivals=plan.pages_per_tile),
        "freed": plgpu.Barrier(num_barriers=c.workers * c.slots),
    }

    def body(*refs: Any) -> None:
        pl.run_scoped(functools.partial(_attend_kernel, *refs, plan=plan), collective_axes="wg", **scratch)

    return pl.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((items * plan.group, plan.head_dim), jnp.bfloat16),
            jax.ShapeDtypeStruct((workers, 2), jnp.int32),
            jax.ShapeDtypeStruct((2 * workers, _COLUMNS), jnp.float32),
            jax.ShapeDtypeStruct((2 * workers, _COLUMNS), jnp.float32),
            jax.ShapeDtypeStruct((2 * workers, plan.head_dim, _COLUMNS), jnp.float32),
        ),
        **_mesh(plan, c.workers + 1, "decode_attention"),
    )


def _combine(plan: _Plan) -> Any:
    return pl.kernel(
        functools.partial(_combine_kernel, plan=plan),
        out_type=(),
        **_mesh(plan, plan.config.workers, "decode_attention_combine"),
    )


def _tiles(tokens: Any) -> Any:
    return lax.div(tokens + (TILE - 1), TILE)


def _item_cost(kv_len: Any, plan: _Plan) -> Any:
    """Tiles of one (row, KV head) pair with its overhead; 0 for an unused row."""
    return jnp.where(kv_len > 0, _tiles(kv_len) + plan.config.item_overhead, 0)


def _attend_kernel(
    queries_gmem: Any,  # [query tiles, 8, H]
    k_gmem: Any,  # [P * K, page_size, H]
    v_gmem: Any,
    tables_gmem: Any,  # [B, pages]
    lens_gmem: Any,  # [B rounded up to 128]
    out_gmem: Any,  # [B * K * G, H]
    splits_gmem: Any,  # [workers, 2]: the item whose parts this worker's comes first of, or -1; the worker with the last part
    maxima_gmem: Any,  # [2 * workers, 8]: of the part at a worker's start and of the part at its end
    sums_gmem: Any,
    parts_gmem: Any,  # [2 * workers, H, 8]
    *,
    plan: _Plan,
    **scratch: Any,
) -> None:
    wg = lax.axis_index("wg")

    if _PDL and not plan.interpreted:
        plgpu.griddepcontrol_launch_dependents()

    @pl.when(wg == plan.config.workers)
    def _feed() -> None:
        _feed_rings(queries_gmem, k_gmem, v_gmem, tables_gmem, lens_gmem, splits_gmem, plan=plan, **scratch)

    @pl.when(wg < plan.config.workers)
    def _work() -> None:
        _work_off_orders(wg, out_gmem, maxima_gmem, sums_gmem, parts_gmem, plan=plan, **scratch)


def _feed_rings(
    queries_gmem: Any,
    k_gmem: Any,
    v_gmem: Any,
    tables_gmem: Any,
    lens_gmem: Any,
    splits_gmem: Any,
    *,
    plan: _Plan,
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
    """Divides the line of tiles; warp w then writes orders for worker w of this CTA and copies their tiles to its ring."""
    c = plan.config
    sm = lax.axis_index("sm")
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

        def load_tiles(row: Any, head: Any, first: Any, tokens: Any, count: Any, ready: Any) -> None:
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
            steps(first + whole, _tiles(tokens) - whole, 1, count + 2 * whole, ready[:1])

        def give_order(t: Any, item: Any, tokens: Any, destination: Any) -> None:
            slot = w * _QUERY_SLOTS + lax.rem(t, _QUERY_SLOTS)

            @pl.when(t >= _QUERY_SLOTS)
            def _() -> None:
                plgpu.barrier_wait(order_done.at[slot])

            for field, value in enumerate((tokens, item, destination)):
                orders[w, lax.rem(t, _QUERY_SLOTS), field] = value
            plgpu.barrier_arrive(ordered.at[slot])
            plgpu.copy_gmem_to_smem(
                queries_gmem.at[lax.div(item * plan.columns_per_head, _COLUMNS)],
                queries.at[w, lax.rem(t, _QUERY_SLOTS)],
                ordered.at[slot],
            )

        def one_item(head: Any, state: Any, *, row: Any, row_start: Any) -> Any:
            t, count, split, split_end, _, ready = state
            kv_len = lens_gmem[row]
            tiles = _tiles(kv_len)
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
                load_tiles(row, head, first, tokens, count, ready)

            grown = busy.astype(jnp.int32)
            return t + grown, count + 2 * grown * (behind - first), split, split_end, next_row, following

        def one_row(row: Any, state: Any) -> Any:
            row_start, *state = state
            cost = _item_cost(lens_gmem[row], plan)
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
        give_order(t, zero, jnp.int32(_STOP), zero)
        splits_gmem[worker, 0] = split
        splits_gmem[worker, 1] = split_end
        # See the last release of every slot: a barrier must not be left with an unseen phase.
        for s in range(c.slots):

            @pl.when(s < count)
            def _(s: int = s) -> None:
                plgpu.barrier_wait(freed.at[w * c.slots + s])

        for s in range(_QUERY_SLOTS):

            @pl.when(s <= t)
            def _(s: int = s) -> None:
                plgpu.barrier_wait(order_done.at[w * _QUERY_SLOTS + s])

    _for_each_warp(feed, c.workers, plan.interpreted)


def _for_each_warp(f: Any, count: int, interpreted: bool) -> None:
    """f(0) .. f(count - 1), each on its own warp of this warpgroup; one after the other in the interpreter."""
    if interpreted:
        for w in range(count):
            f(w)
        return

    @plgpu.warp_map
    def _(warp: Any) -> None:
        @pl.when(warp < count)
        def _() -> None:
            f(warp)


def _find_place(sm: Any, lens_gmem: Any, scan_scratch: Any, plan: _Plan) -> tuple[Any, Any, Any, Any, Any]:
    """(cost of a worker's stretch, cost of all, this CTA's first and last row, position where the first of them starts)."""
    padded = lens_gmem.shape[0]
    layout = fragments.striped(padded)
    costs = _item_cost(fragments.load(lens_gmem, layout, plan.interpreted), plan) * plan.kv_heads
    starts = fragments.exclusive_sums(costs, scan_scratch, plan.interpreted)
    rows = fragments.counted((padded,), 0, layout, plan.interpreted)
    total = costs.sum()
    share = jnp.maximum(lax.div(total + (plan.num_workers - 1), plan.num_workers), 1)
    begin = jnp.minimum(sm * plan.config.workers * share, total)
    end = jnp.minimum(begin + plan.config.workers * share, total)
    # The last row that starts at or before a position holds it: unused rows, which take no room, come before it.
    row_at = lambda position: jnp.where(starts <= position, rows, 0).max()
    first_start = jnp.where(starts <= begin, starts, 0).max()
    return share, total, row_at(begin), row_at(end - 1), first_start


def _work_off_orders(
    wg: Any,
    out_gmem: Any,
    maxima_gmem: Any,
    sums_gmem: Any,
    parts_gmem: Any,
    *,
    plan: _Plan,
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

    def attend(slot: Any, tokens: Any, count: Any) -> tuple[Any, Any, Any]:
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

        carry = (
            fill((_COLUMNS,), _LOWEST, jnp.float32, fragments.PER_COLUMN),
            fill((TILE, _COLUMNS), 0.0, jnp.float32, fragments.ACCUMULATOR),
            fill((H, _COLUMNS), 0.0, jnp.float32, fragments.ACCUMULATOR),
        )
        width = c.tiles_per_step
        steps = lax.div(tokens, TILE * width)
        carry = lax.fori_loop(0, steps, lambda i, x: step(count + 2 * width * i, width, None, x), carry)
        carry = lax.fori_loop(
            steps * width, _tiles(tokens), lambda i, x: step(count + 2 * i, 1, tokens - i * TILE, x), carry
        )
        peak, total, out = carry
        return peak, fragments.reduce_columns(total, column_scratch.at[wg, 1], "add", interpreted), out

    def one_order(state: Any) -> Any:
        t, count, _ = state
        slot = lax.rem(t, _QUERY_SLOTS)
        plgpu.barrier_wait(ordered.at[wg * _QUERY_SLOTS + slot])
        tokens, item, destination = (orders[wg, slot, field] for field in range(3))

        @pl.when(tokens != _STOP)
        def _() -> None:
            peak, total, out = attend(slot, tokens, count)

            @pl.when(destination < 0)
            def _() -> None:
                _store_output(out_gmem, item, out / fragments.across_rows(total, H), plan)

            @pl.when(destination >= 0)
            def _() -> None:
                maxima_gmem.at[destination][...] = peak
                sums_gmem.at[destination][...] = total
                parts_gmem.at[destination][...] = out

        plgpu.barrier_arrive(order_done.at[wg * _QUERY_SLOTS + slot])
        return t + 1, count + 2 * _tiles(tokens), tokens != _STOP

    lax.while_loop(lambda state: state[2], one_order, (jnp.int32(0), jnp.int32(0), jnp.bool_(True)))


def _store_output(out_gmem: Any, item: Any, out: Any, plan: _Plan) -> None:
    """The columns of `item`'s queries to its rows of the result."""
    first = lax.rem(item * plan.columns_per_head, _COLUMNS)
    column = fragments.counted((_COLUMNS,), 0, fragments.PER_COLUMN, plan.interpreted)
    mine = (column >= first) & (column < first + plan.group)
    rows = jnp.where(mine, item * plan.group + column - first, -1)
    fragments.scatter(out_gmem, rows, out, 1, plan.interpreted)


def _combine_kernel(
    lens_gmem: Any, splits_gmem: Any, maxima_gmem: Any, sums_gmem: Any, parts_gmem: Any, out_gmem: Any, *, plan: _Plan
) -> None:
    """Adds up the parts of items that were cut, in the order of their workers; zeros for rows without tokens."""
    if _PDL and not plan.interpreted:
        plgpu.griddepcontrol_wait()
    H, interpreted = plan.head_dim, plan.interpreted
    fill = functools.partial(fragments.filled, interpreted=interpreted)
    worker = lax.axis_index("sm") * plan.config.workers + lax.axis_index("wg")
    item, last = splits_gmem[worker, 0], splits_gmem[worker, 1]
    column = lambda ref, i: fragments.load(ref.at[i], fragments.PER_COLUMN, interpreted)

    def part(i: Any) -> tuple[Any, Any, Any]:
        out = fragments.load(parts_gmem.at[i], fragments.ACCUMULATOR, interpreted)
        return column(maxima_gmem, i), column(sums_gmem, i), out

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
            lax.fori_loop(
                0, plan.kv_heads, lambda h, _: _store_output(out_gmem, row * plan.kv_heads + h, zeros, plan), None
            )

    lax.fori_loop(0, lax.div(plan.rows - worker + plan.num_workers - 1, plan.num_workers), clear, None)

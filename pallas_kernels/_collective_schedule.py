"""Who computes, sends and adds what where a GEMM is fused with the sum of its results over ranks: pure data, made on the host.

Every rank computes all tiles of its own product. Each tile of the sum has one owner among the ranks; all ranks send it theirs,
and it adds them. Tiles are taken in groups of one per owner, and rank r starts each group with the tile of rank r + 1 and ends
it with its own: at any time the ranks send to different peers, and a group's sums are due at the same time everywhere.
"""

import dataclasses

import numpy as np

from pallas_kernels._gemm_config import GemmConfig
from pallas_kernels._gemm_pipeline import BLOCK
from pallas_kernels._gemm_schedule import tile_order

# Fields of a segment: a tile to multiply, in units of tiles, who owns it and the how manieth of the owner's it is.
M, N, OWNER, INDEX, VALID = range(5)
# Fields of a task. SEND: tell OWNER that tile INDEX has come, which this CTA's segment number SEGMENT computes. ADD: add all
# ranks' block number BLOCK of tile INDEX, write it at (ROW, COLUMN), in units of blocks, through staging slot SLOT.
KIND, TILE, TO, SEGMENT, BLOCK_IN_TILE, ROW, COLUMN, SLOT = range(8)
END, SEND, ADD = range(3)
SLOTS = 2


@dataclasses.dataclass(frozen=True)
class CollectiveSchedule:
    """`segments[rank, cta]` and `tasks[rank, cta]` are lists, in order, that end with VALID == 0 and KIND == END."""

    segments: np.ndarray  # int32 [ranks, ctas, segments + 1, 5]
    tasks: np.ndarray  # int32 [ranks, ctas, tasks + 1, 8]
    tiles_per_owner: int

    @property
    def ctas(self) -> int:
        return self.segments.shape[1]


def collective_schedule(m: int, n: int, ranks: int, num_sms: int, config: GemmConfig, *, scatter: bool) -> CollectiveSchedule:
    """The sum of `ranks` products [m, n], left on all ranks, or with `scatter` rows r m / ranks onwards on rank r alone.

    A CTA's tasks follow its segments: it tells of its tile of a wave before it adds anything that is due in that wave. So
    nobody who waits for a sum of a wave holds back what others need for that wave or an earlier one, and nothing can lock up,
    whatever the pace of ranks and CTAs.

    Raises:
      ValueError: `scatter` with rows that do not divide into whole tiles for each rank.
    """
    if scatter and m % (ranks * config.tile_m):
        raise ValueError(f"{m} rows do not divide into tiles of {config.tile_m} rows for each of {ranks} ranks")
    m_tiles, n_tiles = -(-m // config.tile_m), -(-n // config.tile_n)
    owned = _owned_tiles(m_tiles, n_tiles, ranks, config, scatter)
    orders = [_order(owned, rank) for rank in range(ranks)]
    ctas = min(num_sms, len(orders[0]))
    due = {tile: max(order.index(tile) for order in orders) // ctas for tile in orders[0]}
    waves = -(-len(orders[0]) // ctas)
    segments = np.zeros((ranks, ctas, waves + 1, 5), np.int32)
    tasks: list[list[list[tuple[int, ...]]]] = []
    for rank, order in enumerate(orders):
        adds = _adds(owned[rank], rank, due, m, n, ranks, config, scatter)
        lists: list[list[tuple[int, ...]]] = [[] for _ in range(ctas)]
        added = [0] * ctas
        turn = 0
        for wave in range(waves):
            for cta, (owner, index) in enumerate(order[wave * ctas : (wave + 1) * ctas]):
                segments[rank, cta, wave] = (*owned[owner][index], owner, index, 1)
                lists[cta].append((SEND, index, owner, wave, 0, 0, 0, 0))
            for index, block, row, column in adds.get(wave, ()):
                cta = turn % ctas
                lists[cta].append((ADD, index, 0, 0, block, row, column, added[cta] % SLOTS))
                added[cta] += 1
                turn += 1
        tasks.append(lists)
    longest = max(len(tasks_of_cta) for lists in tasks for tasks_of_cta in lists)
    table = np.zeros((ranks, ctas, longest + 1, 8), np.int32)
    for rank, lists in enumerate(tasks):
        for cta, tasks_of_cta in enumerate(lists):
            table[rank, cta, : len(tasks_of_cta)] = np.array(tasks_of_cta, np.int32).reshape(-1, 8)
    return CollectiveSchedule(segments, table, max(map(len, owned)))


def _owned_tiles(m_tiles: int, n_tiles: int, ranks: int, config: GemmConfig, scatter: bool) -> list[list[tuple[int, int]]]:
    """Each rank's tiles. Those at one index are neighbours in the order of a plain GEMM, so that caches serve as well."""
    if scatter:
        own = m_tiles // ranks
        shard = tile_order(own, n_tiles, max(1, config.group_m // ranks))
        return [[(rank * own + m, n) for m, n in shard] for rank in range(ranks)]
    order = tile_order(m_tiles, n_tiles, config.group_m)
    return [order[rank::ranks] for rank in range(ranks)]


def _order(owned: list[list[tuple[int, int]]], rank: int) -> list[tuple[int, int]]:
    """(owner, index) of all tiles, as `rank` computes them."""
    ranks = len(owned)
    owners = [(rank + offset) % ranks for offset in (*range(1, ranks), 0)]
    return [(owner, index) for index in range(max(map(len, owned))) for owner in owners if index < len(owned[owner])]


def _adds(
    tiles: list[tuple[int, int]],
    rank: int,
    due: dict[tuple[int, int], int],
    m: int,
    n: int,
    ranks: int,
    config: GemmConfig,
    scatter: bool,
) -> dict[int, list[tuple[int, int, int, int]]]:
    """Wave -> (tile index, block in tile, row, column) of the blocks of `rank`'s tiles that are due in it, C's only."""
    high, wide = config.tile_m // BLOCK, config.tile_n // BLOCK
    first = rank * (m // ranks) // BLOCK if scatter else 0
    found: dict[int, list[tuple[int, int, int, int]]] = {}
    for index, (tile_row, tile_column) in enumerate(tiles):
        for i in range(high):
            for j in range(wide):
                row, column = tile_row * high + i, tile_column * wide + j
                if row * BLOCK < m and column * BLOCK < n:
                    found.setdefault(due[rank, index], []).append((index, i * wide + j, row - first, column))
    return found

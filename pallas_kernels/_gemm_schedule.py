"""Who computes what in a GEMM on a number of SMs: pure data, made on the host from shapes."""

import numpy as np

from pallas_kernels import _mosaic
from pallas_kernels._gemm_config import GemmConfig

# Fields of a segment in the schedule.
M, N, K_BEGIN, K_STEPS, SOURCES, PARTIAL = range(6)


def schedule(m_tiles: int, n_tiles: int, k_steps: int, num_sms: int, config: GemmConfig) -> np.ndarray:
    """Who computes what: int32 [num_sms, segments, 6], each row a CTA's segments in order; K_STEPS == 0 marks the end.

    Where CTAs form clusters, each cluster is one CTA here, and its tiles (along m) or shares of a tile (along k) are one tile.

    A segment is (m tile, n tile, first k step, k steps, sources, partial). Most cover a whole tile and come first: all CTAs
    then walk k in step, so that tiles of A and B that several need are still in the L2 cache. The tiles that do not fill a wave
    and `shared_waves` waves more are laid end to end along k and cut into `num_sms` equal shares. A CTA whose share ends inside
    a tile starts its share with that piece and leaves the sum as a partial; the CTA whose share ends the tile does so last of
    all and adds the partials of its `sources` predecessors. So nobody waits for long, and only ever for a CTA of lower index.
    """
    tiles = tile_order(m_tiles, n_tiles, config.group_m)
    shared = _shared_tiles(len(tiles), k_steps, num_sms, config)
    whole, cut = tiles[: len(tiles) - shared], tiles[len(tiles) - shared :]
    bounds = _cuts(shared, k_steps, num_sms, config.min_steps)
    rows = []
    for cta in range(num_sms):
        first, last = bounds[cta], bounds[cta + 1]
        pieces = []
        for t in range(first // k_steps, _mosaic.cdiv(last, k_steps)):
            begin, end = max(first, t * k_steps), min(last, (t + 1) * k_steps)
            partial = end < (t + 1) * k_steps
            sources = 0 if partial else sum(bounds[j] < begin and bounds[j + 1] > t * k_steps for j in range(cta))
            pieces.append((*cut[t], begin - t * k_steps, end - begin, sources, int(partial)))
        owned = [pieces.pop(0)] if pieces and pieces[0][SOURCES] else []
        rows.append([*((*tile, 0, k_steps, 0, 0) for tile in whole[cta::num_sms]), *reversed(pieces), *owned])
    table = np.zeros((num_sms, max(map(len, rows)) + 1, 6), np.int32)
    for cta, row in enumerate(rows):
        table[cta, : len(row)] = np.array(row, np.int32).reshape(-1, 6)
    return table


def schedules(m_tiles: int, n_tiles: int, k_steps: int, num_sms: int, config: GemmConfig) -> np.ndarray:
    """[m_tiles + 1, num_sms, segments, 6]: number t is `schedule` of the first t rows of tiles alone.

    There is a lot of it (0.4 MB for 2048 x 4096 x 2 x 14336), so numbers are int16 wherever all fit.
    """
    tables = [schedule(t, n_tiles, k_steps, num_sms, config) for t in range(m_tiles + 1)]
    stacked = np.zeros((len(tables), num_sms, max(table.shape[1] for table in tables), 6), np.int32)
    for t, table in enumerate(tables):
        stacked[t, :, : table.shape[1]] = table
    return stacked.astype(np.int16) if stacked.max() <= np.iinfo(np.int16).max else stacked


def tile_order(m_tiles: int, n_tiles: int, group_m: int) -> list[tuple[int, int]]:
    """Columns of up to `group_m` tiles, side by side, there and back: tiles in flight share rows of A and columns of B."""
    order = []
    for group, top in enumerate(range(0, m_tiles, group_m)):
        columns = range(n_tiles) if group % 2 == 0 else reversed(range(n_tiles))
        order += [(m, n) for n in columns for m in range(top, min(top + group_m, m_tiles))]
    return order


def _shared_tiles(tiles: int, k_steps: int, num_sms: int, config: GemmConfig) -> int:
    """Tiles to cut along k: none if whole waves are as fast, counted in k steps of the slowest CTA."""
    waves, rest = divmod(tiles, num_sms)
    if not rest or not config.stream_k or config.cluster_along == "k":
        return 0
    shared = rest + num_sms * min(waves, config.shared_waves)
    whole_cost = (waves + 1) * k_steps
    cut_cost = tiles * k_steps / num_sms + config.fixup_steps
    return shared if cut_cost < whole_cost else 0


def _cuts(tiles: int, k_steps: int, num_sms: int, min_steps: int) -> list[int]:
    """Bounds of the CTAs' equal shares of `tiles` laid end to end; a cut within `min_steps` of a tile's border moves there.

    Where there are fewer steps than CTAs the last CTAs get none: those that share a tile must follow each other.
    """
    total = tiles * k_steps
    sharers = max(1, min(num_sms, total))
    bounds = []
    for i in range(sharers + 1):
        tile, step = divmod(i * total // sharers, k_steps)
        step = 0 if step < min_steps else k_steps if k_steps - step < min_steps else step
        bounds.append(tile * k_steps + step)
    return bounds + [total] * (num_sms - sharers)

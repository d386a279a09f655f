"""Who multiplies what when nobody knows beforehand which CTAs will be free: one line of segments, claimed in order."""

import numpy as np

from pallas_kernels._gemm_config import GemmConfig
from pallas_kernels._gemm_schedule import tile_order

FIELDS = 8
"""int32 numbers of a segment, a multiple of the 16 bytes that a TMA copy moves; see `segments`."""

M, N, K_BEGIN, K_STEPS, SOURCES, PARTIAL, PLACE = range(7)

_MIN_PIECE_STEPS = 8


def segments(m_tiles: int, n_tiles: int, k_steps: int, num_ctas: int, config: GemmConfig) -> np.ndarray:
    """The product as a line of segments: int32 [segments + 1, FIELDS]; K_STEPS == 0 marks the end.

    CTAs claim segments in order, so all walk neighbouring tiles, and a CTA that joins late, from attention, takes what is
    left. Most segments are whole tiles. With `config.stream_k` the last ones are cut along k, in pieces of a half and then of
    a quarter: the smaller the last pieces, the closer together the CTAs end. The last piece of a tile adds the sums of the
    SOURCES pieces before it, which lie in the places before PLACE. Those were claimed earlier, so whoever waits for them
    waits for a CTA that is at work. The pieces do not depend on who claims them, hence neither do the bits of the result.
    """
    line: list[tuple[int, ...]] = []
    place = 0
    tiles = tile_order(m_tiles, n_tiles, config.group_m)
    for (m, n), pieces in zip(tiles, _pieces(len(tiles), k_steps, num_ctas, config), strict=True):
        bounds = [k_steps * i // pieces for i in range(pieces + 1)]
        for i in range(pieces):
            partial = i + 1 < pieces
            sources = 0 if partial else i
            line.append((m, n, bounds[i], bounds[i + 1] - bounds[i], sources, int(partial), place, 0))
            place += partial
    return np.array([*line, (0,) * FIELDS], np.int32)


def _pieces(tiles: int, k_steps: int, num_ctas: int, config: GemmConfig) -> list[int]:
    """Pieces of each tile. Halves are as many as half the CTAs, quarters as many as all of them: about one round in all."""
    if not config.stream_k:
        return [1] * tiles
    most = max(1, k_steps // max(_MIN_PIECE_STEPS, config.min_steps))
    quarter = -(-num_ctas // 4)
    tail = [min(2, most)] * quarter + [min(4, most)] * quarter
    return ([1] * tiles + tail)[-tiles:]

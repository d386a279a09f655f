"""How long a GEMM takes by arithmetic: which configurations are worth timing, and which one takes a shape that nobody timed.

Constants are a fit to 405 configurations timed on an H200 (docs/kernels.md), on all its SMs at the clock that its power limit
leaves, and 60 on fewer. Only their ratios choose: of each shape's candidates the one that should be fastest is in the mean
2.3 % slower than the fastest. Times are seconds.
"""

import dataclasses
import functools

import numpy as np

from pallas_kernels import _mosaic
from pallas_kernels._gemm_config import GemmConfig
from pallas_kernels._gemm_schedule import K_BEGIN, K_STEPS, PARTIAL, SOURCES, schedule

_FLOPS_PER_SM = 5.43e12
_LOAD_BYTES_PER_S = 105e9  # from the L2 cache into one SM
_HBM_BYTES_PER_S = 3.7e12
_OVERLAPPED = 0.05  # part of the shorter of memory's and the SMs' time that shows beside the longer
_LAUNCH = 4.6e-6  # with the first loads and the last stores
_CLEAR = 1.5e-6  # the launch that clears semaphores
_STEP = 0.205e-6  # from barrier to barrier, however little there is to multiply
_OUT_OF_STEP = 1.26  # loads of cut tiles: their CTAs share less of them in the L2 cache
_MIN_STAGES = 3  # with fewer, loads do not keep ahead of the products; the arithmetic takes for granted that they do
_EXCHANGE = 2.0e-6  # of a cluster along k, besides the sums
# Beside decode attention on 32 SMs all GEMMs slow down, those with small tiles more than others, those out of step most.
_LOADS_BESIDE = 1.3
_CUT_BESIDE = 1.2
# Of a tile with 256 x 128 sums:
_STORE = 0.3e-6  # the rest hides behind the next tile's loads
_LEAVE = 1.4e-6
_ADD = 5.75e-6
_TRADE = 5.4e-6  # in a cluster along k, times the part of the tile that a CTA leaves to the others


def predicted_seconds(
    config: GemmConfig, m: int, n: int, k: int, *, swiglu: bool, num_sms: int, beside: bool = False, result_bytes: int = 2
) -> float:
    """The slowest CTA's steps and epilogues, or the time of the operands' bytes if that is longer, and what comes on top.

    `beside`: something that streams from memory runs on the other SMs. `result_bytes`: of one element of the result.
    """
    halves = 2 if swiglu else 1
    workers = num_sms // config.cluster
    m_tiles, n_tiles = _mosaic.cdiv(m, config.segment_m), _mosaic.cdiv(n, config.tile_n)
    table = schedule(m_tiles, n_tiles, _mosaic.cdiv(k, config.tile_k), workers, config)
    columns = config.tile_n * halves
    along_k = config.cluster if config.cluster_along == "k" else 1
    shared_b = config.cluster if config.cluster_along == "m" else 1
    flops = 2 * config.tile_m * columns * config.tile_k
    loaded = 2 * (config.tile_m + columns / shared_b) * config.tile_k
    multiplied, fetched = flops / _FLOPS_PER_SM, loaded / _LOAD_BYTES_PER_S * (_LOADS_BESIDE if beside else 1.0)
    # Cubes: a step somewhat over the shortest one costs nearly its own time, one under it nearly the shortest.
    in_step, out_of_step = ((max(multiplied, f) ** 3 + _STEP**3) ** (1 / 3) for f in (fetched, fetched * _OUT_OF_STEP))
    size = config.tile_m * columns / (256 * 128)
    steps, parts = table[..., K_STEPS], table[..., PARTIAL]
    segments = (steps > 0).sum(1)
    whole = (table[..., K_BEGIN] == 0) & (parts == 0)
    worker = (
        (np.where(whole, in_step, out_of_step) * steps).sum(1) / along_k
        + (segments - parts.sum(1)) * size * _STORE * (result_bytes / 2) / along_k
        + (parts.sum(1) * _LEAVE + table[..., SOURCES].sum(1) * _ADD) * size
    )
    if along_k > 1:
        worker += segments * (_EXCHANGE + size * _TRADE * (along_k - 1) / along_k)
    operands = (2 * (m * k + k * n * halves) + result_bytes * m * n) / _HBM_BYTES_PER_S
    faster, slower = sorted((float(worker.max()), operands))
    seconds = _LAUNCH + (_CLEAR if parts.any() else 0.0) + slower + _OVERLAPPED * faster
    return seconds * _CUT_BESIDE if beside and parts.any() else seconds


@functools.cache
def fastest(m: int, n: int, k: int, *, swiglu: bool, num_sms: int, beside: bool = False, result_bytes: int = 2) -> GemmConfig:
    """The configuration without clusters that should be fastest, of those whose ring has three stages or more."""
    deep = [tile for tile in tiles(m, swiglu=swiglu) if tile.stages(swiglu, result_bytes) >= _MIN_STAGES]
    given = {"swiglu": swiglu, "num_sms": num_sms, "beside": beside, "result_bytes": result_bytes}
    return min((c for tile in deep for c in cuts(tile)), key=lambda c: predicted_seconds(c, m, n, k, **given))


def tiles(m: int, *, swiglu: bool) -> list[GemmConfig]:
    """Tiles that may suit `m` rows: none twice as high as they are."""
    low = [
        GemmConfig(tile_m=64, tile_n=64, consumers=1),
        GemmConfig(tile_m=64, tile_n=128, split="n"),
        GemmConfig(tile_m=128, tile_n=64),
        GemmConfig(tile_m=128, tile_n=128),
    ]
    wide = [GemmConfig(tile_m=64, tile_n=256, split="n"), *(GemmConfig(tile_m=128, tile_n=columns) for columns in (192, 256))]
    high = [GemmConfig(tile_m=256, tile_n=columns) for columns in (128, 192)]
    found = [*low, GemmConfig(tile_m=256, tile_n=64)] if swiglu else [*low, *wide, *high]
    return [c for c in found if c.tile_m < 2 * max(m, 64)]


def cuts(tile: GemmConfig) -> list[GemmConfig]:
    """The tile whole, and cut along k: what fills no wave alone, or a wave more, which leaves fewer sums to add to each tile.

    Whole tiles also where cutting would save some steps: with long K, shares out of step along k cost more in the L2 cache.
    """
    variants = ({"stream_k": False}, {"shared_waves": 1}, {"shared_waves": 0})
    return [dataclasses.replace(tile, fixup_steps=0, **v) for v in variants]

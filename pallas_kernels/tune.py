"""Finds the fastest tile configurations of the GEMMs on the GPU at hand and writes them where `_tuning` looks.

    python -m pallas_kernels.tune [gemm] [grouped_gemm] [--num-sms 132,108] [--rows 512,2048] [--names 8b] [--steady]
        [--time-limit 200] [--out PATH]
    python -m pallas_kernels.tune beside [--attention-sms 32] [--rows 512,1024] [--names 8b] [--out PATH]

Every projection and number of rows of the benchmark is tried in the handful of configurations that should be fastest, cuBLAS
or `ragged_dot` beside them; a configuration whose result differs from theirs is out. Turns of 10 ms are too short for a power
limit to tell configurations apart; with `--steady` each runs for 0.15 s by itself, and what takes less energy wins. `beside`
times GEMMs that leave SMs to decode attention while it runs there (`bench.beside`), and keeps what the pair gains most with.
Entries are merged with those already in the table, each as soon as it is found; without `--out` the table is the package's own.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pallas_kernels import _gemm_cost, _mosaic, _tuning, programs
from pallas_kernels._gemm_schedule import schedule
from pallas_kernels._tuning import GemmConfig
from pallas_kernels.bench import beside, timing
from pallas_kernels.bench import gemm as cases
from pallas_kernels.bench.__main__ import integers

# Candidates of a shape that are timed: so many at most, and of those that should take longer than so many times the best only
# what makes up a smaller number.
_KEPT, _WITHIN, _AT_LEAST = 8, 1.15, 5
_SHAPE = ("m", "n", "k", "swiglu")
# Clusters of so many CTAs that fit on an H200 at once. Measured: 40 clusters of three and 32 of four take a second round.
_CLUSTERS = {2: 66, 3: 32, 4: 28}
# One consumer multiplies more columns with each load of its 64 rows than the two of `_gemm_cost.tiles` do. Nobody has timed
# these, so no shape gets them by arithmetic alone.
_SINGLE = tuple(GemmConfig(tile_m=64, tile_n=columns, consumers=1) for columns in (128, 192))


def candidates(p: cases.Projection, m: int, num_sms: int, *, clusters: bool = True) -> list[GemmConfig]:
    """What is worth timing for `m` rows: what should be fastest by arithmetic."""
    if p.experts:
        return _grouped_candidates(p, m // p.experts)

    def seconds(config: GemmConfig) -> float:
        return _gemm_cost.predicted_seconds(config, m, p.n, p.k, swiglu=p.swiglu, num_sms=num_sms)

    single = _SINGLE[:1] if p.swiglu else _SINGLE
    tiles = [c for tile in (*_gemm_cost.tiles(m, swiglu=p.swiglu), *single) for c in _with_clusters(tile, p, m, clusters)]
    found = sorted((c for tile in tiles for c in _distinct_cuts(tile, p, m, num_sms)), key=seconds)
    kinds: dict[tuple[Any, ...], GemmConfig] = {}  # the best of each tile and cluster, whole and cut
    for c in found:
        kinds.setdefault((c.tile_m, c.tile_n, c.tile_k, c.consumers, c.cluster, c.cluster_along, c.stream_k), c)
    near = sum(seconds(c) <= _WITHIN * seconds(found[0]) for c in kinds.values())
    return list(kinds.values())[: max(_AT_LEAST, min(near, _KEPT))]


def _grouped_candidates(p: cases.Projection, rows: int) -> list[GemmConfig]:
    if rows <= 64:
        return [GemmConfig(tile_m=64, tile_n=64, consumers=1), GemmConfig(tile_m=64, tile_n=128, split="n")]
    sizes = [(128, 128), (256, 64)] if p.swiglu else [(128, 256), (256, 128), (128, 128)]
    return [GemmConfig(tile_m=high, tile_n=wide) for high, wide in sizes]


def _with_clusters(tile: GemmConfig, p: cases.Projection, m: int, clusters: bool) -> list[GemmConfig]:
    """The tile alone and in the clusters that are of use, if it is small also with long steps."""
    number = _mosaic.cdiv(m, tile.tile_m) * _mosaic.cdiv(p.n, tile.tile_n)
    along_k = [c for c, fit in _CLUSTERS.items() if clusters and number <= fit]
    found = [tile, *(dataclasses.replace(tile, cluster=c, cluster_along="k") for c in along_k)]
    if clusters and 2 * tile.tile_m <= m and tile.tile_m < 256:  # columns of B are what a cluster saves
        found.append(dataclasses.replace(tile, cluster=2))
    if tile.tile_m * tile.tile_n <= 64 * 192:
        found += [dataclasses.replace(c, tile_k=128) for c in found]
    return [c for c in found if c.stages(p.swiglu) >= 3]


def _distinct_cuts(tile: GemmConfig, p: cases.Projection, m: int, num_sms: int) -> list[GemmConfig]:
    """`tile` whole and cut, without those that come to the same schedule."""
    m_tiles, n_tiles = _mosaic.cdiv(m, tile.segment_m), _mosaic.cdiv(p.n, tile.tile_n)
    k_steps = _mosaic.cdiv(p.k, tile.tile_k)
    found: dict[bytes, GemmConfig] = {}
    for config in _gemm_cost.cuts(tile):
        found.setdefault(schedule(m_tiles, n_tiles, k_steps, num_sms // tile.cluster, config).tobytes(), config)
    return list(found.values())


def jobs(
    kernel: str, num_sms: Sequence[int], rows: Sequence[int], names: str, *, all_sms: int, steady: bool = False
) -> list[cases.Job]:
    """Every shape on each number of SMs; clusters are tried on all SMs of the device only."""
    projections = cases.selected(cases.EXPERTS if kernel == "grouped_gemm" else cases.PROJECTIONS, names)
    found = []
    for sms, m, p in itertools.product(num_sms, rows or cases.ROWS[kernel], projections):
        variants = [cases.Variant(describe(c), sms, c) for c in candidates(p, m, sms, clusters=sms == all_sms)]
        variants = [cases.Variant(cases.BASELINE[kernel]), *variants]
        found.append(cases.Job(p, m, tuple(variants), cases.SKEWS[kernel][0], steady=steady))
    return found


def describe(config: GemmConfig) -> str:
    """The tile and whatever differs from the defaults."""
    defaults = {f.name: f.default for f in dataclasses.fields(GemmConfig)}
    rest = {name: value for name, value in dataclasses.asdict(config).items() if value != defaults[name]}
    size = f"{rest.pop('tile_m')}x{rest.pop('tile_n')}"
    return " ".join([size, *(f"{name}={value}" for name, value in rest.items())])


def best_entry(job: cases.Job, seconds: dict[str, Any]) -> dict[str, Any] | None:
    """The table's entry for the fastest variant that ran; None if none did."""
    baseline, *variants = job.variants
    ran = [v for v in variants if isinstance(seconds.get(v.name), float)]
    if not ran:
        return None
    best = min(ran, key=lambda v: seconds[v.name])
    p, theirs = job.projection, seconds.get(baseline.name)
    return {
        "m": job.m,
        "n": p.n,
        "k": p.k,
        "swiglu": p.swiglu,
        "num_sms": best.num_sms,
        "config": {name: value for name, value in dataclasses.asdict(best.config or best).items()},
        "us": round(1e6 * seconds[best.name], 2),
        "baseline_us": round(1e6 * theirs, 2) if isinstance(theirs, float) else None,
    }


def entries_beside(rows: Iterable[timing.Row]) -> Iterator[dict[str, Any]]:
    """The table's entries from `bench.beside`'s rows: of those of one shape, which come together, the one that gains most."""
    for _, same in itertools.groupby(rows, lambda row: [row.figures[name] for name in (*_SHAPE, "gemm_sms", "attention_sms")]):
        yield _entry_beside(max(same, key=lambda row: row.speedup))


def _entry_beside(row: timing.Row) -> dict[str, Any]:
    found = row.figures
    return {
        **{name: found[name] for name in _SHAPE},
        "num_sms": found["gemm_sms"],
        "config": found["config"],
        "us": round(found["gemm_us"], 2),
        "gain_beside": {str(found["attention_sms"]): round(row.speedup, 3)},
    }


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """New entries replace old ones of the same shape and number of SMs; in order of shape."""

    def shape(e: dict[str, Any]) -> tuple[Any, ...]:
        return (e["n"], e["k"], e["swiglu"], e["m"], e["num_sms"])

    by_shape = {shape(e): e for e in (*old, *new)}
    return [by_shape[key] for key in sorted(by_shape)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="*", help="gemm, grouped_gemm, beside; the first two without this")
    parser.add_argument("--num-sms", type=integers, help="comma-separated; all SMs of the device without this")
    parser.add_argument("--rows", type=integers, default=())
    parser.add_argument("--names", default="", help="only projections whose name contains one of these, comma-separated")
    parser.add_argument("--attention-sms", type=integers, default=(), help="beside: SMs of attention, comma-separated; 32")
    parser.add_argument("--steady", action="store_true", help="time what a power limit leaves, for large products")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--time-limit", type=float, default=3600.0, help="seconds after which nothing new is begun")
    parser.add_argument("--out", type=pathlib.Path, help="table to extend; the package's own without this")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.kernels) - {*cases.ROWS, "beside"})
    if unknown:
        parser.error(f"unknown kernels {', '.join(unknown)}; there are {', '.join(cases.ROWS)}, beside")
    if "beside" in options.kernels and (options.steady or len(options.num_sms or ()) > 1):
        parser.error("beside divides one number of SMs and takes turns of its own: neither several --num-sms nor --steady")
    try:
        device = _mosaic.require_hopper("gemm", 1)
    except _mosaic.UnsupportedDeviceError as error:
        parser.error(str(error))
    if device.kind not in _tuning.TABLES:
        parser.error(f"no table is kept for {device.kind!r}; there are tables for {', '.join(_tuning.TABLES)}")
    out = options.out or pathlib.Path(__file__).parent / "tunings" / _tuning.TABLES[device.kind]
    end = time.monotonic() + options.time_limit
    for kernel in options.kernels or cases.ROWS:
        sms = options.num_sms or [device.num_sms]
        if kernel == "beside":
            given = {"rows": options.rows, "names": options.names, "attention_sms": options.attention_sms}
            for entry in entries_beside(beside.benchmark(kernel, sms, **given)):
                print(json.dumps(entry), flush=True)
                _save(out, "gemm", entry)
                if time.monotonic() > end:
                    break
            continue
        found = jobs(kernel, sms, options.rows, options.names, all_sms=device.num_sms, steady=options.steady)
        # Measuring a shape takes a fraction of the time of compiling its variants.
        compile_seconds = 0.7 * (end - time.monotonic())
        with contextlib.closing(cases.measure(found, workers=options.workers, compile_seconds=compile_seconds)) as measured:
            for job, seconds in measured:
                print(report(job, seconds), flush=True)
                entry = best_entry(job, seconds)
                if entry is not None:
                    _save(out, kernel, entry)  # at once: an interrupted run keeps what it found
                if time.monotonic() > end:
                    break


def report(job: cases.Job, seconds: dict[str, Any]) -> str:
    times = sorted((s, name) for name, s in seconds.items() if isinstance(s, float))
    errors = [f"{name}: {s}" for name, s in seconds.items() if isinstance(s, str)]
    return f"{job.label:36s} " + " | ".join([*(f"{name} {1e6 * s:.1f}" for s, name in times), *errors])


def _save(out: pathlib.Path, kernel: str, entry: dict[str, Any]) -> None:
    table = json.loads(out.read_text()) if out.exists() else {}
    entries = {name: merged(table.get(name, []), [entry] if name == kernel else []) for name in cases.ROWS}
    out.write_text(dumps(entries))


def dumps(entries: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """The table as JSON, an entry a line."""
    versions = f'"versions": {json.dumps(programs.versions())}'
    lists = [f'"{name}": [\n    ' + ",\n    ".join(map(json.dumps, entries[name])) + "\n  ]" for name in entries]
    return "{\n  " + ",\n  ".join([versions, *lists]) + "\n}\n"


if __name__ == "__main__":
    main()

"""Finds the fastest tile configurations of the GEMMs on the GPU at hand and writes them where `_tuning` looks.

    python -m pallas_kernels.tune [gemm] [grouped_gemm] [--rows 512,2048] [--names 8b] [--out PATH]

Every projection and number of rows of the benchmark is tried in a handful of configurations, cuBLAS or `ragged_dot` beside
them; a configuration whose result differs from theirs is out. Entries are merged with those already in the table; without
`--out` the table is the package's own.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pallas_kernels import _mosaic, _tuning
from pallas_kernels._tuning import GemmConfig
from pallas_kernels.bench import gemm as cases
from pallas_kernels.bench import timing
from pallas_kernels.bench.__main__ import integers
from pallas_kernels.gemm import schedule

# Whole tiles unless cutting them saves more than this many steps. The second suits long K, where shares out of step along k
# cost more in the L2 cache than a thin last wave.
_FIXUP_STEPS = (8, 40)


def candidates(p: cases.Projection, m: int, num_sms: int) -> list[GemmConfig]:
    """What is worth trying for `m` rows: tiles by rows (of the mean group, if grouped), each cut or not."""
    rows = m // max(p.experts, 1)
    if p.experts:
        return _grouped_candidates(p, rows)
    return [c for tile in _tiles(p, rows) for c in _distinct_cuts(tile, p, m, num_sms)]


def _grouped_candidates(p: cases.Projection, rows: int) -> list[GemmConfig]:
    if rows <= 64:
        return [GemmConfig(tile_m=64, tile_n=64, consumers=1), GemmConfig(tile_m=64, tile_n=128, split="n")]
    sizes = [(128, 128), (256, 64)] if p.swiglu else [(128, 256), (256, 128), (128, 128)]
    return [GemmConfig(tile_m=high, tile_n=wide) for high, wide in sizes]


def _tiles(p: cases.Projection, rows: int) -> list[GemmConfig]:
    tile = GemmConfig
    if rows <= 64:
        narrow = tile(tile_m=64, tile_n=64, consumers=1, shared_waves=0)
        return [narrow, dataclasses.replace(narrow, tile_k=128), tile(tile_m=64, tile_n=128, split="n", shared_waves=0)]
    if rows <= 128:
        pair = tile(tile_m=64, tile_n=128, split="n", cluster=2, shared_waves=0)
        return [pair, dataclasses.replace(pair, cluster=1), tile(tile_m=128, tile_n=64, shared_waves=0)]
    wide = tile(tile_m=128, tile_n=128 if p.swiglu else 256, cluster=2)
    if p.swiglu:
        return [wide, dataclasses.replace(wide, cluster=1), tile(tile_m=256, tile_n=64)]
    if rows <= 256:
        return [tile(tile_m=128, tile_n=128, cluster=2), tile(tile_m=128, tile_n=128), tile(tile_m=128, tile_n=192)]
    others = [(256, 192)] if rows >= 2048 else [(128, 192), (128, 128)]
    return [wide, tile(tile_m=256, tile_n=128), *(tile(tile_m=high, tile_n=columns) for high, columns in others)]


def _distinct_cuts(tile: GemmConfig, p: cases.Projection, m: int, num_sms: int) -> list[GemmConfig]:
    """`tile` with each of `_FIXUP_STEPS`, without those that come to the same schedule."""
    m_tiles, n_tiles = _mosaic.cdiv(m, tile.tile_m * tile.cluster), _mosaic.cdiv(p.n, tile.tile_n)
    k_steps = _mosaic.cdiv(p.k, tile.tile_k)
    found: dict[bytes, GemmConfig] = {}
    for steps in _FIXUP_STEPS:
        config = dataclasses.replace(tile, fixup_steps=steps)
        found.setdefault(schedule(m_tiles, n_tiles, k_steps, num_sms // tile.cluster, config).tobytes(), config)
    return list(found.values())


def jobs(kernel: str, num_sms: int, rows: Sequence[int], names: str) -> list[cases.Job]:
    projections = [p for p in (cases.EXPERTS if kernel == "grouped_gemm" else cases.PROJECTIONS) if names in p.name]
    return [
        cases.Job(p, m, (cases.Variant(cases.BASELINE[kernel]), *_variants(p, m, num_sms)), cases.SKEWS[kernel][0])
        for m, p in itertools.product(rows or cases.ROWS[kernel], projections)
    ]


def _variants(p: cases.Projection, m: int, num_sms: int) -> Iterator[cases.Variant]:
    for config in candidates(p, m, num_sms):
        yield cases.Variant(describe(config), num_sms, config)


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
        "config": {name: value for name, value in dataclasses.asdict(best.config or best).items()},
        "us": round(1e6 * seconds[best.name], 2),
        "baseline_us": round(1e6 * theirs, 2) if isinstance(theirs, float) else None,
    }


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """New entries replace old ones of the same shape; in order of shape."""

    def shape(e: dict[str, Any]) -> tuple[Any, ...]:
        return (e["n"], e["k"], e["swiglu"], e["m"])

    by_shape = {shape(e): e for e in (*old, *new)}
    return [by_shape[key] for key in sorted(by_shape)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="*", help="gemm, grouped_gemm; both without this")
    parser.add_argument("--rows", type=integers, default=())
    parser.add_argument("--names", default="", help="only projections whose name contains this")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--out", type=pathlib.Path, help="table to extend; the package's own without this")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.kernels) - set(cases.ROWS))
    if unknown:
        parser.error(f"unknown kernels {', '.join(unknown)}; there are {', '.join(cases.ROWS)}")
    try:
        device = _mosaic.require_hopper("gemm", 1)
    except _mosaic.UnsupportedDeviceError as error:
        parser.error(str(error))
    if device.kind not in _tuning.TABLES:
        parser.error(f"no table is kept for {device.kind!r}; there are tables for {', '.join(_tuning.TABLES)}")
    out = options.out or pathlib.Path(__file__).parent / "tunings" / _tuning.TABLES[device.kind]
    for kernel in options.kernels or cases.ROWS:
        for job, seconds in cases.measure(jobs(kernel, device.num_sms, options.rows, options.names), workers=options.workers):
            print(report(job, seconds), flush=True)
            entry = best_entry(job, seconds)
            if entry is not None:
                _save(out, kernel, entry)  # at once: an interrupted run keeps what it found


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
    versions = f'"versions": {json.dumps(timing.versions())}'
    lists = [f'"{name}": [\n    ' + ",\n    ".join(map(json.dumps, entries[name])) + "\n  ]" for name in entries]
    return "{\n  " + ",\n  ".join([versions, *lists]) + "\n}\n"


if __name__ == "__main__":
    main()

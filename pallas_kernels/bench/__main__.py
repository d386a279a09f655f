"""Times the kernels on the GPU at hand, beside what XLA offers for the same work.

    python -m pallas_kernels.bench [kernel ...] [--num-sms 132,100,48] [--rows 512,2048] [--names 8b] [--sustained]
    python -m pallas_kernels.bench gemm --rows-in-use 0.5,0.75,1 [--rows 512,2048] [--names 8b,logits]
    python -m pallas_kernels.bench beside [--attention-sms 32,24] [--rows 512,1024] [--names 8b]

Inputs are random normal and rotate through more memory than the L2 cache holds. The table is for people; the last line of
standard output is one JSON object with every figure, the device and the versions.
"""

import argparse
import importlib
import math
import statistics
import sys
from collections.abc import Iterator, Sequence

import jax

from pallas_kernels import _mosaic
from pallas_kernels.bench import timing
from pallas_kernels.power import PowerError, idle_watts

# Each module has `benchmark(kernel, num_sms, ...) -> rows`.
MODULES = {
    "gemm": "pallas_kernels.bench.gemm",
    "grouped_gemm": "pallas_kernels.bench.gemm",
    "decode_attention": "pallas_kernels.bench.attention",
    "prefill_attention": "pallas_kernels.bench.attention",
    "append_kv": "pallas_kernels.bench.attention",
    "fused_gemm_attention": "pallas_kernels.bench.fused",
    "beside": "pallas_kernels.bench.beside",
    "gemm_all_reduce": "pallas_kernels.bench.gemm_all_reduce",
}
# The others run on one.
NEED_SEVERAL_GPUS = {"gemm_all_reduce"}


def integers(text: str) -> list[int]:
    return [int(field) for field in text.split(",")]


def fractions(text: str) -> list[float]:
    found = [float(field) for field in text.split(",")]
    if not all(0 < f <= 1 for f in found):
        raise argparse.ArgumentTypeError(f"{text} are not all between 0 and 1")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", nargs="*", help=f"of {', '.join(MODULES)}; without this all that need one GPU")
    parser.add_argument("--num-sms", type=integers, help="comma-separated; all SMs of the device without this")
    parser.add_argument("--rows", type=integers, default=(), help="GEMMs: rows of A, comma-separated")
    parser.add_argument("--rows-in-use", type=fractions, default=(), help="gemm: parts of the rows, to 64 rows")
    parser.add_argument("--names", default="", help="only cases whose name contains one of these, comma-separated")
    parser.add_argument("--attention-sms", type=integers, default=(), help="beside: SMs of attention, comma-separated; 32")
    parser.add_argument("--workers", type=int, default=12, help="GEMMs: processes that compile")
    parser.add_argument("--sustained", action="store_true", help="also run a second or more at the power limit: joules")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.kernels) - set(MODULES))
    if unknown:
        parser.error(f"unknown kernels {', '.join(unknown)}; there are {', '.join(MODULES)}")
    try:
        device = _mosaic.require_hopper(next(iter(options.kernels or MODULES)), 1)
    except _mosaic.UnsupportedDeviceError as error:
        parser.error(str(error))
    num_sms = options.num_sms or [device.num_sms]
    facts: dict[str, object] = {"command": " ".join(sys.argv[1:]), "inputs": "random normal bfloat16"}
    if options.sustained:
        try:
            facts["idle_watts"] = idle_watts(jax.devices()[0])
        except PowerError as error:
            parser.error(f"--sustained: {error}")
        print(f"idle: {facts['idle_watts']:.0f} W")
    rows = []
    print(timing.header())
    for kernel in options.kernels or [name for name in MODULES if name not in NEED_SEVERAL_GPUS]:
        for row in _benchmark(kernel, num_sms, options):
            print(timing.line(row), flush=True)
            rows.append(row)
    for kernel, ratio in _means(rows):
        print(f"{kernel}: geometric mean of baseline time over kernel time {ratio:.3f}")
    print(timing.json_line(rows, **facts))


def _benchmark(kernel: str, num_sms: Sequence[int], options: argparse.Namespace) -> Iterator[timing.Row]:
    benchmark = importlib.import_module(MODULES[kernel]).benchmark
    wanted = {"names": options.names, "sustained": options.sustained}
    if kernel.endswith("gemm"):
        wanted |= {"rows": options.rows, "workers": options.workers}
    if kernel == "gemm":
        wanted |= {"rows_in_use": options.rows_in_use}
    if kernel == "beside":
        wanted |= {"rows": options.rows, "attention_sms": options.attention_sms}
    return benchmark(kernel, num_sms, **wanted)


def _means(rows: Sequence[timing.Row]) -> Iterator[tuple[str, float]]:
    for kernel in dict.fromkeys(row.kernel for row in rows):
        ratios = [r.speedup for r in rows if r.kernel == kernel and r.baseline and not math.isnan(r.speedup)]
        if ratios:
            yield kernel, statistics.geometric_mean(ratios)


if __name__ == "__main__":
    main()

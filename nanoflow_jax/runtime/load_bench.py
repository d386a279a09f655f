"""Bandwidth of loading pages from host memory to the device: `python -m nanoflow_jax.runtime.load_bench --model llama3-8b`.

Three ways to bring the same pages from the host tier into the pool: as the engine does it, chunks as one copy each and a write
that scatters them; page by page, a copy and a write for each; and fragment by fragment, a copy and a write for K or V of a page
in one layer, which is how pages lie in the pool. The pool is as large as the pages need; weights are not loaded. Of several
repetitions the median counts. The last line is one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from nanoflow_jax.config import PRESETS, preset
from nanoflow_jax.executor.kv_transfer import PageFormat, lower_write_pages, page_format, stage_pages, transfer_memory
from nanoflow_jax.kv_cache import KVCache, create_kv_cache
from nanoflow_jax.parallel import make_mesh, parallel_layout


def _seconds(repeat: int, call: Callable[[], object]) -> float:
    call()
    samples = []
    for _ in range(repeat):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def measure(form: PageFormat, cache: KVCache, mesh: jax.sharding.Mesh, host: np.ndarray, repeat: int) -> dict[str, float]:
    """Seconds of each way to load pages `uint8[n, page_bytes]` to device pages 1 .. n, whole chunks of the largest size."""
    count, size = len(host), form.chunk_sizes[-1]
    state = cache

    def in_chunks(size: int) -> Callable[[], KVCache]:
        write = lower_write_pages(form, size, cache, mesh).compile()

        def load() -> KVCache:
            nonlocal state
            for first in range(0, count, size):
                staged = stage_pages(host[first : first + size], form, mesh)
                state = write(state, staged, np.arange(1 + first, 1 + first + size, dtype=np.int32))
            return state

        return load

    write_fragment = jax.jit(lambda pages, fragment, page: pages.at[page].set(fragment), donate_argnums=0)
    values = host.reshape(-1).view(form.dtype).reshape(count, *form.shape)
    fragments = np.ascontiguousarray(np.moveaxis(values, (5, 4), (1, 2)))  # [n, kv, head, groups, token, layer, dim]

    def in_fragments() -> KVCache:
        nonlocal state
        for kind, pools in enumerate((state.k_pages, state.v_pages)):
            for layer, pool in enumerate(pools):
                group, index = divmod(layer, form.layers_per_group)
                for i in range(count):
                    fragment = np.ascontiguousarray(fragments[i, kind, :, group, :, index])
                    pool = write_fragment(pool, jax.device_put(fragment, may_alias=False), 1 + i)
                pools[layer] = pool
        return state

    return {
        "chunks": _seconds(repeat, in_chunks(size)),
        "pages": _seconds(repeat, in_chunks(1)),
        "fragments": _seconds(repeat, in_fragments),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m nanoflow_jax.runtime.load_bench", description=__doc__)
    parser.add_argument("--model", default="llama3-8b", choices=sorted(PRESETS), help="(default %(default)s)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page (default %(default)s)")
    parser.add_argument("--pages", type=int, default=256, help="rounded up to whole chunks (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="(default %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="(default %(default)s)")
    args = parser.parse_args(argv)
    for name in ("page_size", "pages", "repeat"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    config, mesh, dtype = preset(args.model), make_mesh(1), jnp.dtype(args.dtype)
    layout = parallel_layout(config, 1)
    device = jax.devices()[0]
    form = page_format(config, layout, args.page_size, dtype, on_gpu=device.platform == "gpu")
    count = -(-args.pages // form.chunk_sizes[-1]) * form.chunk_sizes[-1]
    cache = create_kv_cache(config, layout, mesh, num_pages=count + 1, page_size=args.page_size, dtype=dtype)
    host = transfer_memory(count * form.page_bytes, mesh).reshape(count, form.page_bytes)
    host[:] = np.random.default_rng(0).integers(0, 256, host.shape, np.uint8)
    seconds = measure(form, cache, mesh, host, args.repeat)
    rates = {name: host.nbytes / value / 1e9 for name, value in seconds.items()}
    print(f"{args.model} on {device.device_kind}: {count} pages of {form.page_bytes / 2**10:.0f} KiB, jax {jax.__version__}")
    for name, rate in rates.items():
        print(f"{name:<10}{rate:>10.3f} GB/s{rates['chunks'] / rate:>10.2f} times slower than chunks")
    print(json.dumps({**vars(args), "device": device.device_kind, "jax": jax.__version__, "gb_per_s": rates}))


if __name__ == "__main__":
    main()

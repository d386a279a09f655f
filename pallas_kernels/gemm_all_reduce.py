"""C = sum over ranks of A B, the product and the sum in one kernel, over peers' memory (no NVLink multicast).

A rank's CTAs multiply tiles as `gemm` does. A tile's result, rounded to bfloat16, goes straight from registers into the memory
of the rank that owns the tile. One more warpgroup of each CTA tells the owner; it also adds up the tiles that its own rank
owns, in the order of the ranks, and writes the sums to all of them. `docs/kernels-collectives.md` has the protocol.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import _block_images, _gemm_cost, _mosaic
from pallas_kernels import _collective_schedule as fields
from pallas_kernels._collective_schedule import ADD, END, SEND, SLOTS, CollectiveSchedule, collective_schedule
from pallas_kernels._gemm_pipeline import BLOCK, Segment, block, consume, consumer_offset, produce
from pallas_kernels._peers import Peers
from pallas_kernels._tuning import GemmConfig
from pallas_kernels.gemm import check_operands

_PRODUCER_REGISTERS, _ADDER_REGISTERS, _MOST_REGISTERS = 40, 120, 232
_REGISTERS_PER_SM = 65536
_SUMS_PER_THREAD = 128  # float32, of the product; leaves what the rest of a consumer needs


def gemm_all_reduce(
    a: Float[Array, "M K"],
    b: Float[Array, "K N"],
    *,
    axis: str,
    residual: Float[Array, "M N"] | None = None,
    num_sms: int,
    config: GemmConfig | None = None,
) -> Float[Array, "M N"]:
    """The sum of a b over the ranks of mesh axis `axis`, plus the residual once; every rank gets the same bits, always.

    Runs under `shard_map(..., check_vma=False)` on all devices of the mesh, in one process. Each rank's product is rounded to
    bfloat16, as it is in front of an all-reduce; the sum is float32, in the order of the ranks. `residual` must be the same on
    all ranks. All `num_sms` CTAs wait for each other and for the peers': whatever runs beside must leave them their SMs.

    Raises:
      UnsupportedDeviceError: no Hopper GPU.
      ValueError: shapes that do not fit together, a dtype that is not bfloat16, K or N that is not a multiple of 16, M beyond 8
        that is not a multiple of 8, `num_sms` out of range, an axis of one rank, or a `config` with clusters, tiles cut along K
        or tiles too large for the kernel.
    """
    check_operands(a, b, None, residual, swiglu=False)
    return _launch("gemm_all_reduce", a, b, residual, axis=axis, scatter=False, config=config, num_sms=num_sms)


def gemm_reduce_scatter(
    a: Float[Array, "M K"], b: Float[Array, "K N"], *, axis: str, num_sms: int, config: GemmConfig | None = None
) -> Float[Array, "M_rank N"]:
    """As `gemm_all_reduce`, but of R ranks number r gets rows r M / R to (r + 1) M / R of the sum alone.

    Raises:
      UnsupportedDeviceError, ValueError: as there; ValueError also if M / R is not a multiple of the tile's rows, or of any's.
    """
    check_operands(a, b, None, None, swiglu=False)
    return _launch("gemm_reduce_scatter", a, b, None, axis=axis, scatter=True, config=config, num_sms=num_sms)


def default_config(m: int, k: int, n: int, *, num_sms: int, shard_rows: int = 0) -> GemmConfig:
    """Of the whole tiles that the kernel takes, those that should be fastest in a plain GEMM; their height divides a shard.

    Raises:
      ValueError: no tile's height divides `shard_rows`.
    """
    whole = [dataclasses.replace(tile, stream_k=False) for tile in _gemm_cost.tiles(m, swiglu=False)]
    fitting = [c for c in whole if _fits(c) and not shard_rows % c.tile_m]
    if not fitting:
        raise ValueError(f"no tile's height divides the {shard_rows} rows of a rank")
    return min(fitting, key=lambda c: _gemm_cost.predicted_seconds(c, m, n, k, swiglu=False, num_sms=num_sms))


def _fits(config: GemmConfig) -> bool:
    sums = config.wg_m * config.wg_n // _mosaic.WARPGROUP
    return config.cluster == 1 and sums <= _SUMS_PER_THREAD and config.wg_n <= 128


def _launch(
    name: str, a: Array, b: Array, residual: Array | None, *, axis: str, scatter: bool, config: GemmConfig | None, num_sms: int
) -> Array:
    device = _mosaic.require_hopper(name, num_sms)
    if a.shape[0] > 8 and a.shape[0] % 8:
        raise ValueError(f"{name}: more than 8 rows must be a multiple of 8, not {a.shape[0]}")
    if device.interpreted:
        raise ValueError(f"{name}: jax's interpreter knows neither peers' memory nor semaphores")
    ranks = lax.axis_size(axis)
    if ranks < 2:
        raise ValueError(f"{name}: mesh axis {axis!r} has {ranks} rank; take gemm")
    (m, k), n = a.shape, b.shape[1]
    config = config or default_config(m, k, n, num_sms=num_sms, shard_rows=m // ranks if scatter else 0)
    if not _fits(config) or config.stream_k:
        raise ValueError(f"{name}: {config} has clusters, cuts tiles along K or needs too many registers")
    return _reduced(a, b, residual, name=name, axis=axis, scatter=scatter, config=config, num_sms=num_sms)


# Jitted, so that the layers of a model share one kernel: it is compiled once for each that jax traces.
@functools.partial(jax.jit, static_argnames=("name", "axis", "scatter", "config", "num_sms"), inline=True)
def _reduced(
    a: Array, b: Array, residual: Array | None, *, name: str, axis: str, scatter: bool, config: GemmConfig, num_sms: int
) -> Array:
    ranks, m, n = lax.axis_size(axis), a.shape[0], b.shape[1]
    plan = collective_schedule(m, n, ranks, num_sms, config, scatter=scatter)
    return run(name, plan, Peers(axis, ranks, scatter), config, a, b, residual, (m // ranks if scatter else m, n))


def run(
    name: str,
    plan: CollectiveSchedule,
    peers: Peers,
    config: GemmConfig,
    a: Array,
    b: Array,
    residual: Array | None,
    out_shape: tuple[int, ...],
) -> Array:
    """Launches the kernel for what `peers` says the ranks are."""
    blocks = config.tile_m * config.tile_n // BLOCK**2
    inbox = (peers.ranks, plan.tiles_per_owner, blocks, *_block_images.IMAGE)
    inputs = [*map(jnp.asarray, peers.tables(plan)), a, b, *(() if residual is None else (residual,))]

    def body(segments_ref: Any, tasks_ref: Any, a_ref: Any, b_ref: Any, *refs: Any) -> None:
        *extra, out_ref, inbox_ref = refs
        residual_ref = extra[0] if extra else None
        row = peers.table_row(plan.ctas)
        come = peers.semaphores(plan.tiles_per_owner)  # of my tiles: how many ranks' have come
        done = peers.semaphores(1)  # how many of the peers' CTAs have written all of their sums
        minor = math.gcd(config.tile_k, config.tile_n, a.shape[-1], b.shape[-1])
        stages = config.stages(False)

        @functools.partial(
            pl.run_scoped,
            a_smem=_mosaic.swizzled_smem((stages, config.tile_m, config.tile_k), a.dtype, global_minor=minor),
            b_smem=_mosaic.swizzled_smem((stages, 1, config.tile_k, config.tile_n), b.dtype, global_minor=minor),
            out_smem=_mosaic.swizzled_smem((SLOTS, BLOCK, BLOCK), a.dtype, global_minor=out_shape[-1]),
            full=plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            free=plgpu.Barrier(num_barriers=stages, num_arrivals=config.consumers),
            left=plgpu.Barrier(num_barriers=plan.segments.shape[2] - 1, num_arrivals=config.consumers),
            landed=None if residual is None else plgpu.Barrier(),
            collective_axes="wg",
        )
        def _(a_smem: Any, b_smem: Any, out_smem: Any, full: Any, free: Any, left: Any, landed: Any) -> None:
            wg = lax.axis_index("wg")
            walk = functools.partial(_walk, segments_ref.at[row], config, a.shape[-1])

            @pl.when(wg < config.consumers)
            def _consumer() -> None:
                plgpu.set_max_registers(_consumer_registers(config), action="increase")
                leave = functools.partial(_leave, peers, inbox_ref, left, config)
                consume(walk, a_smem, b_smem, full, free, leave, config)

            @pl.when(wg == config.consumers)
            def _producer() -> None:
                plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
                produce(walk, peers.mine(a_ref), peers.mine(b_ref), a_smem, b_smem, full, free, config, False)

            @pl.when(wg == config.consumers + 1)
            def _adder() -> None:
                plgpu.set_max_registers(_ADDER_REGISTERS, action="decrease")
                mine = residual_ref if residual_ref is None else peers.mine(residual_ref)
                add = functools.partial(_add, peers, come, mine, out_ref, peers.mine(inbox_ref), out_smem, landed)
                _tasks(tasks_ref.at[row], functools.partial(_send, peers, come, left), add)
                plgpu.wait_smem_to_gmem(0)
                peers.meet(done, plan.ctas)

    out, _ = _mosaic.launch(
        body,
        (peers.array(out_shape, a.dtype), peers.array(inbox, jnp.int32)),
        name=name,
        num_sms=peers.launched(plan.ctas),
        warpgroups=config.consumers + 2,
    )(*inputs)
    return out


def _consumer_registers(config: GemmConfig) -> int:
    """What an SM has beside those of the other two warpgroups, in the steps of eight that the hardware gives out."""
    rest = _REGISTERS_PER_SM // _mosaic.WARPGROUP - _PRODUCER_REGISTERS - _ADDER_REGISTERS
    return min(_MOST_REGISTERS, rest // config.consumers // 8 * 8)


def _walk(table: Any, config: GemmConfig, k: int, body: Callable[[Segment, Array], Array]) -> Array:
    def read(index: Array) -> list[Array]:
        return [table[index, field] for field in range(table.shape[-1])]

    def one(carry: tuple[Array, Array, list[Array]]) -> tuple[Array, Array, list[Array]]:
        number, step, (m, n, owner, index, _) = carry
        upcoming = read(number + 1)  # issued a segment ahead, to hide the latency of global memory
        steps = jnp.int32(_mosaic.cdiv(k, config.tile_k))
        segment = Segment(m * config.tile_m, n * config.tile_n, jnp.int32(0), steps, extra=(owner, index, number))
        return number + 1, body(segment, step), upcoming

    start = (jnp.int32(0), jnp.int32(0), read(jnp.int32(0)))
    return lax.while_loop(lambda carry: carry[2][fields.VALID] > 0, one, start)[1]


def _leave(peers: Peers, inbox: Any, left: Any, config: GemmConfig, segment: Segment, totals: list[Array]) -> None:
    """Writes this consumer's part of a tile to the tile's owner."""
    owner, index, number = segment.extra
    place = peers.of(owner, inbox).at[peers.me(), index]
    down, right = consumer_offset(config)
    first = down // BLOCK * (config.tile_n // BLOCK) + right // BLOCK
    for i, j in np.ndindex(config.wg_m // BLOCK, config.wg_n // BLOCK):
        image = place.at[first + i * (config.tile_n // BLOCK) + j]
        _block_images.store(image, block(totals, i, j)[0], peers.interpreted)
    plgpu.barrier_arrive(left.at[number])


def _tasks(table: Any, send: Callable[[list[Array]], None], add: Callable[[list[Array]], None]) -> None:
    def read(index: Array) -> list[Array]:
        return [table[index, field] for field in range(table.shape[-1])]

    def one(carry: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        index, task = carry
        upcoming = read(index + 1)
        pl.when(task[fields.KIND] == SEND)(functools.partial(send, task))
        pl.when(task[fields.KIND] == ADD)(functools.partial(add, task))
        return index + 1, upcoming

    lax.while_loop(lambda carry: carry[1][fields.KIND] != END, one, (jnp.int32(0), read(jnp.int32(0))))


def _send(peers: Peers, come: Any, left: Any, task: list[Array]) -> None:
    """Tells the owner of a tile, once all consumers have written it."""
    plgpu.barrier_wait(left.at[task[fields.SEGMENT]])
    peers.signal(come, task[fields.TILE], task[fields.TO])


def _add(peers: Peers, come: Any, residual: Any, out: Any, inbox: Any, out_smem: Any, landed: Any, task: list[Array]) -> None:
    """Adds all ranks' parts of a block and writes the sum wherever it belongs."""
    m, n = pl.ds(task[fields.ROW] * BLOCK, BLOCK), pl.ds(task[fields.COLUMN] * BLOCK, BLOCK)
    smem = out_smem.at[task[fields.SLOT]]
    peers.wait(come, task[fields.TILE], peers.ranks)
    plgpu.wait_smem_to_gmem((SLOTS - 1) * len(peers.readers(out)), wait_read_only=True)
    if residual is not None:
        plgpu.copy_gmem_to_smem(residual.at[m, n], smem, landed)
        plgpu.barrier_wait(landed)
    images = [inbox.at[rank, task[fields.TILE], task[fields.BLOCK_IN_TILE]] for rank in range(peers.ranks)]
    parts = [_block_images.load(image, peers.interpreted).astype(jnp.float32) for image in images]
    total = sum(parts[1:], parts[0])
    if residual is not None:
        total += smem[...].astype(jnp.float32)
    smem[...] = total.astype(out.dtype)
    plgpu.commit_smem()
    for place in peers.readers(out):
        plgpu.copy_smem_to_gmem(smem, place.at[m, n])

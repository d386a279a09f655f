"""A GEMM that any CTA may join at any time: segments are claimed from one counter, in order.

The pipeline is that of `gemm`: a producer and consumers around a ring of stages. A second warp of the producer's warpgroup
claims. It hands each segment to all others through a small ring of *orders* in shared memory, and asks the counter for the
next one when a ring full of loads is left of the present one: early enough to hide the latency of the claim, late enough that
no CTA sits on work that others could begin.

Warpgroups meet at no barriers but those written here (`unsafe_no_auto_barriers`), so whoever loads is a single warp.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels import _fused_schedule as fields
from pallas_kernels import _mosaic
from pallas_kernels._gemm_config import GemmConfig
from pallas_kernels._gemm_pipeline import Segment, consume, load_segment, observe_last_releases

_ORDERS = 4  # in flight; a producer that runs ahead of slow epilogues over short segments stops there
_ORDER_PITCH = 32  # TMA copies to multiples of 128 bytes
_PRODUCER_REGISTERS, _IDLE_REGISTERS, _MOST_REGISTERS = 40, 24, 240
_REGISTERS_PER_SM = 65536
_COUNT_IN_LANE_0 = (
    "{ .reg .pred first; setp.eq.u32 first, $2, 0; mov.b32 $0, 0; @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1; }"
)


class Orders(NamedTuple):
    """The ring of orders. The k-th order is in slot k % _ORDERS."""

    smem: Any  # int32 [_ORDERS, _ORDER_PITCH], of which the first FIELDS are used
    posted: Any  # [_ORDERS], an order has come
    taken: Any  # [_ORDERS], all consumers are done with it
    wanted: Any  # [1], the producer will soon need another
    interpreted: bool


class Claims(NamedTuple):
    """Where segments come from."""

    table: Any  # int32 [segments + 1, FIELDS] in device memory
    counter: Any  # one semaphore, 0 at first; None in the interpreter
    num_ctas: int

    def take(self, index: Array) -> Array:
        """The next segment that nobody has, as this CTA's claim number `index`.

        The interpreter runs CTAs one after the other; there each has an equal stretch.
        """
        last = self.table.shape[0] - 1
        if self.counter is None:
            share = -(-last // self.num_ctas)
            return jnp.where(index < share, jnp.minimum(lax.axis_index("sm") * share + index, last), last)
        return jnp.minimum(_fetch_and_increment(self.counter), last)


def warpgroups(config: GemmConfig) -> int:
    """Consumers, and the producer with the warp that claims."""
    return config.consumers + 1


def multiply_claimed(
    claims: Claims,
    a: Any,  # [M, K]
    b: Any,  # [K, N] or, for two products at once, [K, 2, N]
    halves: int,  # 1 or 2 products
    write: Callable[..., None],  # (segment, each half's float32 sums [wg_m, wg_n], staging=staging), for each consumer
    config: GemmConfig,
    *,
    staging: Any,  # pytree of shared memory and barriers for `write`
    num_warpgroups: int,  # of the CTA, at least `warpgroups(config)`; the others stay idle
) -> None:
    """Multiplies segments until none is left; for all warpgroups of a CTA together."""
    stages = config.stages(halves == 2)
    minor = math.gcd(a.shape[-1], b.shape[-1])
    interpreted = claims.counter is None
    consumer_registers = _consumer_registers(config.consumers, num_warpgroups)

    @functools.partial(
        pl.run_scoped,
        a_smem=_mosaic.swizzled_smem((stages, config.tile_m, config.tile_k), a.dtype, global_minor=minor),
        b_smem=_mosaic.swizzled_smem((stages, halves, config.tile_k, config.tile_n), b.dtype, global_minor=minor),
        staging=staging,
        full=plgpu.Barrier(num_barriers=stages, num_arrivals=1 + halves),
        free=plgpu.Barrier(num_barriers=stages, num_arrivals=config.consumers),
        smem=plgpu.SMEM((_ORDERS, _ORDER_PITCH), jnp.int32),
        posted=plgpu.Barrier(num_barriers=_ORDERS),
        taken=plgpu.Barrier(num_barriers=_ORDERS, num_arrivals=config.consumers),
        wanted=plgpu.Barrier(),
        collective_axes="wg",
    )
    def _(a_smem: Any, b_smem: Any, staging: Any, full: Any, free: Any, **order_scratch: Any) -> None:
        wg = lax.axis_index("wg")
        orders = Orders(**order_scratch, interpreted=interpreted)

        @pl.when(wg < config.consumers)
        def _consumer() -> None:
            plgpu.set_max_registers(consumer_registers, action="increase")

            def write_ordered(segment: Segment, totals: list[Array]) -> None:
                # Read once more: over all the products these numbers would hold registers.
                write(_segment(config, _load(orders, segment.extra[0])), totals, staging=staging)

            consume(functools.partial(_follow, orders), a_smem, b_smem, full, free, write_ordered, config)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == config.consumers)
        def _producer() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            load = functools.partial(load_segment, a=a, b=b, a_smem=a_smem, b_smem=b_smem, full=full, free=free, config=config)
            orders_given, steps = _lead(claims, orders, config, stages, load)
            _by_warps(  # each the warp that waited for these barriers before
                interpreted,
                lambda: observe_last_releases(free, steps, stages),
                lambda: observe_last_releases(orders.taken, orders_given, _ORDERS),
            )

        @pl.when(wg > config.consumers)
        def _idle() -> None:
            plgpu.set_max_registers(_IDLE_REGISTERS, action="decrease")


def _consumer_registers(consumers: int, num_warpgroups: int) -> int:
    """What the other warpgroups leave to a consumer's threads, of the registers that the CTA is launched with."""
    launched = _REGISTERS_PER_SM // (num_warpgroups * _mosaic.WARPGROUP) // 8 * 8
    others = _PRODUCER_REGISTERS + _IDLE_REGISTERS * (num_warpgroups - consumers - 1)
    return min(_MOST_REGISTERS, (launched * num_warpgroups - others) // consumers // 8 * 8)


def _by_warps(interpreted: bool, *tasks: Callable[[], Any]) -> None:
    """Each task on a warp of its own; one after the other in the interpreter."""

    def run(warp: Any) -> None:
        for number, task in enumerate(tasks):
            pl.when(warp == number)(lambda task=task: (task(), None)[1])

    _mosaic.for_each_warp(run, len(tasks), interpreted)


def _await(orders: Orders, index: Array) -> Array:
    """The slot of order number `index`, once it has come."""
    slot = lax.rem(index, _ORDERS)
    plgpu.barrier_wait(orders.posted.at[slot])
    return slot


def _load(orders: Orders, slot: Array) -> list[Array]:
    return [orders.smem[slot, field] for field in range(fields.PLACE + 1)]


def _segment(config: GemmConfig, order: list[Array]) -> Segment:
    m, n, k_begin, k_steps, *extra = order
    return Segment(m * config.tile_m, n * config.tile_n, k_begin, k_steps, extra=tuple(extra))


Body = Callable[[Segment, Array], Array]
State = tuple[Array, Array, list[Array]]


def _follow(orders: Orders, body: Body) -> Array:
    """A consumer's walk over its CTA's segments, of which it knows the number of steps and the order's slot."""

    def next_steps(index: Array) -> Array:
        return orders.smem[_await(orders, index), fields.K_STEPS]

    def one(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        index, step, k_steps = state
        slot, zero = lax.rem(index, _ORDERS), jnp.int32(0)
        step = body(Segment(zero, zero, zero, k_steps, extra=(slot,)), step)
        plgpu.barrier_arrive(orders.taken.at[slot])
        return index + 1, step, next_steps(index + 1)

    start = (jnp.int32(0), jnp.int32(0), next_steps(jnp.int32(0)))
    index, step, _ = lax.while_loop(lambda state: state[2] > 0, one, start)
    plgpu.barrier_arrive(orders.taken.at[lax.rem(index, _ORDERS)])
    return step


def _lead(claims: Claims, orders: Orders, config: GemmConfig, stages: int, load: Body) -> tuple[Array, Array]:
    """The producer's walk: loads the segment of one order while it claims the next. Returns the numbers of orders and steps."""

    def post(index: Array) -> None:
        slot = lax.rem(index, _ORDERS)

        @pl.when(index >= _ORDERS)
        def _() -> None:
            plgpu.barrier_wait(orders.taken.at[slot])

        order = orders.smem.at[slot, pl.ds(0, fields.FIELDS)]
        plgpu.copy_gmem_to_smem(claims.table.at[claims.take(index)], order, orders.posted.at[slot])

    def one(state: State) -> State:
        index, step, order = state
        segment = _segment(config, order)
        rest = jnp.minimum(segment.k_steps, stages)

        def load_all() -> None:
            first = segment.k_steps - rest
            load(segment._replace(k_steps=first), step)
            plgpu.barrier_arrive(orders.wanted)
            load(segment._replace(k_begin=segment.k_begin + first, k_steps=rest), step + first)

        def claim() -> None:
            plgpu.barrier_wait(orders.wanted)
            post(index + 1)

        _by_warps(orders.interpreted, load_all, claim)
        upcoming = _load(orders, _await(orders, index + 1))
        plgpu.commit_smem()  # no warp may fall behind by a turn of the ring
        return index + 1, step + segment.k_steps, upcoming

    _by_warps(orders.interpreted, lambda: None, lambda: post(jnp.int32(0)))
    start = (jnp.int32(0), jnp.int32(0), _load(orders, _await(orders, jnp.int32(0))))
    index, step, _ = lax.while_loop(lambda state: state[2][fields.K_STEPS] > 0, one, start)
    return index + 1, step


def _fetch_and_increment(counter: Any) -> Array:
    """What the counter was; for a single warp, which counts once."""

    no_layout: Any = None  # of a scalar
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=no_layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=scalar)
    def fetch(_: Any, counter: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        pointer = mgpu_utils.memref_ptr(counter)
        lane = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(32, i32))
        counted: Any = llvm.inline_asm(i32, [pointer, lane], _COUNT_IN_LANE_0, "=&r,l,r", has_side_effects=True, asm_dialect=0)
        every, zero = mgpu_utils.c(0xFFFFFFFF, i32), mgpu_utils.c(0, i32)
        value = nvvm.shfl_sync(every, counted, zero, mgpu_utils.c(31, i32), nvvm.ShflKind.idx)
        return fragmented_array.FragmentedArray.splat(value, (), is_signed=True)

    return fetch(counter)  # pyright: ignore[reportCallIssue] (the decorator passes its context)

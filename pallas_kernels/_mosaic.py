"""What every Mosaic GPU kernel here shares: which devices it may run on, shared-memory arithmetic and the launch."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SMEM_LIMIT_BYTES = 232448
"""Shared memory that one CTA may use on Hopper (227 KiB)."""

WARPGROUP = 128
"""Threads of a warpgroup, Mosaic GPU's unit of program order."""

INTERPRETED = "NVIDIA H200 (interpreted)"
"""Device kind under which tests trace kernels for jax's GPU interpreter, see `Device.interpreted`."""

_HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")
_OLDEST_JAX = (0, 11)


class UnsupportedDeviceError(RuntimeError):
    """The device has no compiled path for a kernel; the message names the kernel, the device and the alternative."""


@dataclasses.dataclass(frozen=True)
class Device:
    """The device a kernel is traced for. `num_sms` is 0 where it is unknown, as on a CPU."""

    kind: str
    num_sms: int

    @property
    def interpreted(self) -> bool:
        """CTAs run one after the other and semaphores do not exist: a kernel must leave out waits for earlier CTAs."""
        return self.kind == INTERPRETED


def target_device() -> Device:
    """The device of the mesh in context (also of a mesh without hardware behind it), else jax's default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    if abstract is not None:
        return Device(abstract.device_kind, abstract.num_cores or 0)
    # A Device object, a platform name, or None.
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    device = jax.devices(default)[0] if default is None or isinstance(default, str) else default
    return Device(device.device_kind, getattr(device, "core_count", 0) or 0)


def require_hopper(kernel: str, num_sms: int) -> Device:
    """The target device, once it is known to run `kernel` on `num_sms` SMs.

    Raises:
      UnsupportedDeviceError: the device is no Hopper GPU, or jax is older than 0.11, which cannot compile all kernels.
      ValueError: `num_sms` is not between 1 and the device's SMs. More CTAs than SMs would not all be resident, and kernels
        whose CTAs wait for each other would hang.
    """
    device = target_device()
    if not _HOPPER.search(device.kind):
        raise UnsupportedDeviceError(
            f"{kernel} is compiled for Hopper GPUs (sm_90a) only and the device is {device.kind!r}; "
            f"use pallas_kernels.reference.{kernel}, which runs anywhere"
        )
    if not device.interpreted and jax.__version_info__ < _OLDEST_JAX:
        raise UnsupportedDeviceError(
            f"{kernel} needs jax 0.11 or newer (Python 3.12) and this is {jax.__version__}; "
            f"use pallas_kernels.reference.{kernel}, which runs with any"
        )
    if not 1 <= num_sms <= (device.num_sms or num_sms):
        raise ValueError(f"{kernel}: num_sms={num_sms} is not between 1 and the {device.num_sms} SMs of {device.kind}")
    return device


def swizzled_transforms(minor: int, dtype: Any) -> tuple[Any, ...]:
    """Tiling and swizzle with which both TMA and wgmma read a shared-memory block whose rows hold `minor` elements."""
    bits = minor * jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(bits)
    return (
        plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )


def swizzled_smem(shape: tuple[int, ...], dtype: Any, *, global_minor: int = 0) -> Any:
    """Shared memory for TMA copies and wgmma operands; the last two sizes of `shape` are one block, leading ones slots.

    Blocks come from, or go to, an array in global memory with rows of `global_minor` elements (0: some multiple of a block's).
    A TMA copy cannot end inside a swizzled row, so the row must divide both.
    """
    return plgpu.SMEM(shape, dtype, transforms=swizzled_transforms(math.gcd(shape[-1], global_minor), dtype))


def for_each_warp(f: Callable[[Any], None], count: int, interpreted: bool) -> None:
    """f(0) .. f(count - 1), each on its own warp of this warpgroup; one after the other in the interpreter."""
    if interpreted:
        for w in range(count):
            f(w)
        return

    @plgpu.warp_map
    def _(warp: Any) -> None:
        @pl.when(warp < count)
        def _() -> None:
            f(warp)


def update(x: Any, kernel: Callable[[Any], Any], interpreted: bool) -> Any:
    """The arrays `x`, one or a tree of them, after kernel(references to them), in place."""
    if interpreted:  # up to jax 0.10 the interpreter wants to be told the memory space, which run_state cannot do
        references = jax.tree.map(functools.partial(jax.new_ref, memory_space=plgpu.GMEM), x)
        kernel(references)
        return jax.tree.map(jax.freeze, references)
    # Leaves no reference behind that would keep the call from being placed on a stream.
    run: Any = pl.run_state(kernel)
    return run(x)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def launch(
    body: Callable[..., None],
    out_type: Any,
    *,
    name: str,
    num_sms: int,
    warpgroups: int,
    scratch: Any = (),
    cluster: int = 1,
    approx_math: bool = False,
) -> Callable[..., Any]:
    """A kernel of exactly `num_sms` persistent CTAs of `warpgroups` warpgroups; `body(*inputs, *outputs, *scratch)`.

    Axes in the body: "sm" (clusters), "cta" (CTAs of a cluster) and "wg" (warpgroups).

    Raises:
      UnsupportedDeviceError, ValueError: as `require_hopper`; ValueError also if `cluster` does not divide `num_sms`.
    """
    require_hopper(name, num_sms)
    if num_sms % cluster:
        raise ValueError(f"{name}: num_sms={num_sms} is not a multiple of the cluster of {cluster} CTAs")
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=(num_sms // cluster,),
        grid_names=("sm",),
        cluster=(cluster,),
        cluster_names=("cta",),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=approx_math, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )

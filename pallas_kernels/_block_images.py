"""64 x 64 blocks on their way between warpgroups, as each thread holds them: an image is only ever read as it was written.

A thread holds 32 elements of a block that wgmma made. They go as four pieces of 16 bytes, and pieces of neighbouring threads
lie side by side, so a warp reads or writes 512 bytes at once. In row-major order a thread would have two elements at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, vector

from pallas_kernels import _mosaic
from pallas_kernels._gemm_pipeline import BLOCK

_WORDS = 4  # int32, of two elements each, in 16 bytes
_PIECES = BLOCK * BLOCK // 2 // _mosaic.WARPGROUP // _WORDS
IMAGE = (_PIECES, _mosaic.WARPGROUP, _WORDS)
"""Shape of a block's image in device memory, int32."""

_LAYOUT = plgpu.Layout.WGMMA


def store(image: Any, block: jax.Array, interpreted: bool) -> None:
    """`block` [64, 64] into `image`, perhaps a peer's; only the calling thread knows of its own part, nothing is waited for."""
    block = block.astype(jnp.bfloat16)
    if interpreted:
        image[...] = lax.bitcast_convert_type(block.reshape(*IMAGE, 2), jnp.int32)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _LAYOUT))
    def write(_, image, block):
        words = [_only(vector.bitcast(_vector(1, _i32()), pair)) for pair in block.registers.flat]  # pairs of neighbours
        for piece in range(_PIECES):
            value = vector.from_elements(_vector(_WORDS, _i32()), words[piece * _WORDS : (piece + 1) * _WORDS])
            vector.store(value, image, _place(piece), alignment=16)

    write(image, block)  # pyright: ignore[reportCallIssue] (the decorator passes its context)


def load(image: Any, interpreted: bool) -> jax.Array:
    """The block [64, 64] of an image, bfloat16."""
    if interpreted:
        return lax.bitcast_convert_type(image[...], jnp.bfloat16).reshape(BLOCK, BLOCK)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((BLOCK, BLOCK), jnp.bfloat16, layout=_LAYOUT)
    )
    def read(_, image):
        bf16 = ir.BF16Type.get()
        zero = arith.constant(bf16, ir.FloatAttr.get(bf16, 0.0))
        block = fragmented_array.FragmentedArray.splat(zero, (BLOCK, BLOCK), _LAYOUT.to_mgpu())
        registers = block.registers.copy()
        for piece in range(_PIECES):
            value = vector.load(_vector(_WORDS, _i32()), image, _place(piece), alignment=16)
            for i in range(_WORDS):
                word = vector.extract(value, dynamic_position=[], static_position=[i])
                pair = vector.bitcast(_vector(2, bf16), vector.from_elements(_vector(1, _i32()), [word]))
                registers.flat[piece * _WORDS + i] = pair
        return type(block)(_registers=registers, _layout=block.layout, _is_signed=None)

    return read(image)  # pyright: ignore[reportCallIssue] (the decorator passes its context)


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _vector(size: int, element: Any) -> Any:
    return ir.VectorType.get((size,), element)


def _only(value: Any) -> Any:
    return vector.extract(value, dynamic_position=[], static_position=[0])


def _place(piece: int) -> list[Any]:
    """Indices of this thread's piece."""
    index = ir.IndexType.get()
    thread = arith.remui(gpu.thread_id(gpu.Dimension.x), mgpu_utils.c(_mosaic.WARPGROUP, index))
    return [mgpu_utils.c(piece, index), thread, mgpu_utils.c(0, index)]

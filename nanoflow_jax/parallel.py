"""Tensor parallelism: how a model is divided over the mesh axis `tp`, and the collectives between the parts."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from nanoflow_jax.config import ModelConfig

TP = "tp"
# Padding the vocabulary to whole tiles per rank keeps the output projection on tile borders for any tp_size.
_VOCAB_MULTIPLE = 128
# Rows of 64 elements are what a GPU's TMA and tensor cores take at full speed (docs/kernels.md).
_D_FF_MULTIPLE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """The sizes of a model once it is divided over `tp_size` ranks; all of them are totals over the ranks.

    With fewer KV heads than ranks every KV head is held `kv_replicas` times and its query group is divided among the copies,
    so that `num_kv_heads` here is the model's times `kv_replicas` and `group_size` the model's divided by it. With
    `gathered_o_proj` the attention output projection is divided by columns, behind an all-gather of its input, instead of by
    rows, before an all-reduce of its output.

    Vocabulary and feed-forward width are padded at their end with zeros, which change no result: a column of zeros in gate and
    up gives silu(0) * 0 = 0, which meets a row of zeros in down.
    """

    tp_size: int
    num_kv_heads: int
    group_size: int
    kv_replicas: int
    padded_vocab_size: int
    padded_d_ff: int
    gathered_o_proj: bool = False

    @property
    def kv_heads_per_rank(self) -> int:
        return self.num_kv_heads // self.tp_size


def parallel_layout(config: ModelConfig, tp_size: int) -> ParallelLayout:
    """The division of `config` over `tp_size` ranks.

    Raises:
      ValueError: heads cannot be divided; the message gives the number that does not fit.
    """
    if tp_size < 1:
        raise ValueError(f"{tp_size=} must be at least 1")
    if config.num_heads % tp_size:
        raise ValueError(f"{config.name}: num_heads={config.num_heads} cannot be divided over {tp_size=}")
    if config.num_kv_heads % tp_size and tp_size % config.num_kv_heads:
        raise ValueError(
            f"{config.name}: num_kv_heads={config.num_kv_heads} neither divides nor is divided by {tp_size=}, "
            "so KV heads can be neither split nor replicated evenly"
        )
    replicas = max(1, tp_size // config.num_kv_heads)

    def padded(size: int, multiple_per_rank: int) -> int:
        multiple = multiple_per_rank * tp_size
        return -(-size // multiple) * multiple

    return ParallelLayout(
        tp_size=tp_size,
        num_kv_heads=config.num_kv_heads * replicas,
        group_size=config.group_size // replicas,
        kv_replicas=replicas,
        padded_vocab_size=padded(config.vocab_size, _VOCAB_MULTIPLE),
        padded_d_ff=padded(config.d_ff, _D_FF_MULTIPLE),
    )


def make_mesh(tp_size: int) -> jax.sharding.Mesh:
    """A mesh of the first `tp_size` devices along axis `tp`.

    Raises:
      ValueError: the machine has fewer devices.
    """
    devices = jax.devices()
    if tp_size > len(devices):
        raise ValueError(f"{tp_size=} needs {tp_size} devices, this machine has {len(devices)} ({devices[0].device_kind})")
    return jax.sharding.Mesh(np.array(devices[:tp_size]), (TP,), axis_types=(jax.sharding.AxisType.Auto,))


def all_reduce(x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Sum over ranks of what a row-parallel projection left on each."""
    return lax.psum(x, TP)


def all_gather(x: Array, axis: int) -> Array:
    """Every rank's part of `axis` side by side, in rank order."""
    return lax.all_gather(x, TP, axis=axis, tiled=True)


def device_name(device: Any) -> str:
    """As plans and the hardware table name it: h200 for an "NVIDIA H200"."""
    return device.device_kind.lower().removeprefix("nvidia ").split()[0]

"""From checkpoint tensors, named and shaped as Hugging Face does, to our parameters: pure numpy, one shard at a time.

A `Recipe` says which tensors make a parameter and builds any rectangular part of it. Hugging Face linear weights are
`[out, in]`. Query head n belongs to KV head n // G; where each KV head is held by r ranks, our head k is copy k % r of theirs
number k // r with G / r of its queries, so that queries (and with them the rows of the output projection) keep their order
and only keys and values are copied.

The host only gathers rows, in the order of axes in which they are stored; `axes` says how to transpose them, which the device
does at its own speed.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.parallel import ParallelLayout

T = TypeVar("T")
Index = tuple[slice, ...]
Arrays = Sequence[np.ndarray]


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: torn, hostile, of another model, or of a kind that is not handled."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint, not yet read. `read` gives an array of `shape`; where the file allows it, a mapped view."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One parameter: `sources` names its tensors and their shapes, `build(arrays, index)` makes the part `index` of it with its
    axes in stored order, and transposing by `axes` gives our order.

    Arrays come in the order of `sources`; `index` has one slice with start and stop per stored axis. Where the parameter is
    longer than its tensors (vocabulary, feed-forward width) it continues with zeros. The result may be a view.
    """

    sources: Mapping[str, tuple[int, ...]]
    build: Callable[[Arrays, Index], np.ndarray]
    axes: tuple[int, ...]

    def stored_order(self, ours: Sequence[T]) -> tuple[T, ...]:
        """What belongs to our axes (sizes, slices, mesh axes), in the order of the stored ones."""
        return tuple(ours[self.axes.index(axis)] for axis in range(len(self.axes)))


def recipes(config: ModelConfig, layout: ParallelLayout) -> dict[str, Recipe]:
    """Parameter path, as in `models.decoder.parameter_specs`, -> recipe."""
    V, D = config.vocab_size, config.d_model
    table = {"embed": Recipe({"model.embed_tokens.weight": (V, D)}, _same, (0, 1))}
    for i in range(config.num_layers):
        layer = _layer_recipes(config, layout, f"model.layers.{i}.")
        table.update({f"layers.{i}.{name}": recipe for name, recipe in layer.items()})
    table["final_norm"] = Recipe({"model.norm.weight": (D,)}, _same, (0,))
    if not config.tie_embeddings:
        table["lm_head"] = Recipe({"lm_head.weight": (V, D)}, _same, (1, 0))
    return table


def _layer_recipes(config: ModelConfig, layout: ParallelLayout, prefix: str) -> dict[str, Recipe]:
    D, F, E = config.d_model, config.d_ff, config.num_experts
    attn = prefix + "self_attn."
    qkv_rows = {"q": config.q_dim, "k": config.kv_dim, "v": config.kv_dim}
    heads = _heads(layout, config.head_dim)
    table = {
        "attn_norm": Recipe({prefix + "input_layernorm.weight": (D,)}, _same, (0,)),
        "qkv_proj": Recipe({f"{attn}{x}_proj.weight": (n, D) for x, n in qkv_rows.items()}, heads, (3, 0, 1, 2)),
        "o_proj": Recipe({attn + "o_proj.weight": (D, config.q_dim)}, _same, (1, 0)),
        "ffn_norm": Recipe({prefix + "post_attention_layernorm.weight": (D,)}, _same, (0,)),
    }
    if config.qkv_bias:
        table["qkv_bias"] = Recipe({f"{attn}{x}_proj.bias": (n,) for x, n in qkv_rows.items()}, heads, (0, 1, 2))
    if not config.is_moe:
        mlp = prefix + "mlp."
        gate_up = {mlp + "gate_proj.weight": (F, D), mlp + "up_proj.weight": (F, D)}
        table["gate_up_proj"] = Recipe(gate_up, _stacked, (2, 0, 1))
        table["down_proj"] = Recipe({mlp + "down_proj.weight": (D, F)}, _same, (1, 0))
        return table
    moe = prefix + "block_sparse_moe."
    gate_up = {f"{moe}experts.{e}.{w}.weight": (F, D) for e in range(E) for w in ("w1", "w3")}
    down = {f"{moe}experts.{e}.w2.weight": (D, F) for e in range(E)}
    table["router"] = Recipe({moe + "gate.weight": (E, D)}, _same, (1, 0))
    table["experts_gate_up"] = Recipe(gate_up, _stacked_pairs, (0, 3, 1, 2))
    table["experts_down"] = Recipe(down, _stacked, (0, 2, 1))
    return table


def _same(arrays: Arrays, index: Index) -> np.ndarray:
    return _part(arrays[0], index)


def _stacked(arrays: Arrays, index: Index) -> np.ndarray:
    return np.stack([_part(x, index[1:]) for x in arrays[index[0]]])


def _stacked_pairs(arrays: Arrays, index: Index) -> np.ndarray:
    """Gate and up of expert 0, of expert 1, ... -> `[E, 2, F, D]`."""
    experts = range(len(arrays) // 2)[index[0]]
    return np.stack([_stacked(arrays[2 * e : 2 * e + 2], index[1:]) for e in experts])


def _part(x: np.ndarray, index: Index) -> np.ndarray:
    """x[index], with zeros where the index reaches past the end."""
    part = x[index]
    missing = [(0, s.stop - s.start - have) for s, have in zip(index, part.shape, strict=True)]
    return np.pad(part, missing) if any(after for _, after in missing) else part


def _heads(layout: ParallelLayout, head_dim: int) -> Callable[[Arrays, Index], np.ndarray]:
    """q `[N H, ...]`, k and v `[K H, ...]` -> `[K, G + 2, H, ...]`, K and G as in `layout`."""
    G, r = layout.group_size, layout.kv_replicas

    def build(arrays: Arrays, index: Index) -> np.ndarray:
        first, last = index[0].start, index[0].stop
        arrays = [x[:, *index[3:]] for x in arrays]
        rest = arrays[0].shape[1:]
        queries = arrays[0][first * G * head_dim : last * G * head_dim].reshape(last - first, G, head_dim, *rest)
        theirs = slice(first // r, -(-last // r))
        copies = slice(first - theirs.start * r, last - theirs.start * r)
        keys, values = (
            np.repeat(x[theirs.start * head_dim : theirs.stop * head_dim].reshape(-1, 1, head_dim, *rest), r, axis=0)[copies]
            for x in arrays[1:]
        )
        return np.concatenate([queries, keys, values], axis=1)[:, index[1], index[2]]

    return build


def full_index(shape: Sequence[int], index: Sequence[slice] | None = None) -> Index:
    """`index` (by default, everything) with start and stop filled in."""
    index = index if index is not None else (slice(None),) * len(shape)
    return tuple(slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=True))


# Tables that older exports store beside the weights; the model recomputes them from its config.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"
_MAX_NAMED = 8


def fitting_recipes(config: ModelConfig, layout: ParallelLayout, tensors: Mapping[str, Tensor]) -> dict[str, Recipe]:
    """`recipes`, after checking that the checkpoint holds exactly the tensors that they need, in their shapes.

    Two extras are known to be harmless: stored rotary tables, and the output projection of a model with tied embeddings if
    it equals the embedding.

    Raises:
      CheckpointError: tensors are missing, unknown or of another shape; the message names them.
    """
    if config.num_layers * max(1, config.num_experts) > len(tensors):  # and do not list what is missing
        raise CheckpointError(
            f"{config.name}: {config.num_layers} layers of {config.num_experts} experts cannot be in {len(tensors)} tensors"
        )
    table = recipes(config, layout)
    wanted = {name: shape for recipe in table.values() for name, shape in recipe.sources.items()}
    extra = {name for name in tensors.keys() - wanted.keys() if not name.endswith(_DERIVED_SUFFIX)}
    if config.tie_embeddings and "lm_head.weight" in extra and _tied(tensors):
        extra.remove("lm_head.weight")
    faults = {
        "missing": sorted(wanted.keys() - tensors.keys()),
        "not part of the model": sorted(extra),
        "wrongly shaped": [
            f"{name} {tensors[name].shape}, expected {shape}"
            for name, shape in wanted.items()
            if name in tensors and tensors[name].shape != shape
        ],
    }
    message = "; ".join(f"{kind}: {_name_some(names)}" for kind, names in faults.items() if names)
    if message:
        raise CheckpointError(f"{config.name}: tensors do not fit the model: {message}")
    return table


def _tied(tensors: Mapping[str, Tensor]) -> bool:
    head, embed = tensors["lm_head.weight"], tensors.get("model.embed_tokens.weight")
    return embed is not None and head.shape == embed.shape and np.array_equal(bits(head.read()), bits(embed.read()))


def _name_some(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def bits(x: np.ndarray) -> np.ndarray:
    """The same array as unsigned integers: numpy moves and compares those much faster than extension types."""
    return x.view(f"u{x.dtype.itemsize}")

"""Canonical parameters from Hugging Face tensors: against the reference logits, by round trips, and part by part."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoflow_jax.checkpoints import load_model
from nanoflow_jax.checkpoints.layout import Recipe, full_index, recipes
from nanoflow_jax.checkpoints.relayout import plain_layout, relayout
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.models.decoder import parameter_specs
from nanoflow_jax.parallel import make_mesh, parallel_layout
from tests.model.checkpoint_files import TINY, TINY_NAMES, decoder_arrays, forward


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_tiny_checkpoint_gives_the_reference_logits_at_every_tp_size(name: str, tp_size: int):
    if name == "llama2-tiny" and tp_size == 4:
        with pytest.raises(ValueError, match="num_heads=2 cannot be divided over tp_size=4"):
            load_model(TINY / name, mesh=make_mesh(tp_size), dtype="float32")
        return
    model = load_model(TINY / name, mesh=make_mesh(tp_size), dtype="float32")
    golden = np.load(TINY / name / "golden.npz")
    logits = forward(model.config, model.layout, decoder_arrays(model.decoder), golden["input_ids"])
    np.testing.assert_allclose(logits, golden["logits"], atol=5e-5)


def test_parameters_lie_on_the_mesh_as_their_specs_say():
    model = load_model(TINY / "qwen2-tiny", mesh=make_mesh(4), dtype="bfloat16")
    specs = parameter_specs(model.config, model.layout)
    qkv, embed = model.decoder.layers[1].qkv_proj.get_value(), model.decoder.embed.get_value()
    assert qkv.dtype == embed.dtype == jax.numpy.bfloat16
    assert qkv.sharding.is_equivalent_to(specs["layers.1.qkv_proj"].sharding(make_mesh(4)), 4)
    assert {shard.data.shape for shard in qkv.addressable_shards} == {(256, 1, 4 // 4 + 2, 64)}
    assert {shard.data.shape for shard in embed.addressable_shards} == {(512 // 4, 256)}


def test_the_vocabulary_is_padded_with_zeros(tmp_path):
    model = load_model(TINY / "llama3-tiny", mesh=make_mesh(4), dtype="float32")
    odd = dataclasses.replace(model.config, vocab_size=397)
    layout = parallel_layout(odd, 4)
    assert layout.padded_vocab_size == 512
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(397, odd.d_model)).astype(np.float32)
    table = recipes(odd, layout)
    embed = build(table["embed"], [weights], (512, odd.d_model))
    head = build(table["lm_head"], [weights], (odd.d_model, 512))
    np.testing.assert_array_equal(embed[:397], weights)
    np.testing.assert_array_equal(head, embed.T)
    assert not embed[397:].any()


def build(
    recipe: Recipe, sources: list[np.ndarray], shape: tuple[int, ...], index: tuple[slice, ...] | None = None
) -> np.ndarray:
    """The part `index` of a parameter of `shape`, in our order of axes."""
    stored = full_index(recipe.stored_order(shape), None if index is None else recipe.stored_order(index))
    return recipe.build(sources, stored).transpose(recipe.axes)


@st.composite
def models_on_ranks(draw) -> tuple[ModelConfig, int]:
    tp_size = draw(st.sampled_from([1, 2, 4, 8]))
    kv_heads = draw(st.sampled_from([n for n in range(1, 9) if n % tp_size == 0 or tp_size % n == 0]))
    group = draw(st.sampled_from([n for n in range(1, 9) if (n * kv_heads) % tp_size == 0]))
    experts = draw(st.sampled_from([0, 3]))
    config = ModelConfig(
        name="drawn",
        vocab_size=draw(st.integers(1, 300)),
        d_model=draw(st.integers(1, 9)),
        d_ff=draw(st.integers(1, 200)),
        num_layers=1,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 3)),
        max_context=8,
        tie_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        num_experts=experts,
        experts_per_token=min(experts, 2),
    )
    return config, tp_size


@settings(max_examples=60)
@given(models_on_ranks(), st.randoms(use_true_random=False))
def test_recipes_build_any_part_and_can_be_undone(drawn, random):
    config, tp_size = drawn
    layout = parallel_layout(config, tp_size)
    specs = parameter_specs(config, layout)
    table = recipes(config, layout)
    assert table.keys() == specs.keys()
    rng = np.random.default_rng(0)
    for path, recipe in table.items():
        sources = [rng.normal(size=shape).astype(np.float32) for shape in recipe.sources.values()]
        whole = build(recipe, sources, specs[path].shape)
        assert whole.shape == specs[path].shape
        index = tuple(slice(*sorted((random.randint(0, n), random.randint(0, n)))) for n in whole.shape)
        if all(part.start < part.stop for part in index):
            np.testing.assert_array_equal(build(recipe, sources, whole.shape, index), whole[index])
        for ours, theirs in zip(_undo(path, whole, config, layout.kv_replicas), sources, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def _undo(path: str, x: np.ndarray, config: ModelConfig, replicas: int) -> list[np.ndarray]:
    """The checkpoint's tensors from a whole parameter."""
    attribute = path.rpartition(".")[2]
    if attribute in ("qkv_proj", "qkv_bias"):
        x = np.moveaxis(x, 0, -1) if attribute == "qkv_proj" else x
        rest = x.shape[3:]
        copies = x[:, -2:].reshape(config.num_kv_heads, replicas, 2, config.head_dim, *rest)
        assert (copies == copies[:, :1]).all()
        keys, values = copies[:, 0, 0], copies[:, 0, 1]
        return [part.reshape(-1, *rest) for part in (x[:, :-2], keys, values)]
    if attribute == "embed":
        return [x[: config.vocab_size]]
    if attribute == "lm_head":
        return [x.T[: config.vocab_size]]
    if attribute in ("o_proj", "down_proj", "router"):
        return [x[: config.d_ff].T if attribute == "down_proj" else x.T]
    F = config.d_ff
    if attribute == "gate_up_proj":
        return [x[:, 0, :F].T, x[:, 1, :F].T]
    if attribute == "experts_gate_up":
        return [x[e, :, half, :F].T for e in range(len(x)) for half in (0, 1)]
    return list(x[:, :F].swapaxes(1, 2)) if attribute == "experts_down" else [x]


@settings(max_examples=30)
@given(models_on_ranks())
def test_relayout_on_the_device_agrees_with_the_recipes(drawn):
    config, tp_size = drawn
    layout, plain = parallel_layout(config, tp_size), plain_layout(config)
    rng = np.random.default_rng(0)
    plain_specs, specs = parameter_specs(config, plain), parameter_specs(config, layout)
    for path in specs:
        recipe, ours = recipes(config, plain)[path], recipes(config, layout)[path]
        sources = [rng.normal(size=shape).astype(np.float32) for shape in recipe.sources.values()]
        base = build(recipe, sources, plain_specs[path].shape)
        expected = build(ours, sources, specs[path].shape)
        attribute = path.rpartition(".")[2]
        np.testing.assert_array_equal(relayout(attribute, jax.numpy.asarray(base), layout), expected)

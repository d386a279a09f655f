"""Random weights: the same model on any mesh, finite activations, attention that is neither uniform nor a copy."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from nanoflow_jax.checkpoints import CheckpointError, load_model
from nanoflow_jax.checkpoints.random_weights import random_parameters
from nanoflow_jax.checkpoints.sources import open_source
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.models.decoder import build_decoder, parameter_specs
from nanoflow_jax.parallel import make_mesh, parallel_layout
from tests.model.checkpoint_files import TINY, decoder_arrays, forward

CONFIG = ModelConfig(
    name="small", vocab_size=301, d_model=64, d_ff=96, num_layers=3, num_heads=16, num_kv_heads=2, head_dim=16, max_context=64,
    qkv_bias=True, tie_embeddings=False,
)  # fmt: skip
MOE = dataclasses.replace(CONFIG, qkv_bias=False, tie_embeddings=True, num_experts=4, experts_per_token=2)
IDS = np.random.default_rng(0).integers(0, 301, 24)


@functools.cache
def parameters(config, tp_size, seed=0):
    layout = parallel_layout(config, tp_size)
    return layout, random_parameters(config, layout, make_mesh(tp_size), jax.numpy.dtype("float32"), seed)


def logits(config, tp_size):
    layout, arrays = parameters(config, tp_size)
    return forward(config, layout, decoder_arrays(build_decoder(config, layout, arrays)), IDS)


@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "experts"])
def test_a_seed_is_one_model_on_any_number_of_ranks(config):
    """Field case 27: two KV heads over up to eight ranks."""
    expected = logits(config, 1)
    for tp_size in (4, 8):
        np.testing.assert_allclose(logits(config, tp_size), expected, atol=1e-5)


def test_another_seed_is_another_model():
    config = dataclasses.replace(MOE, num_layers=1)
    (_, ours), (_, theirs) = parameters(config, 1), parameters(config, 1, seed=1)
    for path in ours:
        assert path.endswith("norm") or not np.array_equal(ours[path], theirs[path])


@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "experts"])
def test_logits_have_unit_scale_and_depend_on_the_past(config):
    values = logits(config, 1)
    assert 0.5 < values.std() < 2
    layout, arrays = parameters(config, 1)
    changed = np.array(IDS)
    changed[0] = (changed[0] + 1) % config.vocab_size
    moved = forward(config, layout, decoder_arrays(build_decoder(config, layout, arrays)), changed)[-1] - values[-1]
    assert np.abs(moved).max() > 0.01


def test_weights_are_made_in_parts_where_they_belong():
    layout, arrays = parameters(CONFIG, 8)
    for path, spec in parameter_specs(CONFIG, layout).items():
        assert arrays[path].shape == spec.shape
        assert arrays[path].dtype == np.float32
        assert arrays[path].sharding.is_equivalent_to(spec.sharding(make_mesh(8)), len(spec.shape))
    assert not np.asarray(arrays["embed"])[CONFIG.vocab_size :].any()


def test_presets_have_sizes_only():
    with pytest.raises(CheckpointError, match="preset llama3-8b gives sizes and has no weights"):
        load_model("llama3-8b", mesh=make_mesh(1), dtype="bfloat16")
    with pytest.raises(ValueError, match="is not a type of weights"):
        load_model("llama3-8b", mesh=make_mesh(1), dtype="int8", random_weights=True)


def test_random_weights_take_the_sizes_and_tokenizer_of_a_folder():
    calls = []
    model = load_model(
        TINY / "mixtral-tiny", mesh=make_mesh(2), dtype="bfloat16", random_weights=True, seed=3,
        progress=lambda *call: calls.append(call),
    )  # fmt: skip
    assert model.config.num_experts == 8
    assert model.tokenizer is not None
    assert "random weights, seed 3" in model.source
    assert calls[-1][1] == calls[-1][2] == len(parameter_specs(model.config, model.layout))


def test_smollm2_with_random_weights_needs_no_download(tmp_path):
    assert open_source("smollm2", tmp_path, needs_weights=False).config.num_layers == 30
    assert not list(tmp_path.iterdir())

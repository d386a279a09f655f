"""What can be divided over ranks and what is refused; vocabulary padding; rotary frequencies; token ranges; config files."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoflow_jax.batch import BatchShape, empty_batch, pack, packed_size, unpack
from nanoflow_jax.config import PRESETS, from_hf, preset
from nanoflow_jax.operations import rope_frequencies, step_inputs
from nanoflow_jax.parallel import make_mesh, parallel_layout
from tests.model.steps import Chunk, Host, random_model
from tests.model.test_golden import SHAPE, small_config


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"smollm2-135m", "qwen2-7b"}))
def test_presets_divide(name: str, tp_size: int) -> None:
    layout, config = parallel_layout(preset(name), tp_size), preset(name)
    assert layout.num_kv_heads * layout.group_size == config.num_heads
    assert layout.padded_vocab_size % tp_size == 0
    assert config.vocab_size <= layout.padded_vocab_size < config.vocab_size + 128 * tp_size


@pytest.mark.parametrize(("tp_size", "per_rank"), [(1, 29568), (2, 14784), (4, 7424), (8, 3712)])
def test_feed_forward_width_is_padded_to_multiples_of_64_on_each_rank(tp_size: int, per_rank: int) -> None:
    assert parallel_layout(preset("qwen2-72b"), tp_size).padded_d_ff == tp_size * per_rank
    llama = preset("llama3-70b")
    assert parallel_layout(llama, tp_size).padded_d_ff == llama.d_ff


@pytest.mark.parametrize(
    ("name", "tp_size", "reason"),
    [
        ("smollm2-135m", 2, "num_heads=9"),
        ("qwen2-7b", 8, "num_heads=28"),
        ("llama3-8b", 0, "tp_size=0"),
        ("llama3-8b", 3, "num_heads=32"),
    ],
)
def test_case_27_what_cannot_be_divided_is_refused_with_the_number(name: str, tp_size: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parallel_layout(preset(name), tp_size)


def test_more_ranks_than_devices() -> None:
    with pytest.raises(ValueError, match="needs 9 devices, this machine has 8"):
        make_mesh(9)


def test_case_31_padded_ids_have_no_probability() -> None:
    config = small_config()
    model = random_model(config, 8)
    host = Host(model, SHAPE, page_size=4, num_pages=64)
    assert model.layout.padded_vocab_size == 1024
    packed = pack(host.batch([Chunk(0, [1, 2, 3], 0)]))

    row_logits, _ = host._forward(nnx.state(model.decoder), host.cache, host.last_tokens, packed)
    assert np.isneginf(np.asarray(row_logits)[:, config.vocab_size :]).all()
    assert np.isfinite(np.asarray(row_logits)[0, : config.vocab_size]).all()


def test_case_28_llama3_rope_scaling() -> None:
    """The formula written by wavelength, as the reference implementation has it."""
    config = preset("llama3.1-8b")
    scaling = config.rope_scaling
    expected = []
    for i in range(0, config.head_dim, 2):
        frequency = config.rope_theta ** (-i / config.head_dim)
        wavelength = 2 * np.pi / frequency
        if wavelength < scaling.original_max_context / scaling.high_freq_factor:
            expected.append(frequency)
        elif wavelength > scaling.original_max_context / scaling.low_freq_factor:
            expected.append(frequency / scaling.factor)
        else:
            smooth = scaling.original_max_context / wavelength - scaling.low_freq_factor
            smooth /= scaling.high_freq_factor - scaling.low_freq_factor
            expected.append((1 - smooth) * frequency / scaling.factor + smooth * frequency)
    np.testing.assert_allclose(rope_frequencies(config), expected, rtol=1e-12)


@pytest.mark.parametrize("position", [0, 1000, 8000, 60000])
def test_case_28_tables_at_far_positions(position: int) -> None:
    config = preset("llama3.1-8b")
    batch = empty_batch(BatchShape(2, 2, 4))
    batch.positions[:] = position
    step = step_inputs(config, unpack(jnp.asarray(pack(batch)), batch.shape))
    exact = position * rope_frequencies(config)
    # float32 angles: half a unit in the last place of the largest one.
    np.testing.assert_allclose(step.cos[0], np.cos(exact), atol=1e-7 * (1 + position))
    np.testing.assert_allclose(step.sin[1], np.sin(exact), atol=1e-7 * (1 + position))


def test_batch_survives_packing() -> None:
    shape = BatchShape(7, 3, 5)
    rng = np.random.default_rng(0)
    batch = empty_batch(shape)
    for field in dataclasses.fields(batch):
        array = getattr(batch, field.name)
        setattr(batch, field.name, rng.integers(0, 2**31 - 1, array.shape).astype(array.dtype))
    packed = pack(batch)
    assert packed.shape == (packed_size(shape),)
    restored = jax.jit(unpack, static_argnums=1)(packed, shape)
    for field in dataclasses.fields(batch):
        original = getattr(batch, field.name)
        back = np.asarray(getattr(restored, field.name))
        assert back.dtype == original.dtype
        np.testing.assert_array_equal(back, original)


@settings(max_examples=50)
@given(num_decode=st.integers(0, 6), prompts=st.lists(st.integers(1, 9), max_size=3), data=st.data())
def test_token_ranges_partition_a_step(num_decode: int, prompts: list[int], data: st.DataObject) -> None:
    """Queries that the parts of a cut batch attend with are those of the whole, at the same positions."""
    shape = BatchShape(40, 9, 8)
    batch = empty_batch(shape)
    lens = [1] * num_decode + prompts
    rows = len(lens)
    batch.num_decode = np.int32(num_decode)
    batch.q_lens[:rows] = lens
    batch.q_starts[:rows] = np.cumsum([0, *lens])[:-1]
    batch.kv_lens[:rows] = np.array(lens, np.int32) + 11
    cuts = sorted({0, 40, *data.draw(st.lists(st.integers(1, 39), max_size=3))})
    config = small_config()
    seen = []
    for start, stop in itertools.pairwise(cuts):
        step = step_inputs(config, batch, start, stop)
        for i, kv_len in enumerate(np.asarray(step.decode_kv_lens)):
            if kv_len:
                seen.append((start + i, int(kv_len) - 1))
        for q_start, q_len, kv_len in zip(*map(np.asarray, (step.q_starts, step.q_lens, step.kv_lens)), strict=True):
            seen += [(start + int(q_start) + j, int(kv_len - q_len) + j) for j in range(q_len)]
    expected = []
    for row in range(rows):
        first = batch.q_starts[row]
        expected += [(first + j, batch.kv_lens[row] - lens[row] + j) for j in range(lens[row])]
    assert sorted(seen) == sorted(expected)


HF_LLAMA = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_softcapping": 30.0}, "logit_softcapping=30.0"),
        ({"model_type": "gemma3"}, "gemma3"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"num_attention_heads": None}, "num_attention_heads=None"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True}, "sliding_window=32"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ],
)
def test_config_attributes_that_are_not_handled_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf({**HF_LLAMA, **change})


def test_case_30_a_window_that_is_off_is_off() -> None:
    config = from_hf({**HF_LLAMA, "model_type": "qwen2", "sliding_window": 32, "use_sliding_window": False})
    assert config.qkv_bias
    assert config == from_hf({**HF_LLAMA, "model_type": "qwen2"})


def test_config_spellings_of_rope_agree() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    older = from_hf({**HF_LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})
    newer = from_hf(
        {k: v for k, v in HF_LLAMA.items() if k != "rope_theta"} | {"rope_parameters": {**scaling, "rope_theta": 5e5}}
    )
    assert older == newer
    assert older.rope_scaling.original_max_context == 64


@pytest.mark.parametrize(
    "change", [{"num_attention_heads": 0}, {"hidden_size": True}, {"vocab_size": "9"}, {"rope_scaling": 3}]
)
def test_config_values_of_a_wrong_type_are_refused(change: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(change)).split("_")[0]):
        from_hf({**HF_LLAMA, **change})

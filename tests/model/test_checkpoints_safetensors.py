"""Hugging Face folders: single and sharded files, every fault by name, torn and hostile files."""

import json
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from nanoflow_jax.checkpoints import CheckpointError, load_model
from nanoflow_jax.checkpoints.hf_folder import read_config, read_tensors, safetensors_file
from nanoflow_jax.checkpoints.layout import fitting_recipes, recipes
from nanoflow_jax.checkpoints.placing import place_parameters
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.parallel import make_mesh, parallel_layout
from tests.model.checkpoint_files import TINY, copy_tiny, decoder_arrays, tiny_tensors


def load(source, **kwargs):
    return load_model(source, mesh=make_mesh(1), dtype=kwargs.pop("dtype", "float32"), **kwargs)


def assert_same_parameters(ours, theirs):
    ours, theirs = decoder_arrays(ours.decoder), decoder_arrays(theirs.decoder)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        np.testing.assert_array_equal(array, theirs[path], err_msg=path)


def write_shards(folder, tensors, num_shards):
    (folder / "model.safetensors").unlink(missing_ok=True)
    names = sorted(tensors)
    weight_map = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::num_shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards_give_the_same_parameters_as_one_file(tmp_path):
    folder = copy_tiny("mixtral-tiny", tmp_path)
    write_shards(folder, tiny_tensors("mixtral-tiny"), 3)
    assert_same_parameters(load(folder), load(TINY / "mixtral-tiny"))


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_half_precision_files_are_read_exactly(tmp_path, stored, dtype):
    tensors = {name: value.astype(stored) for name, value in tiny_tensors("llama2-tiny").items()}
    model = load(copy_tiny("llama2-tiny", tmp_path, tensors), dtype=dtype)
    expected = tensors["model.layers.0.mlp.down_proj.weight"].astype(dtype).T
    np.testing.assert_array_equal(decoder_arrays(model.decoder)["layers.0.down_proj"], expected)


def test_arrays_keep_no_tie_to_the_file(tmp_path):
    folder = copy_tiny("llama2-tiny", tmp_path)
    before = decoder_arrays((model := load(folder)).decoder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    for path, array in decoder_arrays(model.decoder).items():
        np.testing.assert_array_equal(array, before[path])


def test_end_of_sequence_ids_of_both_files_count(tmp_path):
    """Field case 13: not only the end of sequence that config.json names."""
    folder = copy_tiny("llama2-tiny", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert load(folder).config.eos_token_ids == (2, 7, 9)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [512]}))
    with pytest.raises(CheckpointError, match=r"eos_token_id=\[2, 512\]"):
        load(folder)


def test_every_fault_of_the_tensors_is_named(tmp_path):
    tensors = tiny_tensors("llama2-tiny")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(128, np.float32)
    tensors["model.norm.weight"] = np.zeros(127, np.float32)
    with pytest.raises(CheckpointError) as error:
        load(copy_tiny("llama2-tiny", tmp_path, tensors))
    assert "missing: model.layers.1.mlp.up_proj.weight" in str(error.value)
    assert "not part of the model: model.layers.0.self_attn.q_proj.bias" in str(error.value)
    assert "model.norm.weight (127,), expected (128,)" in str(error.value)


def test_stored_rotary_tables_are_harmless(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(32, np.float32)}
    assert_same_parameters(
        load(copy_tiny("llama2-tiny", tmp_path, tiny_tensors("llama2-tiny") | extra)), load(TINY / "llama2-tiny")
    )


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_models_stored_head_must_equal_its_embedding(tmp_path, equal):
    """Field case 29: no second head beside a tied embedding."""
    tensors = tiny_tensors("qwen2-tiny")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(0 if equal else 1)
    folder = copy_tiny("qwen2-tiny", tmp_path, tensors)
    if equal:
        assert load(folder).decoder.lm_head is None
    else:
        with pytest.raises(CheckpointError, match=r"not part of the model: lm_head\.weight"):
            load(folder)


def test_an_untied_model_needs_its_head(tmp_path):
    """Field case 29: a head is never left as it happens to be."""
    folder = copy_tiny("qwen2-tiny", tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "cannot be read as JSON"),
        ("config.json", "[]", "expected an object"),
        ("config.json", '{"model_type": "gpt9"}', "model_type='gpt9'"),
        ("config.json", '{"model_type": "llama", "vocab_size": [], "hidden_size": 1, "num_attention_heads": 1}', "vocab_size"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", '{"bos_token": 3}', "3 is not a token"),
    ],
)
def test_unsound_small_files_are_errors(tmp_path, file, content, message):
    folder = copy_tiny("llama2-tiny", tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_a_tokenizer_beyond_the_vocabulary_is_refused(tmp_path):
    tensors = tiny_tensors("llama2-tiny")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:500]
    with pytest.raises(CheckpointError, match="the tokenizer has ids up to 511, the model only 500"):
        load(copy_tiny("llama2-tiny", tmp_path, tensors, vocab_size=500))


def test_index_and_shards_must_agree(tmp_path):
    folder = copy_tiny("llama2-tiny", tmp_path)
    weight_map = write_shards(folder, tiny_tensors("llama2-tiny"), 2)
    index = folder / "model.safetensors.index.json"
    cases = {
        "no such file": weight_map | {"lm_head.weight": "gone.safetensors"},
        "disagree about lm_head.weight": {k: v for k, v in weight_map.items() if k != "lm_head.weight"},
        "disagree about ghost": weight_map | {"ghost": weight_map["lm_head.weight"]},
        "not the name of a file in the folder": weight_map | {"lm_head.weight": "../secret"},
        "must map tensor names to file names": {"lm_head.weight": 3},
    }
    for message, changed in cases.items():
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(CheckpointError, match=message):
            read_tensors(folder)


def test_other_weight_formats_are_refused(tmp_path):
    folder = copy_tiny("llama2-tiny", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="must be converted first"):
        load(folder)


def test_types_without_a_meaning_here_are_named(tmp_path):
    save_file({"packed": np.zeros((4, 4), np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"packed \(I8\)"):
        safetensors_file(tmp_path / "model.safetensors")


def raw_file(path, header: dict | bytes, data: bytes, length: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def spec(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HOSTILE = {
    "absurd header length": ({}, b"", 1 << 62),
    "header longer than the file": ({}, b"", 100),
    "header is no JSON": (b"{{{{{{{{", b"", None),
    "offsets outside the file": ({"a": spec([4], 0, 16)}, b"1234", None),
    "overlapping": ({"a": spec([2], 0, 8), "b": spec([2], 4, 12)}, bytes(12), None),
    "hole": ({"a": spec([1], 0, 4), "b": spec([1], 8, 12)}, bytes(12), None),
    "shape larger than its data": ({"a": spec([1 << 40, 1 << 40], 0, 8)}, bytes(8), None),
    "negative": ({"a": spec([-2], 0, 8)}, bytes(8), None),
    "bytes after the last tensor": ({"a": spec([1], 0, 4)}, bytes(40), None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_errors(tmp_path, case):
    header, data, length = HOSTILE[case]
    path = raw_file(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match="not a sound safetensors file"):
        safetensors_file(path)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_file_loads_or_is_an_error_and_allocates_little(tmp_path_factory, data):
    content = bytearray((TINY / "llama2-tiny" / "model.safetensors").read_bytes())
    (header_bytes,) = struct.unpack("<Q", content[:8])
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, 8 + header_bytes))
        content[position : position + 1] = bytes([data.draw(st.integers(0, 255))])
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content)
    config = read_config(TINY / "llama2-tiny")
    tracemalloc.start()
    try:
        fitting_recipes(config, parallel_layout(config, 1), safetensors_file(path))
    except CheckpointError:
        pass
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_loading_holds_about_one_tensor_beside_the_parameters(tmp_path):
    config = ModelConfig(
        name="wide",
        vocab_size=128,
        d_model=256,
        d_ff=1024,
        num_layers=12,
        num_heads=4,
        num_kv_heads=4,
        head_dim=64,
        max_context=8,
    )
    layout = parallel_layout(config, 1)
    shapes = {name: shape for recipe in recipes(config, layout).values() for name, shape in recipe.sources.items()}
    save_file({name: np.zeros(shape, ml_dtypes.bfloat16) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    largest, total = 2 * 2 * 256 * 1024, 2 * config.num_params
    tracemalloc.start()
    arrays = place_parameters(
        config, layout, make_mesh(1), np.dtype(ml_dtypes.bfloat16), safetensors_file(tmp_path / "model.safetensors")
    )
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(arrays) == len(recipes(config, layout))
    assert peak_bytes < total + 3 * largest
    assert total > 10 * largest

"""GGUF files: the same parameters as the safetensors they were written from, everything else refused by name."""

import contextlib
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoflow_jax.checkpoints import CheckpointError, load_model
from nanoflow_jax.checkpoints.gguf_format import read_gguf
from nanoflow_jax.checkpoints.gguf_model import model_config, model_tensors
from nanoflow_jax.checkpoints.layout import fitting_recipes
from nanoflow_jax.checkpoints.sources import open_source
from nanoflow_jax.config import RopeScaling
from nanoflow_jax.parallel import make_mesh, parallel_layout
from nanoflow_jax.tokenizer import ChatTemplateError, TokenizerError
from tests.model.checkpoint_files import TINY, TINY_NAMES, decoder_arrays, gguf_tensors, write_gguf

Q = gguf.GGMLQuantizationType


def load(source, tp_size=1):
    return load_model(source, mesh=make_mesh(tp_size), dtype="float32")


@pytest.mark.parametrize("name", TINY_NAMES)
def test_parameters_equal_those_of_the_safetensors(tmp_path, name):
    ours, theirs = load(write_gguf(tmp_path / f"{name}.gguf", name), 2), load(TINY / name, 2)
    ours_arrays, their_arrays = decoder_arrays(ours.decoder), decoder_arrays(theirs.decoder)
    assert ours_arrays.keys() == their_arrays.keys()
    for path, array in their_arrays.items():
        np.testing.assert_array_equal(ours_arrays[path], array, err_msg=path)
    # The tokenizer's ids are not in this file.
    same = {"eos_token_ids": (), "bos_token_id": None}
    assert vars(ours.config) == vars(theirs.config) | same


def test_rotary_divisors_give_the_llama3_scaling(tmp_path):
    """Field case 28: the scaling is not lost on the way in."""
    file = read_gguf(write_gguf(tmp_path / "x.gguf", "llama3-tiny"))
    expected = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=64)
    assert model_config(file, "x").rope_scaling == expected


@pytest.mark.parametrize(
    "change", [lambda d: d * 1.01, lambda d: np.linspace(1, 8, len(d)), lambda d: d * 0 + 1, lambda d: d[:-1]]
)
def test_other_rotary_divisors_are_refused(tmp_path, change):
    tensors = gguf_tensors("llama3-tiny")
    tensors["rope_freqs.weight"] = change(tensors["rope_freqs.weight"]).astype(np.float32)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        load(write_gguf(tmp_path / "x.gguf", "llama3-tiny", tensors))


@pytest.mark.parametrize("quantised", [Q.Q8_0, Q.Q4_1, Q.Q5_0, Q.BF16, Q.F16])
def test_quantised_tensors_are_dequantised_row_for_row(tmp_path, quantised):
    name = "llama3-tiny"
    tensors = {
        key: value if value.ndim < 2 else gguf.quants.dequantize(gguf.quants.quantize(value, quantised), quantised)
        for key, value in gguf_tensors(name).items()
    }
    ours = load(write_gguf(tmp_path / "quantised.gguf", name, quantised=quantised))
    plain = load(write_gguf(tmp_path / "plain.gguf", name, tensors))
    for path, array in decoder_arrays(plain.decoder).items():
        np.testing.assert_array_equal(decoder_arrays(ours.decoder)[path], array, err_msg=path)


def test_experts_stored_one_by_one_are_found(tmp_path):
    tensors = {}
    for key, value in gguf_tensors("mixtral-tiny").items():
        if "_exps" in key:
            tensors |= {key.replace("_exps", f".{e}"): part for e, part in enumerate(value)}
        else:
            tensors[key] = value
    ours = load(write_gguf(tmp_path / "x.gguf", "mixtral-tiny", tensors))
    for path, array in decoder_arrays(load(TINY / "mixtral-tiny").decoder).items():
        np.testing.assert_array_equal(decoder_arrays(ours.decoder)[path], array)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama__rope.scaling.type": "yarn"}, "rope.scaling.type='yarn'"),
        ({"llama__attention.sliding_window": 128}, "llama.attention.sliding_window=128"),
        ({"split__count": 3}, "split.count=3"),
        ({"llama__logit_scale": 2.0}, "llama.logit_scale=2.0"),
        ({"tokenizer__ggml.model": "llama"}, "tokenizer.ggml.model='llama'"),
        ({"tokenizer__ggml.model": "gpt2", "tokenizer__ggml.pre": "dbrx"}, "tokenizer.ggml.pre='dbrx'"),
        ({"tokenizer__ggml.eos_token_id": 512}, "eos_token_id=512"),
    ],
)
def test_what_is_not_handled_is_refused_by_name(tmp_path, metadata, message):
    with pytest.raises(ValueError, match=message):
        load(write_gguf(tmp_path / "x.gguf", "llama2-tiny", **metadata))


def test_unknown_architectures_are_refused_by_name(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"general\.architecture='gemma3'"):
        load(tmp_path / "x.gguf")


def test_every_fault_of_the_tensors_is_named(tmp_path):
    tensors = gguf_tensors("llama2-tiny")
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.0.attn_sinks.weight"] = np.zeros(2, np.float32)
    tensors["blk.0.attn_q.weight"] = tensors["blk.0.attn_q.weight"][:-1]
    with pytest.raises(CheckpointError) as error:
        load(write_gguf(tmp_path / "x.gguf", "llama2-tiny", tensors))
    assert "missing: model.layers.1.mlp.up_proj.weight" in str(error.value)
    assert "not part of the model: blk.0.attn_sinks.weight" in str(error.value)
    assert "model.layers.0.self_attn.q_proj.weight (127, 128), expected (128, 128)" in str(error.value)


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe"])
def test_the_tokenizer_comes_along(tmp_path, pre):
    model = load(write_gguf(tmp_path / "x.gguf", "llama2-tiny", pre=pre))
    assert model.config.eos_token_ids == (2,)
    assert model.config.bos_token_id == 1
    tokenizer = model.tokenizer
    assert tokenizer is not None
    text = "The number   123 <s>ünïcode 🙂\n"
    ids = tokenizer.encode(text)
    assert (ids[0] == 1) == (pre == "llama-bpe")
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("<s>", "")
    chat = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert chat == "<s>user\nhi</s>\n<s>assistant\n"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])[:1] == [1]


def header(version=3, tensors=0, keys=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value: bytes, length=None):
    return struct.pack("<Q", len(value) if length is None else length) + value


def place(name, dims, kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HOSTILE = {
    "another format": b"GGML" + bytes(40),
    "version 1": header(version=1),
    "big-endian": header(version=3 << 24),
    "absurd number of tensors": header(tensors=1 << 63),
    "absurd number of keys": header(keys=1 << 63),
    "keys beyond the end": header(keys=1000),
    "text beyond the end": header(keys=1, rest=text(b"a", 1 << 30)),
    "huge text": header(keys=1, rest=text(b"a", 1 << 62)),
    "text that is not UTF-8": header(keys=1, rest=text(b"\xff\xfe") + struct.pack("<IB", 0, 1)),
    "unknown value type": header(keys=1, rest=text(b"a") + struct.pack("<I", 99)),
    "huge array": header(keys=1, rest=text(b"a") + struct.pack("<IIQ", 9, 4, 1 << 60)),
    "array of arrays": header(keys=1, rest=text(b"a") + struct.pack("<IIQ", 9, 9, 1) + bytes(64)),
    "key twice": header(keys=2, rest=2 * (text(b"a") + struct.pack("<IB", 0, 1))),
    "zero alignment": header(keys=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 0)),
    "data outside the file": header(tensors=1, rest=place(b"a", [8]) + bytes(32)),
    "offset outside the file": header(tensors=1, rest=place(b"a", [1], offset=1 << 62) + bytes(64)),
    "huge shape": header(tensors=1, rest=place(b"a", [1 << 62, 1 << 62]) + bytes(64)),
    "no dimensions": header(tensors=1, rest=place(b"a", []) + bytes(64)),
    "many dimensions": header(tensors=1, rest=place(b"a", [1] * 9) + bytes(64)),
    "empty tensor": header(tensors=1, rest=place(b"a", [0]) + bytes(64)),
    "unknown type": header(tensors=1, rest=place(b"a", [32], kind=77) + bytes(64)),
    "row of part of a block": header(tensors=1, rest=place(b"a", [31], kind=8) + bytes(64)),
    "tensor twice": header(tensors=2, rest=place(b"a", [1]) + place(b"a", [1], offset=32) + bytes(128)),
    "overlapping tensors": header(tensors=2, rest=place(b"a", [9]) + place(b"b", [1], offset=32) + bytes(256)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_errors(tmp_path, case):
    (tmp_path / "x.gguf").write_bytes(HOSTILE[case])
    with pytest.raises(CheckpointError, match="GGUF file"):
        read_gguf(tmp_path / "x.gguf")


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf", "llama2-tiny", pre="smollm").read_bytes()


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_file_loads_or_is_an_error_and_allocates_little(tmp_path_factory, sound_file, data):
    content = bytearray(sound_file)
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, 24_000))
        content[position : position + 1] = bytes([data.draw(st.integers(0, 255))])
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with contextlib.suppress(CheckpointError, TokenizerError, ChatTemplateError):
            open_source(str(path))
            file = read_gguf(path)
            config = model_config(file, "x")
            fitting_recipes(config, parallel_layout(config, 1), model_tensors(config, file))
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak_bytes < 8 << 20


def test_not_a_model_says_what_is_one(tmp_path):
    with pytest.raises(CheckpointError, match="nor a preset"):
        load("no-such-model")
    with pytest.raises(CheckpointError, match="has no weights"):
        load("llama3-8b")

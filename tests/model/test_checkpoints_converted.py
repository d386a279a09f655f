"""Converted folders: written whole or not at all, and the same model on any number of ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nanoflow_jax.checkpoints import CheckpointError, load_model
from nanoflow_jax.convert import convert
from nanoflow_jax.parallel import make_mesh
from tests.model.checkpoint_files import TINY, copy_tiny, decoder_arrays, forward, tiny_tensors, write_gguf


def load(source, tp_size=1, dtype="float32"):
    return load_model(source, mesh=make_mesh(tp_size), dtype=dtype)


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    for name in ("llama3-tiny", "qwen2-tiny", "mixtral-tiny"):
        convert(str(TINY / name), folder / name, "float32")
    return folder


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama3-tiny", "qwen2-tiny", "mixtral-tiny"])
def test_a_converted_folder_is_the_same_model_on_any_number_of_ranks(converted, name, tp_size):
    ours, theirs = load(converted / name, tp_size), load(TINY / name, tp_size)
    assert ours.config == theirs.config
    ours_arrays, their_arrays = decoder_arrays(ours.decoder), decoder_arrays(theirs.decoder)
    assert ours_arrays.keys() == their_arrays.keys()
    for path, array in their_arrays.items():
        np.testing.assert_array_equal(ours_arrays[path], array, err_msg=path)
    qkv, expected = ours.decoder.layers[0].qkv_proj.get_value(), theirs.decoder.layers[0].qkv_proj.get_value()
    assert qkv.sharding.is_equivalent_to(expected.sharding, qkv.ndim)


def test_the_vocabulary_is_padded_on_restore(tmp_path):
    tensors = tiny_tensors("llama3-tiny")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.concatenate([tensors[name], np.ones((5, 128), np.float32)])
    source = copy_tiny("llama3-tiny", tmp_path / "source", tensors, vocab_size=517)
    convert(str(source), tmp_path / "converted", "float32")
    for tp_size in (1, 4):
        ours, theirs = load(tmp_path / "converted", tp_size), load(source, tp_size)
        assert ours.layout.padded_vocab_size > 517
        for path in ("embed", "lm_head"):
            np.testing.assert_array_equal(decoder_arrays(ours.decoder)[path], decoder_arrays(theirs.decoder)[path])


@pytest.mark.parametrize("name", ["llama3-tiny", "mixtral-tiny"])
def test_the_feed_forward_width_is_padded_on_any_number_of_ranks(tmp_path, name):
    """50 columns over four ranks fill 12.5 of 64 that each rank has."""
    tensors = tiny_tensors(name)
    for key, x in tensors.items():
        if "mlp" in key or "experts" in key:
            tensors[key] = x[:, :50] if ("down" in key or "w2" in key) else x[:50]
    source = copy_tiny(name, tmp_path / "source", tensors, intermediate_size=50)
    convert(str(source), tmp_path / "converted", "float32")
    ids = np.random.default_rng(0).integers(0, 500, 24)
    whole = load(source)
    expected = forward(whole.config, whole.layout, decoder_arrays(whole.decoder), ids)
    for folder in (source, tmp_path / "converted"):
        divided = load(folder, 4)
        assert divided.layout.padded_d_ff == 256
        arrays = decoder_arrays(divided.decoder)
        for path, x in arrays.items():
            if "gate_up" in path:
                assert x.shape[-1] == 256
                assert not x[..., 50:].any(), path
            if "down" in path:
                assert x.shape[-2] == 256
                assert not x[..., 50:, :].any(), path
        np.testing.assert_allclose(forward(divided.config, divided.layout, arrays, ids), expected, atol=1e-5)


def test_the_tokenizer_comes_along(converted):
    tokenizer, original = load(converted / "llama3-tiny").tokenizer, load(TINY / "llama3-tiny").tokenizer
    assert tokenizer is not None
    assert original is not None
    messages = [{"role": "user", "content": "Tell me about the sea 🙂"}]
    assert tokenizer.apply_chat_template(messages) == original.apply_chat_template(messages)


def test_weights_change_type_on_the_way_in_and_out(tmp_path):
    convert(str(TINY / "llama2-tiny"), tmp_path / "half")
    half = decoder_arrays(load(tmp_path / "half", dtype="bfloat16").decoder)
    whole = decoder_arrays(load(tmp_path / "half").decoder)
    expected = decoder_arrays(load(TINY / "llama2-tiny", dtype="bfloat16").decoder)
    for path, array in expected.items():
        np.testing.assert_array_equal(half[path], array)
        np.testing.assert_array_equal(whole[path], array.astype(np.float32))


def test_gguf_files_convert_too(tmp_path):
    convert(str(write_gguf(tmp_path / "x.gguf", "llama3-tiny", pre="llama-bpe")), tmp_path / "converted", "float32")
    ours, theirs = load(tmp_path / "converted", 2), load(TINY / "llama3-tiny", 2)
    for path, array in decoder_arrays(theirs.decoder).items():
        np.testing.assert_array_equal(decoder_arrays(ours.decoder)[path], array)
    assert ours.tokenizer is not None
    assert ours.tokenizer.encode("a")[0] == ours.config.bos_token_id


def test_progress_counts_every_parameter(tmp_path):
    calls = []
    convert(str(TINY / "llama2-tiny"), tmp_path / "x", progress=lambda *call: calls.append(call))
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert calls[-1][1] == calls[-1][2] == 2 * 6 + 3


def test_a_failed_conversion_leaves_nothing(tmp_path):
    tensors = tiny_tensors("llama2-tiny")
    tensors.pop("lm_head.weight")
    with pytest.raises(CheckpointError, match="lm_head"):
        convert(str(copy_tiny("llama2-tiny", tmp_path / "source", tensors)), tmp_path / "out")

    def stop(_item: str, done: int, _total: int) -> None:
        if done > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(str(TINY / "llama2-tiny"), tmp_path / "out", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_existing_destination_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    for destination in (tmp_path, tmp_path / "file"):
        with pytest.raises(CheckpointError, match="exists already"):
            convert(str(TINY / "llama2-tiny"), destination)
    assert (tmp_path / "file").read_text() == "mine"


def test_sources_without_stored_weights_do_not_convert(tmp_path, converted):
    for source in ("llama3-8b", str(converted / "llama3-tiny")):
        with pytest.raises(CheckpointError, match="no weights to convert"):
            convert(source, tmp_path / "out")


_SLOW_CONVERT = """
import sys, time
from pathlib import Path
from nanoflow_jax.convert import convert
def progress(*call):
    print(*call, flush=True)
    time.sleep(60)
convert(sys.argv[1], Path(sys.argv[2]), progress=progress)
"""


def test_a_killed_conversion_never_looks_complete(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW_CONVERT, str(TINY / "llama2-tiny"), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    left = list(tmp_path.iterdir())
    assert len(left) == 1
    assert left[0].name.startswith(".out.partial-")
    for source in (tmp_path / "out", left[0]):
        with pytest.raises(CheckpointError, match="is not a model"):
            load(source)
    convert(str(TINY / "llama2-tiny"), tmp_path / "out")
    load(tmp_path / "out")


def damaged(converted: Path, folder: Path) -> Path:
    return Path(shutil.copytree(converted / "llama3-tiny", folder / "damaged"))


def test_damaged_folders_are_errors(tmp_path, converted):
    folder = damaged(converted, tmp_path)
    manifest = json.loads((folder / "model.json").read_text())
    for change, message in [
        ({"version": 2}, "not a manifest of version 1"),
        ({"config": None}, "is not an object"),
        ({"config": manifest["config"] | {"d_model": "wide"}}, "d_model"),
        ({"config": manifest["config"] | {"wings": 2}}, "unknown fields wings"),
        ({"config": manifest["config"] | {"num_layers": 1 << 40}}, "weights has 3 items"),
        ({"config": manifest["config"] | {"d_ff": 1 << 40}}, "expected"),
    ]:
        (folder / "model.json").write_text(json.dumps(manifest | change))
        with pytest.raises(CheckpointError, match=message):
            load(folder)


def test_missing_and_torn_items_are_errors(tmp_path, converted):
    folder = damaged(converted, tmp_path)
    data = [path for path in (folder / "weights" / "layers.1").rglob("d/*") if path.is_file()]
    assert data
    for path in data:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"layers\.1"):
        load(folder)
    shutil.rmtree(folder / "weights" / "layers.1")
    with pytest.raises(CheckpointError, match="weights has 2 items"):
        load(folder)


def test_the_command_line(tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "nanoflow_jax.convert", *arguments],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            timeout=120,
        )

    done = run(str(TINY / "llama2-tiny"), str(tmp_path / "out"), "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert "15/15" in done.stderr
    load(tmp_path / "out")
    failed = run(str(TINY / "llama2-tiny"), str(tmp_path / "out"))
    assert failed.returncode == 1
    assert "exists already" in failed.stderr
    assert "Traceback" not in failed.stderr

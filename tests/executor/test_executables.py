"""Executables on disk: what is found again, what must not be, and what becomes of files and directories that are no good."""

import dataclasses
import errno
import functools
import logging
import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax.executor import executables
from nanoflow_jax.executor.executables import ExecutableStore, Job, describe_environment, obtain, sources_digest
from nanoflow_jax.executor.runner import ModelRunner, RunnerConfig
from nanoflow_jax.parallel import make_mesh
from tests.executor.test_runner import decode_batch, prompt_batch
from tests.model.steps import Model, golden, tiny_model


@pytest.fixture(autouse=True)
def _nobody_edits_sources(monkeypatch) -> None:
    monkeypatch.setattr(executables, "sources_digest", lambda: executables._IMPORTED_SOURCES)


@pytest.fixture
def log(caplog):
    """Whoever serves in this process may have kept this logger to itself."""
    caplog.set_level(logging.INFO, executables.__name__)
    return caplog


def runner_of(model: Model, **changes) -> ModelRunner:
    options = {"b_dense": 48, "max_sequences": 4, "page_size": 4, "num_pages": 4096, "max_context": 128, "greedy_only": True}
    return ModelRunner(model.config, model.layout, model.mesh, model.decoder, RunnerConfig(**options | changes), jnp.float32)


def _lower_scaled(factor: float, size: int) -> jax.stages.Lowered:
    return jax.jit(lambda x: x * factor, donate_argnums=0).lower(jax.ShapeDtypeStruct((size,), jnp.float32))


def scaling(factor: float = 2.0, size: int = 8) -> Job:
    return Job(f"times {factor}", functools.partial(_lower_scaled, factor, size))


def store_in(directory: Path, context: str = "tests") -> ExecutableStore:
    return ExecutableStore(directory, jax.devices()[:1], context)


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_second_start_compiles_nothing_and_gives_the_same_tokens_in_place(tmp_path, tp_size, log) -> None:
    expected = golden("llama3-tiny")
    for start in range(2):
        runner, seen = runner_of(tiny_model("llama3-tiny", tp_size), kv_offload="both"), []
        runner.warm_up(lambda *report, seen=seen: seen.append(report), tmp_path / "new" / "executables")
        total = len(runner.shapes) * 3 + len(runner.page_format.chunk_sizes)
        assert (runner.num_loaded, runner.num_compilations) == ((total, 0) if start else (0, total))
        assert {name.split(":")[0] for name, _, _ in seen} == (
            {"loaded", "ready"} if start else {"lowering", "compiled", "ready"}
        )
        assert [done for _, done, _ in seen] == list(range(0, 2 * total + 1, 2 if start else 1))
        assert len(files(tmp_path / "new" / "executables")) == total
        for offload in (False, True):
            pool = runner._cache.k_pages[0]
            steps = [runner.launch(prompt_batch(runner, expected["input_ids"]), offload=offload)]
            assert pool.is_deleted(), "the pool is donated"
            steps += [runner.launch(decode_batch(runner, len(expected["input_ids"]) + i), offload=offload) for i in range(9)]
            assert [int(step.result().token_ids[0]) for step in steps] == expected["greedy_ids"][:10].tolist()
            memory = runner.forward_memory(runner.shapes[0], offload=offload)
            assert memory.alias_size_in_bytes >= runner.pool_bytes // tp_size
    assert [record.levelname for record in log.records] == ["INFO", "INFO"]


def test_nothing_is_kept_beside_jax_s_own_cache(tmp_path, log) -> None:
    """XLA writes what it has loaded from its cache without all of its functions; that would fail when it runs."""
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "xla"))
    try:
        runner = runner_of(tiny_model("llama3-tiny"))
        runner.warm_up(cache_dir=tmp_path / "executables")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert runner.num_compilations > 0
    assert not (tmp_path / "executables").exists()
    assert "jax keeps its own cache" in log.text


def test_another_model_of_the_same_shapes_loads_nothing(tmp_path) -> None:
    model = tiny_model("llama3-tiny")
    runner_of(model, b_dense=16).warm_up(cache_dir=tmp_path)
    for change in ({"rms_norm_eps": 1e-3}, {"rope_theta": 5e4}):
        other = runner_of(dataclasses.replace(model, config=dataclasses.replace(model.config, **change)), b_dense=16)
        other.warm_up(cache_dir=tmp_path)
        assert other.num_loaded == 0
    larger = runner_of(model, b_dense=32)
    larger.warm_up(cache_dir=tmp_path)
    assert (larger.num_loaded, larger.num_compilations) == (2, 2), "sizes of steps that both have are shared"


def test_every_fact_about_a_runner_counts() -> None:
    model = tiny_model("llama3-tiny")
    plain = runner_of(model)
    facts = {plain._lowered_from()}
    changed = [runner_of(model, **change) for change in ({"num_pages": 99}, {"page_size": 8}, {"kernels": "mosaic"})]
    changed += [runner_of(model, kv_offload="on"), runner_of(model, max_sequences=5), runner_of(tiny_model("llama3-tiny", 2))]
    changed.append(runner_of(tiny_model("qwen2-tiny")))
    facts |= {runner._lowered_from() for runner in changed}
    assert len(facts) == 1 + len(changed)
    for owner in ("config", "_layout"):
        whole = getattr(plain, owner)
        for field in dataclasses.fields(whole):
            other = dataclasses.replace(whole)
            object.__setattr__(other, field.name, "another")
            setattr(plain, owner, other)
            assert plain._lowered_from() not in facts, field.name
        setattr(plain, owner, whole)
    assert plain._lowered_from() in facts
    assert "0x" not in plain._lowered_from(), "an address would never be found again"
    assert "..." not in plain._lowered_from(), "nothing is left out"


def test_what_surrounds_a_program_counts(tmp_path, monkeypatch) -> None:
    job = scaling()
    _, num_loaded = obtain([job], store_in(tmp_path))
    assert num_loaded == 0
    assert obtain([job], store_in(tmp_path))[1] == 1

    def found() -> bool:
        return store_in(tmp_path).load(job.kind, job.source) is not None

    assert found()
    assert store_in(tmp_path, "other facts").load(job.kind, job.source) is None
    assert store_in(tmp_path).load("other", job.source) is None
    assert store_in(tmp_path).load(job.kind, scaling(3.0).source) is None
    assert ExecutableStore(tmp_path, jax.devices()[1:2], "tests").load(job.kind, job.source) is None
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        assert not found()
    with jax.default_matmul_precision("highest"):
        assert not found()
    with monkeypatch.context() as patch:
        patch.setattr(executables, "_IMPORTED_SOURCES", "edited")
        assert not found()
    with monkeypatch.context() as patch:
        patch.setattr(executables.sys, "version_info", (3, 99))
        assert not found()
    with monkeypatch.context() as patch:
        patch.setattr(executables, "_cpu_features", lambda: ("flags: none",))
        assert not found()
    assert found()
    environment = describe_environment(make_mesh(2).devices.flat)
    for part in ("jaxlib", jax.__version__, "flax", "numpy", "jax_enable_x64"):
        assert part in environment


def test_sources_edited_since_they_were_imported_switch_the_store_off(tmp_path, monkeypatch, log) -> None:
    obtain([scaling()], store_in(tmp_path))
    monkeypatch.setattr(executables, "sources_digest", lambda: "edited meanwhile")
    (compiled,), num_loaded = obtain([scaling()], store_in(tmp_path))
    assert num_loaded == 0
    assert "sources have changed" in log.text
    np.testing.assert_array_equal(compiled(jnp.ones(8)), 2 * np.ones(8))
    obtain([scaling(5.0)], store_in(tmp_path))
    assert len(files(tmp_path)) == 1


def test_sources_digest(tmp_path) -> None:
    package = tmp_path / "package"
    (package / "tunings").mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    (package / "tunings" / "h.json").write_text("{}")
    seen = [sources_digest([package])]

    def changed() -> bool:
        seen.append(sources_digest([package]))
        return seen[-1] not in seen[:-1]

    (package / "notes.txt").write_text("no source")
    assert not changed()
    (package / "a.py").write_text("a = 2\n")
    assert changed()
    (package / "tunings" / "h.json").write_text('{"m": 1}')
    assert changed()
    (package / "a.py").rename(package / "b.py")
    assert changed()
    (package / "c.py").touch()
    assert changed()
    assert sources_digest() == executables._IMPORTED_SOURCES != sources_digest([package])


DAMAGES = {
    "empty": lambda content: b"",
    "magic alone": lambda content: content[: len(executables._MAGIC)],
    "truncated": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "another format": lambda content: content.replace(b"executable 1", b"executable 0", 1),
    "flipped at the end": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_compiled_again_and_replaced(tmp_path, damage, log) -> None:
    obtain([scaling()], store_in(tmp_path))
    (path,) = files(tmp_path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    (compiled,), num_loaded = obtain([scaling()], store_in(tmp_path))
    assert num_loaded == 0
    assert f"{path} is damaged and is compiled again" in log.text
    np.testing.assert_array_equal(compiled(jnp.ones(8)), 2 * np.ones(8))
    assert obtain([scaling()], store_in(tmp_path))[1] == 1
    assert files(tmp_path) == [path]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executables, "sources_digest", lambda: executables._IMPORTED_SOURCES)
        store = store_in(directory)
        obtain([scaling()], store)
    (path,) = files(directory)
    return store, path, path.read_bytes()


@given(st.data())
def test_no_flipped_bit_goes_unseen(kept, data) -> None:
    store, path, content = kept
    position, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(content)
    flipped[position] ^= 1 << bit
    path.write_bytes(flipped)
    assert store.load(scaling().kind, scaling().source) is None


def test_a_file_under_another_name_is_not_taken(tmp_path, log) -> None:
    store = store_in(tmp_path)
    obtain([scaling(2.0)], store)
    (two,) = files(tmp_path)
    three, _ = store._path(scaling(3.0).kind, scaling(3.0).source)
    two.rename(three)
    (compiled,), num_loaded = obtain([scaling(3.0)], store)
    assert num_loaded == 0
    assert "damaged" in log.text
    np.testing.assert_array_equal(compiled(jnp.ones(8)), 3 * np.ones(8))


@pytest.mark.parametrize("payload", [b"no pickle", b"cnowhere\nmissing\n.", b"N."])
def test_whole_files_that_cannot_be_loaded_are_replaced(tmp_path, payload, log) -> None:
    store = store_in(tmp_path)
    path, digest = store._path(scaling().kind, scaling().source)
    path.write_bytes(executables._MAGIC + executables._checksum(digest, payload) + payload)
    assert obtain([scaling()], store)[1] == 0
    assert f"{path} cannot be loaded" in log.text
    assert obtain([scaling()], store)[1] == 1


def test_what_cannot_be_serialized_is_said_and_works(tmp_path, log) -> None:
    def _lower_counter() -> jax.stages.Lowered:
        count = jax.new_ref(jnp.zeros((), jnp.int32))

        def step(x: jax.Array) -> jax.Array:
            count[...] += x
            return count[...]

        return jax.jit(step).lower(jnp.int32(0))

    (compiled,), _ = obtain([Job("counter", functools.partial(_lower_counter))], store_in(tmp_path))
    assert "counter cannot be kept on disk" in log.text
    assert [int(compiled(jnp.int32(2))) for _ in range(3)] == [2, 4, 6]
    assert files(tmp_path) == []


def test_a_directory_that_cannot_be_made_is_said_once(tmp_path, log) -> None:
    (tmp_path / "file").touch()
    compiled, _ = obtain([scaling(), scaling(3.0)], store_in(tmp_path / "file" / "cache"))
    np.testing.assert_array_equal(compiled[1](jnp.ones(8)), 3 * np.ones(8))
    (warning,) = [record.getMessage() for record in log.records if record.levelname == "WARNING"]
    assert warning.startswith(f"executables cannot be kept in {tmp_path}")


def test_a_directory_to_read_from_only_is_read_from(tmp_path, monkeypatch, log) -> None:
    obtain([scaling()], store_in(tmp_path))

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(executables.Path, "touch", refused)
    monkeypatch.setattr(executables.os, "utime", refused)
    _, num_loaded = obtain([scaling(), scaling(3.0)], store_in(tmp_path))
    assert num_loaded == 1
    assert log.text.count("cannot be kept") == 1
    assert len(files(tmp_path)) == 1


def test_a_full_disk_is_said_once_and_leaves_nothing_behind(tmp_path, monkeypatch, log) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = store_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(executables.os, "replace", full)
        for factor in (2.0, 3.0):
            obtain([scaling(factor)], store)
    assert log.text.count("cannot be kept") == log.text.count("No space left") == 1
    assert files(tmp_path) == []


def test_writers_and_readers_of_one_file_do_not_disturb_each_other(tmp_path, log) -> None:
    job, rounds, loaded = scaling(), 20, []
    compiled = job.lower().compile()

    def work() -> None:
        store = store_in(tmp_path)
        for _ in range(rounds):
            store.keep(job.kind, job.source, compiled)
            loaded.append(store.load(job.kind, job.source) is not None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == [True] * 4 * rounds
    assert len(files(tmp_path)) == 1
    assert not log.records


def test_what_was_not_loaded_for_longest_goes_first(tmp_path) -> None:
    store, jobs = store_in(tmp_path), [scaling(factor) for factor in (2.0, 3.0, 4.0)]
    obtain(jobs, store)
    paths = [store._path(job.kind, job.source)[0] for job in jobs]
    for age, path in enumerate(paths):
        os.utime(path, (1000 - age, 1000 - age))
    (left_by_a_killed_process := tmp_path / "x.tmp").write_bytes(bytes(1000))
    os.utime(left_by_a_killed_process, (1, 1))
    (foreign := tmp_path / "readme").touch()
    assert store.load(jobs[2].kind, jobs[2].source) is not None, "and is the newest from now on"
    store.trim(sum(path.stat().st_size for path in paths))
    assert set(files(tmp_path)) == {foreign, *paths}
    store.trim(paths[2].stat().st_size)
    assert set(files(tmp_path)) == {foreign, paths[2]}

"""Memory tiers that fail, stall, or lose their request: the answer stays right, nothing hangs, everything comes back.

Numbers are those of field cases, faults that users of other engines have met.
"""

import errno
import shutil
import threading
import time

import numpy as np
import pytest

from nanoflow_jax.runtime import kv_load, kv_offload
from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.kv_store import DirectoryInUseError
from nanoflow_jax.runtime.request import FinishReason
from nanoflow_jax.runtime.sequences import Phase
from tests.runtime.kv_store.helpers import FaultyFiles, Gate, failing
from tests.runtime.mock_runner import MockRunner
from tests.runtime.test_engine import assert_plain, prompt, run
from tests.runtime.test_kv_tiers import at_rest, finish, make_store, settle, tiered, wait_until
from tests.runtime.test_prefix_reuse import ask, assert_empty


def second_round(engine: Engine, history: list[int]) -> int:
    """Asks on, checks the tokens and returns how many were cached."""
    runner = engine.runner
    r = ask("second", [*history, 1, 2, 3], max_tokens=9, ignore_eos=True)
    output = run(engine, [r])["second"]
    assert_plain(runner, [r], {"second": output})
    return output.last.usage.cached_tokens


def first_round(engine: Engine) -> list[int]:
    r = ask("first", prompt(np.random.default_rng(0), 61), max_tokens=30, ignore_eos=True)
    return [*r.prompt_token_ids, *finish(engine, r).token_ids]


def written(directory) -> list:
    return sorted(directory.glob("segment-*.kv"))


def damage(directory, kind: str) -> None:
    for path in written(directory):
        if kind == "truncated segment":
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size - 1000)
        elif kind == "checksum mismatch":
            data = bytearray(path.read_bytes())
            data[-1000::7] = bytes(255 - byte for byte in data[-1000::7])
            path.write_bytes(data)


@pytest.mark.parametrize("kind", ["disk full", "read error", "truncated segment", "checksum mismatch", "directory lost"])
def test_a_fault_of_the_disk_costs_computing_and_is_counted(tmp_path, caplog, kind):
    """A host tier of 16 pages, so that the first round's beginning is on SSD when the second comes."""
    files = FaultyFiles()
    runner = MockRunner(page_size=4, num_pages=60)
    store = make_store(runner, 16, ssd_directory=str(tmp_path), ssd_bytes=1 << 20, files=files)
    with tiered(runner, store) as engine:
        if kind == "disk full":
            files.before["pwritev"] = failing(errno.ENOSPC)
        history = first_round(engine)
        settle(engine)
        if kind == "read error":
            files.before["preadv"] = failing(errno.EIO)
        elif kind == "directory lost":
            shutil.rmtree(tmp_path)
        else:
            damage(tmp_path, kind)
        cached = second_round(engine, history)
        assert cached < 88
        faults = engine.stats().kv_tiers.faults
        expected = {"directory lost": {"directory lost", "segment file lost"}}.get(kind, {kind})
        assert expected & faults.keys(), faults
        assert any("KV store" in record.message for record in caplog.records)
        files.before.clear()
        assert_empty(engine)


def test_a_disk_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    """Others run on meanwhile; the request is computed; what the disk brings in the end goes back to the tier."""
    monkeypatch.setattr(kv_load, "_MOST_PATIENCE_S", 0.3)
    gate, files = Gate(), FaultyFiles()
    runner = MockRunner(page_size=4, num_pages=60)
    store = make_store(runner, 16, ssd_directory=str(tmp_path), ssd_bytes=1 << 20, files=files)
    with tiered(runner, store) as engine:
        history = first_round(engine)
        settle(engine)
        files.before["preadv"] = gate
        stuck = ask("stuck", [*history, 1, 2, 3], max_tokens=9, ignore_eos=True)
        other = ask("other", prompt(np.random.default_rng(1), 20), max_tokens=9, ignore_eos=True)
        order = []

        def note() -> None:
            order.append((engine.batcher.table.num_running, len(engine.batcher.admission.waiting)))

        outputs = run(engine, [stuck, other], on_step=note, max_steps=1_000_000)
        assert_plain(runner, [stuck, other], outputs)
        assert (1, 1) in order, "the other ran while the first waited"
        assert outputs["other"].last.timing.finished_s < outputs["stuck"].last.timing.first_token_s
        assert outputs["stuck"].last.usage.cached_tokens == 0
        assert engine.stats().kv_tiers.failed_loads == 1
        gate.open()


def test_what_a_killed_server_leaves_is_used_as_far_as_it_is_whole(tmp_path):
    """The files as they are while a server writes them, with the last page half written."""
    runner = MockRunner(page_size=4, num_pages=60)
    running, left = tmp_path / "running", tmp_path / "left"
    with tiered(runner, make_store(runner, 16, ssd_directory=str(running), ssd_bytes=1 << 20)) as engine:
        history = first_round(engine)
        settle(engine)
        shutil.copytree(running, left)
    [segment] = written(left)
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size - runner.page_format.page_bytes // 2)
    fresh = MockRunner(page_size=4, num_pages=60)
    with tiered(fresh, make_store(fresh, 16, ssd_directory=str(left), ssd_bytes=1 << 20)) as engine:
        assert 0 <= second_round(engine, history) < 88
        assert "internal error" not in engine.stats().kv_tiers.faults


def test_a_directory_belongs_to_one_engine(tmp_path):
    runner = MockRunner(page_size=4)
    options = {"ssd_directory": str(tmp_path), "ssd_bytes": 1 << 20}
    with tiered(runner, make_store(runner, **options)), pytest.raises(DirectoryInUseError):
        make_store(runner, **options)
    make_store(runner, **options).close()


@pytest.mark.parametrize("mode", ["sync", "eager", "lazy"])
def test_a_cancel_in_any_state_gives_everything_back(tmp_path, mode):
    """Field cases 20 and 21: 200 requests that load, cancelled at a random step, while copies take their time."""
    rng = np.random.default_rng(0)
    runner = MockRunner(page_size=4, num_pages=60, b_dense=16, lazy=mode == "lazy")
    store = make_store(runner, 12, ssd_directory=str(tmp_path), ssd_bytes=1 << 20)
    seen = set()
    with tiered(runner, store, sync=mode == "sync") as engine:
        history = first_round(engine)
        runner.before_copy = lambda: time.sleep(0.0003)
        for i in range(70 if mode == "lazy" else 65):
            settle(engine) if mode != "lazy" else engine.clear_prefix_cache()
            requests = [
                ask(f"{i}.{j}", [*history[: int(rng.integers(10, 91))], j, *prompt(rng, 5)], max_tokens=6, ignore_eos=True)
                for j in range(3)
            ]

            def note() -> None:
                seen.update(Phase(phase) for phase in engine.batcher.table.phase)
                seen.update("fetching" for s in engine.batcher.admission.waiting if s.load is not None)

            at = {r.request_id: int(rng.integers(0, 12)) for r in requests[:2]}
            outputs = run(engine, requests, cancels=at, on_step=note, max_steps=1_000_000)
            assert_plain(runner, requests, outputs)
            assert outputs[f"{i}.2"].reason is FinishReason.LENGTH
        at_rest(engine)
        assert_empty(engine)
    assert {Phase.LOADING, Phase.PREFILL, Phase.DECODE} <= seen


def test_a_load_is_cancelled_while_its_copy_is_under_way():
    """Field case 21: the host pages stay pinned until the copy has ended, and then come back."""
    runner = MockRunner(page_size=4, num_pages=60)
    with tiered(runner) as engine:
        history = first_round(engine)
        settle(engine)
        gate = Gate()
        runner.before_copy = gate
        engine.add(ask("r", [*history, 1], max_tokens=5))
        assert wait_until(lambda: engine.step() is not None and gate.entered.is_set())
        assert engine.batcher.table.phase.max() == Phase.LOADING
        pinned = engine.tiers.store.num_pinned
        assert pinned > 0
        assert engine.cancel("r").finish_reason is FinishReason.CANCELLED
        assert engine.stats().free_pages == engine.stats().num_pages - 1
        assert engine.tiers.store.num_pinned == pinned
        gate.open()
        runner.before_copy = lambda: None
        assert wait_until(lambda: engine.tiers.store.num_pinned == 0)
        assert second_round(engine, history) == 88


def test_a_copy_to_the_device_that_fails_costs_computing():
    runner = MockRunner(page_size=4, num_pages=60)
    engine = Engine(runner, kv_store=make_store(runner), worth_loading=lambda *_: True)
    history = first_round(engine)
    settle(engine)
    calls = iter(range(100))

    def fail_the_third() -> None:
        if next(calls) == 2:
            raise RuntimeError("no room on the device")

    runner.before_copy = fail_the_third
    assert second_round(engine, history) == 2 * 3 * 4, "two chunks of three pages"
    assert engine.stats().kv_tiers.failed_loads == 1
    assert engine.stats().kv_tiers.faults == {"internal error": 1}
    assert wait_until(lambda: engine.tiers.store.num_pinned == 0)
    assert engine.close()


@pytest.mark.parametrize("sync", [False, True])
def test_a_host_that_cannot_keep_up_drops_steps_and_blocks_nothing(monkeypatch, sync):
    """Field case 15: no buffer is written while its copy is under way. Of what was dropped, no page is stored."""
    rng = np.random.default_rng(0)
    runner = MockRunner(page_size=4, num_pages=100)
    monkeypatch.setattr(kv_offload, "IN_FLIGHT_BYTES", 4 * 16 * 8)
    with tiered(runner, sync=sync) as engine:
        gate = Gate()
        runner.before_copy = gate
        r = ask("r", prompt(rng, 61), max_tokens=30, ignore_eos=True)
        output = run(engine, [r])["r"]  # ends although no copy does
        assert_plain(runner, [r], {"r": output})
        stats = engine.stats().kv_tiers
        assert stats.dropped_tokens > 0
        assert stats.offloaded_tokens + stats.dropped_tokens == engine.stats().batch_tokens
        assert engine.tiers._offload._workers.waiting == 4 * 16 * 8
        gate.open()
        runner.before_copy = lambda: None
        settle(engine)
        assert second_round(engine, [*r.prompt_token_ids, *output.token_ids]) == 60, "four steps of 16 held the prompt"


@pytest.mark.parametrize("length", [4, 8, 12, 16, 1, 3, 5])
def test_prompts_of_whole_pages_twice(length):
    """Field case 1: of a prompt that is stored as a whole, the last page is computed again, for its logits."""
    tokens = prompt(np.random.default_rng(0), length)
    runner = MockRunner(page_size=4, num_pages=60)
    with tiered(runner) as engine:
        for cached in (0, (length - 1) // 4 * 4):
            r = ask("r", tokens, max_tokens=9, ignore_eos=True)
            output = finish(engine, r)
            assert_plain(runner, [r], {"r": output})
            assert output.last.usage.cached_tokens == cached
            settle(engine)


def test_a_tiny_pool_under_load_has_the_tokens_of_plain_decoding():
    """Field cases 2, 4, 20 and 22: 600 requests of few prefixes preempt each other in a pool of a fifth of their need."""
    rng = np.random.default_rng(0)
    prefixes = [prompt(rng, n) for n in (9, 24, 40)]
    runner = MockRunner(page_size=4, num_pages=30, b_dense=32, max_sequences=12, lazy=True)
    delays = iter(np.random.default_rng(1).choice([0.0, 0.0, 0.001], 1_000_000))
    lock = threading.Lock()

    def before_copy() -> None:
        with lock:
            delay = next(delays)
        time.sleep(delay)

    runner.before_copy = before_copy
    requests = [
        ask(f"r{i}", [*prefixes[i % 3], *prompt(rng, int(rng.integers(1, 12)))], max_tokens=int(rng.integers(1, 30)))
        for i in range(600)
    ]
    with tiered(runner, make_store(runner, 100)) as engine:
        outputs = run(engine, requests, clears=range(0, 20_000, 11), max_steps=200_000)
        assert_plain(runner, requests, outputs)
        assert engine.stats().kv_tiers.loads > 0
        assert_empty(engine)

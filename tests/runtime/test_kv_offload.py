"""Steps to pages: after any order of steps, owners, losses and faults, whole pages of the right bytes are stored."""

import hashlib
import shutil
import tempfile
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from nanoflow_jax.runtime import kv_offload
from nanoflow_jax.runtime.kv_offload import Offload
from nanoflow_jax.runtime.kv_store import KVStore
from nanoflow_jax.runtime.sequences import Phase, SequenceTable
from tests.runtime.kv_store.helpers import FINGERPRINT, Gate

TOKEN_BYTES = 8
MAX_PAGES = 6


def token_bytes(kind: int, position: int, group: int) -> bytes:
    """What a sequence of a kind leaves of a token in a group of layers."""
    return hashlib.blake2b(bytes([*kind.to_bytes(2), position, group]), digest_size=TOKEN_BYTES).digest()


def name(kind: int, page: int) -> bytes:
    return hashlib.blake2b(b"page" + bytes([*kind.to_bytes(2), page]), digest_size=16).digest()


def page_of(kind: int, page: int, page_size: int, num_groups: int) -> bytes:
    positions = range(page * page_size, (page + 1) * page_size)
    return b"".join(token_bytes(kind, position, group) for group in range(num_groups) for position in positions)


class Member:
    """As much of a sequence as offload sees; those of a kind have the same tokens."""

    def __init__(self, kind: int, arrival: int, row: int, position: int) -> None:
        self.kind, self.arrival, self.row, self.position = kind, arrival, row, position
        self.tokens = np.zeros(0, np.int32)

    def page_digests(self, tokens: np.ndarray, page_size: int, num_pages: int) -> list[bytes]:
        return [name(self.kind, page) for page in range(num_pages)]


class Leaving:
    """An array on its way from the device, which may never arrive."""

    def __init__(self, values: np.ndarray, arrive=lambda: None) -> None:
        self._values, self._arrive, self.nbytes = values, arrive, values.nbytes

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self._arrive()
        return self._values


def lose() -> None:
    raise RuntimeError("the device is gone")


class World:
    """An offload with a table of rows and a store, and the steps of a made-up engine."""

    def __init__(self, *, num_rows: int, page_size: int, num_groups: int, num_slots: int, **options) -> None:
        self.page_size, self.num_groups, self.num_rows = page_size, num_groups, num_rows
        page_bytes = page_size * num_groups * TOKEN_BYTES
        self.store = KVStore(FINGERPRINT, page_bytes, host_bytes=num_slots * page_bytes, **options)
        self.offload = Offload(self.store, num_rows=num_rows, page_size=page_size, num_groups=num_groups)
        self.table = SequenceTable(num_rows, 256, 64, 1)
        self.running: dict[int, Member] = {}
        self.num_arrivals = self.num_kinds = 0

    def place(self, row: int, kind: int, position: int) -> Member:
        member = self.running[row] = Member(kind, self.num_arrivals, row, position)
        self.num_arrivals += 1
        self.num_kinds = max(self.num_kinds, kind + 1)
        self.table.phase[row], self.table.arrival[row], self.table.known[row] = Phase.DECODE, member.arrival, 256
        return member

    def leave(self, row: int) -> None:
        member = self.running.pop(row)
        self.table.phase[row] = Phase.FREE
        member.tokens, member.row = np.zeros(256, np.int32), -1

    def form(self, members: list[Member], lengths: list[int], gap: int = 0):
        """A step of the next tokens of members, and its values per group; `gap` tokens of nobody before each stretch."""
        ends = np.array([m.position for m in members], np.int32) + np.array(lengths, np.int32)
        starts = np.cumsum(np.array(lengths, np.int32) + gap, dtype=np.int32) - lengths
        values = np.full((self.num_groups, int(sum(lengths)) + gap * (len(lengths) + 1), TOKEN_BYTES), 0xEE, np.uint8)
        for member, start, length in zip(members, starts.tolist(), lengths, strict=True):
            for i in range(length):
                for group in range(self.num_groups):
                    content = token_bytes(member.kind, member.position + i, group)
                    values[group, start + i] = np.frombuffer(content, np.uint8)
            member.position += length
        batch = SimpleNamespace(kv_lens=np.append(ends, 0), q_lens=np.array([*lengths, 0]), q_starts=np.append(starts, 0))
        rows = np.array([member.row for member in members])
        step = SimpleNamespace(batch=batch, members=np.array(members), member_rows=rows, num_tokens=sum(lengths))
        return step, values.view(np.uint16).reshape(self.num_groups, -1, 1, 2, TOKEN_BYTES // 4)

    def step(self, members: list[Member], lengths: list[int]) -> None:
        step, values = self.form(members, lengths)
        self.offload.take(step, [Leaving(group) for group in values], self.table)

    def wait(self) -> None:
        """Until what was taken is stored; unfinished pages stay."""
        assert self.offload._workers.drain(20.0)

    def stored(self) -> set[tuple[int, int]]:
        """Pages in the store, with the bytes that belong there."""
        found = set()
        for kind in range(self.num_kinds):
            here = [page for page in range(MAX_PAGES + 2) if name(kind, page) in self.store]
            with self.store.get_many([name(kind, page) for page in here]).result(20.0) as got:
                contents = b"".join(run.tobytes() for run in got.runs)
                assert contents == b"".join(page_of(kind, page, self.page_size, self.num_groups) for page in here[: len(got)])
                found |= {(kind, page) for page in here[: len(got)]}
        return found

    def close(self) -> None:
        assert self.offload.drain(20.0) and self.store.drain(20.0)
        assert self.store.num_pinned == 0
        self.store._host.check_integrity()
        assert self.offload.stop(20.0)
        assert self.store.close(20.0)


FATES = st.sampled_from(["stored"] * 5 + ["dropped", "lost", "last"])


class OffloadMachine(RuleBasedStateMachine):
    """The model: a page is stored if its tokens came in succession, none was lost, and its row belonged to the sequence.

    In a tier that holds everything exactly these pages are stored, in a tiny one no others.
    """

    @initialize(
        num_rows=st.integers(1, 5),
        page_size=st.integers(1, 5),
        num_groups=st.integers(1, 3),
        num_slots=st.sampled_from([0, 1, 2, 3, 5, 8, 400, 400, 400, 400]),
        ssd=st.booleans(),
        threads=st.sampled_from([1, 3]),
    )
    def create(self, num_rows, page_size, num_groups, num_slots, ssd, threads):
        # So that tiny copies are divided, too.
        self.patches = mock.patch.multiple(kv_offload, _COPY_THREADS=threads, _MIN_COPY_BYTES=16, _GATHER_BYTES=16)
        self.patches.start()
        self.directory = tempfile.mkdtemp() if ssd and num_slots > 1 else None
        options = {} if self.directory is None else {"ssd_directory": self.directory, "ssd_bytes": 1 << 20}
        self.world = World(num_rows=num_rows, page_size=page_size, num_groups=num_groups, num_slots=num_slots, **options)
        self.exact = num_slots == 400
        self.num_slots = num_slots
        self.expected: set[tuple[int, int]] = set()
        # Per row: (arrival, position up to which its unfinished page has come, or -1).
        self.unfinished: dict[int, tuple[int, int]] = {}

    @rule(row=st.integers(0, 4), old=st.booleans(), page=st.integers(0, 3), within=st.booleans())
    def place(self, row, old, page, within):
        """Another sequence takes a row, at the beginning of a page or `within` one, where the last stopped."""
        kind = self.world.num_kinds // 2 if old else self.world.num_kinds
        row %= self.world.num_rows
        position = page * self.world.page_size
        if row in self.world.running:
            if within:
                position = self.world.running[row].position
            self.leave(row)
        self.world.place(row, kind, position)

    @rule(row=st.integers(0, 4))
    def leave(self, row):
        row %= self.world.num_rows
        if row in self.world.running:
            self.world.leave(row)

    @rule(seed=st.integers(0, 2**32 - 1), gap=st.integers(0, 2), fates=st.lists(FATES, min_size=1, max_size=6))
    def steps(self, seed, gap, fates):
        for i, fate in enumerate(fates):
            self.step(np.random.default_rng(seed + i), gap, fate)
            self.agrees()

    def step(self, rng, gap, fate):
        """Some of the rows, in any order; those without a sequence, or with a long one, get another."""
        world, size = self.world, self.world.page_size
        rows = rng.permutation(world.num_rows)[: rng.integers(1, world.num_rows + 1)].tolist()
        for row in rows:
            if row not in world.running or world.running[row].position >= MAX_PAGES * size:
                self.place(row, bool(rng.random() < 0.3), int(rng.integers(4)), False)
        members = [world.running[row] for row in rows]
        lengths = [1 if rng.random() < 0.5 else int(rng.integers(1, 2 * size + 1)) for _ in members]
        before = [m.position for m in members]
        step, values = world.form(members, lengths, gap)
        for member in members:  # ids of a page may be missing when its sequence ended within it
            world.table.known[member.row] = member.position - (fate == "last")
        if fate == "last":
            row = members[0].row
            world.leave(row)
            members[0].tokens = members[0].tokens[: members[0].position - 1]
        if fate != "dropped":
            faulty = int(rng.integers(world.num_groups)) if fate == "lost" else -1
            arrays = [Leaving(group, lose if i == faulty else lambda: None) for i, group in enumerate(values)]
            world.offload.take(step, arrays, world.table)
        for member, row, position, length in zip(members, step.member_rows.tolist(), before, lengths, strict=True):
            if fate == "dropped" and row in self.unfinished:
                self.unfinished[row] = (self.unfinished[row][0], -1)  # held until the next step shows that one is missing
            if fate == "lost":
                self.unfinished.pop(row, None)
            if fate in ("dropped", "lost"):
                continue
            whole = position % size == 0 or self.unfinished.get(row) == (member.arrival, position)
            end = position + length
            first = position // size + (not whole)
            num_known = (end - (fate == "last")) // size
            self.expected |= {(member.kind, page) for page in range(first, num_known)}
            self.unfinished.pop(row, None)
            if end % size and (whole or end // size > position // size):
                self.unfinished[row] = (member.arrival, end)
        if fate not in ("dropped", "lost"):
            self.settle_owners()

    def settle_owners(self):
        """A step that was taken tells who has a row; others lose what is unfinished there."""
        for row, (arrival, _) in list(self.unfinished.items()):
            if row not in self.world.running or self.world.running[row].arrival != arrival:
                del self.unfinished[row]

    @rule()
    def drain(self):
        assert self.world.offload.drain(20.0)
        assert self.world.store.num_pinned == 0 or self.directory
        self.unfinished.clear()

    @rule()
    def clear(self):
        """Forgets what is stored; what is being filled is not found either."""
        self.world.wait()
        self.world.store.clear()
        self.expected.clear()
        assert self.world.offload.drain(20.0)
        self.unfinished.clear()

    @invariant()
    def agrees(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.wait()
        held = int((world.offload._slots >= 0).sum())
        assert held <= self.num_slots // 2
        stored = world.stored()
        assert stored <= self.expected
        if self.exact:
            assert stored == self.expected
            assert set(np.flatnonzero(world.offload._slots >= 0)) == set(self.unfinished)
            assert world.store.stats().host.dropped == 0
        assert world.store.drain(20.0) and world.store.num_pinned == held
        world.store._host.check_integrity()
        assert set(world.store.stats().faults) <= {"internal error"}

    def teardown(self):
        if hasattr(self, "world"):
            self.world.close()
            self.patches.stop()
            if self.directory:
                shutil.rmtree(self.directory)


TestOffload = OffloadMachine.TestCase
TestOffload.settings = settings(max_examples=300, stateful_step_count=25)


@pytest.mark.parametrize("num_slots", [2, 3, 4, 7])
def test_a_tier_with_fewer_slots_than_rows_starves_nobody(num_slots):
    """Eight rows decode; they take turns with half of the slots, and prompts find the others."""
    world = World(num_rows=9, page_size=4, num_groups=2, num_slots=num_slots)
    rows, seen = [world.place(row, 0, 0) for row in range(8)], set()
    for turn in range(12):
        world.step(rows, [1] * 8)
        world.wait()
        assert int((world.offload._slots >= 0).sum()) == (0 if turn % 4 == 3 else num_slots // 2)
        seen |= world.stored()
        world.step([world.place(8, 1 + turn // 6, turn % 6 * 4)], [4])
        world.wait()
        assert (1 + turn // 6, turn % 6) in world.stored()
        world.leave(8)
    assert {(0, 0), (0, 1), (0, 2)} <= seen
    assert world.store.stats().host.dropped == 3 * (8 - num_slots // 2)
    world.close()


def test_a_row_keeps_nothing_of_a_sequence_that_has_left():
    world = World(num_rows=4, page_size=4, num_groups=1, num_slots=20)
    first, second = world.place(0, 0, 0), world.place(1, 1, 0)
    world.step([first, second], [2, 2])
    world.wait()
    assert world.store.num_pinned == 2
    world.table.phase[0] = Phase.ENDING
    world.step([second], [1])
    world.wait()
    assert world.store.num_pinned == 1, "nothing follows from a row that is ending"
    world.step([second], [1])
    world.wait()
    assert world.store.num_pinned == 0 and world.stored() == {(1, 0)}
    world.close()


def test_an_array_that_fails_costs_its_step_and_is_counted():
    world = World(num_rows=2, page_size=4, num_groups=3, num_slots=20)
    member = world.place(0, 0, 0)
    world.step([member], [6])
    step, values = world.form([member], [6])
    world.offload.take(step, [Leaving(values[0]), Leaving(values[1]), Leaving(values[2], lose)], world.table)
    world.step([member], [8])
    world.wait()
    assert world.stored() == {(0, 0), (0, 3), (0, 4)}, "pages 1 and 2 miss tokens of the step that failed"
    assert world.store.stats().faults == {"internal error": 1}
    world.close()


def test_nobody_waits_for_a_step_and_stop_says_when_it_has_not_ended():
    world = World(num_rows=2, page_size=4, num_groups=2, num_slots=20)
    gate, member = Gate(), world.place(0, 0, 0)
    step, values = world.form([member], [6])
    world.offload.take(step, [Leaving(group, gate) for group in values], world.table)
    world.step([member], [2])
    assert gate.entered.wait(5.0)
    assert not world.offload.drain(0.01) and not world.offload.stop(0.01)
    gate.open()
    assert world.offload.stop(20.0) and world.offload.stop(20.0)
    assert world.stored() == {(0, 0), (0, 1)} and world.store.num_pinned == 0
    world.store.close()


@pytest.mark.parametrize("num_groups", [1, 2, 5])
def test_arrays_of_jax_that_are_not_ready(num_groups):
    """bfloat16, as a GPU's steps have it."""
    world = World(num_rows=1, page_size=4, num_groups=num_groups, num_slots=8)
    step, values = world.form([world.place(0, 2, 0)], [11])

    @jax.jit
    def late(x):
        noise = jnp.sin(jnp.arange(200_000.0)).sum()
        return jax.lax.bitcast_convert_type(x + jnp.uint16(0) * noise.astype(jnp.uint16), jnp.bfloat16)

    world.offload.take(step, [late(group) for group in values], world.table)
    world.wait()
    assert world.stored() == {(2, 0), (2, 1)}
    world.close()

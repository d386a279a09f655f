"""The protocol of GEMMs fused with a sum over ranks: who owns, sends and adds what, and that nobody waits for ever."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels._collective_schedule import (
    ADD,
    BLOCK_IN_TILE,
    COLUMN,
    INDEX,
    KIND,
    OWNER,
    ROW,
    SEGMENT,
    SEND,
    SLOT,
    SLOTS,
    TILE,
    TO,
    VALID,
    CollectiveSchedule,
    M,
    N,
    collective_schedule,
)  # fmt: skip
from pallas_kernels._gemm_config import GemmConfig

_TILES = [
    GemmConfig(tile_m=64, tile_n=64, consumers=1, group_rows=128),
    GemmConfig(tile_m=128, tile_n=64),
    GemmConfig(tile_m=64, tile_n=128, split="n"),
    GemmConfig(tile_m=256, tile_n=128),
]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[int, int, int, int, GemmConfig, bool]:
    config = draw(st.sampled_from(_TILES))
    ranks, scatter = draw(st.integers(2, 5)), draw(st.booleans())
    m = ranks * config.tile_m * draw(st.integers(1, 3)) if scatter else draw(st.integers(1, 600))
    return m, draw(st.integers(1, 40)) * 16, ranks, draw(st.integers(1, 12)), config, scatter


def _made(case: tuple[int, int, int, int, GemmConfig, bool]) -> CollectiveSchedule:
    m, n, ranks, num_sms, config, scatter = case
    return collective_schedule(m, n, ranks, num_sms, config, scatter=scatter)


def _tasks(plan: CollectiveSchedule, rank: int, cta: int) -> list[list[int]]:
    return [list(map(int, task)) for task in plan.tasks[rank, cta] if task[KIND]]


@given(_cases())
@settings(max_examples=60)
def test_every_tile_is_computed_and_sent_once_by_every_rank_to_its_one_owner(case):
    m, n, ranks, _, config, _ = case
    plan = _made(case)
    owner_of: dict[tuple[int, int], tuple[int, int]] = {}
    for rank in range(ranks):
        computed = []
        for cta in range(plan.ctas):
            segments = [s for s in plan.segments[rank, cta].tolist() if s[VALID]]
            computed += [(s[M], s[N]) for s in segments]
            for s in segments:
                assert owner_of.setdefault((s[M], s[N]), (s[OWNER], s[INDEX])) == (s[OWNER], s[INDEX])
            sends = [t for t in _tasks(plan, rank, cta) if t[KIND] == SEND]
            assert [(t[TO], t[TILE], t[SEGMENT]) for t in sends] == [(s[OWNER], s[INDEX], i) for i, s in enumerate(segments)]
        everything = [(i, j) for i in range(-(-m // config.tile_m)) for j in range(-(-n // config.tile_n))]
        assert sorted(computed) == everything
    places = list(owner_of.values())
    assert len(set(places)) == len(places), "two tiles share a place at their owner"
    assert all(index < plan.tiles_per_owner for _, index in places)


@given(_cases())
@settings(max_examples=60)
def test_every_block_of_c_is_added_once(case):
    m, n, ranks, _, config, scatter = case
    plan = _made(case)
    wide = config.tile_n // 64
    tiles = {(s[OWNER], s[INDEX]): (s[M], s[N]) for s in plan.segments.reshape(-1, 5).tolist() if s[VALID]}
    added = []
    for rank in range(ranks):
        for cta in range(plan.ctas):
            adds = [t for t in _tasks(plan, rank, cta) if t[KIND] == ADD]
            assert [t[SLOT] for t in adds] == [i % SLOTS for i in range(len(adds))]
            for t in adds:
                row, column = t[ROW] + (rank * m // ranks // 64 if scatter else 0), t[COLUMN]
                tile_m, tile_n = tiles[rank, t[TILE]]
                inside = (row - tile_m * config.tile_m // 64) * wide + column - tile_n * wide
                assert inside == t[BLOCK_IN_TILE], "the block's place in its tile is not its place in C"
                added.append((row, column))
    assert sorted(added) == [(i, j) for i in range(-(-m // 64)) for j in range(-(-n // 64))]


def _finishes(tasks: list[list[list[list[int]]]], ranks: int, seed: int) -> bool:
    """Runs each CTA's tasks at a random pace; a CTA's tiles come at random times too, one after the other.

    False if nobody can go on before all are done: the protocol has locked up.
    """
    chance = random.Random(seed)
    come: dict[tuple[int, int], int] = {}
    workers = [(rank, cta) for rank in range(ranks) for cta in range(len(tasks[rank]))]
    at, multiplied = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)

    def steps(worker: tuple[int, int]) -> list[str]:
        rank, cta = worker
        todo = tasks[rank][cta]
        sends = sum(t[KIND] == SEND for t in todo)
        possible = ["multiply"] if multiplied[worker] < sends else []
        if at[worker] < len(todo):
            task = todo[at[worker]]
            ready = multiplied[worker] > task[SEGMENT] if task[KIND] == SEND else come.get((rank, task[TILE]), 0) == ranks
            possible += ["task"] if ready else []
        return possible

    favoured = chance.sample(workers, k=chance.randint(1, len(workers)))  # run as far as they can before all others
    while True:
        able = [w for w in favoured if steps(w)] or [w for w in workers if steps(w)]
        if not able:
            return all(at[w] == len(tasks[w[0]][w[1]]) for w in workers)
        worker = chance.choice(able)
        if chance.choice(steps(worker)) == "multiply":
            multiplied[worker] += 1
            continue
        task = tasks[worker[0]][worker[1]][at[worker]]
        at[worker] += 1
        if task[KIND] == SEND:
            come[task[TO], task[TILE]] = come.get((task[TO], task[TILE]), 0) + 1


@given(_cases(), st.integers(0, 1 << 30))
@settings(max_examples=60)
def test_nothing_locks_up_at_any_pace(case, seed):
    plan = _made(case)
    tasks = [[_tasks(plan, rank, cta) for cta in range(plan.ctas)] for rank in range(case[2])]
    assert _finishes(tasks, case[2], seed)


def test_the_simulation_sees_a_broken_protocol():
    plan = collective_schedule(512, 512, 4, 5, _TILES[1], scatter=False)
    tasks = [[_tasks(plan, rank, cta) for cta in range(plan.ctas)] for rank in range(4)]
    assert all(_finishes(tasks, 4, seed) for seed in range(20))
    lost = [[list(of_cta) for of_cta in of_rank] for of_rank in tasks]
    lost[2][1] = [t for t in lost[2][1] if not (t[KIND] == SEND and t[SEGMENT] == 0)]
    assert not _finishes(lost, 4, 0), "a tile that nobody tells of"
    twice = [[list(of_cta) for of_cta in of_rank] for of_rank in tasks]
    twice[1][0].insert(0, twice[1][0][0])
    assert not _finishes(twice, 4, 0), "a tile told of twice"
    adds_first = [[sorted(of_cta, key=lambda t: t[KIND] == SEND) for of_cta in of_rank] for of_rank in tasks]
    assert not any(_finishes(adds_first, 4, seed) for seed in range(20)), "sums before what others wait for"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_send_to_different_peers_and_share_the_sums_evenly(ranks):
    plan = collective_schedule(2048, 8192, ranks, 132, _TILES[3], scatter=False)
    owners = plan.segments[..., OWNER]
    for cta, wave in np.ndindex(plan.ctas, owners.shape[2] - 1):
        if plan.segments[:, cta, wave, VALID].all():
            assert len(set(owners[:, cta, wave].tolist())) == ranks
    adds = (plan.tasks[..., KIND] == ADD).sum(-1)
    assert adds.max() - adds.min() <= 1
    # A wave's sums are due at its end: only the last wave's are left when the products are done.
    for rank in range(ranks):
        last = owners.shape[2] - 2
        behind = sum(t[KIND] == ADD for cta in range(plan.ctas) for t in _after_segment(_tasks(plan, rank, cta), last))
        assert behind <= (132 // ranks + 1) * 8


def _after_segment(tasks: list[list[int]], segment: int) -> list[list[int]]:
    """The tasks behind the last SEND of a CTA that has such a segment."""
    positions = [i for i, t in enumerate(tasks) if t[KIND] == SEND and t[SEGMENT] == segment]
    return tasks[positions[0] + 1 :] if positions else []


def test_refuses_rows_that_do_not_divide():
    with pytest.raises(ValueError, match="320 rows do not divide"):
        collective_schedule(320, 256, 4, 8, _TILES[1], scatter=True)

"""The GEMM's schedule: pure data, so every property can be checked without a kernel."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels._gemm_cost import fastest, predicted_seconds
from pallas_kernels._gemm_schedule import schedule, schedules
from pallas_kernels._tuning import GemmConfig

_sizes = st.fixed_dictionaries(
    {
        "m_tiles": st.integers(1, 9),
        "n_tiles": st.integers(1, 9),
        "k_steps": st.integers(1, 40),
        "num_sms": st.integers(1, 30),
    }
)
_configs = st.builds(
    GemmConfig,
    tile_m=st.just(64),
    tile_n=st.just(64),
    consumers=st.just(1),
    group_rows=st.sampled_from([64, 128, 256]),
    stream_k=st.booleans(),
    shared_waves=st.integers(0, 2),
    fixup_steps=st.integers(-40, 40),
    min_steps=st.integers(1, 5),
)


@settings(max_examples=200)
@given(sizes=_sizes, config=_configs)
def test_schedule_covers_every_step_once_and_adds_up(sizes, config):
    _assert_covers(schedule(**sizes, config=config), sizes["m_tiles"], sizes["n_tiles"], sizes["k_steps"])


@settings(max_examples=100)
@given(sizes=_sizes, config=_configs)
def test_every_number_of_rows_in_use_has_a_schedule_of_its_own(sizes, config):
    tables = schedules(**sizes, config=config)
    assert tables.shape[0] == sizes["m_tiles"] + 1
    assert not tables[0].any()
    for m_tiles, table in enumerate(tables):
        _assert_covers(table, m_tiles, sizes["n_tiles"], sizes["k_steps"])
    whole = schedule(**sizes, config=config)
    np.testing.assert_array_equal(tables[-1, :, : whole.shape[1]], whole)
    assert not tables[-1, :, whole.shape[1] :].any()


def test_schedules_are_as_small_as_their_numbers_allow():
    config = GemmConfig(tile_m=64, tile_n=64, consumers=1)
    assert schedules(2, 3, 32767, 4, config).dtype == np.int16
    long = schedules(2, 3, 32768, 4, config)
    assert long.dtype == np.int32
    _assert_covers(long[2], m_tiles=2, n_tiles=3, k_steps=32768)


def _assert_covers(table: np.ndarray, m_tiles: int, n_tiles: int, k_steps: int) -> None:
    """Every step of every tile once, none of another, and every partial sum added once, by a CTA behind those that left it."""
    done = np.zeros((m_tiles, n_tiles, k_steps), int)
    left: dict[int, tuple[int, int, int, int]] = {}  # what each CTA leaves behind: tile and steps
    owned = []
    for cta, segments in enumerate(table.tolist()):
        assert segments[-1] == [0] * 6, "every CTA's list ends"
        live = [s for s in segments if s[3]]
        assert segments[: len(live)] == live, "nothing behind the end"
        for m, n, begin, steps, sources, partial in live:
            done[m, n, begin : begin + steps] += 1
            assert not (partial and sources)
            if partial:
                assert cta not in left, "one slot for a CTA's partial sum"
                left[cta] = (m, n, begin, begin + steps)
            else:
                owned.append((cta, m, n, begin, sources))
                assert begin + steps == k_steps
    assert (done == 1).all()
    used = []
    for cta, m, n, begin, sources in owned:
        parts = [left[source] for source in range(cta - sources, cta)]
        assert [p[:2] for p in parts] == [(m, n)] * sources
        borders = [0, *(p[3] for p in parts)]
        assert [p[2] for p in parts] == borders[:-1], "the parts follow each other along k"
        assert borders[-1] == begin
        used += range(cta - sources, cta)
    assert sorted(used) == sorted(left), "every partial sum is added once"


def test_schedule_balances():
    # 3.39 waves: whole tiles would take four.
    table = schedule(8, 56, 64, 132, GemmConfig(tile_m=256, tile_n=128))
    assert table[..., 3].sum(axis=1).max() <= 64 * 8 * 56 / 132 + 2
    # Full waves are not cut.
    assert not schedule(8, 33, 64, 132, GemmConfig(tile_m=256, tile_n=128))[..., 5].any()


def test_predicted_time_grows_with_work_and_falls_with_sms():
    def seconds(m: int = 1024, num_sms: int = 132, config: GemmConfig | None = None) -> float:
        config = config or fastest(m, 2560, 8192, swiglu=False, num_sms=num_sms)
        return predicted_seconds(config, m, 2560, 8192, swiglu=False, num_sms=num_sms)

    for few, many in ((48, 84), (84, 108), (108, 132)):
        assert seconds(num_sms=few) > seconds(num_sms=many)
    for low, high in ((64, 256), (256, 1024), (1024, 4096)):
        assert seconds(low) < seconds(high)
    # 20 tiles on 132 SMs: three CTAs a tile beat one.
    alone = GemmConfig(tile_m=256, tile_n=128, stream_k=False)
    shared = GemmConfig(tile_m=256, tile_n=128, cluster=3, cluster_along="k")
    assert seconds(256, config=shared) < seconds(256, config=alone)


@settings(max_examples=50)
@given(
    m=st.integers(1, 64).map(lambda x: 64 * x),
    n=st.sampled_from([48, 1280, 6144]),
    k=st.sampled_from([64, 1024, 8192]),
    swiglu=st.booleans(),
    num_sms=st.integers(1, 132),
)
def test_any_shape_gets_a_configuration_that_runs(m, n, k, swiglu, num_sms):
    config = fastest(m, n, k, swiglu=swiglu, num_sms=num_sms)
    assert config.stages(swiglu) >= 2
    assert config.cluster == 1

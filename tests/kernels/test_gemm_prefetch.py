"""Blocks of B that gemm prefetches into the L2 cache: which and when, that results stay the same, and what it compiles to."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pallas_kernels import _gemm_pipeline, gemm
from pallas_kernels._gemm_schedule import N, schedule
from pallas_kernels._tuning import GemmConfig
from pallas_kernels.gemm import _walk
from tests.kernels import aot
from tests.kernels.interpret import interpreted
from tests.kernels.products import CUT, assert_right_on_device, operands, operands_on_device

_64X64 = GemmConfig(tile_m=64, tile_n=64, consumers=1, **CUT)
_128X128 = GemmConfig(tile_m=128, tile_n=128, **CUT)


class _Ref:
    """Stands for an array: a place in it is its indices."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.at = shape, self

    def __getitem__(self, place: Any) -> Any:
        return place


def _producer_events(table: np.ndarray, config: GemmConfig, halves: int, stages: int, sm: int, cta: int) -> list[Any]:
    """What the producer of one CTA issues for B, in order: ("copy" or "prefetch", first row in K, first column)."""
    events: list[Any] = []

    def block(kind: str, place: Any) -> None:
        if len(place) == 3 and kind == "copy":
            if place[1] == 1:
                return  # the second half of what was copied
        elif len(place) == 3:
            assert place[1] == slice(None), "both halves at once"
        events.append((kind, int(place[0].start), int(place[-1].start)))

    def copy(source: Any, destination: Any, _: Any, **__: Any) -> None:
        if isinstance(destination, tuple):  # a slot and a half: of B
            block("copy", source)

    stand_in = types.SimpleNamespace(
        copy_gmem_to_smem=copy, async_prefetch=functools.partial(block, "prefetch"), barrier_wait=lambda _: None
    )
    a, b, a_smem, b_smem, barriers = _Ref(), _Ref(), _Ref(), _Ref(stages, halves), _Ref()
    walk = functools.partial(_walk, table, config, config.prefetch > 0)
    with jax.disable_jit(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(lax, "axis_index", lambda name: jnp.int32({"sm": sm, "cta": cta}[name]))
        patch.setattr(_gemm_pipeline, "plgpu", stand_in)
        _gemm_pipeline.produce(walk, a, b, a_smem, b_smem, barriers, barriers, config, False)
    return events


def _steps(table: np.ndarray, config: GemmConfig, sm: int, cta: int) -> list[tuple[int, int, bool]]:
    """Every step of a CTA in order: first row in K, first column, and whether the tile is of its group's first row."""
    found = []
    for m, n, k_begin, k_steps, *_ in table[sm].tolist():
        along_k = config.cluster_along == "k"
        first, last = (k_steps * c // config.cluster for c in (cta, cta + 1)) if along_k else (k_begin, k_begin + k_steps)
        leads = m % config.group_m == 0 and (along_k or cta == 0)
        found += [(k * config.tile_k, n * config.tile_n, leads) for k in range(first, last)]
    return found


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_column_is_prefetched_once_by_the_cta_with_its_first_row(data):
    cluster, along = data.draw(st.sampled_from([(1, "m"), (2, "m"), (2, "k")]))
    halves, stages = data.draw(st.integers(1, 2)), data.draw(st.integers(2, 5))
    ahead = data.draw(st.integers(1, 9))
    config = dataclasses.replace(
        _64X64,
        cluster=cluster,
        cluster_along=along,
        group_rows=data.draw(st.sampled_from([64, 128, 256])),
        stream_k=data.draw(st.booleans()),
        prefetch=ahead,
    )
    m_tiles, n_tiles, k_steps = (data.draw(st.integers(low, high)) for low, high in ((1, 4), (1, 4), (cluster, 12)))
    table = schedule(m_tiles, n_tiles, k_steps, data.draw(st.integers(1, 4)), config)
    table[..., N] = np.arange(table.shape[1])  # so that columns tell a CTA's segments apart
    sm, cta = data.draw(st.integers(0, len(table) - 1)), data.draw(st.integers(0, cluster - 1))
    events = _producer_events(table, config, halves, stages, sm, cta)
    steps = _steps(table, config, sm, cta)

    assert [place for kind, *place in events if kind == "copy"] == [[k, column] for k, column, _ in steps]
    number = {(k, column): i for i, (k, column, _) in enumerate(steps)}
    copied, prefetched = 0, []
    for kind, *place in events:
        if kind == "copy":
            copied += 1
        else:
            prefetched.append(number[*place])
            assert copied <= prefetched[-1] < copied + ahead
    assert len(set(prefetched)) == len(prefetched)
    leading = {i for i, (*_, leads) in enumerate(steps) if leads}
    lengths = np.unique([column for _, column, _ in steps], return_counts=True)[1]
    if (lengths[1:-1] >= ahead).all():
        assert set(prefetched) == leading - set(range(min(stages, ahead)))
    else:  # what lies behind a whole segment is left to the copy
        assert set(prefetched) <= leading


def test_interpreted_results_are_the_same():
    # Two tiles of three steps over three CTAs.
    ab, kwargs = operands(64, 192, 128)
    outs = []
    for steps in (0, 2):
        with interpreted(zero_fill=True, detect_races=False):
            outs.append(gemm(*ab, **kwargs, num_sms=3, config=dataclasses.replace(_64X64, prefetch=steps)))
    np.testing.assert_array_equal(*(np.asarray(out.astype(jnp.float32)) for out in outs))


def test_refuses_to_look_back():
    with pytest.raises(ValueError, match="prefetch=-1"):
        dataclasses.replace(_64X64, prefetch=-1)


_COMPILED: dict[str, tuple[tuple[int, int, int], dict[str, Any], GemmConfig]] = {
    "whole": ((1024, 14336, 4096), {"num_sms": 100}, GemmConfig(tile_m=256, tile_n=128, stream_k=False)),
    "cut, swiglu": ((1024, 4096, 14336), {"num_sms": 100, "swiglu": True}, _128X128),
    "clusters along m": ((2048, 4096, 6144), {}, GemmConfig(tile_m=128, tile_n=256, cluster=2)),
    "clusters along k": ((512, 8192, 2560), {}, GemmConfig(tile_m=128, tile_n=256, cluster=3, cluster_along="k")),
}


def aot_cases() -> dict[str, Any]:
    def case(m: int, k: int, n: int, *, num_sms: int = 132, swiglu: bool = False, config: GemmConfig) -> Any:
        shapes = (m, k), (k, 2, n) if swiglu else (k, n)
        run = functools.partial(gemm, swiglu=swiglu, num_sms=num_sms, config=config)
        return run, tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    return {
        f"{name} {steps}": case(*sizes, **extra, config=dataclasses.replace(config, prefetch=steps))
        for name, (sizes, extra, config) in _COMPILED.items()
        for steps in (0, 4, 8)
    }


@pytest.mark.aot
@pytest.mark.parametrize("name", _COMPILED)
def test_prefetches_take_no_registers_and_no_shared_memory(name):
    found = aot.resources(__name__)
    without = found[f"{name} 0"]
    assert without.prefetches == without.spill_bytes == 0
    for steps in (4, 8):
        ahead = found[f"{name} {steps}"]
        assert ahead.prefetches >= 2, steps  # of this tile's steps and of the next one's
        assert dataclasses.replace(ahead, prefetches=0) == without, steps


@pytest.mark.gpu
@pytest.mark.parametrize("name", _COMPILED)
def test_gpu_results_are_right(name):
    sizes, extra, config = _COMPILED[name]
    ab, kwargs = operands_on_device(*sizes, swiglu=extra.get("swiglu", False))
    for steps in (4, 8):
        ahead = dataclasses.replace(config, prefetch=steps)
        assert_right_on_device(ab, kwargs, rows=(None, sizes[0] - 100), num_sms=extra.get("num_sms", 132), config=ahead)

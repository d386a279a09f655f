"""Sampling against numpy: distributions by chi-square, filters by a plain reference, seeds and rows by equality."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nanoflow_jax.batch import Batch, BatchShape, empty_batch
from nanoflow_jax.sampling import Sampled, SamplingMode, sample, sampling_mode

_sample = jax.jit(sample, static_argnums=(2, 3))
_DRAWS = 4096


def _batch(num_rows: int, **fields) -> Batch:
    """A host batch of sampling rows; fields are numbers or arrays over rows."""
    batch = empty_batch(BatchShape(num_rows, num_rows, 1))
    batch.sequence_rows[:] = np.arange(num_rows)
    batch.kv_lens[:] = 5
    for name, value in fields.items():
        getattr(batch, name)[:] = value
    return batch


def _run(logits, batch, mode=None, num_logprobs=0) -> Sampled:
    return _sample(np.asarray(logits, np.float32), batch, mode or sampling_mode(batch), num_logprobs)


def _kept(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """Probabilities after the filters, by sorting, in float64; tokens tied with the last one kept are kept."""
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    probs = np.exp(scaled) / np.exp(scaled).sum()
    most_likely = probs.max()
    if 0 < top_k < probs.size:
        probs = np.where(probs >= np.sort(probs)[-top_k], probs, 0)
    if top_p < 1:
        descending = np.sort(probs)[::-1]
        enough = np.cumsum(descending) >= top_p * probs.sum()
        last = descending[np.argmax(enough)] if enough.any() else 0
        probs = np.where(probs >= last, probs, 0)
    probs = np.where(probs >= min_p * most_likely, probs, 0)
    return probs / probs.sum()


def _draw(logits, **params) -> np.ndarray:
    """Counts per token of many draws with different seeds."""
    batch = _batch(_DRAWS, seeds=np.arange(_DRAWS, dtype=np.uint32), **params)
    tokens = np.asarray(_run(np.tile(logits, (_DRAWS, 1)), batch).token_ids)
    return np.bincount(tokens, minlength=logits.size)


_LOGITS = np.array([2.0, -1.0, 0.5, 1.5, 0.0, -3.0, 1.0, 0.25], np.float32)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_case_25_draws_follow_the_softmax(params):
    """A fixed set of seeds makes this deterministic: it is not a test that fails now and then."""
    expected = _kept(_LOGITS, params["temperature"], params.get("top_k", 0), params.get("top_p", 1.0), params.get("min_p", 0.0))
    counts = _draw(_LOGITS, **params)
    assert (counts[expected == 0] == 0).all()
    possible = expected > 0
    assert stats.chisquare(counts[possible], expected[possible] * _DRAWS).pvalue > 1e-3


def test_the_chi_square_notices_a_wrong_temperature():
    counts = _draw(_LOGITS, temperature=1.1)
    assert stats.chisquare(counts, _kept(_LOGITS, 1.0, 0, 1.0, 0.0) * _DRAWS).pvalue < 1e-3


# On a grid, so that float32 and the reference agree on what is a tie; small integers make ties likely.
_logits = st.lists(
    st.one_of(st.integers(-4, 4).map(float), st.integers(-320, 320).map(lambda n: n / 16)), min_size=11, max_size=11
).map(lambda values: np.array(values, np.float32))


@settings(max_examples=150)
@given(
    _logits,
    st.sampled_from([0.25, 0.7, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 5, 10, 11, 12, 2**31 - 1]),
    st.sampled_from([0.0, 0.1, 0.37, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.05, 0.31, 1.0]),
)
def test_filters_keep_what_the_reference_keeps(logits, temperature, top_k, top_p, min_p):
    """Seeds are drawn until every kept token should have shown; none that was removed may."""
    expected = _kept(logits, temperature, top_k, top_p, min_p)
    rows = 256
    batch = _batch(rows, seeds=np.arange(rows, dtype=np.uint32), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens = np.asarray(_run(np.tile(logits, (rows, 1)), batch, SamplingMode.FILTERED).token_ids)
    seen = np.bincount(tokens, minlength=11) > 0
    clear = _clear_of_borders(logits, temperature, top_k, top_p, min_p)
    assert not seen[(expected == 0) & clear].any()
    assert seen[(expected > 0.05) & clear].all()


def _clear_of_borders(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """Tokens whose fate does not hang on float32 rounding of a sum or quotient near top_p or min_p."""
    same = [
        _kept(logits, temperature, top_k, min(1.0, max(0.0, p)), max(0.0, m)) > 0
        for p in ((top_p,) if top_p in (0.0, 1.0) else (top_p - 1e-5, top_p, top_p + 1e-5))
        for m in ((min_p,) if min_p in (0.0, 1.0) else (min_p * (1 - 1e-5), min_p, min_p * (1 + 1e-5)))
    ]
    return np.all([mask == same[0] for mask in same], axis=0)


def test_ties_at_the_border_are_all_kept():
    logits = np.array([1.0, 3.0, 1.0, 3.0, 1.0, -2.0], np.float32)
    assert set(np.flatnonzero(_draw(logits, temperature=1.0, top_k=1))) == {1, 3}
    assert set(np.flatnonzero(_draw(logits, temperature=1.0, top_k=3))) == {0, 1, 2, 3, 4}
    assert set(np.flatnonzero(_draw(logits, temperature=1.0, top_p=0.0))) == {1, 3}
    assert set(np.flatnonzero(_draw(logits, temperature=1.0, min_p=1.0))) == {1, 3}
    zeros = np.array([0.0, -0.0, 0.0, -5.0], np.float32)
    assert set(np.flatnonzero(_draw(zeros, temperature=1.0, top_k=1))) == {0, 1, 2}


@pytest.mark.parametrize("mode", list(SamplingMode))
def test_temperature_zero_is_greedy_in_every_mode(mode):
    logits = np.random.default_rng(0).normal(size=(16, 33)).astype(np.float32)
    logits[3, 5] = logits[3, 20] = 9.0
    batch = _batch(16, seeds=np.arange(16, dtype=np.uint32), top_k=7, top_p=0.4)
    tokens = np.asarray(_run(logits, batch, mode).token_ids)
    assert (tokens == logits.argmax(axis=1)).all()
    assert tokens[3] == 5


def test_hot_and_greedy_rows_share_a_batch():
    logits = np.tile(_LOGITS, (_DRAWS, 1))
    temperature = np.where(np.arange(_DRAWS) % 2, 1.0, 0.0).astype(np.float32)
    batch = _batch(_DRAWS, seeds=np.arange(_DRAWS, dtype=np.uint32), temperature=temperature)
    tokens = np.asarray(_run(logits, batch).token_ids)
    assert (tokens[::2] == 0).all()
    assert np.unique(tokens[1::2]).size == _LOGITS.size


def test_a_row_does_not_depend_on_its_place_or_its_neighbours():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(12, 50)).astype(np.float32)
    params = {
        "seeds": rng.integers(0, 2**32, 12, np.uint32), "kv_lens": rng.integers(1, 99, 12), "temperature": 1.0,
        "top_k": rng.integers(0, 9, 12), "top_p": rng.uniform(0.5, 1, 12), "min_p": rng.uniform(0, 0.1, 12),
    }  # fmt: skip
    together = np.asarray(_run(logits, _batch(12, **params), SamplingMode.FILTERED).token_ids)
    order = rng.permutation(12)
    shuffled = {name: value if np.isscalar(value) else value[order] for name, value in params.items()}
    again = np.asarray(_run(logits[order], _batch(12, **shuffled), SamplingMode.FILTERED).token_ids)
    assert (again == together[order]).all()
    for i in range(12):
        alone = {name: value if np.isscalar(value) else value[i : i + 1] for name, value in params.items()}
        assert np.asarray(_run(logits[i : i + 1], _batch(1, **alone), SamplingMode.FILTERED).token_ids)[0] == together[i]


def test_case_25_seed_and_position_change_the_draw():
    logits = np.zeros((256, 1000), np.float32)
    seeds = np.arange(256, dtype=np.uint32)
    draw = functools.partial(_run, logits)
    first = np.asarray(draw(_batch(256, temperature=1.0, seeds=seeds)).token_ids)
    assert (np.asarray(draw(_batch(256, temperature=1.0, seeds=seeds)).token_ids) == first).all()
    assert (np.asarray(draw(_batch(256, temperature=1.0, seeds=seeds + 1000)).token_ids) == first).mean() < 0.05
    assert (np.asarray(draw(_batch(256, temperature=1.0, seeds=seeds, kv_lens=6)).token_ids) == first).mean() < 0.05
    assert np.unique(first).size > 150, "rows do not share a draw"
    assert np.asarray(draw(_batch(256, temperature=1.0, seeds=2**32 - 1)).token_ids).max() < 1000


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-4, 100.0])
def test_extreme_temperatures_stay_finite(temperature):
    logits = np.tile(_LOGITS * 1e4, (8, 1))
    batch = _batch(8, seeds=np.arange(8, dtype=np.uint32), temperature=temperature, top_p=0.9, top_k=4)
    sampled = _run(logits, batch, SamplingMode.FILTERED)
    assert (np.asarray(sampled.token_ids) == 0).all()
    assert np.isfinite(sampled.logprobs).all()


@pytest.mark.parametrize("mode", list(SamplingMode))
def test_padded_vocabulary_is_never_drawn(mode):
    logits = np.full((_DRAWS, 12), -np.inf, np.float32)
    logits[:, :9] = 0
    batch = _batch(_DRAWS, seeds=np.arange(_DRAWS, dtype=np.uint32), temperature=100.0, top_k=11, top_p=0.9999)
    sampled = _run(logits, batch, mode, 3)
    assert np.asarray(sampled.token_ids).max() < 9
    assert np.asarray(sampled.top_ids).max() < 9
    assert np.isfinite(sampled.logprobs).all()


@pytest.mark.parametrize("mode", list(SamplingMode))
def test_logprobs_are_the_log_softmax_of_the_raw_logits(mode):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(6, 40)).astype(np.float32) * 4
    batch = _batch(6, seeds=np.arange(6, dtype=np.uint32), temperature=2.0, top_k=3)
    sampled = _run(logits, batch, mode, 5)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    tokens = np.asarray(sampled.token_ids)
    np.testing.assert_allclose(sampled.logprobs, exact[np.arange(6), tokens], atol=2e-6)
    expected_ids = np.argsort(-exact, axis=1)[:, :5]
    assert (np.asarray(sampled.top_ids) == expected_ids).all()
    np.testing.assert_allclose(sampled.top_logprobs, np.take_along_axis(exact, expected_ids, axis=1), atol=2e-6)


def test_the_cheapest_mode_is_chosen_from_the_rows_that_sample():
    assert sampling_mode(_batch(3)) is SamplingMode.GREEDY
    assert sampling_mode(_batch(3, top_k=4)) is SamplingMode.GREEDY, "greedy rows need no filter"
    assert sampling_mode(_batch(3, temperature=[0, 1, 0])) is SamplingMode.TEMPERATURE
    assert sampling_mode(_batch(3, temperature=[0, 1, 0], top_k=[5, 0, 5])) is SamplingMode.TEMPERATURE
    for filters in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert sampling_mode(_batch(3, temperature=1.0, **filters)) is SamplingMode.FILTERED
    unused = _batch(3, temperature=1.0)
    unused.sequence_rows[:] = -1
    assert sampling_mode(unused) is SamplingMode.GREEDY

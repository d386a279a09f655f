import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoflow_jax.runtime.prediction import OutputLengths, peak_pages


def _simulated_peak(lengths, delays, remaining, page_size) -> int:
    """Pages in use, step by step."""
    peak = 0
    for t in range(max(d + r for d, r in zip(delays, remaining, strict=True)) + 1):
        pages = 0
        for length, delay, rest in zip(lengths, delays, remaining, strict=True):
            if t <= delay + rest:
                pages += -(-(length + max(0, t - delay)) // page_size)
        peak = max(peak, pages)
    return peak


_sequences = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 6), st.integers(0, 40)), min_size=1, max_size=12)


@settings(max_examples=200)
@given(_sequences, st.integers(1, 9))
def test_the_peak_is_that_of_a_simulation(sequences, page_size):
    lengths, delays, remaining = (np.array(column) for column in zip(*sequences, strict=True))
    assert peak_pages(lengths, delays, remaining, page_size) == _simulated_peak(lengths, delays, remaining, page_size)


def test_nobody_needs_nothing():
    none = np.zeros(0, np.int64)
    assert peak_pages(none, none, none, 4) == 0


def test_a_sequence_that_ends_makes_room_before_the_other_peaks():
    # 10 tokens each; one ends after 2 more, the other after 10: peak 2 * 12 = 24 beats 20 alone.
    assert peak_pages(np.array([10, 10]), np.array([0, 0]), np.array([2, 10]), 1) == 24
    assert peak_pages(np.array([10, 10]), np.array([0, 0]), np.array([2, 20]), 1) == 30


@given(st.lists(st.integers(1, 300), min_size=16, max_size=400), st.integers(0, 320), st.integers(1, 320))
def test_expected_total_is_the_mean_of_longer_outputs(lengths, so_far, limit):
    estimate = OutputLengths(window=256, least=16)
    for length in lengths:
        estimate.record(length)
    longer = [length for length in lengths[-256:] if length > so_far]
    expected = min(limit, int(np.ceil(np.mean(longer)))) if longer else limit
    assert abs(int(estimate.expected_total(np.array([so_far]), np.array([limit]))[0]) - expected) <= 1e-9


def test_the_limit_is_expected_until_enough_has_been_seen():
    estimate = OutputLengths(least=3)
    limits = np.array([50])
    for _ in range(2):
        estimate.record(5)
        assert estimate.expected_total(np.array([0]), limits)[0] == 50
    estimate.record(5)
    assert estimate.expected_total(np.array([0]), limits)[0] == 5
    assert estimate.expected_total(np.array([5]), limits)[0] == 50

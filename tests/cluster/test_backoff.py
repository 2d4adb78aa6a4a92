"""Backoff: delays double up to a maximum, and jitter keeps replicas apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.backoff import Backoff, jittered

STEADY = Backoff(first_s=0.5, max_s=30.0, jitter=(1.0, 1.0))


@pytest.mark.parametrize(
    ("failures", "delay_s"), [(0, 0.5), (1, 0.5), (2, 1.0), (3, 2.0), (6, 16.0), (7, 30.0), (8, 30.0), (10**9, 30.0)]
)
def test_delays_double_from_the_first_up_to_the_maximum(failures: int, delay_s: float) -> None:
    assert STEADY.delay_s(failures) == delay_s


def test_a_backoff_with_equal_first_and_maximum_is_a_constant_interval() -> None:
    assert {Backoff(2.0, 2.0, (1.0, 1.0)).delay_s(failures) for failures in range(50)} == {2.0}


@given(st.integers(0, 100), st.floats(0, 1), st.floats(0, 1))
def test_jitter_multiplies_the_delay_by_a_factor_within_its_bounds(failures: int, low: float, spread: float) -> None:
    plain = STEADY.delay_s(failures)
    delay = Backoff(STEADY.first_s, STEADY.max_s, (low, low + spread)).delay_s(failures)
    assert plain * low <= delay <= plain * (low + spread) * (1 + 1e-9)


def test_two_replicas_that_failed_together_wait_differently() -> None:
    backoff = Backoff(first_s=1.0, max_s=16.0)
    assert len({backoff.delay_s(3) for _ in range(20)}) > 1


def test_an_interval_is_jittered_downwards_by_default() -> None:
    """A lease or a watch must not be renewed later than its period."""
    assert all(8.0 <= jittered(10.0) <= 10.0 for _ in range(100))


@pytest.mark.parametrize(("first_s", "max_s"), [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0)])
def test_delays_that_could_spin_or_never_grow_are_rejected(first_s: float, max_s: float) -> None:
    with pytest.raises(ValueError, match="first_s <= max_s"):
        Backoff(first_s, max_s)


@pytest.mark.parametrize("jitter", [(-0.1, 1.0), (1.0, 0.5)])
def test_a_jitter_range_that_is_negative_or_reversed_is_rejected(jitter: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="low <= high"):
        Backoff(1.0, 2.0, jitter)

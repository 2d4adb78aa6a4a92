"""Memory: units, bytes, and telling one from the other as the API server writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.memory_units import requested_mib, units_for
from vcuda.quantity import QuantityError, canonical, parse

MIB_OF = {
    "1": 256,
    "30": 7680,
    "1k": 256_000,
    "1000": 256_000,
    "1500": 384_000,
    "8Gi": 8192,
    "8192Mi": 8192,
    "1Mi": 1,
    "1Ki": 1,
    "8G": 7630,
    "500M": 477,
    "1T": 953_675,
    "0": 0,
}


@pytest.mark.parametrize(("written", "mib"), MIB_OF.items())
def test_suffixes_of_bytes_are_bytes_and_all_else_counts_units(written: str, mib: int) -> None:
    """1k is a thousand units; Ki, Mi, Gi and M, G, T are bytes, rounded up to MiB."""
    assert requested_mib(parse(written), 256) == mib


LARGE = {
    ("1.5M", 256): 2,
    ("8589934592", 256): 8192,
    ("8.1925G", 256): 7813,
    ("8192500k", 256): 7813,
    ("999k", 256): 255_744_000,
    ("2000000", 1): 2_000_000,
    ("2000001", 1): 2_000_001,
    ("500M", 1): 477,
    ("8G", 1): 7630,
}


@pytest.mark.parametrize(("written", "mib"), LARGE.items())
def test_what_no_count_reaches_is_bytes_however_it_is_spelt(written: tuple[str, int], mib: int) -> None:
    """Neighbouring amounts are never read a thousandfold apart; units of 1 MiB count further."""
    text, unit = written
    assert requested_mib(parse(text), unit) == mib


@pytest.mark.parametrize("written", ["-1", "-8Gi", "300m", "0.5"])
def test_memory_that_cannot_be_is_refused(written: str) -> None:
    """Neither less than nothing nor part of a unit."""
    with pytest.raises(QuantityError):
        requested_mib(parse(written), 256)


@given(st.integers(0, 10**15), st.sampled_from([1, 128, 256, 1000]))
def test_the_answer_does_not_depend_on_the_spelling(count: int, unit: int) -> None:
    """What the API server makes of a plain number means the same as the number."""
    quantity = parse(str(count))
    assert requested_mib(parse(canonical(quantity)), unit) == requested_mib(quantity, unit)


@given(st.integers(0, 10**9), st.integers(1, 4096))
def test_units_hold_what_they_are_for_and_no_unit_is_wasted(mib: int, unit: int) -> None:
    """Rounded up, by less than one unit."""
    assert 0 <= units_for(mib, unit) * unit - mib < unit

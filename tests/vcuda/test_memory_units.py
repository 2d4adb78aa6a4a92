"""Memory: units and bytes, distinguished by the size of the amount as the API server writes it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.memory_units import requested_mib, units_for
from vcuda.quantity import QuantityError, format_quantity, parse_quantity

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
def test_amounts_with_a_suffix_of_bytes_are_bytes_and_others_count_units(written: str, mib: int) -> None:
    """1k is a thousand units; Ki, Mi, Gi and M, G, T are bytes, rounded up to MiB."""
    assert requested_mib(parse_quantity(written), 256) == mib


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
def test_an_amount_too_large_for_a_count_is_bytes_in_any_notation(written: tuple[str, int], mib: int) -> None:
    """Similar amounts are never read a thousandfold apart; with units of 1 MiB larger counts are possible."""
    text, unit = written
    assert requested_mib(parse_quantity(text), unit) == mib


@pytest.mark.parametrize("written", ["-1", "-8Gi", "300m", "0.5"])
def test_negative_amounts_and_parts_of_a_unit_are_rejected(written: str) -> None:
    with pytest.raises(QuantityError):
        requested_mib(parse_quantity(written), 256)


@given(st.integers(0, 10**15), st.sampled_from([1, 128, 256, 1000]))
def test_the_notation_of_the_api_server_means_the_same_as_the_number(count: int, unit: int) -> None:
    quantity = parse_quantity(str(count))
    assert requested_mib(parse_quantity(format_quantity(quantity)), unit) == requested_mib(quantity, unit)


@given(st.integers(0, 10**9), st.integers(1, 4096))
def test_units_are_rounded_up_by_less_than_one_unit(mib: int, unit: int) -> None:
    assert 0 <= units_for(mib, unit) * unit - mib < unit

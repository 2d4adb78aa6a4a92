"""Quantities: Kubernetes' grammar and canonical forms, exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vcuda.quantities import written_quantities
from vcuda.quantity import MAX_VALUE, NANO, Family, Quantity, QuantityError, canonical, parse

CANONICAL = {
    "1000": "1k",
    "1000000": "1M",
    "1500": "1500",
    "1e3": "1e3",
    "12e2": "1200",
    "8192Mi": "8Gi",
    "7.5Gi": "7680Mi",
    "0.3": "300m",
    ".5": "500m",
    "5.": "5",
    "+5": "5",
    "-5": "-5",
    "007": "7",
    "1E": "1E",
    "1Ei": "1Ei",
    "1Ki": "1Ki",
    "1023Ki": "1023Ki",
    "1025": "1025",
    "0.5Ki": "512",
    "0.0000000001Ki": "103n",
    "0.1Ki": "102400m",
    "1024": "1024",
    "0.1n": "1n",
    "1.0000000001": "1000000001n",
    "8Ei": str(MAX_VALUE),
    "0": "0",
    "0Ki": "0",
    "-0": "0",
}

REFUSED = {
    "nothing": "",
    "a sign alone": "-",
    "a dot alone": ".",
    "a suffix alone": "Gi",
    "not a number": "NaN",
    "infinity": "inf",
    "an underscore": "1_000",
    "a blank inside": "1 Gi",
    "a blank around": " 1",
    "a line break": "1\n",
    "a capital K": "1K",
    "a byte suffix": "8GB",
    "small letters": "8gi",
    "two dots": "1.2.3",
    "two suffixes": "1kk",
    "a fractional exponent": "1e1.5",
    "an exponent and a suffix": "1e3k",
    "hexadecimal": "0x10",
    "digits of another alphabet": "\u0661\u0662",
    "digits of full width": "\uff15\uff10",
    "a comma": "1,5",
    "an exponent beyond reason": "1e400",
    "more than can be counted": "9223372036854775808",
    "a text without end": "1" * 65,
    "a truth value": True,
    "a float that is not a number": float("nan"),
}


@pytest.mark.parametrize(("written", "expected"), CANONICAL.items())
def test_canonical_form_is_the_one_the_api_server_writes(written: str, expected: str) -> None:
    """The API server writes quantities in one form only."""
    assert canonical(parse(written)) == expected


@pytest.mark.parametrize("written", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_quantity_is_refused(written: str) -> None:
    """Nothing outside the grammar is taken for an amount."""
    with pytest.raises(QuantityError):
        parse(written)


@pytest.mark.parametrize(("number", "nanos"), [(50, 50 * NANO), (0.3, 3 * NANO // 10), (1e3, 1000 * NANO)])
def test_numbers_of_json_and_yaml_are_read_as_written(number: float, nanos: int) -> None:
    """An unquoted number means what it shows, not its binary approximation."""
    assert parse(number).nanos == nanos


@given(written_quantities())
def test_canonical_form_keeps_the_amount(written: str) -> None:
    """Writing and reading again changes nothing."""
    quantity = parse(written)
    again = parse(canonical(quantity))
    assert again.nanos == quantity.nanos
    assert canonical(again) == canonical(quantity)


@given(st.integers(0, MAX_VALUE))
def test_whole_numbers_are_exact(number: int) -> None:
    """No amount passes through floating point."""
    assert parse(str(number)).whole == number
    assert parse(str(number)).is_whole


@given(st.integers(1, 2**40), st.sampled_from(["Ki", "Mi", "Gi"]))
def test_binary_suffixes_multiply_by_powers_of_1024(number: int, suffix: str) -> None:
    """Ki is 1024, Mi its square, Gi its cube."""
    power = ["", "Ki", "Mi", "Gi"].index(suffix)
    assert parse(f"{number}{suffix}").whole == min(number * 1024**power, MAX_VALUE)


@given(st.text(max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No input raises anything but a QuantityError, and what is read is within bounds."""
    try:
        quantity = parse(text)
    except QuantityError:
        return
    assert abs(quantity.nanos) <= MAX_VALUE * NANO
    assert text.isascii()


@given(st.integers(-(10**20), 10**20))
def test_value_rounds_up(nanos: int) -> None:
    """As Kubernetes' Value(): part of a thing counts as a thing, on either side of zero."""
    whole = abs(Quantity(nanos, Family.DECIMAL).whole)
    assert (whole - 1) * NANO < abs(nanos) <= whole * NANO
    assert Quantity(-nanos).whole == -Quantity(nanos).whole

"""Quantities: exactly Kubernetes' grammar and canonical forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vcuda.quantities import written_quantities
from vcuda.quantity import MAX_VALUE, NANO, Family, Quantity, QuantityError, format_quantity, parse_quantity

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

REJECTED = {
    "an empty text": "",
    "a sign alone": "-",
    "a dot alone": ".",
    "a suffix alone": "Gi",
    "not a number": "NaN",
    "infinity": "inf",
    "an underscore": "1_000",
    "a space inside": "1 Gi",
    "a space before": " 1",
    "a line break": "1\n",
    "a capital K": "1K",
    "a byte suffix": "8GB",
    "lower case": "8gi",
    "two dots": "1.2.3",
    "two suffixes": "1kk",
    "a fractional exponent": "1e1.5",
    "an exponent and a suffix": "1e3k",
    "hexadecimal": "0x10",
    "Arabic-Indic digits": "\u0661\u0662",
    "full-width digits": "\uff15\uff10",
    "a comma": "1,5",
    "a too large exponent": "1e400",
    "more than the maximum": "9223372036854775808",
    "a too long text": "1" * 65,
    "an integer that Python does not convert to text": 10**5000,
    "a boolean": True,
    "a float that is not a number": float("nan"),
}


@pytest.mark.parametrize(("written", "expected"), CANONICAL.items())
def test_the_format_is_that_of_the_api_server(written: str, expected: str) -> None:
    assert format_quantity(parse_quantity(written)) == expected


@pytest.mark.parametrize("written", REJECTED.values(), ids=REJECTED.keys())
def test_anything_outside_the_grammar_is_rejected(written: str | float) -> None:
    with pytest.raises(QuantityError):
        parse_quantity(written)


@pytest.mark.parametrize(("number", "nanos"), [(50, 50 * NANO), (0.3, 3 * NANO // 10), (1e3, 1000 * NANO)])
def test_numbers_of_json_and_yaml_are_read_as_written(number: float, nanos: int) -> None:
    """An unquoted 0.3 is exactly 0.3, not its binary approximation."""
    assert parse_quantity(number).nanos == nanos


@given(written_quantities())
def test_formatting_keeps_the_amount(written: str) -> None:
    quantity = parse_quantity(written)
    again = parse_quantity(format_quantity(quantity))
    assert again.nanos == quantity.nanos
    assert format_quantity(again) == format_quantity(quantity)


@given(st.integers(0, MAX_VALUE))
def test_whole_numbers_are_exact(number: int) -> None:
    """No amount is converted to floating point."""
    assert parse_quantity(str(number)).whole == number
    assert parse_quantity(str(number)).is_whole


@given(st.integers(1, 2**40), st.sampled_from(["Ki", "Mi", "Gi"]))
def test_binary_suffixes_multiply_by_powers_of_1024(number: int, suffix: str) -> None:
    """Ki is 1024, Mi its square, Gi its cube."""
    power = ["", "Ki", "Mi", "Gi"].index(suffix)
    assert parse_quantity(f"{number}{suffix}").whole == min(number * 1024**power, MAX_VALUE)


@given(st.text(max_size=80))
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    """No input raises anything but QuantityError, and the result is within bounds."""
    try:
        quantity = parse_quantity(text)
    except QuantityError:
        return
    assert abs(quantity.nanos) <= MAX_VALUE * NANO
    assert text.isascii()


@given(st.integers(-(10**20), 10**20))
def test_value_rounds_up(nanos: int) -> None:
    """Like Kubernetes' Value(): away from zero, for negative amounts too."""
    whole = abs(Quantity(nanos, Family.DECIMAL).whole)
    assert (whole - 1) * NANO < abs(nanos) <= whole * NANO
    assert Quantity(-nanos).whole == -Quantity(nanos).whole

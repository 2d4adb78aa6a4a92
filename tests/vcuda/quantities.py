"""Quantities as users and programs write them, for property tests."""

from hypothesis import strategies as st

from vcuda.quantity import BINARY, DECIMAL, QuantityError, parse_quantity


def is_quantity(text: str) -> bool:
    try:
        parse_quantity(text)
    except QuantityError:
        return False
    return True


@st.composite
def written_quantities(draw: st.DrawFn, *, signs: tuple[str, ...] = ("", "-", "+")) -> str:
    """Draw a valid quantity of any family, with leading zeros, dots in unusual places, and exponents."""
    whole = (
        draw(st.integers(0, 10**12).map(str))
        if draw(st.booleans())
        else draw(st.sampled_from(["", "0", "00", "7", "1000"]))
    )
    part = draw(st.sampled_from([None, "", "5", "25", "000", "0001", "123456789123"]))
    suffix = draw(
        st.one_of(
            st.sampled_from([*DECIMAL, *BINARY]),
            st.builds("{}{}{}".format, st.sampled_from("eE"), st.sampled_from(["", "+", "-"]), st.integers(0, 12)),
        )
    )
    if not whole and not part:
        whole = "1"
    text = draw(st.sampled_from(signs)) + whole + ("" if part is None else f".{part}") + suffix
    # Some drawn amounts are larger than the maximum.
    return text if is_quantity(text) else "1"

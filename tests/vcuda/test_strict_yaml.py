"""YAML is read strictly, and by whichever loader to the same result."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.strict_yaml import (
    MISMADE,
    SURELY_SHALLOW,
    DocumentError,
    FastLoader,
    StrictLoader,
    documents_in,
    parse_documents,
)

WORDS = ["a", "b", "types", "A100", "cores", "1", "1.5", "yes", "null", "~", "2026-11-16", "0x1F", '"q"', "'q'", "<<"]
MARKS = [
    ": ",
    "- ",
    "\n",
    "\n  ",
    "\n    ",
    "{",
    "}",
    "[",
    "]",
    ", ",
    " # c\n",
    "---\n",
    "&x ",
    "*x",
    "!!int ",
    "|\n  ",
]


@given(st.lists(st.sampled_from(WORDS + MARKS), max_size=25).map("".join))
def test_both_loaders_read_the_same(text: str) -> None:
    """What both take means the same to both."""
    try:
        fast = documents_in(text, FastLoader)
        slow = documents_in(text, StrictLoader)
    except MISMADE:
        return
    assert repr(fast) == repr(slow)


@pytest.mark.parametrize("opening", ["[", "- ", "{a: ", "? "])
def test_deep_nesting_is_an_error(opening: str) -> None:
    """A tenant writes quotas; none of them may end the process that reads it."""
    with pytest.raises(DocumentError):
        parse_documents(opening * 100_000)
    with suppress(DocumentError):
        assert repr(parse_documents((opening * SURELY_SHALLOW)[:SURELY_SHALLOW]))


def test_aliases_of_aliases_are_refused() -> None:
    """A few hundred characters can say more than any memory holds."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 9)]
    with pytest.raises(DocumentError, match="says more than 200000 things"):
        parse_documents("\n".join(lines))
    with pytest.raises(DocumentError, match="nested more than 100 deep"):
        parse_documents("a: &a [*a]")
    assert parse_documents("a: &a [1]\nb: *a") == [{"a": [1], "b": [1]}]


@pytest.mark.parametrize("written", ["0400", "1:30", "0x1F", "1_000", "0b11"])
def test_numbers_can_be_held_to_plain_digits(written: str) -> None:
    """Where a quota is written, nobody means octal."""
    for padding in ("", "#" * SURELY_SHALLOW):
        with pytest.raises(DocumentError, match=r"^line 1: '.*' is not a decimal number: write it in plain digits$"):
            parse_documents(f"cores: {written} {padding}", plain_numbers=True)
        assert parse_documents(f"cores: {written} {padding}") != [{"cores": written}]
    assert parse_documents("cores: 400", plain_numbers=True) == [{"cores": 400}]


@pytest.mark.parametrize("padding", [0, SURELY_SHALLOW])
def test_what_counts_does_not_depend_on_length(padding: int) -> None:
    """A tab before a comment is allowed in both."""
    assert parse_documents("cores: 100\t# one card\n" + "#" * padding) == [{"cores": 100}]


@given(st.lists(st.sampled_from(WORDS + MARKS), max_size=25).map("".join))
def test_a_text_is_read_or_refused(text: str) -> None:
    """Nothing else may come of it."""
    with suppress(DocumentError):
        parse_documents(text)


@pytest.mark.parametrize("padding", [0, SURELY_SHALLOW])
def test_what_is_wrong_is_told_alike_in_short_and_long_texts(padding: int) -> None:
    """The errors come from one loader."""
    with pytest.raises(DocumentError, match=r"^line 2: 'a' stands here a second time: remove one of them$"):
        parse_documents("a: 1\na: 2\n" + "#" * padding)
    with pytest.raises(DocumentError, match=r"^line 1, column 5: not YAML: mapping values are not allowed here$"):
        parse_documents("a: b: c\n" + "#" * padding)

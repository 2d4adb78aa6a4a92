"""YAML is read strictly, and by whichever loader to the same result."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.document import (
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

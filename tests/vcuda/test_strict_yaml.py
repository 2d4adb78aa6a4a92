"""YAML is parsed strictly, and both loaders give the same result."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vcuda.strict_yaml import (
    LOADER_ERRORS,
    MAX_UNCHECKED_LENGTH,
    DocumentError,
    FastLoader,
    Loader,
    StrictLoader,
    load_documents,
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
def test_both_loaders_give_the_same_values(text: str) -> None:
    try:
        fast = load_documents(text, FastLoader)
        slow = load_documents(text, StrictLoader)
    except LOADER_ERRORS:
        return
    assert repr(fast) == repr(slow)


@pytest.mark.parametrize("opening", ["[", "- ", "{a: ", "? "])
def test_deep_nesting_is_an_error(opening: str) -> None:
    """Users write quotas, and none of them may crash the process that parses it."""
    with pytest.raises(DocumentError):
        parse_documents(opening * 100_000)
    with suppress(DocumentError):
        assert repr(parse_documents((opening * MAX_UNCHECKED_LENGTH)[:MAX_UNCHECKED_LENGTH]))


def test_aliases_of_aliases_are_rejected() -> None:
    """A few hundred characters can be more values than any memory holds."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 9)]
    with pytest.raises(DocumentError, match="more than 200000 values, aliases expanded; use fewer"):
        parse_documents("\n".join(lines))
    with pytest.raises(DocumentError, match="nested more than 100 levels deep"):
        parse_documents("a: &a [*a]")
    assert parse_documents("a: &a [1]\nb: *a") == [{"a": [1], "b": [1]}]


LEADING_ZERO = r"\(a leading zero means octal in YAML\)"
NOT_DECIMAL = {
    "0400": f"400 {LEADING_ZERO}",
    "-0400": f"-400 {LEADING_ZERO}",
    "00": f"0 {LEADING_ZERO}",
    "1:30": "it in plain digits",
    "0x1F": "it in plain digits",
    "1_000": "it in plain digits",
    "0b11": "it in plain digits",
}


@pytest.mark.parametrize(("written", "remedy"), NOT_DECIMAL.items())
def test_numbers_can_be_restricted_to_decimal(written: str, remedy: str) -> None:
    """No author of a quota intends octal."""
    for padding in ("", "#" * MAX_UNCHECKED_LENGTH):
        with pytest.raises(DocumentError, match=rf"^line 1: '{written}' is not a decimal number; write {remedy}$"):
            parse_documents(f"cores: {written} {padding}", plain_numbers=True)
        assert parse_documents(f"cores: {written} {padding}")
    assert parse_documents("cores: 400", plain_numbers=True) == [{"cores": 400}]
    assert parse_documents("cores: [1e3, 08, 1.5]", plain_numbers=True) == [{"cores": ["1e3", "08", 1.5]}]


NUMBERS = {
    "decimal": "1" * 5000,
    "negative": "-" + "1" * 4999,
    "hexadecimal": "0x" + "f" * 4998,
}


AS_KUBERNETES = {
    "1:30": "1:30",
    "1:30.5": "1:30.5",
    "2026-01-01": "2026-01-01",
    "2026-99-99": "2026-99-99",
    "2026-01-01T00:00:00Z": "2026-01-01T00:00:00Z",
    "y": True,
    "N": False,
    "yes": True,
    "name": "name",
    "1.5": 1.5,
    "017": 15,
    "1_000": 1000,
    "0b11": 3,
    "0o14": 12,
    "1e3": 1000.0,
    "1E+3": 1000.0,
    "08": 8.0,
    "5.": 5.0,
    "1e": "1e",
    "0o8": "0o8",
    "=": "=",
    "<<": "<<",
}


@pytest.mark.parametrize(("written", "value"), AS_KUBERNETES.items())
@pytest.mark.parametrize("loader", [FastLoader, StrictLoader])
def test_scalars_are_read_as_kubectl_reads_them(written: str, value: object, loader: Loader) -> None:
    """The values are those that `kubectl label --local -o json` shows; PyYAML knows dates and base 60 as well."""
    assert load_documents(f"a: {written}", loader) == [{"a": value}]
    assert load_documents(f"a: '{written}'", loader) == [{"a": written}]


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS.keys())
def test_a_number_too_long_for_python_is_an_error_with_its_line(number: str) -> None:
    """Python's own error names sys.set_int_max_str_digits(), which means nothing to the author of a file."""
    with pytest.raises(DocumentError, match=r"^line 2: the number has 5000 characters; the maximum is 1000$"):
        parse_documents(f"a: b\ncores: {number}")
    with pytest.raises(DocumentError, match=r"^line 2: (the number has 5000 characters|'.{,120}' is not a decimal)"):
        parse_documents(f"a: b\ncores: {number}", plain_numbers=True)
    (document,) = parse_documents(f"cores: {number[:999]}")
    assert str(document["cores"])


@pytest.mark.parametrize("padding", [0, MAX_UNCHECKED_LENGTH])
def test_what_is_valid_does_not_depend_on_length(padding: int) -> None:
    """A tab before a comment is allowed in both."""
    assert parse_documents("cores: 100\t# one card\n" + "#" * padding) == [{"cores": 100}]


@given(st.lists(st.sampled_from(WORDS + MARKS), max_size=25).map("".join))
def test_a_text_is_parsed_or_rejected(text: str) -> None:
    with suppress(DocumentError):
        parse_documents(text)


ERRORS = {
    "a duplicate key": ("a: 1\na: 2\n", "line 2: duplicate key 'a'; remove one"),
    "a key that is a number": ("5: x\n", "line 1: the key 5 is not a string; write it in quotes"),
    "a key that is a boolean": ("n: x\n", "line 1: the key n is not a string; write it in quotes"),
    "a key that is empty": ("? \n: x\n", "line 1: the key (empty) is not a string; write it in quotes"),
    "a key that is a list": ("? [a]\n: x\n", "line 1: a key must be a string, not a list"),
    "a key that is a mapping": ("? {a: b}\n: x\n", "line 1: a key must be a string, not a mapping"),
    "a syntax error": ("a: b: c\n", "line 1, column 5: invalid YAML: mapping values are not allowed here"),
    "a control character": ("a: b\nc: \x00\n", "line 2: invalid YAML: the character U+0000 is not allowed"),
    "a value that does not match its tag": ("a: !!int x\n", "line 1: 'x' is not a valid int"),
    "a number that is none": ("a: !!float x\n", "line 1: 'x' is not a valid float"),
    "an unknown tag": ("a: !x y\n", "line 1: the tag '!x' is not supported; remove it"),
    "a set": ("a: !!set {b, c}\n", "line 1: the tag '!!set' is not supported; remove it"),
    "bytes": ("a: !!binary aGVs\n", "line 1: the tag '!!binary' is not supported; remove it"),
    "pairs": ("a: !!pairs [b: c]\n", "line 1: the tag '!!pairs' is not supported; remove it"),
    "an ordered mapping": ("a: !!omap [b: c]\n", "line 1: the tag '!!omap' is not supported; remove it"),
    "a tag of Python": (
        "a: 1\nb: !!python/object/apply:os.system [x]\n",
        "line 2: the tag '!!python/object/apply:os.system' is not supported; remove it",
    ),
}


@pytest.mark.parametrize("padding", [0, MAX_UNCHECKED_LENGTH])
@pytest.mark.parametrize(("text", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_errors_name_the_line_in_short_and_long_texts(text: str, message: str, padding: int) -> None:
    """And never show Python's own words."""
    with pytest.raises(DocumentError) as raised:
        parse_documents(text + "#" * padding)
    assert str(raised.value) == message


UNCLOSED = {
    "a: [1\n": "line 2, column 1: invalid YAML: expected ',' or ']', but got the end of the file",
    "a: 'x\n": "line 2, column 1: invalid YAML: found unexpected end of the file",
}


@pytest.mark.parametrize(("text", "message"), UNCLOSED.items(), ids=["bracket", "quote"])
def test_the_end_of_a_file_is_called_so(text: str, message: str) -> None:
    with pytest.raises(DocumentError) as raised:
        parse_documents(text)
    assert str(raised.value) == message


def test_brackets_that_are_never_closed_are_too_deep() -> None:
    """The loaders run into Python's recursion limit."""
    with pytest.raises(DocumentError, match=r"^nested more than 100 levels deep$"):
        parse_documents("[" * (MAX_UNCHECKED_LENGTH - 1))

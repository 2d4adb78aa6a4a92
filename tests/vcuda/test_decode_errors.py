"""Decoder errors in plain words: every kind of mistake has a path and a sentence without Python's type names."""

import enum
from collections.abc import Callable
from datetime import date
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from vcuda.decode_errors import DECODE_ERRORS, DecodeProblem, describe_decode_error
from vcuda.decoding import convert, decoder_for


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    note: str | None = None


class Document(Struct, frozen=True, kw_only=True):
    """One field for each type that a document can have."""

    whole: int = 0
    number: float = 0.0
    text: str = ""
    flag: bool = False
    items: list[int] = []
    part: Part = Part(1)
    labels: dict[str, str] = {}
    parts: dict[str, Part] = {}
    several: tuple[Part, ...] = ()
    maybe_whole: int | None = None
    maybe_number: float | None = None
    maybe_text: str | None = None
    maybe_flag: bool | None = None
    maybe_items: list[int] | None = None
    maybe_part: Part | None = None
    whole_or_text: int | str = 0
    anything_but_a_list: int | float | str | bool | dict[str, int] | None = None
    colour: Colour = Colour.RED
    level: Literal["info", "debug"] = "info"
    share: Annotated[int, Meta(ge=1, le=100)] = 1
    seconds: Annotated[float, Meta(gt=0, lt=3600)] = 1.0
    multiple: Annotated[int, Meta(multiple_of=256)] = 256
    short: Annotated[str, Meta(min_length=1, max_length=3)] = "a"
    patterned: Annotated[str, Meta(pattern="^gpu-")] = "gpu-"
    few: Annotated[list[int], Meta(max_length=2)] = []
    pair: tuple[int, str] = (0, "")
    by_colour: dict[Colour, int] = {}
    by_number: dict[int, int] = {}
    content: bytes = b""
    nothing: None = None


TYPES = {
    "whole": ("1.5", "must be a whole number, not a fraction"),
    "number": ('"x"', "must be a number, not text"),
    "text": ("5", "must be text, not a number"),
    "flag": ("0", "must be true or false, not a number"),
    "items": ("{}", "must be a list, not an object"),
    "part": ("[]", "must be an object, not a list"),
    "labels": ("null", "must be an object, not null"),
    "maybe_whole": ("true", "must be a whole number, not true or false"),
    "maybe_number": ("[]", "must be a number, not a list"),
    "maybe_text": ("{}", "must be text, not an object"),
    "maybe_flag": ('"yes"', "must be true or false, not text"),
    "maybe_items": ("5", "must be a list, not a number"),
    "maybe_part": ("[]", "must be an object, not a list"),
    "whole_or_text": ("null", "must be a whole number or text, not null"),
    "anything_but_a_list": (
        "[]",
        "must be true or false or a whole number or a number or text or an object, not a list",
    ),
    "content": ("5", "must be base64 text, not a number"),
    "nothing": ("5", "must be null, not a number"),
}

VALUES = {
    '{"parts": {"a": {"size": "x"}}}': ("parts[...].size", "must be a whole number, not text"),
    '{"labels": {"a": 5}}': ("labels[...]", "must be text, not a number"),
    '{"items": [1, "x"]}': ("items[1]", "must be a whole number, not text"),
    '{"several": [{"size": 1}, 3]}': ("several[1]", "must be an object, not a number"),
    '{"several": [{"size": 1}, {}]}': ("several[1].size", "is required, but missing"),
    '{"part": {}}': ("part.size", "is required, but missing"),
    '{"part": {"size": 1, "sizes": 2}}': ("part.sizes", "is not a known field"),
    '{"colour": "green"}': ("colour", "has the unsupported value 'green'"),
    '{"colour": 1}': ("colour", "must be text, not a number"),
    '{"level": "loud"}': ("level", "has the unsupported value 'loud'"),
    '{"share": 0}': ("share", "must be at least 1"),
    '{"share": 101}': ("share", "must be at most 100"),
    '{"seconds": 0}': ("seconds", "must be greater than 0"),
    '{"seconds": 3600.5}': ("seconds", "must be less than 3600"),
    '{"multiple": 100}': ("multiple", "must be a multiple of 256"),
    '{"short": ""}': ("short", "must have at least 1 character"),
    '{"short": "four"}': ("short", "must have at most 3 characters"),
    '{"patterned": "cpu"}': ("patterned", "must match '^gpu-'"),
    '{"few": [1, 2, 3]}': ("few", "must have at most 2 items"),
    '{"pair": [1]}': ("pair", "must have 2 items"),
    '{"by_colour": {"green": 1}}': ("by_colour", "has a key that has the unsupported value 'green'"),
    '{"by_number": {"x": 1}}': ("by_number", "has a key that must be a whole number, not text"),
    '{"content": "%%"}': ("content", "must be base64 text"),
    '{"number": 1e999}': ("number", "is out of range"),
    f'{{"whole": {"9" * 5000}}}': ("whole", "is out of range"),
    f'{{"by_number": {{"{"9" * 5000}": 1}}}}': ("by_number", "has a key that is out of range"),
    "[]": ("", "must be an object, not a list"),
    "null": ("", "must be an object, not null"),
    "": ("", "is incomplete: the JSON ends too early"),
    '{"whole": 1': ("", "is incomplete: the JSON ends too early"),
    '{"whole": 1,}': ("", "is not valid JSON near byte 12"),
    '{"whole" 1}': ("", "is not valid JSON near byte 9"),
    '{"whole": 1} {': ("", "is not valid JSON near byte 14"),
    '{"text": "\\q"}': ("", "is not valid JSON near byte 12"),
    "{'whole': 1}": ("", "is not valid JSON near byte 1"),
    '{"unread": ' + "[" * 100_000: ("", "is nested too deeply"),
}


def problem_of(decode: Callable[[], object]) -> DecodeProblem | None:
    """Return what is wrong with a document; None if it can be decoded."""
    try:
        decode()
    except DECODE_ERRORS as error:
        return describe_decode_error(error)
    return None


def problem_in(raw: bytes | str) -> DecodeProblem:
    problem = problem_of(lambda: decoder_for(Document).decode(raw))
    assert problem is not None
    return problem


@pytest.mark.parametrize(("field", "value", "message"), [(field, *case) for field, case in TYPES.items()], ids=TYPES)
def test_a_value_of_the_wrong_type_is_described_in_the_words_of_json(field: str, value: str, message: str) -> None:
    """That null would be allowed as well is left out: it does not explain what is wrong."""
    assert problem_in(f'{{"{field}": {value}}}') == (field, message)


@pytest.mark.parametrize(("raw", "problem"), VALUES.items(), ids=[raw[:40] for raw in VALUES])
def test_a_problem_has_a_path_and_a_message(raw: str, problem: tuple[str, str]) -> None:
    assert problem_in(raw) == problem


def test_text_that_is_not_utf_8_is_reported() -> None:
    assert problem_in(b'{"text": "\xff"}') == ("", "is not valid UTF-8")


def test_values_that_are_not_json_are_described_as_far_as_possible() -> None:
    """YAML reads dates; a program may pass anything."""
    cases = {date(2026, 1, 31): "must be text, not a date", 1j: "must be text"}
    for value, message in cases.items():
        document = {"text": value}
        assert problem_of(lambda document=document: convert(document, Document)) == ("text", message)  # type: ignore[misc]


def test_advice_for_python_programmers_is_not_shown() -> None:
    """Python refuses to print integers of more than 4300 digits, also within msgspec's message."""
    for field in ("share", "colour", "level", "whole_or_text"):
        document = {field: 10**5000}
        problem = problem_of(lambda document=document: convert(document, Document))  # type: ignore[misc]
        assert "sys." not in str(problem)
    with pytest.raises(ValueError, match="digits") as raised:
        str(10**5000)
    assert describe_decode_error(raised.value) == ("", "has a number that is out of range")


def test_unrecognized_errors_are_not_passed_on() -> None:
    assert describe_decode_error(ValueError("`internal` words")) == ("", "is not valid")
    assert describe_decode_error(msgspec.ValidationError("Brand new `text` - at `$.a.b`")) == ("a.b", "is not valid")


def test_long_values_are_shortened() -> None:
    assert len(problem_in(f'{{"colour": "{"x" * 5000}"}}').message) < 200
    assert len(problem_in(f'{{"part": {{"size": 1, "{"x" * 5000}": 1}}}}').path) < 200


def test_a_problem_reads_as_a_line() -> None:
    assert str(DecodeProblem("spec.share", "must be at least 1")) == "spec.share: must be at least 1"
    assert str(DecodeProblem("", "is not valid UTF-8")) == "is not valid UTF-8"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("abc", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(Document.__struct_fields__), json_values, max_size=4))
def test_no_word_of_the_decoder_is_left(document: dict[str, Any]) -> None:
    problem = problem_of(lambda: convert(document, Document))
    if problem is not None:
        assert problem.message != "is not valid"
        assert problem.path.split("[")[0].split(".")[0] in Document.__struct_fields__
        for word in ("`", "Expected", "got", "str", "int", "array", "|", "$"):
            assert word not in problem.message


@given(st.binary(max_size=40) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_decoded_or_described(raw: bytes) -> None:
    assert "`" not in str(problem_of(lambda: decoder_for(Document).decode(raw)))

"""What a decoder's error means to the person who wrote the document.

msgspec speaks of Python's types and of its own internals ("Expected `object | null`, got `array` - at `$.spec`"). Here
that becomes a path and a sentence in the words of JSON: `spec`, "must be an object, not a list". Text that is not
recognized is replaced by a general sentence, never passed on.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from vcuda.decision import printable

# What decoders raise for bad input. ValueError includes msgspec's own errors, invalid UTF-8, and Python's refusal to
# print an integer of more than 4300 digits.
DECODE_ERRORS = (ValueError, RecursionError)

TYPES = {
    "object": "an object",
    "array": "a list",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "null",
    "bytes": "base64 text",
    # YAML reads unquoted dates as such.
    "date": "a date",
    "datetime": "a time",
}
UNITS = {"str": "character", "bytes": "byte", "array": "item", "object": "field"}
BOUNDS = {">=": "at least", "<=": "at most", ">": "greater than", "<": "less than"}

INVALID, OUT_OF_RANGE, UNKNOWN_FIELD = "is not valid", "is out of range", "is not a known field"
FIXED = {
    "Integer value out of range": OUT_OF_RANGE,
    "Number out of range": OUT_OF_RANGE,
    "Invalid base64 encoded string": "must be base64 text",
    "Invalid RFC3339 encoded datetime": "must be a time such as 2026-01-31T12:00:00Z",
    "Invalid UUID": "must be a UUID",
    "Input data was truncated": "is incomplete: the JSON ends too early",
}
FIELD = re.compile(r"Object (?P<problem>missing required|contains unknown) field `(?P<field>.*)`", re.DOTALL)
FIELD_PROBLEMS = {"missing required": "is required, but missing", "contains unknown": UNKNOWN_FIELD}
# The value that is wrong: a path, or the keys of the mapping at a path. Values under a mapping's keys are `[...]`.
LOCATION = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`$")


class DecodeProblem(NamedTuple):
    """What is wrong with a document, and where: `path` is empty for the document as a whole."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


def describe_decode_error(error: Exception) -> DecodeProblem:
    """Translate what a decoder raised (one of DECODE_ERRORS)."""
    if isinstance(error, RecursionError):
        return DecodeProblem("", "is nested too deeply")
    if isinstance(error, UnicodeError):
        return DecodeProblem("", "is not valid UTF-8")
    if not isinstance(error, msgspec.MsgspecError):
        # Python's own advice for integers of very many digits ("use sys.set_int_max_str_digits()") is for programmers.
        return DecodeProblem("", f"has a number that {OUT_OF_RANGE}" if "digits" in str(error) else INVALID)
    text = str(error)
    location = LOCATION.search(text)
    if location is None:
        return describe_at("", text)
    problem = describe_at(location["path"].lstrip("."), text[: location.start()])
    return problem._replace(message=f"has a key that {problem.message}") if location["key"] else problem


def describe_at(path: str, text: str) -> DecodeProblem:
    """Translate an error's text without its location; a field that is missing or unknown is added to the path."""
    if field := FIELD.fullmatch(text):
        name = printable(field["field"])
        return DecodeProblem(f"{path}.{name}" if path else name, FIELD_PROBLEMS[field["problem"]])
    for pattern, describe in PATTERNS:
        if match := pattern.fullmatch(text):
            return DecodeProblem(path, describe(match))
    return DecodeProblem(path, FIXED.get(text, INVALID))


def describe_type(match: re.Match[str]) -> str:
    expected = match["expected"].split(" | ")
    got = TYPES.get(match["got"] or "")
    # null is allowed nearly everywhere in Kubernetes' API: as an alternative it tells nothing.
    wanted = [TYPES[name] for name in expected if name in TYPES and (name != "null" or len(expected) == 1)]
    if not wanted:
        return "has the wrong type"
    if match["got"] == "float" and "int" in expected:
        got = "a fraction"
    elif match["got"] == "int":
        got = "a number"
    must_be = f"must be {' or '.join(wanted)}"
    return f"{must_be}, not {got}" if got and got not in wanted else must_be


def describe_bound(match: re.Match[str]) -> str:
    return f"must be {BOUNDS[match['sign']]} {match['bound'].removesuffix('.0')}"


def describe_length(match: re.Match[str]) -> str:
    how_many = f"{BOUNDS[match['sign']]} {match['length']}" if match["sign"] else match["length"]
    return f"must have {how_many} {UNITS[match['type']]}{'' if match['length'] == '1' else 's'}"


# Checked in this order: the first is by far the most frequent.
PATTERNS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"Expected `(?P<expected>[^`]*)`(?:, got `(?P<got>[^`]*)`)?"), describe_type),
    (re.compile(r"Expected `(?:int|float)` (?P<sign>[<>]=?) (?P<bound>\S+)"), describe_bound),
    (re.compile(r"Expected `\w+` that's a multiple of (\S+)"), lambda match: f"must be a multiple of {match[1]}"),
    (
        re.compile(
            r"Expected `(?P<type>str|bytes|array|object)` of length (?P<sign>[<>]=)? ?(?P<length>\d+(?: to \d+)?)"
            r"(?:, got \d+)?"
        ),
        describe_length,
    ),
    (re.compile(r"Expected `str` matching regex (.*)", re.DOTALL), lambda match: f"must match {match[1]}"),
    (
        re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL),
        lambda match: f"has the unsupported value {printable(match[1])}",
    ),
    (re.compile(r"JSON is malformed: .* \(byte (\d+)\)"), lambda match: f"is not valid JSON near byte {match[1]}"),
)

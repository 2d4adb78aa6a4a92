"""YAML as text to plain values, strictly: what a file says twice, or cannot say at all, is an error.

Parsing is a pure function of the text. The usual loader lets the last of two equal keys win in silence,
which turns a slip of the pen in a quota or a configuration into a different quota.
"""

import re
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import yaml

SURELY_SHALLOW = 1000
MAX_DEPTH, MAX_VALUES = 100, 200_000
TOO_DEEP = f"nested more than {MAX_DEPTH} deep: nobody can mean that"
DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)", re.ASCII)
# What the constructors of odd tags raise where a value is not what its tag says.
MISMADE = (yaml.YAMLError, RecursionError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError)
MERGE = "tag:yaml.org,2002:merge"


class DocumentError(ValueError):
    """The text is not a document that can be meant; the message names the line."""


class Strictness(yaml.constructor.SafeConstructor):
    """What PyYAML's safe loaders allow, minus duplicate keys and keys that are no text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002
        """Build a mapping whose keys are all different."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == MERGE:
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise DocumentError(f"line {line}: the key {key!r} is not text: quote it")
            if key in seen:
                raise DocumentError(f"line {line}: {key!r} stands here a second time: remove one of them")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class PlainNumbers(yaml.constructor.SafeConstructor):
    """Takes only decimal numbers: what YAML makes of 0400 or 1:30, nobody means."""

    def construct_plain_int(self, node: yaml.ScalarNode) -> int:
        """Read a whole number."""
        if not DECIMAL.fullmatch(node.value):
            line = node.start_mark.line + 1
            raise DocumentError(f"line {line}: {node.value!r} is not a decimal number: write it in plain digits")
        return int(node.value)


PlainNumbers.add_constructor("tag:yaml.org,2002:int", PlainNumbers.construct_plain_int)  # type: ignore[type-var]


class StrictLoader(Strictness, yaml.SafeLoader):
    """The loader with the better words for what is wrong."""


class PlainStrictLoader(PlainNumbers, StrictLoader):
    """The same, with decimal numbers alone."""


class FastLoader(Strictness, yaml.CSafeLoader):
    """The loader that decides, in C and many times faster; but text nested deeply enough brings it, and us, down."""


class PlainFastLoader(PlainNumbers, FastLoader):
    """The same, with decimal numbers alone."""


Loader = type[StrictLoader | FastLoader]


def parse_documents(text: str, *, plain_numbers: bool = False) -> list[Any]:
    """Read all documents of a text; empty ones are left out."""
    fast, slow = (PlainFastLoader, PlainStrictLoader) if plain_numbers else (FastLoader, StrictLoader)
    if len(text) > SURELY_SHALLOW:
        check_depth(text)
    try:
        found = documents_in(text, fast)
        check_extent(found)
    except DocumentError:
        raise
    except MISMADE as wrong:
        raise explained(text, slow, wrong) from None
    return found


def documents_in(text: str, loader: Loader) -> list[Any]:
    """Load what is there."""
    return [document for document in yaml.load_all(text, Loader=loader) if document is not None]


def check_depth(text: str) -> None:
    """Refuse what is nested deeper than anybody means, before anything is built of it."""
    depth = 0
    with suppress(yaml.YAMLError):  # which is told when it is loaded
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                if depth > MAX_DEPTH:
                    raise DocumentError(TOO_DEEP)
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1


def check_extent(found: list[Any]) -> None:
    """Refuse what is too deep, or too much: a few aliases of aliases say more than any memory holds."""
    left = [(document, 1) for document in found]
    count = 0
    while left:
        value, depth = left.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise DocumentError(TOO_DEEP)
        if count > MAX_VALUES:
            raise DocumentError(f"says more than {MAX_VALUES} things: write less, or fewer aliases")
        if isinstance(value, dict):
            left += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list):
            left += [(each, depth + 1) for each in value]


def explained(text: str, loader: Loader, wrong: BaseException) -> DocumentError:
    """Say what is wrong with a text, in the better words of the other loader if it finds it as well."""
    try:
        documents_in(text, loader)
    except MISMADE as told:
        wrong = told
    if isinstance(wrong, DocumentError):
        return wrong
    if isinstance(wrong, yaml.MarkedYAMLError):
        mark = wrong.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return DocumentError(f"{where}not YAML: {wrong.problem}")
    if "set_int_max_str_digits" in str(wrong):
        # Python's own message advises programmers to raise its limit of 4300 digits.
        return DocumentError("a number has too many digits")
    return DocumentError(f"not YAML: {wrong or type(wrong).__name__}")

"""YAML as text to plain values, strictly: what a file says twice, or cannot say at all, is an error.

Parsing is a pure function of the text. The usual loader lets the last of two equal keys win in silence,
which turns a slip of the pen in a quota or a configuration into a different quota.
"""

from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import yaml

SURELY_SHALLOW = 1000
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


class StrictLoader(Strictness, yaml.SafeLoader):
    """The loader whose errors are told."""


class FastLoader(Strictness, yaml.CSafeLoader):
    """The same in C, many times faster; but text that is nested deeply enough brings it, and us, down."""


def parse_documents(text: str) -> list[Any]:
    """Read all documents of a text; empty ones are left out."""
    if len(text) <= SURELY_SHALLOW:
        with suppress(*MISMADE):
            return documents_in(text, FastLoader)
    try:
        return documents_in(text, StrictLoader)
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise DocumentError(f"{where}not YAML: {wrong.problem}") from None
    except MISMADE as wrong:
        if isinstance(wrong, DocumentError):
            raise
        raise DocumentError(f"not YAML: {wrong or type(wrong).__name__}") from None


def documents_in(text: str, loader: type[StrictLoader | FastLoader]) -> list[Any]:
    """Load what is there."""
    return [document for document in yaml.load_all(text, Loader=loader) if document is not None]

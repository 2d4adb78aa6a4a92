"""YAML as text to plain values, strictly: what a file says twice, or cannot say at all, is an error.

Parsing is a pure function of the text. The usual loader lets the last of two equal keys win in silence,
which turns a slip of the pen in a quota or a configuration into a different quota.
"""

from collections.abc import Hashable
from typing import Any

import yaml

MERGE = "tag:yaml.org,2002:merge"


class DocumentError(ValueError):
    """The text is not a document that can be meant; the message names the line."""


class StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, minus duplicate keys and keys that are no text."""

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


def parse_documents(text: str) -> list[Any]:
    """Read all documents of a text; empty ones are left out."""
    try:
        return [document for document in yaml.load_all(text, Loader=StrictLoader) if document is not None]
    except yaml.MarkedYAMLError as wrong:
        mark = wrong.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise DocumentError(f"{where}not YAML: {wrong.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as wrong:
        if isinstance(wrong, DocumentError):
            raise
        raise DocumentError(f"not YAML: {wrong}") from None

"""Locations in YAML files: the line of a field for messages, its position in the text for repairs."""

import re
from collections.abc import Iterator

import yaml
from msgspec import Struct

from cluster.object_schema import Steps
from console.manifests import Document
from console.schema_checks import unquoted_scalars
from vcuda.strict_yaml import DocumentError, StrictLoader

STEP = re.compile(r"\[([^\]]*)\]|([^.\[\]]+)")


class LocatedObject(Struct, frozen=True):
    """One object of a file, as its YAML node."""

    node: yaml.Node


def locate_objects(text: str) -> list[LocatedObject]:
    """Return the objects of a text in reading order, the items of a List as objects of their own."""
    try:
        nodes = [node for node in yaml.compose_all(text, Loader=StrictLoader) if not is_empty(node)]
    except yaml.YAMLError as error:
        raise DocumentError(f"invalid YAML: {error}") from None
    return [LocatedObject(item) for node in nodes for item in expand_list_node(node)]


def source_texts(documents: list[Document], text: str) -> list[dict[Steps, str]]:
    """Return, for each document, the values that need quotes as they are written in the file."""
    nodes = [location.node for location in locate_objects(text)]
    if len(nodes) != len(documents):  # a List that is completed by a YAML merge
        return [{} for _ in documents]
    return [unquoted_values(document, node, text) for document, node in zip(documents, nodes, strict=True)]


def unquoted_values(document: Document, node: yaml.Node, text: str) -> dict[Steps, str]:
    """Return the values that need quotes as they are written in the file; without those that a YAML merge adds."""
    values: dict[Steps, str] = {}
    for steps, _ in unquoted_scalars(document):
        scalar = deepest_node(node, steps)
        if isinstance(scalar, yaml.ScalarNode):
            values[steps] = text[scalar.start_mark.index : scalar.end_mark.index]
    return values


def is_empty(node: yaml.Node | None) -> bool:
    return node is None or node.tag == "tag:yaml.org,2002:null"


def expand_list_node(node: yaml.Node) -> Iterator[yaml.Node]:
    kind, items = child(node, "kind"), child(node, "items")
    if kind is not None and str(kind.value).endswith("List") and items is not None:
        for item in items.value if isinstance(items, yaml.SequenceNode) else ():
            yield from expand_list_node(item)
    else:
        yield node


def child(node: yaml.Node, step: str | int) -> yaml.Node | None:
    """Return the value under a key, at an index, or of the list item with this name."""
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == str(step)), None)
    if isinstance(node, yaml.SequenceNode):
        if isinstance(step, int) or step.isdecimal():
            return node.value[int(step)] if int(step) < len(node.value) else None
        named = (item for item in node.value if (name := child(item, "name")) is not None and name.value == step)
        return next(named, None)
    return None


def parse_field(field: str) -> Steps:
    """Split a field name such as `spec.containers[0].env` into its steps."""
    return tuple(key or name for key, name in STEP.findall(field))


def deepest_node(node: yaml.Node, steps: Steps) -> yaml.Node:
    """Follow a path as far as it exists."""
    for step in steps:
        inner = child(node, step)
        if inner is None:
            return node
        node = inner
    return node


def line_of(node: yaml.Node, field: str) -> int:
    """Return the line of a field, or of the mapping it is missing in."""
    return int(deepest_node(node, parse_field(field)).start_mark.line) + 1

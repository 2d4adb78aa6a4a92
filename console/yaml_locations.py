"""Where in a file a field stands: its line for people, its place in the text for repairs."""

import re
from collections.abc import Iterator

import yaml
from msgspec import Struct

from vcuda.strict_yaml import DocumentError, StrictLoader

STEP = re.compile(r"\[([^\]]*)\]|([^.\[\]]+)")

Steps = tuple[str | int, ...]


class Located(Struct, frozen=True):
    """One object of a file: its node, and the node's path in the document it came from."""

    node: yaml.Node

    @property
    def line(self) -> int:
        """The line on which it begins."""
        return int(self.node.start_mark.line) + 1


def locate(text: str) -> list[Located]:
    """Find the objects of a text, in the order in which they are read; items of a list are objects of their own."""
    try:
        nodes = [node for node in yaml.compose_all(text, Loader=StrictLoader) if is_something(node)]
    except yaml.YAMLError as wrong:
        raise DocumentError(f"invalid YAML: {wrong}") from None
    return [Located(inner) for node in nodes for inner in items(node)]


def is_something(node: yaml.Node | None) -> bool:
    """Tell whether a document holds anything."""
    return node is not None and node.tag != "tag:yaml.org,2002:null"


def items(node: yaml.Node) -> Iterator[yaml.Node]:
    """Go into lists of objects."""
    kind, inside = child(node, "kind"), child(node, "items")
    if kind is not None and str(kind.value).endswith("List") and isinstance(inside, yaml.SequenceNode):
        for item in inside.value:
            yield from items(item)
    else:
        yield node


def child(node: yaml.Node, step: str | int) -> yaml.Node | None:
    """Go one step down: by key, by index, or by the name of an item."""
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == str(step)), None)
    if isinstance(node, yaml.SequenceNode):
        if isinstance(step, int) or step.isdecimal():
            return node.value[int(step)] if int(step) < len(node.value) else None
        named = (item for item in node.value if (name := child(item, "name")) is not None and name.value == step)
        return next(named, None)
    return None


def steps_of(field: str) -> Steps:
    """Take a field's name apart, as messages write it."""
    return tuple(key or name for key, name in STEP.findall(field))


def deepest(node: yaml.Node, steps: Steps) -> yaml.Node:
    """Go as far as a path leads."""
    for step in steps:
        found = child(node, step)
        if found is None:
            return node
        node = found
    return node


def line_of(node: yaml.Node, field: str) -> int:
    """Find the line of a field, or of what it should be in."""
    return int(deepest(node, steps_of(field)).start_mark.line) + 1

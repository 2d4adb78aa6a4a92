"""Kubernetes' label and field selectors, for the cluster in memory."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from cluster.errors import Rejected
from cluster.interface import Selector
from cluster.objects import NODES, PODS, Raw

KEY = r"(?P<key>[A-Za-z0-9][A-Za-z0-9_./-]*)"
SET_BASED = re.compile(KEY + r"\s+(?P<verb>in|notin)\s*\(\s*(?P<values>[^()]*)\)")
EQUALITY = re.compile(KEY + r"\s*(?P<verb>==|=|!=)\s*(?P<value>[A-Za-z0-9_./-]*)")
EXISTENCE = re.compile(r"(?P<verb>!?)\s*" + KEY)
PARTS = re.compile(r",(?![^(]*\))")

FIELDS = {
    PODS.plural: (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "status.phase",
    ),
    NODES.plural: ("spec.unschedulable",),
}
EVERY_KIND = ("metadata.name", "metadata.namespace")

Condition = Callable[[Raw], bool]


def compile_selector(plural: str, selector: Selector) -> Condition:
    """Read a selector once and give the condition it states; what cannot be read is refused, as by the API server."""
    conditions = [label_condition(part) for part in parts(selector.labels)]
    conditions += [field_condition(plural, part) for part in parts(selector.fields)]
    return lambda obj: all(condition(obj) for condition in conditions)


def parts(text: str) -> list[str]:
    """Split a selector at its commas, but not at those within parentheses."""
    return [part.strip() for part in PARTS.split(text) if part.strip()]


def label_condition(part: str) -> Condition:
    """Read one requirement on labels."""
    if found := SET_BASED.fullmatch(part):
        key, values = found["key"], [value.strip() for value in found["values"].split(",")]
        wanted = found["verb"] == "in"
        return lambda obj: (labels_of(obj).get(key) in values) is wanted
    if found := EQUALITY.fullmatch(part):
        key, value, wanted = found["key"], found["value"], found["verb"] != "!="
        return lambda obj: (labels_of(obj).get(key) == value) is wanted
    if found := EXISTENCE.fullmatch(part):
        key, wanted = found["key"], not found["verb"]
        return lambda obj: (key in labels_of(obj)) is wanted
    raise Rejected(f"unable to parse requirement {part!r} of a label selector", code=400, reason="BadRequest")


def field_condition(plural: str, part: str) -> Condition:
    """Read one requirement on a field such as `spec.nodeName`; only some can be asked for."""
    found = EQUALITY.fullmatch(part)
    if found is None or found["key"] not in (*EVERY_KIND, *FIELDS.get(plural, ())):
        raise Rejected(f"field label not supported: {part!r}", code=400, reason="BadRequest")
    path, value, wanted = found["key"].split("."), found["value"], found["verb"] != "!="
    return lambda obj: (field_text(obj, path) == value) is wanted


def labels_of(obj: Raw) -> Mapping[str, str]:
    """Give an object's labels."""
    labels: Mapping[str, str] = obj["metadata"].get("labels") or {}
    return labels


def field_text(obj: Raw, path: list[str]) -> str:
    """Give a field as selectors compare it; an absent one is empty, an absent truth is false."""
    value: Any = obj
    for step in path:
        value = (value or {}).get(step)
    if path[-1] == "unschedulable":
        return str(bool(value)).lower()
    return str(value or "")

"""Label and field selectors of Kubernetes, for the in-memory cluster."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from cluster.errors import Rejected
from cluster.interface import Selector
from cluster.objects import EVENTS, NODES, PODS, Raw

KEY = r"(?P<key>[A-Za-z0-9][A-Za-z0-9_./-]*)"
SET_BASED = re.compile(KEY + r"\s+(?P<verb>in|notin)\s*\(\s*(?P<values>[^()]*)\)")
EQUALITY = re.compile(KEY + r"\s*(?P<verb>==|=|!=)\s*(?P<value>[A-Za-z0-9_./-]*)")
EXISTENCE = re.compile(r"(?P<verb>!?)\s*" + KEY)
# A comma outside of parentheses: those within separate the values of `in` and `notin`.
SEPARATOR = re.compile(r",(?![^(]*\))")

# The API server supports these fields only, those of the kinds below as far as Quotient uses them.
FIELDS_OF_ALL_KINDS = ("metadata.name", "metadata.namespace")
FIELDS = {
    PODS.plural: (
        "spec.nodeName",
        "spec.restartPolicy",
        "spec.schedulerName",
        "spec.serviceAccountName",
        "status.phase",
    ),
    NODES.plural: ("spec.unschedulable",),
    EVENTS.plural: (
        "involvedObject.kind",
        "involvedObject.name",
        "involvedObject.uid",
        "reason",
        "reportingComponent",
        "type",
    ),
}

Condition = Callable[[Raw], bool]


def compile_selector(plural: str, selector: Selector) -> Condition:
    """Return a selector as a function; Rejected if it cannot be parsed or names an unsupported field."""
    conditions = [label_condition(requirement) for requirement in split_requirements(selector.labels)]
    conditions += [field_condition(plural, requirement) for requirement in split_requirements(selector.fields)]
    return lambda obj: all(condition(obj) for condition in conditions)


def split_requirements(text: str) -> list[str]:
    return [part.strip() for part in SEPARATOR.split(text) if part.strip()]


def label_condition(requirement: str) -> Condition:
    # An object without the label satisfies `!=` and `notin`, as in Kubernetes.
    if match := SET_BASED.fullmatch(requirement):
        key, values = match["key"], [value.strip() for value in match["values"].split(",")]
        expected = match["verb"] == "in"
        return lambda obj: (labels_of(obj).get(key) in values) is expected
    if match := EQUALITY.fullmatch(requirement):
        key, value, expected = match["key"], match["value"], match["verb"] != "!="
        return lambda obj: (labels_of(obj).get(key) == value) is expected
    if match := EXISTENCE.fullmatch(requirement):
        key, expected = match["key"], not match["verb"]
        return lambda obj: (key in labels_of(obj)) is expected
    raise Rejected(f"unable to parse requirement {requirement!r} of a label selector", code=400, reason="BadRequest")


def field_condition(plural: str, requirement: str) -> Condition:
    match = EQUALITY.fullmatch(requirement)
    if match is None or match["key"] not in (*FIELDS_OF_ALL_KINDS, *FIELDS.get(plural, ())):
        raise Rejected(f"field label not supported: {requirement!r}", code=400, reason="BadRequest")
    path, value, expected = match["key"].split("."), match["value"], match["verb"] != "!="
    return lambda obj: (field_text(obj, path) == value) is expected


def labels_of(obj: Raw) -> Mapping[str, str]:
    labels: Mapping[str, str] = obj["metadata"].get("labels") or {}
    return labels


def field_text(obj: Raw, path: list[str]) -> str:
    """Return a field as selectors compare it: empty if it is absent, `false` for an absent boolean."""
    value: Any = obj
    for step in path:
        value = (value or {}).get(step)
    if path[-1] == "unschedulable":
        return str(bool(value)).lower()
    return str(value or "")

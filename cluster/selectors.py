"""Kubernetes' label and field selectors, for the cluster in memory."""

import re
from collections.abc import Mapping
from typing import Any

from cluster.errors import Refused
from cluster.interface import Selector
from cluster.objects import Raw

SET_BASED = re.compile(r"(?P<key>\S+)\s+(?P<verb>in|notin)\s+\((?P<values>[^)]*)\)")
EQUALITY = re.compile(r"(?P<key>[^!=\s]+)\s*(?P<verb>==|=|!=)\s*(?P<value>[^!=\s]*)")
PARTS = re.compile(r",(?![^(]*\))")


def selects(selector: Selector, obj: Raw) -> bool:
    """Tell whether an object is among those selected."""
    labels = obj["metadata"].get("labels") or {}
    return all(label_holds(part, labels) for part in parts(selector.labels)) and all(
        field_holds(part, obj) for part in parts(selector.fields)
    )


def parts(text: str) -> list[str]:
    """Split a selector at its commas, but not at those within parentheses."""
    return [part.strip() for part in PARTS.split(text) if part.strip()]


def label_holds(part: str, labels: Mapping[str, str]) -> bool:
    """Check one requirement on labels."""
    if found := SET_BASED.fullmatch(part):
        values = [value.strip() for value in found["values"].split(",")]
        return (labels.get(found["key"]) in values) is (found["verb"] == "in")
    if found := EQUALITY.fullmatch(part):
        return (labels.get(found["key"]) == found["value"]) is (found["verb"] != "!=")
    return part[1:] not in labels if part.startswith("!") else part in labels


def field_holds(part: str, obj: Raw) -> bool:
    """Check one requirement on a field such as `spec.nodeName`."""
    found = EQUALITY.fullmatch(part)
    if found is None:
        raise Refused(f"invalid field selector {part!r}", code=400, reason="BadRequest")
    value: Any = obj
    for step in found["key"].split("."):
        value = (value or {}).get(step)
    return (str(value or "") == found["value"]) is (found["verb"] != "!=")

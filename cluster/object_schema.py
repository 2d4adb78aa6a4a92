"""Compares objects with the fields that Kubernetes' API has, as the official client describes them.

The API server rejects a value of another type before it calls any webhook, and kubectl rejects unknown fields.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import Struct

from vcuda.workload_kinds import WORKLOAD_KINDS

# The way to a field: keys of mappings and indexes of lists.
Steps = tuple[str | int, ...]

SCHEMAS = {("v1", "Pod"): "V1Pod", ("v1", "ConfigMap"): "V1ConfigMap"} | {
    (each.api_version, each.kind): f"V1{each.kind}" for each in WORKLOAD_KINDS
}
COLLECTION = re.compile(r"(?P<kind>list|dict)[\[(](?:str, )?(?P<item>\w+)[\])]", re.IGNORECASE)
# Described as strings, but the API server reads numbers too.
QUANTITIES = frozenset({"limits", "requests", "overhead", "sizeLimit", "divisor", "capacity", "allocatable"})
# Numbers have 32 bits, but for these.
WIDE_NUMBERS = frozenset(
    {
        "activeDeadlineSeconds",
        "deletionGracePeriodSeconds",
        "expirationSeconds",
        "fsGroup",
        "generation",
        "observedGeneration",
        "runAsGroup",
        "runAsUser",
        "seconds",
        "startingDeadlineSeconds",
        "supplementalGroups",
        "terminationGracePeriodSeconds",
        "tolerationSeconds",
    }
)
COUNTS = frozenset(
    {"replicas", "parallelism", "completions", "backoffLimit", "minReadySeconds", "revisionHistoryLimit"}
)
# By the words for numbers in a range: the least and the most.
RANGES = {"count": (0, 2**31 - 1), "int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool, "list": list, "dict": dict}


class Mismatch(Struct, frozen=True):
    """A field whose value has another type than `expected`, a type or a range; or, without it, one that does not exist.

    `known` are the fields that exist in its place.
    """

    steps: Steps
    value: Any
    expected: str = ""
    known: tuple[str, ...] = ()


def mismatches(document: dict[str, Any]) -> Iterator[Mismatch]:
    """Yield what the API does not have, in reading order; nothing for kinds that Quotient does not check."""
    schema = SCHEMAS.get((str(document.get("apiVersion")), str(document.get("kind"))))
    if schema is not None:
        yield from compare(document, schema, ())


def compare(value: Any, schema: str, steps: Steps) -> Iterator[Mismatch]:  # noqa: ANN401 - any YAML value
    """Compare a value with a type of the API. Null is absent, everywhere."""
    collection = COLLECTION.fullmatch(schema)
    fields = fields_of(schema)
    expected = collection["kind"].lower() if collection else "dict" if fields else schema
    if value is None or expected not in TYPES:
        return
    if not has_type(value, expected):
        yield Mismatch(steps, value, expected)
    elif expected == "int":
        if not is_within(value, wanted := range_of(steps)):
            yield Mismatch(steps, value, wanted)
    elif collection:
        for step, each in enumerate(value) if isinstance(value, list) else value.items():
            yield from compare(each, collection["item"], (*steps, step))
    elif fields:
        yield from compare_fields(value, fields, steps)


def has_type(value: Any, expected: str) -> bool:  # noqa: ANN401
    # A bool is an int in Python, and kubectl sends 1.0 as 1.
    return type(value) is TYPES[expected] or (expected == "int" and isinstance(value, float) and value.is_integer())


def range_of(steps: Steps) -> str:
    """Return the range of the number at a path; those of a list have the range of their field."""
    field = next(step for step in reversed(steps) if isinstance(step, str))
    return "int64" if field in WIDE_NUMBERS else "count" if field in COUNTS else "int32"


def is_within(value: float, name: str) -> bool:
    least, most = RANGES[name]
    return least <= value <= most


def compare_fields(value: dict[str, Any], fields: dict[str, str], steps: Steps) -> Iterator[Mismatch]:
    for key, each in value.items():
        if key not in fields:
            yield Mismatch((*steps, key), each, known=tuple(fields))
        elif key not in QUANTITIES:
            yield from compare(each, fields[key], (*steps, key))


@cache
def fields_of(schema: str) -> dict[str, str]:
    """Return the fields of a type of the API, with the type of each; empty for types that hold any value."""
    from kubernetes.client import models  # noqa: PLC0415 - takes a second

    model = getattr(models, schema, None)
    if model is None:
        return {}
    return {name: model.openapi_types[attribute] for attribute, name in model.attribute_map.items()}

"""Compares objects with the fields that Kubernetes' API has, as the official client describes them.

The API server rejects a value of another type before it calls any webhook, and kubectl rejects unknown fields.
"""

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from msgspec import Struct

from vcuda.workload_kinds import WORKLOAD_KINDS

# The way to a field: keys of mappings and indexes of lists.
Steps = tuple[str | int, ...]

SCHEMAS = {("v1", "Pod"): "V1Pod"} | {(each.api_version, each.kind): f"V1{each.kind}" for each in WORKLOAD_KINDS}
COLLECTION = re.compile(r"(?P<kind>list|dict)[\[(](?:str, )?(?P<item>\w+)[\])]", re.IGNORECASE)
# Described as strings, but the API server reads numbers too.
QUANTITIES = frozenset({"limits", "requests", "overhead", "sizeLimit", "divisor", "capacity", "allocatable"})
SCALARS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,)}


class Mismatch(Struct, frozen=True):
    """A field whose value has another type than `expected`; or, without `expected`, one that does not exist.

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
    """Compare a value with a type of the API. Values with another structure are left to the decoder."""
    if collection := COLLECTION.fullmatch(schema):
        for step, each in items_of(value, collection["kind"].lower()):
            yield from compare(each, collection["item"], (*steps, step))
    elif schema in SCALARS:
        # A bool is an int in Python.
        if isinstance(value, (str, bool, int, float)) and type(value) not in SCALARS[schema]:
            yield Mismatch(steps, value, schema)
    elif isinstance(value, dict):
        yield from compare_fields(value, fields_of(schema), steps)


def items_of(value: Any, kind: str) -> Iterable[tuple[str | int, Any]]:  # noqa: ANN401
    """Return the items of a list or mapping, each with its step; nothing for any other value."""
    if kind == "list":
        return enumerate(value) if isinstance(value, list) else ()
    return value.items() if isinstance(value, dict) else ()


def compare_fields(value: dict[str, Any], fields: dict[str, str], steps: Steps) -> Iterator[Mismatch]:
    for key, each in value.items() if fields else ():
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

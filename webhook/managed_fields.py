"""Reads what users have declared of an object from `metadata.managedFields`.

The API server computes them before it calls the webhook. So what the webhook removes stays declared by its manager, and
what the webhook adds is declared by none: with server-side apply, nothing else tells them apart.
"""

import re
from collections.abc import Collection
from typing import Any

from msgspec import Struct

from webhook.objects import AdmittedMetadata
from webhook.patching import pointer_steps
from webhook.review import decode_object

APPLY = "Apply"
# The key of an element of a list of containers. Their names are DNS labels, so no character of them is escaped.
NAME_KEY = re.compile(r'k:\{"name":"([^"\\]*)"\}')

# Fields as a tree: `f:` before the name of a field, `k:` before the key of an element of a list.
FieldTree = dict[str, Any]
# Name and operation: a user agent may have applied and updated.
Manager = tuple[str, str]


class ManagedFields(Struct, frozen=True, rename="camel"):
    """What one field manager has declared."""

    manager: str = ""
    operation: str = ""
    fields_v1: FieldTree | None = None


def managed_fields(metadata: AdmittedMetadata) -> list[ManagedFields]:
    """Return what each manager has declared; raises BadRequest if it is malformed."""
    raw = metadata.managed_fields
    return decode_object(raw, list[ManagedFields], "metadata.managedFields") if bytes(raw) != b"null" else []


def fields_below(fields: object, pointer: str) -> FieldTree:
    """Return the fields below a JSON pointer; empty if there are none."""
    for step in pointer_steps(pointer):
        fields = fields.get(f"f:{step}") if isinstance(fields, dict) else None
    return fields if isinstance(fields, dict) else {}


def applied_annotations(metadata: AdmittedMetadata) -> set[str]:
    """Return the annotations that are declared by server-side apply."""
    return {
        field.removeprefix("f:")
        for each in managed_fields(metadata)
        if each.operation == APPLY
        for field in fields_below(each.fields_v1, "/metadata/annotations")
    }


def containers_by_manager(
    metadata: AdmittedMetadata, template_pointer: str, resources: Collection[str]
) -> dict[Manager, set[str]]:
    """Return for each manager the names of a template's containers for which it declares one of these resources."""
    wanted = {f"f:{resource}" for resource in resources}
    found: dict[Manager, set[str]] = {}
    for each in managed_fields(metadata):
        names = found.setdefault((each.manager, each.operation), set())
        spec = fields_below(each.fields_v1, f"{template_pointer}/spec")
        for containers in ("/initContainers", "/containers"):
            for key, fields in fields_below(spec, containers).items():
                amounts = (fields_below(fields, f"/resources/{part}") for part in ("limits", "requests"))
                if (name := NAME_KEY.fullmatch(key)) and not all(map(wanted.isdisjoint, amounts)):
                    names.add(name[1])
    return found

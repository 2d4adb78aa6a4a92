"""Checks for what an API server rejects before it calls any webhook: there only a look at the file can help."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from msgspec import Struct

from cluster.object_schema import RANGES, Mismatch, Steps, mismatches
from vcuda.decision import Code, Reason, printable
from vcuda.request import container_duplicate
from vcuda.workload_kinds import BY_KIND, WORKLOAD_KINDS

REMOVED_VERSIONS = ("extensions/v1beta1", "apps/v1beta1", "apps/v1beta2", "batch/v1beta1", "batch/v2alpha1")
# Kinds that moved to another group when these versions were removed; a ReplicationController always was in v1.
MOVED = {each.kind: each for each in WORKLOAD_KINDS if each.group}

# Mappings whose keys users choose.
FREE_MAPS = frozenset({"annotations", "labels", "matchLabels", "nodeSelector", "limits", "requests", "data"})
# How to repair these is not certain.
UNREPAIRABLE = (Code.OBJECT_INVALID, Code.CONTAINER_DUPLICATE)
# The length of a field name that is compared with known ones.
MAX_COMPARED = 64
Unquoted = tuple[Steps, bool | int | float]


class SchemaProblem(Struct, frozen=True):
    """One field that the API server would reject."""

    reason: Reason
    steps: Steps


# Types in words, as in the messages about what the webhook decodes.
IN_WORDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "dict": "an object",
} | {name: f"a whole number from {least} to {most}" for name, (least, most) in RANGES.items()}
SCALARS = ("int", "bool", *RANGES)


def schema_problems(document: dict[str, Any], sources: Mapping[Steps, str] | None = None) -> Iterator[SchemaProblem]:
    """Yield what the API server would reject; `sources` has values as they are written in the file."""
    yield from version_problems(document)
    for steps, value in unquoted_scalars(document):
        yield string_expected(steps, value, (sources or {}).get(steps))
    yield from structure_problems(document)
    yield from duplicate_names(document)


def version_problems(document: dict[str, Any]) -> Iterator[SchemaProblem]:
    kind = str(document.get("kind"))
    if document.get("apiVersion") in REMOVED_VERSIONS and kind in MOVED:
        yield version_removed(document["apiVersion"], kind)
        spec = mapping_within(document, ("spec",))
        if MOVED[kind].needs_selector and spec and not spec.get("selector"):
            yield selector_missing(kind)


def unquoted_scalars(document: dict[str, Any]) -> Iterator[Unquoted]:
    """Yield the numbers and booleans where the API accepts only strings, each with its path."""
    for each in mismatches(with_served_version(document)):
        if is_unquoted(each):
            yield each.steps, each.value


def is_unquoted(mismatch: Mismatch) -> bool:
    return mismatch.expected == "str" and not isinstance(mismatch.value, list | dict)


def with_served_version(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document under the version that is served today, if its version was removed."""
    kind = str(document.get("kind"))
    is_removed = document.get("apiVersion") in REMOVED_VERSIONS and kind in MOVED
    return document | {"apiVersion": MOVED[kind].api_version} if is_removed else document


def structure_problems(document: dict[str, Any]) -> Iterator[SchemaProblem]:
    """Yield fields that do not exist, and values of another type than the API accepts, but for unquoted strings."""
    for each in mismatches(with_served_version(document)):
        if not each.expected:
            yield field_unknown(each)
        elif each.expected in SCALARS and isinstance(each.value, str | int | float):
            yield scalar_expected(each)
        elif not is_unquoted(each):
            yield other_structure_expected(each, str(document.get("kind")))


def duplicate_names(document: dict[str, Any]) -> Iterator[SchemaProblem]:
    """Yield containers that have the name of one before."""
    kind = str(document.get("kind"))
    root = (*(BY_KIND[kind].template if kind in BY_KIND else ()), "spec")
    seen: set[str] = set()
    for part in ("initContainers", "containers"):
        containers = mapping_within(document, root).get(part)
        for index, container in enumerate(containers if isinstance(containers, list) else ()):
            name = container.get("name") if isinstance(container, dict) else None
            if isinstance(name, str) and name in seen:
                steps = (*root, part, index, "name")
                yield SchemaProblem(container_duplicate(field_name(steps), name), steps)
            elif isinstance(name, str):
                seen.add(name)


def mapping_within(document: dict[str, Any], steps: tuple[str, ...]) -> dict[str, Any]:
    """Return the mapping at a path; empty where there is none."""
    value: Any = document
    for step in steps:
        value = value.get(step) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def field_name(steps: Steps) -> str:
    """Return a path as messages write it: `spec.containers[0].env`, `metadata.labels[a.b/c]`."""
    # Keys of labels, annotations and resources are not part of the API, and may contain dots.
    path = ""
    for before, step in zip(("", *steps), steps, strict=False):
        path += f"[{step}]" if isinstance(step, int) or before in FREE_MAPS else f".{step}"
    return path.removeprefix(".")


def as_string(value: Any) -> str:  # noqa: ANN401
    return str(value).lower() if isinstance(value, bool) else str(value)


def string_expected(steps: Steps, value: Any, source: str | None) -> SchemaProblem:  # noqa: ANN401
    text, kind = printable(source or as_string(value)), as_string(value) if isinstance(value, bool) else "a number"
    reason = Reason(
        code=Code.TEXT_EXPECTED,
        field=field_name(steps),
        value=text,
        message=f"YAML reads this as {kind}, and the API server accepts only a string here",
        # Quotes around the value that YAML read would rename ON to true.
        remedy=f'write it in quotes: "{text}"' if source else "write the original text in quotes",
    )
    return SchemaProblem(reason, steps)


def field_unknown(mismatch: Mismatch) -> SchemaProblem:
    field = field_name(mismatch.steps)
    similar = get_close_matches(str(mismatch.steps[-1])[:MAX_COMPARED], mismatch.known, 1)
    reason = Reason(
        code=Code.OBJECT_INVALID,
        field=printable(field),
        value="",
        message="the API has no such field, and kubectl rejects it",
        remedy=f"write {similar[0]}" if similar else f"remove it; the fields are {', '.join(sorted(mismatch.known))}",
    )
    return SchemaProblem(reason, mismatch.steps)


def scalar_expected(mismatch: Mismatch) -> SchemaProblem:
    expected = IN_WORDS[mismatch.expected]
    reason = Reason(
        code=Code.OBJECT_INVALID,
        field=field_name(mismatch.steps),
        value=printable(as_string(mismatch.value)),
        message=f"the API server accepts only {expected} here",
        remedy=f"write {expected} without quotes",
    )
    return SchemaProblem(reason, mismatch.steps)


def other_structure_expected(mismatch: Mismatch, kind: str) -> SchemaProblem:
    path = ".".join([kind.lower(), *(str(step) for step in mismatch.steps if isinstance(step, str))])
    reason = Reason(
        code=Code.OBJECT_INVALID,
        field=field_name(mismatch.steps),
        value="",
        message=f"must be {IN_WORDS[mismatch.expected]}, not {IN_WORDS[type(mismatch.value).__name__]}",
        remedy=f"check it with: kubectl explain {printable(path)}",
    )
    return SchemaProblem(reason, mismatch.steps)


def version_removed(version: str, kind: str) -> SchemaProblem:
    reason = Reason(
        code=Code.API_VERSION_GONE,
        field="apiVersion",
        value=version,
        message=f"removed from Kubernetes; no version that Quotient supports serves a {kind} under it",
        remedy=f"write {MOVED[kind].api_version}",
    )
    return SchemaProblem(reason, ("apiVersion",))


def selector_missing(kind: str) -> SchemaProblem:
    reason = Reason(
        code=Code.API_VERSION_GONE,
        field="spec.selector",
        value="",
        message=f"a {kind} of {MOVED[kind].api_version} needs a selector; older versions copied the template's labels",
        remedy="add selector.matchLabels with the labels of the template",
    )
    return SchemaProblem(reason, ("spec", "selector"))


def repaired_document(document: dict[str, Any], sources: Mapping[Steps, str] | None = None) -> dict[str, Any]:
    """Return a copy in which every schema problem is repaired, so that the rest of the document can be checked too.

    `sources` has values as they are written in the file: YAML reads ON as true, and only the file has the original.
    """
    sources = sources or {}
    repaired: dict[str, Any] = deep_copy(document)
    for problem in schema_problems(document):
        *outer, last = problem.steps
        parent: Any = repaired
        for step in outer:
            parent = parent[step]
        if problem.reason.code in UNREPAIRABLE:
            continue
        if problem.reason.code is Code.TEXT_EXPECTED:
            parent[last] = sources.get(problem.steps) or as_string(parent[last])
        elif problem.steps == ("apiVersion",):
            parent[last] = MOVED[document["kind"]].api_version
        else:
            parent[last] = {"matchLabels": mapping_within(repaired, ("spec", "template", "metadata", "labels"))}
    return repaired


def deep_copy(value: Any) -> Any:  # noqa: ANN401
    """Copy mappings and lists. Aliases of one YAML node become independent, unlike with copy.deepcopy."""
    if isinstance(value, dict):
        return {key: deep_copy(each) for key, each in value.items()}
    return [deep_copy(each) for each in value] if isinstance(value, list) else value

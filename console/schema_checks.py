"""Checks for what an API server rejects before it calls any webhook: there only a look at the file can help."""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from vcuda.decision import Code, Reason, printable
from vcuda.workload_kinds import BY_KIND, WORKLOAD_KINDS

REMOVED_VERSIONS = ("extensions/v1beta1", "apps/v1beta1", "apps/v1beta2", "batch/v1beta1", "batch/v2alpha1")
# Kinds that moved to another group when these versions were removed; a ReplicationController always was in v1.
MOVED = {each.kind: each for each in WORKLOAD_KINDS if each.group}

# The way to a field: keys of mappings and indexes of lists.
Steps = tuple[str | int, ...]
Unquoted = tuple[Steps, bool | int | float]


class SchemaProblem(Struct, frozen=True):
    """One field that the API server would reject."""

    reason: Reason
    steps: Steps


def schema_problems(document: dict[str, Any], sources: Mapping[Steps, str] | None = None) -> Iterator[SchemaProblem]:
    """Yield what the API server would reject; `sources` has values as they are written in the file."""
    yield from version_problems(document)
    for steps, value in unquoted_scalars(document):
        yield string_expected(steps, value, (sources or {}).get(steps))


def version_problems(document: dict[str, Any]) -> Iterator[SchemaProblem]:
    kind = str(document.get("kind"))
    if document.get("apiVersion") in REMOVED_VERSIONS and kind in MOVED:
        yield version_removed(document["apiVersion"], kind)
        spec = mapping_within(document, ("spec",))
        if MOVED[kind].needs_selector and spec and not spec.get("selector"):
            yield selector_missing(kind)


def unquoted_scalars(document: dict[str, Any]) -> Iterator[Unquoted]:
    """Yield the numbers and booleans where the API accepts only strings, each with its path."""
    kind = str(document.get("kind"))
    template = BY_KIND[kind].template if kind in BY_KIND else ()
    for root in dict.fromkeys(((), template)):
        inner = mapping_within(document, root)
        for field in ("annotations", "labels"):
            yield from non_strings(mapping_within(inner, ("metadata", field)), (*root, "metadata", field))
        yield from non_strings(mapping_within(inner, ("spec", "nodeSelector")), (*root, "spec", "nodeSelector"))
        for part in ("initContainers", "containers"):
            containers = mapping_within(inner, ("spec",)).get(part)
            yield from non_string_variables(containers, (*root, "spec", part))


def mapping_within(document: dict[str, Any], steps: tuple[str, ...]) -> dict[str, Any]:
    """Return the mapping at a path; empty where there is none."""
    value: Any = document
    for step in steps:
        value = value.get(step) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def non_strings(values: dict[str, Any], steps: Steps) -> Iterator[Unquoted]:
    for key, value in values.items():
        if isinstance(value, (bool, int, float)):
            yield (*steps, key), value


def non_string_variables(containers: Any, steps: Steps) -> Iterator[Unquoted]:  # noqa: ANN401 - any YAML value
    """Find environment variables whose name or value is not a string: YAML reads ON as a boolean."""
    for index, container in enumerate(containers if isinstance(containers, list) else ()):
        variables = container.get("env") if isinstance(container, dict) else None
        for number, variable in enumerate(variables if isinstance(variables, list) else ()):
            for field in ("name", "value"):
                value = variable.get(field) if isinstance(variable, dict) else None
                if isinstance(value, (bool, int, float)):
                    yield (*steps, index, "env", number, field), value


def field_name(steps: Steps) -> str:
    """Return a path as messages write it: `spec.containers[0].env`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def as_string(value: Any) -> str:  # noqa: ANN401
    return str(value).lower() if isinstance(value, bool) else str(value)


def string_expected(steps: Steps, value: Any, source: str | None) -> SchemaProblem:  # noqa: ANN401
    # Keys of annotations, labels and nodeSelector may contain dots; the fields of a variable do not.
    field = field_name(steps) if steps[-3:-2] == ("env",) else f"{field_name(steps[:-1])}[{steps[-1]}]"
    text, kind = printable(source or as_string(value)), as_string(value) if isinstance(value, bool) else "a number"
    reason = Reason(
        code=Code.TEXT_EXPECTED,
        field=field,
        value=text,
        message=f"YAML reads this as {kind}, and the API server accepts only a string here",
        # Quotes around the value that YAML read would rename ON to true.
        remedy=f'write it in quotes: "{text}"' if source else "write the original text in quotes",
    )
    return SchemaProblem(reason, steps)


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

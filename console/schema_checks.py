"""What an API server refuses before it asks any webhook: only a look at the file can help there."""

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from vcuda.decision import Code, Reason, printable
from vcuda.workload_kinds import BY_KIND, WORKLOAD_KINDS

GONE = ("extensions/v1beta1", "apps/v1beta1", "apps/v1beta2", "batch/v1beta1", "batch/v2alpha1")
# Kinds that moved to another group when these versions were removed; a ReplicationController always was in v1.
MOVED = {each.kind: each for each in WORKLOAD_KINDS if each.group}


Steps = tuple[str | int, ...]


class SchemaProblem(Struct, frozen=True):
    """One thing that is refused early, with the steps to it."""

    reason: Reason
    steps: Steps


def schema_problems(document: dict[str, Any]) -> Iterator[SchemaProblem]:
    """Find what an API server would refuse before asking."""
    kind = str(document.get("kind"))
    if document.get("apiVersion") in GONE and kind in MOVED:
        yield gone(document["apiVersion"], kind)
        spec = within(document, ("spec",))
        if MOVED[kind].needs_selector and spec and not spec.get("selector"):
            yield unselected(kind)
    template = BY_KIND[kind].template if kind in BY_KIND else ()
    for root in dict.fromkeys(((), template)):
        inner = within(document, root)
        for field in ("annotations", "labels"):
            yield from texts(within(inner, ("metadata", field)), (*root, "metadata", field))
        yield from texts(within(inner, ("spec", "nodeSelector")), (*root, "spec", "nodeSelector"))
        for part in ("initContainers", "containers"):
            yield from environments(within(inner, ("spec",)).get(part), (*root, "spec", part))


def within(document: dict[str, Any], steps: tuple[str, ...]) -> dict[str, Any]:
    """Go down to a mapping; empty where there is none."""
    found: Any = document
    for step in steps:
        found = found.get(step) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def texts(values: dict[str, Any], steps: Steps) -> Iterator[SchemaProblem]:
    """Find values that are no text where only text is taken."""
    for key, value in values.items():
        if isinstance(value, (bool, int, float)):
            yield no_text(f"{dotted(steps)}[{key}]", value, (*steps, key))


def environments(containers: Any, steps: Steps) -> Iterator[SchemaProblem]:  # noqa: ANN401 - whatever a file holds
    """Find environment variables whose name or value is no text: YAML takes ON for a truth value."""
    for index, container in enumerate(containers if isinstance(containers, list) else ()):
        variables = container.get("env") if isinstance(container, dict) else None
        for number, variable in enumerate(variables if isinstance(variables, list) else ()):
            for field in ("name", "value"):
                value = variable.get(field) if isinstance(variable, dict) else None
                if isinstance(value, (bool, int, float)):
                    place = (*steps, index, "env", number, field)
                    yield no_text(dotted(place), value, place)


def dotted(steps: Steps) -> str:
    """Name a field as messages do."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def as_text(value: Any) -> str:  # noqa: ANN401
    """Write a value as the text that was meant."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def no_text(field: str, value: Any, steps: Steps) -> SchemaProblem:  # noqa: ANN401
    """Say that a value needs quotes."""
    meant = printable(as_text(value))
    reason = Reason(
        code=Code.TEXT_EXPECTED,
        field=field,
        value=meant,
        message="not a text, so the API server refuses the object before anybody is asked",
        remedy=f'put it in quotes: "{meant}"',
    )
    return SchemaProblem(reason, steps)


def gone(version: str, kind: str) -> SchemaProblem:
    """Say that an API version is no longer served."""
    reason = Reason(
        code=Code.API_VERSION_GONE,
        field="apiVersion",
        value=version,
        message=f"no longer served by any Kubernetes that Quotient runs on, not for a {kind}",
        remedy=f"write {MOVED[kind].api_version}",
    )
    return SchemaProblem(reason, ("apiVersion",))


def unselected(kind: str) -> SchemaProblem:
    """Say that a selector, which the old version filled in, is needed now."""
    reason = Reason(
        code=Code.API_VERSION_GONE,
        field="spec.selector",
        value="",
        message=f"a {kind} of {MOVED[kind].api_version} needs a selector; older versions copied the template's labels",
        remedy="add selector.matchLabels with the labels of the template",
    )
    return SchemaProblem(reason, ("spec", "selector"))


def repaired_document(document: dict[str, Any], sources: Mapping[Steps, str] | None = None) -> dict[str, Any]:
    """Give a document as it was meant, so that the rest of it can be judged too.

    `sources` says how values stand in the file: YAML reads ON as true, and only the file knows what was written.
    """
    sources = sources or {}
    made: dict[str, Any] = copied(document)
    for found in schema_problems(document):
        *outer, last = found.steps
        place: Any = made
        for step in outer:
            place = place[step]
        if found.reason.code is Code.TEXT_EXPECTED:
            place[last] = sources.get(found.steps) or as_text(place[last])
        elif found.steps == ("apiVersion",):
            place[last] = MOVED[document["kind"]].api_version
        else:
            place[last] = {"matchLabels": within(made, ("spec", "template", "metadata", "labels"))}
    return made


def copied(value: Any) -> Any:  # noqa: ANN401
    """Copy a document."""
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value

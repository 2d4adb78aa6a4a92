"""Manifests from files: Kubernetes objects as plain mappings, and the pods that each of them stands for."""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from console.errors import CommandError
from settings.reading import describe_read_error
from vcuda.decision import printable
from vcuda.decode_errors import DECODE_ERRORS, describe_decode_error
from vcuda.decoding import convert
from vcuda.strict_yaml import DocumentError, parse_documents
from vcuda.workload_kinds import BY_GROUP_KIND

if TYPE_CHECKING:
    from cluster.objects import Object

STDIN = "-"
NO_KIND = "not a Kubernetes object: kind is missing"
# A workload with more pods is cut off here: its first pods show what happens to the rest.
MAX_REPLICAS = 1000
# Node amounts that YAML reads as numbers and the API server stores as text.
AMOUNT_FIELDS = ("capacity", "allocatable")

Document = dict[str, Any]
T = TypeVar("T", bound="Object")


def read_text(file: str) -> str:
    """Read a file, or standard input for `-`."""
    try:
        return sys.stdin.read() if file == STDIN else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{file}: {describe_read_error(error)}") from None


def parse_objects(text: str) -> list[Document]:
    """Parse all objects of a text; the items of a List are objects of their own."""
    return [each for document in parse_documents(text) for each in expand_list(document)]


def expand_list(document: Any) -> Iterator[Document]:  # noqa: ANN401 - any YAML value
    if isinstance(document, dict) and str(document.get("kind", "")).endswith("List") and "items" in document:
        items = document["items"] or []
        if not isinstance(items, list):
            raise DocumentError(f"items: {printable(items)!r} is not a list")
        for item in items:
            yield from expand_list(item)
    elif isinstance(document, dict):
        yield document
    else:
        raise DocumentError(f"{printable(document)!r} is not a Kubernetes object: apiVersion and kind are missing")


def read_objects(files: Iterable[str]) -> list[tuple[str, Document]]:
    """Read all objects of some files, each with the file it is from."""
    objects: list[tuple[str, Document]] = []
    for file in files:
        try:
            objects += [(file, document) for document in parse_objects(read_text(file))]
        except DocumentError as error:
            raise CommandError(f"{file}: {error}") from None
    return objects


def mapping_at(document: Document, field: str) -> dict[str, Any]:
    """Return a field that should be a mapping; empty if it is missing or something else."""
    value = document.get(field)
    return value if isinstance(value, dict) else {}


def pods_of(document: Document, most: int = MAX_REPLICAS) -> Iterator[tuple[str, Document]]:
    """Yield the pods that a Pod or a workload stands for, each with its owner as `Kind/name`; at most so many."""
    kind, metadata = str(document.get("kind", "")), mapping_at(document, "metadata")
    name = str(metadata.get("name") or metadata.get("generateName") or "")
    if kind == "Pod":
        yield f"Pod/{name}", document | {"metadata": metadata}
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    if (group, kind) not in BY_GROUP_KIND:
        return
    outer, inner = document, document
    path = BY_GROUP_KIND[group, kind].template
    for step in path:
        outer, inner = inner, mapping_at(inner, step)
    for number in range(min(pod_count(f"{kind} {name}", ".".join(path[:-1]), outer), most)):
        pod_metadata = {**mapping_at(inner, "metadata"), "name": f"{name}-{number}"}
        if metadata.get("namespace"):
            pod_metadata["namespace"] = metadata["namespace"]
        spec = mapping_at(inner, "spec")
        yield f"{kind}/{name}", {"apiVersion": "v1", "kind": "Pod", "metadata": pod_metadata, "spec": spec}


def pod_count(title: str, path: str, spec: Document) -> int:
    """Return how many pods a workload has at the same time; one where it does not say."""
    if spec.get("replicas") is not None:
        return whole_number(title, f"{path}.replicas", spec["replicas"])
    given = [field for field in ("parallelism", "completions") if spec.get(field) is not None]
    counts = {field: whole_number(title, f"{path}.{field}", spec[field]) for field in given}
    # A Job never runs more pods than it has completions left.
    return min(counts.get("parallelism", 1), counts.get("completions", counts.get("parallelism", 1)))


def whole_number(title: str, field: str, value: Any) -> int:  # noqa: ANN401 - any YAML value
    # A bool is an int in Python.
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    example = "write it without quotes" if isinstance(value, str) and value.isdecimal() else "write one such as 2"
    raise CommandError(f"{title}: {field}: {printable(value)!r} is not a whole number of at least 0; {example}")


def decode_document(document: Document, into: type[T]) -> T:
    """Decode an object from a file into its struct; amounts that YAML reads as numbers become text."""
    status = mapping_at(document, "status")
    amounts = {key: {name: str(value) for name, value in mapping_at(status, key).items()} for key in AMOUNT_FIELDS}
    complete = document | {"status": status | {key: value for key, value in amounts.items() if value}}
    try:
        return convert(complete, into)
    except DECODE_ERRORS as error:
        name = mapping_at(document, "metadata").get("name", "")
        problem = describe_decode_error(error)
        raise CommandError(f"{document.get('kind', '')} {name}: {problem}") from None

"""What components need of a cluster, and no more.

Two tenants keep it: `cluster.api` (a Kubernetes API server) and `cluster.in_memory` (this process). One
conformance suite in `tests/cluster/` runs against both. Informers, leader election and events are written
once, on top of it.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from cluster.errors import Rejected
from cluster.objects import Kind, Object

T = TypeVar("T", bound=Object)


class ChangeType(StrEnum):
    """What a watch reports."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


class Change(Struct, Generic[T], frozen=True):
    """One report of a watch; of a bookmark, only the resource version is of use."""

    type: ChangeType
    object: T


class Listing(Struct, Generic[T], frozen=True):
    """All objects of a kind at one moment, and the version from which to watch on."""

    items: list[T]
    resource_version: str


class Selector(Struct, frozen=True):
    """Which objects of a kind: Kubernetes' label and field selectors, as text."""

    labels: str = ""
    fields: str = ""


EVERYTHING = Selector()


class Watch(Protocol[T]):
    """A running watch: iterate over it, and close it, from any thread, to end the iteration."""

    def __iter__(self) -> Iterator[Change[T]]:
        """Give the changes as they come; ends when the server ends the watch or it is closed."""

    def close(self) -> None:
        """End the watch, also while another thread waits on it."""


class Cluster(Protocol):
    """A cluster. Errors are those of `cluster.errors`, or Unavailable if it cannot be reached."""

    def bounded(self, timeout_s: float) -> "Cluster":
        """Give the same cluster with calls that take no longer than this."""

    def version(self) -> str:
        """Say which Kubernetes it is, as in v1.36.4."""

    def get(self, kind: Kind[T], name: str, namespace: str = "") -> T:
        """Read one object."""

    def list(self, kind: Kind[T], namespace: str = "", selector: Selector = EVERYTHING) -> Listing[T]:
        """Read all objects of a kind, of one namespace or of all."""

    def pages(self, kind: Kind[T], namespace: str = "", selector: Selector = EVERYTHING) -> Iterator[Listing[T]]:
        """Read all objects of a kind, some at a time, all at one version; Expired if that takes too long."""

    def watch(
        self,
        kind: Kind[T],
        since: str,
        namespace: str = "",
        selector: Selector = EVERYTHING,
        *,
        timeout_s: float = 300.0,
        silence_s: float = 150.0,
    ) -> Watch[T]:
        """Follow changes since a version, until the server ends the watch after `timeout_s`.

        A connection on which nothing arrives for `silence_s`, not even a bookmark, is taken for dead
        (Unavailable).
        """

    def create(self, kind: Kind[T], obj: T | Mapping[str, Any], *, dry_run: bool = False) -> T:
        """Make an object; a mapping is sent as it is, fields unknown to us included."""

    def update(self, kind: Kind[T], obj: T) -> T:
        """Replace an object that has not changed since it was read; Conflict if it has."""

    def patch(
        self, kind: Kind[T], name: str, namespace: str, changes: Mapping[str, Any], *, subresource: str = ""
    ) -> T:
        """Merge changes into an object (RFC 7386); a resourceVersion among them makes it compare-and-swap."""

    def apply(self, kind: Kind[T], found: T, fields: Mapping[str, Any], *, manager: str) -> T:
        """Make these fields of an object so, and own them under this manager's name (server-side apply, by force).

        Entries of a list are merged by their name, so the fields name just what is meant. Conflict if it is not the
        object any more that was found. A manager always gives all fields it owns: what it leaves out, it gives up.
        """

    def delete(
        self, kind: Kind[T], name: str, namespace: str = "", *, uid: str = "", grace_s: int | None = None
    ) -> None:
        """Delete an object; with a uid, only that very one."""

    def bind(self, pod: str, namespace: str, node: str, *, uid: str, annotations: Mapping[str, str]) -> None:
        """Give a pod its node, and annotations in the same write; Conflict if it has one."""


def check_address(kind: Kind[T], name: str, namespace: str) -> None:
    """Hold callers to naming one object: without a name the API would take the whole collection, deletes included."""
    if not name or (kind.namespaced and not namespace):
        raise TypeError(f"{kind.name}: name {name!r} and namespace {namespace!r} do not name one object")


def check_create(kind: Kind[T], metadata: Mapping[str, Any]) -> None:
    """Refuse what no API server would create, in the same words whoever is asked."""
    if kind.namespaced and not metadata.get("namespace"):
        raise Rejected(
            f"{kind.plural}: an empty namespace may not be set during creation", code=400, reason="BadRequest"
        )
    if metadata.get("resourceVersion"):
        raise Rejected("resourceVersion should not be set on objects to be created", code=400, reason="BadRequest")


def check_version(since: str) -> None:
    """Refuse to watch from what is no version."""
    if not since.isdecimal():
        raise Rejected(f"resourceVersion: {since!r} is no version", code=400, reason="BadRequest")


def check_update(kind: Kind[T], obj: T) -> None:
    """Hold callers to compare-and-swap and to whole objects; a breach is a fault of the program."""
    if kind.partial:
        raise TypeError(f"{kind.name} is read in part only: patch it, or fields unknown to us would be lost")
    if not obj.metadata.resource_version:
        raise TypeError(f"{kind.name} {obj.metadata.name}: an update needs the resourceVersion it was read at")

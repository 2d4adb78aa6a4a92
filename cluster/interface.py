"""What components need of a cluster, and no more.

There are two implementations: `cluster.api` (a Kubernetes API server) and `cluster.in_memory` (this process). One
conformance suite in `tests/cluster/` runs against both. Informers, leader election and events are written once, on top
of this interface.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from cluster.errors import Rejected
from cluster.objects import Kind, Object

T = TypeVar("T", bound=Object)


class ChangeType(StrEnum):
    """The event types of a watch."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


class Change(Struct, Generic[T], frozen=True):
    """One event of a watch; a bookmark's object has nothing but a resource version."""

    type: ChangeType
    object: T


class Listing(Struct, Generic[T], frozen=True):
    """Objects of a kind at one moment, and the resource version from which to watch."""

    items: list[T]
    resource_version: str


class Selector(Struct, frozen=True):
    """Kubernetes' label and field selectors, as text."""

    labels: str = ""
    fields: str = ""


EVERYTHING = Selector()


class Watch(Protocol[T]):
    """A running watch. Any thread may close it, which ends the iteration in another one."""

    def __iter__(self) -> Iterator[Change[T]]:
        """Yield changes until the server ends the watch or it is closed."""

    def close(self) -> None:
        """End the watch, also while another thread waits for its next change."""


class Cluster(Protocol):
    """A cluster. Calls raise the errors of `cluster.errors`, or Unavailable if the cluster cannot be reached."""

    def with_timeout(self, timeout_s: float) -> "Cluster":
        """Return the same cluster with another timeout for its calls."""

    def version(self) -> str:
        """Return the version of Kubernetes, such as v1.36.4."""

    def get(self, kind: Kind[T], name: str, namespace: str = "") -> T: ...

    def list(self, kind: Kind[T], namespace: str = "", selector: Selector = EVERYTHING) -> Listing[T]:
        """Return all objects of a kind, in one namespace or (if empty) in all."""

    def pages(self, kind: Kind[T], namespace: str = "", selector: Selector = EVERYTHING) -> Iterator[Listing[T]]:
        """Yield all objects of a kind, page by page at one resource version; Expired if that takes too long."""

    def watch(
        self,
        kind: Kind[T],
        since: str,
        namespace: str = "",
        selector: Selector = EVERYTHING,
        *,
        timeout_s: float = 300.0,
        idle_timeout_s: float = 150.0,
    ) -> Watch[T]:
        """Watch changes after a resource version, until the server ends the watch after `timeout_s`.

        Unavailable if nothing arrives for `idle_timeout_s`, not even a bookmark: the connection is dead.
        """

    def create(self, kind: Kind[T], obj: T | Mapping[str, Any], *, dry_run: bool = False) -> T:
        """Create an object; a mapping is sent as it is, with fields that our structs do not have."""

    def update(self, kind: Kind[T], obj: T) -> T:
        """Replace an object; Conflict if it changed since it was read."""

    def patch(
        self, kind: Kind[T], name: str, namespace: str, changes: Mapping[str, Any], *, subresource: str = ""
    ) -> T:
        """Merge changes into an object (RFC 7386); a resourceVersion among them makes it a compare-and-swap."""

    def apply(self, kind: Kind[T], current: T, fields: Mapping[str, Any], *, manager: str) -> T:
        """Set fields of an existing object by a forced server-side apply, owned by this field manager.

        Lists are merged by their entries' names. A manager has to pass all fields that it owns: those it leaves out are
        removed. Conflict if `current` was deleted or replaced by another object of the same name.
        """

    def delete(
        self, kind: Kind[T], name: str, namespace: str = "", *, uid: str = "", grace_s: int | None = None
    ) -> None:
        """Delete an object; with a uid, Conflict if the name belongs to another object by now."""

    def evict(self, pod: str, namespace: str, *, uid: str, dry_run: bool = False) -> None:
        """Delete a pod unless a PodDisruptionBudget forbids it: ApiError with code 429. A dry run only says so."""

    def bind(self, pod: str, namespace: str, node: str, *, uid: str, annotations: Mapping[str, str]) -> None:
        """Bind a pod to a node and set annotations in the same write; Conflict if it is bound already."""


def check_address(kind: Kind[T], name: str, namespace: str) -> None:
    """Reject an address without name or namespace: the API would take it for the whole collection, also in a delete."""
    if not name or (kind.namespaced and not namespace):
        raise TypeError(f"{kind.name}: name {name!r} and namespace {namespace!r} do not name one object")


def check_create(kind: Kind[T], metadata: Mapping[str, Any]) -> None:
    """Reject what an API server would, with its messages."""
    if kind.namespaced and not metadata.get("namespace"):
        raise Rejected(
            f"{kind.plural}: an empty namespace may not be set during creation", code=400, reason="BadRequest"
        )
    if metadata.get("resourceVersion"):
        raise Rejected("resourceVersion should not be set on objects to be created", code=400, reason="BadRequest")


def check_version(since: str) -> None:
    """Reject what is not a resource version: an API server takes an empty one for "from any version"."""
    if not since.isdecimal():
        raise Rejected(f"invalid resource version {since!r}", code=400, reason="BadRequest")


def check_update(kind: Kind[T], obj: T) -> None:
    """Reject updates that would lose data; TypeError, as this is a bug of the caller."""
    if kind.partial:
        raise TypeError(f"{kind.name} is decoded in part: patch it, an update would drop the fields we do not know")
    if not obj.metadata.resource_version:
        raise TypeError(f"{kind.name} {obj.metadata.name}: an update needs the resourceVersion it was read at")

"""A cluster in this process: what an API server does to objects, without one.

It is faithful where components can tell the difference: resource versions, uids, generated names, conflicts,
graceful deletion, watches that expire, and admission calls. It has no rights and no schemas.
"""

import copy
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

import msgspec

from cluster import in_memory_admission as admission
from cluster.errors import AlreadyExists, Conflict, NotFound, Rejected
from cluster.in_memory_admission import InMemoryWebhook, Operation
from cluster.in_memory_defaults import check_change, check_name, check_object, defaulted, well_formed
from cluster.in_memory_selectors import compile_selector
from cluster.in_memory_store import Key, StoreEntry, VersionedStore
from cluster.interface import (
    EVERYTHING,
    Change,
    ChangeType,
    Listing,
    Selector,
    check_address,
    check_create,
    check_update,
    check_version,
)
from cluster.objects import CONFIG_MAPS, EVENTS, LEASES, NAMESPACES, PODS, Kind, Object, Raw, binding
from vcuda.decoding import convert

T = TypeVar("T", bound=Object)

NAME_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
NAME_SUFFIX = 5
NAME_TRIES = 8
NAME_PREFIX = 63 - NAME_SUFFIX
SERVER_OWNED = ("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")
BOOKMARK_IDLE_S = 1.0
NAMESPACED: tuple[Kind[Any], ...] = (PODS, CONFIG_MAPS, EVENTS, LEASES)
FIRST_NAMESPACES = ("default", "kube-system")


class InMemoryCluster:
    """Keeps the interface of `cluster.interface` in memory. Safe for use by many threads."""

    def __init__(
        self, store: VersionedStore | None = None, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self.hooks: list[InMemoryWebhook] = []
        self._store = store or VersionedStore()
        self._now = now
        for name in FIRST_NAMESPACES:
            self.create(NAMESPACES, {"metadata": {"name": name}})

    def bounded(self, timeout_s: float) -> "InMemoryCluster":  # noqa: ARG002 - memory keeps nobody waiting
        """Give this cluster."""
        return self

    def version(self) -> str:
        """Say which Kubernetes it behaves like."""
        return "v1.36.4"

    def get(self, kind: Kind[T], name: str, namespace: str = "") -> T:
        """Read one object."""
        check_address(kind, name, namespace)
        return convert(self._existing(key_of(kind, namespace, name)), kind.type)

    def list(self, kind: Kind[T], namespace: str = "", selector: Selector = EVERYTHING) -> Listing[T]:
        """Read all objects of a kind."""
        selected = compile_selector(kind.plural, selector)
        found, version = self._store.all(kind.plural, namespace)
        return Listing([convert(obj, kind.type) for obj in found if selected(obj)], str(version))

    def pages(self, kind: Kind[T], namespace: str = "", selector: Selector = EVERYTHING) -> Iterator[Listing[T]]:
        """Read all objects of a kind, at once."""
        yield self.list(kind, namespace, selector)

    def watch(
        self,
        kind: Kind[T],
        since: str,
        namespace: str = "",
        selector: Selector = EVERYTHING,
        *,
        timeout_s: float = 300.0,
        silence_s: float = 150.0,  # noqa: ARG002 - memory does not fall silent
    ) -> "InMemoryWatch[T]":
        """Follow changes since a version."""
        check_version(since)
        deadline = time.monotonic() + timeout_s
        return InMemoryWatch(self._store, kind, int(since), namespace, selector=selector, deadline=deadline)

    def create(self, kind: Kind[T], obj: T | Mapping[str, Any], *, dry_run: bool = False) -> T:
        """Make an object: mutate, name, validate, store, as the API server does and in that order."""
        given = copy.deepcopy(dict(obj)) if isinstance(obj, Mapping) else msgspec.to_builtins(obj)
        raw = well_formed(kind, {"apiVersion": kind.api_version, "kind": kind.name, **given})
        check_create(kind, raw["metadata"])
        if kind.plural == PODS.plural:
            raw.pop("status", None)
        for _ in range(NAME_TRIES):
            try:
                return convert(self._create(kind, copy.deepcopy(raw), dry_run=dry_run), kind.type)
            except AlreadyExists:
                if raw["metadata"].get("name") or not raw["metadata"].get("generateName"):
                    raise
        raise AlreadyExists(f"{kind.plural}: no free name was found", code=409, reason="AlreadyExists")

    def _create(self, kind: Kind[T], raw: Raw, *, dry_run: bool) -> Raw:
        namespace = raw["metadata"].get("namespace", "") if kind.namespaced else ""
        self._check_namespace(kind, namespace)
        raw = defaulted(kind, raw)
        operation = Operation(
            "CREATE",
            kind.api_version,
            kind.name,
            kind.plural,
            namespace,
            raw["metadata"].get("name", ""),
            dry_run=dry_run,
        )
        raw = defaulted(kind, admission.mutate(self.hooks, operation, raw))
        raw["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": timestamp(self._now()), "generation": 1}
        raw["metadata"].pop("deletionTimestamp", None)
        if not raw["metadata"].get("name") and raw["metadata"].get("generateName"):
            raw["metadata"]["name"] = raw["metadata"]["generateName"][:NAME_PREFIX] + generated_suffix()
        name = check_name(kind, raw["metadata"].get("name", ""))
        admission.validate(self.hooks, msgspec.structs.replace(operation, name=name), raw)
        check_object(kind, raw)
        with self._store.lock:
            key = key_of(kind, namespace, name)
            if self._store.get(key) is not None:
                raise AlreadyExists(f'{kind.plural} "{name}" already exists', code=409, reason="AlreadyExists")
            self._check_namespace(kind, namespace)
            return raw if dry_run else self._store.put(key, raw)

    def update(self, kind: Kind[T], obj: T) -> T:
        """Replace an object, if it is still the one that was read."""
        check_update(kind, obj)
        raw = {"apiVersion": kind.api_version, "kind": kind.name, **msgspec.to_builtins(obj)}
        key = key_of(kind, obj.metadata.namespace, obj.metadata.name)
        return convert(self._write(kind, key, lambda _: raw), kind.type)

    def patch(
        self, kind: Kind[T], name: str, namespace: str, changes: Mapping[str, Any], *, subresource: str = ""
    ) -> T:
        """Merge changes into an object; status and the rest are written apart, as on the API."""
        check_address(kind, name, namespace)
        wanted = dict(changes)
        split = "status" in kind.subresources
        if subresource == "status":
            wanted = {part: wanted[part] for part in ("metadata", "status") if part in wanted}
        elif split:
            wanted.pop("status", None)
        key = key_of(kind, namespace, name)
        written = self._write(kind, key, lambda old: merged(old, wanted), subresource=subresource)
        return convert(written, kind.type)

    def apply(self, kind: Kind[T], found: T, fields: Mapping[str, Any], *, manager: str) -> T:  # noqa: ARG002 - memory does not remember who wrote what
        """Make these fields so."""
        key = key_of(kind, found.metadata.namespace, found.metadata.name)
        same = {"metadata": {"uid": found.metadata.uid, **(fields.get("metadata") or {})}}
        try:
            written = self._write(kind, key, lambda old: merged(old, {**fields, **same}, merge_list=by_name))
        except NotFound:
            raise conflict(kind, key) from None
        return convert(written, kind.type)

    def _write(self, kind: Kind[T], key: Key, change: Callable[[Raw], Raw], *, subresource: str = "") -> Raw:
        """Change an object as a compare-and-swap: admission is asked outside the lock, then versions compared."""
        while True:
            old = self._existing(key)
            new = self._changed(kind, key, old, change(old))
            operation = Operation(
                "UPDATE", kind.api_version, kind.name, kind.plural, key[1], key[2], subresource, old=old
            )
            new = defaulted(kind, well_formed(kind, admission.mutate(self.hooks, operation, new)))
            if not subresource:
                check_change(kind, old, new)
            admission.validate(self.hooks, operation, new)
            check_object(kind, new)
            with self._store.lock:
                current = self._existing(key)
                if current["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]:
                    continue  # somebody wrote meanwhile: merge again, or find the conflict
                written = self._store.put(key, new)
                if written["metadata"].get("deletionTimestamp") and not written["metadata"].get("finalizers"):
                    self._finish(kind, key, written)
                return written

    @staticmethod
    def _changed(kind: Kind[T], key: Key, old: Raw, wanted: Raw) -> Raw:
        """Take what a caller wants an object to be, but for what is the server's own."""
        new = well_formed(kind, wanted)
        metadata = dict(new["metadata"])
        for field in ("resourceVersion", "uid"):
            if metadata.setdefault(field, old["metadata"][field]) != old["metadata"][field]:
                raise conflict(kind, key)
        kept = {field: old["metadata"][field] for field in SERVER_OWNED if field in old["metadata"]}
        metadata = {field: value for field, value in metadata.items() if field not in SERVER_OWNED} | kept
        return new | {"metadata": metadata}

    def _finish(self, kind: Kind[T], key: Key, obj: Raw) -> None:
        """Remove an object that only waited for its finalizers; a pod waits for its kubelet as well."""
        if kind.plural != PODS.plural or not obj["metadata"].get("deletionGracePeriodSeconds"):
            self._store.remove(key)
            self._settle_namespace(key[1])

    def delete(
        self, kind: Kind[T], name: str, namespace: str = "", *, uid: str = "", grace_s: int | None = None
    ) -> None:
        """Delete an object: at once, or marked if it has finalizers or a kubelet still has to stop it."""
        check_address(kind, name, namespace)
        key = key_of(kind, namespace, name)
        operation = Operation("DELETE", kind.api_version, kind.name, kind.plural, key[1], name, old=self._existing(key))
        admission.validate(self.hooks, operation, None)
        with self._store.lock:
            old = self._existing(key)
            if uid and old["metadata"]["uid"] != uid:
                raise conflict(kind, key)
            self._mark_or_remove(kind, key, old, grace_s)
            if kind.plural == NAMESPACES.plural:
                self._empty(name)

    def _mark_or_remove(self, kind: Kind[T], key: Key, old: Raw, grace_s: int | None) -> None:
        """Mark or remove an object; a later delete can cut a kubelet's grace short, and never make it longer."""
        metadata = old["metadata"]
        grace = grace_of(kind, old)
        if grace and grace_s is not None:
            grace = grace_s
        if metadata.get("deletionTimestamp"):
            grace = min(grace, metadata.get("deletionGracePeriodSeconds", 0))
        waits = metadata.get("finalizers") or kind.plural == NAMESPACES.plural
        if not grace and not waits:
            self._store.remove(key)
            self._settle_namespace(key[1])
        elif not metadata.get("deletionTimestamp") or grace != metadata.get("deletionGracePeriodSeconds"):
            marks = {
                "deletionTimestamp": timestamp(self._now() + timedelta(seconds=grace)),
                "deletionGracePeriodSeconds": grace,
            }
            phase = {"status": {"phase": "Terminating"}} if kind.plural == NAMESPACES.plural else {}
            self._store.put(key, old | phase | {"metadata": metadata | marks})

    def _empty(self, namespace: str) -> None:
        """Remove what a doomed namespace holds, and the namespace itself unless finalizers hold something back."""
        for kind in NAMESPACED:
            for obj in self._store.all(kind.plural, namespace)[0]:
                key = key_of(kind, namespace, obj["metadata"]["name"])
                if obj["metadata"].get("finalizers"):
                    self._mark_or_remove(kind, key, obj, 0)
                else:
                    self._store.remove(key)
        self._settle_namespace(namespace)

    def _settle_namespace(self, namespace: str) -> None:
        """End a doomed namespace once nothing is left in it."""
        key = key_of(NAMESPACES, "", namespace)
        found = self._store.get(key)
        if found is None or not found["metadata"].get("deletionTimestamp"):
            return
        if not any(self._store.all(kind.plural, namespace)[0] for kind in NAMESPACED):
            self._store.remove(key)

    def bind(self, pod: str, namespace: str, node: str, *, uid: str, annotations: Mapping[str, str]) -> None:
        """Give a pod its node and the annotations in one write."""
        check_address(PODS, pod, namespace)
        key = key_of(PODS, namespace, pod)
        operation = Operation("CREATE", "v1", "Binding", PODS.plural, namespace, pod, "binding")
        asked = admission.mutate(self.hooks, operation, binding(pod, namespace, node, uid, annotations))
        admission.validate(self.hooks, operation, asked)
        with self._store.lock:
            old = self._existing(key)
            if uid and old["metadata"]["uid"] != uid:
                raise conflict(PODS, key)
            if at := old["spec"].get("nodeName"):
                raise Conflict(f"pod {pod} is already assigned to node {at!r}", code=409, reason="Conflict")
            if old["metadata"].get("deletionTimestamp"):
                raise Conflict(f"pod {pod} is being deleted, cannot be assigned to a host", code=409, reason="Conflict")
            if old["spec"].get("schedulingGates"):
                raise Conflict(f"pod {pod} has non-empty .spec.schedulingGates", code=409, reason="Conflict")
            given = {"annotations": asked["metadata"].get("annotations") or {}}
            self._store.put(key, merged(old, {"metadata": given, "spec": {"nodeName": asked["target"]["name"]}}))

    def _existing(self, key: Key) -> Raw:
        found = self._store.get(key)
        if found is None:
            raise NotFound(f'{key[0]} "{key[2]}" not found', code=404, reason="NotFound")
        return found

    def _check_namespace(self, kind: Kind[T], namespace: str) -> None:
        if not kind.namespaced:
            return
        found = self._existing(key_of(NAMESPACES, "", namespace))
        if found["metadata"].get("deletionTimestamp"):
            message = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise Rejected(message, code=403, reason="Forbidden")


class InMemoryWatch(Generic[T]):
    """A watch on the store, seen through a selector: leaving it looks like a deletion, entering like a creation."""

    def __init__(
        self, store: VersionedStore, kind: Kind[T], since: int, namespace: str, *, selector: Selector, deadline: float
    ) -> None:
        self._store, self._kind, self._since, self._deadline = store, kind, since, deadline
        self._namespace, self._condition, self._closed = namespace, compile_selector(kind.plural, selector), False

    def __iter__(self) -> Iterator[Change[T]]:
        """Give the changes as they come, and a bookmark when it has been quiet."""
        for entry in self._store.follow(self._since, self._deadline, lambda: self._closed, BOOKMARK_IDLE_S):
            if entry is None:
                yield self._bookmark(self._since)
                continue
            self._since = entry.version
            if change := self._seen(entry):
                yield change

    def close(self) -> None:
        """End the watch."""
        self._closed = True
        with self._store.lock:
            self._store.lock.notify_all()

    def _seen(self, entry: StoreEntry) -> Change[T] | None:
        if entry.plural != self._kind.plural:
            return None
        before, after = self._selected(entry.old), self._selected(entry.new)
        if not before and not after:
            return None
        kinds = {(True, True): ChangeType.MODIFIED, (False, True): ChangeType.ADDED, (True, False): ChangeType.DELETED}
        # Leaving a selector shows the last state that was within it, at the version at which it left.
        state = entry.last if after or entry.old is None else entry.old
        metadata = state["metadata"] | {"resourceVersion": str(entry.version)}
        return Change(kinds[before, after], convert(state | {"metadata": metadata}, self._kind.type))

    def _selected(self, obj: Raw | None) -> bool:
        if obj is None or self._namespace not in ("", obj["metadata"].get("namespace", "")):
            return False
        return self._condition(obj)

    def _bookmark(self, version: int) -> Change[T]:
        mark = {"metadata": {"resourceVersion": str(version)}}
        return Change(ChangeType.BOOKMARK, convert(mark, self._kind.type))


def key_of(kind: Kind[T], namespace: str, name: str) -> Key:
    """Address an object in the store."""
    return kind.plural, namespace if kind.namespaced else "", name


def conflict(kind: Kind[T], key: Key) -> Conflict:
    """Say that an object is not what the caller took it for."""
    message = f'Operation cannot be fulfilled on {kind.plural} "{key[2]}": the object has been modified'
    return Conflict(message, code=409, reason="Conflict")


def merged(target: Raw, changes: Mapping[str, Any], merge_list: Callable[[Any, Any], Any] = lambda _, new: new) -> Raw:
    """Apply a JSON merge patch (RFC 7386): null removes, objects merge, the rest replaces, but for lists if asked."""
    result = dict(target)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            inner = result.get(key)
            result[key] = merged(inner if isinstance(inner, dict) else {}, value, merge_list)
        else:
            result[key] = merge_list(result.get(key), value)
    return result


def by_name(old: Any, new: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    """Merge lists whose entries have names, entry by entry; anything else is replaced."""
    if not (isinstance(old, list) and isinstance(new, list) and all(isinstance(each, dict) for each in old + new)):
        return new
    wanted = {each["name"]: each for each in new if "name" in each}
    known = {each.get("name") for each in old}
    changed = [merged(each, wanted.get(each.get("name"), {}), by_name) for each in old]
    return changed + [each for each in new if each.get("name") not in known]


def grace_of(kind: Kind[T], obj: Raw) -> int:
    """How long a kubelet gets to stop a pod; nothing waits for a pod without a node or one that has ended."""
    ended = obj.get("status", {}).get("phase") in ("Succeeded", "Failed")
    if kind.plural != PODS.plural or not obj["spec"].get("nodeName") or ended:
        return 0
    return int(obj["spec"].get("terminationGracePeriodSeconds", 30))


def generated_suffix() -> str:
    """Draw the random part of a generated name, from the letters that the API server uses."""
    return "".join(random.choices(NAME_ALPHABET, k=NAME_SUFFIX))


def timestamp(moment: datetime) -> str:
    """Write a time as the API does."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

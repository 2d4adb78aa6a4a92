"""The in-memory cluster: what an API server does to objects, within this process.

It behaves like one where components can tell the difference: resource versions, uids, generated names, conflicts,
graceful deletion, watches that expire, and admission. It has no authorization, and of schemas only our own structs.
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
from cluster.in_memory_defaults import apply_defaults, check_change, check_name, check_object, normalize
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

# Generated names as the API server makes them: no vowels, so no words, and short enough to be a label's value.
NAME_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
NAME_SUFFIX = 5
# If a generated name is taken, another one is tried, as often as the API server does.
NAME_ATTEMPTS = 8
MAX_NAME_PREFIX = 63 - NAME_SUFFIX
# Fields of the metadata that clients cannot change.
SERVER_OWNED = ("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")
# An API server sends bookmarks about once a minute; tests should not wait that long.
BOOKMARK_IDLE_S = 1.0
# The kinds that are deleted with their namespace.
NAMESPACED: tuple[Kind[Any], ...] = (PODS, CONFIG_MAPS, EVENTS, LEASES)
INITIAL_NAMESPACES = ("default", "kube-system")


class InMemoryCluster:
    """Implements `cluster.interface.Cluster` in memory. Thread-safe."""

    def __init__(
        self, store: VersionedStore | None = None, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self.hooks: list[InMemoryWebhook] = []
        self._store = store or VersionedStore()
        self._now = now
        for name in INITIAL_NAMESPACES:
            self.create(NAMESPACES, {"metadata": {"name": name}})

    def with_timeout(self, timeout_s: float) -> "InMemoryCluster":  # noqa: ARG002 - no call waits for anything
        return self

    def version(self) -> str:
        # The conformance suite runs against this version.
        return "v1.36.4"

    def get(self, kind: Kind[T], name: str, namespace: str = "") -> T:
        check_address(kind, name, namespace)
        return convert(self._existing(key_of(kind, namespace, name)), kind.type)

    def list(self, kind: Kind[T], namespace: str = "", selector: Selector = EVERYTHING) -> Listing[T]:
        is_selected = compile_selector(kind.plural, selector)
        objects, version = self._store.all(kind.plural, namespace)
        return Listing([convert(obj, kind.type) for obj in objects if is_selected(obj)], str(version))

    def pages(self, kind: Kind[T], namespace: str = "", selector: Selector = EVERYTHING) -> Iterator[Listing[T]]:
        yield self.list(kind, namespace, selector)

    def watch(
        self,
        kind: Kind[T],
        since: str,
        namespace: str = "",
        selector: Selector = EVERYTHING,
        *,
        timeout_s: float = 300.0,
        idle_timeout_s: float = 150.0,  # noqa: ARG002 - bookmarks come every second
    ) -> "InMemoryWatch[T]":
        check_version(since)
        deadline = time.monotonic() + timeout_s
        return InMemoryWatch(self._store, kind, int(since), namespace, selector=selector, deadline=deadline)

    def create(self, kind: Kind[T], obj: T | Mapping[str, Any], *, dry_run: bool = False) -> T:
        given = copy.deepcopy(dict(obj)) if isinstance(obj, Mapping) else msgspec.to_builtins(obj)
        raw = normalize(kind, {"apiVersion": kind.api_version, "kind": kind.name, **given})
        check_create(kind, raw["metadata"])
        if kind.plural == PODS.plural:
            # Status is a subresource: in a create it is ignored.
            raw.pop("status", None)
        for _ in range(NAME_ATTEMPTS):
            try:
                return convert(self._create(kind, copy.deepcopy(raw), dry_run=dry_run), kind.type)
            except AlreadyExists:
                if raw["metadata"].get("name") or not raw["metadata"].get("generateName"):
                    raise
        raise AlreadyExists(f"{kind.plural}: no free name was found", code=409, reason="AlreadyExists")

    def _create(self, kind: Kind[T], raw: Raw, *, dry_run: bool) -> Raw:
        """Mutate, name, validate and store an object, in the API server's order.

        So mutating webhooks see no name (if it is generated) and no uid, and validating webhooks see both.
        """
        namespace = raw["metadata"].get("namespace", "") if kind.namespaced else ""
        self._check_namespace(kind, namespace)
        raw = apply_defaults(kind, raw)
        operation = Operation(
            "CREATE",
            kind.api_version,
            kind.name,
            kind.plural,
            namespace,
            raw["metadata"].get("name", ""),
            dry_run=dry_run,
        )
        # Defaults again, for what webhooks added.
        raw = apply_defaults(kind, admission.mutate(self.hooks, operation, raw))
        created_at = format_timestamp(self._now())
        raw["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": created_at, "generation": 1}
        raw["metadata"].pop("deletionTimestamp", None)
        if not raw["metadata"].get("name") and raw["metadata"].get("generateName"):
            raw["metadata"]["name"] = raw["metadata"]["generateName"][:MAX_NAME_PREFIX] + random_suffix()
        name = check_name(kind, raw["metadata"].get("name", ""))
        admission.validate(self.hooks, msgspec.structs.replace(operation, name=name), raw)
        check_object(kind, raw)
        with self._store.lock:
            key = key_of(kind, namespace, name)
            if self._store.get(key) is not None:
                raise AlreadyExists(f'{kind.plural} "{name}" already exists', code=409, reason="AlreadyExists")
            # Again: the namespace may have been deleted while webhooks were called.
            self._check_namespace(kind, namespace)
            return raw if dry_run else self._store.put(key, raw)

    def update(self, kind: Kind[T], obj: T) -> T:
        check_update(kind, obj)
        raw = {"apiVersion": kind.api_version, "kind": kind.name, **msgspec.to_builtins(obj)}
        key = key_of(kind, obj.metadata.namespace, obj.metadata.name)
        return convert(self._write(kind, key, lambda _: raw), kind.type)

    def patch(
        self, kind: Kind[T], name: str, namespace: str, changes: Mapping[str, Any], *, subresource: str = ""
    ) -> T:
        check_address(kind, name, namespace)
        effective = dict(changes)
        # Status and the rest are written by separate requests; each of them ignores the other's fields.
        if subresource == "status":
            effective = {part: effective[part] for part in ("metadata", "status") if part in effective}
        elif "status" in kind.subresources:
            effective.pop("status", None)
        key = key_of(kind, namespace, name)
        written = self._write(kind, key, lambda old: merge_patch(old, effective), subresource=subresource)
        return convert(written, kind.type)

    def apply(self, kind: Kind[T], current: T, fields: Mapping[str, Any], *, manager: str) -> T:  # noqa: ARG002 - fields have no recorded owners
        key = key_of(kind, current.metadata.namespace, current.metadata.name)
        identity = {"metadata": {"uid": current.metadata.uid, **(fields.get("metadata") or {})}}
        try:
            written = self._write(kind, key, lambda old: merge_patch(old, {**fields, **identity}, merge_by_name))
        except NotFound:
            raise conflict_error(kind, key) from None
        return convert(written, kind.type)

    def _write(self, kind: Kind[T], key: Key, change: Callable[[Raw], Raw], *, subresource: str = "") -> Raw:
        """Change an object by compare-and-swap: webhooks must not be called under the lock, as they may write too."""
        while True:
            old = self._existing(key)
            new = self._with_server_fields(kind, key, old, change(old))
            operation = Operation(
                "UPDATE", kind.api_version, kind.name, kind.plural, key[1], key[2], subresource, old=old
            )
            new = apply_defaults(kind, normalize(kind, admission.mutate(self.hooks, operation, new)))
            if not subresource:
                check_change(kind, old, new)
            admission.validate(self.hooks, operation, new)
            check_object(kind, new)
            with self._store.lock:
                current = self._existing(key)
                if current["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]:
                    continue  # changed in the meantime: a patch is merged again, an update finds its conflict
                written = self._store.put(key, new)
                if written["metadata"].get("deletionTimestamp") and not written["metadata"].get("finalizers"):
                    self._remove_finalized(kind, key, written)
                return written

    @staticmethod
    def _with_server_fields(kind: Kind[T], key: Key, old: Raw, changed: Raw) -> Raw:
        """Return a changed object with the fields that belong to the server; Conflict if it is not based on `old`."""
        new = normalize(kind, changed)
        metadata = dict(new["metadata"])
        for field in ("resourceVersion", "uid"):
            if metadata.setdefault(field, old["metadata"][field]) != old["metadata"][field]:
                raise conflict_error(kind, key)
        kept = {field: old["metadata"][field] for field in SERVER_OWNED if field in old["metadata"]}
        metadata = {field: value for field, value in metadata.items() if field not in SERVER_OWNED} | kept
        return new | {"metadata": metadata}

    def _remove_finalized(self, kind: Kind[T], key: Key, obj: Raw) -> None:
        """Remove an object that was only waiting for its finalizers; a pod waits for its kubelet as well."""
        if kind.plural != PODS.plural or not obj["metadata"].get("deletionGracePeriodSeconds"):
            self._store.remove(key)
            self._remove_if_empty(key[1])

    def delete(
        self, kind: Kind[T], name: str, namespace: str = "", *, uid: str = "", grace_s: int | None = None
    ) -> None:
        check_address(kind, name, namespace)
        key = key_of(kind, namespace, name)
        operation = Operation("DELETE", kind.api_version, kind.name, kind.plural, key[1], name, old=self._existing(key))
        admission.validate(self.hooks, operation, None)
        with self._store.lock:
            # Read again: webhooks were called without the lock.
            old = self._existing(key)
            if uid and old["metadata"]["uid"] != uid:
                raise conflict_error(kind, key)
            self._mark_or_remove(kind, key, old, grace_s)
            if kind.plural == NAMESPACES.plural:
                self._delete_contents(name)

    def _mark_or_remove(self, kind: Kind[T], key: Key, old: Raw, grace_s: int | None) -> None:
        """Remove an object, or only mark it if it has finalizers or a kubelet has to stop it first."""
        metadata = old["metadata"]
        grace = grace_period_s(kind, old)
        if grace and grace_s is not None:
            grace = grace_s
        if metadata.get("deletionTimestamp"):
            # A second delete can shorten the grace period, but never extend it.
            grace = min(grace, metadata.get("deletionGracePeriodSeconds", 0))
        has_to_wait = metadata.get("finalizers") or kind.plural == NAMESPACES.plural
        if not grace and not has_to_wait:
            self._store.remove(key)
            self._remove_if_empty(key[1])
        elif not metadata.get("deletionTimestamp") or grace != metadata.get("deletionGracePeriodSeconds"):
            marks = {
                "deletionTimestamp": format_timestamp(self._now() + timedelta(seconds=grace)),
                "deletionGracePeriodSeconds": grace,
            }
            phase = {"status": {"phase": "Terminating"}} if kind.plural == NAMESPACES.plural else {}
            self._store.put(key, old | phase | {"metadata": metadata | marks})

    def _delete_contents(self, namespace: str) -> None:
        """Delete the objects of a terminating namespace, and the namespace itself unless finalizers keep an object."""
        for kind in NAMESPACED:
            for obj in self._store.all(kind.plural, namespace)[0]:
                key = key_of(kind, namespace, obj["metadata"]["name"])
                # Bound pods are removed at once as well, without waiting for a kubelet.
                if obj["metadata"].get("finalizers"):
                    self._mark_or_remove(kind, key, obj, 0)
                else:
                    self._store.remove(key)
        self._remove_if_empty(namespace)

    def _remove_if_empty(self, namespace: str) -> None:
        """Remove a terminating namespace once no object is left in it."""
        key = key_of(NAMESPACES, "", namespace)
        stored = self._store.get(key)
        if stored is None or not stored["metadata"].get("deletionTimestamp"):
            return
        # Every removal in the namespace ends here, so the last one removes the namespace.
        if not any(self._store.all(kind.plural, namespace)[0] for kind in NAMESPACED):
            self._store.remove(key)

    def evict(self, pod: str, namespace: str, *, uid: str, dry_run: bool = False) -> None:
        # There is no controller that would keep the status of budgets up to date, so none forbids anything.
        if not dry_run:
            self.delete(PODS, pod, namespace, uid=uid)
        elif self._existing(key_of(PODS, namespace, pod))["metadata"]["uid"] != uid:
            raise conflict_error(PODS, key_of(PODS, namespace, pod))

    def bind(self, pod: str, namespace: str, node: str, *, uid: str, annotations: Mapping[str, str]) -> None:
        check_address(PODS, pod, namespace)
        key = key_of(PODS, namespace, pod)
        operation = Operation("CREATE", "v1", "Binding", PODS.plural, namespace, pod, "binding")
        admitted = admission.mutate(self.hooks, operation, binding(pod, namespace, node, uid, annotations))
        admission.validate(self.hooks, operation, admitted)
        with self._store.lock:
            old = self._existing(key)
            if uid and old["metadata"]["uid"] != uid:
                raise conflict_error(PODS, key)
            if bound_to := old["spec"].get("nodeName"):
                raise Conflict(f"pod {pod} is already assigned to node {bound_to!r}", code=409, reason="Conflict")
            if old["metadata"].get("deletionTimestamp"):
                raise Conflict(f"pod {pod} is being deleted, cannot be assigned to a host", code=409, reason="Conflict")
            if old["spec"].get("schedulingGates"):
                raise Conflict(f"pod {pod} has non-empty .spec.schedulingGates", code=409, reason="Conflict")
            metadata = {"annotations": admitted["metadata"].get("annotations") or {}}
            spec = {"nodeName": admitted["target"]["name"]}
            self._store.put(key, merge_patch(old, {"metadata": metadata, "spec": spec}))

    def _existing(self, key: Key) -> Raw:
        stored = self._store.get(key)
        if stored is None:
            raise NotFound(f'{key[0]} "{key[2]}" not found', code=404, reason="NotFound")
        return stored

    def _check_namespace(self, kind: Kind[T], namespace: str) -> None:
        if not kind.namespaced:
            return
        stored = self._existing(key_of(NAMESPACES, "", namespace))
        if stored["metadata"].get("deletionTimestamp"):
            message = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise Rejected(message, code=403, reason="Forbidden")


class InMemoryWatch(Generic[T]):
    """A watch on the store through a selector: an object that stops matching is reported as deleted."""

    def __init__(
        self, store: VersionedStore, kind: Kind[T], since: int, namespace: str, *, selector: Selector, deadline: float
    ) -> None:
        self._store, self._kind, self._since, self._deadline = store, kind, since, deadline
        self._namespace, self._condition, self._closed = namespace, compile_selector(kind.plural, selector), False

    def __iter__(self) -> Iterator[Change[T]]:
        for entry in self._store.follow(self._since, self._deadline, lambda: self._closed, BOOKMARK_IDLE_S):
            if entry is None:
                yield self._bookmark(self._since)
                continue
            self._since = entry.version
            if change := self._change_of(entry):
                yield change

    def close(self) -> None:
        self._closed = True
        # Wakes the thread that waits for the next write.
        with self._store.lock:
            self._store.lock.notify_all()

    def _change_of(self, entry: StoreEntry) -> Change[T] | None:
        """Return a write as this watch sees it; None if it does not concern its kind, namespace or selector."""
        if entry.plural != self._kind.plural:
            return None
        before, after = self._is_selected(entry.old), self._is_selected(entry.new)
        if not before and not after:
            return None
        types = {(True, True): ChangeType.MODIFIED, (False, True): ChangeType.ADDED, (True, False): ChangeType.DELETED}
        # An object that stops matching is reported in its last matching state, but at the version of this write.
        state = entry.last if after or entry.old is None else entry.old
        metadata = state["metadata"] | {"resourceVersion": str(entry.version)}
        return Change(types[before, after], convert(state | {"metadata": metadata}, self._kind.type))

    def _is_selected(self, obj: Raw | None) -> bool:
        if obj is None or self._namespace not in ("", obj["metadata"].get("namespace", "")):
            return False
        return self._condition(obj)

    def _bookmark(self, version: int) -> Change[T]:
        bookmark = {"metadata": {"resourceVersion": str(version)}}
        return Change(ChangeType.BOOKMARK, convert(bookmark, self._kind.type))


def key_of(kind: Kind[T], namespace: str, name: str) -> Key:
    return kind.plural, namespace if kind.namespaced else "", name


def conflict_error(kind: Kind[T], key: Key) -> Conflict:
    advice = "please apply your changes to the latest version and try again"
    message = f'Operation cannot be fulfilled on {kind.plural} "{key[2]}": the object has been modified; {advice}'
    return Conflict(message, code=409, reason="Conflict")


def merge_patch(
    target: Raw, changes: Mapping[str, Any], merge_list: Callable[[Any, Any], Any] = lambda _, new: new
) -> Raw:
    """Return a target with a JSON merge patch (RFC 7386) applied; lists are replaced unless `merge_list` is given."""
    result = dict(target)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping):
            inner = result.get(key)
            result[key] = merge_patch(inner if isinstance(inner, dict) else {}, value, merge_list)
        else:
            result[key] = merge_list(result.get(key), value)
    return result


def merge_by_name(old: Any, new: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Merge lists of objects entry by entry, by their names, as server-side apply does; replace other values."""
    if not (isinstance(old, list) and isinstance(new, list) and all(isinstance(each, dict) for each in old + new)):
        return new
    changes = {each["name"]: each for each in new if "name" in each}
    known = {each.get("name") for each in old}
    changed = [merge_patch(each, changes.get(each.get("name"), {}), merge_by_name) for each in old]
    return changed + [each for each in new if each.get("name") not in known]


def grace_period_s(kind: Kind[T], obj: Raw) -> int:
    """Return how long a kubelet has to stop a pod; 0 if no kubelet runs it."""
    has_ended = obj.get("status", {}).get("phase") in ("Succeeded", "Failed")
    if kind.plural != PODS.plural or not obj["spec"].get("nodeName") or has_ended:
        return 0
    return int(obj["spec"].get("terminationGracePeriodSeconds", 30))


def random_suffix() -> str:
    return "".join(random.choices(NAME_ALPHABET, k=NAME_SUFFIX))


def format_timestamp(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")

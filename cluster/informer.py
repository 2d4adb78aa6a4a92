"""A cache of all objects of one kind, kept up to date by list and watch.

List, then watch from the list's resource version; after any error, list again. A list replaces the whole cache, and the
handlers are called for every difference, deletions included. So an expired resource version or a restarted API server
loses no change. `age_s` tells how long ago the cluster was last in contact.
"""

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import structlog
from msgspec import Struct

from cluster.backoff import Backoff, jittered
from cluster.errors import ApiError
from cluster.interface import EVERYTHING, Change, ChangeType, Cluster, Selector, Watch
from cluster.objects import Kind, Object
from vcuda.decision import Unavailable

T = TypeVar("T", bound=Object)

# A watch that ends sooner than this, and without a change, was closed by a proxy or an API server that shuts down.
SHORT_WATCH_S = 1.0

# Namespace and name.
Name = tuple[str, str]
# Called with the object before and after a change; None where it did not exist.
Handler = Callable[[T | None, T | None], None]


class InformerTimings(Struct, frozen=True):
    """How long an informer watches, and waits."""

    # Shorter than the idle timeout: a kind that has not changed since the API server started gets no bookmarks either,
    # and then the regular end of a watch is the only sign that the connection works.
    watch_s: float = 100.0
    idle_timeout_s: float = 130.0
    relist_s: float = 600.0
    backoff: Backoff = Backoff(first_s=0.5, max_s=30.0)


class Informer(Generic[T]):
    """Caches the objects of a kind (in a namespace, with a selector). Reads are thread-safe.

    Handlers are called one after another on the informer's own thread. What they raise is logged and counted. With
    `convert`, its results are cached instead of the objects; objects for which it returns None are left out.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: Kind[T],
        namespace: str = "",
        selector: Selector = EVERYTHING,
        *,
        indexes: Mapping[str, Callable[[T], Hashable]] | None = None,
        convert: Callable[[Any], T | None] | None = None,
        timings: InformerTimings | None = None,
    ) -> None:
        self._cluster, self._kind, self._namespace, self._selector = cluster, kind, namespace, selector
        self._timings = timings or InformerTimings()
        self._convert = convert
        self._handlers: list[Handler[T]] = []
        # Guards objects and indexes, which readers must see in the same state. Only the informer's thread writes them.
        self._lock = threading.Lock()
        self._objects: dict[Name, T] = {}
        self._index_keys = dict(indexes or {})
        self._indexes: dict[str, dict[Hashable, dict[Name, T]]] = {index: {} for index in self._index_keys}
        self._synced = threading.Event()
        self._stopping = threading.Event()
        self._watch: Watch[T] | None = None
        self._last_contact = time.monotonic()
        self._version = 0
        self.handler_errors = 0
        self.relists = 0
        self._log = structlog.get_logger().bind(informer=kind.plural)
        self._thread = threading.Thread(target=self._run, name=f"informer-{kind.plural}", daemon=True)

    def on_change(self, handler: Handler[T]) -> None:
        """Add a handler; only before `start`."""
        self._handlers.append(handler)

    def start(self) -> "Informer[T]":
        self._thread.start()
        return self

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop, and wait for the thread, which may be in a handler."""
        self._stopping.set()
        if self._watch is not None:
            self._watch.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def wait_synced(self, timeout_s: float) -> bool:
        """Wait for the first list; False if it is not in the cache in time."""
        return self._synced.wait(timeout_s)

    @property
    def synced(self) -> bool:
        """Whether the first list is in the cache."""
        return self._synced.is_set()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def version(self) -> int:
        """The resource version up to which all changes are in the cache."""
        return self._version

    def age_s(self) -> float:
        """Return how long ago the cluster was last in contact: the cache may be that much out of date."""
        return time.monotonic() - self._last_contact

    def get(self, name: str, namespace: str = "") -> T | None:
        with self._lock:
            return self._objects.get((namespace, name))

    def all(self) -> list[T]:
        with self._lock:
            return list(self._objects.values())

    def by_index(self, index: str, key: Hashable) -> list[T]:
        """Return the objects for which the function of this index returned this key."""
        with self._lock:
            return list(self._indexes[index].get(key, {}).values())

    def __len__(self) -> int:
        with self._lock:
            return len(self._objects)

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                self._list_and_watch()
                failures = 0
                continue
            except (ApiError, Unavailable) as error:
                if self._stopping.is_set():
                    return
                self._log.warning("relist_required", error=str(error), failures=failures)
            except Exception:  # the outermost frame of the thread: it has to continue
                self._log.exception("informer_failed")
            # After a long healthy watch this is a new incident, not the continuation of the previous one.
            was_healthy = time.monotonic() - started > self._timings.backoff.max_s
            failures = 1 if was_healthy else failures + 1
            self._stopping.wait(self._timings.backoff.delay_s(failures))

    def _list_and_watch(self) -> None:
        """List once, then watch repeatedly, each time from the last version, until the next list is due."""
        items: list[T] = []
        version = ""
        for page in self._cluster.pages(self._kind, self._namespace, self._selector):
            # Converted page by page, so that the full objects of a large list are never in memory together.
            items += page.items if self._convert is None else filter(None, map(self._try_convert, page.items))
            version = page.resource_version
        self._last_contact = time.monotonic()
        self.relists += 1
        self._replace(items)
        self._version = int(version)
        self._synced.set()
        relist_at = time.monotonic() + jittered(self._timings.relist_s)
        short_watches = 0
        while not self._stopping.is_set() and time.monotonic() < relist_at:
            started, before = time.monotonic(), version
            version = self._watch_from(version)
            is_short = version == before and time.monotonic() - started < SHORT_WATCH_S
            short_watches = short_watches + 1 if is_short else 0
            if short_watches:
                self._stopping.wait(self._timings.backoff.delay_s(short_watches))

    def _watch_from(self, version: str) -> str:
        """Watch until the server ends it; returns the version from which to watch next."""
        self._watch = self._cluster.watch(
            self._kind,
            version,
            self._namespace,
            self._selector,
            timeout_s=jittered(self._timings.watch_s),
            idle_timeout_s=self._timings.idle_timeout_s,
        )
        try:
            if self._stopping.is_set():  # `stop` may have come before there was a watch to close
                return version
            for change in self._watch:
                self._last_contact = time.monotonic()
                version = change.object.metadata.resource_version
                self._version = int(version)
                if change.type is not ChangeType.BOOKMARK:
                    self._handle(change)
        finally:
            self._watch.close()
        self._last_contact = time.monotonic()
        return version

    def _handle(self, change: Change[T]) -> None:
        is_deleted = change.type is ChangeType.DELETED
        if self._convert is None:
            self._apply(change.object, deleted=is_deleted)
            return
        converted = self._try_convert(change.object)
        if converted is not None:
            self._apply(converted, deleted=is_deleted)
        elif (cached := self._objects.get(name_of(change.object))) is not None:
            self._apply(cached, deleted=True)

    def _try_convert(self, item: T) -> T | None:
        try:
            return self._convert(item) if self._convert else item
        except Exception:  # one malformed object must not keep all others out of the cache
            self.handler_errors += 1
            self._log.exception("convert_failed", object="/".join(name_of(item)))
            # An object that cannot be converted still exists: keep its last good state.
            return self._objects.get(name_of(item))

    def _replace(self, items: Iterable[T]) -> None:
        """Replace the whole cache at once, then call the handlers for every difference."""
        fresh = {name_of(item): item for item in items}
        with self._lock:
            before, self._objects = self._objects, fresh
            self._indexes = {index: {} for index in self._index_keys}
            for name, item in fresh.items():
                self._add_to_indexes(name, item)
        for name, old in before.items():
            if name not in fresh:
                self._notify(old, None)
        for name, item in fresh.items():
            self._notify(before.get(name), item)

    def _apply(self, item: T, *, deleted: bool) -> None:
        name = name_of(item)
        with self._lock:
            old = self._objects.pop(name, None)
            if old is not None:
                self._remove_from_indexes(name, old)
            if not deleted:
                self._objects[name] = item
                self._add_to_indexes(name, item)
        # A deletion carries the object's last state, which is newer than the cached one.
        self._notify(item if deleted and old is not None else old, None if deleted else item)

    def _notify(self, old: T | None, new: T | None) -> None:
        if old is None and new is None:
            return
        if old is not None and new is not None:
            if old.metadata.resource_version == new.metadata.resource_version:
                return
            if old.metadata.uid != new.metadata.uid:
                # Deleted and created again while there was no watch: these are two changes, of two objects.
                self._notify(old, None)
                old = None
        for handler in self._handlers:
            try:
                handler(old, new)
            except Exception:  # a bug in one handler must not keep the change from the others
                self.handler_errors += 1
                self._log.exception("handler_failed", object="/".join(name_of(new or old or Object())))

    def _add_to_indexes(self, name: Name, item: T) -> None:
        for index in self._index_keys:
            self._indexes[index].setdefault(self._index_key(index, item), {})[name] = item

    def _remove_from_indexes(self, name: Name, item: T) -> None:
        for index in self._index_keys:
            key = self._index_key(index, item)
            entries = self._indexes[index].get(key, {})
            entries.pop(name, None)
            # Otherwise the keys of deleted objects, such as nodes, would pile up.
            if not entries:
                self._indexes[index].pop(key, None)

    def _index_key(self, index: str, item: T) -> Hashable:
        try:
            return self._index_keys[index](item)
        except Exception:  # one malformed object must not keep all others out of the cache
            self.handler_errors += 1
            self._log.exception("index_failed", index=index, object="/".join(name_of(item)))
            return None


def name_of(item: Object) -> Name:
    return item.metadata.namespace, item.metadata.name

"""A cache of one kind of objects that follows the cluster by itself.

List, then watch from there; whenever anything is in doubt, list again. The cache is replaced at once and its
handlers hear of what changed meanwhile, deletions included, so an expired version or a restarted API server
loses nothing. It knows how long ago it last heard from the cluster.
"""

import random
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic, TypeVar

import structlog
from msgspec import Struct

from cluster.errors import ApiError
from cluster.interface import EVERYTHING, Change, ChangeType, Cluster, Selector, Watch
from cluster.objects import Kind, Object
from vcuda.decision import Unavailable

T = TypeVar("T", bound=Object)

FRUITLESS_S = 1.0

Name = tuple[str, str]
Handler = Callable[[T | None, T | None], None]


class InformerTimings(Struct, frozen=True):
    """How patient an informer is.

    For a kind that is quiet since the API server started, not even bookmarks come; so a watch ends by itself before
    its silence would tell anything, and that end is the sign of life.
    """

    watch_s: float = 100.0
    silence_s: float = 130.0
    relist_s: float = 600.0
    retry_s: float = 0.5
    most_retry_s: float = 30.0

    def before_retry(self, failures: int) -> float:
        """How long to wait after so many failures in a row."""
        return min(self.retry_s * (1 << min(failures, 10)), self.most_retry_s)


class Informer(Generic[T]):
    """Keeps all objects of a kind (in a namespace, behind a selector) up to date in memory.

    Handlers get the object before and after each change (None where there is none), one after another, on the
    informer's own thread; what they raise is logged and counted, and does not stop it. With `convert`, only what it
    makes of each object is kept; objects of which it makes None are as if they were not there.
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
        pace: InformerTimings | None = None,
    ) -> None:
        self._cluster, self._kind, self._namespace, self._selector = cluster, kind, namespace, selector
        self._pace = pace or InformerTimings()
        self._convert = convert
        self._handlers: list[Handler[T]] = []
        # Guards objects and indexes, which a reader must see in the same state.
        self._lock = threading.Lock()
        self._objects: dict[Name, T] = {}
        self._index_of = dict(indexes or {})
        self._indexes: dict[str, dict[Hashable, dict[Name, T]]] = {name: {} for name in self._index_of}
        self._synced = threading.Event()
        self._stopping = threading.Event()
        self._watch: Watch[T] | None = None
        self._heard = time.monotonic()
        self._version = 0
        self.handler_errors = 0
        self.relists = 0
        self._log = structlog.get_logger().bind(informer=kind.plural)
        self._thread = threading.Thread(target=self._run, name=f"informer-{kind.plural}", daemon=True)

    def on_change(self, handler: Handler[T]) -> None:
        """Be told of changes; to be called before `start`."""
        self._handlers.append(handler)

    def start(self) -> "Informer[T]":
        """Begin to follow the cluster, on a thread of its own."""
        self._thread.start()
        return self

    def stop(self, timeout_s: float = 10.0) -> None:
        """End; waits for the thread, which may be in a handler."""
        self._stopping.set()
        if self._watch is not None:
            self._watch.close()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def wait_synced(self, timeout_s: float) -> bool:
        """Wait until the first list is in the cache."""
        return self._synced.wait(timeout_s)

    @property
    def synced(self) -> bool:
        """Whether the cache has been filled."""
        return self._synced.is_set()

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    @property
    def version(self) -> int:
        """The version up to which changes are known; versions of one cluster can be compared."""
        return self._version

    def age_s(self) -> float:
        """How long ago the cluster was last heard of."""
        return time.monotonic() - self._heard

    def get(self, name: str, namespace: str = "") -> T | None:
        """Look an object up."""
        with self._lock:
            return self._objects.get((namespace, name))

    def all(self) -> list[T]:
        """Give all objects."""
        with self._lock:
            return list(self._objects.values())

    def indexed(self, index: str, key: Hashable) -> list[T]:
        """Give the objects that an index files under this key."""
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
                self._list_and_follow()
                failures = 0
                continue
            except (ApiError, Unavailable) as broken:
                if self._stopping.is_set():
                    return
                self._log.warning("informer_lists_again", cause=str(broken), failures=failures)
            except Exception:  # the outermost frame of the thread: it has to go on
                self._log.exception("informer_failed")
            lasted = time.monotonic() - started
            failures = 0 if lasted > self._pace.most_retry_s else failures + 1
            self._stopping.wait(self._pace.before_retry(failures) * random.uniform(0.5, 1.0))

    def _list_and_follow(self) -> None:
        """List once, then watch and watch again from the last version, until it is time to list anew."""
        items: list[T] = []
        version = ""
        for page in self._cluster.pages(self._kind, self._namespace, self._selector):
            items += page.items if self._convert is None else filter(None, map(self._converted, page.items))
            version = page.resource_version
        self._heard = time.monotonic()
        self.relists += 1
        self._replace(items)
        self._version = int(version)
        self._synced.set()
        relist_at = time.monotonic() + self._pace.relist_s * random.uniform(0.8, 1.0)
        fruitless = 0
        while not self._stopping.is_set() and time.monotonic() < relist_at:
            began, before = time.monotonic(), version
            version = self._follow(version)
            # A proxy, or an API server about to end, may close every watch at once: do not spin on it.
            fruitless = fruitless + 1 if version == before and time.monotonic() - began < FRUITLESS_S else 0
            if fruitless:
                self._stopping.wait(self._pace.before_retry(fruitless))

    def _follow(self, version: str) -> str:
        """Watch until the server ends it, and give the version to go on from."""
        self._watch = self._cluster.watch(
            self._kind,
            version,
            self._namespace,
            self._selector,
            timeout_s=self._pace.watch_s * random.uniform(0.8, 1.0),
            silence_s=self._pace.silence_s,
        )
        try:
            if self._stopping.is_set():  # it may have been asked before the watch was there to close
                return version
            for change in self._watch:
                self._heard = time.monotonic()
                version = change.object.metadata.resource_version
                self._version = int(version)
                if change.type is not ChangeType.BOOKMARK:
                    self._take(change)
        finally:
            self._watch.close()
        self._heard = time.monotonic()
        return version

    def _take(self, change: Change[T]) -> None:
        """Take a change over, or what is made of it."""
        is_gone = change.type is ChangeType.DELETED
        if self._convert is None:
            self._apply(change.object, gone=is_gone)
            return
        made = self._converted(change.object)
        if made is not None:
            self._apply(made, gone=is_gone)
        elif (held := self._objects.get(name_of(change.object))) is not None:
            self._apply(held, gone=True)

    def _converted(self, item: T) -> T | None:
        try:
            return self._convert(item) if self._convert else item
        except Exception:  # one odd object must not keep all others out of the cache
            self.handler_errors += 1
            self._log.exception("convert_failed", object="/".join(name_of(item)))
            # What cannot be read is not gone: what was known of it stays.
            return self._objects.get(name_of(item))

    def _replace(self, items: Iterable[T]) -> None:
        """Put a list in place of the cache at once, then tell of every difference."""
        fresh = {name_of(item): item for item in items}
        with self._lock:
            before, self._objects = self._objects, fresh
            self._indexes = {index: {} for index in self._index_of}
            for name, item in fresh.items():
                self._file(name, item)
        for name, old in before.items():
            if name not in fresh:
                self._tell(old, None)
        for name, item in fresh.items():
            self._tell(before.get(name), item)

    def _apply(self, item: T, *, gone: bool) -> None:
        name = name_of(item)
        with self._lock:
            old = self._objects.pop(name, None)
            if old is not None:
                self._unfile(name, old)
            if not gone:
                self._objects[name] = item
                self._file(name, item)
        # The last state of a deleted object is what the deletion reported, newer than what we held.
        self._tell(item if gone and old is not None else old, None if gone else item)

    def _tell(self, old: T | None, new: T | None) -> None:
        if old is None and new is None:
            return
        if old is not None and new is not None:
            if old.metadata.resource_version == new.metadata.resource_version:
                return
            if old.metadata.uid != new.metadata.uid:
                # Deleted and made again while we could not see: one object went, and another came.
                self._tell(old, None)
                old = None
        for handler in self._handlers:
            try:
                handler(old, new)
            except Exception:  # a handler's fault must not cost the others their news
                self.handler_errors += 1
                self._log.exception("handler_failed", object="/".join(name_of(new or old or Object())))

    def _file(self, name: Name, item: T) -> None:
        for index in self._index_of:
            self._indexes[index].setdefault(self._key(index, item), {})[name] = item

    def _unfile(self, name: Name, item: T) -> None:
        for index in self._index_of:
            key = self._key(index, item)
            filed = self._indexes[index].get(key, {})
            filed.pop(name, None)
            if not filed:
                self._indexes[index].pop(key, None)

    def _key(self, index: str, item: T) -> Hashable:
        try:
            return self._index_of[index](item)
        except Exception:  # one odd object must not keep all others out of the cache
            self.handler_errors += 1
            self._log.exception("index_failed", index=index, object="/".join(name_of(item)))
            return None


def name_of(item: Object) -> Name:
    """Address an object within its kind."""
    return item.metadata.namespace, item.metadata.name

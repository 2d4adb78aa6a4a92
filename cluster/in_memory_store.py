"""A versioned store with a history: the part of etcd in the in-memory cluster."""

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from msgspec import Struct

from cluster.errors import Expired
from cluster.objects import Raw

HISTORY = 10_000

# Plural of the kind, namespace, name.
Key = tuple[str, str, str]


class StoreEntry(Struct, frozen=True):
    """One write: the object before and after it. After a deletion `new` is None and `last` its final state."""

    version: int
    plural: str
    old: Raw | None
    new: Raw | None
    last: Raw


class VersionedStore:
    """Objects by key. Thread-safe: objects are copied on the way in and out, so stored ones never change."""

    def __init__(self, history: int = HISTORY) -> None:
        # Guards version, objects and history together: a version is visible in all of them or in none. Reentrant, so
        # that callers can hold it over a read and the write that depends on it.
        self.lock = threading.Condition(threading.RLock())
        self.version = 1
        self._objects: dict[Key, Raw] = {}
        self._history: deque[StoreEntry] = deque(maxlen=history)

    def get(self, key: Key) -> Raw | None:
        with self.lock:
            return copy.deepcopy(self._objects.get(key))

    def all(self, plural: str, namespace: str = "") -> tuple[list[Raw], int]:
        """Return all objects of a kind, sorted by name, and the version at which they were read."""
        with self.lock:
            keys = sorted(key for key in self._objects if key[0] == plural and namespace in ("", key[1]))
            return [copy.deepcopy(self._objects[key]) for key in keys], self.version

    def put(self, key: Key, obj: Raw) -> Raw:
        """Write an object; without a change it keeps its version and watches see nothing, as on an API server."""
        with self.lock:
            old = self._objects.get(key)
            if old is not None and old == obj:
                return copy.deepcopy(old)
            new = self._with_next_version(obj)
            self._objects[key] = new
            self._append(StoreEntry(self.version, key[0], old, new, new))
            return copy.deepcopy(new)

    def remove(self, key: Key) -> None:
        with self.lock:
            old = self._objects.pop(key)
            last = self._with_next_version(old)
            self._append(StoreEntry(self.version, key[0], old, None, last))

    def _with_next_version(self, obj: Raw) -> Raw:
        self.version += 1
        new = copy.deepcopy(obj)
        new["metadata"]["resourceVersion"] = str(self.version)
        return new

    def _append(self, entry: StoreEntry) -> None:
        self._history.append(entry)
        self.lock.notify_all()

    def follow(
        self, since: int, deadline: float, closed: Callable[[], bool], idle_s: float
    ) -> Iterator[StoreEntry | None]:
        """Yield the writes after a version until the deadline; None whenever nothing was written for `idle_s`."""
        while not closed() and time.monotonic() < deadline:
            with self.lock:
                fresh = self._after(since)
                if not fresh:
                    self.lock.wait(min(idle_s, max(0.0, deadline - time.monotonic())))
                    fresh = self._after(since)
            if closed():
                return
            # Outside the lock: the consumer may take its time.
            yield from fresh or (None,)
            if fresh:
                since = fresh[-1].version

    def _after(self, since: int) -> list[StoreEntry]:
        """Return the writes after a version; Expired if some of them have left the history."""
        oldest = self._history[0].version if self._history else self.version + 1
        if since < oldest - 1 and len(self._history) == self._history.maxlen:
            raise Expired(f"too old resource version: {since} ({oldest})", code=410, reason="Expired")
        fresh: list[StoreEntry] = []
        # From the end: a watch that keeps up needs only the last few entries.
        for entry in reversed(self._history):
            if entry.version <= since:
                break
            fresh.append(entry)
        return fresh[::-1]

"""A versioned store with a history, as etcd is to an API server."""

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from msgspec import Struct

from cluster.errors import Expired
from cluster.objects import Raw

HISTORY = 10_000

Key = tuple[str, str, str]


class StoreEntry(Struct, frozen=True):
    """One write: the object before and after it; no object after a deletion, but its last state at this version."""

    version: int
    plural: str
    old: Raw | None
    new: Raw | None
    last: Raw


class VersionedStore:
    """Objects by (plural, namespace, name). Objects handed out are copies; what is stored never changes."""

    def __init__(self, history: int = HISTORY) -> None:
        # Guards version, objects and history together: a version is visible in all of them or in none.
        self.lock = threading.Condition(threading.RLock())
        self.version = 1
        self._objects: dict[Key, Raw] = {}
        self._history: deque[StoreEntry] = deque(maxlen=history)

    def get(self, key: Key) -> Raw | None:
        """Read one object."""
        with self.lock:
            return copy.deepcopy(self._objects.get(key))

    def all(self, plural: str, namespace: str = "") -> tuple[list[Raw], int]:
        """Read all objects of a kind, in the order of their names, and the version at which that was true."""
        with self.lock:
            keys = sorted(key for key in self._objects if key[0] == plural and namespace in ("", key[1]))
            return [copy.deepcopy(self._objects[key]) for key in keys], self.version

    def put(self, key: Key, obj: Raw) -> Raw:
        """Write an object; one that did not change keeps its version and tells nobody."""
        with self.lock:
            old = self._objects.get(key)
            if old is not None and old == obj:
                return copy.deepcopy(old)
            new = self._stamp(obj)
            self._objects[key] = new
            self._tell(StoreEntry(self.version, key[0], old, new, new))
            return copy.deepcopy(new)

    def remove(self, key: Key) -> None:
        """Take an object out."""
        with self.lock:
            old = self._objects.pop(key)
            self._tell(StoreEntry(self.version + 1, key[0], old, None, self._stamp(old)))

    def _stamp(self, obj: Raw) -> Raw:
        self.version += 1
        new = copy.deepcopy(obj)
        new["metadata"]["resourceVersion"] = str(self.version)
        return new

    def _tell(self, entry: StoreEntry) -> None:
        self._history.append(entry)
        self.lock.notify_all()

    def follow(
        self, since: int, deadline: float, closed: Callable[[], bool], idle_s: float
    ) -> Iterator[StoreEntry | None]:
        """Give the writes after a version until the deadline; None when nothing happened for a while."""
        while not closed() and time.monotonic() < deadline:
            with self.lock:
                fresh = self._after(since)
                if not fresh:
                    self.lock.wait(min(idle_s, max(0.0, deadline - time.monotonic())))
                    fresh = self._after(since)
            if closed():
                return
            yield from fresh or (None,)
            if fresh:
                since = fresh[-1].version

    def _after(self, since: int) -> list[StoreEntry]:
        oldest = self._history[0].version if self._history else self.version + 1
        if since < oldest - 1 and len(self._history) == self._history.maxlen:
            raise Expired(f"too old resource version: {since} ({oldest})", code=410, reason="Expired")
        fresh: list[StoreEntry] = []
        for entry in reversed(self._history):
            if entry.version <= since:
                break
            fresh.append(entry)
        return fresh[::-1]

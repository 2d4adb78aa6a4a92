"""Keys whose turn comes: soon or later, each served by one worker at a time."""

import heapq
import threading
import time
from collections.abc import Callable


class WorkQueue:
    """A queue of keys. One that is wanted while it is being served is served again afterwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Guards all below: a key is in `_due` while it is wanted, in `_busy` while a worker serves it. The heap may
        # hold what is no longer so; `_due` says what counts.
        self._changed = threading.Condition()
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._busy: set[str] = set()
        self._stopping = False

    def want(self, key: str, at: float | None = None) -> None:
        """Want a key to be served, now or at some time; what is wanted sooner stays so."""
        due = self._clock() if at is None else at
        with self._changed:
            if due < self._due.get(key, float("inf")):
                self._due[key] = due
                if key not in self._busy:
                    heapq.heappush(self._heap, (due, key))
                    self._changed.notify()

    def next(self) -> str | None:
        """Wait for a key whose turn it is, and take it; None at the end."""
        with self._changed:
            while not self._stopping:
                while self._heap and (self._heap[0][1] in self._busy or self._is_past(*self._heap[0])):
                    heapq.heappop(self._heap)
                wait_s = self._heap[0][0] - self._clock() if self._heap else None
                if wait_s is not None and wait_s <= 0:
                    _, key = heapq.heappop(self._heap)
                    del self._due[key]
                    self._busy.add(key)
                    return key
                self._changed.wait(wait_s)
            return None

    def _is_past(self, due: float, key: str) -> bool:
        """Tell whether an entry of the heap no longer counts: it was wanted sooner since, or served."""
        return self._due.get(key) != due

    def done(self, key: str) -> None:
        """Give a key back."""
        with self._changed:
            self._busy.discard(key)
            if key in self._due:
                heapq.heappush(self._heap, (self._due[key], key))
                self._changed.notify()

    def waiting(self) -> int:
        """Count the keys that are being served, or should be by now."""
        now = self._clock()
        with self._changed:
            return len(self._busy) + sum(at <= now for at in self._due.values())

    def stop(self) -> None:
        """Send all workers home."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

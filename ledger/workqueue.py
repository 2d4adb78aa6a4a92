"""A work queue of keys, with the contract of client-go's delaying workqueue.

A key is queued once, however often it is added, and at most one worker processes it at a time. A key that is added
while a worker processes it is queued again when that worker calls `done`.
"""

import heapq
import threading
import time
from collections.abc import Callable


class WorkQueue:
    """Every key from `get` must be given back with `done`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Guards all fields below. A key is in `_due` while it is queued and in `_processing` while a worker has it; it
        # may be in both. `_due` is authoritative: the heap may hold entries that were superseded by an earlier time.
        self._changed = threading.Condition()
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._processing: set[str] = set()
        self._shutting_down = False

    def add(self, key: str) -> None:
        self.add_after(key, 0.0)

    def add_after(self, key: str, delay_s: float) -> None:
        """Queue a key for later. If it is queued already, the earlier time counts."""
        due = self._clock() + delay_s
        with self._changed:
            if due < self._due.get(key, float("inf")):
                self._due[key] = due
                # `done` pushes a key that is being processed, so that no second worker gets it before.
                if key not in self._processing:
                    heapq.heappush(self._heap, (due, key))
                    self._changed.notify()

    def get(self) -> str | None:
        """Block until a key is due, and take it; None once the queue is shut down."""
        with self._changed:
            while not self._shutting_down:
                while self._heap and (self._heap[0][1] in self._processing or self._is_superseded(*self._heap[0])):
                    heapq.heappop(self._heap)
                wait_s = self._heap[0][0] - self._clock() if self._heap else None
                if wait_s is not None and wait_s <= 0:
                    _, key = heapq.heappop(self._heap)
                    del self._due[key]
                    self._processing.add(key)
                    return key
                self._changed.wait(wait_s)
            return None

    def _is_superseded(self, due: float, key: str) -> bool:
        """Whether a heap entry no longer counts: its key was added with an earlier time, or taken."""
        return self._due.get(key) != due

    def done(self, key: str) -> None:
        with self._changed:
            self._processing.discard(key)
            if key in self._due:
                heapq.heappush(self._heap, (self._due[key], key))
                self._changed.notify()

    def pending(self) -> int:
        """Return how many keys are due or being processed; keys queued for later do not count."""
        now = self._clock()
        with self._changed:
            return len(self._processing) + sum(due <= now for due in self._due.values())

    def shut_down(self) -> None:
        """Let `get` return None to every worker, whatever is still queued."""
        with self._changed:
            self._shutting_down = True
            self._changed.notify_all()

"""Keys whose turn comes: soon or later, each served by one worker at a time."""

import threading
import time
from collections.abc import Callable


class Turns:
    """A queue of keys. One that is wanted while it is being served is served again afterwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Guards both maps: a key is in `_due` while it is wanted, in `_busy` while a worker serves it.
        self._changed = threading.Condition()
        self._due: dict[str, float] = {}
        self._busy: set[str] = set()
        self._stopping = False

    def want(self, key: str, at: float | None = None) -> None:
        """Want a key to be served, now or at some time; what is wanted sooner stays so."""
        due = self._clock() if at is None else at
        with self._changed:
            if due < self._due.get(key, float("inf")):
                self._due[key] = due
                self._changed.notify()

    def next(self) -> str | None:
        """Wait for a key whose turn it is, and take it; None at the end."""
        with self._changed:
            while not self._stopping:
                now = self._clock()
                free = [(at, key) for key, at in self._due.items() if key not in self._busy]
                at, key = min(free, default=(None, ""))
                if at is not None and at <= now:
                    self._busy.add(key)
                    del self._due[key]
                    return key
                self._changed.wait(None if at is None else at - now)
            return None

    def done(self, key: str) -> None:
        """Give a key back."""
        with self._changed:
            self._busy.discard(key)
            self._changed.notify()

    def waiting(self) -> int:
        """Count the keys that should have been served by now."""
        now = self._clock()
        with self._changed:
            return sum(at <= now for at in self._due.values())

    def stop(self) -> None:
        """Send all workers home."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

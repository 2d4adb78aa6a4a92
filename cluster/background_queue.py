"""A bounded queue whose items a thread of its own handles: for work that no decision may wait for, such as events."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

JOIN_TIMEOUT_S = 5.0

T = TypeVar("T")


class BackgroundQueue(Generic[T]):
    """Best effort: a full queue drops items, and an item that cannot be handled is logged as `<item>_failed`."""

    def __init__(self, name: str, item: str, handle: Callable[[T], None], max_queued: int) -> None:
        self._item, self._handle = item, handle
        # Each item with what the log says about it. None ends the thread.
        self._queue: queue.Queue[tuple[T, dict[str, str]] | None] = queue.Queue(max_queued)
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after the queued items; if the queue is full, the daemon thread ends with the process."""
        if self._put(None) and self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def enqueue(self, item: T, **context: str) -> None:
        """Enqueue an item. Never blocks."""
        if not self._put((item, context)):
            self._log.warning(f"{self._item}_dropped", **context)

    def _put(self, entry: tuple[T, dict[str, str]] | None) -> bool:
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            item, context = entry
            try:
                self._handle(item)
            except Exception:  # the outermost frame of the thread, which has to survive
                self._log.exception(f"{self._item}_failed", **context)

"""Calls of the driver for several cards at once, each on a thread of its own: a card that hangs holds up no other."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Generic, TypeVar

T = TypeVar("T")


class ParallelCalls(Generic[T]):
    """Makes one call at a time for each key. Thread-safe.

    A call that hangs is neither repeated nor waited for again before it has returned, so that threads do not pile up.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Guards the keys whose calls have not returned.
        self._lock = threading.Lock()
        self._running: set[str] = set()

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    def gather(
        self, calls: Mapping[str, Callable[[], T]], silence_s: float, total_s: float = math.inf
    ) -> dict[str, Future[T]]:
        """Make calls, and return those that have ended, by key.

        Waits until all have, until none has for `silence_s`, or for `total_s`. A driver that answers for one card after
        the other is slow, and does not hang.
        """
        started = {key: self._start(key, call) for key, call in calls.items() if self._claim(key)}
        waiting = set(started.values())
        deadline = time.monotonic() + total_s
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            done, waiting = wait(waiting, min(silence_s, left_s), FIRST_COMPLETED)
            if not done:
                break
        return {key: call for key, call in started.items() if call.done()}

    def _claim(self, key: str) -> bool:
        with self._lock:
            is_free = key not in self._running
            self._running.add(key)
        return is_free

    def _start(self, key: str, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        thread = threading.Thread(target=self._run, args=(key, call, future), name=f"{self._name}-{key}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system allows no more threads
            self._end(key)
            future.set_exception(error)
        return future

    def _run(self, key: str, call: Callable[[], T], future: Future[T]) -> None:
        try:
            result = call()
        except Exception as error:  # raised where the result is read
            self._end(key)
            future.set_exception(error)
        else:
            # Before the caller is woken up, who may call again at once.
            self._end(key)
            future.set_result(result)

    def _end(self, key: str) -> None:
        with self._lock:
            self._running.discard(key)

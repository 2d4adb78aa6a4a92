"""Explains pods that the extender is never asked about, because kube-scheduler's own filters exclude every node.

On a full cluster it only counts resources: "Insufficient inspur.com/vcuda-core". Users get the same explanation with
numbers as for pods that were filtered.
"""

import queue
import threading
from collections.abc import Callable

import structlog

from scheduler.extender import Extender
from scheduler.pods import SchedulerPod

MAX_QUEUED = 1024
JOIN_TIMEOUT_S = 5.0


class Explainer:
    """A thread that explains pods from a queue. Never blocks its callers: a full queue drops pods."""

    def __init__(self, extender: Extender, is_active: Callable[[], bool]) -> None:
        self._extender, self._is_active = extender, is_active
        self._queue: queue.Queue[SchedulerPod | None] = queue.Queue(MAX_QUEUED)
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="explainer", daemon=True)

    def start(self) -> "Explainer":
        self._thread.start()
        return self

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def enqueue(self, pod: SchedulerPod) -> None:
        try:
            self._queue.put_nowait(pod)
        except queue.Full:
            self._log.warning("explanation_dropped", pod=pod.title)

    def _run(self) -> None:
        while (pod := self._queue.get()) is not None:
            try:
                if self._is_active():
                    self._extender.explain(pod)
            except Exception:  # the outermost frame of the thread, which has to survive
                self._log.exception("explanation_failed", pod=pod.title)

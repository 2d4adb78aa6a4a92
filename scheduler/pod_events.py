"""Events on pods that wait for GPUs, or could not be bound. A thread of its own writes them: no decision waits."""

import threading
from collections.abc import Callable

from cluster.background_queue import BackgroundQueue
from cluster.events import WARNING, EventRecorder
from scheduler.pods import SchedulerPod
from vcuda.node_problem import NodeProblem

MAX_QUEUED = 1024
MAX_REMEMBERED = 20_000
# The numbers of a pod that waits change with every pod that ends. An event with other numbers is written this often,
# and one with other problems of nodes after the shorter time; one with another reason at once.
REPEAT_S, MIN_INTERVAL_S = 900.0, 300.0

# A pod, and the reason and message of an event about it.
PodEvent = tuple[SchedulerPod, str, str]


class PodEvents:
    """Records events from a queue. Never blocks: a full queue drops events."""

    def __init__(self, recorder: EventRecorder, clock: Callable[[], float]) -> None:
        self._recorder, self._clock = recorder, clock
        self.queue: BackgroundQueue[PodEvent] = BackgroundQueue("pod-events", "event", self._write, MAX_QUEUED)
        # Guards `_written`: filter and bind run on several threads.
        self._lock = threading.Lock()
        self._written: dict[str, tuple[tuple[str, frozenset[NodeProblem]], float]] = {}

    def record_waiting(self, pod: SchedulerPod, reason: str, message: str, problems: frozenset[NodeProblem]) -> None:
        """Record why a pod waits, unless its last event says so or is too recent."""
        now = self._clock()
        with self._lock:
            before = self._written.get(pod.uid)
            if before is not None and before[0][0] == reason:
                interval_s = REPEAT_S if before[0][1] == problems else MIN_INTERVAL_S
                if now - before[1] < interval_s:
                    return
            if len(self._written) >= MAX_REMEMBERED:
                self._written.clear()
            self._written[pod.uid] = (reason, problems), now
        self.record(pod, reason, message)

    def record(self, pod: SchedulerPod, reason: str, message: str) -> None:
        self.queue.enqueue((pod, reason, message), pod=pod.title)

    def forget(self, uid: str) -> None:
        with self._lock:
            self._written.pop(uid, None)

    def _write(self, event: PodEvent) -> None:
        pod, reason, message = event
        self._recorder.record(pod.reference(), reason, message, type_=WARNING)

"""Pods that fit on no node when they were last filtered, and the nodes on which GPUs have become free since.

kube-scheduler requeues such pods itself when a pod or a node changes. But its watch may be ahead of ours: it asks again
before we know of the room, and then no event follows. And no change of a quota requeues a pod. So pods for which there
is room now are requeued by a change of an annotation, which wakes exactly that pod.
"""

import threading
from collections.abc import Callable

from msgspec import Struct

from scheduler.pods import SchedulerPod

# How long a node is left out for a pod after kube-scheduler's own filters excluded it.
UNSUITABLE_S = 300.0
# How long a requeued pod is expected to be filtered: its backoff may be 10 seconds.
REQUEUED_S = 15.0


class WaitingPod(Struct):
    """A pod that fits nowhere. `filtered_at` is the number of the last room event before it was filtered.

    `expected` is the node with room for it when it was requeued, and empty once it was filtered again. `unsuitable` are
    nodes, each with the time until when, that kube-scheduler did not ask about although there was room.
    """

    pod: SchedulerPod
    filtered_at: int
    summary: str = ""
    expected: str = ""
    requeued_at: float = 0.0
    is_blocked_by_ledger: bool = False
    unsuitable: dict[str, float] = {}

    def may_use(self, node: str, now: float) -> bool:
        return self.unsuitable.get(node, 0.0) <= now


class WaitingPods:
    """Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Guards the fields below, and is notified of room.
        self._lock = threading.Condition()
        self._waiting: dict[str, WaitingPod] = {}
        # Counts room events, and the last one of each node and each namespace's ledger.
        self._events = 0
        self._nodes: dict[str, int] = {}
        self._namespaces: dict[str, int] = {}

    def note_room(self, node: str) -> None:
        """Note that GPUs of a node may have become free."""
        with self._lock:
            self._events += 1
            if self._waiting:
                self._nodes[node] = self._events
            self._lock.notify_all()

    def note_ledger(self, namespace: str) -> bool:
        """Note that a ledger changed; returns whether a pod waits for that."""
        with self._lock:
            self._events += 1
            is_waited_for = any(
                each.is_blocked_by_ledger and each.pod.metadata.namespace == namespace
                for each in self._waiting.values()
            )
            if is_waited_for:
                self._namespaces[namespace] = self._events
            return is_waited_for

    @property
    def events(self) -> int:
        return self._events

    def await_room(self, since: int, timeout_s: float) -> bool:
        """Wait for a room event after this one; returns whether there was one."""
        with self._lock:
            return self._lock.wait_for(lambda: self._events > since, timeout_s)

    def add(self, pod: SchedulerPod, filtered_at: int, summary: str, *, is_blocked_by_ledger: bool) -> None:
        with self._lock:
            before = self._waiting.get(pod.uid)
            self._waiting[pod.uid] = WaitingPod(
                pod,
                filtered_at,
                summary,
                is_blocked_by_ledger=is_blocked_by_ledger,
                unsuitable=before.unsuitable if before else {},
            )

    def note_asked(self, uid: str, is_asked: Callable[[str], bool]) -> None:
        """Note which nodes kube-scheduler asks about for a pod that may have been requeued."""
        with self._lock:
            waiting = self._waiting.get(uid)
            if waiting is not None and waiting.expected and not is_asked(waiting.expected):
                waiting.unsuitable[waiting.expected] = self._clock() + UNSUITABLE_S
                waiting.expected = ""

    def remove(self, uid: str) -> WaitingPod | None:
        with self._lock:
            waiting = self._waiting.pop(uid, None)
            if not self._waiting:
                self._nodes.clear()
                self._namespaces.clear()
            return waiting

    def get(self, uid: str) -> WaitingPod | None:
        with self._lock:
            return self._waiting.get(uid)

    def __len__(self) -> int:
        return len(self._waiting)

    def candidates(self) -> list[tuple[WaitingPod, list[str] | None]]:
        """Return the pods that may fit by now, in the order in which they are served, each with the nodes to try.

        None means all nodes: its quota changed. Pods that were filtered since the room appeared are left out.
        """
        with self._lock:
            now = self._clock()
            found: list[tuple[WaitingPod, list[str] | None]] = []
            for waiting in self._waiting.values():
                namespace = waiting.pod.metadata.namespace
                if waiting.is_blocked_by_ledger:
                    if self._namespaces.get(namespace, 0) > waiting.filtered_at:
                        found.append((waiting, None))
                    continue
                nodes = [
                    node
                    for node, event in self._nodes.items()
                    if event > waiting.filtered_at and waiting.may_use(node, now)
                ]
                if nodes:
                    found.append((waiting, nodes))
            # Nodes whose room every pod has seen need not be tried again.
            oldest = min((each.filtered_at for each in self._waiting.values()), default=self._events)
            self._nodes = {node: event for node, event in self._nodes.items() if event > oldest}
        return sorted(found, key=lambda each: each[0].pod.queue_position)

    def note_requeued(self, uid: str, node: str, events: int) -> bool:
        """Note that a pod is about to be requeued for a node; False if it was filtered meanwhile, or waits no more."""
        with self._lock:
            waiting = self._waiting.get(uid)
            if waiting is None or waiting.filtered_at >= events:
                return False
            waiting.expected, waiting.requeued_at, waiting.filtered_at = node, self._clock(), events
            return True

    def requeued(self) -> list[WaitingPod]:
        """Return the pods that were requeued and not filtered since: the room that was found for them is theirs."""
        with self._lock:
            oldest = self._clock() - REQUEUED_S
            return [each for each in self._waiting.values() if each.expected and each.requeued_at > oldest]

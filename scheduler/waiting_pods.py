"""Pods that fit on no node when they were last filtered, and the nodes on which GPUs have become free since.

kube-scheduler requeues such pods itself when a pod or a node changes. But its watch may be ahead of ours: it asks again
before we know of the room, and then no event follows. And no change of a quota requeues a pod. So pods for which there
is room now are requeued by a change of an annotation, which wakes exactly that pod.
"""

import threading
from collections.abc import Callable

from msgspec import Struct, field

from scheduler.pods import SchedulerPod
from vcuda.fit_summary import Problems

# How long at most a node is left out for a pod after kube-scheduler's own filters excluded it.
UNSUITABLE_S = 300.0
# How long after the end of its backoff a requeued pod is expected to be filtered.
MARGIN_S = 5.0
MAX_DOUBLINGS = 4
# How old the numbers of a refusal may be that is repeated: to find what is free at best takes half of its time.
SUMMARY_S = 60.0
# How long a pod is not waited for after that was in vain.
NO_WAIT_S = 60.0


class WaitingPod(Struct):
    """A pod that fits nowhere, when it was refused, and what was tried since. Events are given by their numbers."""

    pod: SchedulerPod
    # The last event that was taken into account for it, by filter or in the background.
    filtered_at: int
    summary: str = ""
    # Whether its quota refuses it, or some models: then a change of the ledger counts, too.
    reads_ledger: bool = False
    # Whether some nodes were not searched yet, because it has several containers; and when all had been searched.
    is_incomplete: bool = False
    searched_at: float = 0.0
    # How many nodes had each problem, and whether all that lack something free get the same text.
    problems: Problems = field(default_factory=dict)
    is_merged: bool = False
    # Whether many waited when it was refused first: then kube-scheduler is not asked to look in vain for pods to evict.
    is_one_of_many: bool = False
    # When it was refused first, and when the summary was made.
    since: float = 0.0
    summarized_at: float = 0.0
    # The last event when it was filtered, and until when no event is waited for.
    asked_at: int = 0
    no_wait_until: float = 0.0
    # The node with room for it when it was requeued; empty once it was filtered again.
    expected: str = ""
    requeued_at: float = 0.0
    # Nodes that kube-scheduler did not ask about although there was room, each with the time until which it is left
    # out; and how often that happened in a row.
    unsuitable: dict[str, float] = field(default_factory=dict)
    futile: int = 0

    def may_use(self, node: str, now: float) -> bool:
        return self.unsuitable.get(node, 0.0) <= now


# A waiting pod, and the nodes to try; None means all.
Candidate = tuple[WaitingPod, list[str] | None]


class WaitingPods:
    """Thread-safe. `max_backoff_s` is how long kube-scheduler waits at most before it tries a requeued pod."""

    def __init__(self, clock: Callable[[], float], max_backoff_s: float) -> None:
        self._clock, self._requeued_s = clock, max_backoff_s + MARGIN_S
        # Guards the fields below, and is notified of events.
        self._lock = threading.Condition()
        self._waiting: dict[str, WaitingPod] = {}
        # Events are counted: room on a node, or a change of a namespace's ledger. The last one of each, oldest first.
        self._events = 0
        self._nodes: dict[str, int] = {}
        self._namespaces: dict[str, int] = {}
        self._room_at: dict[str, float] = {}

    def note_room(self, node: str) -> None:
        """Note that GPUs of a node may have become free."""
        with self._lock:
            self._room_at[node] = self._clock()
            self._note(self._nodes, node)

    def had_room(self, node: str, within_s: float) -> bool:
        """Whether GPUs of a node have become free so recently."""
        with self._lock:
            return self._clock() - self._room_at.get(node, -within_s) < within_s

    def note_ledger(self, namespace: str) -> None:
        with self._lock:
            self._note(self._namespaces, namespace)

    def _note(self, last: dict[str, int], key: str) -> None:
        self._events += 1
        last.pop(key, None)
        last[key] = self._events
        self._lock.notify_all()

    @property
    def events(self) -> int:
        return self._events

    def await_room(self, uid: str, timeout_s: float) -> bool:
        """Wait for an event after a pod was refused; returns whether there was one.

        Not if that was in vain a moment ago: its owner could have all other pods wait by changing its labels.
        """
        with self._lock:
            waiting = self._waiting.get(uid)
            if waiting is None or self._clock() < waiting.no_wait_until:
                return False
            if self._lock.wait_for(lambda: self._events > waiting.asked_at, timeout_s):
                return True
            waiting.no_wait_until = self._clock() + NO_WAIT_S
            return False

    def add(self, waiting: WaitingPod) -> None:
        with self._lock:
            before = self._waiting.get(waiting.pod.uid)
            waiting.since = waiting.summarized_at = self._clock()
            waiting.asked_at = waiting.filtered_at
            if before is not None:
                waiting.since = before.since
                if waiting.summary is before.summary:
                    waiting.summarized_at = before.summarized_at
                waiting.unsuitable, waiting.no_wait_until = before.unsuitable, before.no_wait_until
                waiting.searched_at = before.searched_at
                # It was filtered, so what it was requeued for was not futile, unless `note_asked` has said so.
                waiting.futile, waiting.requeued_at = before.futile, before.requeued_at if before.futile else 0.0
            self._waiting[waiting.pod.uid] = waiting

    def note_asked(self, uid: str, is_asked: Callable[[str], bool]) -> bool:
        """Note which nodes kube-scheduler asks about for a pod; returns whether it was requeued.

        Then the room that was found for it is offered to others: it may claim GPUs of another node now.
        """
        with self._lock:
            waiting = self._waiting.get(uid)
            if waiting is None or not waiting.expected:
                return False
            if is_asked(waiting.expected):
                waiting.futile = 0
                self._note(self._nodes, waiting.expected)
            else:
                self._note_futile(waiting)
            waiting.expected = ""
            return True

    def _note_futile(self, waiting: WaitingPod) -> None:
        waiting.futile += 1
        waiting.unsuitable[waiting.expected] = self._clock() + min(UNSUITABLE_S, self._pause_s(waiting))
        self._note(self._nodes, waiting.expected)
        waiting.expected = ""

    def _pause_s(self, waiting: WaitingPod) -> float:
        """Return how long a pod is not requeued again: twice as long after each time in vain."""
        return float(self._requeued_s * 2 ** min(waiting.futile, MAX_DOUBLINGS))

    def remove(self, uid: str) -> None:
        """Forget a pod that claims GPUs, or is gone; room that was found for it is offered to others."""
        with self._lock:
            waiting = self._waiting.pop(uid, None)
            if waiting is not None and waiting.expected:
                self._note(self._nodes, waiting.expected)

    def get(self, uid: str) -> WaitingPod | None:
        with self._lock:
            return self._waiting.get(uid)

    def __len__(self) -> int:
        return len(self._waiting)

    def recent_summary(self, uid: str, problems: Problems) -> str:
        """Return the summary of a pod's last refusal if it may be repeated, else an empty text."""
        with self._lock:
            before = self._waiting.get(uid)
            if before is None or before.problems != problems or self._clock() - before.summarized_at > SUMMARY_S:
                return ""
            return before.summary

    def longest_wait_s(self) -> float:
        """Return how long the pod has waited that was refused first; 0 if none waits."""
        with self._lock:
            now = self._clock()
            return now - min((each.since for each in self._waiting.values()), default=now)

    def candidates(self) -> list[Candidate]:
        """Return the pods that may fit by now, in the order in which they are served, each with the nodes to try.

        Pods that were filtered since the last event that concerns them are left out.
        """
        with self._lock:
            now = self._clock()
            found = [(waiting, self._nodes_to_try(waiting, now)) for waiting in self._waiting.values()]
        due = [each for each in found if each[1] is None or each[1]]
        return sorted(due, key=lambda each: each[0].pod.queue_position)

    def _nodes_to_try(self, waiting: WaitingPod, now: float) -> list[str] | None:
        if waiting.expected or (waiting.requeued_at and now < waiting.requeued_at + self._pause_s(waiting)):
            return []
        namespace = waiting.pod.metadata.namespace
        if waiting.is_incomplete or (waiting.reads_ledger and self._namespaces.get(namespace, 0) > waiting.filtered_at):
            return None
        nodes = []
        for node, event in reversed(self._nodes.items()):
            if event <= waiting.filtered_at:
                break
            if waiting.may_use(node, now):
                nodes.append(node)
        return nodes

    def note_tried(self, uid: str, events: int) -> None:
        """Note that a pod was tried on everything that happened up to an event, and does not fit."""
        with self._lock:
            waiting = self._waiting.get(uid)
            if waiting is not None:
                waiting.filtered_at = max(waiting.filtered_at, events)

    def note_requeued(self, uid: str, node: str, events: int) -> bool:
        """Note that a pod is about to be requeued for a node; False if it was filtered meanwhile, or waits no more."""
        with self._lock:
            waiting = self._waiting.get(uid)
            if waiting is None or (waiting.filtered_at >= events and not waiting.is_incomplete):
                return False
            waiting.expected, waiting.requeued_at, waiting.filtered_at = node, self._clock(), events
            return True

    def note_not_requeued(self, uid: str) -> None:
        """Note that a pod is to be tried again, whatever happened before: it could not be requeued, say."""
        with self._lock:
            waiting = self._waiting.get(uid)
            if waiting is not None:
                waiting.expected, waiting.requeued_at, waiting.filtered_at = "", 0.0, -1

    def overdue(self) -> list[WaitingPod]:
        """Return the pods that were requeued a while ago, and kube-scheduler has not asked about since."""
        with self._lock:
            now = self._clock()
            due = now - self._requeued_s
            return [each for each in self._waiting.values() if each.expected and each.requeued_at <= due]

    def note_overdue(self, uid: str, *, has_room: bool) -> None:
        """Note that kube-scheduler has not asked about a pod: if there is room, its own filters exclude every node."""
        with self._lock:
            waiting = self._waiting.get(uid)
            if waiting is None or not waiting.expected:
                return
            if has_room:
                self._note_futile(waiting)
            else:
                # Another pod was faster, so that counting resources excluded the node.
                waiting.expected, waiting.requeued_at = "", 0.0

    def note_searched(self, uid: str, *, is_incomplete: bool) -> None:
        """Note whether nodes are left that were not searched for a pod."""
        with self._lock:
            waiting = self._waiting.get(uid)
            if waiting is not None:
                waiting.is_incomplete = is_incomplete
                waiting.searched_at = waiting.searched_at if is_incomplete else self._clock()

    def requeued(self) -> list[WaitingPod]:
        """Return the pods that were requeued and not filtered since: the room that was found for them is theirs."""
        with self._lock:
            return [each for each in self._waiting.values() if each.expected]

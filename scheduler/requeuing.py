"""Requeues waiting pods when there is room for them: as many as fit together, the highest priority and oldest first."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

import numpy as np
import structlog
from msgspec.structs import replace

from cluster.errors import ApiError, Conflict, NotFound
from cluster.interface import Cluster
from cluster.objects import PODS
from scheduler.cluster_state import ClusterState
from scheduler.extender import Extender
from scheduler.ledgers import Grant, LedgerCache, TrialCharges, charge_for
from scheduler.pods import SchedulerPod
from scheduler.waiting_pods import Candidate, WaitingPod, WaitingPods
from vcuda.charging import PodDemand
from vcuda.decision import Unavailable
from vcuda.fit_query import FitQuery, class_key, place_on_node
from vcuda.gpu_table import GpuTable
from vcuda.names import Names
from vcuda.node_fit import NodeFitter
from vcuda.node_problem import NodeProblem
from vcuda.placement import InsufficientGpus, PlacedSlices, peak_usage, placed_model
from vcuda.placement_strategies import PlacementStrategy

# kube-scheduler requeues most pods itself, within milliseconds of the event that made room. This long is left to it.
DELAY_S = 0.2
IDLE_S = 5.0
# With many waiting pods a pass takes long, and requests of kube-scheduler share the interpreter: so after a pass there
# is a pause, this many times as long, but not more than a few seconds.
PAUSES_PER_PASS, MAX_PAUSE_S = 20, 5.0
CALL_TIMEOUT_S = 5.0
# How many pods are tried in one pass; the rest follows in the next.
MAX_TRIED = 500
# How many pods with several containers are searched in one pass: all others wait meanwhile.
MAX_SEARCHED = 4
JOIN_TIMEOUT_S = 10.0
ANY_MODEL = Grant(is_charged=True)


class Requeuer:
    """A thread that requeues pods. It does nothing while `is_active` returns false: another replica schedules."""

    def __init__(
        self,
        cluster: Cluster,
        names: Names,
        *,
        state: ClusterState,
        waiting: WaitingPods,
        extender: Extender,
        ledgers: LedgerCache,
        is_active: Callable[[], bool],
    ) -> None:
        self._cluster, self._names, self._state = cluster.with_timeout(CALL_TIMEOUT_S), names, state
        self._waiting, self._extender, self._ledgers, self._is_active = waiting, extender, ledgers, is_active
        self._room = threading.Event()
        self._stopping = threading.Event()
        self.requeued = 0
        self.on_requeued: Callable[[], None] = lambda: None
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="requeuer", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> "Requeuer":
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self._room.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def note_room(self, node: str) -> None:
        self._waiting.note_room(node)
        self.wake()

    def note_ledger(self, namespace: str) -> None:
        self._waiting.note_ledger(namespace)
        self.wake()

    def wake(self) -> None:
        """Look for pods to requeue, if any wait."""
        if len(self._waiting):
            self._room.set()

    def _run(self) -> None:
        pause_s = DELAY_S
        while not self._stopping.is_set():
            # Also without an event: a requeued pod that kube-scheduler never asked about is found by time.
            self._room.wait(IDLE_S)
            if self._stopping.wait(pause_s):
                return
            self._room.clear()
            began = time.thread_time()
            try:
                if self._is_active() and len(self._waiting):
                    self.requeue_fitting()
            except Exception:  # the outermost frame of the thread: it has to continue
                self._log.exception("requeue_failed")
            pause_s = min(max(DELAY_S, PAUSES_PER_PASS * (time.thread_time() - began)), MAX_PAUSE_S)

    def requeue_fitting(self) -> int:
        """Requeue the waiting pods that fit now; returns how many."""
        for waiting in self._waiting.overdue():
            self._waiting.note_overdue(waiting.pod.uid, has_room=self._has_room(waiting.pod, waiting.expected))
        events = self._waiting.events
        candidates = self._search_on(self._waiting.candidates())
        if not candidates:
            return 0
        if len(candidates) > MAX_TRIED:
            self._room.set()
        count = 0
        for pod, node in self._choose(candidates[:MAX_TRIED]):
            if not node:
                self._waiting.note_tried(pod.uid, events)
            elif self._waiting.note_requeued(pod.uid, node, events):
                count += self._requeue(pod)
        return count

    def _has_room(self, pod: SchedulerPod, node: str) -> bool:
        query = self._query(pod)
        if query is None:
            return False
        try:
            # What the pod is nominated for is free for itself.
            self._state.place(query, node, pod.uid)
        except InsufficientGpus:
            return False
        return True

    def _search_on(self, candidates: list[Candidate]) -> list[Candidate]:
        """Continue the search for pods of which some nodes were not searched; returns all that can be tried now.

        A few at a time, each until all nodes are searched: what is known of more kinds of pods is not kept.
        """
        complete = [each for each in candidates if not each[0].is_incomplete]
        incomplete = [waiting for waiting, _ in candidates if waiting.is_incomplete]
        if len(incomplete) > MAX_SEARCHED:
            self._room.set()
        incomplete.sort(key=lambda each: (each.searched_at, each.pod.queue_position))
        searched: list[Candidate] = [(each, self._search_nodes(each)) for each in incomplete[:MAX_SEARCHED]]
        return sorted(complete + searched, key=lambda each: each[0].pod.queue_position)

    def _search_nodes(self, waiting: WaitingPod) -> list[str]:
        """Continue the search for a pod; returns the nodes on which it fits."""
        query = self._query(waiting.pod)
        nodes = self._state.fit(query, self._state.node_names()).by_problem() if query is not None else {}
        # The next pass goes on where this one stopped.
        is_incomplete = NodeProblem.NOT_SEARCHED in nodes
        self._waiting.note_searched(waiting.pod.uid, is_incomplete=is_incomplete)
        if is_incomplete:
            self._room.set()
        if found := nodes.get(NodeProblem.NONE, ()):
            # Not an event, but as good as one: the pod does not know of it yet.
            self._waiting.note_not_requeued(waiting.pod.uid)
        return list(found)

    def _choose(self, candidates: list[Candidate]) -> list[tuple[SchedulerPod, str]]:
        """Return the pods, each with a node on which it fits beside those before it; empty if there is none."""
        with self._state.lock:
            trial = Trial(self._state.table.copy(), TrialCharges(self._ledgers))
        for each in self._waiting.requeued():
            if (query := self._query(each.pod)) is not None:
                trial.take_best(each.pod, [each.expected], query)
        return [(waiting.pod, self._choose_node(trial, waiting.pod, nodes)) for waiting, nodes in candidates]

    def _choose_node(self, trial: "Trial", pod: SchedulerPod, nodes: list[str] | None) -> str:
        if (nomination := self._state.nomination(pod.uid)) is not None:
            return nomination.node if self._has_room(pod, nomination.node) else ""
        # What its quota allows is looked up only where there is room: with many waiting pods, that takes the most time.
        if not trial.has_room(pod, nodes, self._trial_query(pod, ANY_MODEL)):
            return ""
        query = self._query(pod)
        return trial.take_best(pod, nodes, query) if query is not None else ""

    def _query(self, pod: SchedulerPod) -> FitQuery | None:
        """Return what is asked for a pod; None if its quota allows nothing."""
        grant = self._extender.grant(pod)
        is_allowed = grant.is_charged and (grant.models is None or bool(grant.models))
        return self._trial_query(pod, grant) if is_allowed else None

    def _trial_query(self, pod: SchedulerPod, grant: Grant) -> FitQuery:
        # It only matters whether there is a node, and this strategy needs no estimates of what nodes will still take.
        return replace(self._extender.query(pod, grant), strategy=PlacementStrategy.BINPACK)

    def _requeue(self, pod: SchedulerPod) -> int:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        changes = {"metadata": {"uid": pod.uid, "annotations": {self._names.requeue: now}}}
        try:
            self._cluster.patch(PODS, pod.metadata.name, pod.metadata.namespace, changes)
        except (NotFound, Conflict):
            self._waiting.remove(pod.uid)
            return 0
        except (ApiError, Unavailable) as error:
            self._log.warning("pod_not_requeued", pod=pod.title, error=str(error))
            self._waiting.note_not_requeued(pod.uid)
            self._room.set()
            return 0
        self.requeued += 1
        self.on_requeued()
        return 1


class Trial:
    """GPUs and quotas while pods are tried together, without an effect on the cluster."""

    def __init__(self, table: GpuTable, charges: TrialCharges) -> None:
        self._table, self._charges = table, charges
        self._fitter = NodeFitter(table)
        self._everywhere = list(table.names())
        # Room and quota only shrink: where one pod does not fit, an equal one does not either.
        self._refused: set[tuple[object, ...]] = set()

    def has_room(self, pod: SchedulerPod, names: list[str] | None, query: FitQuery) -> bool:
        """Whether a pod may fit on one of these nodes, or of all."""
        if (key := refusal_key(pod, names, query)) in self._refused:
            return False
        problems = self._fitter.fit(self._everywhere if names is None else names, query).problems
        if np.isin(problems, (NodeProblem.NONE, NodeProblem.NOT_SEARCHED)).any():
            return True
        self._refused.add(key)
        return False

    def take_best(self, pod: SchedulerPod, names: list[str] | None, query: FitQuery) -> str:
        """Take GPUs and quota for a pod on the best of these nodes, or of all; returns the node, empty if none fits."""
        if (key := refusal_key(pod, names, query)) in self._refused:
            return ""
        nodes = self._everywhere if names is None else names
        while (best := self._place_on_best(nodes, query)) is not None:
            name, placed = best
            model, card_mib = placed_model(placed, self._table.gpus(name))
            wanted = charge_for(model, PodDemand(query.request, query.unit_mib), card_mib)
            if self._charges.move(pod.metadata.namespace, pod.key, wanted):
                self._table.take(name, peak_usage(query.request, placed))
                return name
            query = replace(query, granted=(query.granted or frozenset()) - {model})
        self._refused.add(key)
        return ""

    def _place_on_best(self, names: list[str], query: FitQuery) -> tuple[str, PlacedSlices] | None:
        fits = self._fitter.fit(names, query)
        for position in fits.ranked():
            name: str = fits.names[position]
            with suppress(InsufficientGpus):
                return name, place_on_node(query, name, self._table.available_gpus(name))
        return None


def refusal_key(pod: SchedulerPod, names: list[str] | None, query: FitQuery) -> tuple[object, ...]:
    """Return what pods have in common of which none fits if one does not."""
    group = pod.workload if query.excluded else (pod.metadata.namespace, "")
    return (*class_key(query), group, tuple(names or ()))

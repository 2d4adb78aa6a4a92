"""Requeues waiting pods when there is room for them: as many as fit together, the highest priority and oldest first."""

import threading
from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from cluster.errors import ApiError
from cluster.interface import Cluster
from cluster.objects import PODS
from scheduler.cluster_state import ClusterState
from scheduler.extender import Extender
from scheduler.pods import SchedulerPod
from scheduler.waiting_pods import WaitingPod, WaitingPods
from vcuda.decision import Unavailable
from vcuda.gpu_table import GpuTable
from vcuda.names import Names
from vcuda.node_fit import FitQuery, NodeFitter, allowed_gpus
from vcuda.placement import InsufficientGpus, peak_usage, place_pod

# kube-scheduler requeues most pods itself, within milliseconds of the event that made room. This long is left to it.
DELAY_S = 0.2
CALL_TIMEOUT_S = 5.0
# How many pods are tried in one pass; the rest follows in the next.
MAX_TRIED = 500
JOIN_TIMEOUT_S = 10.0


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
        is_active: Callable[[], bool],
    ) -> None:
        self._cluster, self._names, self._state = cluster.with_timeout(CALL_TIMEOUT_S), names, state
        self._waiting, self._extender, self._is_active = waiting, extender, is_active
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
        if len(self._waiting):
            self._room.set()

    def note_ledger(self, namespace: str) -> None:
        if self._waiting.note_ledger(namespace):
            self._room.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._room.wait()
            if self._stopping.wait(DELAY_S):
                return
            self._room.clear()
            try:
                if self._is_active():
                    self.requeue_fitting()
            except Exception:  # the outermost frame of the thread: it has to continue
                self._log.exception("requeue_failed")

    def requeue_fitting(self) -> int:
        """Requeue the waiting pods that fit now; returns how many."""
        events = self._waiting.events
        candidates = self._waiting.candidates()
        if len(candidates) > MAX_TRIED:
            self._room.set()
        count = 0
        for pod, node in self._choose(candidates[:MAX_TRIED]):
            if self._waiting.note_requeued(pod.uid, node, events):
                count += self._requeue(pod)
        return count

    def _choose(self, candidates: list[tuple[WaitingPod, list[str] | None]]) -> list[tuple[SchedulerPod, str]]:
        """Return the pods that fit together, each with its node."""
        with self._state.lock:
            requeued = self._waiting.requeued()
            names = {each for _, nodes in candidates for each in nodes or ()} | {each.expected for each in requeued}
            if any(nodes is None for _, nodes in candidates):
                names = set(self._state.table.names())
            trial = self._state.table.extract(names)
        fitter = NodeFitter(trial)
        chosen: list[tuple[SchedulerPod, str]] = []
        for waiting in requeued:
            query = self._extender.query(waiting.pod, self._extender.grant(waiting.pod))
            take_best(trial, fitter, [waiting.expected], query)
        hopeless: set[tuple[object, ...]] = set()
        for waiting, nodes in candidates:
            pod = waiting.pod
            grant = self._extender.grant(pod)
            if not grant.is_charged:
                continue
            query = self._extender.query(pod, grant)
            key = (query.request, query.options, query.granted, query.pools, pod.owner, tuple(nodes or ()))
            # Room only shrinks during a pass: where one pod does not fit, an equal one does not either.
            if key in hopeless:
                continue
            node = take_best(trial, fitter, sorted(names if nodes is None else nodes), query)
            if node:
                chosen.append((pod, node))
            else:
                hopeless.add(key)
        return chosen

    def _requeue(self, pod: SchedulerPod) -> int:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        changes = {"metadata": {"uid": pod.uid, "annotations": {self._names.requeue: now}}}
        try:
            self._cluster.patch(PODS, pod.metadata.name, pod.metadata.namespace, changes)
        except (ApiError, Unavailable) as error:
            self._log.warning("pod_not_requeued", pod=pod.title, error=str(error))
            return 0
        self.requeued += 1
        self.on_requeued()
        return 1


def take_best(table: GpuTable, fitter: NodeFitter, names: list[str], query: FitQuery) -> str:
    """Take GPUs for a pod on the best of these nodes; returns the node, empty if it fits on none."""
    fits = fitter.fit(names, query)
    for position in fits.ranked():
        name: str = fits.names[position]
        gpus = allowed_gpus(query, name, table.available_gpus(name))
        try:
            placed = place_pod(
                query.request, gpus, unit_mib=query.unit_mib, options=query.options, strategy=query.strategy
            )
        except InsufficientGpus:
            continue
        table.take(name, peak_usage(query.request, placed))
        return name
    return ""

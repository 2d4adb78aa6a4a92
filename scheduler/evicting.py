"""Evicts pods of lower priority where kube-scheduler finds none to evict, or says on the pod that it would help."""

import threading
import time
from collections.abc import Callable, Sequence

import structlog

from cluster.errors import ApiError, Conflict, NotFound
from cluster.interface import Cluster
from cluster.objects import PODS
from scheduler.cluster_state import ClusterState
from scheduler.extender import Extender
from scheduler.node_candidates import Preemptor
from scheduler.nominations import Nomination
from scheduler.pods import SchedulerPod
from scheduler.preemption import Preemption, PreemptionPlanner
from scheduler.reporting import Reporter
from scheduler.waiting_pods import WaitingPods
from vcuda.decision import Unavailable
from vcuda.node_problem import NodeProblem
from vcuda.preemption import PreemptablePod
from vcuda.recent import keep_recent

# kube-scheduler looks for victims right after a refusal. This long is left to it.
DELAY_S, POLL_S = 1.0, 0.25
# A pass takes some 10 ms for each pod on a large cluster, and requests of kube-scheduler share the interpreter.
MAX_PER_PASS, PAUSES_PER_PASS, MAX_PAUSE_S = 4, 20, 5.0
# Pods that were refused and not looked at yet.
MAX_REFUSED = 256
EVICTION_TRIES, RETRY_S = 5, 1.0
# How long the Evictions of one pod may take.
EVICTED_WITHIN_S = 60.0
# How long a pod is not tried again that the API server did not evict, and how many plans are tried without such pods.
SPARED_S, MAX_SPARED, PLANS = 300.0, 1000, 3
# Forbidden, and not valid: the answers of admission.
REFUSED = (403, 422)
CALL_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 10.0


class Evictor:
    """A thread. It does nothing while `is_active` returns false: another replica schedules."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        planner: PreemptionPlanner,
        state: ClusterState,
        extender: Extender,
        waiting: WaitingPods,
        reporter: Reporter,
        is_active: Callable[[], bool],
        is_enabled: bool,
    ) -> None:
        self._cluster, self._planner, self._state = cluster.with_timeout(CALL_TIMEOUT_S), planner, state
        self._extender, self._waiting, self._reporter = extender, waiting, reporter
        self._is_active, self._is_enabled = is_active, is_enabled
        # Guards `_refused`: pods, with the nodes that passed kube-scheduler's own filters, and when.
        self._lock = threading.Lock()
        self._refused: dict[str, tuple[SchedulerPod, Sequence[str], float]] = {}
        # Pods that the API server did not evict, by UID, and until when they are left out. Used by the thread alone.
        self._spared: dict[str, float] = {}
        self._stopping = threading.Event()
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="evictor", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_TIMEOUT_S)

    def note_refused(self, pod: SchedulerPod, nodes: Sequence[str]) -> None:
        """Note a pod that fits on none of these nodes as they are."""
        with self._lock:
            keep_recent(self._refused, pod.uid, (pod, nodes, time.monotonic()), MAX_REFUSED)

    def _run(self) -> None:
        pause_s = POLL_S
        while not self._stopping.wait(pause_s):
            began = time.thread_time()
            try:
                if self._is_active():
                    self.run_once()
            except Exception:  # the outermost frame of the thread: it has to continue
                self._log.exception("eviction_failed")
            pause_s = min(max(POLL_S, PAUSES_PER_PASS * (time.thread_time() - began)), MAX_PAUSE_S)

    def run_once(self, delay_s: float = DELAY_S) -> None:
        """Make room for pods that were refused so long ago."""
        for pod, nodes in self._due(delay_s):
            self.make_room(pod, nodes)

    def _due(self, delay_s: float) -> list[tuple[SchedulerPod, Sequence[str]]]:
        """Return pods that kube-scheduler has had time to look for victims for, the most important ones first."""
        with self._lock:
            before = time.monotonic() - delay_s
            due = sorted(
                (each for each in self._refused.values() if each[2] <= before), key=lambda each: each[0].queue_position
            )[:MAX_PER_PASS]
            for pod, _, _ in due:
                del self._refused[pod.uid]
            return [(pod, nodes) for pod, nodes, _ in due]

    def make_room(self, pod: SchedulerPod, nodes: Sequence[str]) -> None:
        """Evict pods for one that waits, or say on the pod that it would help."""
        for _ in range(PLANS):
            found = self._plan(pod, nodes)
            if found is None:
                return
            if not self._is_enabled:
                self._reporter.report_preemptable(pod, found.victims.node, len(found.victims.pods))
                return
            own = self._state.nomination(pod.uid)
            if not found.uids or own is None or self._evict_all(own, found):
                return
            with self._state.lock:
                # Not another one, which kube-scheduler may have asked for meanwhile.
                if self._state.nomination(pod.uid) is own:
                    self._state.end_nomination(pod.uid)

    def _plan(self, pod: SchedulerPod, nodes: Sequence[str]) -> Preemption | None:
        """Choose victims and, if they are to be evicted, nominate the pod; None if nothing is to be done."""
        grant = self._extender.grant(pod)
        if not grant.is_charged:
            return None
        query, now = self._extender.query(pod, grant), time.monotonic()
        self._spared = {uid: until for uid, until in self._spared.items() if until > now}
        with self._state.lock:
            # Room may have appeared since it was refused: kube-scheduler will ask again.
            if not self._is_waiting(pod) or (self._state.fit(query, nodes).problems == NodeProblem.NONE).any():
                return None
            found = self._planner.plan(Preemptor(pod, query, evicts=True, spared=self._spared), nodes)
            if found is None or (not self._is_enabled and not found.uids):
                return None
            if self._is_enabled:
                # Before anything is evicted: the room must not be taken by another pod.
                node = found.victims.node
                self._state.nominate(pod, node, found.placed, found.awaited, timeout_s=EVICTED_WITHIN_S)
            return found

    def _is_waiting(self, pod: SchedulerPod) -> bool:
        state = self._state
        is_known = self._waiting.get(pod.uid) is not None and not state.is_gone(pod.uid)
        return is_known and state.claim(pod.uid) is None and state.nomination(pod.uid) is None

    def _evict_all(self, nomination: Nomination, found: Preemption) -> bool:
        """Evict all victims of a nominated pod; returns whether any was, or is being, evicted."""
        pod, victims, node = nomination.pod, found.victims.pods, found.victims.node
        try:
            current = self._cluster.get(PODS, pod.metadata.name, pod.metadata.namespace)
            if current.metadata.uid != pod.uid or current.metadata.deletion_timestamp or current.spec.node_name:
                return False
        except (ApiError, Unavailable) as error:
            self._log.info("eviction_not_possible", pod=pod.title, node=node, error=str(error))
            return False
        # All or none: where one cannot be evicted, the others would be in vain.
        checked = [self._is_evictable(pod, victim) for victim in victims]
        if not all(checked):
            return False
        self._state.note_evicted(nomination, found.uids)
        self._reporter.report_preempting(pod, node, len(victims))
        self._nominate(pod, node)
        evicted = sum([self._evict_patiently(nomination, victim) for victim in victims])
        return evicted > 0

    def _is_evictable(self, pod: SchedulerPod, victim: PreemptablePod) -> bool:
        """Whether the API server would evict a pod; one that it would not is left out for a while."""
        try:
            self._evict(victim, dry_run=True)
        except (NotFound, Conflict):
            # It has ended: the choice is to be made again without it.
            return False
        except (ApiError, Unavailable) as error:
            self._log.info("eviction_not_possible", pod=pod.title, victim=victim.title, error=str(error))
            if is_refusal(error):
                keep_recent(self._spared, victim.uid, time.monotonic() + SPARED_S, MAX_SPARED)
            return False
        return True

    def _is_wanted(self, nomination: Nomination) -> bool:
        """Whether a pod still waits for what it was nominated for: not if it was deleted, say."""
        return self._state.nomination(nomination.pod.uid) is nomination and self._is_active()

    def _nominate(self, pod: SchedulerPod, node: str) -> None:
        """Tell kube-scheduler, which then counts the pod on that node; it works without, too."""
        try:
            status = {"metadata": {"uid": pod.uid}, "status": {"nominatedNodeName": node}}
            self._cluster.patch(PODS, pod.metadata.name, pod.metadata.namespace, status, subresource="status")
        except (ApiError, Unavailable) as error:
            self._log.warning("pod_not_nominated", pod=pod.title, node=node, error=str(error))

    def _evict_patiently(self, nomination: Nomination, victim: PreemptablePod) -> bool:
        # Read before: the watch forgets a pod as soon as it has ended.
        pod, evicted = nomination.pod, self._state.pod(victim.uid)
        for _ in range(EVICTION_TRIES):
            if not self._is_wanted(nomination):
                return False
            try:
                self._evict(victim)
            except (NotFound, Conflict):
                # It has ended by itself, or another pod has its name: the GPUs are free.
                return True
            except (ApiError, Unavailable) as error:
                self._log.warning("pod_not_evicted", pod=victim.title, preemptor=pod.title, error=str(error))
                if self._stopping.wait(RETRY_S):
                    return False
            else:
                self._log.info("pod_evicted", pod=victim.title, preemptor=pod.title)
                if evicted is not None:
                    self._reporter.report_evicted(evicted, pod, evicted.node)
                return True
        return False

    def _evict(self, victim: PreemptablePod, *, dry_run: bool = False) -> None:
        namespace, _, name = victim.title.partition("/")
        self._cluster.evict(name, namespace, uid=victim.uid, dry_run=dry_run)


def is_refusal(error: ApiError | Unavailable) -> bool:
    """Whether an eviction failed for a reason that lasts: not because the API server is overloaded, say.

    For a PodDisruptionBudget the code is that of an overloaded server, and for several that of an internal error.
    """
    return isinstance(error, ApiError) and (error.code in REFUSED or "disruption" in str(error).lower())

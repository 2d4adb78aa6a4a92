"""What a preemptor sees of a node: which pods could be evicted, and what is free when those that end have ended."""

import time
from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct

from scheduler.cluster_state import ClusterState
from scheduler.disruption_budgets import BudgetSnapshot
from scheduler.extender_api import MetaVictims
from scheduler.holdings import Holding
from scheduler.pods import SchedulerPod
from vcuda.fit_query import FitQuery
from vcuda.gpu_availability import GpuUsage, sum_usage
from vcuda.host import Host
from vcuda.preemption import Constraints, NodeRoom, PreemptablePod
from vcuda.vocabulary import CORES_PER_CARD

# How soon a pod that is being deleted has to end so that its GPUs are waited for: its owner chooses its grace period.
# And how long they are after the end of that period: a process that hangs in the driver never ends.
LEAVING_WITHIN_S = 60.0


class Preemptor(Struct, frozen=True):
    """A pod for which others may be evicted. With `evicts`, through the Eviction API, and not `spared` ones."""

    pod: SchedulerPod
    query: FitQuery
    evicts: bool = False
    spared: Collection[str] = ()


class NodeCandidates(Struct, frozen=True):
    """The GPU pods of a node that could be evicted, and kube-scheduler's own victims that have to stay victims.

    `leaving` are the GPUs of pods that end without a further eviction; they count as free.
    """

    room: NodeRoom
    candidates: tuple[PreemptablePod, ...]
    leaving: Mapping[str, GpuUsage]
    leaving_uids: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    # All of kube-scheduler's own victims, if all of them can be evicted.
    asked: frozenset[str] = frozenset()
    # How many of the required pods without GPUs have a PodDisruptionBudget, at most.
    required_violations: int = 0
    # Whether it is known what CPU and memory all of the required pods free.
    is_host_known: bool = True

    def has_host(self, requested: Host, evicted: Iterable[PreemptablePod]) -> bool:
        """Whether the node has the CPU and memory for a pod without some others."""
        if not self.is_host_known:
            return True
        return sum((pod.host for pod in evicted), self.room.host).covers(requested)

    def constraints(self, budgets: BudgetSnapshot, *, is_strict: bool) -> Constraints:
        return Constraints(
            budgets.allowed,
            required=self.required,
            required_violations=self.required_violations,
            checks_host=self.is_host_known,
            is_strict=is_strict,
        )


class CandidateReader:
    """Reads the candidates of nodes. The caller holds the state's lock."""

    def __init__(self, state: ClusterState, budgets: BudgetSnapshot, preemptor: Preemptor) -> None:
        self._state, self._budgets, self._preemptor = state, budgets, preemptor
        self._evicted, self._now_s = state.evicted(preemptor.pod.uid), time.time()

    def has_candidates(self, name: str) -> bool:
        """Whether a pod of a lower priority runs on a node, or one that is being deleted."""
        priority = self._preemptor.pod.priority
        return any(pod.priority < priority or pod.is_deleting for pod, _ in self._state.pods_on(name))

    def read(self, name: str, asked: MetaVictims | None = None) -> NodeCandidates:
        """Return the candidates of a node; `asked` are kube-scheduler's own victims there."""
        candidates, leaving, leaving_uids = [], [], []
        for pod, holding in self._state.pods_on(name):
            if self._is_leaving(pod):
                leaving.append(holding)
                leaving_uids.append(pod.uid)
            elif self._is_candidate(pod):
                candidates.append(self._preemptable(pod, holding))
        freed = sum_usage(each.usage for each in leaving)
        table = self._state.table
        free = Host(*table.host(name)) if name in table else Host()
        host = sum((each.host for each in leaving), free)
        room = NodeRoom(name, table.available_gpus(name, freed), host)
        found = NodeCandidates(room, tuple(candidates), freed, tuple(leaving_uids))
        return self._with_required(found, asked) if asked is not None and asked.uids else found

    def _is_leaving(self, pod: SchedulerPod) -> bool:
        """Whether a pod ends soon without a further eviction: it is being deleted, or evicted for another pod."""
        node = self._state.node(pod.node)
        if node is not None and node.lost:
            return False
        is_ending = pod.is_deleting and abs(pod.ends_s - self._now_s) <= LEAVING_WITHIN_S
        return is_ending or (pod.uid in self._evicted and (pod.is_deleting or pod.uid not in self._preemptor.spared))

    def _is_candidate(self, pod: SchedulerPod) -> bool:
        is_lower = pod.priority < self._preemptor.pod.priority
        return is_lower and not pod.is_deleting and pod.uid not in self._preemptor.spared

    def _preemptable(self, pod: SchedulerPod, holding: Holding) -> PreemptablePod:
        budgets = self._budgets.as_evicted(pod) if self._preemptor.evicts else self._budgets.of(pod)
        return PreemptablePod(pod.uid, pod.title, pod.priority, pod.started_s, holding.usage, holding.host, budgets)

    def _with_required(self, found: NodeCandidates, asked: MetaVictims) -> NodeCandidates:
        """Add which of kube-scheduler's own victims have to stay victims.

        Pods without GPUs do: they free CPU, or what else the pod lacks. If nothing that is counted was missing, all do:
        they are in the way for another reason, such as a port or an affinity.
        """
        candidates = {pod.uid for pod in found.candidates}
        with_gpus = {pod.uid for pod, _ in self._state.pods_on(found.room.name)}
        others = [uid for uid in asked.uids if uid not in with_gpus]
        is_needed = candidates.__contains__ if self.has_counted_enough(found.room.name) else lambda _: False
        known = [pod for uid in others if (pod := self._without_gpus(uid)) is not None]
        unknown = [unknown_pod(uid) for uid in others if self._state.other_pod(uid) is None]
        return NodeCandidates(
            found.room,
            (*found.candidates, *known, *unknown),
            found.leaving,
            found.leaving_uids,
            required=frozenset([*others, *filter(is_needed, asked.uids)]),
            asked=frozenset(asked.uids) if candidates.issuperset(with_gpus.intersection(asked.uids)) else frozenset(),
            required_violations=min(asked.violations, len(others)),
            is_host_known=not unknown,
        )

    def _without_gpus(self, uid: str) -> PreemptablePod | None:
        pod = self._state.other_pod(uid)
        if pod is None:
            return None
        title = f"{pod.metadata.namespace}/{pod.metadata.name}"
        return PreemptablePod(uid, title, pod.priority, pod.started_s, {}, pod.host)

    def has_counted_enough(self, name: str) -> bool:
        """Whether nothing that kube-scheduler counts is missing on a node; pods that end still count for it."""
        table, query = self._state.table, self._preemptor.query
        host = Host(*table.host(name)) if name in table else Host()
        free_cores, free_units = self._free_counts(name)
        cores, units = query.request.resource_counts()
        return host.covers(query.host) and free_cores >= cores and free_units >= units

    def _free_counts(self, name: str) -> tuple[int, int]:
        """Return the cores and memory units that kube-scheduler counts as free on a node.

        Pods of at least the preemptor's priority that are nominated for the node count as if they ran there.
        """
        state, own = self._state, self._preemptor.pod
        node = state.node(name)
        total = node.counts if node is not None else None
        if total is None:
            usable = [each.gpu for each in state.table.available_gpus(name) if not each.unavailable_reason]
            total = CORES_PER_CARD * len(usable), sum(gpu.memory_mib // state.unit_mib for gpu in usable)
        nominated = [
            each.pod
            for each in state.nominations()
            if each.node == name and each.pod.uid != own.uid and each.pod.priority >= own.priority
        ]
        # kube-scheduler counts pods that are about to be bound like bound ones.
        claimed = [each.pod for each in state.claims() if each.node == name and each.pod.uid != own.uid]
        counted = {pod.uid: pod for pod in [*nominated, *claimed, *(pod for pod, _ in state.pods_on(name))]}
        held = [pod.request.resource_counts() for pod in counted.values()]
        return total[0] - sum(cores for cores, _ in held), total[1] - sum(units for _, units in held)


def unknown_pod(uid: str) -> PreemptablePod:
    """Return a pod of kube-scheduler's that is not cached: the most important one it could be."""
    return PreemptablePod(uid, uid, 2**31 - 1, 0.0, {})

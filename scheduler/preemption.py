"""Makes room for pods of higher priority: chooses pods to evict whose end really frees a fitting GPU.

kube-scheduler asks about nodes where counting resources makes room, and evicts what is answered. Where the counts fit
but no GPU does, it finds no pod to evict and does not ask; then pods are evicted here, through the Eviction API, if the
configuration allows that. Either way the pod is nominated for the GPUs, so that no other one takes them.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from scheduler.cluster_state import ClusterState
from scheduler.disruption_budgets import BudgetSnapshot, DisruptionBudgets
from scheduler.extender import Extender
from scheduler.extender_api import MetaVictims, PreemptionArgs
from scheduler.pods import SchedulerPod
from vcuda.fit_query import FitQuery
from vcuda.gpu_availability import GpuAvailability, GpuUsage, sum_usage
from vcuda.host import Host
from vcuda.node_fit import NodeFitter
from vcuda.node_problem import NodeProblem
from vcuda.placement import InsufficientGpus, PlacedSlices, SearchBudget, peak_cores
from vcuda.placement_strategies import PlacementStrategy
from vcuda.preemption import Constraints, NodeRoom, PreemptablePod, Victims, room_without, select_victims

# Nodes on which victims are searched one by one: those where the least important pods suffice, and most is free.
MAX_EXAMINED = 32
# Nodes that are looked at in any way, those with the most free cores first: all requests wait meanwhile.
MAX_LOOKED_AT = 500
# Search steps for one plan; one takes some 50 microseconds, and all requests wait meanwhile.
MAX_STEPS = 2000
# Below every priority: none is evicted.
NO_CANDIDATES = -(2**31) - 1
# How long kube-scheduler may take to evict the victims that it was told.
EVICTED_WITHIN_S = 30.0


class Preemption(Struct, frozen=True):
    """Pods to be evicted from a node, and the GPUs that the preemptor gets there; `kept` are kube-scheduler's own."""

    victims: Victims
    placed: PlacedSlices
    kept: tuple[str, ...] = ()
    # Pods of the node that end without a further eviction, and whose room is counted on.
    leaving: tuple[str, ...] = ()

    @property
    def uids(self) -> list[str]:
        """The pods to be evicted; none if it is enough to wait for those that end."""
        return list(dict.fromkeys([*(pod.uid for pod in self.victims.pods), *self.kept]))

    @property
    def awaited(self) -> list[str]:
        """The pods whose end makes the room."""
        return [*self.uids, *self.leaving]


class NodeCandidates(Struct, frozen=True):
    """What a preemptor sees of a node: which pods could be evicted, and what is free when those that end have ended."""

    room: NodeRoom
    candidates: tuple[PreemptablePod, ...]
    # What those that end hold of the GPUs; it counts as free.
    leaving: Mapping[str, GpuUsage]
    leaving_uids: tuple[str, ...] = ()


class PreemptionPlanner:
    """Decides whom to evict. Changes nothing but nominations."""

    def __init__(self, extender: Extender, state: ClusterState, budgets: DisruptionBudgets) -> None:
        self._extender, self._state, self._budgets = extender, state, budgets

    def answer(self, args: PreemptionArgs) -> dict[str, MetaVictims]:
        """Answer kube-scheduler: one node with the pods to evict from it, or none if no eviction helps.

        Only one, because the pod is nominated for its GPUs now, and kube-scheduler would choose among several.
        """
        asked, pod = args.by_node(), self._extender.read_pod(args.pod)
        if pod is None:
            return asked
        grant = self._extender.grant(pod)
        if not grant.is_charged:
            return {}
        query = self._extender.query(pod, grant)
        with self._state.lock:
            self._state.release_claim(pod.uid)
            if self._state.awaits_victims(pod.uid):
                # Others were evicted for it already, which kube-scheduler may not know.
                return {}
            found = self.plan(pod, query, asked.keys(), asked)
            if found is None:
                return {}
            node = found.victims.node
            self._state.nominate(pod, node, found.placed, found.awaited, timeout_s=EVICTED_WITHIN_S)
        if not found.uids:
            return {}
        violations = max(found.victims.violations, asked[node].violations if found.kept else 0)
        return {node: MetaVictims.of(found.uids, violations)}

    def restore(self, pod: SchedulerPod) -> bool:
        """Nominate a pod again whose node was made free by a process before this one; returns whether it was."""
        grant = self._extender.grant(pod)
        if not grant.is_charged:
            return False
        with self._state.lock:
            node = self._node_pods(pod, pod.nominated_node, self._budgets.snapshot(), self._ending())
            ending = [each.uid for each, _ in self._state.pods_on(pod.nominated_node) if each.is_deleting]
            try:
                placed = self._state.fitter.place(self._extender.query(pod, grant), pod.nominated_node, node.room.gpus)
            except InsufficientGpus:
                return False
            self._state.nominate(pod, pod.nominated_node, placed, ending, timeout_s=EVICTED_WITHIN_S)
            return True

    def plan(
        self,
        pod: SchedulerPod,
        query: FitQuery,
        nodes: Iterable[str],
        asked: Mapping[str, MetaVictims] | None = None,
        *,
        is_strict: bool = False,
    ) -> Preemption | None:
        """Return the evictions that do the least harm; None if none helps. The caller holds the lock.

        `asked` are kube-scheduler's own victims. With `is_strict`, no PodDisruptionBudget is violated.
        """
        with self._state.without_nominations([pod.uid]):
            budgets, ending = self._budgets.snapshot(), self._ending()
            by_node = {name: self._node_pods(pod, name, budgets, ending) for name in self._most_free(nodes)}
            by_node = {name: each for name, each in by_node.items() if each.candidates or each.leaving_uids or asked}
            if (waiting := self._without_eviction(query, by_node, asked)) is not None:
                return waiting
            promising, budget = self._promising(query, by_node), SearchBudget(MAX_STEPS)
            for strict in (True,) if is_strict else (True, False):
                tried = [
                    self._on_node(query, by_node[name], budgets, asked, budget, is_strict=strict) for name in promising
                ]
                if found := [each for each in tried if each is not None]:
                    return min(found, key=lambda each: each.victims.harm)
        return None

    def _ending(self) -> set[str]:
        """Return the victims of other pods: they end without a further eviction."""
        return {uid for each in self._state.nominations() for uid in each.victims}

    def _most_free(self, nodes: Iterable[str]) -> list[str]:
        """Return the nodes that are looked at: as kube-scheduler, not all of a large cluster."""
        names = list(nodes)
        if len(names) <= MAX_LOOKED_AT:
            return names
        free = self._state.table.node_cores()
        columns = self._state.table.columns_of(names)
        order = np.argsort(-np.where(columns >= 0, free[columns], -1), kind="stable")
        return [names[at] for at in order[:MAX_LOOKED_AT].tolist()]

    def _node_pods(
        self, preemptor: SchedulerPod, name: str, budgets: BudgetSnapshot, ending: set[str]
    ) -> NodeCandidates:
        candidates, leaving, leaving_uids = [], [], []
        for pod, holding in self._state.pods_on(name):
            if pod.is_deleting or pod.uid in ending:
                leaving.append(holding)
                leaving_uids.append(pod.uid)
            elif pod.priority < preemptor.priority:
                candidates.append(
                    PreemptablePod(
                        pod.uid,
                        pod.title,
                        pod.priority,
                        pod.started_s,
                        holding.usage,
                        holding.host,
                        budgets.of(pod),
                    )
                )
        freed = sum_usage(each.usage for each in leaving)
        gpus: list[GpuAvailability] = self._state.table.available_gpus(name, freed)
        free = Host(*self._state.table.host(name)) if name in self._state.table else Host()
        host = sum((each.host for each in leaving), free)
        return NodeCandidates(NodeRoom(name, gpus, host), tuple(candidates), freed, tuple(leaving_uids))

    def _promising(self, query: FitQuery, by_node: Mapping[str, NodeCandidates]) -> list[str]:
        """Return the nodes on which to search: where the pod fits if only the least important pods are evicted.

        Found by array operations for all nodes at once: searching all of them one by one would take seconds.
        """
        priorities = sorted({pod.priority for each in by_node.values() for pod in each.candidates})
        low, high, names = 0, len(priorities), self._fitting(query, by_node, None)
        while low < high:
            middle = (low + high) // 2
            if found := self._fitting(query, by_node, priorities[middle]):
                high, names = middle, found
            else:
                low = middle + 1
        free = {name: sum(each.free_cores for each in by_node[name].room.gpus) for name in names}
        return sorted(names, key=lambda name: (-free[name], name))[:MAX_EXAMINED]

    def _fitting(self, query: FitQuery, by_node: Mapping[str, NodeCandidates], priority: int | None) -> list[str]:
        """Return the nodes on which a pod fits without those up to a priority; None means without all candidates."""
        trial = self._state.table.copy()
        for name, each in by_node.items():
            evicted = [pod.usage for pod in each.candidates if priority is None or pod.priority <= priority]
            trial.give_back(name, sum_usage([*evicted, each.leaving]))
        fits = NodeFitter(trial).fit(list(by_node), replace(query, strategy=PlacementStrategy.BINPACK))
        may_fit = np.isin(fits.problems, (NodeProblem.NONE, NodeProblem.NOT_SEARCHED))
        names: list[str] = fits.names[may_fit].tolist()
        return names

    def _on_node(
        self,
        query: FitQuery,
        pods: NodeCandidates,
        budgets: BudgetSnapshot,
        asked: Mapping[str, MetaVictims] | None,
        budget: SearchBudget,
        *,
        is_strict: bool,
    ) -> Preemption | None:
        kept = self._kept(query, pods, asked[pods.room.name]) if asked is not None else ()
        known = {pod.uid for pod in pods.candidates}
        constraints = Constraints(
            budgets.allowed,
            required=frozenset(kept) & known,
            # If others than GPU pods are evicted, what they free is not known.
            checks_host=not set(kept) - known,
            is_strict=is_strict,
        )
        victims = select_victims(query, pods.room, pods.candidates, constraints, budget)
        if victims is None and set(kept) - known:
            # The GPUs fit as they are: something else is missing, for which kube-scheduler has its own victims.
            victims = Victims(pods.room.name, ())
        if victims is None:
            return None
        return self._preemption(query, pods, victims, tuple(kept))

    def _preemption(
        self, query: FitQuery, pods: NodeCandidates, victims: Victims, kept: tuple[str, ...] = ()
    ) -> Preemption | None:
        gpus, _ = room_without(pods.room, victims.pods)
        try:
            placed = self._state.fitter.place(query, pods.room.name, gpus, budget=SearchBudget(MAX_STEPS))
        except InsufficientGpus:
            return None
        return Preemption(victims, placed, kept, pods.leaving_uids)

    def _without_eviction(
        self, query: FitQuery, by_node: Mapping[str, NodeCandidates], asked: Mapping[str, MetaVictims] | None
    ) -> Preemption | None:
        """Return a node on which the pod fits as soon as pods have ended that are ending already; None if none does."""
        ending = {
            name: each
            for name, each in by_node.items()
            if each.leaving_uids and not (asked is not None and self._kept(query, each, asked[name]))
        }
        for name in sorted(self._fitting(query, ending, NO_CANDIDATES)) if ending else ():
            found = self._preemption(query, ending[name], Victims(name, ()))
            if found is not None:
                return found
        return None

    def _kept(self, query: FitQuery, pods: NodeCandidates, asked: MetaVictims) -> Sequence[str]:
        """Return which of kube-scheduler's own victims have to stay victims.

        Pods without GPUs do: they free CPU, or what else the pod lacks. If nothing that is counted was missing, all do:
        they are in the way for another reason, such as a port or an affinity.
        """
        name, table = pods.room.name, self._state.table
        candidates = {pod.uid for pod in pods.candidates}
        others = {pod.uid for pod, _ in self._state.pods_on(name)} - candidates
        # Pods that end still count for kube-scheduler.
        free_cores = sum(max(0, each.free_cores) for each in table.available_gpus(name))
        host = Host(*table.host(name)) if name in table else Host()
        is_counted_enough = host.covers(query.host) and free_cores >= peak_cores(query.request)
        return [uid for uid in asked.uids if uid not in others and (is_counted_enough or uid not in candidates)]

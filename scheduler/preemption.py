"""Makes room for pods of higher priority: chooses pods to evict whose end really frees a fitting GPU.

kube-scheduler asks about nodes where counting resources makes room, and evicts what is answered. Where the counts fit
but no GPU does, it finds no pod to evict and does not ask; then pods are evicted here, through the Eviction API, if the
configuration allows that. Either way the pod is nominated for the GPUs, so that no other one takes them.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from scheduler.cluster_state import ClusterState
from scheduler.disruption_budgets import BudgetSnapshot, DisruptionBudgets
from scheduler.extender import Extender
from scheduler.extender_api import MetaVictims, PreemptionArgs
from scheduler.node_candidates import CandidateReader, NodeCandidates, Preemptor
from scheduler.pods import SchedulerPod
from scheduler.waiting_pods import WaitingPods
from vcuda.decision import Unavailable
from vcuda.gpu_availability import sum_usage
from vcuda.node_fit import NodeFitter
from vcuda.node_problem import NodeProblem
from vcuda.placement import InsufficientGpus, PlacedSlices, SearchBudget
from vcuda.placement_strategies import PlacementStrategy
from vcuda.preemption import PreemptablePod, Victims, room_without, select_victims
from vcuda.recent import keep_recent

# Nodes on which victims are searched one by one: those where the least important pods suffice, and most is free.
MAX_EXAMINED = 32
# How many times as many nodes are examined if no victims were found on those.
MAX_ROUNDS = 8
# Nodes that are looked at for one pod, in turns: all requests wait meanwhile. For kube-scheduler's own question it is
# worth more time, as nothing else is scheduled until it is answered.
MAX_LOOKED_AT, MAX_LOOKED_AT_ALONE = 500, 100
# Search steps with PodDisruptionBudgets, and without; one takes some 50 microseconds, and all requests wait meanwhile.
MAX_STEPS = 2000
# How long kube-scheduler may take to evict the victims that it was told.
EVICTED_WITHIN_S = 30.0
# How far kube-scheduler's watch may be behind; and how often a pod is told, instead of evictions, that there is room.
BEHIND_S, TOLD_EVERY_S = 2.0, 600.0
# Pods of which it is remembered what was done for them.
MAX_REMEMBERED = 10_000

ByNode = Mapping[str, NodeCandidates]


class Preemption(Struct, frozen=True):
    """Pods to be evicted from a node, and the GPUs that the preemptor gets there."""

    victims: Victims
    placed: PlacedSlices
    # Pods of the node that end without a further eviction, and whose room is counted on.
    leaving: tuple[str, ...] = ()

    @property
    def uids(self) -> list[str]:
        """The pods to be evicted; none if it is enough to wait for those that end."""
        return [pod.uid for pod in self.victims.pods]

    @property
    def awaited(self) -> list[str]:
        """The pods whose end makes the room."""
        return [*self.uids, *self.leaving]


class PreemptionPlanner:
    """Decides whom to evict. Changes nothing but nominations."""

    def __init__(
        self, extender: Extender, state: ClusterState, budgets: DisruptionBudgets, waiting: WaitingPods
    ) -> None:
        self._extender, self._state, self._budgets, self._waiting = extender, state, budgets, waiting
        # How many times nodes were looked at for a pod: the search begins with others each time.
        self._turns: dict[str, int] = {}
        # When a pod was last told that there is room.
        self._told: dict[str, float] = {}

    def answer(self, args: PreemptionArgs) -> dict[str, MetaVictims]:
        """Answer kube-scheduler: one node with the pods to evict from it, or none if no eviction helps.

        Only one, because the pod is nominated for its GPUs now, and kube-scheduler would choose among several.
        """
        asked, pod = args.by_node(), self._extender.read_pod(args.pod) if args.pod is not None else None
        if pod is None:
            return asked
        grant = self._extender.grant(pod)
        if not grant.is_charged:
            return {}
        preemptor = Preemptor(pod, self._extender.query(pod, grant))
        with self._state.lock, suppress(Unavailable):
            self._extender.check_unbound(pod)
            self._state.release_claim(pod.uid)
            # Others were evicted for it already, or ended by themselves, which kube-scheduler may not know.
            if self._state.awaits_room(pod.uid, asked) or self._has_new_room(preemptor, asked):
                return {}
            found = self.plan(preemptor, asked.keys(), asked)
            if found is None:
                return {}
            node = found.victims.node
            self._state.nominate(pod, node, found.placed, found.awaited, evicted=found.uids, timeout_s=EVICTED_WITHIN_S)
            if found.uids:
                return {node: MetaVictims.of(found.uids, found.victims.violations)}
        return {}

    def restore(self, pod: SchedulerPod) -> bool:
        """Nominate a pod again whose node was made free by a process before this one; returns whether it was."""
        grant, name = self._extender.grant(pod), pod.nominated_node
        if not grant.is_charged:
            return False
        query = self._extender.query(pod, grant)
        with self._state.lock:
            if not self._state.is_waiting(pod.uid):
                return False
            # However long they take: it was for this pod that they were evicted.
            ending = [(each, holding) for each, holding in self._state.pods_on(name) if each.is_deleting]
            gpus = self._state.table.available_gpus(name, sum_usage(holding.usage for _, holding in ending))
            try:
                placed = self._state.fitter.place(query, name, gpus)
            except InsufficientGpus:
                return False
            uids = [each.uid for each, _ in ending]
            self._state.nominate(pod, name, placed, uids, evicted=uids, timeout_s=EVICTED_WITHIN_S)
            return True

    def _has_new_room(self, preemptor: Preemptor, asked: Mapping[str, MetaVictims]) -> bool:
        """Whether room has appeared a moment ago on one of these nodes, so that the pod fits without an eviction.

        A pod is told so once in a while: if it asks again, something else is in its way.
        """
        uid, now = preemptor.pod.uid, time.monotonic()
        if now < self._told.get(uid, -TOLD_EVERY_S) + TOLD_EVERY_S:
            return False
        # Pods without GPUs are in the way for another reason.
        names = [
            name
            for name, victims in asked.items()
            if self._waiting.had_room(name, BEHIND_S) and not any(map(self._state.other_pod, victims.uids))
        ]
        if not names:
            return False
        reader = CandidateReader(self._state, self._budgets.snapshot(), preemptor)
        with self._state.without_nominations([preemptor.pod.uid]):
            fits = self._state.fit(preemptor.query, names)
            fitting = fits.names[fits.problems == NodeProblem.NONE].tolist()
            has_room = any(reader.has_counted_enough(name) for name in fitting)
        if has_room:
            keep_recent(self._told, uid, now, MAX_REMEMBERED)
        return has_room

    def plan(
        self, preemptor: Preemptor, nodes: Iterable[str], asked: Mapping[str, MetaVictims] | None = None
    ) -> Preemption | None:
        """Return the evictions that do the least harm; None if none helps. The caller holds the lock.

        `asked` are kube-scheduler's own victims.
        """
        pod, budgets = preemptor.pod, self._budgets.snapshot()
        reader = CandidateReader(self._state, budgets, preemptor)
        names = [name for name in nodes if (asked and asked[name].uids) or reader.has_candidates(name)]
        names = self.nodes_in_turn(names, preemptor)
        # GPUs that pods of lower priority wait for are taken if nothing else helps.
        suspended = [[pod.uid]]
        if outranked := self._state.outranked_by(pod.priority):
            suspended.append([pod.uid, *outranked])
        by_nodes = list[ByNode]()
        for uids in suspended:
            with self._state.without_nominations(uids):
                by_nodes.append({name: reader.read(name, asked[name] if asked else None) for name in names})
                if (found := self._without_eviction(preemptor, by_nodes[-1])) is not None:
                    return found
        for uids, by_node in zip(suspended, by_nodes, strict=True):
            with self._state.without_nominations(uids):
                if (found := self._with_evictions(preemptor, by_node, budgets)) is not None:
                    return found
        return None

    def nodes_in_turn(self, names: list[str], preemptor: Preemptor) -> list[str]:
        """Return the nodes that are looked at: as kube-scheduler, not all of a large cluster, but others each time."""
        most = MAX_LOOKED_AT_ALONE if preemptor.evicts else MAX_LOOKED_AT
        if len(names) <= most:
            return names
        turn = self._turns.get(preemptor.pod.uid, 0)
        keep_recent(self._turns, preemptor.pod.uid, turn + 1, MAX_REMEMBERED)
        first = turn * most % len(names)
        return [*names[first:], *names[:first]][:most]

    def _without_eviction(self, preemptor: Preemptor, by_node: ByNode) -> Preemption | None:
        """Return a node on which the pod fits as soon as pods have ended that are ending already; None if none does."""
        ending = {name: each for name, each in by_node.items() if each.leaving_uids and not each.required}
        for name in sorted(self._fitting(preemptor, ending, {})) if ending else ():
            found = self._preemption(preemptor, ending[name], Victims(name, ()))
            if found is not None:
                return found
        return None

    def _with_evictions(self, preemptor: Preemptor, by_node: ByNode, budgets: BudgetSnapshot) -> Preemption | None:
        """Return the evictions that do the least harm, without a violation of a PodDisruptionBudget if possible."""
        for is_strict in (True,) if preemptor.evicts else (True, False):
            evictable = {
                name: [
                    pod for pod in each.candidates if not each.constraints(budgets, is_strict=is_strict).forbids(pod)
                ]
                for name, each in by_node.items()
            }
            budget, examined = SearchBudget(MAX_STEPS), set[str]()
            for _ in range(MAX_ROUNDS):
                names = self._promising(preemptor, by_node, evictable, examined)
                tried = [
                    self._on_node(preemptor, by_node[name], budgets, budget, is_strict=is_strict) for name in names
                ]
                if found := [each for each in tried if each is not None]:
                    return min(found, key=lambda each: each.victims.harm)
                examined.update(names)
                if not names or budget.left < 0:
                    break
        return None

    def _promising(
        self,
        preemptor: Preemptor,
        by_node: ByNode,
        evictable: Mapping[str, Sequence[PreemptablePod]],
        examined: Collection[str],
    ) -> list[str]:
        """Return the nodes on which to search next: where the pod fits if only the least important pods are evicted.

        Found by array operations for all nodes at once: searching all of them one by one would take seconds.
        """
        left = {name: each for name, each in by_node.items() if name not in examined}
        priorities = sorted({pod.priority for name in left for pod in evictable[name]})
        low, high, names = 0, len(priorities) - 1, list[str]()
        while low <= high:
            middle = (low + high) // 2
            evicted = {
                name: [pod for pod in evictable[name] if pod.priority <= priorities[middle] or pod.uid in each.required]
                for name, each in left.items()
            }
            if found := self._fitting(preemptor, left, evicted):
                high, names = middle - 1, found
            else:
                low = middle + 1
        free = {name: sum(each.free_cores for each in by_node[name].room.gpus) for name in names}
        return sorted(names, key=lambda name: (-free[name], name))[:MAX_EXAMINED]

    def _fitting(
        self, preemptor: Preemptor, by_node: ByNode, evicted: Mapping[str, Sequence[PreemptablePod]]
    ) -> list[str]:
        """Return the nodes on which a pod fits without some others."""
        trial = self._state.table.copy()
        trial.give_back_all(
            (name, usage)
            for name, each in by_node.items()
            for usage in (each.leaving, *(pod.usage for pod in evicted.get(name, ())))
        )
        query = replace(preemptor.query, strategy=PlacementStrategy.BINPACK)
        fits = NodeFitter(trial).fit(list(by_node), query)
        may_fit = np.isin(fits.problems, (NodeProblem.NONE, NodeProblem.NOT_SEARCHED))
        names: list[str] = fits.names[may_fit].tolist()
        return [name for name in names if by_node[name].has_host(query.host, evicted.get(name, ()))]

    def _on_node(
        self,
        preemptor: Preemptor,
        node: NodeCandidates,
        budgets: BudgetSnapshot,
        budget: SearchBudget,
        *,
        is_strict: bool,
    ) -> Preemption | None:
        constraints = node.constraints(budgets, is_strict=is_strict)
        victims = None
        if node.asked:
            # If they suffice: they may be in the way for other reasons as well, which kube-scheduler knows.
            asked = [pod for pod in node.candidates if pod.uid in node.asked]
            all_asked = replace(constraints, required=node.asked)
            victims = select_victims(preemptor.query, node.room, asked, all_asked, budget)
        if victims is None:
            victims = select_victims(preemptor.query, node.room, node.candidates, constraints, budget)
        return None if victims is None else self._preemption(preemptor, node, victims)

    def _preemption(self, preemptor: Preemptor, node: NodeCandidates, victims: Victims) -> Preemption | None:
        gpus, _ = room_without(node.room, victims.pods)
        try:
            placed = self._state.fitter.place(preemptor.query, node.room.name, gpus, budget=SearchBudget(MAX_STEPS))
        except InsufficientGpus:
            return None
        return Preemption(victims, placed, node.leaving_uids)

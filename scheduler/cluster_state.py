"""What the scheduler knows of the cluster: the GPUs of all nodes, and which pods hold what of them.

A pod holds GPUs from the moment it is filtered: kube-scheduler filters the next pod before this one is bound. Such a
*claim* ends when the pod is bound, is deleted, could not be scheduled, or after a timeout. From then on, what a bound
pod holds follows from its annotations. Watches keep everything up to date, one node at a time.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from msgspec import Struct

from cluster.gpu_nodes import GpuNode
from scheduler.holdings import Holding, Holdings
from scheduler.nominations import MAX_ENDING_S, Nomination, Nominations
from scheduler.pods import OtherPod, SchedulerPod, bound_usage
from vcuda.decision import Unavailable
from vcuda.fit_query import FitQuery
from vcuda.fit_summary import Refusals, describe_fits
from vcuda.gpu_availability import GpuAvailability
from vcuda.gpu_table import GpuTable
from vcuda.inventory import unavailable_reason
from vcuda.node_fit import NodeFits, NodeFitter
from vcuda.placement import PlacedSlices, peak_usage
from vcuda.placement_costs import WorkloadEstimate
from vcuda.pod_options import SpreadMembers
from vcuda.quota_usage import Charge
from vcuda.recent import keep_recent

MAX_GONE = 10_000
# For how long the GPUs of victims that have ended are left to the pod that is nominated for them: kube-scheduler may
# ask meanwhile whom to evict, if its watch is behind.
SETTLING_S = 15.0
# After how long a nominated node that kube-scheduler does not ask about counts as not accepted.
REJECTED_AFTER_S = 30.0


class Claim(Struct):
    """The GPUs that were chosen for a pod which is not known to be bound yet.

    `expires_at` is None as soon as its binding is being written. After that, `confirm_at` is when the watch should have
    shown the pod as bound, and `is_unsettled` means that only a read can tell whether it is; until `settle_at` the
    Binding may still take effect.
    """

    pod: SchedulerPod
    node: str
    placed: PlacedSlices
    number: int
    group: str = ""
    expires_at: float | None = None
    confirm_at: float | None = None
    is_unsettled: bool = False
    settle_at: float = 0.0
    # The charge that was added to the ledger for this binding.
    extended: Charge | None = None

    def check_not_binding(self) -> None:
        """Raise Unavailable while the pod is being bound, or it is not known whether it was."""
        if self.is_unsettled:
            raise Unavailable(f"pod {self.pod.title}: it is not known yet whether it was bound to node {self.node}")
        if self.expires_at is None:
            raise Unavailable(f"pod {self.pod.title} is being bound to node {self.node}")


class ClusterState:
    """Thread-safe. `on_room` is called, with the lock held, with every node of which GPUs may have become free."""

    def __init__(self, unit_mib: int, clock: Callable[[], float], estimate: WorkloadEstimate | None = None) -> None:
        self.unit_mib, self._clock = unit_mib, clock
        # Guards everything below: a pod is filtered and its GPUs are claimed in one step.
        self.lock = threading.RLock()
        self.table = GpuTable()
        self._nodes: dict[str, GpuNode] = {}
        self._pods: dict[str, SchedulerPod] = {}
        # Bound pods without GPUs, by UID.
        self._other_pods: dict[str, OtherPod] = {}
        self._claims: dict[str, Claim] = {}
        self._holdings = Holdings(self.table)
        self._nominations = Nominations(self.table, self._holdings, self._claims.__contains__)
        self._members: dict[tuple[str, str], set[str]] = {}
        # How many bound pods have each priority.
        self._priorities: Counter[int] = Counter()
        # Pods that are gone from the API while their node is lost: their containers may still run.
        self._orphans: dict[str, str] = {}
        # Pods that ended a while ago, oldest first: kube-scheduler's watch may be behind ours.
        self._gone: dict[str, None] = {}
        self.fitter = NodeFitter(self.table, estimate)
        self._numbers = itertools.count()
        self._card_sizes: dict[str, int] | None = None
        self.on_room: Callable[[str], None] = lambda _: None
        # Called with a pod that kube-scheduler reports as unschedulable.
        self.on_unschedulable: Callable[[SchedulerPod], None] = lambda _: None
        # Called when a bound pod has ended.
        self.on_departure: Callable[[], None] = lambda: None
        # Called with the UID of a pod that need not be scheduled any more.
        self.on_gone: Callable[[str], None] = lambda _: None

    # Nodes.

    def handle_node(self, old: GpuNode | None, new: GpuNode | None) -> None:
        """Take over a change of a node; a handler of its informer."""
        with self.lock:
            if new is None:
                if old is not None:
                    self._remove_node(old.metadata.name)
                return
            name, before = new.metadata.name, self._nodes.get(new.metadata.name)
            self._nodes[name] = new
            if before is not None and before.lost and not new.lost:
                self._release_orphans(name)
            if before is not None and (before.gpus, before.pool) == (new.gpus, new.pool):
                if before.host != new.host:
                    self._holdings.hosts.set_node(name, new.host)
                return
            self._card_sizes = None
            self.table.set_node(name, new.gpus, new.pool, unavailable_reason)
            self._holdings.hosts.set_node(name, new.host)
            self._take_again(name)
            self.on_room(name)

    def _remove_node(self, name: str) -> None:
        self._nodes.pop(name, None)
        self._card_sizes = None
        self.table.remove_node(name)
        self._holdings.hosts.remove_node(name)
        for uid in list(self._holdings.pods_on(name)):
            claim, nomination = self._claims.get(uid), self._nominations.get(uid)
            if nomination is not None and nomination.node == name:
                self.end_nomination(uid)
            if claim is not None and claim.expires_at is not None:
                self._drop(uid)
        self._release_orphans(name)

    def _take_again(self, name: str) -> None:
        """Subtract from the GPUs of a node, which are new in the table, what its pods hold."""
        uids = self._holdings.pods_on(name)
        present = {gpu.uuid for gpu in self.table.gpus(name)}
        # Pods with a known placement first: the others are placed on what these leave.
        for uid in sorted(uids, key=lambda uid: (not self._is_placed(uid, present), self._created_s(uid), uid)):
            claim, pod, holding = self._claims.get(uid), self._pods.get(uid), self._holdings.get(uid)
            usage = holding.usage if holding else {}
            if claim is None and pod is not None and pod.node:
                usage = bound_usage(pod, self.table.available_gpus(name), self.unit_mib)
            self._holdings.take_again(uid, usage)

    def _is_placed(self, uid: str, gpus: set[str]) -> bool:
        """Whether it is known which of these GPUs a pod holds; those of its placement may have vanished."""
        pod = self._pods.get(uid)
        if uid in self._claims or self._nominations.get(uid) or pod is None or pod.minors:
            return True
        return any(each.uuid in gpus for slices in (pod.placed or {}).values() for each in slices)

    def _created_s(self, uid: str) -> float:
        pod = self._pods.get(uid)
        return pod.created_s if pod else 0.0

    def node_names(self) -> list[str]:
        with self.lock:
            return list(self.table.names())

    def node(self, name: str) -> GpuNode | None:
        with self.lock:
            return self._nodes.get(name)

    def addresses(self) -> dict[str, str]:
        """Return the addresses of all nodes that have one."""
        with self.lock:
            return {name: node.address for name, node in self._nodes.items() if node.address and name in self.table}

    def set_busy(self, node: str, uuids: Collection[str]) -> None:
        """Set which GPUs of a node are measured to be busy."""
        with self.lock:
            self.table.set_busy(node, uuids)

    def card_sizes_mib(self) -> dict[str, int]:
        """Return the memory of the largest GPU of each model."""
        with self.lock:
            if self._card_sizes is None:
                self._card_sizes = {}
                for node in self._nodes.values():
                    for gpu in node.gpus:
                        self._card_sizes[gpu.model] = max(gpu.memory_mib, self._card_sizes.get(gpu.model, 0))
            return self._card_sizes

    def free_cores(self) -> int:
        """Return how many cores of usable GPUs no pod holds."""
        with self.lock:
            return self.table.free_cores()

    # Pods.

    def handle_pod(self, old: SchedulerPod | None, new: SchedulerPod | None) -> None:
        """Take over a change of a pod; a handler of its informer."""
        with self.lock:
            pod = new or old
            if pod is None:
                return
            known = self._pods.get(pod.uid)
            if new is None or new.has_ended:
                self._forget_pod(pod)
            elif known is not None and not is_newer(new, known):
                # A read was ahead of the watch.
                return
            elif new.node:
                self._hold_bound(new)
                self.on_gone(new.uid)
            else:
                self._note_unbound(new)

    def handle_other_pod(self, old: OtherPod | None, new: OtherPod | None) -> None:
        """Take over a change of a pod without GPUs."""
        with self.lock:
            if old is not None:
                self._other_pods.pop(old.metadata.uid, None)
            if new is not None:
                self._other_pods[new.metadata.uid] = new
            if old is not None and new is not None and (old.node, old.host) == (new.node, new.host):
                return
            if old is not None:
                self._holdings.hosts.give_back(old.node, old.host)
            if new is not None:
                self._holdings.hosts.take(new.node, new.host)

    def _hold_bound(self, pod: SchedulerPod) -> None:
        before = self._pods.get(pod.uid)
        self._remember(pod)
        self._nominations.remove(pod.uid)
        claim = self._claims.pop(pod.uid, None)
        holding = self._holdings.get(pod.uid)
        if before is not None and claim is None and holding is not None and has_same_gpus(before, pod):
            return
        self._holdings.give_back(pod.uid)
        self._holdings.take(pod, pod.node, bound_usage(pod, self.table.available_gpus(pod.node), self.unit_mib))
        if claim is None or (claim.node, claim.placed) != (pod.node, pod.placed):
            # It got other GPUs than were taken for it.
            self._note_room(holding.node if holding else pod.node)

    def _note_unbound(self, pod: SchedulerPod) -> None:
        before = self._pods.get(pod.uid)
        self._remember(pod)
        claim = self._claims.get(pod.uid)
        has_failed = bool(pod.scheduling_failure) and (
            before is None or pod.scheduling_failure != before.scheduling_failure
        )
        if claim is None and has_failed:
            self.on_unschedulable(pod)
        if claim is None or claim.expires_at is None or before is None:
            return
        if pod.is_deleting or (has_failed and is_newer(pod, claim.pod)):
            self._drop(pod.uid)

    def _forget_pod(self, pod: SchedulerPod) -> None:
        uid = pod.uid
        self._count_priority(self._pods.get(uid), -1)
        known = self._pods.pop(uid, None)
        if known is not None and known.node:
            self.on_departure()
        known = known or pod
        keep_recent(self._gone, uid, None, MAX_GONE)
        self._leave_workload(known)
        self.on_gone(uid)
        self._claims.pop(uid, None)
        self._nominations.remove(uid)
        holding = self._holdings.get(uid)
        node = self._nodes.get(holding.node) if holding else None
        if holding is not None and node is not None and node.lost and known.node:
            self._orphans[uid] = holding.node
            return
        self._drop(uid)

    def _remember(self, pod: SchedulerPod) -> None:
        before = self._pods.get(pod.uid)
        if before is not None and before.workload != pod.workload:
            self._leave_workload(before)
        self._count_priority(before, -1)
        self._count_priority(pod, 1)
        self._pods[pod.uid] = pod
        if pod.owner:
            self._members.setdefault(pod.workload, set()).add(pod.uid)

    def _count_priority(self, pod: SchedulerPod | None, change: int) -> None:
        if pod is not None and pod.node:
            self._priorities[pod.priority] += change
            if not self._priorities[pod.priority]:
                del self._priorities[pod.priority]

    def other_pod(self, uid: str) -> OtherPod | None:
        """Return a bound pod without GPUs."""
        with self.lock:
            return self._other_pods.get(uid)

    def has_lower_priority(self, priority: int) -> bool:
        """Whether there is a bound GPU pod of a lower priority, which could be evicted."""
        with self.lock:
            return any(each < priority for each in self._priorities)

    def _leave_workload(self, pod: SchedulerPod) -> None:
        members = self._members.get(pod.workload, set())
        members.discard(pod.uid)
        if not members:
            self._members.pop(pod.workload, None)

    def _release_orphans(self, node: str) -> None:
        """Give back what vanished pods held of a node whose kubelet reports again, or which is gone."""
        for uid in [uid for uid, place in self._orphans.items() if place == node]:
            del self._orphans[uid]
            self._drop(uid)

    def is_gone(self, uid: str) -> bool:
        """Whether a pod is known to have ended, or to be deleted."""
        with self.lock:
            return uid in self._gone

    def bound_pods(self) -> list[SchedulerPod]:
        with self.lock:
            return [pod for pod in self._pods.values() if pod.node]

    def pod(self, uid: str) -> SchedulerPod | None:
        with self.lock:
            return self._pods.get(uid)

    # Claims.

    def claim(self, uid: str) -> Claim | None:
        with self.lock:
            return self._claims.get(uid)

    def claims(self) -> list[Claim]:
        with self.lock:
            return list(self._claims.values())

    def fit(self, query: FitQuery, names: Sequence[str]) -> NodeFits:
        """Decide about nodes. The caller holds the lock if it claims what it finds."""
        with self.lock:
            return self.fitter.fit(names, query)

    def summarize(self, query: FitQuery, fits: NodeFits, refusals: Refusals) -> str:
        """Describe with numbers why a pod fits on no node. The caller has held the lock since `fit`."""
        with self.lock:
            return describe_fits(query, fits, self.fitter.best_free(query, fits), refusals)

    def available_gpus(self, node: str, uid: str) -> list[GpuAvailability]:
        """Return what is free of a node's GPUs for a pod: what it holds itself counts as free."""
        with self.lock:
            holding = self._holdings.get(uid)
            return self.table.available_gpus(node, holding.usage if holding and holding.node == node else None)

    def place(self, query: FitQuery, node: str, uid: str) -> PlacedSlices:
        """Choose GPUs of a node; raises InsufficientGpus."""
        with self.lock:
            return self.fitter.place(query, node, self.available_gpus(node, uid))

    def take_claim(
        self, pod: SchedulerPod, node: str, placed: PlacedSlices, *, timeout_s: float | None, group: str = ""
    ) -> Claim:
        """Hold GPUs for a pod, instead of what it held before."""
        with self.lock:
            before = self._holdings.give_back(pod.uid)
            if before and before != node:
                self._note_room(before)
            expires_at = None if timeout_s is None else self._clock() + timeout_s
            claim = Claim(pod, node, placed, next(self._numbers), group, expires_at)
            self._claims[pod.uid] = claim
            self._holdings.take(pod, node, peak_usage(pod.request, placed))
            return claim

    def release_claim(self, uid: str) -> None:
        """Give back what a pod claimed; nothing if it is bound by now."""
        with self.lock:
            if uid in self._claims:
                self._drop(uid)

    def confirm_claim(self, claim: Claim, pod: SchedulerPod) -> None:
        """Take over a pod that was read as bound, unless the watch has shown its end meanwhile."""
        with self.lock:
            if self._claims.get(pod.uid) is claim:
                self.handle_pod(None, pod)

    def void_group(self, uid: str, group: str) -> None:
        """Give back what members of a group claimed after this one.

        kube-scheduler places a group pod by pod; if it filters a pod again, it has given up those after it.
        """
        with self.lock:
            own = self._claims.get(uid)
            if not group or own is None:
                return
            later = [
                each.pod.uid
                for each in self._claims.values()
                if each.group == group
                and each.pod.metadata.namespace == own.pod.metadata.namespace
                and each.number > own.number
                and each.expires_at is not None
            ]
            for each in later:
                self.release_claim(each)

    def expire_claims(self) -> list[Claim]:
        """Give back claims whose time is over, and return them."""
        with self.lock:
            now = self._clock()
            expired = [each for each in self._claims.values() if each.expires_at is not None and each.expires_at <= now]
            for claim in expired:
                self.release_claim(claim.pod.uid)
            return expired

    # Nominations.

    def nominations(self) -> list[Nomination]:
        with self.lock:
            return list(self._nominations)

    def nomination(self, uid: str) -> Nomination | None:
        with self.lock:
            return self._nominations.get(uid)

    def nominate(
        self,
        pod: SchedulerPod,
        node: str,
        placed: PlacedSlices,
        victims: Iterable[str],
        *,
        evicted: Iterable[str] = (),
        timeout_s: float,
    ) -> None:
        """Hold GPUs for a pod from the moment that its victims end, instead of what it was nominated for before.

        `evicted` are the victims that are evicted for it: pods of the same node may count on their end as well.
        """
        with self.lock:
            self.end_nomination(pod.uid)
            now = self._clock()
            self._nominations.add(
                Nomination(
                    pod,
                    node,
                    placed,
                    frozenset(victims),
                    frozenset(evicted),
                    now,
                    now + timeout_s,
                    now + timeout_s + MAX_ENDING_S,
                )
            )
            # Pods of lower priority that await the same GPUs do so no longer.
            for uid in self._nominations.below(pod.priority):
                other = self._nominations.get(uid)
                if other is not None and other.node == node and self._nominations.is_outranked(uid):
                    self.end_nomination(uid)

    def end_nomination(self, uid: str) -> None:
        with self.lock:
            known = self._pods.get(uid)
            is_bound = known is not None and bool(known.node)
            if self._nominations.remove(uid) is not None and uid not in self._claims and not is_bound:
                self._drop(uid)

    @contextmanager
    def without_nominations(self, uids: Iterable[str]) -> Iterator[None]:
        """Decide as if these pods were not nominated. Those whose GPUs were claimed meanwhile are so no longer.

        The caller holds the lock.
        """
        outranked: list[str] = []
        try:
            with self._nominations.suspended(uids) as outranked:
                yield
        finally:
            for uid in outranked:
                self.end_nomination(uid)

    def awaits_room(self, uid: str, asked: Collection[str]) -> bool:
        """Whether a pod is nominated for GPUs of pods that have not ended yet, or a moment ago.

        kube-scheduler does not ask about evictions while victims end on the nominated node. If it does, and not about
        that node, it does not accept it any more; or its watch is behind.
        """
        with self.lock:
            nomination, now = self._nominations.get(uid), self._clock()
            if nomination is None or (nomination.node not in asked and now >= nomination.since + REJECTED_AFTER_S):
                return False
            return not nomination.is_free or now < nomination.free_since + SETTLING_S

    def evicted(self, without: str) -> set[str]:
        """Return the pods that are evicted for others than this one."""
        with self.lock:
            return self._nominations.evicted(without)

    def note_evicted(self, nomination: Nomination, victims: Iterable[str]) -> None:
        """Note which pods are evicted for one that is nominated."""
        with self.lock:
            nomination.evicted = frozenset(victims)

    def outranked_by(self, priority: int) -> list[str]:
        """Return the nominated pods of a lower priority, which may not keep GPUs from a pod of this one."""
        with self.lock:
            return self._nominations.below(priority)

    def expire_nominations(self) -> list[Nomination]:
        """End nominations whose time is over, and return them."""
        with self.lock:
            expired = self._nominations.expired(self._clock(), self._running_victim)
            for each in expired:
                self.end_nomination(each.pod.uid)
            return expired

    def _running_victim(self, uid: str) -> SchedulerPod | OtherPod | None:
        """Return a victim that has not ended yet; not on a lost node, where that may take forever."""
        pod = self._pods.get(uid) or self._other_pods.get(uid)
        node = self._nodes.get(pod.node) if pod is not None else None
        return None if node is not None and node.lost else pod

    def pods_on(self, node: str) -> list[tuple[SchedulerPod, Holding]]:
        """Return the GPU pods that are bound to a node, and what they hold."""
        with self.lock:
            held = [(self._pods.get(uid), self._holdings.get(uid)) for uid in self._holdings.pods_on(node)]
            return [(pod, holding) for pod, holding in held if pod is not None and holding is not None and pod.node]

    def unrestored(self) -> list[SchedulerPod]:
        """Return the pods that a process before this one has nominated a node for, and which hold nothing of it."""
        with self.lock:
            return [
                pod
                for pod in self._pods.values()
                if pod.nominated_node
                and not pod.node
                and not pod.is_deleting
                and self._holdings.get(pod.uid) is None
                and not self._nominations.is_known(pod.uid, pod.nominated_node)
            ]

    def is_waiting(self, uid: str) -> bool:
        """Whether a pod is known, and neither bound, being deleted, nominated nor about to be bound."""
        with self.lock:
            pod = self._pods.get(uid)
            is_pending = pod is not None and not pod.node and not pod.is_deleting
            return is_pending and self._holdings.get(uid) is None and self._nominations.get(uid) is None

    def note_restored(self, uid: str, node: str) -> None:
        """Note that the nomination of an earlier process is not to be restored any more."""
        with self.lock:
            self._nominations.note_known(uid, node)

    def excluded_by_members(self, pod: SchedulerPod) -> dict[str, tuple[str, ...] | None]:
        """Return the nodes or GPUs that other members of a pod's workload use, if it asks to be spread."""
        with self.lock:
            spread = pod.options.spread_members
            if spread is None or not pod.owner:
                return {}
            excluded: dict[str, tuple[str, ...] | None] = {}
            for uid in self._members.get(pod.workload, set()) | {
                each.pod.uid for each in self._claims.values() if each.pod.workload == pod.workload
            }:
                holding = self._holdings.get(uid)
                if uid == pod.uid or holding is None:
                    continue
                used = excluded.get(holding.node, ())
                gpus = None if spread is SpreadMembers.NODE or used is None else (*used, *holding.usage)
                excluded[holding.node] = gpus
            return excluded

    def holding(self, uid: str) -> Holding | None:
        with self.lock:
            return self._holdings.get(uid)

    def _note_room(self, node: str) -> None:
        # A tenant may name any node, also one that does not exist.
        if node in self.table:
            self.on_room(node)

    def _drop(self, uid: str) -> None:
        self._claims.pop(uid, None)
        node = self._holdings.give_back(uid)
        self._nominations.hold(uid)
        if node:
            self._note_room(node)


def has_same_gpus(before: SchedulerPod, pod: SchedulerPod) -> bool:
    return (before.node, before.placed, before.minors) == (pod.node, pod.placed, pod.minors)


def is_newer(pod: SchedulerPod, other: SchedulerPod) -> bool:
    """Whether a pod was read after another version of it. The API server counts versions for all objects together."""
    return int(pod.metadata.resource_version or 0) > int(other.metadata.resource_version or 0)

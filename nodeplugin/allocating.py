"""Allocates GPUs to containers: follows the scheduler's placement, or places a pod itself, within what is free.

The kubelet makes one allocation at a time, but container starts and released pods come in parallel. Every allocation is
on disk before the kubelet gets the response.
"""

import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

import structlog
from msgspec import Struct
from msgspec.structs import replace

from nodeplugin.allocation_store import AllocationStore, CheckpointWriteError, owner_annotation, sort_ids
from nodeplugin.attribution import Call, ContainerTarget, FirstCall
from nodeplugin.call_attributor import CallAttributor
from nodeplugin.cards import NodeCards
from nodeplugin.checkpoint import ContainerAllocation, PodAllocation
from nodeplugin.device_ids import CardDevices, Resource, offered_devices
from nodeplugin.injection import Injector
from nodeplugin.isolation_ladder import applied_isolation
from nodeplugin.kubelet import Kubelet, ListedContainer
from nodeplugin.lingering_pods import MAX_WAIT_S, PLACEMENT_WAIT_S, LingeringPods
from nodeplugin.pods import BoundPod, NodePods, PodsByUid
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.refusal import RECREATE, AllocationRefused, cannot_create_files, disk_problem
from nodeplugin.start_check import StartCheck
from vcuda.cost_ranking import RankingContext, ranking_for
from vcuda.gpu_availability import GpuUsage
from vcuda.isolation import Isolation
from vcuda.names import RESPONSE_ISOLATION, RESPONSE_OWNER, RESPONSE_PLACEMENT, RESPONSE_TOKEN
from vcuda.placement import (
    InsufficientGpus,
    PlacedSlices,
    card_uuids,
    peak_usage,
    place_pod,
    placement_problem,
    promised_usage,
    slices_on_cards,
)
from vcuda.placement_annotation import encode_placement
from vcuda.placement_strategies import PlacementStrategy
from vcuda.scheme import Scheme

# How often an allocation that waits looks for the processes of lingering pods, which reads all of /proc.
POLL_S = 0.05
# How many lingering pods a refusal names.
MAX_LINGERING_SHOWN = 3

DeviceIds = dict[Resource, tuple[str, ...]]


class PendingCall(Struct, frozen=True):
    """The Allocate call that a GetPreferredAllocation call announced, and what the kubelet listed at that time.

    `listed` is None if the kubelet did not answer.
    """

    call: Call
    listed: Sequence[ListedContainer] | None


class Allocator:
    """Answers the kubelet's device plugin calls, for both resources."""

    def __init__(
        self,
        allocations: AllocationStore,
        scheme: Scheme,
        node_cards: NodeCards,
        *,
        pods: NodePods,
        kubelet: Kubelet,
        injector: Injector,
        policy: PlacementStrategy = PlacementStrategy.BINPACK,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._allocations, self._scheme, self._node_cards, self._pods = allocations, scheme, node_cards, pods
        self._injector, self._policy, self._clock, self._sleep = injector, policy, clock, sleep
        self._lingering = LingeringPods(clock)
        self._attributor = CallAttributor(allocations, scheme.names, pods=pods, kubelet=kubelet)
        self._start_check = StartCheck(
            allocations, scheme.names, node_cards, pods=pods, kubelet=kubelet, injector=injector
        )
        # Guards the two fields below, which carry over from one call of the kubelet to the next.
        self._lock = threading.Lock()
        self._pending: PendingCall | None = None
        self._previous: FirstCall | None = None
        self._log = structlog.get_logger()

    def devices(self, resource: Resource) -> dict[str, bool]:
        """Return all device IDs of a resource, and whether each is healthy."""
        in_use: dict[str, set[str]] = {}
        for allocation in self._allocations.all().values():
            for name, container in allocation.containers.items():
                cards = allocation.cards_of(name)
                for card, ids in zip(cards, split_ids(container.ids.get(resource, ()), len(cards)), strict=False):
                    in_use.setdefault(card, set()).update(ids)
        return offered_devices(
            resource,
            [
                CardDevices(
                    resource.units_of(card, self._scheme.unit_mib),
                    self._node_cards.condition(card.uuid),
                    frozenset(in_use.get(card.uuid, ())),
                )
                for card in self._node_cards.cards()
            ],
        )

    def reset_calls(self) -> None:
        """Forget unfinished calls: after a kubelet restart the next call is a first one."""
        with self._lock:
            self._pending = self._previous = None

    def choose_ids(self, resource: Resource, available: Sequence[str], required: Sequence[str], size: int) -> list[str]:
        """Choose device IDs, and list the kubelet's containers for the Allocate call that follows.

        Never raises: the kubelet would reject the pod.
        """
        # IDs are interchangeable. There may be thousands, so take the first ones instead of sorting.
        given = frozenset(required)
        rest = islice((each for each in available if each not in given), max(0, size - len(given)))
        chosen = [*required, *rest]
        call = Call(resource, frozenset(chosen))
        with self._lock:
            previous = self._previous
        listed: Sequence[ListedContainer] | None
        try:
            listed = self._attributor.list_candidates(call, previous)
        except Exception as error:  # the outermost frame of the call
            self._log.warning("pod_resources_list_failed", error=str(error))
            listed = None
        with self._lock:
            self._pending = PendingCall(call, listed)
        return chosen

    def allocate(self, resource: Resource, ids: Sequence[str]) -> api.ContainerAllocateResponse:
        """Answer an Allocate call; AllocationRefused if the container gets no GPU.

        The first of a container's two calls gets an empty response, the second one everything.
        """
        call = Call(resource, frozenset(ids))
        with self._lock:
            pending, self._pending = self._pending, None
            previous, self._previous = self._previous, None
        # The kubelet skips GetPreferredAllocation when it reuses an init container's IDs; then `pending` is of an
        # earlier call that never came.
        listed = pending.listed if pending is not None and pending.call == call else None
        target, uids = self._attributor.find_target(call, previous, listed)
        if target is None:
            with self._lock:
                self._previous = FirstCall(call, uids)
            return api.ContainerAllocateResponse()
        return self._allocate(target, call)

    def check_start(self, resource: Resource, ids: Sequence[str]) -> None:
        """Check a container that is about to start; AllocationRefused if it must not."""
        self._start_check.check(resource, frozenset(ids))

    def _allocate(self, target: ContainerTarget, call: Call) -> api.ContainerAllocateResponse:
        pod, container = target.pod, target.container
        if pod.request_error:
            raise AllocationRefused(f"{target.title}: {pod.request_error}")
        ids = {call.resource: sort_ids(call.ids)}
        if target.other_ids:
            ids[call.resource.other] = sort_ids(target.other_ids)
        try:
            allocation = self._place_and_record(pod, container, ids)
        except InsufficientGpus as error:
            raise AllocationRefused(f"{target.title}: {error}; {RECREATE}") from None
        except CheckpointWriteError as error:
            raise disk_problem(target.title, error) from None
        response = self._build_response(target, allocation)
        self._log.info(
            "allocated",
            pod=pod.title,
            uid=pod.uid,
            container=container,
            cards=allocation.cards_of(container),
            chosen_here=allocation.chosen_here,
        )
        # A placement chosen here has to be published. The devices on offer change only if a card is unhealthy or
        # cordoned: elsewhere free IDs just become IDs in use.
        if allocation.chosen_here or any(
            self._node_cards.condition(card.uuid).unschedulable_reason for card in self._node_cards.cards()
        ):
            self._allocations.notify()
        return response

    def _build_response(self, target: ContainerTarget, allocation: PodAllocation) -> api.ContainerAllocateResponse:
        pod, container = target.pod, target.container
        given, slices = allocation.containers[container], allocation.placed[container]
        try:
            response = self._injector.build_response(pod, container, given, slices)
        except OSError as error:
            raise cannot_create_files(target.title, error) from None
        response.annotations[RESPONSE_PLACEMENT] = encode_placement(allocation.placed)
        response.annotations[RESPONSE_TOKEN] = given.token
        response.annotations[RESPONSE_OWNER] = owner_annotation(pod.uid, container)
        if given.isolation:
            response.annotations[RESPONSE_ISOLATION] = str(given.isolation)
        return response

    def _place_and_record(self, pod: BoundPod, container: str, ids: DeviceIds) -> PodAllocation:
        """Place the pod unless an earlier container did, and record the container's allocation.

        InsufficientGpus if it does not fit, even after pods that have ended were released.
        """
        pods = self._pods.cached_pods()
        if self._allocations.is_incomplete and not self._pods.informer.synced:
            # The running pods have to be known before a card is allocated, and these are what a previous plugin saved.
            pods = self._pods.fetch_pods() or pods
        try:
            return self._try_record(pod, container, ids, pods, must_follow=True)
        except InsufficientGpus:
            pass
        # The cache may lag behind the scheduler, which saw a pod end and bound this one in its place.
        fresh = self._pods.fetch_pods()
        while True:
            started = self._clock()
            dying = self._allocations.release_ended(fresh).dying
            pods = fresh or self._pods.cached_pods()
            must_follow = self._could_follow(pod, without=self._lingering.worth_waiting_for(dying, PLACEMENT_WAIT_S))
            try:
                return self._try_record(pod, container, ids, pods, must_follow=must_follow)
            except InsufficientGpus as error:
                may_fit = self._would_fit(pod, pods, without=self._lingering.worth_waiting_for(dying, MAX_WAIT_S))
                if not must_follow and not may_fit:
                    blocking = dying if self._would_fit(pod, pods, without=dying) else ()
                    raise InsufficientGpus(f"{error}{self._describe_lingering(blocking)}") from None
            self._sleep(POLL_S)
            self._lingering.add_wait(dying, self._clock() - started)

    def _try_record(
        self, pod: BoundPod, container: str, ids: DeviceIds, pods: PodsByUid, *, must_follow: bool
    ) -> PodAllocation:
        self._allocations.adopt(pods)
        # Under one lock from the decision to the checkpoint, or the same share could be allocated twice.
        with self._allocations.lock:
            allocation = self._adopted_or_allocated(pod) or self._place(pod, pods, must_follow=must_follow)
            existing = allocation.containers.get(container)
            # A repeated call keeps the token: the container's folder may already be mounted.
            token = existing.token if existing else secrets.token_hex(8)
            isolation = self._required_isolation(pod, container, allocation)
            given = ContainerAllocation(token, ids, self._injector.mode, isolation)
            allocation = replace(allocation, containers=allocation.containers | {container: given})
            self._allocations.update(allocation)
            return allocation

    def _required_isolation(self, pod: BoundPod, container: str, allocation: PodAllocation) -> Isolation:
        """Return what enforces the limits of a container; InsufficientGpus if it is weaker than required.

        The card may offer less than when the pod was placed, or its first container allocated.
        """
        isolation = applied_isolation(allocation.placed.get(container, ()), self._node_cards.isolation)
        if not isolation.is_at_least(pod.options.min_isolation):
            minimum = pod.options.min_isolation
            raise InsufficientGpus(f"container {container}: isolation {isolation}, at least {minimum} required")
        return isolation

    def _adopted_or_allocated(self, pod: BoundPod) -> PodAllocation | None:
        """Return the pod's allocation, if it has one; InsufficientGpus if it was adopted on cards that are not free."""
        allocation = self._allocations.all().get(pod.uid)
        # Adoption states what runs, and so checks nothing. A kubelet that lost its checkpoint allocates for such pods.
        if allocation and not allocation.containers and not self._allocations.fits_beside_others(allocation):
            raise InsufficientGpus("the GPUs on which it ran have been allocated to other pods")
        return allocation

    def _place(self, pod: BoundPod, pods: PodsByUid, *, must_follow: bool) -> PodAllocation:
        """Choose cards for all containers of a pod; with `must_follow`, those of its placement or InsufficientGpus."""
        problem = self._placement_problem(pod) if pod.placed is not None else ""
        if problem and must_follow:
            raise InsufficientGpus(problem)
        if pod.placed is None or problem:
            placed, chosen_here = self._choose_cards(pod, pods, problem), True
        else:
            # Cards as placed; the amounts follow from the request, whatever the annotation says.
            gpus = self._node_cards.gpus()
            placed = slices_on_cards(pod.request, card_uuids(pod.placed), gpus, self._scheme.unit_mib)
            chosen_here = False
        return PodAllocation(
            uid=pod.uid,
            namespace=pod.metadata.namespace,
            name=pod.metadata.name,
            placed=placed,
            usage=peak_usage(pod.request, placed),
            chosen_here=chosen_here,
        )

    def _choose_cards(self, pod: BoundPod, pods: PodsByUid, problem: str) -> PlacedSlices:
        """Place a pod on this node; `problem` says why its own placement cannot be followed, if it has one."""
        if not problem:
            return self._place_here(pod, pods)
        try:
            placed = self._place_here(pod, pods)
        except InsufficientGpus as error:
            raise InsufficientGpus(f"its placement cannot be followed ({problem}), and {error}") from None
        self._log.warning("placement_not_followed", pod=pod.title, uid=pod.uid, error=problem)
        return placed

    def _place_here(self, pod: BoundPod, pods: PodsByUid, *, without: Collection[str] = ()) -> PlacedSlices:
        return place_pod(
            pod.request,
            self._allocations.availability(self._promised(pod, pods), without=without),
            unit_mib=self._scheme.unit_mib,
            options=pod.options,
            ranking=ranking_for(self._policy, RankingContext(unit_mib=self._scheme.unit_mib, seed=pod.uid)),
        )

    def _placement_problem(self, pod: BoundPod, *, without: Collection[str] = ()) -> str:
        free, unit_mib = self._allocations.availability(without=without), self._scheme.unit_mib
        return placement_problem(pod.request, pod.placed or {}, free, unit_mib=unit_mib, options=pod.options)

    def _could_follow(self, pod: BoundPod, *, without: Collection[str]) -> bool:
        """Whether a pod could have the cards of its placement as soon as the pods `without`, if any, are gone."""
        return bool(without) and pod.placed is not None and not self._placement_problem(pod, without=without)

    def _would_fit(self, pod: BoundPod, pods: PodsByUid, *, without: Collection[str]) -> bool:
        """Whether a pod could be placed as soon as the pods `without`, if any, are gone."""
        try:
            return bool(without) and bool(self._place_here(pod, pods, without=without))
        except InsufficientGpus:
            return False

    def _describe_lingering(self, uids: Collection[str]) -> str:
        """Return which pods keep the cards that another one needs; empty for none."""
        allocations = self._allocations.all()
        titles = sorted(allocations[uid].title if allocations[uid].name else uid for uid in uids if uid in allocations)
        shown = ", ".join(titles[:MAX_LINGERING_SHOWN]) + (", ..." if len(titles) > MAX_LINGERING_SHOWN else "")
        return f"; deleted, but still running processes and so holding GPUs: {shown}" if titles else ""

    def _promised(self, pod: BoundPod, pods: PodsByUid) -> list[Mapping[str, GpuUsage]]:
        """Return the usage of other pods that are bound here with a placement and not allocated yet."""
        gpus, unit_mib = self._node_cards.gpus(), self._scheme.unit_mib
        return [
            promised_usage(other.request, other.placed, gpus, unit_mib)
            for other in pods.values()
            if other.placed
            and not other.has_ended
            and other.uid != pod.uid
            and other.uid not in self._allocations.all()
        ]


def split_ids(ids: Sequence[str], cards: int) -> list[Sequence[str]]:
    """Divide a container's IDs evenly among its cards: nothing else relates them, and health needs a relation."""
    if cards < 1:
        return []
    size = -(-len(ids) // cards)
    return [ids[start : start + size] for start in range(0, size * cards, size or 1)][:cards] if ids else []

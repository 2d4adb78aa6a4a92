"""Gives containers their GPUs: obeys placements, makes them where there are none, and never gives away too much.

The kubelet's calls come one at a time; restarts of containers come beside them. Everything that is given is on the disk
before the kubelet hears of it.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice

import structlog
from msgspec import Struct
from msgspec.structs import replace

from nodeplugin.allocation_store import OWNER, PLACEMENT, TOKEN, AllocationStore, in_order, owner_of
from nodeplugin.attribution import (
    Attribution,
    Call,
    ContainerTarget,
    FirstCall,
    KubeletListing,
    ambiguous_message,
    attribute_call,
)
from nodeplugin.cards import NodeCards
from nodeplugin.checkpoint import ContainerAllocation, PodAllocation
from nodeplugin.device_ids import CardDevices, Resource, offered_devices
from nodeplugin.injection import Injector
from nodeplugin.kubelet import CheckpointedContainer, Kubelet, KubeletError, ListedContainer, UnknownPod
from nodeplugin.pods import BoundPod, NodePods, PodsByUid
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from vcuda.gpu_availability import GpuUsage
from vcuda.placement import (
    InsufficientGpus,
    card_uuids,
    peak_usage,
    place_pod,
    placement_problem,
    promised_usage,
    slices_on_cards,
)
from vcuda.placement_annotation import encode_placement
from vcuda.placement_strategies import PlacementStrategy
from vcuda.request import Role
from vcuda.scheme import Scheme

# How many pods the kubelet is asked about, one by one; it answers 10 at once.
MOST_ASKED = 8
# How long an allocation waits for processes that are about to end, if there is no room, or none where the pod was
# placed; and how often it looks.
DYING_S, OBEY_S, DYING_POLL_S = 10.0, 2.0, 0.05


class AllocationRefused(Exception):  # noqa: N818 - not a fault of the program
    """The kubelet gets no GPU for this container; the message says why, and it shows it on the pod."""


class Pending(Struct, frozen=True):
    """The kubelet's listing when it asked which ids we prefer; the allocation follows at once. None: it gave none."""

    call: Call
    listed: Sequence[ListedContainer] | None


class Allocator:
    """Answers the kubelet: says for whom a call is, decides what he gets, and checks what starts."""

    def __init__(
        self,
        book: AllocationStore,
        scheme: Scheme,
        node_cards: NodeCards,
        *,
        pods: NodePods,
        kubelet: Kubelet,
        injection: Injector,
        policy: PlacementStrategy = PlacementStrategy.BINPACK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book, self._scheme, self._node_cards, self._pods = book, scheme, node_cards, pods
        self._kubelet, self._injection, self._policy, self._clock = kubelet, injection, policy, clock
        # Guards what is remembered between the kubelet's calls.
        self._lock = threading.Lock()
        self._pending: Pending | None = None
        self._before: FirstCall | None = None
        self._log = structlog.get_logger()

    # What is offered.

    def devices(self, resource: Resource) -> dict[str, bool]:
        """Give all ids of a resource, and whether each is healthy."""
        held: dict[str, set[str]] = {}
        for hold in self._book.holds().values():
            for name, allocation in hold.containers.items():
                cards = hold.cards_of(name)
                for card, ids in zip(cards, shared_out(allocation.ids.get(resource, ()), len(cards)), strict=False):
                    held.setdefault(card, set()).update(ids)
        return offered_devices(
            resource,
            [
                CardDevices(
                    resource.units_of(card, self._scheme.unit_mib),
                    self._node_cards.condition(card.uuid),
                    frozenset(held.get(card.uuid, ())),
                )
                for card in self._node_cards.cards()
            ],
        )

    # The kubelet's calls.

    def begin_anew(self) -> None:
        """Forget the calls of a kubelet that is gone: the next one begins with a first call."""
        with self._lock:
            self._pending = self._before = None

    def preferred(self, resource: Resource, available: Sequence[str], must: Sequence[str], size: int) -> list[str]:
        """Choose ids, and use the occasion to find out for whom; never fails, for that would refuse the pod."""
        # One id is as good as another, and there may be thousands.
        needed = frozenset(must)
        rest = islice((each for each in available if each not in needed), max(0, size - len(needed)))
        chosen = [*must, *rest]
        call = Call(resource, frozenset(chosen))
        try:
            listed: Sequence[ListedContainer] | None = self._taken_up(call)
        except Exception as away:  # the outermost frame of the call: an error would cost the pod its life
            self._log.warning("kubelet_does_not_list", cause=str(away))
            listed = None
        with self._lock:
            self._pending = Pending(call, listed)
        return chosen

    def allocate(self, resource: Resource, ids: Sequence[str]) -> api.ContainerAllocateResponse:
        """Answer an allocation: nothing for the first of a container's two, everything for the second."""
        call = Call(resource, frozenset(ids))
        with self._lock:
            pending, self._pending = self._pending, None
            before, self._before = self._before, None
        # No preference is asked for where an init container's ids are used again.
        same = pending if pending is not None and pending.call == call else None
        target, firsts = self._recognised(call, before, same.listed if same else None)
        if target is None:
            with self._lock:
                self._before = FirstCall(call, firsts)
            return api.ContainerAllocateResponse()
        return self._give(target, call)

    def prestart(self, resource: Resource, ids: Sequence[str]) -> None:
        """Check that a container which is about to start has what was given to it, and nothing else."""
        wanted, name = frozenset(ids), resource.name_in(self._scheme.names)
        kept = self._kubelet.kept()
        owners = [each for each in kept if each.resource == name and each.ids == wanted]
        if not owners:
            owners = self._owners_in_book(resource, wanted)
        if not owners:
            raise AllocationRefused(
                f"nobody knows to which container these {len(wanted)} {name} were given; delete the pod"
            )
        known = self._pods.known()
        # Ids may be an init container's and then its pod's others'; what is right for all is right for the one.
        faults = [
            self._check_start(uid, container, known, [each for each in kept if each.uid == uid])
            for uid, container in dict.fromkeys((each.uid, each.container) for each in owners)
        ]
        if all(faults):
            raise AllocationRefused(faults[0])

    # Who is it?

    def _taken_up(self, call: Call) -> Sequence[ListedContainer]:
        """Ask the kubelet whom it has taken up: about the one pod that waits, or, if that leaves a doubt, about all."""
        known, holds = self._pods.known(), self._book.holds()
        wait = waiting(known, holds)
        if len(wait) == 1:
            pod = known[wait[0]]
            with suppress(KubeletError):
                told = self._kubelet.held_by(pod.metadata.namespace, pod.metadata.name)
                if self._judged(call, self._before, KubeletListing(self._scheme.names, told), known).is_clear:
                    return told
        return self._kubelet.listed()

    def _judged(self, call: Call, before: FirstCall | None, seen: KubeletListing, known: PodsByUid) -> Attribution:
        booked = {uid: hold.containers for uid, hold in self._book.holds().items()}
        return attribute_call(call, before, seen, known, booked, written=self._kubelet.written)

    def _recognised(
        self, call: Call, before: FirstCall | None, listed: Sequence[ListedContainer] | None
    ) -> tuple[ContainerTarget | None, frozenset[str]]:
        """Say for whom a call is: a container that gets everything now; or nobody yet, and the pods it may be of.

        What the informer has heard is asked first. If that leaves a doubt, the API server itself is: the kubelet may
        have heard of a pod before us, or of another one under the same name.
        """
        verdict: Attribution | None = None
        for is_fresh in (False, True):
            known = self._pods.asked() if is_fresh else self._pods.known()
            if known is None:
                continue
            seen = self._listed(call, known) if listed is None else KubeletListing(self._scheme.names, listed)
            if seen is None:
                continue
            verdict = self._judged(call, before, seen, known)
            # One that has its own is asked for again by a kubelet that lost it, or is another one of the same name.
            if verdict.is_clear and not any(self._is_booked(each) for each in (*verdict.lasts, *verdict.firsts)):
                break
        if verdict is None:
            return self._unlisted(call, before)
        if len(verdict.lasts) == 1 and not verdict.firsts:
            self._check_left_out(verdict.lasts[0])
            return verdict.lasts[0], frozenset()
        if verdict.lasts:
            raise AllocationRefused(ambiguous_message((*verdict.lasts, *verdict.firsts)))
        if not verdict.firsts:
            name = call.resource.name_in(self._scheme.names)
            raise AllocationRefused(
                f"no pod that is known on this node waits for {call.count} {name}; static pods get no GPUs"
            )
        return None, frozenset(each.pod.uid for each in verdict.firsts)

    def _is_booked(self, target: ContainerTarget) -> bool:
        return target.container in self._book.containers_of(target.pod.uid)

    def _listed(self, call: Call, known: PodsByUid) -> KubeletListing | None:
        """Ask about the pods whose ids are used again, or that wait; None if the kubelet tells nothing of them.

        Kubelets before 1.34 cannot be asked about one pod: then it is one of those whose ids these were.
        """
        holds = self._book.holds()
        reusing = [
            hold.uid
            for hold in holds.values()
            if call.ids & {each for given in hold.containers.values() for each in given.ids.get(call.resource, ())}
        ]
        told: list[ListedContainer] = []
        answered = False
        for uid in (reusing or waiting(known, holds))[:MOST_ASKED]:
            if (pod := known.get(uid)) is None:
                continue
            try:
                told += self._kubelet.held_by(pod.metadata.namespace, pod.metadata.name)
                answered = True
            except UnknownPod:
                answered = True
            except KubeletError as away:
                self._log.warning("kubelet_does_not_tell", pod=pod.title, cause=str(away))
        if answered:
            return KubeletListing(self._scheme.names, told)
        found = [known[uid].metadata for uid in reusing if uid in known]
        return (
            KubeletListing(self._scheme.names, bare=[(each.namespace, each.name) for each in found]) if found else None
        )

    def _unlisted(self, call: Call, before: FirstCall | None) -> tuple[None, frozenset[str]]:
        """Answer where the kubelet lists nobody: a first call needs no name, a second cannot do without."""
        if before is not None and before.call.resource is call.resource.other:
            raise AllocationRefused(
                "the kubelet does not list its containers, so it cannot be told which one this is for"
            )
        return None, frozenset(self._pods.known())

    def _check_left_out(self, target: ContainerTarget) -> None:
        """Refuse a pod whose init container was given nothing, because this plugin began between its two calls."""
        if not any(each.role is Role.INIT for each in target.pod.request.containers):
            return
        # The kubelet writes a container down when it is done with it.
        done = self._kubelet.written(target.pod.uid) or set()
        if left_out := done.difference(self._book.containers_of(target.pod.uid)):
            raise AllocationRefused(
                f"{target.pod.title}: {', '.join(sorted(left_out))} was given nothing; make the pod again"
            )

    # What does it get?

    def _give(self, target: ContainerTarget, call: Call) -> api.ContainerAllocateResponse:
        pod, container = target.pod, target.container
        if pod.mistake:
            raise AllocationRefused(f"{target.title}: {pod.mistake}")
        ids = {call.resource: in_order(call.ids)}
        if target.other_ids:
            ids[call.resource.other] = in_order(target.other_ids)
        hold = self._held_with(pod, container, ids)
        allocation = hold.containers[container]
        try:
            answer = self._injection.answer(pod, container, allocation, hold.placed[container])
        except OSError as wrong:
            raise AllocationRefused(f"{target.title}: what it needs cannot be prepared on this node: {wrong}") from None
        answer.annotations[PLACEMENT] = encode_placement(hold.placed)
        answer.annotations[TOKEN] = allocation.token
        answer.annotations[OWNER] = owner_of(pod.uid, container)
        self._log.info(
            "allocated",
            pod=pod.title,
            uid=pod.uid,
            container=container,
            cards=hold.cards_of(container),
            chosen_here=hold.chosen_here,
        )
        # What was given was offered before; only beside a card that is closed does that change what is offered.
        if hold.chosen_here or any(self._node_cards.condition(card.uuid).closed for card in self._node_cards.cards()):
            self._book.tell()
        return answer

    def _held_with(self, pod: BoundPod, container: str, ids: dict[Resource, tuple[str, ...]]) -> PodAllocation:
        """Place a pod, once, and note what a container of it gets.

        Where there seems to be no room, or not where it was placed, look again at who has ended: only then deviate.
        """
        try:
            return self._noted(pod, container, ids, self._pods.known(), obey=True)
        except InsufficientGpus:
            pass
        fresh = self._pods.asked()
        began = self._clock()
        while True:
            dying = self._book.collect(fresh)
            waited_s = self._clock() - began
            try:
                return self._noted(
                    pod, container, ids, fresh or self._pods.known(), obey=bool(dying) and waited_s < OBEY_S
                )
            except InsufficientGpus as full:
                wrong = str(full)
            # A pod that was deleted without grace is gone before its processes are; they will be in a moment.
            if not dying or waited_s > DYING_S:
                raise AllocationRefused(f"{pod.title}: {wrong}")
            time.sleep(DYING_POLL_S)

    def _noted(
        self, pod: BoundPod, container: str, ids: dict[Resource, tuple[str, ...]], known: PodsByUid, *, obey: bool
    ) -> PodAllocation:
        """Decide and write down in one go: between the two nobody else may be given the same."""
        with self._book.lock:
            hold = self._book.holds().get(pod.uid) or self._decided(pod, known, obey=obey)
            before = hold.containers.get(container)
            allocation = ContainerAllocation(before.token if before else secrets.token_hex(8), ids, self._injection.way)
            hold = replace(hold, containers=hold.containers | {container: allocation})
            self._book.put(hold)
            return hold

    def _decided(self, pod: BoundPod, known: PodsByUid, *, obey: bool) -> PodAllocation:
        unit_mib = self._scheme.unit_mib
        rooms = self._book.rooms()
        placed, chosen_here = pod.placed, False
        wrong = (
            ""
            if placed is None
            else placement_problem(pod.request, placed, rooms, unit_mib=unit_mib, options=pod.options)
        )
        if wrong and obey:
            raise InsufficientGpus(wrong)
        if placed is None or wrong:
            if wrong:
                self._log.warning("placement_impossible", pod=pod.title, uid=pod.uid, cause=wrong)
            try:
                placed = place_pod(
                    pod.request,
                    self._book.rooms(self._expected(pod, known)),
                    unit_mib=unit_mib,
                    options=pod.options,
                    strategy=self._policy,
                )
            except InsufficientGpus as full:
                raise InsufficientGpus(
                    f"its placement is impossible ({wrong}), and {full}" if wrong else str(full)
                ) from None
            chosen_here = True
        else:
            placed = slices_on_cards(pod.request, card_uuids(placed), self._node_cards.gpus(), unit_mib)
        return PodAllocation(
            uid=pod.uid,
            namespace=pod.metadata.namespace,
            name=pod.metadata.name,
            placed=placed,
            held=peak_usage(pod.request, placed),
            chosen_here=chosen_here,
        )

    def _expected(self, pod: BoundPod, known: PodsByUid) -> list[Mapping[str, GpuUsage]]:
        """List what other pods were promised that are bound here and have not come yet."""
        gpus, unit_mib = self._node_cards.gpus(), self._scheme.unit_mib
        return [
            promised_usage(other.request, other.placed, gpus, unit_mib)
            for other in known.values()
            if other.placed and not other.has_ended and other.uid != pod.uid and other.uid not in self._book.holds()
        ]

    # May it start?

    def _check_start(self, uid: str, container: str, known: PodsByUid, kept: Sequence[CheckpointedContainer]) -> str:
        """Refuse a container that does not hold what it was given; say what is wrong with its cards, if anything."""
        pod = known.get(uid)
        title = f"{pod.title if pod else uid} container {container}"
        answers = [each.answer for each in kept if each.container == container]
        owners = {each.annotations[OWNER] for each in answers if OWNER in each.annotations}
        if owners - {owner_of(uid, container)}:
            raise AllocationRefused(f"{title}: the kubelet holds another container's answer for it; delete the pod")
        hold = self._book.hold_of(uid, container, kept, pod)
        if hold is None:
            raise AllocationRefused(
                f"{title}: no GPU was given to it here; delete the pod, and it is given one (static pods are not)"
            )
        allocation, slices = hold.containers[container], hold.placed.get(container, ())
        given = [each for each in answers if TOKEN in each.annotations]
        tokens = {each.annotations[TOKEN] for each in given}
        if answers and allocation.token and tokens != {allocation.token}:
            what = "an older answer" if tokens else "an empty answer"
            raise AllocationRefused(f"{title}: the kubelet holds {what} for it; delete the pod")
        fault = self._card_fault(title, hold.cards_of(container))
        if not fault and any(self._injection.is_outdated(each, slices) for each in given):
            raise AllocationRefused(f"{title}: its GPU has another device node since the last boot; delete the pod")
        if pod is not None and allocation.token:
            try:
                self._injection.prepare(pod, container, allocation, slices)
            except OSError as wrong:
                raise AllocationRefused(f"{title}: what it needs cannot be prepared on this node: {wrong}") from None
        return fault

    def _card_fault(self, title: str, cards: Sequence[str]) -> str:
        for uuid in cards:
            card, fault = self._node_cards.get(uuid), self._node_cards.condition(uuid).fault
            if card is None or fault:
                return f"{title}: its GPU {uuid} cannot be used: {fault or 'it is not on this node any more'}"
        return ""

    def _owners_in_book(self, resource: Resource, ids: frozenset[str]) -> list[CheckpointedContainer]:
        return [
            CheckpointedContainer(uid, name, resource, ids)
            for uid, hold in self._book.holds().items()
            for name, allocation in hold.containers.items()
            if frozenset(allocation.ids.get(resource, ())) == ids
        ]


def waiting(known: PodsByUid, holds: Mapping[str, PodAllocation]) -> list[str]:
    """Name the pods of which some container has nothing yet."""
    return [
        pod.uid
        for pod in known.values()
        if not pod.has_ended and (pod.uid not in holds or pod.counts.keys() - holds[pod.uid].containers.keys())
    ]


def shared_out(ids: Sequence[str], cards: int) -> list[Sequence[str]]:
    """Say which of a container's ids stand for which of its cards: nobody else does, so evenly."""
    if cards < 1:
        return []
    size = -(-len(ids) // cards)
    return [ids[start : start + size] for start in range(0, size * cards, size or 1)][:cards] if ids else []

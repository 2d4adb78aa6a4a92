"""Keeps the book of this node's GPUs: what pods hold, on the disk before anybody hears of it.

A book that is lost is made again from the answers that the kubelet keeps. What a pod held is let go of when it is gone
or has ended, and not before. Pods that an ancestor started and that still run are taken over with what they have.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import structlog
from msgspec.structs import replace

from nodeplugin.cards import NodeCards
from nodeplugin.checkpoint import (
    CHECKPOINT_FILE,
    AllocationCheckpoint,
    BadCheckpoint,
    ContainerAllocation,
    InjectionMode,
    PodAllocation,
    read_checkpoint,
    write_checkpoint,
)
from nodeplugin.device_ids import Resource
from nodeplugin.injection import Injector
from nodeplugin.kubelet import CheckpointedContainer, Kubelet
from nodeplugin.pods import BoundPod, NodePods, PodsByUid
from vcuda.gpu_availability import GpuAvailability, GpuUsage, available_gpus, sum_usage
from vcuda.placement import PlacedSlices, peak_usage, slices_on_cards
from vcuda.placement_annotation import decode_placement
from vcuda.scheme import Scheme

# On the kubelet's record of a container, by which ours can be made again.
PLACEMENT, TOKEN, OWNER = "quotient.dev/placement", "quotient.dev/allocation", "quotient.dev/container"


class CheckpointWriteError(Exception):
    """The book cannot be written, so nothing is given; the message says why."""


class AllocationStore:
    """Knows what pods hold. Whoever decides by it and then changes it holds its lock meanwhile."""

    def __init__(
        self,
        folder: Path,
        scheme: Scheme,
        node_cards: NodeCards,
        *,
        pods: NodePods,
        kubelet: Kubelet,
        injection: Injector,
        running: Callable[[Collection[str]], set[str]] = lambda _: set(),
        boot: str = "",
    ) -> None:
        self._file, self._scheme, self._node_cards, self._pods = folder / CHECKPOINT_FILE, scheme, node_cards, pods
        self._kubelet, self._injection, self._running, self._boot = kubelet, injection, running, boot
        self.lock = threading.RLock()
        self._holds: dict[str, PodAllocation] = {}
        # Why the book could not be written when it was last tried.
        self.failure = ""
        # Pods that the informer has shown: those can be missed when they are gone.
        self._shown: set[str] = set()
        self._listeners: list[Callable[[], None]] = []
        self._log = structlog.get_logger()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Be told when what is offered or held has changed."""
        self._listeners.append(listener)

    def tell(self) -> None:
        """Tell so."""
        for listener in self._listeners:
            listener()

    def holds(self) -> Mapping[str, PodAllocation]:
        """Give what pods hold."""
        # Replaced as a whole with every change, and never changed.
        return self._holds

    def containers_of(self, uid: str) -> Collection[str]:
        """Name the containers of a pod that have theirs."""
        hold = self._holds.get(uid)
        return hold.containers if hold else ()

    def rooms(self, others: Iterable[Mapping[str, GpuUsage]] = ()) -> list[GpuAvailability]:
        """Say what is left of each card, without what others are to get as well."""
        held = [hold.held for hold in self._holds.values()]
        return available_gpus(
            self._node_cards.gpus(), [*held, *others], lambda gpu: self._node_cards.condition(gpu.uuid).closed
        )

    def put(self, *holds: PodAllocation, dropping: Collection[str] = ()) -> None:
        """Change the book, on the disk first; a BookError if it cannot be written: then nothing has changed."""
        with self.lock:
            changed = {uid: hold for uid, hold in self._holds.items() if uid not in dropping}
            changed |= {hold.uid: hold for hold in holds}
            try:
                write_checkpoint(
                    self._file, AllocationCheckpoint(changed, self._node_cards.cards(), self._boot, self._injection.way)
                )
            except OSError as wrong:
                self.failure = f"{self._file} cannot be written: {wrong}"
                raise CheckpointWriteError(self.failure) from None
            self.failure = ""
            self._holds = changed

    # Lost, and found again.

    def recover(self) -> None:
        """Take up the book of the plugin before, or make it again from what the kubelet and the pods say."""
        try:
            book = read_checkpoint(self._file)
        except BadCheckpoint as wrong:
            self._log.warning("book_is_rebuilt", cause=str(wrong))
            book = AllocationCheckpoint()
        self._holds = book.holds
        known = self._pods.known()
        by_pod: dict[str, list[CheckpointedContainer]] = {}
        for each in self._kubelet.kept():
            by_pod.setdefault(each.uid, []).append(each)
        found = [
            hold
            for uid, kept in by_pod.items()
            if any(each.container not in self.containers_of(uid) for each in kept if TOKEN in each.answer.annotations)
            if (hold := self._recovered(uid, kept, known.get(uid))) is not None
        ]
        if found:
            self.put(*found)
            self._log.info("recovered", pods=[hold.title for hold in found])
            self.tell()

    def hold_of(
        self, uid: str, container: str, kept: Sequence[CheckpointedContainer], pod: BoundPod | None
    ) -> PodAllocation | None:
        """Give the hold of a container that is about to start; one that was lost is made again, if there is room."""
        with self.lock:
            hold = self._holds.get(uid)
            if hold is not None and container in hold.containers:
                return hold
            made = self._recovered(uid, kept, pod)
            if made is None or container not in made.containers:
                return None
            others = [other.held for other in self._holds.values() if other.uid != uid]
            gpus = available_gpus(self._node_cards.gpus(), [*others, made.held])
            if any(each.free_cores < 0 or each.free_memory_mib < 0 for each in gpus if each.gpu.uuid in made.held):
                return None
            self.put(made)
        self.tell()
        return made

    def _recovered(self, uid: str, kept: Sequence[CheckpointedContainer], pod: BoundPod | None) -> PodAllocation | None:
        """Make a pod's hold again from the answers that the kubelet kept."""
        placed: PlacedSlices = {}
        tokens: dict[str, str] = {}
        ways: dict[str, InjectionMode] = {}
        ids = self._ids_in(kept)
        for each in kept:
            answer = each.answer
            token, owner = (answer.annotations.get(key, "") for key in (TOKEN, OWNER))
            if token and owner == owner_of(uid, each.container):
                tokens[each.container] = token
                ways[each.container] = "cdi" if answer.cdi_devices else "native"
                placed |= decode_placement(answer.annotations.get(PLACEMENT, "")) or {}
        if not tokens or any(name not in placed for name in tokens):
            return None
        hold = self._holds.get(uid) or PodAllocation(
            uid=uid,
            namespace=pod.metadata.namespace if pod else "",
            name=pod.metadata.name if pod else "",
            placed=placed,
            held=peak_usage(pod.request, placed) if pod else all_together(placed),
        )
        made = {name: ContainerAllocation(token, ids[name], ways[name]) for name, token in tokens.items()}
        return replace(hold, containers=hold.containers | made)

    # Gone, or come from an ancestor.

    def collect(self, known: PodsByUid | None = None) -> set[str]:
        """Let go of what pods held that are gone, and take up what ancestors gave to pods that still run.

        Gives those that are gone and whose processes are not, yet.
        """
        is_fresh = known is not None
        if known is None:
            if not self._pods.informer.synced:
                return set()
            known = self._pods.known()
        holds = self._holds
        self._shown |= known.keys() & holds.keys()
        gone = holds.keys() - known.keys()
        if not is_fresh and gone - self._shown:
            # Served before the informer had heard of it, or gone while no plugin ran: only the API server knows.
            fresh = self._pods.asked()
            gone = {uid for uid in gone if uid in self._shown or (fresh is not None and uid not in fresh)}
        # A pod that was deleted by force is gone from the API server while its processes run on.
        still = self._running(gone) if gone else set()
        dropping = {uid for uid in holds if uid in known and known[uid].has_ended} | (gone - still)
        adopted = self._adopted(known)
        if dropping or adopted:
            with self.lock:
                tokens = [
                    given.token
                    for uid in dropping
                    if uid in self._holds
                    for given in self._holds[uid].containers.values()
                    if given.token  # what an ancestor gave has no folder of ours
                ]
                self.put(*adopted, dropping=dropping)
                self._shown -= dropping
            self._injection.forget(tokens)
            self._log.info("released", pods=sorted(dropping), adopted=[hold.title for hold in adopted])
            self.tell()
        return still

    def sweep(self) -> None:
        """Remove what is kept for containers that nobody knows."""
        there = self._injection.kept()
        known = {given.token for hold in self._holds.values() for given in hold.containers.values()}
        known |= {each.answer.annotations.get(TOKEN, "") for each in self._kubelet.kept()}
        self._injection.forget(there - known)

    def _adopted(self, known: PodsByUid) -> list[PodAllocation]:
        """Find the pods that an ancestor started and that still run, whatever domain they speak."""
        found = [pod for pod in known.values() if pod.predicates and not pod.has_ended and pod.uid not in self._holds]
        kept = self._kubelet.kept() if found else []
        ours = {each.uid for each in kept if TOKEN in each.answer.annotations}
        held = [self._inherited(pod, kept) for pod in found if pod.uid not in ours]
        return [hold for hold in held if hold is not None]

    def _inherited(self, pod: BoundPod, kept: Sequence[CheckpointedContainer]) -> PodAllocation | None:
        """Read what an ancestor gave to a pod: cards by minor number; and the ids by which the kubelet knows it."""
        by_minor = {card.minor: card.uuid for card in self._node_cards.cards() if not card.is_mig}
        cards = {
            name: [by_minor[minor] for minor in minors if minor in by_minor] for name, minors in pod.predicates.items()
        }
        placed = slices_on_cards(pod.request, cards, self._node_cards.gpus(), self._scheme.unit_mib)
        held = peak_usage(pod.request, placed)
        if not held:
            return None
        ids = self._ids_in([each for each in kept if each.uid == pod.uid])
        return PodAllocation(
            uid=pod.uid,
            namespace=pod.metadata.namespace,
            name=pod.metadata.name,
            placed=placed,
            held=held,
            containers={name: ContainerAllocation("", given) for name, given in ids.items()},
        )

    def _ids_in(self, kept: Iterable[CheckpointedContainer]) -> dict[str, dict[Resource, tuple[str, ...]]]:
        """File the ids that the kubelet keeps for a pod by container and resource."""
        resources = {resource.name_in(self._scheme.names): resource for resource in Resource}
        ids: dict[str, dict[Resource, tuple[str, ...]]] = {}
        for each in kept:
            if each.resource in resources:
                ids.setdefault(each.container, {})[resources[each.resource]] = in_order(each.ids)
        return ids


def owner_of(uid: str, container: str) -> str:
    """Name a container in the kubelet's record."""
    return f"{uid}/{container}"


def all_together(placed: PlacedSlices) -> dict[str, GpuUsage]:
    """Count all containers of a pod as if they ran at once: no less than they ever hold."""
    return sum_usage({given.uuid: (given.cores, given.memory_mib)} for slices in placed.values() for given in slices)


def in_order(ids: Iterable[str]) -> tuple[str, ...]:
    """Order ids by their number."""
    return tuple(sorted(ids, key=id_order))


def id_order(device: str) -> tuple[str, int, str]:
    """Say where an id stands among others."""
    head, _, number = device.rpartition("-")
    return (head, int(number), "") if number.isdecimal() else ("", 0, device)

"""The allocations of this node's GPUs: kept in memory, and in the allocation checkpoint on disk.

A lost checkpoint is rebuilt from the Allocate responses in the kubelet's own checkpoint. An allocation is released when
its pod has ended or is gone, not earlier. Running pods that are in neither checkpoint are adopted with the cards that
their annotations name.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import structlog
from msgspec import Struct
from msgspec.structs import replace

from nodeplugin.adopting import adopt_placement, adopt_predicates
from nodeplugin.cards import NodeCards
from nodeplugin.checkpoint import (
    CHECKPOINT_FILE,
    AllocationCheckpoint,
    BadCheckpoint,
    ContainerAllocation,
    PodAllocation,
    read_checkpoint,
    write_checkpoint,
)
from nodeplugin.device_ids import Resource
from nodeplugin.injection import Injector, mode_of
from nodeplugin.kubelet import CheckpointedContainer, Kubelet
from nodeplugin.pods import BoundPod, NodePods, PodsByUid
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from vcuda.gpu_availability import GpuAvailability, GpuUsage, available_gpus, sum_usage
from vcuda.injection_modes import InjectionMode
from vcuda.isolation import NO_ISOLATION, Isolation, parse_isolation
from vcuda.names import RESPONSE_ISOLATION, RESPONSE_OWNER, RESPONSE_PLACEMENT, RESPONSE_TOKEN
from vcuda.placement import PlacedSlices, peak_usage
from vcuda.placement_annotation import decode_placement
from vcuda.scheme import Scheme


class CheckpointWriteError(Exception):
    """The checkpoint cannot be written, so nothing is allocated; the message says why."""


class UnreleasedPods(Struct, frozen=True):
    """The UIDs of pods that seem gone, and still hold their cards.

    Those `dying` still have processes. Of those `unknown` the API server did not answer whether they are gone.
    """

    dying: set[str] = set()
    unknown: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self.dying or self.unknown)


class AllocationStore:
    """Keeps the pods' allocations."""

    def __init__(
        self,
        folder: Path,
        scheme: Scheme,
        node_cards: NodeCards,
        *,
        pods: NodePods,
        kubelet: Kubelet,
        injector: Injector,
        running_pods: Callable[[Collection[str]], set[str]] = lambda _: set(),
        boot_id: str = "",
    ) -> None:
        """`running_pods` returns those of the given pod UIDs that still have processes on this node."""
        self._file, self._scheme, self._node_cards, self._pods = folder / CHECKPOINT_FILE, scheme, node_cards, pods
        self._kubelet, self._injector, self._running_pods, self._boot_id = kubelet, injector, running_pods, boot_id
        # Hold it from reading the allocations to updating them, or two containers get the same share of a card.
        self.lock = threading.RLock()
        # Replaced as a whole by every update and never modified, so readers need no lock.
        self._allocations: dict[str, PodAllocation] = {}
        # Why the last write failed; empty after a successful one. Shown by the readiness probe.
        self.write_error = ""
        # Whether running pods may be missing here, because the checkpoint was lost.
        self.is_incomplete = False
        # Pods that have been in the informer's cache: one of these is gone once the cache no longer has it. Any other
        # pod may just not have arrived there yet.
        self._seen: set[str] = set()
        self._listeners: list[Callable[[], None]] = []
        self._log = structlog.get_logger()

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the devices on offer or the pods' placements may have changed."""
        self._listeners.append(listener)

    def notify(self) -> None:
        for listener in self._listeners:
            listener()

    def all(self) -> Mapping[str, PodAllocation]:
        """Return a snapshot of all allocations, by pod UID."""
        return self._allocations

    def allocated_containers(self, uid: str) -> Collection[str]:
        allocation = self._allocations.get(uid)
        return allocation.containers if allocation else ()

    def availability(
        self, reserved: Iterable[Mapping[str, GpuUsage]] = (), *, without: Collection[str] = ()
    ) -> list[GpuAvailability]:
        """Return what is free on each card beside `reserved`, and as if the pods `without` were gone."""
        usages = [allocation.usage for uid, allocation in self._allocations.items() if uid not in without]
        return available_gpus(
            self._node_cards.gpus(),
            [*usages, *reserved],
            lambda gpu: self._node_cards.condition(gpu.uuid).unschedulable_reason,
        )

    def fits_beside_others(self, allocation: PodAllocation) -> bool:
        """Whether the cards of a pod that ran on them before have not been allocated to others since."""
        # Cordons and faults do not matter to it.
        free = {each.gpu.uuid: each for each in self.availability([allocation.usage], without={allocation.uid})}
        cards = [free[uuid] for uuid in allocation.usage if uuid in free]
        return all(each.free_cores >= 0 and each.free_memory_mib >= 0 for each in cards)

    def update(self, *allocations: PodAllocation, remove: Collection[str] = ()) -> None:
        """Put and remove allocations, on disk first; after a CheckpointWriteError nothing has changed."""
        with self.lock:
            updated = {uid: each for uid, each in self._allocations.items() if uid not in remove}
            updated |= {each.uid: each for each in allocations}
            checkpoint = AllocationCheckpoint(
                updated, self._node_cards.cards(), self._boot_id, self._injector.mode, self.is_incomplete
            )
            try:
                write_checkpoint(self._file, checkpoint)
            except OSError as error:
                self.write_error = f"{self._file} cannot be written: {error.strerror or error}"
                raise CheckpointWriteError(self.write_error) from None
            self.write_error = ""
            self._allocations = updated

    def recover(self) -> None:
        """Load the checkpoint, and add what only the kubelet's checkpoint has; called once, before registration."""
        try:
            checkpoint = read_checkpoint(self._file)
        except BadCheckpoint as error:
            # On a new node as well, where the kubelet's checkpoint has nothing to add.
            self._log.warning("checkpoint_not_loaded", error=str(error))
            checkpoint = AllocationCheckpoint(incomplete=True)
        self._allocations, self.is_incomplete = checkpoint.pods, checkpoint.incomplete
        pods = self._pods.cached_pods()
        by_pod: dict[str, list[CheckpointedContainer]] = {}
        for each in self._kubelet.checkpointed():
            by_pod.setdefault(each.uid, []).append(each)
        recovered = [
            allocation
            for uid, entries in by_pod.items()
            if any(
                each.container not in self.allocated_containers(uid)
                for each in entries
                if RESPONSE_TOKEN in each.response.annotations
            )
            if (allocation := self._rebuild(uid, entries, pods.get(uid))) is not None
        ]
        if recovered:
            self.update(*recovered)
            self._log.info("allocations_recovered", pods=[each.title for each in recovered])
            self.notify()

    def get_or_rebuild(
        self, uid: str, container: str, entries: Sequence[CheckpointedContainer], pod: BoundPod | None
    ) -> PodAllocation | None:
        """Return the allocation of a container that is about to start.

        A lost one is rebuilt from the pod's `entries` in the kubelet's checkpoint, unless its cards have been allocated
        to other pods since: then None.
        """
        with self.lock:
            existing = self._allocations.get(uid)
            if existing is not None and container in existing.containers:
                return existing
            rebuilt = self._rebuild(uid, entries, pod)
            if rebuilt is None or container not in rebuilt.containers:
                return None
            if not self.fits_beside_others(rebuilt):
                return None
            self.update(rebuilt)
        self.notify()
        return rebuilt

    def _rebuild(
        self, uid: str, entries: Sequence[CheckpointedContainer], pod: BoundPod | None
    ) -> PodAllocation | None:
        """Rebuild a pod's allocation from the responses in the kubelet's checkpoint; None if they are not enough."""
        placed: PlacedSlices = {}
        tokens: dict[str, str] = {}
        modes: dict[str, InjectionMode] = {}
        isolations: dict[str, Isolation] = {}
        ids = self._ids_by_container(entries)
        for each in entries:
            response = each.response
            token, owner = (response.annotations.get(key, "") for key in (RESPONSE_TOKEN, RESPONSE_OWNER))
            # A response of another container, stored here by a mistake of the kubelet's, is not evidence.
            if token and owner == owner_annotation(uid, each.container):
                tokens[each.container] = token
                modes[each.container] = mode_of(response)
                isolations[each.container] = isolation_in(response)
                placed |= decode_placement(response.annotations.get(RESPONSE_PLACEMENT, "")) or {}
        if not tokens or any(name not in placed for name in tokens):
            return None
        # An adopted one without containers is from annotations: the kubelet's checkpoint is better evidence.
        existing = self._allocations.get(uid) if self.allocated_containers(uid) else None
        allocation = existing or PodAllocation(
            uid=uid,
            namespace=pod.metadata.namespace if pod else "",
            name=pod.metadata.name if pod else "",
            placed=placed,
            # Without the pod it is unknown which containers are init containers: count all as running together.
            usage=peak_usage(pod.request, placed) if pod else total_usage(placed),
        )
        rebuilt = {
            name: ContainerAllocation(token, ids[name], modes[name], isolations[name]) for name, token in tokens.items()
        }
        return replace(allocation, containers=allocation.containers | rebuilt)

    def release_ended(self, fresh_pods: PodsByUid | None = None) -> "UnreleasedPods":
        """Release the allocations of pods that have ended or are gone, and adopt running pods that have none.

        `fresh_pods` is a list just read from the API server; without it the informer's cache is used. Returns the pods
        whose allocations are kept although the pods seem gone, so that the caller tries again.
        """
        pods = fresh_pods
        if pods is None:
            if not self._pods.informer.synced:
                return UnreleasedPods()
            pods = self._pods.cached_pods()
        allocations = self._allocations
        self._seen |= pods.keys() & allocations.keys()
        gone, unknown = allocations.keys() - pods.keys(), set[str]()
        if fresh_pods is None and gone - self._seen:
            # Allocated before the informer knew the pod, or deleted while no plugin ran: only the API server can tell.
            fetched = self._pods.fetch_pods()
            unknown = gone - self._seen if fetched is None else set()
            gone -= unknown | (fetched or {}).keys() - self._seen
        # A force-deleted pod is gone from the API server while its processes still use the card.
        dying = self._running_pods(gone) if gone else set()
        ended = {uid for uid in allocations if uid in pods and pods[uid].has_ended} | (gone - dying)
        if ended:
            with self.lock:
                tokens = [
                    container.token
                    for uid in ended
                    if uid in self._allocations
                    for container in self._allocations[uid].containers.values()
                    if container.token  # adopted ones have none, and "" would be the folder of all containers
                ]
                self.update(remove=ended)
                self._seen -= ended
            self._injector.remove(tokens)
            self._log.info("allocations_released", pods=sorted(ended))
            self.notify()
        self.adopt(pods)
        self._note_complete(pods)
        return UnreleasedPods(dying, unknown)

    def remove_orphans(self) -> None:
        """Remove folders and CDI files that belong to no container, in our checkpoint or in the kubelet's."""
        # Read first: a folder created after this cannot be taken for an orphan.
        existing = self._injector.existing_tokens()
        used = {each.token for allocation in self._allocations.values() for each in allocation.containers.values()}
        used |= {each.response.annotations.get(RESPONSE_TOKEN, "") for each in self._kubelet.checkpointed()}
        self._injector.remove(existing - used)

    def adopt(self, pods: PodsByUid) -> None:
        """Add allocations for running pods that have none here, so that their cards are not allocated again."""
        with self.lock:
            # One without containers is from annotations alone; cards that were not listed then may be listed now.
            incomplete = [
                pod
                for pod in pods.values()
                if not pod.has_ended and not self.allocated_containers(pod.uid)
                if pod.predicate_minors or (self.is_incomplete and pod.placed and pod.has_started)
            ]
            if not incomplete:
                return
            entries = self._kubelet.checkpointed()
            built = [self._adopt(pod, [each for each in entries if each.uid == pod.uid]) for pod in incomplete]
            adopted = [each for each in built if each is not None and each != self._allocations.get(each.uid)]
            if not adopted:
                return
            self.update(*adopted)
        self._log.info("pods_adopted", pods=[each.title for each in adopted])
        self.notify()

    def _note_complete(self, pods: PodsByUid) -> None:
        """After all pods were adopted: from now on, one that is not here has ended, even if a cache lags behind."""
        if not self.is_incomplete:
            return
        # A pod's cards may be unknown because the driver has not listed them yet.
        known = {card.uuid for card in self._node_cards.cards()}
        placements = [pod.placed or {} for pod in pods.values() if pod.has_started and not pod.has_ended]
        if known.issuperset(each.uuid for placed in placements for slices in placed.values() for each in slices):
            self.is_incomplete = False
            self.update()

    def _adopt(self, pod: BoundPod, entries: Sequence[CheckpointedContainer]) -> PodAllocation | None:
        gpus, unit_mib = self._node_cards.gpus(), self._scheme.unit_mib
        # A container of ours starts only with its response from the kubelet's checkpoint, so none is added here.
        if self.is_incomplete and (adopted := adopt_placement(pod, gpus, unit_mib)):
            return adopted
        # A pod with our response in the kubelet's checkpoint is ours, whatever gpu-manager's annotations say.
        if any(RESPONSE_TOKEN in each.response.annotations for each in entries):
            return None
        adopted = adopt_predicates(pod, self._node_cards.cards(), gpus, unit_mib)
        ids = self._ids_by_container(entries)
        return adopted and replace(adopted, containers={name: ContainerAllocation("", ids[name]) for name in ids})

    def _ids_by_container(self, entries: Iterable[CheckpointedContainer]) -> dict[str, dict[Resource, tuple[str, ...]]]:
        """Group the device IDs of one pod's entries by container and resource; other resources are skipped."""
        resources = {resource.name_in(self._scheme.names): resource for resource in Resource}
        ids: dict[str, dict[Resource, tuple[str, ...]]] = {}
        for each in entries:
            if each.resource in resources:
                ids.setdefault(each.container, {})[resources[each.resource]] = sort_ids(each.ids)
        return ids


def isolation_in(response: api.ContainerAllocateResponse) -> Isolation:
    """Return what enforces the limits of a container, by its response; nothing in those of earlier releases."""
    return parse_isolation(response.annotations.get(RESPONSE_ISOLATION, "")) or NO_ISOLATION


def owner_annotation(uid: str, container: str) -> str:
    """Return the value of the annotation that says for which container a response was built."""
    return f"{uid}/{container}"


def total_usage(placed: PlacedSlices) -> dict[str, GpuUsage]:
    """Sum all containers of a pod as if they ran at once: an upper bound of its peak usage."""
    return sum_usage({given.uuid: (given.cores, given.memory_mib)} for slices in placed.values() for given in slices)


def sort_ids(ids: Iterable[str]) -> tuple[str, ...]:
    """Sort device IDs by number, so that a checkpoint is the same however the kubelet lists them."""
    return tuple(sorted(ids, key=id_sort_key))


def id_sort_key(device_id: str) -> tuple[str, int, str]:
    # IDs of other plugins, as of adopted pods, may have no number: they sort first, as text.
    prefix, _, number = device_id.rpartition("-")
    return (prefix, int(number), "") if number.isdecimal() else ("", 0, device_id)

"""The allocations of this node's GPUs: kept in memory, and in the allocation checkpoint on disk.

A lost checkpoint is rebuilt from the Allocate responses in the kubelet's own checkpoint. An allocation is released when
its pod has ended or is gone, not earlier. Running pods that gpu-manager started are adopted with the cards they have.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import structlog
from msgspec import Struct
from msgspec.structs import replace

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
from vcuda.gpu_availability import GpuAvailability, GpuUsage, available_gpus, sum_usage
from vcuda.injection_modes import InjectionMode
from vcuda.names import RESPONSE_OWNER, RESPONSE_PLACEMENT, RESPONSE_TOKEN
from vcuda.placement import PlacedSlices, peak_usage, slices_on_cards
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

    def availability(self, reserved: Iterable[Mapping[str, GpuUsage]] = ()) -> list[GpuAvailability]:
        """Return what is free on each card, after subtracting `reserved` as well."""
        usages = [allocation.usage for allocation in self._allocations.values()]
        return available_gpus(
            self._node_cards.gpus(),
            [*usages, *reserved],
            lambda gpu: self._node_cards.condition(gpu.uuid).unschedulable_reason,
        )

    def update(self, *allocations: PodAllocation, remove: Collection[str] = ()) -> None:
        """Put and remove allocations, on disk first; after a CheckpointWriteError nothing has changed."""
        with self.lock:
            updated = {uid: each for uid, each in self._allocations.items() if uid not in remove}
            updated |= {each.uid: each for each in allocations}
            checkpoint = AllocationCheckpoint(updated, self._node_cards.cards(), self._boot_id, self._injector.mode)
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
            checkpoint = AllocationCheckpoint()
        self._allocations = checkpoint.pods
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
            others = [each.usage for each in self._allocations.values() if each.uid != uid]
            # Cordons and faults do not matter here: the container ran on these cards before.
            gpus = available_gpus(self._node_cards.gpus(), [*others, rebuilt.usage])
            if any(gpu.free_cores < 0 or gpu.free_memory_mib < 0 for gpu in gpus if gpu.gpu.uuid in rebuilt.usage):
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
        ids = self._ids_by_container(entries)
        for each in entries:
            response = each.response
            token, owner = (response.annotations.get(key, "") for key in (RESPONSE_TOKEN, RESPONSE_OWNER))
            # A response of another container, stored here by a mistake of the kubelet's, is not evidence.
            if token and owner == owner_annotation(uid, each.container):
                tokens[each.container] = token
                modes[each.container] = mode_of(response)
                placed |= decode_placement(response.annotations.get(RESPONSE_PLACEMENT, "")) or {}
        if not tokens or any(name not in placed for name in tokens):
            return None
        allocation = self._allocations.get(uid) or PodAllocation(
            uid=uid,
            namespace=pod.metadata.namespace if pod else "",
            name=pod.metadata.name if pod else "",
            placed=placed,
            # Without the pod it is unknown which containers are init containers: count all as running together.
            usage=peak_usage(pod.request, placed) if pod else total_usage(placed),
        )
        rebuilt = {name: ContainerAllocation(token, ids[name], modes[name]) for name, token in tokens.items()}
        return replace(allocation, containers=allocation.containers | rebuilt)

    def release_ended(self, fresh_pods: PodsByUid | None = None) -> "UnreleasedPods":
        """Release the allocations of pods that have ended or are gone, and adopt running pods of gpu-manager.

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
        adopted = self._adopt_pods(pods)
        if ended or adopted:
            with self.lock:
                tokens = [
                    container.token
                    for uid in ended
                    if uid in self._allocations
                    for container in self._allocations[uid].containers.values()
                    if container.token  # adopted ones have none, and "" would be the folder of all containers
                ]
                self.update(*adopted, remove=ended)
                self._seen -= ended
            self._injector.remove(tokens)
            self._log.info("allocations_released", pods=sorted(ended), adopted=[each.title for each in adopted])
            self.notify()
        return UnreleasedPods(dying, unknown)

    def remove_orphans(self) -> None:
        """Remove folders and CDI files that belong to no container, in our checkpoint or in the kubelet's."""
        # Read first: a folder created after this cannot be taken for an orphan.
        existing = self._injector.existing_tokens()
        used = {each.token for allocation in self._allocations.values() for each in allocation.containers.values()}
        used |= {each.response.annotations.get(RESPONSE_TOKEN, "") for each in self._kubelet.checkpointed()}
        self._injector.remove(existing - used)

    def _adopt_pods(self, pods: PodsByUid) -> list[PodAllocation]:
        """Build allocations for running pods of gpu-manager, under any domain, that have none here yet."""
        candidates = [
            pod
            for pod in pods.values()
            if pod.predicate_minors and not pod.has_ended and pod.uid not in self._allocations
        ]
        entries = self._kubelet.checkpointed() if candidates else []
        # A pod with our response in the kubelet's checkpoint is ours, whatever its annotations say: rebuild, not adopt.
        ours = {each.uid for each in entries if RESPONSE_TOKEN in each.response.annotations}
        adopted = [self._adopt(pod, entries) for pod in candidates if pod.uid not in ours]
        return [each for each in adopted if each is not None]

    def _adopt(self, pod: BoundPod, entries: Sequence[CheckpointedContainer]) -> PodAllocation | None:
        # gpu-manager recorded cards by minor number; it did not know MIG devices.
        by_minor = {card.minor: card.uuid for card in self._node_cards.cards() if not card.is_mig}
        cards = {
            name: [by_minor[minor] for minor in minors if minor in by_minor]
            for name, minors in pod.predicate_minors.items()
        }
        placed = slices_on_cards(pod.request, cards, self._node_cards.gpus(), self._scheme.unit_mib)
        usage = peak_usage(pod.request, placed)
        if not usage:
            return None
        ids = self._ids_by_container([each for each in entries if each.uid == pod.uid])
        return PodAllocation(
            uid=pod.uid,
            namespace=pod.metadata.namespace,
            name=pod.metadata.name,
            placed=placed,
            usage=usage,
            containers={name: ContainerAllocation("", each) for name, each in ids.items()},
        )

    def _ids_by_container(self, entries: Iterable[CheckpointedContainer]) -> dict[str, dict[Resource, tuple[str, ...]]]:
        """Group the device IDs of one pod's entries by container and resource; other resources are skipped."""
        resources = {resource.name_in(self._scheme.names): resource for resource in Resource}
        ids: dict[str, dict[Resource, tuple[str, ...]]] = {}
        for each in entries:
            if each.resource in resources:
                ids.setdefault(each.container, {})[resources[each.resource]] = sort_ids(each.ids)
        return ids


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

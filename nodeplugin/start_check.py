"""Checks a container before each start: the kubelet's checkpoint must have what we allocated, on healthy cards.

On a restart the kubelet does not call Allocate again but replays the response in its checkpoint, which may be lost,
outdated, or another container's. PreStartContainer passes nothing but device IDs.
"""

from collections.abc import Sequence

from nodeplugin.allocation_store import AllocationStore, CheckpointWriteError, owner_annotation
from nodeplugin.cards import NodeCards
from nodeplugin.device_ids import Resource
from nodeplugin.injection import Injector
from nodeplugin.kubelet import CheckpointedContainer, Kubelet
from nodeplugin.pods import NodePods, PodsByUid
from nodeplugin.refusal import RECREATE, AllocationRefused, cannot_create_files, container_title, disk_problem
from vcuda.isolation import Rung
from vcuda.names import RESPONSE_OWNER, RESPONSE_TOKEN, Names


class StartCheck:
    """Decides whether a container may start. Called concurrently with allocations."""

    def __init__(
        self,
        allocations: AllocationStore,
        names: Names,
        node_cards: NodeCards,
        *,
        pods: NodePods,
        kubelet: Kubelet,
        injector: Injector,
    ) -> None:
        self._allocations, self._names, self._node_cards = allocations, names, node_cards
        self._pods, self._kubelet, self._injector = pods, kubelet, injector

    def check(self, resource: Resource, ids: frozenset[str]) -> None:
        """Check the container with these device IDs, and repair its files; AllocationRefused if it must not start."""
        name = resource.name_in(self._names)
        entries = self._kubelet.checkpointed()
        owners = [each for each in entries if each.resource == name and each.ids == ids]
        if not owners:
            # The kubelet's checkpoint may be unreadable; ours has the IDs as well.
            owners = self._allocated_to(resource, ids)
        if not owners:
            raise AllocationRefused(f"these {len(ids)} {name} devices belong to no allocation on this node; {RECREATE}")
        pods = self._pods.cached_pods()
        # An init container's IDs are reused by the containers after it, so the IDs may have several owners. One of
        # them starts: it is enough if the cards of one are healthy, but every owner's records must be right.
        problems = [
            self._check_container(uid, container, pods, [each for each in entries if each.uid == uid])
            for uid, container in dict.fromkeys((each.uid, each.container) for each in owners)
        ]
        if all(problems):
            raise AllocationRefused(problems[0])

    def _allocated_to(self, resource: Resource, ids: frozenset[str]) -> list[CheckpointedContainer]:
        return [
            CheckpointedContainer(uid, name, resource, ids)
            for uid, allocation in self._allocations.all().items()
            for name, container in allocation.containers.items()
            if frozenset(container.ids.get(resource, ())) == ids
        ]

    def _check_container(
        self, uid: str, container: str, pods: PodsByUid, entries: Sequence[CheckpointedContainer]
    ) -> str:
        """Refuse a container whose records are wrong; return what is wrong with its cards, empty if nothing."""
        pod = pods.get(uid)
        title = container_title(pod.title if pod else uid, container)
        responses = [each.response for each in entries if each.container == container]
        owners = {each.annotations[RESPONSE_OWNER] for each in responses if RESPONSE_OWNER in each.annotations}
        if owners - {owner_annotation(uid, container)}:
            raise AllocationRefused(
                f"{title}: the kubelet's checkpoint has the allocation of another container for it; {RECREATE}"
            )
        try:
            allocation = self._allocations.get_or_rebuild(uid, container, entries, pod)
        except CheckpointWriteError as error:
            raise disk_problem(title, error) from None
        if allocation is None:
            raise AllocationRefused(f"{title}: no GPU is allocated to it; {RECREATE} (static pods cannot use GPUs)")
        given, slices = allocation.containers[container], allocation.placed.get(container, ())
        filled = [each for each in responses if RESPONSE_TOKEN in each.annotations]
        tokens = {each.annotations[RESPONSE_TOKEN] for each in filled}
        # An adopted allocation has no token, and an unreadable kubelet checkpoint has no responses to compare.
        if responses and given.token and tokens != {given.token}:
            state = "an outdated" if tokens else "an empty"
            raise AllocationRefused(f"{title}: the kubelet's checkpoint has {state} allocation for it; {RECREATE}")
        problem = self._card_problem(title, allocation.cards_of(container))
        # A missing card has no device node to compare; its problem is reported instead.
        if not problem and any(self._injector.is_outdated(each, slices) for each in filled):
            raise AllocationRefused(f"{title}: the device node of its GPU has changed with a reboot; {RECREATE}")
        if pod is None and given.isolation.memory in {Rung.PRELOAD, Rung.DRIVER}:
            # Its limits cannot be written, and it must not run without. The kubelet tries again.
            pod = (self._pods.fetch_pods() or {}).get(uid)
            if pod is None:
                raise AllocationRefused(f"{title}: its pod is not known yet, and its limits depend on it; wait")
        if pod is not None and given.token:
            try:
                self._injector.prepare(pod, container, given, slices)
            except OSError as error:
                raise cannot_create_files(title, error) from None
        return problem

    def _card_problem(self, title: str, cards: Sequence[str]) -> str:
        for uuid in cards:
            if self._node_cards.get(uuid) is None:
                return f"{title}: its GPU {uuid} is no longer on this node; {RECREATE}"
            if fault := self._node_cards.condition(uuid).fault:
                # The kubelet retries a failed start, so the container comes back with the card.
                return f"{title}: its GPU {uuid} is unhealthy: {fault}; it starts when the GPU recovers, or {RECREATE}"
        return ""

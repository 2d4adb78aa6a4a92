"""Which container an Allocate call is for. The kubelet does not say, but it can be derived; it is never guessed.

The kubelet admits one pod at a time and its containers in order, and PodResources lists a pod from the moment its
admission starts. So a call is for a listed pod that still lacks an allocation, and for its first container without one:
according to our checkpoint, unless the kubelet shows that it has lost that allocation.

A GPU container requests two resources, with one call for each, in random order. The first call gets an empty response,
the second one everything. During the second call PodResources lists the container with the IDs of the first. Only plain
init containers are never listed; they are identified by the call just before. If several containers match, the call
is refused.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from nodeplugin.device_ids import Resource
from nodeplugin.kubelet import ListedContainer
from nodeplugin.pods import BoundPod, PodsByUid
from nodeplugin.refusal import RECREATE, container_title
from vcuda.names import Names
from vcuda.request import Role


class Call(Struct, frozen=True):
    """An Allocate call of the kubelet."""

    resource: Resource
    ids: frozenset[str]

    @property
    def count(self) -> int:
        return len(self.ids)


class FirstCall(Struct, frozen=True):
    """A call that got an empty response, and the UIDs of the pods it may have been for."""

    call: Call
    uids: frozenset[str]


class ContainerTarget(Struct, frozen=True):
    """A container that a call may be for, and the IDs it already has of the other resource."""

    pod: BoundPod
    container: str
    other_ids: frozenset[str] = frozenset()

    @property
    def title(self) -> str:
        return container_title(self.pod.title, self.container)


class Attribution(Struct, frozen=True):
    """The containers that match a call: as their last call, or as the first of their two."""

    last_call_of: tuple[ContainerTarget, ...] = ()
    first_call_of: tuple[ContainerTarget, ...] = ()

    @property
    def is_unambiguous(self) -> bool:
        """Whether the response is certain: one container gets everything, or it is a first call for all matches."""
        return len(self.last_call_of) == 1 if not self.first_call_of else not self.last_call_of


class KubeletListing:
    """PodResources of some or all pods. Of the pods in `pod_keys`, only (namespace, name) is known."""

    def __init__(
        self, names: Names, containers: Iterable[ListedContainer] = (), pod_keys: Iterable[tuple[str, str]] = ()
    ) -> None:
        self._names = names
        self._containers = {(each.namespace, each.pod, each.container): each for each in containers}
        self._pods = {(namespace, pod) for namespace, pod, _ in self._containers} | set(pod_keys)

    def has_pod(self, pod: BoundPod) -> bool:
        return (pod.metadata.namespace, pod.metadata.name) in self._pods

    def has_container(self, pod: BoundPod, container: str) -> bool:
        return self._find(pod, container) is not None

    def has_all_resources(self, pod: BoundPod, container: str) -> bool:
        """Whether a container is listed with devices of every resource it requests."""
        listed = self._find(pod, container)
        return listed is not None and all(listed.has(each.name_in(self._names)) for each in pod.counts[container])

    def ids(self, pod: BoundPod, container: str, resource: Resource) -> frozenset[str]:
        listed = self._find(pod, container)
        return listed.ids(resource.name_in(self._names)) if listed else frozenset()

    def _find(self, pod: BoundPod, container: str) -> ListedContainer | None:
        return self._containers.get((pod.metadata.namespace, pod.metadata.name, container))


# Returns the names of a pod's containers in the kubelet's checkpoint, by UID; None if it cannot be read.
CheckpointedNames = Callable[[str], Collection[str] | None]


def attribute_call(
    call: Call,
    previous: FirstCall | None,
    listing: KubeletListing,
    pods: PodsByUid,
    allocated: Mapping[str, Collection[str]],
    *,
    checkpointed: CheckpointedNames = lambda _: None,
) -> Attribution:
    """Find the containers that a call may be for.

    `previous` is the call just before, if it got an empty response. `allocated` are the containers in our checkpoint,
    by pod UID.
    """
    last_call_of: list[ContainerTarget] = []
    first_call_of: list[ContainerTarget] = []
    for pod in pods.values():
        # Ended pods stay listed for a while.
        if pod.has_ended or not listing.has_pod(pod):
            continue
        container = next_container(pod, listing, allocated.get(pod.uid, ()), checkpointed)
        if container is None or pod.counts[container].get(call.resource) != call.count:
            continue
        if len(pod.counts[container]) == 1:
            # Bypassed the webhook, which gives every GPU container both resources: there is no second call.
            last_call_of.append(ContainerTarget(pod, container))
        elif (other_ids := first_call_ids(pod, container, call, previous, listing)) is not None:
            last_call_of.append(ContainerTarget(pod, container, other_ids))
        elif not listing.ids(pod, container, call.resource):
            first_call_of.append(ContainerTarget(pod, container))
    return Attribution(tuple(last_call_of), tuple(first_call_of))


def gpu_containers(pod: BoundPod) -> list[str]:
    """Return the containers that request GPUs, in the order in which the kubelet allocates them."""
    return [each.name for each in pod.request.containers if each.name in pod.counts]


def next_container(
    pod: BoundPod, listing: KubeletListing, allocated: Collection[str], checkpointed: CheckpointedNames
) -> str | None:
    """Return the container that the kubelet allocates next, None if all are allocated."""
    remaining: list[str] = []
    # The kubelet allocates in order: if it has a container's allocation, it has those of all containers before.
    for name in reversed(gpu_containers(pod)):
        if name in allocated and listing.has_all_resources(pod, name):
            break
        remaining.insert(0, name)
    return next(
        (name for name in remaining if name not in allocated or is_requested_again(pod, name, listing, checkpointed)),
        None,
    )


def is_requested_again(pod: BoundPod, container: str, listing: KubeletListing, checkpointed: CheckpointedNames) -> bool:
    """Whether the kubelet lost an allocation that we made: it was killed before its checkpoint was written."""
    if listing.has_container(pod, container):
        return not listing.has_all_resources(pod, container)
    if pod.role_of(container) is not Role.INIT:
        return False
    # Plain init containers are never listed, only checkpointed. An unreadable checkpoint proves nothing.
    names = checkpointed(pod.uid)
    return names is not None and container not in names


def first_call_ids(
    pod: BoundPod, container: str, call: Call, previous: FirstCall | None, listing: KubeletListing
) -> frozenset[str] | None:
    """Return the IDs of the container's first call if this call is its second; None if it is not."""
    count = pod.counts[container][call.resource.other]
    is_pair = previous is not None and previous.call.resource is call.resource.other and pod.uid in previous.uids
    if pod.role_of(container) is Role.INIT or not listing.has_container(pod, container):
        return previous.call.ids if previous is not None and is_pair and previous.call.count == count else None
    ids = listing.ids(pod, container, call.resource.other)
    if len(ids) != count or listing.ids(pod, container, call.resource):
        return None
    # Without a previous call, another plugin process answered the first one: the listing alone is proof enough.
    return ids if previous is None or (is_pair and ids == previous.call.ids) else None


def ambiguous_message(targets: Sequence[ContainerTarget]) -> str:
    titles = "; ".join(sorted(each.title for each in targets))
    return f"cannot tell which container the kubelet allocates for, several match: {titles}; {RECREATE}"

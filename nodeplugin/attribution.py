"""Which container an allocation is for. The kubelet does not say, but it can be known.

The kubelet admits one pod after another, its containers in their order, and lists a pod from the moment it takes it up.
So whoever is listed and still waits for a container is being admitted, and it is the turn of its first container that
has nothing yet: by our book, unless the kubelet shows that it does not have what was given. A GPU container asks for
two resources, one call for each: the first is answered with nothing, the second one with everything. While the second
is being asked for, the kubelet lists the container with the ids of the first; only plain init containers are never
listed, and for them the call just before tells. Where that leaves a choice, the answer is a refusal, never a guess.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from nodeplugin.device_ids import Resource
from nodeplugin.kubelet import ListedContainer
from nodeplugin.pods import BoundPod, PodsByUid
from vcuda.names import Names
from vcuda.request import Role


class Call(Struct, frozen=True):
    """An allocation that was answered, or is about to be."""

    resource: Resource
    ids: frozenset[str]

    @property
    def count(self) -> int:
        """How many it asks for."""
        return len(self.ids)


class FirstCall(Struct, frozen=True):
    """A call that was answered with nothing, and the pods that it could have been for."""

    call: Call
    uids: frozenset[str]


class ContainerTarget(Struct, frozen=True):
    """A container of a pod, and the ids it already holds of the other resource."""

    pod: BoundPod
    container: str
    other_ids: frozenset[str] = frozenset()

    @property
    def title(self) -> str:
        """Name it for people."""
        return f"{self.pod.title} container {self.container}"


class Attribution(Struct, frozen=True):
    """Whose a call is: those for whom it would be the last, and those for whom it would be the first of two."""

    lasts: tuple[ContainerTarget, ...] = ()
    firsts: tuple[ContainerTarget, ...] = ()

    @property
    def is_clear(self) -> bool:
        """Whether there is just one answer: one container gets everything now, or it is a first call in any case."""
        return len(self.lasts) == 1 if not self.firsts else not self.lasts


class KubeletListing:
    """The pods that the kubelet has taken up, with what their containers hold; of some only that they are there."""

    def __init__(
        self, names: Names, holdings: Iterable[ListedContainer] = (), bare: Iterable[tuple[str, str]] = ()
    ) -> None:
        self._names = names
        self._held = {(each.namespace, each.pod, each.container): each for each in holdings}
        self._pods = {(namespace, pod) for namespace, pod, _ in self._held} | set(bare)

    def has(self, pod: BoundPod) -> bool:
        """Tell whether a pod was taken up."""
        return (pod.metadata.namespace, pod.metadata.name) in self._pods

    def shows(self, pod: BoundPod, container: str) -> bool:
        """Tell whether it would be seen what a container holds."""
        return self._of(pod, container) is not None

    def has_all(self, pod: BoundPod, container: str) -> bool:
        """Tell whether a container holds something of every resource that it asks for."""
        held = self._of(pod, container)
        return held is not None and all(held.has(each.name_in(self._names)) for each in pod.counts[container])

    def ids(self, pod: BoundPod, container: str, resource: Resource) -> frozenset[str]:
        """Give the ids that a container holds."""
        held = self._of(pod, container)
        return held.ids(resource.name_in(self._names)) if held else frozenset()

    def _of(self, pod: BoundPod, container: str) -> ListedContainer | None:
        return self._held.get((pod.metadata.namespace, pod.metadata.name, container))


Written = Callable[[str], Collection[str] | None]


def attribute_call(
    call: Call,
    before: FirstCall | None,
    listed: KubeletListing,
    known: PodsByUid,
    booked: Mapping[str, Collection[str]],
    *,
    written: Written = lambda _: None,
) -> Attribution:
    """Say whose call this is, by the pods that were taken up and the containers that have theirs.

    `booked` are the containers that were given something; `written` says of a pod which ones the kubelet wrote down,
    None if nobody knows.
    """
    lasts: list[ContainerTarget] = []
    firsts: list[ContainerTarget] = []
    for pod in known.values():
        if pod.has_ended or not listed.has(pod):
            continue
        for container in next_container(pod, listed, booked.get(pod.uid, ()), written):
            counts = pod.counts[container]
            if counts.get(call.resource) != call.count:
                continue
            if len(counts) == 1:
                lasts.append(ContainerTarget(pod, container))
            elif (other_ids := ids_before(pod, container, call, before, listed)) is not None:
                lasts.append(ContainerTarget(pod, container, other_ids))
            elif not listed.ids(pod, container, call.resource):
                firsts.append(ContainerTarget(pod, container))
    return Attribution(tuple(lasts), tuple(firsts))


def in_order(pod: BoundPod) -> list[str]:
    """Name the containers that the kubelet asks for, in its order."""
    return [each.name for each in pod.request.containers if each.name in pod.counts]


def next_container(pod: BoundPod, listed: KubeletListing, booked: Collection[str], written: Written) -> list[str]:
    """Name the container whose turn it is: the first that has nothing yet; what the kubelet has, it has in order."""
    left: list[str] = []
    for name in reversed(in_order(pod)):
        if name in booked and listed.has_all(pod, name):
            break
        left.insert(0, name)
    return [name for name in left if name not in booked or is_asked_again(pod, name, listed, written)][:1]


def is_asked_again(pod: BoundPod, container: str, listed: KubeletListing, written: Written) -> bool:
    """Tell whether the kubelet has not what a container was given: it ended before it wrote that down, or lost it."""
    if listed.shows(pod, container):
        return not listed.has_all(pod, container)
    if pod.role_of(container) is not Role.INIT:
        return False
    there = written(pod.uid)
    return there is not None and container not in there


def ids_before(
    pod: BoundPod, container: str, call: Call, before: FirstCall | None, listed: KubeletListing
) -> frozenset[str] | None:
    """Give the ids of a container's first call, if this is its second; None if it is not."""
    wanted = pod.counts[container][call.resource.other]
    pairs = before is not None and before.call.resource is call.resource.other and pod.uid in before.uids
    if pod.role_of(container) is Role.INIT or not listed.shows(pod, container):
        return before.call.ids if before is not None and pairs and before.call.count == wanted else None
    held = listed.ids(pod, container, call.resource.other)
    if len(held) != wanted or listed.ids(pod, container, call.resource):
        return None
    # What another process answered before is not remembered here, and need not be.
    return held if before is None or (pairs and held == before.call.ids) else None


def ambiguous_message(targets: Sequence[ContainerTarget]) -> str:
    """Say that it cannot be told which container is meant."""
    names = ", ".join(sorted(each.title for each in targets))
    return f"it cannot be told for which of these containers the kubelet asks: {names}; make the pod again"

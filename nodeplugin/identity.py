"""Which container an allocation is for. The kubelet does not say, but it can be known.

A GPU container asks for two resources, one call for each, one after the other. While the second is being asked for, the
kubelet lists the container with the ids of the first: so the first call is answered with nothing, and the second one is
recognised. Plain init containers are never listed; for them, and for containers that ask for one resource only, the
counts have to tell, among the pods of this node that still wait. Where several would fit and it makes a difference
which, the answer is a refusal, never a guess.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from nodeplugin.kubelet import Holding
from nodeplugin.offering import Resource
from nodeplugin.pods import BoundPod, Known
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


class Target(Struct, frozen=True):
    """A container of a pod, and the ids it already holds of the other resource."""

    pod: BoundPod
    container: str
    other_ids: frozenset[str] = frozenset()

    @property
    def title(self) -> str:
        """Name it for people."""
        return f"{self.pod.title} container {self.container}"


class Ambiguous(Exception):  # noqa: N818 - not a fault of the program
    """Several containers could be meant, and it makes a difference; the message names them."""


def halves(listed: Iterable[Holding], resource: Resource, names: Names, known: Known) -> list[Target]:
    """Find the containers that hold the other resource, lack this one, and ask for both in just these counts."""
    mine, others = resource.name_in(names), resource.other.name_in(names)
    named = {(pod.metadata.namespace, pod.metadata.name): pod for pod in known.values() if not pod.has_ended}
    found = []
    for held in listed:
        ids = held.ids.get(others)
        pod = named.get((held.namespace, held.pod))
        if not ids or held.ids.get(mine) or pod is None:
            continue
        counts = pod.counts.get(held.container, {})
        if counts.get(resource.other) == len(ids) and resource in counts:
            found.append(Target(pod, held.container, ids))
    return found


def unknown_halves(listed: Iterable[Holding], resource: Resource, names: Names, known: Known) -> bool:
    """Tell whether a container is half allocated whose pod is not known here yet."""
    mine, others = resource.name_in(names), resource.other.name_in(names)
    named = {(pod.metadata.namespace, pod.metadata.name) for pod in known.values()}
    return any(
        held.ids.get(others) and not held.ids.get(mine) and (held.namespace, held.pod) not in named for held in listed
    )


def second_call(found: Sequence[Target], resource: Resource, count: int, before: Call | None) -> Target | None:
    """Say whose second call this is; None if it is a first one.

    Containers whose second call failed may be listed for a while: the ids of the call before tell them apart.
    """
    fitting = [each for each in found if each.pod.counts[each.container].get(resource) == count]
    if len(fitting) > 1 and before is not None and before.resource is resource.other:
        fitting = [each for each in fitting if each.other_ids == before.ids] or fitting
    if len(fitting) > 1:
        raise Ambiguous(several(fitting))
    return fitting[0] if fitting else None


def by_counts(
    known: Known, call: Call, before: Call | None, allocated: Mapping[str, Iterable[str]], *, unlisted: bool = False
) -> list[Target]:
    """Find the containers that only counts can tell: plain init containers, and those that ask for one resource.

    `before` is the call just before this one, if it was answered with nothing. `allocated` names the containers of each
    pod that have theirs. `unlisted` says that the kubelet lists nobody now, so that all containers are meant.
    """
    pair = {call.resource: call.count}
    if before is not None and before.resource is call.resource.other:
        pair[before.resource] = before.count
    waiting: list[Target] = []
    again: list[Target] = []
    for pod in sorted(known.values(), key=lambda each: (each.created, each.title)):
        if pod.has_ended:
            continue
        done = set(allocated.get(pod.uid, ()))
        for name, counts in pod.counts.items():
            is_single = counts == {call.resource: call.count}
            if is_single or (counts == pair and (unlisted or pod.role_of(name) is Role.INIT)):
                target = Target(pod, name, before.ids if before is not None and not is_single else frozenset())
                (again if name in done else waiting).append(target)
    # A kubelet that lost its memory asks again for what was given before.
    return waiting or again


def first_calls(known: Known, call: Call, allocated: Mapping[str, Iterable[str]]) -> list[Target]:
    """Find the containers whose first of two calls this could be."""
    return [
        Target(pod, name)
        for pod in known.values()
        if not pod.has_ended
        for name, counts in pod.counts.items()
        if len(counts) > 1 and counts.get(call.resource) == call.count and name not in allocated.get(pod.uid, ())
    ]


def the_one(targets: Sequence[Target]) -> Target:
    """Choose among containers that counts cannot tell apart: any, if it makes no difference."""
    first, *others = targets
    for other in others:
        if not alike(first, other):
            raise Ambiguous(several(targets))
    return first


def alike(one: Target, other: Target) -> bool:
    """Tell whether it makes no difference which of two containers gets an answer: same request, same placement."""
    return (
        one.container == other.container
        and one.pod.request == other.pod.request
        and one.pod.placed == other.pod.placed
        and one.pod.wishes == other.pod.wishes
    )


def several(targets: Sequence[Target]) -> str:
    """Say that it cannot be told which container is meant."""
    names = ", ".join(sorted(each.title for each in targets))
    return (
        f"it cannot be told which of these containers is being started, and they were given different GPUs: {names}; "
        "start them one after another, or make a GPU init container restartable (restartPolicy: Always)"
    )

"""For whom the kubelet asks: whoever was taken up and still waits, by what is listed, and never by a guess."""

from collections.abc import Collection, Iterable, Mapping

import pytest

from nodeplugin.attribution import Call, ContainerTarget, FirstCall, KubeletListing, ambiguous_message, attribute_call
from nodeplugin.device_ids import Resource
from nodeplugin.kubelet import ListedContainer
from nodeplugin.pods import BoundPod, by_uid
from nodeplugin.proto import podresources_v1_pb2 as resources
from tests.nodeplugin.builders import app, asked, bound, init
from vcuda.names import Names
from vcuda.request import Role

NAMES = Names()
CORE, MEMORY = Resource.CORE, Resource.MEMORY
ONE, TWO = bound("one"), bound("two")


def ids(resource: Resource, count: int, start: int = 0) -> frozenset[str]:
    return frozenset(f"{resource}-{number}" for number in range(start, start + count))


def call(resource: Resource, count: int, start: int = 0) -> Call:
    return Call(resource, ids(resource, count, start))


def first(made: Call, *pods: BoundPod) -> FirstCall:
    """A call that was answered with nothing."""
    return FirstCall(made, frozenset(pod.uid for pod in pods))


def holding(
    pod: BoundPod, container: str = "a", core: Iterable[str] = (), memory: Iterable[str] = ()
) -> ListedContainer:
    """A container as the kubelet lists it, with the ids that it has so far."""
    given = [(NAMES.core, core), (NAMES.memory, memory)]
    devices = [resources.ContainerDevices(resource_name=name, device_ids=held) for name, held in given]
    return ListedContainer(pod.metadata.namespace, pod.metadata.name, container, devices)


def half(pod: BoundPod, count: int = 50, start: int = 0) -> ListedContainer:
    """A container that has its cores and waits for its memory."""
    return holding(pod, core=ids(CORE, count, start))


def whose(
    made: Call,
    holdings: Iterable[ListedContainer],
    *pods: BoundPod,
    before: FirstCall | None = None,
    allocated: Mapping[str, Collection[str]] | None = None,
    written: Mapping[str, Collection[str]] | None = None,
) -> tuple[list[ContainerTarget], list[str]]:
    """Those who would get everything now, and the names of those whose first call it would be."""
    verdict = attribute_call(
        made, before, KubeletListing(NAMES, holdings), by_uid(pods), allocated or {}, written=(written or {}).get
    )
    return list(verdict.lasts), [each.pod.metadata.name for each in verdict.firsts]


def test_a_first_call_is_nobodys_last() -> None:
    """The pod that was taken up has nothing yet."""
    assert whose(call(CORE, 50), [holding(ONE)], ONE, TWO) == ([], ["one"])


@pytest.mark.parametrize("before", [None, first(call(CORE, 50), ONE)], ids=["by another process", "by this one"])
def test_a_second_call_is_known_by_what_is_listed(before: FirstCall | None) -> None:
    """Whoever answered the first."""
    found, _ = whose(call(MEMORY, 4), [half(ONE)], ONE, TWO, before=before)
    assert found == [ContainerTarget(ONE, "a", ids(CORE, 50))]


def test_pods_that_were_not_taken_up_are_not_meant() -> None:
    """They are bound, and it is not their turn."""
    assert whose(call(CORE, 50), [], ONE, TWO) == ([], [])


def test_pods_that_have_ended_are_not_meant() -> None:
    """They may be listed for a while."""
    ended = bound("ended", has_ended=True)
    assert whose(call(CORE, 50), [holding(ended)], ended) == ([], [])


@pytest.mark.parametrize("count", [49, 51])
def test_other_counts_are_others(count: int) -> None:
    """The kubelet asks for just what the container asks for."""
    assert whose(call(CORE, count), [holding(ONE)], ONE) == ([], [])


def test_it_is_the_turn_of_the_first_container_that_has_nothing() -> None:
    """Containers are allocated in their order."""
    pod = bound("two", app("a", 50, 4), app("b", 50, 4))
    listing = [holding(pod, "a", ids(CORE, 50), ids(MEMORY, 4)), holding(pod, "b", ids(CORE, 50, 50))]
    found, firsts = whose(call(MEMORY, 4, 4), listing, pod, allocated={pod.uid: {"a"}})
    assert (found, firsts) == ([ContainerTarget(pod, "b", ids(CORE, 50, 50))], [])


def test_ids_of_a_call_that_was_not_ours_are_not_completed() -> None:
    """One whose second call failed may be listed for a while; the call before was another's."""
    before = first(call(CORE, 50, 50), TWO)
    found, firsts = whose(call(MEMORY, 4), [half(ONE), half(TWO, start=50)], ONE, TWO, before=before)
    assert found == [ContainerTarget(TWO, "a", ids(CORE, 50, 50))]
    assert firsts == ["one"], "which makes it unclear, and the API server is asked"


def test_a_plain_init_container_is_known_by_the_call_before() -> None:
    """It is listed nowhere, but its pod is."""
    pod = bound("staged", init("i", 20, 2), app("a", 50, 4))
    listing = [holding(pod)]
    assert whose(call(CORE, 20), listing, pod) == ([], ["staged"])
    found, _ = whose(call(MEMORY, 2), listing, pod, before=first(call(CORE, 20), pod))
    assert found == [ContainerTarget(pod, "i", ids(CORE, 20))]


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(None, id="there was none"),
        pytest.param(first(call(CORE, 20), ONE), id="it was another pod's"),
        pytest.param(first(call(CORE, 21), bound("staged")), id="it asked for another count"),
        pytest.param(first(call(MEMORY, 2), bound("staged")), id="it was for the same resource"),
    ],
)
def test_another_call_before_does_not_tell_an_init_container(before: FirstCall | None) -> None:
    """Then this is its first."""
    pod = bound("staged", init("i", 20, 2), app("a", 50, 4))
    assert whose(call(MEMORY, 2), [holding(pod)], pod, before=before) == ([], ["staged"])


@pytest.mark.parametrize("role", [Role.APP, Role.INIT])
def test_a_container_of_one_resource_gets_everything_at_once(role: Role) -> None:
    """There is no second call."""
    pod = bound("slipped", asked("a", role, 100, 0))
    assert whose(call(CORE, 100), [holding(pod)], pod) == ([ContainerTarget(pod, "a")], [])


def test_one_that_has_this_resource_already_does_not_wait_for_it() -> None:
    """The kubelet asks once for each."""
    assert whose(call(CORE, 50), [half(ONE)], ONE) == ([], [])


def test_a_kubelet_that_lost_its_memory_asks_again() -> None:
    """For containers that have theirs in the book; only if nobody else is meant."""
    has = {ONE.uid: {"a"}}
    assert whose(call(CORE, 50), [holding(ONE)], ONE, allocated=has) == ([], ["one"])


def test_a_pod_of_which_nothing_but_its_name_is_known() -> None:
    """A kubelet that cannot be asked about one pod: the call before tells, as for init containers."""
    listed = KubeletListing(NAMES, bare=[(ONE.metadata.namespace, ONE.metadata.name)])
    verdict = attribute_call(call(MEMORY, 4), first(call(CORE, 50), ONE), listed, by_uid([ONE, TWO]), {})
    assert verdict.lasts == (ContainerTarget(ONE, "a", ids(CORE, 50)),)


def test_several_are_named() -> None:
    """Whoever reads it finds the pods."""
    assert "team/one container a, team/two container a" in ambiguous_message(
        [ContainerTarget(TWO, "a"), ContainerTarget(ONE, "a")]
    )

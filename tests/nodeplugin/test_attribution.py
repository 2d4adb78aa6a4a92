"""Which container a call of the kubelet is for: one that is listed and still waits, and never a guess."""

from collections.abc import Collection, Iterable, Mapping

import pytest

from nodeplugin.attribution import Call, ContainerTarget, FirstCall, KubeletListing, ambiguous_message, attribute_call
from nodeplugin.device_ids import Resource
from nodeplugin.kubelet import ListedContainer
from nodeplugin.pods import BoundPod, index_by_uid
from nodeplugin.proto import podresources_v1_pb2 as resources
from tests.nodeplugin.builders import app, bound, init, requesting
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
    """A call that got an empty response, and may have been for these pods."""
    return FirstCall(made, frozenset(pod.uid for pod in pods))


def listed(
    pod: BoundPod, container: str = "a", core: Iterable[str] = (), memory: Iterable[str] = ()
) -> ListedContainer:
    """A container in PodResources, with the IDs it has so far."""
    given = [(NAMES.core, core), (NAMES.memory, memory)]
    devices = [resources.ContainerDevices(resource_name=name, device_ids=each) for name, each in given]
    return ListedContainer(pod.metadata.namespace, pod.metadata.name, container, devices)


def with_cores(pod: BoundPod, count: int = 50, start: int = 0) -> ListedContainer:
    """A container that has its cores and waits for its memory."""
    return listed(pod, core=ids(CORE, count, start))


def attribute(
    made: Call,
    listing: Iterable[ListedContainer],
    *pods: BoundPod,
    previous: FirstCall | None = None,
    allocated: Mapping[str, Collection[str]] | None = None,
    checkpointed: Mapping[str, Collection[str]] | None = None,
) -> tuple[list[ContainerTarget], list[str]]:
    """The containers for which it is the last call, and the names of pods for which it is a first call."""
    attribution = attribute_call(
        made,
        previous,
        KubeletListing(NAMES, listing),
        index_by_uid(pods),
        allocated or {},
        checkpointed=(checkpointed or {}).get,
    )
    return list(attribution.last_call_of), [each.pod.metadata.name for each in attribution.first_call_of]


def test_the_call_for_a_listed_pod_without_devices_is_its_first() -> None:
    assert attribute(call(CORE, 50), [listed(ONE)], ONE, TWO) == ([], ["one"])


@pytest.mark.parametrize("previous", [None, first(call(CORE, 50), ONE)], ids=["by another process", "by this one"])
def test_a_second_call_is_identified_by_the_listing(previous: FirstCall | None) -> None:
    """Whichever process answered the first one."""
    targets, _ = attribute(call(MEMORY, 4), [with_cores(ONE)], ONE, TWO, previous=previous)
    assert targets == [ContainerTarget(ONE, "a", ids(CORE, 50))]


def test_pods_that_are_not_listed_do_not_match() -> None:
    """They are bound, but their admission has not started."""
    assert attribute(call(CORE, 50), [], ONE, TWO) == ([], [])


def test_pods_that_have_ended_do_not_match() -> None:
    """They stay listed for a while."""
    ended = bound("ended", has_ended=True)
    assert attribute(call(CORE, 50), [listed(ended)], ended) == ([], [])


@pytest.mark.parametrize("count", [49, 51])
def test_a_container_with_another_count_does_not_match(count: int) -> None:
    """The kubelet requests exactly the container's limit."""
    assert attribute(call(CORE, count), [listed(ONE)], ONE) == ([], [])


def test_a_call_is_for_the_first_container_without_an_allocation() -> None:
    """Containers are allocated in order."""
    pod = bound("two", app("a", 50, 4), app("b", 50, 4))
    listing = [listed(pod, "a", ids(CORE, 50), ids(MEMORY, 4)), listed(pod, "b", ids(CORE, 50, 50))]
    result = attribute(call(MEMORY, 4, 4), listing, pod, allocated={pod.uid: {"a"}})
    assert result == ([ContainerTarget(pod, "b", ids(CORE, 50, 50))], [])


def test_ids_from_another_call_than_the_previous_one_make_no_pair() -> None:
    """A pod whose second call failed stays listed for a while; the previous call was another pod's."""
    previous = first(call(CORE, 50, 50), TWO)
    listing = [with_cores(ONE), with_cores(TWO, start=50)]
    targets, first_names = attribute(call(MEMORY, 4), listing, ONE, TWO, previous=previous)
    assert targets == [ContainerTarget(TWO, "a", ids(CORE, 50, 50))]
    assert first_names == ["one"], "which is ambiguous, so the API server is asked"


def test_a_plain_init_container_is_identified_by_the_previous_call() -> None:
    """It is never listed, but its pod is."""
    pod = bound("staged", init("i", 20, 2), app("a", 50, 4))
    listing = [listed(pod)]
    assert attribute(call(CORE, 20), listing, pod) == ([], ["staged"])
    targets, _ = attribute(call(MEMORY, 2), listing, pod, previous=first(call(CORE, 20), pod))
    assert targets == [ContainerTarget(pod, "i", ids(CORE, 20))]


@pytest.mark.parametrize(
    "previous",
    [
        pytest.param(None, id="there was none"),
        pytest.param(first(call(CORE, 20), ONE), id="it was another pod's"),
        pytest.param(first(call(CORE, 21), bound("staged")), id="it had another count"),
        pytest.param(first(call(MEMORY, 2), bound("staged")), id="it was for the same resource"),
    ],
)
def test_an_init_containers_call_is_a_first_one_unless_the_previous_call_fits(previous: FirstCall | None) -> None:
    pod = bound("staged", init("i", 20, 2), app("a", 50, 4))
    assert attribute(call(MEMORY, 2), [listed(pod)], pod, previous=previous) == ([], ["staged"])


@pytest.mark.parametrize("role", [Role.APP, Role.INIT])
def test_a_container_with_one_resource_gets_everything_with_its_only_call(role: Role) -> None:
    pod = bound("bypassed", requesting("a", role, 100, 0))
    assert attribute(call(CORE, 100), [listed(pod)], pod) == ([ContainerTarget(pod, "a")], [])


def test_a_container_that_has_a_resource_does_not_match_another_call_for_it() -> None:
    assert attribute(call(CORE, 50), [with_cores(ONE)], ONE) == ([], [])


def test_an_allocated_container_that_the_kubelet_lists_without_devices_matches_again() -> None:
    """The kubelet lost its checkpoint."""
    allocated = {ONE.uid: {"a"}}
    assert attribute(call(CORE, 50), [listed(ONE)], ONE, allocated=allocated) == ([], ["one"])


@pytest.mark.parametrize(
    ("checkpointed", "first_names"),
    [
        pytest.param({"staged": ["i"]}, [], id="it is in the kubelet's checkpoint"),
        pytest.param({"staged": []}, ["staged"], id="it is not in the kubelet's checkpoint"),
        pytest.param({}, [], id="the kubelet's checkpoint cannot be read"),
    ],
)
def test_an_allocated_init_container_matches_again_if_the_kubelet_lost_it(
    checkpointed: Mapping[str, Collection[str]], first_names: list[str]
) -> None:
    pod = bound("staged", init("i", 20, 2), app("a", 50, 4))
    by_uid = {f"uid-{name}": containers for name, containers in checkpointed.items()}
    result = attribute(call(CORE, 20), [listed(pod)], pod, allocated={pod.uid: {"i"}}, checkpointed=by_uid)
    assert result == ([], first_names)


def test_a_pod_of_which_only_the_name_is_listed_is_identified_by_the_previous_call() -> None:
    """As with a kubelet that cannot be asked for one pod."""
    listing = KubeletListing(NAMES, pod_keys=[(ONE.metadata.namespace, ONE.metadata.name)])
    attribution = attribute_call(call(MEMORY, 4), first(call(CORE, 50), ONE), listing, index_by_uid([ONE, TWO]), {})
    assert attribution.last_call_of == (ContainerTarget(ONE, "a", ids(CORE, 50)),)


def test_an_ambiguous_call_is_refused_with_all_containers_that_match() -> None:
    assert ambiguous_message([ContainerTarget(TWO, "a"), ContainerTarget(ONE, "a")]) == (
        "cannot tell which container the kubelet allocates for, several match: pod team/one, container a; "
        "pod team/two, container a; delete the pod; its controller creates it again"
    )

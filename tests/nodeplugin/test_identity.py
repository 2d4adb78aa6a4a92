"""For whom the kubelet asks: known by what it lists, else by counts, and never guessed."""

from collections.abc import Iterable

import pytest

from nodeplugin.identity import (
    Ambiguous,
    Call,
    Target,
    alike,
    by_counts,
    first_calls,
    halves,
    second_call,
    the_one,
    unknown_halves,
)
from nodeplugin.kubelet import Holding
from nodeplugin.offering import Resource
from nodeplugin.pods import BoundPod, by_uid
from tests.nodeplugin.builders import app, asked, bound, init
from vcuda.names import Names
from vcuda.placement import Slice
from vcuda.request import Role
from vcuda.wishes import Wishes

NAMES = Names()
CORE, MEMORY = Resource.CORE, Resource.MEMORY
ON_0, ON_1 = {"a": (Slice("GPU-0", 50, 1024),)}, {"a": (Slice("GPU-1", 50, 1024),)}


def ids(resource: Resource, count: int, start: int = 0) -> frozenset[str]:
    return frozenset(f"{resource}-{number}" for number in range(start, start + count))


def call(resource: Resource, count: int, start: int = 0) -> Call:
    return Call(resource, ids(resource, count, start))


def listed(pod: BoundPod, container: str = "a", core: Iterable[str] = (), memory: Iterable[str] = ()) -> Holding:
    """A container as the kubelet lists it, with the ids that it has so far."""
    given = {NAMES.core: frozenset(core), NAMES.memory: frozenset(memory)}
    return Holding(
        pod.metadata.namespace, pod.metadata.name, container, {name: held for name, held in given.items() if held}
    )


def half(pod: BoundPod, count: int = 50, start: int = 0, container: str = "a") -> Holding:
    """A container that has its cores and waits for its memory."""
    return listed(pod, container, core=ids(CORE, count, start))


def recognised(
    holdings: Iterable[Holding], *pods: BoundPod, count: int = 4, before: Call | None = None
) -> Target | None:
    """Whose call for so much memory it is."""
    found = halves(holdings, MEMORY, NAMES, by_uid(pods))
    return second_call(found, MEMORY, count, before)


ONE, TWO = bound("one"), bound("two")


# The second of two calls.


def test_a_container_with_one_resource_is_recognised_by_its_second_call() -> None:
    """Whichever of the two comes first."""
    assert recognised([half(ONE)], ONE, TWO) == Target(ONE, "a", ids(CORE, 50))
    other_way = halves([listed(ONE, memory=ids(MEMORY, 4))], CORE, NAMES, by_uid([ONE]))
    assert second_call(other_way, CORE, 50, None) == Target(ONE, "a", ids(MEMORY, 4))


ENDED = bound("one", has_ended=True)
SINGLE = bound("one", app(memory=0))
NOT_HALF: dict[str, tuple[BoundPod, Holding]] = {
    "it holds nothing": (ONE, listed(ONE)),
    "it holds both": (ONE, listed(ONE, core=ids(CORE, 50), memory=ids(MEMORY, 4))),
    "it holds the same resource": (ONE, listed(ONE, memory=ids(MEMORY, 4))),
    "it holds other counts than it asks for": (ONE, half(ONE, 49)),
    "it asks for one resource only": (SINGLE, half(SINGLE)),
    "its pod has ended": (ENDED, half(ENDED)),
    "its pod is not known": (ONE, half(TWO)),
    "its container is not known": (ONE, half(ONE, container="b")),
}


@pytest.mark.parametrize(("pod", "held"), NOT_HALF.values(), ids=NOT_HALF.keys())
def test_a_call_is_a_first_one_where_no_container_has_half(pod: BoundPod, held: Holding) -> None:
    """It is answered with nothing, and the next one tells."""
    assert recognised([held], pod) is None


def test_a_container_that_asks_for_another_count_is_not_meant() -> None:
    """Though it has its half, as one whose second call was refused."""
    assert recognised([half(ONE)], ONE, count=5) is None


def test_a_pod_of_the_same_name_in_another_namespace_is_another() -> None:
    """Names are told apart by their namespace."""
    assert recognised([Holding("else", "one", "a", half(ONE).ids)], ONE) is None


def test_leftovers_are_told_apart_by_the_ids_of_the_call_before() -> None:
    """A container whose second call failed is listed for a while."""
    both = [half(ONE, start=0), half(TWO, start=50)]
    assert recognised(both, ONE, TWO, before=call(CORE, 50, 50)) == Target(TWO, "a", ids(CORE, 50, 50))
    assert recognised(both, ONE, TWO, before=call(CORE, 50, 0)) == Target(ONE, "a", ids(CORE, 50))


@pytest.mark.parametrize(
    "before",
    [None, call(MEMORY, 4), call(CORE, 50, 200)],
    ids=["no call came before", "the call before was for the same resource", "the call before had other ids"],
)
def test_leftovers_that_nothing_tells_apart_are_refused(before: Call | None) -> None:
    """The message names them and says what helps."""
    with pytest.raises(Ambiguous) as refused:
        recognised([half(ONE), half(TWO, start=50)], ONE, TWO, before=before)
    assert "team/one container a, team/two container a" in str(refused.value)
    assert "one after another" in str(refused.value)


def test_a_leftover_of_another_size_does_not_matter() -> None:
    """Counts tell it from the one that is meant."""
    large = bound("large", app(memory=8))
    assert recognised([half(ONE), half(large, start=50)], ONE, large) == Target(ONE, "a", ids(CORE, 50))


def test_one_that_stands_alone_is_meant_whatever_call_came_before() -> None:
    """The kubelet reuses ids of init containers, so those of the call before may be others."""
    assert recognised([half(ONE)], ONE, before=call(CORE, 50, 200)) == Target(ONE, "a", ids(CORE, 50))


def test_a_half_whose_pod_is_not_known_is_noticed() -> None:
    """The pods have to be asked for anew then; one that has both, or none, is of no concern."""
    assert unknown_halves([half(TWO)], MEMORY, NAMES, by_uid([ONE]))
    assert not unknown_halves([half(ONE)], MEMORY, NAMES, by_uid([ONE]))
    whole = listed(TWO, core=ids(CORE, 50), memory=ids(MEMORY, 4))
    assert not unknown_halves([listed(TWO), whole, half(TWO)], CORE, NAMES, by_uid([ONE]))


# Init containers, and those that ask for one resource.

WITH_INIT = bound("init", init("i", 30, 2), app())


def counted(
    *pods: BoundPod, now: Call, before: Call | None = None, allocated: dict[str, list[str]] | None = None
) -> list[tuple[str, str]]:
    """Which containers could be meant, by their counts."""
    found = by_counts(by_uid(pods), now, before, allocated or {})
    return [(each.pod.metadata.name, each.container) for each in found]


def test_an_init_container_is_told_by_its_two_counts() -> None:
    """In whichever order they come; it holds the ids of the call before."""
    assert counted(WITH_INIT, now=call(MEMORY, 2), before=call(CORE, 30)) == [("init", "i")]
    assert counted(WITH_INIT, now=call(CORE, 30), before=call(MEMORY, 2)) == [("init", "i")]
    (target,) = by_counts(by_uid([WITH_INIT]), call(MEMORY, 2), call(CORE, 30), {})
    assert target.other_ids == ids(CORE, 30)


NOT_COUNTED = {
    "its first call": (WITH_INIT, call(CORE, 30), None),
    "two calls for the same resource": (WITH_INIT, call(CORE, 30), call(CORE, 30)),
    "one count is another": (WITH_INIT, call(MEMORY, 3), call(CORE, 30)),
    "a container that is no init container": (ONE, call(MEMORY, 4), call(CORE, 50)),
    "a sidecar, which is listed": (bound("s", asked("s", Role.SIDECAR, 30, 2)), call(MEMORY, 2), call(CORE, 30)),
    "a pod that has ended": (bound("e", init("i", 30, 2), has_ended=True), call(MEMORY, 2), call(CORE, 30)),
}


@pytest.mark.parametrize(("pod", "now", "before"), NOT_COUNTED.values(), ids=NOT_COUNTED.keys())
def test_counts_tell_nobody(pod: BoundPod, now: Call, before: Call | None) -> None:
    """Where they do not fit, and where listing tells."""
    assert counted(pod, now=now, before=before) == []


@pytest.mark.parametrize("role", [Role.APP, Role.INIT, Role.SIDECAR])
def test_a_container_with_one_resource_is_told_by_its_one_count(role: Role) -> None:
    """It has no second call; what came before of the same resource is another's."""
    single = bound("single", asked("m", role, 0, 3))
    assert counted(single, now=call(MEMORY, 3)) == [("single", "m")]
    assert counted(single, now=call(MEMORY, 3), before=call(MEMORY, 9)) == [("single", "m")]
    assert counted(single, now=call(CORE, 3)) == []


def test_those_that_wait_come_before_those_that_have_theirs() -> None:
    """Oldest first."""
    pods = [bound("c", init(), created="3"), bound("a", init(), created="2"), bound("b", init(), created="1")]
    now, before = call(MEMORY, 4), call(CORE, 50)
    assert counted(*pods, now=now, before=before) == [("b", "i"), ("a", "i"), ("c", "i")]
    assert counted(*pods, now=now, before=before, allocated={"uid-b": ["i"]}) == [("a", "i"), ("c", "i")]


def test_a_kubelet_that_asks_again_gets_the_same_answer() -> None:
    """It may have lost its memory: where nobody waits, those are meant that have theirs already."""
    assert counted(WITH_INIT, now=call(MEMORY, 2), before=call(CORE, 30), allocated={"uid-init": ["i", "a"]}) == [
        ("init", "i")
    ]


def test_the_first_of_two_calls_is_expected_of_those_that_wait() -> None:
    """Of containers with both resources that have nothing yet, in just this count."""
    single, ended = bound("single", app(memory=0)), bound("ended", has_ended=True)
    other = bound("other", app(core=51))
    known = by_uid([ONE, TWO, single, ended, other])
    found = first_calls(known, call(CORE, 50), {"uid-two": ["a"]})
    assert [each.title for each in found] == ["team/one container a"]


# Which of several.


def targets(*pods: BoundPod, container: str = "a") -> list[Target]:
    return [Target(pod, container) for pod in pods]


def test_of_containers_that_are_alike_the_first_is_chosen() -> None:
    """It makes no difference which of them is answered."""
    pods = [bound("one", placed=ON_0), bound("two", placed=ON_0)]
    assert the_one(targets(*pods)).pod.title == "team/one"
    assert the_one(targets(ONE, TWO)).pod.title == "team/one"


DIFFERENT: dict[str, tuple[Target, Target]] = {
    "other cards": (Target(bound("one", placed=ON_0), "a"), Target(bound("two", placed=ON_1), "a")),
    "one has no placement": (Target(bound("one", placed=ON_0), "a"), Target(TWO, "a")),
    "another container of the same pod": (Target(WITH_INIT, "i"), Target(WITH_INIT, "a")),
    "another request": (Target(ONE, "a"), Target(bound("two", app(), app("b")), "a")),
    "other models": (Target(ONE, "a"), Target(bound("two", wishes=Wishes(models=("T4",))), "a")),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_where_it_makes_a_difference_the_answer_is_a_refusal(one: Target, other: Target) -> None:
    """Whichever stands first, and behind however many that are alike."""
    assert not alike(one, other)
    for several in ([one, other], [other, one], [one, one, other]):
        with pytest.raises(Ambiguous) as refused:
            the_one(several)
        assert one.title in str(refused.value)
        assert other.title in str(refused.value)

"""Room for pods of higher priority: whom kube-scheduler is told to evict, and whom the extender evicts itself."""

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.objects import DISRUPTION_BUDGETS, NODES, PODS, Pod
from tests.scheduler.world import TEAM, World, container
from tests.waiting import eventually

HIGH: dict[str, Any] = {"priority": 100}
# A grace period that is waited for.
SOON_S = 30


@pytest.fixture
def evicting() -> Iterator[World]:
    """A scheduler that evicts pods itself."""
    world = World(evicts=True).start()
    yield world
    world.stop()


def preempt(world: World, pod: Pod, **victims: list[Pod]) -> dict[str, Any]:
    """Ask as kube-scheduler does, with its own victims on each node; returns the UIDs by node."""
    asked = {node: {"Pods": [{"UID": each.metadata.uid} for each in pods]} for node, pods in victims.items()}
    answer = world.call("preempt", {"Pod": world.raw(pod), "NodeNameToMetaVictims": asked})
    return {node: {each["UID"] for each in of["Pods"]} for node, of in answer["NodeNameToMetaVictims"].items()}


def run(world: World, name: str, cores: int = 50, **spec: Any) -> Pod:
    pod = world.add_pod(name, container(cores=cores, memory=8 if cores < 100 else cores // 100), **spec)
    assert world.schedule(pod)
    return pod


def uids(*pods: Pod) -> set[str]:
    return {pod.metadata.uid for pod in pods}


def fill(world: World, gpus: int, cores: int = 50) -> list[Pod]:
    """Fill a node with pods, in the order of its GPUs."""
    world.add_node("n", gpus)
    pods = [run(world, f"low-{number}", cores) for number in range(100 // cores * gpus)]
    return sorted(pods, key=lambda pod: world.placed(pod)["c0"][0].uuid)


def test_victims_are_replaced_by_pods_of_one_gpu(world: World) -> None:
    first, second, third, fourth = fill(world, 2)
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    assert not world.filter(wanted)["NodeNames"]
    # By counts, one pod of each GPU.
    found = preempt(world, wanted, n=[first, third])
    assert found in ({"n": uids(first, second)}, {"n": uids(third, fourth)})


def test_an_empty_list_of_victims_is_filled(world: World) -> None:
    """From the release after 1.37 on, kube-scheduler asks where it finds none itself, too."""
    world.add_node("n", 2)
    low = [run(world, f"low-{number}", 60) for number in range(2)]
    wanted = world.add_pod("high", container(cores=80), **HIGH)
    found = preempt(world, wanted, n=[])
    assert found["n"] < uids(*low)
    assert len(found["n"]) == 1


def test_no_node_is_answered_where_evictions_do_not_help(world: World) -> None:
    low = fill(world, 1)
    same = world.add_pod("same", container(cores=100, memory=1))
    assert preempt(world, same, n=low) == {}
    larger = world.add_pod("larger", container(cores=200, memory=2), **HIGH)
    assert preempt(world, larger, n=low) == {}


def test_the_preemptor_gets_the_gpus_of_its_victims(world: World) -> None:
    """Not a newcomer, which kube-scheduler may filter as soon as the victims have ended."""
    low = fill(world, 1)
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    assert preempt(world, wanted, n=low) == {"n": uids(*low)}
    for pod in low:
        world.end(pod)
    newcomer = world.add_pod("newcomer", container(cores=10))
    assert not world.filter(newcomer)["NodeNames"]
    assert world.schedule(wanted) == "n"


def test_a_nomination_leaves_the_rest_of_a_gpu(world: World) -> None:
    first, second = fill(world, 1)
    wanted = world.add_pod("high", container(cores=40), **HIGH)
    found = preempt(world, wanted, n=[first])
    (victim,) = [pod for pod in (first, second) if pod.metadata.uid in found["n"]]
    world.end(victim)
    assert world.schedule(world.add_pod("small", container(cores=10))) == "n"
    assert not world.filter(world.add_pod("large", container(cores=11)))["NodeNames"]
    assert world.schedule(wanted) == "n"


@pytest.mark.parametrize("at", [0, 1])
def test_a_second_preemptor_gets_other_victims(world: World, at: int) -> None:
    """Whichever pod kube-scheduler names: it may be the one that is evicted for the first."""
    low = fill(world, 2, cores=100)
    first, second = (world.add_pod(name, container(cores=100, memory=1), **HIGH) for name in ("first", "second"))
    found = [preempt(world, pod, n=[low[at]])["n"] for pod in (first, second)]
    assert found[0] | found[1] == uids(*low)
    assert not found[0] & found[1]
    third = world.add_pod("third", container(cores=100, memory=1), **HIGH)
    assert preempt(world, third, n=low) == {}


def test_a_pod_of_higher_priority_takes_what_another_is_nominated_for(world: World) -> None:
    low = fill(world, 1, cores=100)
    middle = world.add_pod("middle", container(cores=100, memory=1), priority=50)
    assert preempt(world, middle, n=low)
    world.end(low[0])
    top = world.add_pod("top", container(cores=100, memory=1), **HIGH)
    assert world.schedule(top) == "n"
    assert world.service.state.nomination(middle.metadata.uid) is None
    assert not world.filter(middle)["NodeNames"]


def test_a_nomination_ends_with_its_pod(world: World) -> None:
    low = fill(world, 1, cores=100)
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    assert preempt(world, wanted, n=low)
    world.end(low[0])
    world.cluster.delete(PODS, "high", TEAM, grace_s=0)
    eventually(lambda: not world.service.state.nominations(), "the end of the nomination")
    assert world.schedule(world.add_pod("newcomer", container(cores=100, memory=1))) == "n"


def test_a_nomination_survives_a_binding_that_failed(world: World) -> None:
    low = fill(world, 1, cores=100)
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    assert preempt(world, wanted, n=low)
    world.end(low[0])
    assert world.filter(wanted)["NodeNames"] == ["n"]
    world.service.state.release_claim(wanted.metadata.uid)
    assert not world.filter(world.add_pod("newcomer", container(cores=10)))["NodeNames"]


def test_a_nomination_is_restored_after_a_restart(world: World) -> None:
    """kube-scheduler stores the node; the GPUs are those of the pods that are ending there."""
    low = fill(world, 2, cores=100)
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    world.cluster.delete(PODS, low[0].metadata.name, TEAM, grace_s=SOON_S)
    status = {"status": {"nominatedNodeName": "n"}}
    world.cluster.patch(PODS, "high", TEAM, status, subresource="status")
    world.restart()
    eventually(lambda: world.service.state.nomination(wanted.metadata.uid), "the nomination")
    nomination = world.service.state.nomination(wanted.metadata.uid)
    assert nomination is not None
    assert nomination.victims == uids(low[0])


def test_pods_are_evicted_where_kube_scheduler_finds_none(evicting: World) -> None:
    """Two GPUs with 40 cores free each: by counts, 80 fit."""
    evicting.add_node("n", 2)
    low = [run(evicting, f"low-{number}", 60, terminationGracePeriodSeconds=0) for number in range(2)]
    wanted = evicting.add_pod("high", container(cores=80), **HIGH)
    assert not evicting.filter(wanted)["NodeNames"]
    names = [pod.metadata.name for pod in low]
    eventually(lambda: len(left(evicting, names)) == 1, "the eviction of one pod")
    assert evicting.read(wanted).status.nominated_node_name == "n"
    eventually(lambda: evicting.schedule(wanted) == "n", "the binding")
    assert len(left(evicting, names)) == 1


def left(world: World, names: list[str]) -> list[str]:
    listed = {pod.metadata.name for pod in world.cluster.list(PODS, TEAM).items}
    return [name for name in names if name in listed]


def test_without_permission_the_pod_is_told_that_an_eviction_would_help(world: World) -> None:
    world.add_node("n", 2)
    low = [run(world, f"low-{number}", 60) for number in range(2)]
    wanted = world.add_pod("high", container(cores=80), **HIGH)
    assert not world.filter(wanted)["NodeNames"]
    eventually(lambda: any("PreemptionPossible" in each for each in world.events(wanted)), "the event")
    text = next(each for each in world.events(wanted) if "PreemptionPossible" in each)
    assert "evicting 1 pod of lower priority from node n would make room" in text
    assert len(left(world, [pod.metadata.name for pod in low])) == 2


@pytest.mark.parametrize("spec", [{"priority": 0}, {"priority": 100, "preemptionPolicy": "Never"}])
def test_nothing_is_evicted_for_pods_that_may_not_preempt(evicting: World, spec: dict[str, Any]) -> None:
    evicting.add_node("n", 2)
    low = [run(evicting, f"low-{number}", 60) for number in range(2)]
    wanted = evicting.add_pod("wanted", container(cores=80), **spec)
    assert not evicting.filter(wanted)["NodeNames"]
    evicting.service.evictor.run_once(0)
    assert len(left(evicting, [pod.metadata.name for pod in low])) == 2
    assert not evicting.service.state.nominations()


def test_nothing_is_evicted_against_a_budget(evicting: World) -> None:
    evicting.add_node("n", 2)
    budget = {
        "metadata": {"name": "b", "namespace": TEAM},
        "spec": {"selector": {}},
        "status": {"disruptionsAllowed": 0},
    }
    evicting.cluster.create(DISRUPTION_BUDGETS, budget)
    eventually(evicting.service.budgets.informer.all, "the budget")
    low = [run(evicting, f"low-{number}", 60) for number in range(2)]
    wanted = evicting.add_pod("wanted", container(cores=80), **HIGH)
    assert not evicting.filter(wanted)["NodeNames"]
    evicting.service.evictor.run_once(0)
    assert len(left(evicting, [pod.metadata.name for pod in low])) == 2
    assert not evicting.service.state.nominations()


def test_a_nomination_whose_victims_are_never_evicted_ends(world: World) -> None:
    low = fill(world, 1, cores=100)
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    assert preempt(world, wanted, n=low)
    nomination = world.service.state.nomination(wanted.metadata.uid)
    assert nomination is not None
    nomination.expires_at = 0.0
    eventually(lambda: not world.service.state.nominations(), "the end of the nomination")
    assert world.service.state.available_gpus("n", "")[0].free_cores == 0


def test_nothing_is_evicted_if_room_has_appeared_meanwhile(evicting: World) -> None:
    """A pod ended on another node between the refusal and the eviction."""
    low = []
    for name in ("a", "b"):
        evicting.add_node(name, 1)
        low.append(run(evicting, f"low-{name}", 60))
    wanted = evicting.add_pod("wanted", container(cores=80), **HIGH)
    assert not evicting.filter(wanted)["NodeNames"]
    evicting.end(low[0])
    evicting.service.evictor.run_once(0)
    assert not evicting.service.state.nominations()
    assert left(evicting, ["low-b"])


def test_room_of_pods_that_end_already_is_awaited(evicting: World) -> None:
    low = []
    for name in ("a", "b"):
        evicting.add_node(name, 1)
        low.append(run(evicting, f"low-{name}", 60))
    evicting.cluster.delete(PODS, "low-a", TEAM, grace_s=SOON_S)
    eventually(lambda: is_deleting(evicting, low[0]), "the deletion")
    wanted = evicting.add_pod("wanted", container(cores=80), **HIGH)
    assert not evicting.filter(wanted)["NodeNames"]
    evicting.service.evictor.run_once(0)
    assert left(evicting, ["low-b"])
    nomination = evicting.service.state.nomination(wanted.metadata.uid)
    assert nomination is not None
    assert nomination.node == "a"
    # Asked by a newer kube-scheduler meanwhile: no second set of victims.
    assert preempt(evicting, wanted, a=[], b=[]) == {}


def is_deleting(world: World, pod: Pod) -> bool:
    known = world.service.state.pod(pod.metadata.uid)
    return known is not None and known.is_deleting


def test_a_nomination_that_counts_on_ending_pods_is_kept(world: World) -> None:
    """One half of the GPU ends by itself, the other is evicted; a newcomer gets neither."""
    first, second = fill(world, 1)
    world.cluster.delete(PODS, first.metadata.name, TEAM, grace_s=SOON_S)
    eventually(lambda: is_deleting(world, first), "the deletion")
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    assert preempt(world, wanted, n=[second]) == {"n": uids(second)}
    assert not world.filter(wanted)["NodeNames"]
    world.call("filter?dryRun=true", {"Pod": world.raw(wanted), "NodeNames": ["n"]})
    assert world.service.state.nomination(wanted.metadata.uid) is not None
    world.cluster.delete(PODS, first.metadata.name, TEAM, grace_s=0)
    eventually(lambda: world.service.state.holding(first.metadata.uid) is None, "the end of the first")
    assert not world.filter(world.add_pod("newcomer", container(cores=25)))["NodeNames"]


def test_a_nomination_on_a_lost_node_ends(world: World) -> None:
    """Its victims may never end."""
    low = fill(world, 1, cores=100)
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    assert preempt(world, wanted, n=low)
    world.cluster.delete(PODS, low[0].metadata.name, TEAM, grace_s=SOON_S)
    lost = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}
    world.cluster.patch(NODES, "n", "", lost, subresource="status")
    nomination = world.service.state.nomination(wanted.metadata.uid)
    assert nomination is not None
    eventually(lambda: nomination.is_free, "the last time that is granted")
    nomination.expires_at = 0.0
    eventually(lambda: not world.service.state.nominations(), "the end of the nomination")


def test_kube_scheduler_need_not_evict_where_a_pod_ends_already(world: World) -> None:
    """It names the other pod: by its count, both are in the way."""
    first, second = fill(world, 2, cores=100)
    world.cluster.delete(PODS, first.metadata.name, TEAM, grace_s=SOON_S)
    eventually(lambda: is_deleting(world, first), "the deletion")
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    assert preempt(world, wanted, n=[second]) == {}
    nomination = world.service.state.nomination(wanted.metadata.uid)
    assert nomination is not None
    assert nomination.victims == uids(first)

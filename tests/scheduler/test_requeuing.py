"""Waiting pods are requeued when there is room for them, and only then."""

import time
from typing import Any

import pytest

from cluster.objects import NODES, PODS, Pod
from tests.scheduler.world import ADMITTED, NAMES, TEAM, World, container, gpu
from tests.waiting import eventually
from vcuda.decision import Unavailable

WHOLE = container(cores=100, memory=1)


@pytest.fixture
def full(world: World) -> World:
    """Two nodes with one GPU each, both in use."""
    for name in ("a", "b"):
        world.add_node(name, 1)
        world.schedule(world.add_pod(f"on-{name}", WHOLE), [name])
    return world


def is_requeued(world: World, pod: Pod) -> bool:
    return NAMES.requeue in world.read(pod).metadata.annotations


def refuse(world: World, name: str, **spec: Any) -> Pod:
    pod = world.add_pod(name, WHOLE, **spec)
    assert not world.filter(pod)["NodeNames"]
    return pod


def test_a_pod_is_requeued_when_another_one_ends(full: World) -> None:
    pod = refuse(full, "p")
    full.end(full.cluster.get(PODS, "on-a", TEAM))
    eventually(lambda: is_requeued(full, pod), "the requeued pod")


def test_a_refusal_is_held_back_while_our_watch_is_behind(full: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """kube-scheduler asks again because a pod ended, of which we do not know yet."""
    pod, waits = refuse(full, "p"), []
    original = full.service.waiting.await_room

    def end_meanwhile(uid: str, timeout_s: float) -> bool:
        waits.append(uid)
        full.end(full.cluster.get(PODS, "on-a", TEAM))
        return original(uid, timeout_s)

    monkeypatch.setattr(full.service.waiting, "await_room", end_meanwhile)
    assert full.filter(pod)["NodeNames"] == ["a"]
    other = refuse(full, "q", annotations={NAMES.use_models: "V100"})
    full.add_node("c", 1)
    assert not full.filter(other)["NodeNames"]
    assert len(waits) == 1, "the new node is why it was asked about again"


def test_a_refusal_is_held_back_for_a_pod_that_kube_scheduler_tried_without_asking(
    full: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting resources excluded every node, until a pod ended of which we do not know yet."""
    original = full.service.waiting.await_room

    def end_meanwhile(uid: str, timeout_s: float) -> bool:
        full.end(full.cluster.get(PODS, "on-a", TEAM))
        return original(uid, timeout_s)

    monkeypatch.setattr(full.service.waiting, "await_room", end_meanwhile)
    refuse(full, "new")
    tried = full.add_pod("tried", WHOLE)
    failure = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes"}
    tried = full.cluster.patch(PODS, "tried", TEAM, {"status": {"conditions": [failure]}}, subresource="status")
    assert full.filter(tried)["NodeNames"] == ["a"]


def test_a_pod_that_is_deleted_while_its_refusal_is_held_back_leaves_nothing(
    full: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = refuse(full, "p")

    def delete_meanwhile(uid: str, _: float) -> bool:
        full.cluster.delete(PODS, "p", TEAM, grace_s=0)
        eventually(lambda: full.service.state.is_gone(uid), "the end of the pod")
        full.end(full.cluster.get(PODS, "on-a", TEAM))
        return True

    monkeypatch.setattr(full.service.waiting, "await_room", delete_meanwhile)
    assert "has ended or was deleted" in full.filter(pod)["Error"]
    assert full.service.state.claim(pod.metadata.uid) is None
    assert full.service.state.free_cores() == 100


def test_room_that_a_requeued_pod_does_not_use_is_offered_to_others(full: World) -> None:
    """kube-scheduler's own filters exclude the node for it, or it is deleted."""
    old = refuse(full, "old", priority=5)
    young = refuse(full, "young")
    full.end(full.cluster.get(PODS, "on-a", TEAM))
    eventually(lambda: is_requeued(full, old), "the requeued pod")
    assert not is_requeued(full, young)
    assert not full.filter(old, ["b"])["NodeNames"]
    eventually(lambda: is_requeued(full, young), "the other pod")


def test_the_owner_of_a_pod_cannot_have_others_wait(full: World) -> None:
    """A pod that is changed again and again is filtered again and again."""
    pod, waiting = refuse(full, "p"), full.service.waiting
    assert not waiting.await_room(pod.metadata.uid, 0.01)
    began = time.monotonic()
    for _ in range(100):
        assert not waiting.await_room(pod.metadata.uid, 60.0)
    assert time.monotonic() - began < 60.0, "not even once"


def test_a_pod_is_requeued_when_a_gpu_recovers_or_a_node_is_added(full: World) -> None:
    full.add_node("c", [gpu("c", 0, healthy=False)])
    first = refuse(full, "first")
    full.add_node("c", 1)
    eventually(lambda: is_requeued(full, first), "the pod for the recovered GPU")
    assert full.schedule(first) == "c"
    second = refuse(full, "second")
    full.add_node("d", 1)
    eventually(lambda: is_requeued(full, second), "the pod for the new node")


def test_as_many_pods_are_requeued_as_fit_the_highest_priority_and_oldest_first(full: World) -> None:
    """The others would only be refused again."""
    pods = [refuse(full, name, priority=priority) for name, priority in (("low", 0), ("high", 10), ("medium", 5))]
    for name in ("on-a", "on-b"):
        full.cluster.delete(PODS, name, TEAM, grace_s=0)
    eventually(lambda: is_requeued(full, pods[1]) and is_requeued(full, pods[2]), "two of three")
    full.service.requeuer.requeue_fitting()
    assert not is_requeued(full, pods[0])


def test_a_pod_that_was_filtered_since_is_not_requeued(full: World) -> None:
    """kube-scheduler requeues most pods itself."""
    pod = refuse(full, "p")
    full.end(full.cluster.get(PODS, "on-a", TEAM))
    full.filter(pod, ["b"])
    assert full.service.requeuer.requeue_fitting() == 0
    assert not is_requeued(full, pod)


def test_a_pod_is_requeued_once_for_the_same_room(full: World) -> None:
    pod = refuse(full, "p")
    full.end(full.cluster.get(PODS, "on-a", TEAM))
    eventually(lambda: is_requeued(full, pod), "the requeued pod")
    assert full.service.requeuer.requeue_fitting() == 0


def test_a_node_that_kube_scheduler_does_not_ask_about_is_left_out(full: World) -> None:
    """Its own filters exclude it for this pod, by a selector say: otherwise every pod that ends there would wake it."""
    pod = refuse(full, "p")
    full.end(full.cluster.get(PODS, "on-a", TEAM))
    eventually(lambda: full.service.requeuer.requeued == 1, "the first time")
    full.add_node("c", [])
    assert not full.filter(pod, ["b", "c"])["NodeNames"]
    again = full.add_pod("again", WHOLE)
    full.schedule(again, ["a"])
    full.end(again)
    assert full.service.requeuer.requeue_fitting() == 0


def test_a_pod_is_requeued_when_it_is_charged(world: World) -> None:
    """The controller obtains the charge of a pod that the webhook did not see."""
    world.add_node("n", 1)
    pod = world.add_pod("p", charged_for=None)
    assert not world.filter(pod)["NodeNames"]
    world.charge(pod, ADMITTED)
    eventually(lambda: is_requeued(world, pod), "the requeued pod")


def test_a_pod_is_requeued_when_its_quota_is_raised() -> None:
    """No event of Kubernetes does: quotas are ConfigMaps."""
    world = World(quota="types: {T4: {cores: 100}}").start()
    try:
        world.add_node("v100", 1, "V100")
        pod = world.add_pod("p")
        assert not world.filter(pod)["NodeNames"]
        other = world.add_pod("other", container(cores=1))
        assert not is_requeued(world, pod), "the ledger changed, but does not grant the model"
        world.change_quota("types: {T4: {cores: 100}, V100: {cores: 100}}")
        eventually(lambda: is_requeued(world, pod), "the requeued pod")
        assert not is_requeued(world, other)
    finally:
        world.stop()


def test_as_many_pods_are_requeued_as_the_raised_quota_allows() -> None:
    world = World(quota="types: {T4: {cores: 1000}}").start()
    try:
        world.add_node("v100", 4, "V100")
        pods = [world.add_pod(f"p{number}") for number in range(4)]
        for pod in pods:
            assert not world.filter(pod)["NodeNames"]
        world.change_quota("types: {T4: {cores: 1000}, V100: {cores: 120}}")
        eventually(lambda: any(is_requeued(world, pod) for pod in pods), "requeued pods")
        world.service.requeuer.requeue_fitting()
        assert sum(is_requeued(world, pod) for pod in pods) == 2
    finally:
        world.stop()


def test_a_pod_that_is_gone_is_not_waited_for(full: World) -> None:
    assert full.service.waiting.longest_wait_s() == 0
    pod = refuse(full, "p")
    waited_s = full.service.waiting.longest_wait_s()
    full.filter(pod)
    assert 0 < waited_s < full.service.waiting.longest_wait_s(), "a repeated refusal does not begin a new wait"
    full.cluster.delete(PODS, "p", TEAM, grace_s=0)
    eventually(lambda: len(full.service.waiting) == 0, "no waiting pod")


def test_nobody_is_looked_for_to_evict_if_many_wait_and_none_has_a_lower_priority(
    full: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look takes kube-scheduler longer than all of its filters."""
    monkeypatch.setattr("scheduler.extender.MANY_WAITING", 1)
    early, _, second = refuse(full, "p"), refuse(full, "q"), refuse(full, "r")
    assert full.filter(second)["FailedAndUnresolvableNodes"].keys() == {"a", "b"}
    assert full.filter(early)["FailedNodes"].keys() == {"a", "b"}, "another text would be written to the pod"
    full.end(full.cluster.get(PODS, "on-a", TEAM))
    full.schedule(full.add_pod("low", WHOLE, priority=-1), ["a"])
    assert full.filter(second)["FailedNodes"].keys() == {"a", "b"}
    full.end(full.cluster.get(PODS, "low", TEAM))
    full.schedule(full.add_pod("same", WHOLE), ["a"])
    assert full.filter(second)["FailedAndUnresolvableNodes"].keys() == {"a", "b"}


def test_hopeless_pods_cost_no_writes(full: World) -> None:
    """Pods end all the time; a pod that never fits is neither requeued nor told again."""
    pods = [refuse(full, f"p{number}", annotations={NAMES.use_models: "V100"}) for number in range(5)]
    for _ in range(3):
        for pod in pods:
            full.filter(pod)
    full.cluster.delete(NODES, "b")
    full.add_node("c", 1)
    assert full.service.requeuer.requeue_fitting() == 0
    eventually(lambda: all(len(full.events(pod)) == 1 for pod in pods), "one event for each")


def test_a_pod_that_kube_scheduler_never_asks_about_is_requeued_ever_less_often(full: World) -> None:
    """Its own filters exclude every node, so that the extender is not called at all."""
    pod = refuse(full, "p")
    now = [1000.0]
    full.service.waiting._clock = lambda: now[0]
    count = 0
    for number in range(12):
        full.service.requeuer.note_room("a")
        full.service.state.table.set_node("a", [gpu("a", number)])
        count += full.service.requeuer.requeue_fitting()
        now[0] += 20.0
    assert full.service.waiting.get(pod.metadata.uid) is not None
    assert 1 <= count <= 4


def test_a_pod_whose_room_was_taken_is_requeued_for_the_next(full: World) -> None:
    """Counting resources excluded the node before the extender could be asked: that says nothing about the node."""
    pod = refuse(full, "p")
    now = [1000.0]
    full.service.waiting._clock = lambda: now[0]
    full.end(full.cluster.get(PODS, "on-a", TEAM))
    eventually(lambda: full.service.requeuer.requeued == 1, "the first time")
    faster = full.add_pod("faster", WHOLE)
    full.schedule(faster, ["a"])
    now[0] += 70.0
    assert full.service.requeuer.requeue_fitting() == 0
    full.end(faster)
    full.service.requeuer.requeue_fitting()
    eventually(lambda: full.service.requeuer.requeued == 2, "the second time")
    assert full.service.waiting.get(pod.metadata.uid).futile == 0  # type: ignore[union-attr]


def test_a_raised_quota_wakes_a_pod_whose_other_nodes_are_full() -> None:
    """It waits for both: room on nodes of one model, and quota for another."""
    world = World(quota="types: {T4: {cores: 100}, V100: {cores: 10}}").start()
    try:
        world.add_node("t4", 1)
        world.add_node("v100", 1, "V100")
        world.schedule(world.add_pod("first", WHOLE), ["t4"])
        pod = world.add_pod("p")
        assert not world.filter(pod)["NodeNames"]
        world.change_quota("types: {T4: {cores: 100}, V100: {cores: 100}}")
        eventually(lambda: is_requeued(world, pod), "the requeued pod")
    finally:
        world.stop()


def test_a_requeue_that_fails_is_repeated(full: World) -> None:
    pod = refuse(full, "p")
    original, failures = full.cluster.patch, [1, 2]

    def patch(*args: Any, **kwargs: Any) -> Any:
        if args[0] is PODS and "status" not in args[3] and failures:
            failures.pop()
            raise Unavailable("timeout")
        return original(*args, **kwargs)

    full.cluster.patch = patch  # type: ignore[method-assign]
    full.end(full.cluster.get(PODS, "on-a", TEAM))
    eventually(lambda: is_requeued(full, pod), "the requeued pod")
    assert not failures


def test_more_pods_wait_than_are_tried_at_once(full: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.requeuing.MAX_TRIED", 2)
    hopeless = [refuse(full, f"h{number}", priority=9, annotations={NAMES.use_models: "V100"}) for number in range(5)]
    pod = refuse(full, "p")
    full.end(full.cluster.get(PODS, "on-a", TEAM))
    eventually(lambda: is_requeued(full, pod), "the requeued pod")
    assert not any(is_requeued(full, each) for each in hopeless)


def test_the_search_for_a_pod_with_several_containers_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only some nodes are searched at a time; the pod is requeued when one is found."""
    monkeypatch.setattr("vcuda.node_fit.MAX_STEPS", 8)
    for number in range(12):
        world.add_node(f"n{number:02}", 2)
    world.add_node("zz", 3)
    containers = (container("a", 60), container("b", 60), container("c", 60))
    pod = world.add_pod("p", *containers, annotations={NAMES.placement_policy: "binpack"})
    assert not world.filter(pod)["NodeNames"]
    eventually(lambda: is_requeued(world, pod), "the requeued pod")
    monkeypatch.undo()
    assert world.schedule(pod) == "zz"

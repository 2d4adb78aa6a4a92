"""Waiting pods are requeued when there is room for them, and only then."""

from typing import Any

import pytest

from cluster.objects import NODES, PODS, Pod
from tests.scheduler.world import ADMITTED, NAMES, TEAM, World, container, gpu
from tests.waiting import eventually
from vcuda.quota import parse_quota

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
    assert not full.filter(pod, ["b"])["NodeNames"]
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
        stored = world.store.read(TEAM)
        assert stored is not None
        ledger = stored.ledger.copy()
        quota = ledger.quotas[0]
        ledger.set_quotas([parse_quota("types: {T4: {cores: 100}, V100: {cores: 100}}", quota.name)], 2)
        world.store.write(stored, ledger)
        eventually(lambda: is_requeued(world, pod), "the requeued pod")
        assert not is_requeued(world, other)
    finally:
        world.stop()


def test_a_pod_that_is_gone_is_not_waited_for(full: World) -> None:
    refuse(full, "p")
    full.cluster.delete(PODS, "p", TEAM, grace_s=0)
    eventually(lambda: len(full.service.waiting) == 0, "no waiting pod")


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

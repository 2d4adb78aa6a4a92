"""Claims: held from filter to bind, given back on every other way."""

from typing import Any

import pytest

from cluster.objects import NODES, PODS
from tests.scheduler.world import TEAM, World, container
from tests.waiting import eventually


def test_a_filtered_pod_holds_its_gpus_while_the_next_one_is_filtered(world: World) -> None:
    """kube-scheduler filters the next pod before this one is bound."""
    world.add_node("n", 1)
    first, second = (world.add_pod(name, container(cores=60)) for name in ("a", "b"))
    assert world.filter(first)["NodeNames"] == ["n"]
    assert not world.filter(second)["NodeNames"]
    assert world.filter(first)["NodeNames"] == ["n"], "its own claim does not count against it"


def test_a_claim_ends_when_its_pod_is_deleted(world: World) -> None:
    world.add_node("n", 1)
    pod = world.add_pod("p")
    world.filter(pod)
    world.cluster.delete(PODS, "p", TEAM, grace_s=0)
    eventually(lambda: world.service.state.free_cores() == 100, "the free GPU")


def test_a_claim_ends_when_kube_scheduler_could_not_schedule_its_pod(world: World) -> None:
    """Another plugin refused it after us: the condition says so."""
    world.add_node("n", 1)
    pod = world.add_pod("p")
    world.filter(pod)
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "volume not found"}
    world.cluster.patch(PODS, "p", TEAM, {"status": {"conditions": [condition]}}, subresource="status")
    eventually(lambda: world.service.state.free_cores() == 100, "the free GPU")


def test_a_claim_ends_when_its_node_is_deleted(world: World) -> None:
    world.add_node("n", 1)
    pod = world.add_pod("p")
    world.filter(pod)
    world.cluster.delete(NODES, "n")
    eventually(lambda: world.service.state.claim(pod.metadata.uid) is None, "no claim")
    assert world.bind(pod, "n")


def test_a_claim_ends_after_its_time() -> None:
    world = World(claim_timeout_s=0.2, volume_timeout_s=600).start()
    try:
        world.add_node("n", 1)
        world.filter(world.add_pod("p"))
        eventually(lambda: world.service.state.free_cores() == 100, "the free GPU")
    finally:
        world.stop()


WAITS: dict[str, dict[str, Any]] = {
    "a volume": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]},
    "an ephemeral volume": {"volumes": [{"name": "v", "ephemeral": {}}]},
}


@pytest.mark.parametrize("spec", WAITS.values(), ids=WAITS)
def test_a_pod_that_waits_for_volumes_keeps_its_claim_for_longer(spec: dict[str, Any]) -> None:
    """kube-scheduler may wait for minutes between filter and bind, until the volume is provisioned."""
    world = World(claim_timeout_s=0.1, volume_timeout_s=600).start()
    try:
        world.add_node("n", 1)
        pod = world.add_pod("p", **spec)
        world.filter(pod)
        other = world.add_pod("other")
        world.add_node("m", 1)
        world.filter(other, ["m"])
        eventually(lambda: world.service.state.claim(other.metadata.uid) is None, "the other claim's end")
        assert world.service.state.claim(pod.metadata.uid) is not None
        assert not world.bind(pod, "n")
    finally:
        world.stop()


def test_the_claims_of_a_groups_later_members_are_void_when_a_member_is_filtered_again(world: World) -> None:
    """kube-scheduler places a group pod by pod, and starts over with another placement."""
    world.add_node("n", 1)
    group: dict[str, Any] = {"schedulingGroup": {"podGroupName": "gang"}}
    pods = [world.add_pod(name, container(cores=40), **group) for name in ("a", "b")]
    single = world.add_pod("single", container(cores=10))
    for pod in (*pods, single):
        assert world.filter(pod)["NodeNames"] == ["n"]
    world.filter(pods[0])
    assert world.service.state.claim(pods[1].metadata.uid) is None
    assert world.service.state.claim(single.metadata.uid) is not None


def test_a_terminating_pod_holds_its_gpus_until_it_is_gone(world: World) -> None:
    """Its containers may still run."""
    world.add_node("n", 1)
    pod = world.add_pod("p", container(cores=100, memory=1))
    world.schedule(pod)
    world.cluster.delete(PODS, "p", TEAM, grace_s=30)
    eventually(lambda: world.service.state.pod(pod.metadata.uid).is_deleting, "the deletion")  # type: ignore[union-attr]
    assert world.service.state.free_cores() == 0
    world.cluster.delete(PODS, "p", TEAM, grace_s=0)
    eventually(lambda: world.service.state.free_cores() == 100, "the free GPU")


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_an_ended_pod_holds_nothing(world: World, phase: str) -> None:
    world.add_node("n", 1)
    pod = world.add_pod("p")
    world.schedule(pod)
    world.end(pod, phase)
    assert world.service.state.free_cores() == 100


def set_ready(world: World, node: str, status: str) -> None:
    conditions = [{"type": "Ready", "status": status}]
    world.cluster.patch(NODES, node, "", {"status": {"conditions": conditions}}, subresource="status")
    eventually(lambda: world.service.state.node(node).lost is (status == "Unknown"), "the node's state")  # type: ignore[union-attr]


def test_on_a_lost_node_a_deleted_pod_holds_its_gpus_until_the_node_reports_again(world: World) -> None:
    """No kubelet has confirmed that its containers ended."""
    world.add_node("n", 1)
    pod = world.add_pod("p")
    world.schedule(pod)
    set_ready(world, "n", "Unknown")
    world.cluster.delete(PODS, "p", TEAM, grace_s=0)
    eventually(lambda: world.service.state.pod(pod.metadata.uid) is None, "the deletion")
    assert world.service.state.free_cores() == 50
    set_ready(world, "n", "True")
    assert world.service.state.free_cores() == 100


def test_a_restart_rebuilds_the_state_before_it_answers(world: World) -> None:
    world.add_node("n", 2)
    running = world.add_pod("running", container(cores=100, memory=1))
    world.schedule(running)
    world.restart()
    pod = world.add_pod("p", container(cores=200, memory=2))
    assert not world.filter(pod)["NodeNames"]
    assert world.schedule(world.add_pod("q", container(cores=100, memory=1))) == "n"


def test_before_the_first_lists_nothing_is_answered() -> None:
    world = World().start()
    try:
        world.service.pods._synced.clear()
        assert "not synced yet" in world.call("filter", b"{}", status=503)
        assert world.service.not_ready() == ["the caches are not synced yet"]
    finally:
        world.stop()

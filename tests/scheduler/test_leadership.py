"""The extender answers while the kube-scheduler of its own pod holds the Lease."""

from collections.abc import Iterator

import pytest

from cluster.in_memory import InMemoryCluster
from cluster.objects import LEASES, NAMESPACES
from scheduler.leadership import LeaseObserver
from tests.scheduler.world import SYSTEM, World
from tests.waiting import eventually


@pytest.fixture
def elected() -> Iterator[World]:
    world = World(lease="quotient-scheduler").start()
    yield world
    world.stop()


HOLDERS = {
    "our own kube-scheduler": ("own-pod_5f2c", True),
    "another pod": ("other-pod_5f2c", False),
    "a pod whose name begins like ours": ("own-pod-2_5f2c", False),
    "nobody": ("", False),
}


@pytest.mark.parametrize(("holder", "active"), HOLDERS.values(), ids=HOLDERS)
def test_the_holder_of_the_lease_decides_who_answers(elected: World, holder: str, *, active: bool) -> None:
    elected.add_node("n", 1)
    pod = elected.add_pod("p")
    elected.hold_lease("own-pod_1")
    eventually(elected.service.is_active, "the lease")
    elected.hold_lease(holder)
    eventually(lambda: elected.service.is_active() is active, "the new holder")
    if active:
        assert elected.filter(pod)["NodeNames"] == ["n"]
    else:
        body = {"Pod": elected.raw(pod), "NodeNames": ["n"]}
        assert "not active: the Lease is held by" in elected.call("filter", body, status=503)


def test_without_a_lease_nothing_is_answered(elected: World) -> None:
    assert "not active" in elected.call("filter", {"Pod": {}, "NodeNames": []}, status=503)


def test_a_lease_that_is_not_renewed_ends() -> None:
    """By our own clock: the watch may be broken, and another pod may lead."""
    cluster = InMemoryCluster()
    cluster.create(NAMESPACES, {"metadata": {"name": SYSTEM}})
    now = [0.0]
    observer = LeaseObserver(cluster, "l", SYSTEM, "own", clock=lambda: now[0])
    observer.start()
    try:
        spec = {"holderIdentity": "own_1", "leaseDurationSeconds": 15}
        cluster.create(LEASES, {"metadata": {"name": "l", "namespace": SYSTEM}, "spec": spec})
        eventually(observer.is_active, "the lease")
        now[0] = 15.0
        assert not observer.is_active()
        cluster.patch(LEASES, "l", SYSTEM, {"spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}})
        eventually(observer.is_active, "the renewal")
        cluster.delete(LEASES, "l", SYSTEM)
        eventually(lambda: not observer.is_active(), "the deleted lease")
    finally:
        observer.stop()

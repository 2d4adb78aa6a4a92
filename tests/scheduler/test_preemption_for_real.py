"""Preemption with the real kube-scheduler: pods of higher priority get GPUs that only evictions can free."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.objects import PODS, Pod
from tests.cluster.real import RealCluster
from tests.scheduler.real import NAMES, SchedulerCluster
from tests.waiting import eventually
from vcuda.placement_annotation import decode_placement

pytestmark = pytest.mark.kubernetes

PRIORITIES = {"low": 10, "middle": 50, "high": 100}


@pytest.fixture(scope="module")
def scheduled(real_cluster_possible: None) -> Iterator[SchedulerCluster]:
    """A cluster with one replica of the scheduler, which may evict pods, and three priority classes."""
    made = SchedulerCluster(RealCluster.start(), "a")
    for name, value in PRIORITIES.items():
        metadata = {"name": name}
        body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": metadata, "value": value}
        made.real.kubectl("apply", "-f-", stdin=json.dumps(body))
    eventually(lambda: made.holder() == "a", "the leader", 60)
    yield made
    made.stop()


class Room:
    """Nodes and a namespace of one test. Records every GPU that a pod was placed on, and every pod that vanished."""

    def __init__(self, cluster: SchedulerCluster, name: str, **nodes: int) -> None:
        self.cluster, self.name = cluster, cluster.namespace(name)
        self._placed: dict[str, set[str]] = {}
        for node, gpus in nodes.items():
            cluster.add_node(f"{name}-{node}", gpus, labels={"only": name})

    def create(self, name: str, cores: int, priority: str = "low", memory: int = 0, **spec: Any) -> None:
        spec = {"nodeSelector": {"only": self.name}, "priorityClassName": priority, **spec}
        self.cluster.pod(self.name, name, cores, memory or (8 if cores < 100 else cores // 100), **spec)

    def run(self, name: str, cores: int, priority: str = "low", **spec: Any) -> str:
        """Create a pod, wait until it is bound, and return its GPU."""
        self.create(name, cores, priority, **spec)
        eventually(lambda: self.gpus(name), f"the binding of {name}", 30)
        return next(iter(self.gpus(name)))

    def pods(self) -> dict[str, Pod]:
        return {pod.metadata.name: pod for pod in self.cluster.pods(self.name)}

    def gpus(self, name: str) -> set[str]:
        """Return the GPUs of a pod; empty while it is not bound, or if it does not exist."""
        pod = self.pods().get(name)
        placed = decode_placement(pod.metadata.annotations.get(NAMES.placement, "")) if pod else None
        found = (
            {each.uuid for slices in (placed or {}).values() for each in slices}
            if pod and pod.spec.node_name
            else set()
        )
        if found:
            self._placed[name] = found
        return found

    def evicted(self) -> set[str]:
        """Return the pods that were placed and are gone."""
        return self._placed.keys() - self.pods().keys()

    def check_nobody_was_evicted_in_vain(self, *preemptors: str) -> None:
        """Every GPU of an evicted pod is one that a preemptor has now."""
        gained = {gpu for name in preemptors for gpu in self.gpus(name)}
        for name in self.evicted():
            assert self._placed[name] <= gained, f"{name} was evicted in vain"


def test_kube_scheduler_is_told_whom_to_evict(scheduled: SchedulerCluster) -> None:
    """By counts it would evict the two pods of the lowest priority, which are on two GPUs."""
    room = Room(scheduled, "told", n=2)
    cards = {
        name: room.run(name, 50, priority)
        for name, priority in (("a", "low"), ("b", "middle"), ("c", "low"), ("d", "middle"))
    }
    assert cards["a"] == cards["b"] != cards["c"] == cards["d"]
    room.run("wanted", 100, "high")
    assert room.evicted() in ({"a", "b"}, {"c", "d"})
    room.check_nobody_was_evicted_in_vain("wanted")


def test_pods_are_evicted_where_kube_scheduler_never_asks(scheduled: SchedulerCluster) -> None:
    """Counts fit: 40 cores are free on each of two GPUs."""
    room = Room(scheduled, "unasked", n=2)
    room.run("a", 60)
    room.run("b", 60, "middle")
    before = scheduled.requests("a", "preempt")
    room.run("wanted", 80, "high")
    assert room.evicted() == {"a"}
    assert scheduled.requests("a", "preempt") == before
    room.check_nobody_was_evicted_in_vain("wanted")
    eventually(lambda: scheduled.events("unasked", "a", "Preempted"), "the event")


@pytest.mark.parametrize("is_asked", [True, False], ids=["kube-scheduler asks", "it does not"])
def test_pods_with_a_disruption_budget_are_spared(scheduled: SchedulerCluster, *, is_asked: bool) -> None:
    room = Room(scheduled, "budget" if is_asked else "budget-unasked", n=2)
    cores = 100 if is_asked else 60
    room.run("guarded", cores, metadata={"labels": {"app": "guarded"}})
    room.run("other", cores, "middle")
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "guarded"}}}
    metadata = {"name": "guarded", "namespace": room.name}
    budget = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": metadata, "spec": spec}
    scheduled.real.kubectl("apply", "-f-", stdin=json.dumps(budget))
    room.run("wanted", 100 if is_asked else 80, "high")
    assert room.evicted() == {"other"}
    room.check_nobody_was_evicted_in_vain("wanted")


def test_preemptors_and_newcomers_at_once(scheduled: SchedulerCluster) -> None:
    """Evicted pods are created again by their ReplicaSet, and would take the room before the preemptors."""
    room = Room(scheduled, "crowd", n=2, m=2)
    selector = {"only": "crowd"}
    scheduled.replica_set("crowd", "low", 6, 60, 8, nodeSelector=selector, priorityClassName="low")
    eventually(lambda: len([name for name in room.pods() if room.gpus(name)]) == 4, "a full cluster", 60)
    wanted = [f"wanted-{number}" for number in range(3)]
    threads = [threading.Thread(target=room.create, args=(name, 80, "high")) for name in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: all(room.gpus(name) for name in wanted), "the preemptors", 90)
    assert len(set.union(*(room.gpus(name) for name in wanted))) == 3
    eventually(lambda: len(room.pods()) == 9, "the replaced pods", 30)
    assert len(room.evicted()) == 3
    room.check_nobody_was_evicted_in_vain(*wanted)


def test_the_room_is_kept_while_victims_end(scheduled: SchedulerCluster) -> None:
    """The victim takes its time; a newcomer that would fit as soon as it has ended does not get the GPU."""
    room = Room(scheduled, "slowly", n=1)
    room.run("victim", 100, terminationGracePeriodSeconds=600)
    room.create("wanted", 100, "high")
    cluster = scheduled.cluster
    eventually(lambda: cluster.get(PODS, "victim", "slowly").metadata.deletion_timestamp, "the eviction", 30)
    for number in range(5):
        room.create(f"newcomer-{number}", 20)
    cluster.delete(PODS, "victim", "slowly", grace_s=0)
    eventually(lambda: room.gpus("wanted"), "the preemptor", 30)
    assert not any(room.gpus(f"newcomer-{number}") for number in range(5))
    room.check_nobody_was_evicted_in_vain("wanted")

"""Pods that fit nowhere, beside pods that come and go: cheap for the API server, and no obstacle for the others."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import pytest

from cluster.informer import Informer
from cluster.objects import PODS, Pod
from settings.configuration import SchedulerSettings
from tests.cluster import layout
from tests.cluster.real import RealCluster
from tests.scheduler.real import SchedulerCluster
from tests.waiting import eventually

pytestmark = pytest.mark.kubernetes

# kube-scheduler's condition, its event, the same event again for the pod's new version, and then its repetition; and
# the event of ours with the numbers.
MAX_WRITES = 5
MAX_BACKOFF_S = SchedulerSettings().max_backoff_s
# Of one second, two, four, and so on up to 32.
EARLY_PERIODS = 6
CLIENTS = 4


@pytest.mark.timeout(300)
def test_hopeless_pods_are_cheap(real_cluster_possible: None, record_property: Callable[[str, object], None]) -> None:
    """Every pod that ends requeues all of them; they are filtered once per backoff, and cost few writes."""
    run(20, 60, 60.0, record_property)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_hopeless_pods_are_cheap_for_ten_minutes(
    real_cluster_possible: None, record_property: Callable[[str, object], None]
) -> None:
    run(500, 1000, 600.0, record_property)


def run(nodes: int, hopeless: int, seconds: float, record_property: Callable[[str, object], None]) -> None:
    cluster = SchedulerCluster(RealCluster.start())
    try:
        cluster.real.kill("kube-apiserver")
        cluster.real.run(layout.AUDITED_API_SERVER)
        cluster.real.until("the API server", cluster.real.api_ready, layout.AUDITED_API_SERVER)
        cluster.set_max_backoff("a", MAX_BACKOFF_S)
        cluster.start_replica("a")
        cluster.namespace("busy")
        # Counting resources lets the hopeless pods pass, so that the extender is asked: each GPU has 40 cores free.
        for number in range(nodes):
            cluster.add_node(f"busy-{number}", 2)
        eventually(cluster.holder, "a leader", 60)
        cluster.replica_set("busy", "running", 2 * nodes, 60, 8)
        eventually(lambda: len(cluster.bound("busy")) == 2 * nodes, "the running pods", 60 + nodes)
        alone, alone_s = churn(cluster, "alone", seconds / 6), seconds / 6
        began = time.monotonic()
        for number in range(hopeless):
            cluster.pod("busy", f"hopeless-{number}", 50, 8)
        refused_s = 60 + hopeless / 5
        eventually(lambda: cluster.metric("a", "waiting_pods") == hopeless, "the refusals", refused_s)
        # In the first minute, each is tried again six times.
        first, second = churn(cluster, "beside", seconds / 2), churn(cluster, "later", seconds / 2)
        cycles = first + second
        filters = cluster.requests("a", "filter") - 2 * nodes - alone - cycles
        lasted_s = time.monotonic() - began
        writes = cluster.audit_log()
    finally:
        cluster.stop()
    by_pod: dict[str, Counter[str]] = defaultdict(Counter)
    for each in writes:
        name, _, _ = each["objectRef"].get("name", "").partition(".")
        if name.startswith("hopeless-"):
            by_pod[name][f"{each['verb']} {each['objectRef']['resource']}"] += 1
    worst = max(by_pod.values(), key=Counter.total)
    # One write creates the pod.
    most = worst.total() - 1
    record_property("fitting_pods_per_s", round(cycles / seconds, 2))
    record_property("times_the_rate_alone", round(cycles / seconds / (alone / alone_s), 2))
    record_property("times_the_rate_alone_in_the_second_half", round(second / (seconds / 2) / (alone / alone_s), 2))
    record_property("filters_per_pod", round(filters / hopeless, 1))
    record_property("most_writes_for_a_pod", most)
    assert cycles > seconds / 10
    assert most <= MAX_WRITES, worst
    # The backoff begins with one second and doubles. Without it there are six filters a second for each pod.
    periods = EARLY_PERIODS + lasted_s / MAX_BACKOFF_S
    record_property("backoff_periods", round(periods, 1))
    assert filters / hopeless <= periods


class BoundPods:
    """The pods of a namespace that are bound, from a watch: to poll for each would take the machine's time."""

    def __init__(self, cluster: SchedulerCluster, namespace: str) -> None:
        self._changed = threading.Condition()
        self._bound: set[str] = set()
        self._informer: Informer[Pod] = Informer(cluster.cluster, PODS, namespace)
        self._informer.on_change(self._handle)

    def __enter__(self) -> Self:
        self._informer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._informer.stop()

    def _handle(self, _: Pod | None, new: Pod | None) -> None:
        if new is not None and new.spec.node_name:
            with self._changed:
                self._bound.add(new.metadata.name)
                self._changed.notify_all()

    def wait(self, name: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._bound, 120), f"{name} is not bound"


def churn(cluster: SchedulerCluster, name: str, seconds: float) -> int:
    """Create small pods with a few clients, and delete each when it is bound; returns how many."""
    until = time.monotonic() + seconds

    def run_client(client: int) -> int:
        count = 0
        while time.monotonic() < until:
            pod = f"{name}-{client}-{count}"
            # So small that all of them leave a node with more cores than the hopeless pods request: otherwise
            # counting resources excludes it now and then, and kube-scheduler writes another text to each of them.
            cluster.pod("busy", pod, 5, 2)
            bound.wait(pod)
            cluster.cluster.delete(PODS, pod, "busy", grace_s=0)
            count += 1
        return count

    with BoundPods(cluster, "busy") as bound, ThreadPoolExecutor(CLIENTS) as pool:
        return sum(pool.map(run_client, range(CLIENTS)))

"""The real kube-scheduler with the extender, on a real API server."""

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from cluster.objects import NODES, PODS
from tests.cluster import layout
from tests.cluster.real import RealCluster
from tests.scheduler.real import NAMES, SchedulerCluster, retry
from tests.waiting import eventually
from vcuda.names import WORKLOAD_CONFIG_MAP

pytestmark = pytest.mark.kubernetes


@pytest.fixture(scope="module")
def scheduled(real_cluster_possible: None) -> Iterator[SchedulerCluster]:
    """A cluster with one replica of the scheduler."""
    made = SchedulerCluster(RealCluster.start(), "a")
    eventually(lambda: made.holder() == "a", "the leader", 60)
    yield made
    made.stop()


def is_bound(cluster: SchedulerCluster, namespace: str, name: str) -> bool:
    return bool(cluster.cluster.get(PODS, name, namespace).spec.node_name)


def test_a_pod_is_placed_on_a_gpu_and_another_one_is_told_why_not(scheduled: SchedulerCluster) -> None:
    """From kubectl apply to the Binding, and to the event that sums up."""
    namespace = scheduled.namespace("first")
    scheduled.add_node("first-1", 2, labels={"only": "first"})
    for name in ("p", "second"):
        scheduled.pod(namespace, name, 60, nodeSelector={"only": "first"})
        eventually(partial(is_bound, scheduled, namespace, name), "the binding")
    placed = scheduled.cluster.get(PODS, "p", namespace).metadata.annotations[NAMES.placement]
    assert '"uuid":"GPU-first-1-0","cores":60,"memoryMiB":2048' in placed
    scheduled.pod(namespace, "third", 50, nodeSelector={"only": "first"})
    expected = "1 of 1 nodes: no GPU with 50 cores free, the best has 40"
    eventually(lambda: expected in str(scheduled.events(namespace, "third", "InsufficientGPUs")), "the event", 30)
    refused = str(scheduled.events(namespace, "third", "FailedScheduling"))
    assert "1 no GPU with enough free cores" in refused


def test_room_is_used_at_once(scheduled: SchedulerCluster) -> None:
    """A pod ends, a GPU recovers, a node is added, a quota is raised: the waiting pod is bound within seconds."""
    namespace = scheduled.namespace("room", "types: {T4: {cores: 400}}")
    scheduled.add_node("room-1", 1, labels={"only": "room"})
    selector: dict[str, Any] = {"nodeSelector": {"only": "room"}}
    scheduled.pod(namespace, "first", 100, 1, **selector)
    eventually(lambda: is_bound(scheduled, namespace, "first"), "the first pod")
    scheduled.pod(namespace, "second", 100, 1, **selector)
    eventually(lambda: scheduled.events(namespace, "second", "FailedScheduling"), "the refusal")
    scheduled.cluster.delete(PODS, "first", namespace, grace_s=0)
    eventually(lambda: is_bound(scheduled, namespace, "second"), "the second pod", 15)
    scheduled.pod(namespace, "third", 100, 1, **selector)
    eventually(lambda: scheduled.events(namespace, "third", "FailedScheduling"), "the refusal")
    scheduled.add_node("room-2", 1, labels={"only": "room"})
    eventually(lambda: is_bound(scheduled, namespace, "third"), "the third pod", 15)


def test_a_touched_pod_is_requeued_by_kube_scheduler(scheduled: SchedulerCluster) -> None:
    """No event of Kubernetes follows a change of a quota: only the annotation wakes the pod."""
    namespace = scheduled.namespace("raised", "types: {T4: {cores: 100}, A100: {cores: 10}}")
    scheduled.add_node("raised-1", 1, "A100-SXM4-40GB", labels={"only": "raised"})
    scheduled.pod(namespace, "p", 50, 8, nodeSelector={"only": "raised"})
    eventually(lambda: scheduled.events(namespace, "p", "InsufficientGPUs"), "the refusal", 30)
    assert not is_bound(scheduled, namespace, "p")
    quota = {"data": {"quota.yaml": "types: {T4: {cores: 100}, A100: {cores: 50}}"}}
    scheduled.real.kubectl(
        "patch", "configmap", "gpu-quota", "-n", namespace, "--type=merge", "-p", str(quota).replace("'", '"')
    )
    eventually(lambda: is_bound(scheduled, namespace, "p"), "the binding after the quota was raised", 20)
    ledger = scheduled.ledger
    eventually(lambda: ledger(namespace).usage.taken["raised/gpu-quota", "A100", "cores"] == 50, "the moved charge")
    eventually(lambda: ledger(namespace).usage.taken["raised/gpu-quota", "T4", "cores"] == 0, "the former charge's end")


PROVISIONING_S = 120


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_pod_keeps_its_gpus_while_its_volume_is_provisioned(scheduled: SchedulerCluster) -> None:
    """kube-scheduler waits for the volume between filter and bind; nobody else gets the GPU meanwhile."""
    namespace = scheduled.namespace("volumes")
    scheduled.add_node("volumes-1", 2, labels={"only": "volumes"})
    scheduled.create_volume_claim(namespace, "slow")
    volumes = [{"name": "v", "persistentVolumeClaim": {"claimName": "slow"}}]
    selector: dict[str, Any] = {"nodeSelector": {"only": "volumes"}}
    scheduled.pod(namespace, "waits", 60, volumes=volumes, **selector)
    eventually(lambda: scheduled.selected_node(namespace, "slow") == "volumes-1", "the selected node", 30)
    scheduled.pod(namespace, "first", 60, **selector)
    eventually(partial(is_bound, scheduled, namespace, "first"), "a pod on the other GPU")
    scheduled.pod(namespace, "second", 60, **selector)
    began = time.monotonic()
    while time.monotonic() - began < PROVISIONING_S:
        time.sleep(5)
        assert not is_bound(scheduled, namespace, "second")
        assert not is_bound(scheduled, namespace, "waits")
    scheduled.provision(namespace, "slow")
    eventually(partial(is_bound, scheduled, namespace, "waits"), "the binding", 60)
    assert not is_bound(scheduled, namespace, "second")


PODS_CREATED = 100
SETTLING_S = 5.0


def creation_seconds(writes: list[dict[str, Any]]) -> float:
    """Return the time from the first created pod to the last."""
    times = [
        datetime.fromisoformat(each["requestReceivedTimestamp"])
        for each in writes
        if each["verb"] == "create"
        and each["objectRef"]["resource"] == "pods"
        and "subresource" not in each["objectRef"]
    ]
    return (max(times) - min(times)).total_seconds()


@pytest.mark.timeout(240)
def test_a_placed_pod_costs_one_write(
    real_cluster_possible: None, record_property: Callable[[str, object], None]
) -> None:
    """The Binding, beside kube-scheduler's own event; and at most one write of ledger and status for each pod."""
    cluster = SchedulerCluster(RealCluster.start())
    try:
        cluster.namespace("busy", "types: {T4: {cores: 100000}}")
        for number in range(PODS_CREATED // 8):
            cluster.add_node(f"busy-{number}", 5)
        cluster.real.kill("kube-apiserver")
        cluster.real.run(layout.AUDITED_API_SERVER)
        cluster.real.until("the API server", cluster.real.api_ready, layout.AUDITED_API_SERVER)
        cluster.start_replica("a")
        eventually(cluster.holder, "a leader", 60)
        cluster.pod("busy", "warm-up")
        eventually(partial(is_bound, cluster, "busy", "warm-up"), "the scheduler", 60)
        before = len(cluster.audit_log())
        cluster.replica_set("busy", "many", PODS_CREATED, 50, 8)
        eventually(lambda: len(cluster.bound("busy")) == PODS_CREATED + 1, "all pods bound", 60)
        time.sleep(SETTLING_S)
        writes = cluster.audit_log()[before:]
    finally:
        cluster.stop()
    ours = [each for each in writes if each["user"]["username"].endswith(":quotient-scheduler")]
    pod_writes = Counter(
        f"{each['verb']} {each['objectRef'].get('subresource', '')}"
        for each in ours
        if each["objectRef"]["resource"] == "pods"
    )
    config_maps = [each for each in writes if each["objectRef"]["resource"] == "configmaps"]
    learned = [each for each in config_maps if each["objectRef"]["name"] == WORKLOAD_CONFIG_MAP]
    config_maps = [each for each in config_maps if each not in learned]
    record_property("pod_writes", str(dict(pod_writes)))
    by_user = Counter(each["user"]["username"].rpartition(":")[2] for each in config_maps)
    record_property("ledger_and_status_writers", str(dict(by_user)))
    record_property("seconds_of_creation", creation_seconds(writes))
    record_property("ledger_and_status_writes", len(config_maps))
    assert pod_writes == {"create binding": PODS_CREATED}
    # One charge for each pod, or fewer writes; the controller's do not grow with the number of pods: ledger and status
    # once a second.
    assert by_user["quotient-webhook"] <= PODS_CREATED
    assert by_user["quotient-controller"] <= 2 * (creation_seconds(writes) + SETTLING_S) + 2
    assert by_user["quotient-scheduler"] == 0
    # Each time the arrivals have grown by half.
    assert len(learned) <= 10


# 65 GPUs for 200 pods: 160 quarters, 30 halves and 10 whole ones; times ten for the long form. Each shape has nodes of
# its own: a deleted pod may be replaced before its GPU is free, and take one that a larger pod needs.
SHAPES = {"quarter": (160, 25, 15), "half": (30, 50, 30), "whole": (10, 100, 1)}
NODES_OF = {"quarter": 8, "half": 3, "whole": 2}
GPUS_PER_NODE = 5
# And 20 halves of either model, which are charged for one of them when they are created: half of the charges move.
EITHER = (20, 50, 8)
EITHER_MODELS = ("T4", "A100-SXM4-40GB")


class Faults:
    """Kills and pauses parts of the cluster, one after another, until it is stopped."""

    def __init__(self, cluster: SchedulerCluster) -> None:
        self._cluster, self._stopping = cluster, threading.Event()
        self.done: list[str] = []
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)

    def start(self) -> "Faults":
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(120)
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        steps: list[Callable[[], None]] = [
            self.kill_extender,
            self.kill_kube_scheduler,
            self.restart_api_server,
            self.delete_pods,
            self.pause_leader,
            self.replace_node,
        ]
        try:
            for step in steps:
                if self._stopping.wait(1.0):
                    return
                step()
                self.done.append(step.__name__)
        except BaseException as error:  # raised again in `stop`
            self.error = error

    def kill_extender(self) -> None:
        name = layout.extender_name(self._cluster.leader())
        self._cluster.real.kill(name)
        self._cluster.real.run(name)

    def kill_kube_scheduler(self) -> None:
        name = layout.kube_scheduler_name(self._cluster.leader())
        self._cluster.real.kill(name)
        self._cluster.real.run(name)

    def restart_api_server(self) -> None:
        self._cluster.real.restart("kube-apiserver")

    def delete_pods(self) -> None:
        for pod in self._cluster.pods("fill")[::7]:
            retry(partial(delete, self._cluster, pod.metadata.name))

    def pause_leader(self) -> None:
        """Pause both programs of the leader until another replica leads."""
        leader = self._cluster.renewing_leader()
        names = (layout.extender_name(leader), layout.kube_scheduler_name(leader))
        for name in names:
            self._cluster.real.kill(name, signal.SIGSTOP)
        eventually(lambda: self._cluster.is_led_by_another(leader), "another leader", 60)
        for name in names:
            self._cluster.real.kill(name, signal.SIGCONT)
        kube_scheduler = names[1]
        eventually(lambda: kube_scheduler not in self._cluster.real.running(), "the end of the former leader", 60)

    def replace_node(self) -> None:
        """Delete a node and create it again, as an autoscaler does; its pods are deleted with it."""
        name = "quarter-0"
        self._cluster.cluster.delete(NODES, name)
        for pod in [pod for pod in self._cluster.bound("fill") if pod.spec.node_name == name]:
            retry(partial(delete, self._cluster, pod.metadata.name))
        retry(lambda: self._cluster.add_node(name, GPUS_PER_NODE, labels={"shape": "quarter"}))


def delete(cluster: SchedulerCluster, name: str) -> None:
    if any(pod.metadata.name == name for pod in cluster.pods("fill")):
        cluster.cluster.delete(PODS, name, "fill", grace_s=0)


def charged_cores(cluster: SchedulerCluster, namespace: str) -> tuple[int, int]:
    """Return what is charged for each of the two models."""
    taken = cluster.ledger(namespace).usage.taken
    return taken[f"{namespace}/gpu-quota", "T4", "cores"], taken[f"{namespace}/gpu-quota", "A100", "cores"]


def has_no_pods(cluster: SchedulerCluster, namespace: str) -> bool:
    return not cluster.pods(namespace)


def has_no_charges(cluster: SchedulerCluster, namespace: str) -> bool:
    return len(cluster.ledger(namespace)) == 0


def has_no_claims(cluster: SchedulerCluster, replica: str) -> bool:
    return cluster.metric(replica, "claims") == 0


@pytest.mark.timeout(400)
def test_pods_fill_a_cluster_exactly_whatever_fails(
    real_cluster_possible: None, record_property: Callable[[str, object], None]
) -> None:
    """All pods are placed, no GPU is over its size, and nothing is left over."""
    fill(1, record_property)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_pods_fill_a_cluster_exactly_whatever_fails(
    real_cluster_possible: None, record_property: Callable[[str, object], None]
) -> None:
    fill(10, record_property)


def fill(factor: int, record_property: Callable[[str, object], None]) -> None:
    cluster = SchedulerCluster(RealCluster.start(), "a", "b")
    try:
        for shape, count in NODES_OF.items():
            for number in range(count * factor):
                cluster.add_node(f"{shape}-{number}", GPUS_PER_NODE, labels={"shape": shape})
        for model in EITHER_MODELS:
            for number in range(factor):
                cluster.add_node(f"{model.lower()}-{number}", GPUS_PER_NODE, model, labels={"shape": "either"})
        cluster.namespace("moving", f"types: {{T4: {{cores: {1000 * factor}}}, A100: {{cores: {1000 * factor}}}}}")
        # Twice what fits: replacements of deleted pods are created before the charges of those are released, and a
        # ReplicaSet waits for minutes after a refusal.
        cluster.namespace("fill", f"types: {{T4: {{cores: {2 * 6500 * factor}}}}}")
        eventually(cluster.holder, "a leader", 60)
        cluster.checker.start()
        began = time.monotonic()
        faults = Faults(cluster).start()
        for name, (count, cores, memory) in SHAPES.items():
            cluster.replica_set("fill", name, count * factor, cores, memory, nodeSelector={"shape": name})
        count, cores, memory = EITHER
        cluster.replica_set("moving", "either", count * factor, cores, memory, nodeSelector={"shape": "either"})
        wanted = 200 * factor
        faults._thread.join(300 * factor)
        faults.stop()
        try:
            eventually(lambda: cluster.has_bound("fill", wanted), f"{wanted} bound pods", 120 * factor)
            eventually(lambda: cluster.has_bound("moving", count * factor), "pods on either model", 60)
        except AssertionError as error:
            raise AssertionError(f"{error}: {cluster.describe('fill')}{cluster.describe('moving')}") from None
        record_property("pods", wanted + count * factor)
        record_property("seconds", round(time.monotonic() - began, 1))
        record_property("states_checked", cluster.checker.states)
        record_property("overlaps", len(cluster.checker.violations))
        record_property("faults", ", ".join(faults.done))
        assert len(faults.done) == 6
        assert cluster.checker.free_cores() == 0
        assert not cluster.checker.current, cluster.checker.violations
        # A Binding of a paused leader may take effect late; everything else never overlaps.
        assert len(cluster.checker.violations) <= 1, cluster.checker.violations
        eventually(lambda: charged_cores(cluster, "moving") == (500 * factor, 500 * factor), "the moved charges", 120)
        for namespace in ("fill", "moving"):
            cluster.real.kubectl("delete", "replicaset", "--all", "-n", namespace, "--wait=false")
        for namespace in ("fill", "moving"):
            eventually(partial(has_no_pods, cluster, namespace), "no pod", 120)
            eventually(partial(has_no_charges, cluster, namespace), "no charge", 90)
        for replica in layout.REPLICAS:
            eventually(partial(has_no_claims, cluster, replica), "no claim", 30)
        total = 7500.0 * factor
        leader = cluster.holder()
        eventually(lambda: cluster.metric(leader, "free_cores") == total, "all GPUs free", 30)
    finally:
        cluster.stop()

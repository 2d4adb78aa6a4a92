"""`quotient why` as a tenant, and `quotient doctor`, on a real API server with kube-scheduler, extender and webhook."""

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.api import connect
from cluster.interface import Selector
from cluster.objects import CONFIG_MAPS, NODES, PODS
from tests.cluster.layout import REPLICAS, extender_name, kube_scheduler_name
from tests.cluster.objects import new_namespace
from tests.cluster.quotient import run_beside
from tests.cluster.real import RealCluster
from tests.cluster.supervisor import ROOT
from tests.waiting import eventually
from tests.webhook.pods import NAMES, gpu, pod, workload
from vcuda.inventory import Gpu, encode_inventory

pytestmark = pytest.mark.kubernetes

TEAM = "tenants"
CARDS, UNITS_PER_CARD = 2, 60


@pytest.fixture(scope="module")
def real(real_cluster_possible: None) -> Iterator[RealCluster]:
    cluster = RealCluster.start(node=False)
    run_beside(cluster)
    cluster.run(extender_name(REPLICAS[0]))
    cluster.run(kube_scheduler_name(REPLICAS[0]))
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def tenant(real: RealCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kubeconfig of a user with the ClusterRole `view` in one namespace, which is that of its context."""
    new_namespace(connect(str(real.kubeconfig)), TEAM)
    real.kubectl("create", "serviceaccount", "tenant", "-n", TEAM)
    real.kubectl("create", "rolebinding", "tenant", "-n", TEAM, "--clusterrole=view", f"--serviceaccount={TEAM}:tenant")
    kubeconfig = json.loads(real.kubeconfig.read_text())
    token = real.kubectl("create", "token", "tenant", "-n", TEAM).strip()
    kubeconfig["users"][0]["user"] = {"token": token}
    kubeconfig["contexts"][0]["context"]["namespace"] = TEAM
    file = tmp_path_factory.mktemp("tenant") / "kubeconfig"
    file.write_text(json.dumps(kubeconfig))
    return file


def quotient(kubeconfig: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "console.main", "--set", f"cluster.kubeconfig={kubeconfig}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def why(kubeconfig: Path, *arguments: str) -> dict[str, Any]:
    done = quotient(kubeconfig, "why", *arguments, "-o", "json")
    assert done.stdout, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def is_placed(kubeconfig: Path, pod_name: str) -> bool:
    return bool(why(kubeconfig, pod_name)["state"] == "placed")


def step(answer: dict[str, Any], name: str) -> str:
    return "; ".join(each["text"] for each in answer["steps"] if each["step"] == name)


def add_node(real: RealCluster, name: str) -> None:
    """A Node object with T4 cards, as a kubelet and a node plugin would keep it."""
    cluster = connect(str(real.kubeconfig))
    cards = tuple(
        Gpu(uuid=f"GPU-{index}", index=index, model="T4", memory_mib=UNITS_PER_CARD * 256, healthy=True)
        for index in range(CARDS)
    )
    cluster.create(NODES, {"metadata": {"name": name, "annotations": {NAMES.inventory: encode_inventory(cards)}}})
    offered = {NAMES.core: str(100 * CARDS), NAMES.memory: str(UNITS_PER_CARD * CARDS)}
    amounts = {**offered, "cpu": "8", "memory": "16Gi", "pods": "110"}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": now}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
    cluster.patch(NODES, name, "", {"status": status}, subresource="status")
    eventually(lambda: not cluster.get(NODES, name).spec.taints, "the taint of a new node to be removed", 30)


def create_pod(real: RealCluster, name: str, memory: int) -> None:
    made = pod(gpu(core="50", memory=str(memory)))
    made["metadata"] = {**made["metadata"], "name": name, "namespace": TEAM}
    connect(str(real.kubeconfig)).create(PODS, made)


def test_a_tenant_learns_what_was_decided_about_its_pods(real: RealCluster, tenant: Path) -> None:
    """Those that are bound, those that do not fit, and those of a Deployment that the quota refuses."""
    cluster = connect(str(real.kubeconfig))
    metadata = {"name": "gpu-quota", "namespace": TEAM, "labels": {NAMES.quota_label: "true"}}
    cluster.create(CONFIG_MAPS, {"metadata": metadata, "data": {"quota.yaml": "types: {T4: {cores: 200}}"}})
    status = Selector(fields="metadata.name=gpu-quota-status")
    eventually(lambda: cluster.list(CONFIG_MAPS, TEAM, status).items, "the quota's status", 30)
    add_node(real, "gpu-1")
    for name in ("first", "second"):
        create_pod(real, name, 40)
        eventually(partial(is_placed, tenant, name), "the pod to be bound", 60)
    placed = why(tenant, "first")
    assert step(placed, "placed") == "node gpu-1: container c0: GPU-0 50 cores, 10240 MiB"
    assert step(placed, "charged").startswith("50 cores, 10240 MiB to the quota of the namespace (T4: ")
    assert "nodes" in step(placed, "unknown"), "a tenant may not read nodes"
    assert "GPU 0 (T4) 50 cores" in step(why(real.kubeconfig, "first", "-n", TEAM), "placed")

    create_pod(real, "third", 40)
    eventually(lambda: "the best has" in step(why(tenant, "third"), "placing"), "the extender's event", 60)
    third = why(tenant, "third")
    assert step(third, "placing") == "1 of 1 nodes: no GPU with 10 GiB free, the best has 5 GiB"
    assert third["next"] == "wait until a pod that uses a GPU ends, or ask for less memory (vcuda-memory)"

    # More than is left on all cards of the node together: kube-scheduler itself excludes it, and the event explains it.
    create_pod(real, "fourth", 50)
    eventually(lambda: "the best has" in step(why(tenant, "fourth"), "placing"), "the extender's event", 60)
    assert why(tenant, "fourth")["next"].startswith("wait until a pod that uses a GPU ends, or ask for less")

    made = workload(pod(gpu(core="50", memory="4")), selector={"matchLabels": {"app": "x"}})
    made["metadata"] = {**made["metadata"], "name": "refused", "namespace": TEAM}
    real.kubectl("apply", "-f-", stdin=json.dumps(made))
    eventually(lambda: "exceeded quota" in step(why(tenant, "deploy/refused"), "refused"), "the refusal", 60)
    refused = why(tenant, "deploy/refused")
    assert refused["state"] == "refused"
    assert refused["summary"] == "0 pods", "pods with the same labels are not its own"
    assert "short by 50" in step(refused, "refused")
    missing = quotient(tenant, "why", "refused-5d9-x")
    assert missing.returncode == 1
    assert "exceeded quota" in missing.stdout


def test_doctor_sees_the_scheduler_lead_and_stop(real: RealCluster) -> None:
    def lease() -> dict[str, Any]:
        results = json.loads(quotient(real.kubeconfig, "doctor", "-o", "json").stdout)
        (found,) = [each for each in results if each["check"] == "scheduler lease"]
        return dict(found)

    eventually(lambda: lease()["level"] == "ok", "the Lease to be held", 60)
    assert f"replica-{REPLICAS[0]}_" in lease()["message"]
    real.kill(kube_scheduler_name(REPLICAS[0]))
    try:
        eventually(lambda: lease()["level"] == "error", "the Lease to expire", 90)
        assert "was not renewed for" in lease()["message"]
    finally:
        real.run(kube_scheduler_name(REPLICAS[0]))

"""Workloads whose pods were refused, on a real API server with Kubernetes' own controllers."""

import json
import time
import uuid
from collections.abc import Callable, Iterator

import pytest

from cluster.objects import EVENTS, NODES, PODS
from cluster.pod_creators import POD_CREATORS
from tests.controller.conftest import QuotientCluster
from tests.waiting import eventually
from tests.webhook.pods import NAMES, Obj, gpu, pod, workload
from vcuda.names import RETRIED_ANNOTATION

pytestmark = pytest.mark.kubernetes

QUOTA = "types: {A100: {cores: 100}}"
KINDS = {kind.name: kind for kind in POD_CREATORS}
# Another label than that of the pods that use up the quota: they would be adopted.
LABELS = {"app": "web"}
SELECTOR = {"selector": {"matchLabels": LABELS}}
# Each kind with its fields, and after how many refusals its controller waits for 8 s or longer.
WAITING: dict[str, tuple[str, Obj, int]] = {
    "Deployment": ("apps/v1", {"replicas": 1, **SELECTOR}, 12),
    "ReplicationController": ("v1", {"replicas": 1, "selector": LABELS}, 12),
    "StatefulSet": ("apps/v1", {"replicas": 2, "serviceName": "x", **SELECTOR}, 12),
    "DaemonSet": ("apps/v1", SELECTOR, 12),
    "Job": ("batch/v1", {}, 4),
}


@pytest.fixture
def node(quotient: QuotientCluster) -> Iterator[None]:
    """A node for the DaemonSet; nothing runs there."""
    name = f"n-{uuid.uuid4().hex[:6]}"
    quotient.cluster.create(NODES, {"metadata": {"name": name}})
    yield
    quotient.cluster.delete(NODES, name)


def manifest(kind: str, namespace: str) -> Obj:
    api_version, spec, _ = WAITING[kind]
    template = pod(gpu(core="100", memory=None), annotations={NAMES.use_models: "A100"})
    if kind == "Job":
        template["spec"]["restartPolicy"] = "Never"
    template["metadata"]["labels"] = LABELS
    made = workload(template, kind, api_version, **spec)
    return made | {"metadata": {"name": "web", "namespace": namespace}}


def refusals(quotient: QuotientCluster, namespace: str) -> int:
    """Return how often Kubernetes tried in vain to create a pod."""
    events = quotient.cluster.list(EVENTS, namespace).items
    return sum(each.count for each in events if each.reason == "FailedCreate")


def retried(quotient: QuotientCluster, kind: str, namespace: str) -> int:
    """Return how many workloads of a kind were retried."""
    creators = quotient.cluster.list(KINDS["ReplicaSet" if kind == "Deployment" else kind], namespace).items
    return sum(RETRIED_ANNOTATION in each.metadata.annotations for each in creators)


def pods_of(quotient: QuotientCluster, namespace: str) -> list[str]:
    pods = quotient.cluster.list(PODS, namespace).items
    return [each.metadata.name for each in pods if each.metadata.owner_references]


@pytest.mark.timeout(300)
def test_a_waiting_workload_gets_its_pod_as_soon_as_there_is_room(
    quotient: QuotientCluster, node: None, record_property: Callable[..., None]
) -> None:
    """Its own controller would have waited for 8 to 20 s longer, and for more if it had been refused for longer."""
    namespaces = {kind: quotient.namespace(QUOTA) for kind in WAITING}
    holders = {kind: quotient.create(namespace, 100, "A100") for kind, namespace in namespaces.items()}
    assert all(name.startswith("p-") for name in holders.values()), holders
    for kind, namespace in namespaces.items():
        quotient.real.kubectl("create", "-f-", stdin=json.dumps(manifest(kind, namespace)))
    for kind, namespace in namespaces.items():
        least = WAITING[kind][2]
        eventually(lambda namespace=namespace, least=least: refusals(quotient, namespace) >= least, kind, 60)  # type: ignore[misc]
        assert not retried(quotient, kind, namespace), f"{kind} was retried without room"
        started = time.monotonic()
        quotient.delete(namespace, holders[kind])
        eventually(lambda namespace=namespace: pods_of(quotient, namespace), f"the pod of the {kind}", 7)  # type: ignore[misc]
        took_s = round(time.monotonic() - started, 2)
        record_property(f"took_s {kind}", took_s)
        print(f"{kind}: {took_s} s")
        assert retried(quotient, kind, namespace) == 1


def test_of_several_waiting_deployments_one_is_retried_for_the_room_of_one_pod(quotient: QuotientCluster) -> None:
    """A Deployment itself is never updated, and no ReplicaSet is added."""
    namespace = quotient.namespace(QUOTA)
    holder = quotient.create(namespace, 100, "A100")
    for number in range(3):
        made = manifest("Deployment", namespace)
        labels = {"app": f"x{number}"}
        made["metadata"]["name"] = f"web-{number}"
        made["spec"] |= {"selector": {"matchLabels": labels}}
        made["spec"]["template"]["metadata"]["labels"] = labels
        quotient.real.kubectl("create", "-f-", stdin=json.dumps(made))
    eventually(lambda: refusals(quotient, namespace) >= 27, "each to be refused several times", 30)
    quotient.delete(namespace, holder)
    eventually(lambda: len(pods_of(quotient, namespace)) == 1, "one pod", 10)
    eventually(lambda: quotient.cores(namespace) == (100, 100, 0), "its charge")
    assert retried(quotient, "Deployment", namespace) <= 1, "a Deployment may have tried by itself"
    sets = json.loads(quotient.real.kubectl("get", "replicasets", "-n", namespace, "-o", "json"))["items"]
    deployments = json.loads(quotient.real.kubectl("get", "deployments", "-n", namespace, "-o", "json"))["items"]
    assert len(sets) == 3
    assert not any(RETRIED_ANNOTATION in each["metadata"].get("annotations", {}) for each in deployments)

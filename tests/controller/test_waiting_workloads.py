"""Workloads that lack pods are found from their state, of each kind whose controller tries again after an update."""

from typing import Any

import msgspec
import pytest

from cluster.pod_creators import PodCreator
from controller.waiting_workloads import WaitingWorkload, waiting_workload_of
from tests.controller.workloads import FAILED, NAMES, failed_set, workload
from vcuda.amounts import Amounts
from vcuda.dimensions import CORES, MEMORY, PODS
from vcuda.scheme import build_scheme

SCHEME = build_scheme()
ENDED = {"type": "Complete", "status": "True"}
NOT_ENDED = {"type": "Complete", "status": "False"}


def read(kind: str, raw: dict[str, Any]) -> WaitingWorkload | None:
    return waiting_workload_of(kind, msgspec.convert(raw, PodCreator), SCHEME)


def job(status: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return workload(status=status, **spec)


CASES = {
    "a ReplicaSet that failed to create its pods": ("ReplicaSet", failed_set(replicas=3, has=1), 2),
    "a ReplicaSet without replicas has one": ("ReplicaSet", workload(status={"conditions": [FAILED]}), 1),
    "a ReplicaSet that is still creating them": ("ReplicaSet", workload(replicas=3, status={"replicas": 1}), 0),
    "a ReplicaSet that cannot delete pods": ("ReplicaSet", failed_set(replicas=1, has=3), 0),
    "a ReplicationController": ("ReplicationController", failed_set(replicas=3, has=1), 2),
    "a Job with fewer pods than it runs at once": ("Job", job({"active": 1}, parallelism=3), 2),
    "a Job runs one pod at once by default": ("Job", job({}), 1),
    "a Job that needs only one more": ("Job", job({"succeeded": 4}, parallelism=3, completions=5), 1),
    "a Job that is complete": ("Job", job({"conditions": [ENDED]}, parallelism=3), 0),
    "a Job that is not": ("Job", job({"conditions": [NOT_ENDED]}, parallelism=3), 3),
    "a Job of which one pod has succeeded": ("Job", job({"succeeded": 1, "active": 1}, parallelism=3), 0),
    "a suspended Job": ("Job", job({}, suspend=True), 0),
    "a Job of another manager": ("Job", job({}, managedBy="kueue.x-k8s.io/multikueue"), 0),
    "a Job that waits for pods to end": ("Job", job({"terminating": 1}, podReplacementPolicy="Failed"), 0),
    "a parallel StatefulSet": ("StatefulSet", workload(replicas=4, podManagementPolicy="Parallel"), 4),
    "a StatefulSet creates one pod after another": (
        "StatefulSet",
        workload(replicas=4, status={"replicas": 1, "readyReplicas": 1}),
        1,
    ),
    "a StatefulSet that waits until a pod is ready": ("StatefulSet", workload(replicas=4, status={"replicas": 1}), 0),
    "a DaemonSet": (
        "DaemonSet",
        workload(status={"desiredNumberScheduled": 3, "currentNumberScheduled": 1}),
        2,
    ),
    "pods without GPUs": ("ReplicaSet", failed_set(core=0), 0),
    "one that is being deleted": (
        "ReplicaSet",
        failed_set() | {"metadata": {"name": "w", "deletionTimestamp": "2026-01-01T00:00:00Z"}},
        0,
    ),
    "no template": ("ReplicationController", {"status": {"conditions": [FAILED]}}, 0),
    "more containers with GPUs than a pod may have": (
        "Job",
        {
            "spec": {
                "template": {
                    "spec": {
                        "containers": [{"name": str(n), "resources": {"limits": {NAMES.core: "1"}}} for n in range(65)]
                    }
                }
            }
        },
        0,
    ),
}


@pytest.mark.parametrize(("kind", "raw", "missing"), CASES.values(), ids=CASES.keys())
def test_a_workload_lacks_the_pods_that_it_should_have_and_that_were_not_created(
    kind: str, raw: dict[str, Any], missing: int
) -> None:
    found = read(kind, raw)
    assert (found.missing if found else 0) == missing


def test_what_a_pod_needs_is_read_as_for_a_pod() -> None:
    """By the code that reads pods, from the template and its annotations."""
    found = read("ReplicaSet", failed_set(core=30))
    assert found is not None
    assert found.request.demand(40960, 256) == Amounts({CORES: 30, MEMORY: 256, PODS: 1})
    assert found.options.models == ("A100",)
    assert found.has_failed

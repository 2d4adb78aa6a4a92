"""The controller's permission to patch workloads, on a real API server: one annotation, and nothing else."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.api import connect
from cluster.pod_creators import POD_CREATORS
from tests.cluster.objects import new_namespace
from tests.cluster.real import RealCluster
from tests.deploy.permissions import impersonation_flags
from tests.deploy.test_chart import SYSTEM, objects
from tests.waiting import eventually
from vcuda.names import CONTROLLER, RETRIED_ANNOTATION

pytestmark = pytest.mark.kubernetes

Obj = dict[str, Any]
POLICY = "quotient-retries"
KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "ClusterRole", "ClusterRoleBinding")
ACCOUNT = impersonation_flags(f"{SYSTEM}:{CONTROLLER}")
SELECTOR: Obj = {"selector": {"matchLabels": {"app": "x"}}}
SPECS: dict[str, Obj] = {
    "ReplicaSet": {"replicas": 0, **SELECTOR},
    "ReplicationController": {"replicas": 0, "selector": {"app": "x"}},
    "StatefulSet": {"replicas": 0, "serviceName": "x", **SELECTOR},
    "DaemonSet": SELECTOR,
    "Job": {"suspend": True},
    "Deployment": {"replicas": 0, **SELECTOR},
}
API_VERSIONS = {kind.name: kind.api_version for kind in POD_CREATORS} | {"Deployment": "apps/v1"}


def manifest(kind: str, namespace: str) -> Obj:
    pod: Obj = {"containers": [{"name": "c", "image": "i"}]}
    if kind == "Job":
        pod["restartPolicy"] = "Never"
    metadata = {"name": "w", "namespace": namespace, "labels": {"a": "b"}, "annotations": {"kept": "1"}}
    spec = {**SPECS[kind], "template": {"metadata": {"labels": {"app": "x"}}, "spec": pod}}
    return {"apiVersion": API_VERSIONS[kind], "kind": kind, "metadata": metadata, "spec": spec}


class Installed:
    """Permissions and policy as the chart installs them, and workloads of all kinds in a namespace."""

    def __init__(self, real: RealCluster) -> None:
        self.real = real
        self.cluster = connect(str(real.kubeconfig))
        self.objects = [
            each for each in objects() if each["kind"] in KINDS and each["metadata"]["name"] in (POLICY, CONTROLLER)
        ]
        for each in self.objects:
            real.kubectl("apply", "-f-", stdin=json.dumps(each))
        self.namespace = new_namespace(self.cluster, f"t-{uuid.uuid4().hex[:8]}")
        for kind in SPECS:
            real.kubectl("create", "-f-", stdin=json.dumps(manifest(kind, self.namespace)))
        # kubectl reads an object before it patches it, which the controller does not.
        resources = ",".join(f"{kind.lower()}s" for kind in SPECS)
        real.kubectl("create", "role", "reader", "-n", self.namespace, "--verb=get", f"--resource={resources}")
        account = f"--serviceaccount={SYSTEM}:{CONTROLLER}"
        real.kubectl("create", "rolebinding", "reader", "-n", self.namespace, "--role=reader", account)

    def remove(self) -> None:
        for each in self.objects:
            self.real.kubectl("delete", each["kind"], each["metadata"]["name"])

    def patch(self, kind: str, changes: Obj, *options: str) -> str:
        """Patch as the controller's account; returns kubectl's output."""
        command = ("patch", kind, "w", "-n", self.namespace, "--type=merge", f"--patch={json.dumps(changes)}")
        return self.real.kubectl(*command, *options, *ACCOUNT, check=False)


@pytest.fixture(scope="module")
def installed(request: pytest.FixtureRequest) -> Iterator[Installed]:
    request.getfixturevalue("real_cluster_possible")
    installed = Installed(request.getfixturevalue("shared_clusters").get(node=False))
    # The API server takes a moment to enforce a new policy.
    change = {"metadata": {"labels": {"a": "c"}}}

    def patch() -> str:
        return installed.patch("Job", change, "--dry-run=server")

    eventually(lambda: POLICY in patch(), "the policy", 30, patch)
    yield installed
    installed.remove()


RETRY_KINDS = [kind for kind in SPECS if kind != "Deployment"]
CHANGES: dict[str, Obj] = {
    "replicas": {"spec": {"replicas": 3}},
    "the template": {"spec": {"template": {"metadata": {"annotations": {"x": "y"}}}}},
    "the image": {"spec": {"template": {"spec": {"containers": [{"name": "c", "image": "other"}]}}}},
    "a label": {"metadata": {"labels": {"a": "c"}}},
    "another annotation": {"metadata": {"annotations": {"kept": "2"}}},
    "a removed annotation": {"metadata": {"annotations": {"kept": None, RETRIED_ANNOTATION: "x"}}},
    "an added annotation": {"metadata": {"annotations": {"new": "1", RETRIED_ANNOTATION: "x"}}},
    "a finalizer": {"metadata": {"finalizers": ["example.org/f"]}},
    "an owner": {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}]}},
}


@pytest.mark.parametrize("kind", RETRY_KINDS)
def test_the_controller_may_set_the_annotation_that_retries_a_workload(installed: Installed, kind: str) -> None:
    for value in ("2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z"):
        answer = installed.patch(kind, {"metadata": {"annotations": {RETRIED_ANNOTATION: value}}})
        assert "patched" in answer, answer


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("kind", RETRY_KINDS)
def test_the_controller_may_change_nothing_else_of_a_workload(installed: Installed, kind: str, changes: Obj) -> None:
    before = installed.real.kubectl("get", kind, "w", "-n", installed.namespace, "-o", "json")
    answer = installed.patch(kind, changes)
    # Nobody can change a Job's template; it has no replicas, nor has a DaemonSet.
    has_no_effect = any(text in answer for text in ("immutable", "no change"))
    assert POLICY in answer or (kind in ("Job", "DaemonSet") and "spec" in changes and has_no_effect), answer
    after = installed.real.kubectl("get", kind, "w", "-n", installed.namespace, "-o", "json")
    for key in ("spec", "metadata"):
        assert comparable(json.loads(after)[key]) == comparable(json.loads(before)[key])


def comparable(fields: Obj) -> Obj:
    """Leave out what the status changes."""
    return {key: value for key, value in fields.items() if key not in ("resourceVersion", "managedFields")}


def test_the_controller_may_not_touch_deployments_or_other_verbs(installed: Installed) -> None:
    """RBAC forbids what is not a patch of the five kinds themselves."""
    retry = {"metadata": {"annotations": {RETRIED_ANNOTATION: "x"}}}
    assert "forbidden" in installed.patch("Deployment", retry)
    assert "forbidden" in installed.patch("ReplicaSet", {"spec": {"replicas": 3}}, "--subresource=scale")
    assert "forbidden" in installed.patch("Job", {"status": {"active": 3}}, "--subresource=status")
    for verb in ("delete", "create", "update", "deletecollection"):
        answer = installed.real.kubectl("auth", "can-i", verb, "jobs", "-n", installed.namespace, *ACCOUNT, check=False)
        assert "yes" not in answer
    server_side = ("apply", "--server-side", "-f-", *ACCOUNT)
    made = manifest("Job", installed.namespace)
    made["metadata"]["name"] = "new"
    assert "forbidden" in installed.real.kubectl(*server_side, stdin=json.dumps(made), check=False)


def test_without_retries_neither_the_permissions_nor_the_policy_are_installed() -> None:
    rendered = objects('config={"controller": {"retryWorkloads": false}}')
    (role,) = (each for each in rendered if (each["kind"], each["metadata"]["name"]) == ("ClusterRole", CONTROLLER))
    assert not any({"jobs", "replicasets"} & set(rule.get("resources", ())) for rule in role["rules"])
    assert not any(each["metadata"]["name"] == POLICY for each in rendered)

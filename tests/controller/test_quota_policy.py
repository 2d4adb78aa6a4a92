"""The ValidatingAdmissionPolicy for quotas: a user who may edit ConfigMaps cannot change them, Quotient up or down."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.errors import NotFound
from cluster.objects import CONFIG_MAPS, NAMESPACES
from tests.controller.conftest import QuotientCluster
from tests.waiting import eventually
from tests.webhook.pods import NAMES

pytestmark = pytest.mark.kubernetes

QUOTA = "types: {A100: {cores: 100}}"
LABEL = NAMES.quota_label

Obj = dict[str, Any]


def config_map(name: str, label: str | None = LABEL, text: str = "unlisted: allow", value: str = "true") -> Obj:
    labels = {label: value} if label else {}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels},
        "data": {"quota.yaml": text},
    }


class Tenant:
    """User alice, with ClusterRole `edit` in one namespace; `doomed` is a namespace that a test deletes."""

    def __init__(self, quotient: QuotientCluster, namespace: str, doomed: str) -> None:
        self._quotient, self.namespace, self.doomed = quotient, namespace, doomed

    def kubectl(self, *arguments: str, made: Obj | None = None) -> subprocess.CompletedProcess[str]:
        real = self._quotient.real
        return subprocess.run(
            [
                str(real.layout.kubernetes / "kubectl"),
                f"--kubeconfig={real.kubeconfig}",
                "--as=alice",
                "--as-group=system:authenticated",
                "-n",
                self.namespace,
                *arguments,
            ],
            input=json.dumps(made) if made else None,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module", params=["running", "down"])
def tenant(request: pytest.FixtureRequest, quotient: QuotientCluster) -> Iterator[Tenant]:
    """A tenant in a namespace with a quota, with Quotient running and with Quotient down."""
    namespace, doomed = quotient.namespace(QUOTA), quotient.namespace(QUOTA)
    quotient.real.kubectl("create", "rolebinding", "alice", "--clusterrole=edit", "--user=alice", "-n", namespace)
    quotient.cluster.create(CONFIG_MAPS, {"metadata": {"name": "settings", "namespace": namespace}})
    alice = Tenant(quotient, namespace, doomed)
    # A new policy takes a moment to be in force.
    attempt = ("delete", "cm", "gpu-quota", "--dry-run=server")
    eventually(lambda: "Forbidden" in alice.kubectl(*attempt).stderr, "the policy")
    if request.param == "down":
        quotient.webhook.stop(signal.SIGKILL)
        quotient.controller.stop()
    yield alice
    if request.param == "down":
        quotient.webhook.start()
        quotient.controller.start()
        eventually(quotient.controller.is_leading, "the controller to lead", 40)


Attempt = Callable[[Tenant], subprocess.CompletedProcess[str]]

ATTEMPTS: dict[str, Attempt] = {
    "patch it": lambda alice: alice.kubectl(
        "patch", "cm", "gpu-quota", "-p", '{"data": {"quota.yaml": "unlisted: allow"}}'
    ),
    "delete it": lambda alice: alice.kubectl("delete", "cm", "gpu-quota"),
    "delete all": lambda alice: alice.kubectl("delete", "cm", "gpu-quota", "gpu-quota-status"),
    "remove its label": lambda alice: alice.kubectl("label", "cm", "gpu-quota", f"{LABEL}-"),
    "change its label": lambda alice: alice.kubectl("label", "--overwrite", "cm", "gpu-quota", f"{LABEL}=false"),
    "replace it": lambda alice: alice.kubectl("replace", "-f-", made=config_map("gpu-quota")),
    "replace it with --force": lambda alice: alice.kubectl(
        "replace", "--force", "-f-", made=config_map("gpu-quota", None)
    ),
    "apply it server-side": lambda alice: alice.kubectl(
        "apply", "--server-side", "--force-conflicts", "-f-", made=config_map("gpu-quota", None)
    ),
    "create another": lambda alice: alice.kubectl("create", "-f-", made=config_map("mine")),
    "create one with another domain's label": lambda alice: alice.kubectl(
        "create", "-f-", made=config_map("mine", "tencent.com/gpu-quota")
    ),
    "label an existing ConfigMap": lambda alice: alice.kubectl("label", "cm", "settings", f"{LABEL}=true"),
    "patch the status": lambda alice: alice.kubectl("patch", "cm", "gpu-quota-status", "-p", '{"data": {"v": ""}}'),
    "delete by label": lambda alice: alice.kubectl("delete", "cm", "-l", f"{LABEL}=true"),
    "add an owner that does not exist": lambda alice: alice.kubectl(
        "patch",
        "cm",
        "gpu-quota",
        "-p",
        '{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "x"}]}}',
    ),
}


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_a_tenant_cannot(tenant: Tenant, quotient: QuotientCluster, attempt: Attempt) -> None:
    """The message names the missing permission."""
    before = quotient.cluster.get(CONFIG_MAPS, "gpu-quota", tenant.namespace)
    done = attempt(tenant)
    assert done.returncode != 0
    assert "gpuquotas" in done.stderr
    assert "alice may not" in done.stderr
    assert quotient.cluster.get(CONFIG_MAPS, "gpu-quota", tenant.namespace).data == before.data


def test_a_tenant_can_write_other_config_maps(tenant: Tenant) -> None:
    """Under any name, generated ones included."""
    generated = config_map("", None)
    generated["metadata"] = {"generateName": "own-"}
    assert tenant.kubectl("create", "-f-", made=generated).returncode == 0
    assert tenant.kubectl("create", "-f-", made=config_map("own", None)).returncode == 0
    assert tenant.kubectl("patch", "cm", "own", "-p", '{"data": {"a": "b"}}').returncode == 0
    assert tenant.kubectl("delete", "cm", "own").returncode == 0


def test_a_namespace_with_a_quota_can_be_deleted(tenant: Tenant, quotient: QuotientCluster) -> None:
    """Its controller deletes the quota with it, also while Quotient is down."""
    quotient.cluster.delete(NAMESPACES, tenant.doomed)

    def is_gone() -> bool:
        try:
            quotient.cluster.get(NAMESPACES, tenant.doomed)
        except NotFound:
            return True
        return False

    eventually(is_gone, "the namespace to be gone", 40)


def test_permission_on_gpuquotas_allows_the_change(tenant: Tenant, quotient: QuotientCluster) -> None:
    """Only for the verbs of the role, and in its namespace."""
    real = quotient.real
    rule = {"apiGroups": ["quotient.dev"], "resources": ["gpuquotas"], "verbs": ["create", "delete"]}
    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "quotas", "namespace": tenant.namespace},
        "rules": [rule],
    }
    real.kubectl("apply", "-f-", stdin=json.dumps(role))
    real.kubectl("create", "rolebinding", "quotas", "--role=quotas", "--user=alice", "-n", tenant.namespace)
    try:
        attempt = ("create", "--dry-run=server", "-f-")
        # Not its success: while the webhook is down, its own check of quotas fails closed.
        eventually(lambda: "may not" not in tenant.kubectl(*attempt, made=config_map("second")).stderr, "the right")
        assert "may not update" in tenant.kubectl("label", "cm", "gpu-quota", f"{LABEL}-").stderr
    finally:
        real.kubectl("delete", "rolebinding", "quotas", "-n", tenant.namespace)

"""The guard of quotas, tried as a tenant who may edit ConfigMaps; and with nothing of Quotient running."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.errors import NotFound
from cluster.objects import CONFIG_MAPS, NAMESPACES
from tests.controller.conftest import Held
from tests.waiting import eventually
from tests.webhook.pods import NAMES

pytestmark = pytest.mark.kubernetes

QUOTA = "types: {A100: {cores: 100}}"
LABEL = NAMES.quota_label

Obj = dict[str, Any]


def config_map(name: str, label: str | None = LABEL, text: str = "types: {}", value: str = "true") -> Obj:
    labels = {label: value} if label else {}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels},
        "data": {"quota.yaml": text},
    }


class Tenant:
    """Somebody with the role `edit` in one namespace."""

    def __init__(self, held: Held, namespace: str, doomed: str) -> None:
        self._held, self.namespace, self.doomed = held, namespace, doomed

    def kubectl(self, *arguments: str, made: Obj | None = None) -> subprocess.CompletedProcess[str]:
        real = self._held.real
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
def tenant(request: pytest.FixtureRequest, held: Held) -> Iterator[Tenant]:
    """A tenant in a namespace with a quota, while Quotient runs or does not."""
    namespace, doomed = held.namespace(QUOTA), held.namespace(QUOTA)
    held.real.kubectl("create", "rolebinding", "alice", "--clusterrole=edit", "--user=alice", "-n", namespace)
    held.cluster.create(CONFIG_MAPS, {"metadata": {"name": "settings", "namespace": namespace}})
    alice = Tenant(held, namespace, doomed)
    # A freshly written policy takes a moment to be in force.
    trying = ("delete", "cm", "gpu-quota", "--dry-run=server")
    eventually(lambda: "Forbidden" in alice.kubectl(*trying).stderr, "the guard")
    if request.param == "down":
        held.webhook.stop(signal.SIGKILL)
        held.controller.stop()
    yield alice
    if request.param == "down":
        held.webhook.start()
        held.controller.start()
        eventually(held.controller.is_leading, "the controller to lead", 40)


Attempt = Callable[[Tenant], subprocess.CompletedProcess[str]]

ATTEMPTS: dict[str, Attempt] = {
    "change it": lambda alice: alice.kubectl("patch", "cm", "gpu-quota", "-p", '{"data": {"quota.yaml": "types: {}"}}'),
    "delete it": lambda alice: alice.kubectl("delete", "cm", "gpu-quota"),
    "delete all": lambda alice: alice.kubectl("delete", "cm", "gpu-quota", "gpu-quota-status"),
    "take its label away": lambda alice: alice.kubectl("label", "cm", "gpu-quota", f"{LABEL}-"),
    "change its label": lambda alice: alice.kubectl("label", "--overwrite", "cm", "gpu-quota", f"{LABEL}=false"),
    "replace it": lambda alice: alice.kubectl("replace", "-f-", made=config_map("gpu-quota")),
    "replace it by force": lambda alice: alice.kubectl("replace", "--force", "-f-", made=config_map("gpu-quota", None)),
    "apply over it": lambda alice: alice.kubectl(
        "apply", "--server-side", "--force-conflicts", "-f-", made=config_map("gpu-quota", None)
    ),
    "make another": lambda alice: alice.kubectl("create", "-f-", made=config_map("mine")),
    "make one under another domain's label": lambda alice: alice.kubectl(
        "create", "-f-", made=config_map("mine", "tencent.com/gpu-quota")
    ),
    "turn a ConfigMap into one": lambda alice: alice.kubectl("label", "cm", "settings", f"{LABEL}=true"),
    "forge the status": lambda alice: alice.kubectl("patch", "cm", "gpu-quota-status", "-p", '{"data": {"v": ""}}'),
    "delete whatever has the label": lambda alice: alice.kubectl("delete", "cm", "-l", f"{LABEL}=true"),
    "write an owner that goes away": lambda alice: alice.kubectl(
        "patch",
        "cm",
        "gpu-quota",
        "-p",
        '{"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "x"}]}}',
    ),
}


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_a_tenant_cannot(tenant: Tenant, held: Held, attempt: Attempt) -> None:
    """Whatever the way; and he is told what he would need."""
    before = held.cluster.get(CONFIG_MAPS, "gpu-quota", tenant.namespace)
    done = attempt(tenant)
    assert done.returncode != 0
    assert "gpuquotas" in done.stderr
    assert "alice may not" in done.stderr
    assert held.cluster.get(CONFIG_MAPS, "gpu-quota", tenant.namespace).data == before.data


def test_what_is_no_quota_is_his_own(tenant: Tenant) -> None:
    """The guard guards nothing else, under whatever name."""
    generated = config_map("", None)
    generated["metadata"] = {"generateName": "own-"}
    assert tenant.kubectl("create", "-f-", made=generated).returncode == 0
    assert tenant.kubectl("create", "-f-", made=config_map("own", None)).returncode == 0
    assert tenant.kubectl("patch", "cm", "own", "-p", '{"data": {"a": "b"}}').returncode == 0
    assert tenant.kubectl("delete", "cm", "own").returncode == 0


def test_a_namespace_with_a_quota_can_be_deleted(tenant: Tenant, held: Held) -> None:
    """By whoever may delete namespaces, also while nothing of Quotient runs."""
    held.cluster.delete(NAMESPACES, tenant.doomed)

    def is_gone() -> bool:
        try:
            held.cluster.get(NAMESPACES, tenant.doomed)
        except NotFound:
            return True
        return False

    eventually(is_gone, "the namespace to be gone", 40)


def test_who_has_the_right_may(tenant: Tenant, held: Held) -> None:
    """With the verb of the operation on gpuquotas, and in that namespace alone."""
    real = held.real
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
        trying = ("create", "--dry-run=server", "-f-")
        # While the webhook is away, its own check of what a quota says stands in the way.
        eventually(lambda: "may not" not in tenant.kubectl(*trying, made=config_map("second")).stderr, "the right")
        assert "may not update" in tenant.kubectl("label", "cm", "gpu-quota", f"{LABEL}-").stderr
    finally:
        real.kubectl("delete", "rolebinding", "quotas", "-n", tenant.namespace)

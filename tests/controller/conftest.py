"""A real cluster with everything of Quotient that quotas need."""

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.api import ApiCluster, connect
from cluster.errors import ApiError
from cluster.objects import CONFIG_MAPS, PODS, binding
from settings.configuration import Configuration
from tests.cluster.objects import new_namespace
from tests.cluster.real import RealCluster
from tests.conftest import SharedClusters
from tests.running import RunningController
from tests.waiting import eventually
from tests.webhook.pods import NAMES, gpu, pod
from tests.webhook.running import Authority, RunningWebhook, register, run_controller, unregister
from vcuda.decision import Unavailable
from vcuda.ledger import Ledger, decode_ledger
from vcuda.names import LEDGER_KEY, LEDGER_PREFIX, QUOTA_STATUS, STATUS_KEY
from vcuda.strict_yaml import parse_documents

SYSTEM = Configuration().system_namespace

Obj = dict[str, Any]


class Held:
    """A real cluster whose namespaces are held to their quotas."""

    def __init__(self, real: RealCluster, webhook: RunningWebhook, controller: RunningController) -> None:
        self.real, self.webhook, self.controller = real, webhook, controller
        self.cluster: ApiCluster = connect(str(real.kubeconfig))

    def namespace(self, quota: str = "") -> str:
        """Make a namespace of its own for a test, with a quota that is in force."""
        name = new_namespace(self.cluster, f"t-{uuid.uuid4().hex[:8]}")
        if quota:
            self.write(name, quota)
            eventually(lambda: self.status(name), "the quota's status")
        return name

    def write(self, namespace: str, text: str, name: str = "gpu-quota", label: str = NAMES.quota_label) -> None:
        """Write a quota."""
        metadata = {"name": name, "namespace": namespace, "labels": {label: "true"}}
        made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"quota.yaml": text}}
        self.real.kubectl("apply", "-f-", stdin=json.dumps(made))

    def create(self, namespace: str, core: int, *models: str, dry_run: bool = False, **spec: Any) -> str:
        """Create a pod, and say its name, or why it was refused."""
        notes = {NAMES.use_models: ",".join(models)} if models else {}
        made = pod(gpu(core=str(core), memory="4"), annotations=notes, **spec)
        made["metadata"] = {**made["metadata"], "name": f"p-{uuid.uuid4().hex[:8]}", "namespace": namespace}
        try:
            return self.cluster.create(PODS, made, dry_run=dry_run).metadata.name
        except (ApiError, Unavailable) as refused:
            return str(refused)

    def delete(self, namespace: str, name: str) -> None:
        """Delete a pod, at once."""
        self.cluster.delete(PODS, name, namespace, grace_s=0)

    def bind(self, namespace: str, name: str, node: str, placement: Obj) -> None:
        """Put a pod on a node, as Quotient's scheduler does."""
        uid = self.cluster.get(PODS, name, namespace).metadata.uid
        made = binding(name, namespace, node, uid, {NAMES.placement: json.dumps(placement)})
        who = (f"--as=system:serviceaccount:{SYSTEM}:quotient-scheduler", "--as-group=system:masters")
        where = f"/api/v1/namespaces/{namespace}/pods/{name}/binding"
        self.real.kubectl("create", "--raw", where, "-f-", *who, stdin=json.dumps(made))

    def status(self, namespace: str) -> Obj:
        """Read the status of a namespace's quotas; empty while there is none."""
        try:
            found = self.cluster.get(CONFIG_MAPS, QUOTA_STATUS, namespace)
        except ApiError:
            return {}
        (status,) = parse_documents(found.data[STATUS_KEY])
        return dict(status)

    def cores(self, namespace: str, line: str = "A100") -> tuple[int, int, int]:
        """Give hard, used and reserved cores of a line, as everybody sees them."""
        for quota in self.status(namespace).get("quotas", []):
            if line in quota["types"]:
                numbers = quota["types"][line]["cores"]
                return numbers["hard"], numbers["used"], numbers["reserved"]
        return 0, 0, 0

    def ledger(self, namespace: str) -> Ledger:
        """Read a ledger."""
        found = self.cluster.get(CONFIG_MAPS, LEDGER_PREFIX + namespace, SYSTEM)
        return decode_ledger(found.data[LEDGER_KEY])


@pytest.fixture(scope="module")
def held(
    request: pytest.FixtureRequest, shared_clusters: SharedClusters, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Held]:
    """Webhook and controller as processes, called by a real API server."""
    request.getfixturevalue("real_cluster_possible")
    real = shared_clusters.get(node=False)
    authority = Authority(tmp_path_factory.mktemp("quota") / "tls")
    folder = authority.folder.parent
    with run_controller(real, folder) as controller, RunningWebhook(authority, real.kubeconfig) as webhook:
        try:
            register(real, Configuration(), webhook.port, authority)
            yield Held(real, webhook, controller)
        finally:
            unregister(real)

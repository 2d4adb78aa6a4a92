"""A real cluster with webhook and controller as processes: all that quotas need."""

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


class QuotientCluster:
    """A real cluster in which Quotient enforces quotas, with shortcuts for tests."""

    def __init__(self, real: RealCluster, webhook: RunningWebhook, controller: RunningController) -> None:
        self.real, self.webhook, self.controller = real, webhook, controller
        self.cluster: ApiCluster = connect(str(real.kubeconfig))

    def namespace(self, quota: str = "") -> str:
        """Create a new namespace; with a quota, wait until it is in force."""
        name = new_namespace(self.cluster, f"t-{uuid.uuid4().hex[:8]}")
        if quota:
            self.apply_quota(name, quota)
            eventually(lambda: self.status(name), "the quota's status")
        return name

    def apply_quota(self, namespace: str, text: str, name: str = "gpu-quota", label: str = NAMES.quota_label) -> None:
        """Create or update a quota."""
        metadata = {"name": name, "namespace": namespace, "labels": {label: "true"}}
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"quota.yaml": text}}
        self.real.kubectl("apply", "-f-", stdin=json.dumps(config_map))

    def create(self, namespace: str, core: int, *models: str, dry_run: bool = False, **spec: Any) -> str:
        """Create a pod; returns its name, which starts with `p-`, or why it was refused."""
        annotations = {NAMES.use_models: ",".join(models)} if models else {}
        made = pod(gpu(core=str(core), memory="4"), annotations=annotations, **spec)
        made["metadata"] = {**made["metadata"], "name": f"p-{uuid.uuid4().hex[:8]}", "namespace": namespace}
        try:
            return self.cluster.create(PODS, made, dry_run=dry_run).metadata.name
        except (ApiError, Unavailable) as error:
            return str(error)

    def delete(self, namespace: str, name: str) -> None:
        """Delete a pod without a grace period."""
        self.cluster.delete(PODS, name, namespace, grace_s=0)

    def bind(self, namespace: str, name: str, node: str, placement: Obj) -> None:
        """Bind a pod to a node with a placement, as Quotient's scheduler does."""
        uid = self.cluster.get(PODS, name, namespace).metadata.uid
        made = binding(name, namespace, node, uid, {NAMES.placement: json.dumps(placement)})
        user = (f"--as=system:serviceaccount:{SYSTEM}:quotient-scheduler", "--as-group=system:masters")
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/binding"
        self.real.kubectl("create", "--raw", path, "-f-", *user, stdin=json.dumps(made))

    def status(self, namespace: str) -> Obj:
        """Return the content of `gpu-quota-status`; empty if it does not exist."""
        try:
            config_map = self.cluster.get(CONFIG_MAPS, QUOTA_STATUS, namespace)
        except ApiError:
            return {}
        (status,) = parse_documents(config_map.data[STATUS_KEY])
        return dict(status)

    def cores(self, namespace: str, line: str = "A100") -> tuple[int, int, int]:
        """Return hard, used and reserved cores of a line, from `gpu-quota-status`."""
        for quota in self.status(namespace).get("quotas", []):
            if line in quota["types"]:
                numbers = quota["types"][line]["cores"]
                return numbers["hard"], numbers["used"], numbers["reserved"]
        return 0, 0, 0

    def ledger(self, namespace: str) -> Ledger:
        config_map = self.cluster.get(CONFIG_MAPS, LEDGER_PREFIX + namespace, SYSTEM)
        return decode_ledger(config_map.data[LEDGER_KEY])


@pytest.fixture(scope="module")
def quotient(
    request: pytest.FixtureRequest, shared_clusters: SharedClusters, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[QuotientCluster]:
    """Webhook and controller as processes, called by a real API server."""
    request.getfixturevalue("real_cluster_possible")
    real = shared_clusters.get(node=False)
    authority = Authority(tmp_path_factory.mktemp("quota") / "tls")
    folder = authority.folder.parent
    # Refusals name workloads to API servers only.
    known = 'webhook.apiServerCidrs=["127.0.0.0/8"]'
    with run_controller(real, folder) as controller, RunningWebhook(authority, real.kubeconfig, known) as webhook:
        try:
            register(real, Configuration(), webhook.port, authority)
            yield QuotientCluster(real, webhook, controller)
        finally:
            unregister(real)

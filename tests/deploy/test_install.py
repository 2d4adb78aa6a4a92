"""Quotient installed by its chart on a real cluster, from installation to removal, while pods are being created."""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.api import connect
from cluster.errors import ApiError
from cluster.objects import CONFIG_MAPS, NODES, PODS, SECRETS
from deploy.render import CHART, MANIFESTS
from tests.background import Background
from tests.cluster.images import BUSYBOX
from tests.cluster.layout import NODE_NAME
from tests.cluster.objects import new_namespace
from tests.cluster.quotient import SYSTEM, VALUES, failure_policies, give_images, install_chart, is_armed, run_helm
from tests.cluster.real import ClusterError, RealCluster
from tests.cluster.supervisor import ROOT
from tests.deploy.node import check_node, prepare_node
from tests.deploy.permissions import (
    EVERYWHERE,
    OWN_NAMESPACE,
    documented_permissions,
    granted_permissions,
    impersonation_flags,
    role_permissions,
)
from tests.waiting import eventually
from tests.webhook.pods import NAMES
from vcuda.decision import Unavailable
from vcuda.inventory import Gpu, encode_inventory
from vcuda.names import CA_SECRET, LEAF_SECRET, SCHEDULER
from vcuda.placement_annotation import decode_placement

pytestmark = [pytest.mark.kubernetes, pytest.mark.node, pytest.mark.timeout(900)]
TEAM = "team"
GPU_NODE = "gpu-node"
QUOTA = "types: {A100: {cores: 100}}"
# Service accounts, with the roles of Kubernetes itself that are bound to them.
BUILT_IN_ROLES = {
    "quotient-webhook": (),
    "quotient-controller": (),
    "quotient-scheduler": ("system:kube-scheduler", "system:volume-scheduler"),
    "quotient-nodeplugin": (),
}
AUDIT_MODE = ('config.mode="audit"', "nodePlugin.enabled=false")

Obj = dict[str, Any]


def pod(core: int | None, name: str = "") -> Obj:
    limits = {NAMES.core: str(core), NAMES.memory: "4"} if core else {}
    container = {"name": "c", "image": BUSYBOX, "command": ["sleep", "1000"], "resources": {"limits": limits}}
    metadata: Obj = {"namespace": TEAM, "annotations": {NAMES.use_models: "A100"} if core else {}}
    metadata |= {"name": name} if name else {"generateName": "p-"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


class PodCreation(Background):
    """Creates pods with and without GPUs, as dry runs, and records every error."""

    def __init__(self, real: RealCluster) -> None:
        super().__init__()
        self._cluster = connect(str(real.kubeconfig))
        self.errors: Counter[str] = Counter()
        self.created: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._run, args=(name, core), daemon=True)
            for name, core in (("plain", None), ("gpu", 10))
        ]

    def _run(self, name: str, core: int | None) -> None:
        while not self._ending.wait(0.1):
            try:
                self._cluster.create(PODS, pod(core), dry_run=True)
                self.created[name] += 1
            except (ApiError, Unavailable) as error:
                self.errors[f"{name}: {error}"] += 1

    def wait_for_more(self) -> None:
        """Wait until more pods of each kind were created."""
        before = self.created.copy()
        eventually(lambda: all(self.created[name] > before[name] + 5 for name in ("plain", "gpu")), "more pods")


@pytest.fixture(scope="module")
def real(real_cluster_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    cluster = RealCluster.start(node=True)
    try:
        give_images(cluster, tmp_path_factory.mktemp("image"))
        new_namespace(connect(str(cluster.kubeconfig)), TEAM)
        yield cluster
    finally:
        cluster.stop()


def objects(real: RealCluster, *kinds: str) -> list[str]:
    """Return the names of Quotient's objects of some kinds, in all namespaces."""
    names = real.kubectl("get", *kinds, "-A", "-o", "name", "--ignore-not-found").splitlines()
    return [name for name in names if any(part in name for part in ("quotient", "ledger", "gpu-"))]


def stored_certificate(real: RealCluster) -> str:
    return connect(str(real.kubeconfig)).get(SECRETS, LEAF_SECRET, SYSTEM).data["tls.crt"]


def ca_bundle(real: RealCluster) -> str:
    path = "{.webhooks[0].clientConfig.caBundle}"
    return real.kubectl("get", "validatingwebhookconfiguration", "quotient", f"-o=jsonpath={path}")


def test_no_pod_is_held_up_from_installation_to_removal(real: RealCluster) -> None:  # noqa: PLR0915 - one sequence
    """Install, use, upgrade, roll back, rotate certificates, disarm, damage and remove, while pods are created."""
    cluster = connect(str(real.kubeconfig))
    existing = cluster.create(PODS, pod(30, "before"))  # a GPU pod from before the installation; never bound
    node, node_values = prepare_node(real)
    with PodCreation(real) as creation:
        creation.wait_for_more()
        install_chart(real, 'webhook={"replicas": 2}', *node_values)
        creation.wait_for_more()
        applied = real.kubectl("apply", "--dry-run=server", "--server-side", "--force-conflicts", "-f", str(MANIFESTS))
        assert "serverside-applied (server dry run)" in applied

        metadata = {"name": "gpu-quota", "namespace": TEAM, "labels": {NAMES.quota_label: "true"}}
        cluster.create(CONFIG_MAPS, {"metadata": metadata, "data": {"quota.yaml": QUOTA}})
        eventually(lambda: "hard: 100" in status(real), "the quota's status", 30)
        eventually(lambda: "used: 30" in status(real), "the existing pod to be charged", 30)
        eventually(
            lambda: "asked 80 cores (100 = one GPU) of A100 (as A100-SXM4-40GB); used 30" in refusal(cluster, 80),
            "the quota to be enforced",
            30,
        )

        before = pods_of(real, "webhook")
        values = (*VALUES, 'webhook={"replicas": 2}', 'config.log={"level": "debug"}', *node_values)
        run_helm(real, "upgrade", "quotient", str(CHART), "--wait", "--timeout", "3m", values=values)
        eventually(lambda: not before & pods_of(real, "webhook"), "the old replicas to be deleted", 60)
        assert is_armed(real), "the upgrade changed failurePolicy"
        cluster.create(PODS, pod(50, "fits"))
        wait_bound(cluster, "fits", NODE_NAME)
        assert doctor_problems(real) == {}
        assert quotient(real, "certs").returncode == 0
        check_permissions(real)
        check_bindings_of_other_schedulers(real)
        check_node(node)

        run_helm(real, "rollback", "quotient", "1", "--wait", "--timeout", "3m")
        assert is_armed(real)
        creation.wait_for_more()

        old_bundle, leaf = ca_bundle(real), stored_certificate(real)
        real.kubectl("annotate", "secret", CA_SECRET, "-n", SYSTEM, "quotient.dev/rotate=ca")
        eventually(lambda: stored_certificate(real) != leaf, "a certificate of the new CA", 60)
        # During the rotation the bundle holds both CAs.
        eventually(
            lambda: ca_bundle(real) != old_bundle and len(ca_bundle(real)) < 1.5 * len(old_bundle),
            "the old CA to be removed",
            90,
        )
        leaf = stored_certificate(real)
        assert quotient(real, "certs", "rotate", "--leaf").returncode == 0
        eventually(lambda: stored_certificate(real) != leaf, "another certificate of the same CA", 60)
        creation.wait_for_more()

        assert quotient(real, "disarm").returncode == 0
        assert not is_armed(real)
        assert list(doctor_problems(real)) == ["webhook configurations"]
        assert quotient(real, "arm").returncode == 0
        eventually(lambda: is_armed(real), "the webhooks to be armed again")
        assert not creation.errors
        remove_ca_bundles(real)
        eventually(lambda: is_armed(real), "the CA bundles to be restored")
        # Until then, the API server cannot verify the webhook's certificate.
        assert not {error for error in creation.errors if "x509" not in error}
        creation.errors.clear()

        real.kubectl("annotate", "node", NODE_NAME, f"{NAMES.cordon}=0")
        assert len(marks_on_node(real)) == 3
        run_helm(real, "uninstall", "quotient", "--wait")
        assert marks_on_node(real) == set()
        eventually(lambda: not left_behind(real), "all objects to be deleted", 90)
        creation.wait_for_more()
    assert not creation.errors
    assert cluster.get(PODS, "before", TEAM).metadata.uid == existing.metadata.uid
    for name in ("before", "fits"):
        cluster.delete(PODS, name, TEAM, grace_s=0)
    cluster.delete(CONFIG_MAPS, "gpu-quota", TEAM)


def marks_on_node(real: RealCluster) -> set[str]:
    """Return the annotations and labels of Quotient on the node."""
    metadata = json.loads(real.kubectl("get", "node", NODE_NAME, "-ojson"))["metadata"]
    present = {*metadata["annotations"], *metadata["labels"]}
    return present & {NAMES.inventory, NAMES.cordon, NAMES.model_label}


def test_no_pod_is_held_up_while_the_secret_in_the_path_comes_and_goes(real: RealCluster, tmp_path: Path) -> None:
    """Upgrade from a version without secrets, replace the secret, lose the controller and the path, and roll back."""
    small = ('webhook={"replicas": 2}', 'controller={"replicas": 1}', *AUDIT_MODE)
    config = {"certificates": {"settleS": 2}, "webhook": {"drainS": 3, "pathRotationS": 60}, "mode": "enforce"}
    values = (*VALUES, *small, "scheduler.enabled=false", f"config={json.dumps(config)}")
    upgrade = ("upgrade", "quotient", "--wait", "--timeout", "3m")
    run_helm(real, "install", "quotient", str(chart_without_secrets(tmp_path)), "--create-namespace", values=values)
    eventually(lambda: is_armed(real), "the webhooks to be armed", 120)
    with PodCreation(real) as creation:
        creation.wait_for_more()
        assert registered_paths(real) == ["/mutate", "/validate"]

        run_helm(real, *upgrade, str(CHART), values=values)
        eventually(lambda: has_secret(registered_paths(real)), "a secret in the path", 60)
        first = registered_paths(real)
        assert is_armed(real), "the upgrade changed failurePolicy"
        run_helm(real, *upgrade, str(CHART), values=(*values, 'config.log.level="debug"'))
        eventually(lambda: registered_paths(real) != first, "another secret", 120)
        assert has_secret(registered_paths(real))
        creation.wait_for_more()

        # Replicas that start while no controller runs learn the path from the API server.
        real.kubectl("scale", "deployment", "quotient-controller", "-n", SYSTEM, "--replicas=0")
        eventually(lambda: not pods_of(real, "controller"), "the controller to be gone", 60)
        second, before = registered_paths(real), pods_of(real, "webhook")
        real.kubectl("rollout", "restart", "deployment", "quotient-webhook", "-n", SYSTEM)
        eventually(lambda: not before & pods_of(real, "webhook"), "other replicas", 120)
        creation.wait_for_more()
        assert registered_paths(real) == second

        # An older path, as a rollback to an earlier release of this version writes it.
        write_paths(real, first)
        creation.wait_for_more()
        real.kubectl("scale", "deployment", "quotient-controller", "-n", SYSTEM, "--replicas=1")
        eventually(lambda: registered_paths(real) not in (first, second), "another secret", 60)
        assert has_secret(registered_paths(real))
        creation.wait_for_more()
        assert not creation.errors

        run_helm(real, "rollback", "quotient", "1", "--wait", "--timeout", "3m")
        eventually(lambda: is_armed(real), "the webhooks to be armed again", 60)
        assert registered_paths(real) == ["/mutate", "/validate"]
        creation.wait_for_more()
        text = logs(real)
        assert "webhook_path_step" in text
        assert not any(path.rpartition("/")[2] in text for path in (*first, *second)), "a secret was logged"
        run_helm(real, "uninstall", "quotient", "--wait")
        eventually(lambda: not left_behind(real), "all objects to be deleted", 90)
    assert not creation.errors


def chart_without_secrets(folder: Path) -> Path:
    """Return the chart as it was before there were secrets in paths: it renders plain ones, and marks no replica."""
    chart = Path(shutil.copytree(CHART, folder / "chart"))
    template = chart / "templates" / "registration.yaml"
    text = template.read_text()
    for kind, path in (("MutatingWebhookConfiguration", "/mutate"), ("ValidatingWebhookConfiguration", "/validate")):
        text = text.replace('{{- include "quotient.path" "' + kind + '" | nindent 6 }}', f"path: {path}")
    assert text.count("path: /") > 5
    template.write_text(text)
    template = chart / "templates" / "webhook.yaml"
    lines = template.read_text().splitlines()
    template.write_text("\n".join(line for line in lines if "quotient.dev/secret-paths" not in line))
    return chart


def registered_paths(real: RealCluster) -> list[str]:
    """Return the path of the mutating and of the validating webhooks."""
    paths = []
    for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
        shown = real.kubectl("get", kind, "quotient", "-o=jsonpath={.webhooks[*].clientConfig.service.path}").split()
        (path,) = set(shown)
        paths.append(path)
    return paths


def has_secret(paths: list[str]) -> bool:
    """Whether both paths have a secret, and the same one."""
    mutate, validate = paths
    return mutate.startswith("/mutate/") and validate == mutate.replace("/mutate/", "/validate/")


def write_paths(real: RealCluster, paths: list[str]) -> None:
    for kind, path in zip(("mutating", "validating"), paths, strict=True):
        configuration = json.loads(real.kubectl("get", f"{kind}webhookconfiguration", "quotient", "-o", "json"))
        for hook in configuration["webhooks"]:
            hook["clientConfig"]["service"]["path"] = path
        real.kubectl("replace", "-f-", stdin=json.dumps(configuration))


def remove_ca_bundles(real: RealCluster) -> None:
    """As `kubectl replace` with the chart's manifests does."""
    for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
        configuration = json.loads(real.kubectl("get", kind, "quotient", "-o", "json"))
        for hook in configuration["webhooks"]:
            del hook["clientConfig"]["caBundle"]
        real.kubectl("replace", "-f-", stdin=json.dumps(configuration))


def quotient(real: RealCluster, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line against the cluster, as an administrator."""
    command = [sys.executable, "-m", "console.main", "--set", f"cluster.kubeconfig={real.kubeconfig}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def doctor_problems(real: RealCluster) -> dict[str, str]:
    """Return the messages of all checks of `quotient doctor` that are not ok."""
    done = quotient(real, "doctor", "-o", "json")
    assert done.stdout, done.stderr
    return {each["check"]: each["message"] for each in json.loads(done.stdout) if each["level"] != "ok"}


def audit_then_enforce(real: RealCluster) -> None:
    """In audit mode nothing is rejected, until the quota of a namespace sets mode: enforce."""
    cluster = connect(str(real.kubeconfig))
    metadata = {"name": "gpu-quota", "namespace": TEAM, "labels": {NAMES.quota_label: "true"}}
    cluster.create(CONFIG_MAPS, {"metadata": metadata, "data": {"quota.yaml": "types: {A100: {cores: 10}}"}})
    eventually(lambda: "hard: 10" in status(real), "the quota's status", 30)
    assert refusal(cluster, 80) == ""
    enforced = {"data": {"quota.yaml": "types: {A100: {cores: 10}}\nmode: enforce"}}
    cluster.patch(CONFIG_MAPS, "gpu-quota", TEAM, enforced)
    eventually(lambda: "short by" in refusal(cluster, 80), "the namespace to be enforced", 30)
    cluster.delete(CONFIG_MAPS, "gpu-quota", TEAM)
    eventually(lambda: refusal(cluster, 80) == "", "the quota to be removed", 30)


def left_behind(real: RealCluster) -> list[str]:
    """Return the names of Quotient's remaining objects, except for quotas, which belong to the users."""
    kinds = "mutatingwebhookconfigurations,validatingwebhookconfigurations,validatingadmissionpolicies"
    kinds += ",validatingadmissionpolicybindings,clusterroles,clusterrolebindings,priorityclasses"
    namespaced = (
        "deployments,pods,services,secrets,configmaps,leases,roles,rolebindings,serviceaccounts,networkpolicies"
    )
    names = objects(real, kinds) + objects(real, f"{namespaced},poddisruptionbudgets,endpointslices")
    return [name for name in names if name != "configmap/gpu-quota"]


def status(real: RealCluster) -> str:
    return real.kubectl("get", "configmap", "gpu-quota-status", "-n", TEAM, "-o", "yaml", "--ignore-not-found")


def refusal(cluster: Any, core: int) -> str:
    try:
        cluster.create(PODS, pod(core), dry_run=True)
    except (ApiError, Unavailable) as error:
        return str(error)
    return ""


def pods_of(real: RealCluster, component: str) -> set[str]:
    names = real.kubectl("get", "pods", "-n", SYSTEM, "-l", f"app.kubernetes.io/component={component}", "-o", "name")
    return set(names.split())


@pytest.mark.parametrize(
    "first", [pytest.param("quotient-controller", marks=pytest.mark.long), "quotient-webhook", "namespace"]
)
def test_no_pod_is_held_up_when_quotient_is_deleted_by_hand(real: RealCluster, first: str) -> None:
    """In any order: webhook configurations never outlive the webhook with failurePolicy Fail."""
    _, node_values = prepare_node(real)
    install_chart(real, 'webhook={"replicas": 1}', 'controller={"replicas": 1}', AUDIT_MODE[0], *node_values)
    eventually(lambda: marks_on_node(real) == {NAMES.inventory, NAMES.model_label}, "the inventory", 60)
    audit_then_enforce(real)
    with PodCreation(real) as creation:
        creation.wait_for_more()
        if first == "namespace":
            real.kubectl("delete", "namespace", SYSTEM, "--wait=false")
        else:
            second = ({"quotient-controller", "quotient-webhook"} - {first}).pop()
            for name in (first, second, SCHEDULER):
                real.kubectl("delete", "deployment", name, "-n", SYSTEM)
                time.sleep(2)
        # The garbage collector deletes the pods while the controller writes: until that is done, a create may fail.
        eventually(lambda: not any("Fail" in each for each in failure_policies(real)), "failurePolicy Ignore")
        creation.wait_for_more()
        assert not {error for error in creation.errors if "no endpoints available" not in error}
        creation.errors.clear()
        remaining = set() if first == "namespace" else pods_of(real, "nodeplugin")
        eventually(lambda: set(objects(real, "pods")) == remaining, "the pods to be deleted", 60)
        creation.wait_for_more()
        if first == "namespace":
            configurations = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
            eventually(lambda: not objects(real, configurations), "the configurations to be deleted", 60)
            eventually(lambda: not marks_on_node(real), "the Node to be cleared")
    assert not creation.errors
    if first == "namespace":
        real.kubectl(
            "delete", "clusterroles,clusterrolebindings,priorityclasses", "-l", "app.kubernetes.io/name=quotient"
        )
        kinds = "validatingadmissionpolicies,validatingadmissionpolicybindings"
        real.kubectl("delete", kinds, "-l", "app.kubernetes.io/name=quotient")
        real.kubectl("delete", "rolebindings", "-n", "kube-system", "-l", "app.kubernetes.io/name=quotient")
        eventually(
            lambda: not real.kubectl("get", "namespace", SYSTEM, "--ignore-not-found"),
            "the namespace to be deleted",
            60,
        )
    else:
        run_helm(real, "uninstall", "quotient", "--wait")
    eventually(lambda: not left_behind(real), "all objects to be deleted", 90)


def test_the_scheduler_is_added_by_an_upgrade_and_outlasts_the_end_of_its_containers(real: RealCluster) -> None:
    """A pod that waited for it is bound; so are pods created while either container of the leader is dead."""
    cluster = connect(str(real.kubeconfig))
    add_gpu_node(cluster)
    small = ('webhook={"replicas": 1}', 'controller={"replicas": 1}', "nodePlugin.enabled=false")
    install_chart(real, *small, "scheduler.enabled=false")
    waiting = cluster.create(PODS, tolerant_pod("waiting"))
    assert (waiting.spec.scheduler_name, waiting.spec.node_name) == (SCHEDULER, None)
    upgrade = ("upgrade", "quotient", str(CHART), "--wait", "--timeout", "3m")
    with pytest.raises(ClusterError, match=r"v1\.99\.0 does not work with an API server of version v1"):
        run_helm(real, *upgrade, values=(*VALUES, *small, 'scheduler.kubeScheduler.tag="v1.99.0"'))
    run_helm(real, *upgrade, values=(*VALUES, *small))
    wait_bound(cluster, "waiting", GPU_NODE)
    replicas = pods_of(real, "scheduler")
    assert len(replicas) == len({leader(real)} | replicas) == 2
    assert active_replicas(real) == [leader(real)]
    for container in ("kube-scheduler", "extender"):
        killed = leader(real)
        real.kill_container(container_id(real, killed, container))
        cluster.create(PODS, tolerant_pod(f"without-{container}"))
        wait_bound(cluster, f"without-{container}", GPU_NODE)
        # Otherwise the next one to be killed may be the one that is still starting.
        real.kubectl("wait", "-n", SYSTEM, killed, "--for=condition=Ready", "--timeout=60s")
        assert pods_of(real, "scheduler") == replicas
    run_helm(real, "uninstall", "quotient", "--wait")
    for name in ("waiting", "without-kube-scheduler", "without-extender"):
        # The other tests, in any order, have a quota for this namespace.
        cluster.delete(PODS, name, TEAM, grace_s=0)
    cluster.delete(NODES, GPU_NODE, "")
    eventually(lambda: not left_behind(real), "all objects to be deleted", 90)


def add_gpu_node(cluster: Any) -> None:
    """Add a Node with the inventory of two GPUs. No kubelet runs it."""
    gpus = tuple(
        Gpu(uuid=f"GPU-{index}", index=index, model="A100-SXM4-40GB", memory_mib=40960, healthy=True)
        for index in range(2)
    )
    metadata = {"name": GPU_NODE, "annotations": {NAMES.inventory: encode_inventory(gpus)}}
    # Quotient's own pods must not be scheduled to it.
    taint = {"key": "no-kubelet", "effect": "NoSchedule"}
    cluster.create(NODES, {"metadata": metadata, "spec": {"taints": [taint]}})
    amounts = {"cpu": "32", "memory": "128Gi", "pods": "110", NAMES.core: "200", NAMES.memory: "320"}
    status = {"capacity": amounts, "allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]}
    cluster.patch(NODES, GPU_NODE, "", {"status": status}, subresource="status")


def tolerant_pod(name: str) -> Obj:
    """Return a GPU pod that can be scheduled to the node without a kubelet."""
    tolerant = pod(50, name)
    tolerant["spec"]["tolerations"] = [{"operator": "Exists"}]
    return tolerant


def wait_bound(cluster: Any, name: str, node: str) -> None:
    eventually(lambda: cluster.get(PODS, name, TEAM).spec.node_name, f"pod {name} to be bound", 60)
    bound = cluster.get(PODS, name, TEAM)
    assert bound.spec.node_name == node
    assert decode_placement(bound.metadata.annotations[NAMES.placement])


def leader(real: RealCluster) -> str:
    """Return the pod, as in pod/NAME, whose kube-scheduler holds the Lease."""
    path = "-o=jsonpath={.spec.holderIdentity}"
    return "pod/" + real.kubectl("get", "lease", SCHEDULER, "-n", SYSTEM, path).partition("_")[0]


def active_replicas(real: RealCluster) -> list[str]:
    """Ask every extender on its operations port whether it is active."""
    path = "/api/v1/namespaces/{}/pods/{}:8080/proxy/metrics"
    metrics = {
        name: real.kubectl("get", "--raw", path.format(SYSTEM, name.removeprefix("pod/")))
        for name in pods_of(real, "scheduler")
    }
    return [name for name, text in metrics.items() if "quotient_scheduler_active 1.0" in text]


def container_id(real: RealCluster, pod_name: str, container: str) -> str:
    path = f'-o=jsonpath={{.status.containerStatuses[?(@.name=="{container}")].containerID}}'
    return real.kubectl("get", "-n", SYSTEM, pod_name, path).removeprefix("containerd://")


def check_permissions(real: RealCluster) -> None:
    """Every account may do exactly what is documented, and what any service account may do."""
    default = granted_permissions(real, f"{TEAM}:default", TEAM)
    for account, roles in BUILT_IN_ROLES.items():
        everywhere = documented_permissions(account, EVERYWHERE)
        for role in roles:
            everywhere |= role_permissions(real, role) - default
        assert granted_permissions(real, f"{SYSTEM}:{account}", TEAM) - default == everywhere
        own_namespace = everywhere | documented_permissions(account, OWN_NAMESPACE)
        assert granted_permissions(real, f"{SYSTEM}:{account}", SYSTEM) - default == own_namespace
    for account, verb, kind, name in (
        ("quotient-webhook", "replace", "ConfigMap", "quotient"),
        ("quotient-controller", "replace", "ConfigMap", "quotient"),
        ("quotient-controller", "create", "Secret", "mine"),
        ("quotient-scheduler", "replace", "ConfigMap", "quotient"),
        ("quotient-scheduler", "create", "Lease", "mine"),
    ):
        api_version = "coordination.k8s.io/v1" if kind == "Lease" else "v1"
        obj = {"apiVersion": api_version, "kind": kind, "metadata": {"name": name, "namespace": SYSTEM}}
        flags = [*impersonation_flags(f"{SYSTEM}:{account}"), "--validate=false", "-f-"]
        assert f"{account} may only write" in real.kubectl(verb, *flags, stdin=json.dumps(obj), check=False)
    text = logs(real)
    assert "forbidden" not in text.lower(), text


def check_bindings_of_other_schedulers(real: RealCluster) -> None:
    """Another scheduler may bind pods without GPUs, but no GPU pods."""
    cluster = connect(str(real.kubeconfig))
    plain, gpu = pod(None, "plain"), pod(5, "gpu")
    plain["spec"]["schedulerName"] = "volcano"
    # So that Quotient's scheduler does not bind it.
    gpu["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "none"}
    for each in (plain, gpu):
        cluster.create(PODS, each)
    for name, message in (("plain", ""), ("gpu", "denied the request")):
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, "namespace": TEAM}}
        binding["target"] = {"apiVersion": "v1", "kind": "Node", "name": NODE_NAME}
        path = f"/api/v1/namespaces/{TEAM}/pods/{name}/binding"
        flags = ["--raw", path, "-f-", "--as=volcano", "--as-group=system:masters"]
        assert message in real.kubectl("create", *flags, stdin=json.dumps(binding), check=False)
    assert cluster.get(PODS, "plain", TEAM).spec.node_name == NODE_NAME
    assert not cluster.get(PODS, "gpu", TEAM).spec.node_name
    for name in ("plain", "gpu"):
        cluster.delete(PODS, name, TEAM, grace_s=0)


def logs(real: RealCluster) -> str:
    """Return the logs of all of Quotient's pods."""
    return "\n".join(real.kubectl("logs", "-n", SYSTEM, name, "--all-containers") for name in objects(real, "pods"))

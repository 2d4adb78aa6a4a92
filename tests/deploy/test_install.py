"""Quotient installed by its chart on a real cluster: its whole life, with pods being created all the while."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.api import connect
from cluster.errors import ApiError
from cluster.objects import CONFIG_MAPS, PODS, SECRETS
from deploy.render import CHART, MANIFESTS
from tests.background import Background
from tests.cluster.images import BUSYBOX
from tests.cluster.objects import new_namespace
from tests.cluster.quotient import SYSTEM, VALUES, give_image, install_chart, is_armed, run_helm
from tests.cluster.real import RealCluster
from tests.cluster.supervisor import ROOT
from tests.deploy.node import check_node, prepare_node
from tests.waiting import eventually
from tests.webhook.pods import NAMES
from vcuda.decision import Unavailable
from vcuda.names import CA_SECRET, LEAF_SECRET

pytestmark = [pytest.mark.kubernetes, pytest.mark.node, pytest.mark.timeout(900)]
TEAM = "team"
QUOTA = "types: {A100: {cores: 100}}"
COLUMNS = 7
LOOKING_ON = ('config.mode="audit"', "nodePlugin.enabled=false")

Obj = dict[str, Any]


def pod(core: int | None, name: str = "") -> Obj:
    limits = {NAMES.core: str(core), NAMES.memory: "4"} if core else {}
    container = {"name": "c", "image": BUSYBOX, "command": ["sleep", "1000"], "resources": {"limits": limits}}
    metadata: Obj = {"namespace": TEAM, "annotations": {NAMES.use_models: "A100"} if core else {}}
    metadata |= {"name": name} if name else {"generateName": "p-"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


class Creating(Background):
    """Creates pods all the time, with GPUs and without, each as a dry run; remembers whatever went wrong."""

    def __init__(self, real: RealCluster) -> None:
        super().__init__()
        self._cluster = connect(str(real.kubeconfig))
        self.wrong: Counter[str] = Counter()
        self.made: Counter[str] = Counter()
        self._threads = [
            threading.Thread(target=self._run, args=(name, core), daemon=True)
            for name, core in (("plain", None), ("gpu", 10))
        ]

    def _run(self, name: str, core: int | None) -> None:
        while not self._ending.wait(0.1):
            try:
                self._cluster.create(PODS, pod(core), dry_run=True)
                self.made[name] += 1
            except (ApiError, Unavailable) as refused:
                self.wrong[f"{name}: {refused}"] += 1

    def go_on(self) -> None:
        """Wait until some more of each were made."""
        before = self.made.copy()
        eventually(lambda: all(self.made[name] > before[name] + 5 for name in ("plain", "gpu")), "some pods")


@pytest.fixture(scope="module")
def real(real_cluster_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    made = RealCluster.start(node=True)
    try:
        give_image(made, tmp_path_factory.mktemp("image"))
        new_namespace(connect(str(made.kubeconfig)), TEAM)
        yield made
    finally:
        made.stop()


def objects(real: RealCluster, *what: str) -> list[str]:
    """Name the objects of some kinds that are Quotient's."""
    found = real.kubectl("get", *what, "-A", "-o", "name", "--ignore-not-found").splitlines()
    return [name for name in found if any(mark in name for mark in ("quotient", "ledger", "gpu-"))]


def served_until(real: RealCluster) -> str:
    """Give the certificate that is stored for serving."""
    return connect(str(real.kubeconfig)).get(SECRETS, LEAF_SECRET, SYSTEM).data["tls.crt"]


def bundle(real: RealCluster) -> str:
    path = "{.webhooks[0].clientConfig.caBundle}"
    return real.kubectl("get", "validatingwebhookconfiguration", "quotient", f"-o=jsonpath={path}")


def test_the_whole_life_of_an_installation(real: RealCluster) -> None:  # noqa: PLR0915 - it is long
    """Installed, used, upgraded, taken back, rotated, harmed, taken away; and nobody was held up at any point."""
    cluster = connect(str(real.kubeconfig))
    running = cluster.create(PODS, pod(30, "before"))  # a pod with GPUs that was there before; nobody binds it
    node, of_node = prepare_node(real)
    with Creating(real) as creating:
        creating.go_on()
        install_chart(real, 'webhook={"replicas": 2}', *of_node)
        creating.go_on()
        made = real.kubectl("apply", "--dry-run=server", "--server-side", "--force-conflicts", "-f", str(MANIFESTS))
        assert "serverside-applied (server dry run)" in made

        metadata = {"name": "gpu-quota", "namespace": TEAM, "labels": {NAMES.quota_label: "true"}}
        cluster.create(CONFIG_MAPS, {"metadata": metadata, "data": {"quota.yaml": QUOTA}})
        eventually(lambda: "hard: 100" in status(real), "the quota's status", 30)
        eventually(lambda: "used: 30" in status(real), "the adoption of what was there", 30)
        eventually(
            lambda: "asked 80 cores (100 = one GPU) of A100 (as A100-SXM4-40GB); used 30" in refusal(cluster, 80),
            "the quota",
            30,
        )

        before = pods_of(real, "webhook")
        values = (*VALUES, 'webhook={"replicas": 2}', 'config.log={"level": "debug"}', *of_node)
        run_helm(real, "upgrade", "quotient", str(CHART), "--wait", "--timeout", "3m", values=values)
        eventually(lambda: not before & pods_of(real, "webhook"), "the old replicas to go", 60)
        assert is_armed(real), "an upgrade disarms nothing"
        cluster.create(PODS, pod(60, "fits"))
        assert doctor(real) == {}, "all is well"
        assert quotient(real, "certs").returncode == 0
        check_rights(real)
        check_foreign_bindings(real)
        check_node(node)

        run_helm(real, "rollback", "quotient", "1", "--wait", "--timeout", "3m")
        assert is_armed(real)
        creating.go_on()

        trusted, leaf = bundle(real), served_until(real)
        real.kubectl("annotate", "secret", CA_SECRET, "-n", SYSTEM, "quotient.dev/rotate=ca")
        eventually(lambda: served_until(real) != leaf, "another certificate", 60)
        eventually(lambda: bundle(real) != trusted and len(bundle(real)) < 1.5 * len(trusted), "the old CA to go", 90)
        leaf = served_until(real)
        assert quotient(real, "certs", "rotate", "--leaf").returncode == 0
        eventually(lambda: served_until(real) != leaf, "another certificate of the same CA", 60)
        creating.go_on()

        assert quotient(real, "disarm").returncode == 0
        assert not is_armed(real)
        assert list(doctor(real)) == ["webhook configurations"]
        assert quotient(real, "arm").returncode == 0
        eventually(lambda: is_armed(real), "the end of the emergency")
        assert not creating.wrong
        wipe(real)
        eventually(lambda: is_armed(real), "what was wiped to come back")
        wrong = {each: count for each, count in creating.wrong.items() if "x509" not in each}
        assert not wrong, "between wiping and repair alone may calls fail"
        creating.wrong.clear()

        run_helm(real, "uninstall", "quotient", "--wait")
        eventually(lambda: not left_behind(real), "everything to go", 90)
        creating.go_on()
    assert not creating.wrong
    assert cluster.get(PODS, "before", TEAM).metadata.uid == running.metadata.uid
    cluster.delete(CONFIG_MAPS, "gpu-quota", TEAM)


def wipe(real: RealCluster) -> None:
    """Do what somebody does who replaces the configurations by what he has on file."""
    for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
        found = json.loads(real.kubectl("get", kind, "quotient", "-o", "json"))
        for hook in found["webhooks"]:
            del hook["clientConfig"]["caBundle"]
        real.kubectl("replace", "-f-", stdin=json.dumps(found))


def quotient(real: RealCluster, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line against the cluster, as an admin does."""
    command = [sys.executable, "-m", "console.main", "--set", f"cluster.kubeconfig={real.kubeconfig}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def doctor(real: RealCluster) -> dict[str, str]:
    """Give what the doctor finds that is not well."""
    done = quotient(real, "doctor", "-o", "json")
    assert done.stdout, done.stderr
    return {each["check"]: each["message"] for each in json.loads(done.stdout) if each["level"] != "ok"}


def look_on_then_enforce(real: RealCluster) -> None:
    """See that nothing is refused, until one namespace's quota says so."""
    cluster = connect(str(real.kubeconfig))
    metadata = {"name": "gpu-quota", "namespace": TEAM, "labels": {NAMES.quota_label: "true"}}
    cluster.create(CONFIG_MAPS, {"metadata": metadata, "data": {"quota.yaml": "types: {A100: {cores: 10}}"}})
    eventually(lambda: "hard: 10" in status(real), "the quota's status", 30)
    assert refusal(cluster, 80) == ""
    enforced = {"data": {"quota.yaml": "types: {A100: {cores: 10}}\nmode: enforce"}}
    cluster.patch(CONFIG_MAPS, "gpu-quota", TEAM, enforced)
    eventually(lambda: "short by" in refusal(cluster, 80), "the namespace to be enforced", 30)
    cluster.delete(CONFIG_MAPS, "gpu-quota", TEAM)
    eventually(lambda: refusal(cluster, 80) == "", "the end of it", 30)


def left_behind(real: RealCluster) -> list[str]:
    """Name whatever of Quotient is still there, but for quotas, which are people's own."""
    kinds = "mutatingwebhookconfigurations,validatingwebhookconfigurations,validatingadmissionpolicies"
    kinds += ",validatingadmissionpolicybindings,clusterroles,clusterrolebindings,priorityclasses"
    inside = "deployments,pods,services,secrets,configmaps,leases,roles,rolebindings,serviceaccounts,networkpolicies"
    found = objects(real, kinds) + objects(real, f"{inside},poddisruptionbudgets,endpointslices")
    return [name for name in found if name != "configmap/gpu-quota"]


def status(real: RealCluster) -> str:
    return real.kubectl("get", "configmap", "gpu-quota-status", "-n", TEAM, "-o", "yaml", "--ignore-not-found")


def refusal(cluster: Any, core: int) -> str:
    try:
        cluster.create(PODS, pod(core), dry_run=True)
    except (ApiError, Unavailable) as refused:
        return str(refused)
    return ""


def pods_of(real: RealCluster, component: str) -> set[str]:
    found = real.kubectl("get", "pods", "-n", SYSTEM, "-l", f"app.kubernetes.io/component={component}", "-o", "name")
    return set(found.split())


@pytest.mark.parametrize(
    "first", [pytest.param("quotient-controller", marks=pytest.mark.long), "quotient-webhook", "namespace"]
)
def test_no_configuration_is_left_without_its_server(real: RealCluster, first: str) -> None:
    """In whatever order Quotient is taken away by hand. It is installed as one that looks on."""
    install_chart(real, 'webhook={"replicas": 1}', 'controller={"replicas": 1}', *LOOKING_ON)
    look_on_then_enforce(real)
    with Creating(real) as creating:
        creating.go_on()
        if first == "namespace":
            real.kubectl("delete", "namespace", SYSTEM, "--wait=false")
        else:
            second = ({"quotient-controller", "quotient-webhook"} - {first}).pop()
            for name in (first, second):
                real.kubectl("delete", "deployment", name, "-n", SYSTEM)
                time.sleep(2)
        eventually(lambda: not objects(real, "pods"), "the pods to go", 60)
        creating.go_on()
        if first == "namespace":
            gone = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
            eventually(lambda: not objects(real, gone), "the configurations to go", 60)
    assert not creating.wrong
    if first == "namespace":
        real.kubectl(
            "delete", "clusterroles,clusterrolebindings,priorityclasses", "-l", "app.kubernetes.io/name=quotient"
        )
        kinds = "validatingadmissionpolicies,validatingadmissionpolicybindings"
        real.kubectl("delete", kinds, "-l", "app.kubernetes.io/name=quotient")
        eventually(
            lambda: not real.kubectl("get", "namespace", SYSTEM, "--ignore-not-found"), "the namespace to go", 60
        )
    else:
        run_helm(real, "uninstall", "quotient", "--wait")
    eventually(lambda: not left_behind(real), "everything to go", 90)


Right = tuple[str, str, str, str]


def documented(account: str, where: str) -> set[Right]:
    """Read the table of docs/rights.md, one right by one."""
    rights: set[Right] = set()
    for line in (ROOT / "docs" / "rights.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == COLUMNS and cells[0] == account and cells[1] == where:
            _, _, group, resources, names, verbs, _ = cells
            rights |= {
                (group, resource, name, verb)
                for resource in resources.split(", ")
                for name in names.split(", ")
                for verb in verbs.split(", ")
            }
    return rights


def acting_as(account: str) -> list[str]:
    """Tell kubectl to act as a service account, written as NAMESPACE:NAME."""
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{account.partition(':')[0]}", "system:authenticated"]
    return [f"--as=system:serviceaccount:{account}", *(f"--as-group={group}" for group in groups)]


def granted(real: RealCluster, account: str, namespace: str) -> set[Right]:
    """Ask the API server what an account may do in a namespace."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace},
    }
    flags = [*acting_as(account), "-o", "json", "--validate=false", "-f-"]
    answer = json.loads(real.kubectl("create", *flags, stdin=json.dumps(review)))
    return {
        (group, resource, name, verb)
        for rule in answer["status"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames") or [""]
        for verb in rule["verbs"]
    }


def check_rights(real: RealCluster) -> None:
    """No account may do more than is documented, nor less; what everybody may do, one without rights knows."""
    everybody = granted(real, f"{TEAM}:default", TEAM)
    for account in ("quotient-webhook", "quotient-controller", "quotient-nodeplugin"):
        everywhere = documented(account, "everywhere")
        assert granted(real, f"{SYSTEM}:{account}", TEAM) - everybody == everywhere
        inside = everywhere | documented(account, "own namespace")
        assert granted(real, f"{SYSTEM}:{account}", SYSTEM) - everybody == inside
    for account, kind, name in (
        ("quotient-webhook", "ConfigMap", "quotient"),
        ("quotient-controller", "ConfigMap", "quotient"),
        ("quotient-controller", "Secret", "mine"),
    ):
        made = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": SYSTEM}}
        verb = "replace" if name == "quotient" else "create"
        flags = [*acting_as(f"{SYSTEM}:{account}"), "--validate=false", "-f-"]
        assert "account writes" in real.kubectl(verb, *flags, stdin=json.dumps(made), check=False)
    told = logs(real)
    assert "forbidden" not in told.lower(), told


def check_foreign_bindings(real: RealCluster) -> None:
    """Another scheduler may bind pods without GPUs, and none with: the webhook can tell them apart."""
    cluster = connect(str(real.kubeconfig))
    plain = pod(None, "plain")
    plain["spec"]["schedulerName"] = "volcano"
    cluster.create(PODS, plain)
    for name, told in (("plain", ""), ("fits", "denied the request")):
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, "namespace": TEAM}}
        binding["target"] = {"apiVersion": "v1", "kind": "Node", "name": "node-1"}
        path = f"/api/v1/namespaces/{TEAM}/pods/{name}/binding"
        flags = ["--raw", path, "-f-", "--as=volcano", "--as-group=system:masters"]
        assert told in real.kubectl("create", *flags, stdin=json.dumps(binding), check=False)
    assert cluster.get(PODS, "plain", TEAM).spec.node_name == "node-1"
    assert not cluster.get(PODS, "fits", TEAM).spec.node_name
    cluster.delete(PODS, "plain", TEAM, grace_s=0)


def logs(real: RealCluster) -> str:
    """Read what all of Quotient's pods said."""
    return "\n".join(real.kubectl("logs", "-n", SYSTEM, name) for name in objects(real, "pods"))

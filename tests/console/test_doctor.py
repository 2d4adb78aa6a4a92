"""`quotient doctor`: what it finds, and that every problem has a remedy."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from cluster.events import EventRecorder
from cluster.in_memory import InMemoryCluster
from cluster.objects import (
    CONFIG_MAPS,
    DAEMON_SETS,
    DEPLOYMENTS,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    Kind,
    ObjectReference,
)
from console.check_results import OK
from console.doctor import CHECKS, run_check
from console.main import main
from console.scheduling_checks import compare_versions, image_tag
from controller.webhook_configurations import WEBHOOK_KINDS
from ledger.ledger_store import LedgerStore
from settings.configuration import Configuration, SchedulerSettings
from vcuda.inventory import Gpu, encode_inventory
from vcuda.ledger import Ledger, LedgerState, pack_uid
from vcuda.names import APP, APP_LABEL, NODE_PLUGIN, NVIDIA_GPU, NVIDIA_PRODUCT_LABEL, SCHEDULER, WEBHOOK, Names
from vcuda.namespace_policy import Mode
from vcuda.quota_usage import Charge
from vcuda.vocabulary import VocabularyOptions

SYSTEM, TEAM = "quotient-system", "team"
NAMES = Names()
ENFORCE, AUDIT = Configuration(), replace(Configuration(), mode=Mode.AUDIT)
Made = tuple[Kind[Any], dict[str, Any]]


def workload(kind: Kind[Any], name: str, images: Sequence[str] = (), status: dict[str, int] | None = None) -> Made:
    template = {"spec": {"containers": [{"name": f"c{i}", "image": image} for i, image in enumerate(images)]}}
    metadata = {"name": name, "namespace": SYSTEM}
    return kind, {"metadata": metadata, "spec": {"replicas": 2, "template": template}, "status": status or {}}


def lease(holder: str | None, age_s: float | None) -> Made:
    """A Lease; its age is counted when it is created, which may be minutes after the tests were collected."""
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, **({} if age_s is None else {"age_s": age_s})}
    return LEASES, {"metadata": {"name": SCHEDULER, "namespace": SYSTEM}, "spec": spec}


def with_renew_time(obj: dict[str, Any]) -> dict[str, Any]:
    spec = dict(obj["spec"])
    if (age_s := spec.pop("age_s", None)) is not None:
        spec["renewTime"] = (datetime.now(UTC) - timedelta(seconds=age_s)).isoformat()
    return obj | {"spec": spec}


def gpu(index: int, *, healthy: bool = True) -> Gpu:
    return Gpu(
        uuid=f"GPU-{index}", index=index, model="T4", memory_mib=15360, healthy=healthy, reason="" if healthy else "XID"
    )


def node(name: str = "n1", *, gpus: Sequence[Gpu] | None = None, cores: str = "0", product: str = "") -> Made:
    annotations = {} if gpus is None else {NAMES.inventory: encode_inventory(tuple(gpus))}
    metadata = {"name": name, "annotations": annotations, "labels": {NVIDIA_PRODUCT_LABEL: product} if product else {}}
    return NODES, {"metadata": metadata, "status": {"allocatable": {NAMES.core: cores}}}


def own_pod(name: str, restarts: int) -> Made:
    metadata = {"name": name, "namespace": SYSTEM, "labels": {APP_LABEL: APP}}
    last = {"terminated": {"exitCode": 1, "reason": "Error"}}
    statuses = [{"name": "main", "restartCount": restarts, "lastState": last}]
    spec = {"containers": [{"name": "main", "image": "i"}]}
    return PODS, {"metadata": metadata, "spec": spec, "status": {"phase": "Running", "containerStatuses": statuses}}


def make(*objects: Made) -> InMemoryCluster:
    cluster = InMemoryCluster()
    for name in (SYSTEM, TEAM):
        cluster.create(NAMESPACES, {"metadata": {"name": name}})
    for kind, obj in objects:
        cluster.create(kind, with_renew_time(obj) if kind is LEASES else obj)
        if kind is PODS:
            metadata = obj["metadata"]
            status = {"status": obj["status"]}
            cluster.patch(PODS, metadata["name"], metadata["namespace"], status, subresource="status")
    return cluster


def found(check: str, cluster: InMemoryCluster, configuration: Configuration = ENFORCE) -> list[tuple[str, str]]:
    """Level and message of all problems."""
    results = run_check(check, cluster, configuration)
    problems = [each for each in results if each.level != OK]
    assert all(each.remedy or each.message.startswith("and ") for each in problems), "a problem without a remedy"
    return [(each.level, each.message) for each in problems]


def webhook_configurations(path: str) -> list[Made]:
    service = {"namespace": SYSTEM, "name": WEBHOOK, "path": path}
    hook = {"name": "a.b.c", "clientConfig": {"service": service}, "failurePolicy": "Fail"}
    return [(kind, {"metadata": {"name": "quotient"}, "webhooks": [hook]}) for kind in WEBHOOK_KINDS]


PROBLEMS: dict[str, tuple[str, list[Made], list[tuple[str, str]]]] = {
    "a scheduler without a ready replica is an error": (
        "quotient's pods",
        [workload(DEPLOYMENTS, name, status={"readyReplicas": 2 * (name == WEBHOOK)}) for name in (WEBHOOK, SCHEDULER)],
        [
            ("error", "Deployment quotient-system/quotient-controller does not exist"),
            ("error", "quotient-scheduler: 0 of 2 ready"),
        ],
    ),
    "a path without a secret is known to everybody": (
        "webhook configurations",
        webhook_configurations("/mutate"),
        [
            ("warning", f"{kind}WebhookConfiguration: the webhook's path has no secret")
            for kind in ("Mutating", "Validating")
        ],
    ),
    "a path with a secret is fine": ("webhook configurations", webhook_configurations(f"/mutate/{'a' * 32}"), []),
    "a Lease that does not exist means that no scheduler leads": (
        "scheduler lease",
        [],
        [("error", "Lease quotient-system/quotient-scheduler does not exist: no scheduler leads")],
    ),
    "a Lease without a holder, too": (
        "scheduler lease",
        [lease(None, 1)],
        [("error", "Lease quotient-system/quotient-scheduler has no holder: no scheduler leads")],
    ),
    "a holder that does not renew its Lease is gone": (
        "scheduler lease",
        [lease("pod-1_x", 130)],
        [("error", "held by pod-1_x, but was not renewed for 2 min")],
    ),
    "a Lease that is renewed is held": ("scheduler lease", [lease("pod-1_x", 14)], []),
    "a kube-scheduler newer than the API server is an error": (
        "kube-scheduler",
        [workload(DEPLOYMENTS, SCHEDULER, ["quotient:1", "registry.k8s.io/kube-scheduler:v1.37.0"])],
        [("error", "kube-scheduler is v1.37.0, the API server v1.36.4: it must not be newer")],
    ),
    "a node plugin that is not ready on all nodes is a warning": (
        "node plugin",
        [workload(DAEMON_SETS, NODE_PLUGIN, status={"desiredNumberScheduled": 3, "numberReady": 2})],
        [("warning", "2 of 3 ready")],
    ),
    "a node plugin that is ready nowhere is an error": (
        "node plugin",
        [workload(DAEMON_SETS, NODE_PLUGIN, status={"desiredNumberScheduled": 3})],
        [("error", "0 of 3 ready")],
    ),
    "a node plugin that no node selects is a warning": (
        "node plugin",
        [workload(DAEMON_SETS, NODE_PLUGIN)],
        [("warning", "no node is selected to run it")],
    ),
    "a node plugin that is not installed is a warning": (
        "node plugin",
        [],
        [("warning", "DaemonSet quotient-system/quotient-nodeplugin does not exist")],
    ),
    "replicas of an older version are found": (
        "rollouts",
        [
            workload(DEPLOYMENTS, SCHEDULER, status={"replicas": 3, "updatedReplicas": 1}),
            workload(DAEMON_SETS, NODE_PLUGIN, status={"desiredNumberScheduled": 3, "updatedNumberScheduled": 2}),
        ],
        [
            ("warning", "quotient-scheduler: 2 replicas of an older version"),
            ("warning", "quotient-nodeplugin: 1 replica of an older version"),
        ],
    ),
    "pods that restart more than three times are found": (
        "restarts",
        [own_pod("a", 4), own_pod("b", 3)],
        [("warning", "a: main restarted 4 times, last with code 1 (Error)")],
    ),
    "a node plugin that finds no GPU is shown": (
        "gpu nodes",
        [node(gpus=[])],
        [("warning", "n1: the node plugin found no GPU")],
    ),
    "GPUs that the kubelet does not offer are shown": (
        "gpu nodes",
        [node(gpus=[gpu(0), gpu(1, healthy=False)])],
        [
            (
                "warning",
                "n1: its inventory has 2 GPUs, but allocatable inspur.com/vcuda-core is 0: the kubelet offers none",
            )
        ],
    ),
    "GPUs that are not offered because they are unhealthy are shown as such": (
        "gpu nodes",
        [node(gpus=[gpu(0, healthy=False)])],
        [("warning", "n1: none of its 1 GPU is healthy: XID")],
    ),
    "a node that is labelled with GPUs needs a node plugin": (
        "gpu nodes",
        [node(product="Tesla-T4")],
        [("warning", "n1: labelled with GPUs (T4), but no node plugin has published any")],
    ),
    "nodes that offer their GPUs, or have none, are in order": (
        "gpu nodes",
        [node(gpus=[gpu(0)], cores="100"), node("n2")],
        [],
    ),
    "the first of many nodes are listed": (
        "gpu nodes",
        [node(f"n{i}", gpus=[]) for i in range(7)],
        [
            *(("warning", f"n{i}: the node plugin found no GPU") for i in range(5)),
            ("warning", "and 2 more of this kind"),
        ],
    ),
}


@pytest.mark.parametrize(("check", "objects", "expected"), PROBLEMS.values(), ids=PROBLEMS.keys())
def test_problems_are_found(check: str, objects: list[Made], expected: list[tuple[str, str]]) -> None:
    assert found(check, make(*objects)) == expected


def test_a_missing_scheduler_matters_less_in_audit_mode() -> None:
    """There pods keep their own schedulers."""
    levels = [
        next(level for level, message in found("quotient's pods", make(), each) if SCHEDULER in message)
        for each in (ENFORCE, AUDIT)
    ]
    assert levels == ["error", "warning"]


def test_without_leader_election_there_is_no_lease_to_check() -> None:
    assert found("scheduler lease", make(), replace(ENFORCE, scheduler=SchedulerSettings(lease=""))) == []


@pytest.mark.parametrize(
    ("tag", "server", "level"),
    [
        ("v1.36.9", "v1.36.4", "ok"),
        ("v1.35.0", "v1.36.4", "ok"),
        ("v1.34.9", "v1.36.4", "warning"),
        ("v1.37.0", "v1.36.4", "error"),
        ("v1.36.1-custom", "v1.36+", "ok"),
        ("latest", "v1.36.4", "ok"),
    ],
)
def test_versions_of_kube_scheduler(tag: str, server: str, level: str) -> None:
    assert compare_versions(tag, server).level == level


@pytest.mark.parametrize(
    ("image", "tag"),
    [
        ("registry.k8s.io/kube-scheduler:v1.36.4", "v1.36.4"),
        ("registry:5000/kube-scheduler", ""),
        ("registry:5000/kube-scheduler:v1@sha256:abc", "v1"),
        ("kube-scheduler@sha256:abc", ""),
    ],
)
def test_tags_of_images(image: str, tag: str) -> None:
    assert image_tag(image) == tag


def pending(cluster: InMemoryCluster, name: str, **spec: Any) -> ObjectReference:
    body = {"containers": [{"name": "c", "image": "i"}], "schedulerName": SCHEDULER, **spec}
    made = cluster.create(PODS, {"metadata": {"name": name, "namespace": TEAM}, "spec": body})
    return ObjectReference(api_version="v1", kind="Pod", namespace=TEAM, name=name, uid=made.metadata.uid)


def test_pods_that_are_pending_for_long_are_listed_with_the_schedulers_message() -> None:
    """Not gated pods, nor those that were created just now; of other schedulers, and bound ones, only GPU pods."""
    now = datetime.now(UTC)
    cluster = InMemoryCluster(now=lambda: now - timedelta(minutes=5))
    cluster.create(NAMESPACES, {"metadata": {"name": TEAM}})
    told = pending(cluster, "told")
    EventRecorder(cluster, SCHEDULER).record(told, "InsufficientGPUs", "2 of 2 nodes: no T4", type_="Warning")
    blocked = pending(cluster, "blocked")
    condition = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available: 1 Insufficient cpu."}
    cluster.patch(PODS, blocked.name, TEAM, {"status": {"conditions": [condition]}}, subresource="status")
    pending(cluster, "gated", schedulingGates=[{"name": "g"}])
    pending(cluster, "foreign", schedulerName="default-scheduler")
    bound = pending(cluster, "bound")
    cluster.bind("bound", TEAM, "n1", uid=bound.uid, annotations={})
    container = {"name": "c", "image": "i", "resources": {"limits": {NAMES.core: "100", NAMES.memory: "1"}}}
    stuck = pending(cluster, "stuck", containers=[container], schedulerName="default-scheduler")
    assert found("pending pods", cluster)[1:2] == [
        ("warning", "team/stuck, for 5 min: no scheduler has reported anything")
    ]
    cluster.bind("stuck", TEAM, "n1", uid=stuck.uid, annotations={})
    waiting = {"name": "c", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
    cluster.patch(PODS, "stuck", TEAM, {"status": {"containerStatuses": [waiting]}}, subresource="status")
    assert found("pending pods", cluster) == [
        ("warning", "team/blocked, for 5 min: 0/1 nodes are available: 1 Insufficient cpu."),
        ("warning", "team/stuck, for 5 min: on node n1: ErrImagePull: no such image"),
        ("warning", "team/told, for 5 min: 2 of 2 nodes: no T4"),
    ]
    for number in range(5):
        pending(cluster, f"p{number}")
    assert found("pending pods", cluster)[-1] == ("warning", "and 3 more, not as old")
    fresh = make()
    pending(fresh, "fresh")
    assert found("pending pods", fresh) == []


def gpu_pod(name: str, namespace: str, phase: str = "Running", **limits: str) -> Made:
    container = {"name": "c", "image": "i", "resources": {"limits": limits}}
    spec = {"containers": [container], "nodeName": "n1"}
    return PODS, {"metadata": {"name": name, "namespace": namespace}, "spec": spec, "status": {"phase": phase}}


def test_pods_with_gpus_that_no_quota_counts_are_listed() -> None:
    """Those that no ledger has, and those that request GPUs by names which are not read."""
    ours = {NAMES.core: "100", NAMES.memory: "1"}
    cluster = make(
        gpu_pod("running", TEAM, **ours),
        gpu_pod("done", TEAM, "Succeeded", **ours),
        gpu_pod("own", SYSTEM, **ours),
        gpu_pod("nvidia", TEAM, **{NVIDIA_GPU: "1"}),
        gpu_pod("plain", TEAM, cpu="1"),
    )
    assert found("pods with gpus", cluster) == [
        ("warning", "not in any ledger: team/running"),
        ("warning", "GPUs under resource names that no quota counts: team/nvidia"),
    ]
    ledger = Ledger(namespace="uid", state=LedgerState.OPEN)
    uid = cluster.get(PODS, "running", TEAM).metadata.uid
    ledger.put(pack_uid(uid), Charge(model="A100", cores=100, memory_mib=0), None)
    LedgerStore(cluster, SYSTEM, list).create(TEAM, ledger)
    reads_nvidia = replace(ENFORCE, vocabularies=VocabularyOptions(nvidia_gpu=True))
    assert found("pods with gpus", cluster, reads_nvidia) == [("warning", "not in any ledger: team/nvidia")]
    cluster.patch(CONFIG_MAPS, f"ledger.{TEAM}", SYSTEM, {"data": {"ledger": "{"}})
    (level, message), *_ = found("pods with gpus", cluster)
    assert (level, message.partition(":")[0]) == ("error", "ledger quotient-system/ledger.team is not valid")


def test_the_command_runs_every_check_and_exits_with_1_on_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make(lease("pod-1_x", 1))
    for module in ("doctor", "certs"):
        monkeypatch.setattr(f"console.{module}.connect_cluster", lambda _: cluster)
    monkeypatch.setattr("console.main.configure_logs", lambda *_: None)
    done = CliRunner().invoke(main, ["doctor", "-o", "json"])
    assert done.exit_code == 1, done.output
    results = json.loads(done.output)
    assert {each["check"] for each in results} == set(CHECKS)
    assert {"level": "ok", "check": "scheduler lease", "message": "held by pod-1_x", "remedy": ""} in results
    assert "quotient-scheduler does not exist" in CliRunner().invoke(main, ["doctor"]).output

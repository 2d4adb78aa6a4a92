"""`quotient why`: the chain of decisions about a pod, and the next step."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from cluster.connection import default_namespace
from cluster.errors import Rejected
from cluster.events import EventRecorder
from cluster.in_memory import InMemoryCluster
from cluster.interface import EVERYTHING, Listing, Selector
from cluster.object_details import EventDetails, PodDetails
from cluster.objects import CONFIG_MAPS, DEPLOYMENTS, NAMESPACES, NODES, PODS, Kind, Node, Object, Pod
from cluster.objects import ObjectReference as Reference
from console.main import main
from console.quota_status_view import read_status
from console.why_advice import OTHER_GPU_ADVICE
from console.why_facts import PodFacts
from console.why_next import next_step
from console.why_pod import explain_pod
from console.why_workload import MissingPodFacts, WorkloadFacts, explain_missing_pod, explain_workload, workload_kind
from vcuda.decoding import convert
from vcuda.fit_query import FitQuery
from vcuda.fit_summary import describe_problem
from vcuda.inventory import Gpu, encode_inventory
from vcuda.limits import ContainerLimits, LimitSource, PodLimits, encode_limits
from vcuda.names import CONTROLLER, SCHEDULER, WEBHOOK, Names
from vcuda.node_problem import NodeProblem
from vcuda.placement_annotation import GpuSlice, encode_placement
from vcuda.pod_options import PodOptions
from vcuda.request import ContainerRequest, PodRequest, Role
from vcuda.scheme import build_scheme
from vcuda.view_fit import BestFree
from vcuda.vocabulary import Share

T = TypeVar("T", bound=Object)

NAMES, SCHEME = Names(), build_scheme()
TEAM = "team"
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
BOUND = {"nodeName": "n1"}
HALF = ContainerLimits(cores=50, core_limit=50, limit_source=LimitSource.DEFAULT, memory_mib=7680)
PLACEMENT = {NAMES.placement: encode_placement({"main": [GpuSlice("GPU-1", 50, 7680)]})}
QUOTA = """
v: 1
mode: enforce
quotas:
- name: team/gpu-quota
  types:
    A100:
      cores: {hard: 400, used: 350, reserved: 25, free: 25}
      memoryMiB: {hard: 90000, used: 10, reserved: 0, free: 89990}
    T4: {cores: {hard: 100, used: 0, reserved: 0, free: 100}}
waiting:
- {name: late, reason: "team/gpu-quota: types.A100.cores: '50': exceeded quota: short by 25"}
"""


def ago(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def limits_annotation(limits: ContainerLimits = HALF, models: tuple[str, ...] = ("A100",)) -> dict[str, str]:
    return {NAMES.limits: encode_limits(PodLimits(v=1, models=models, containers={"main": limits}))}


def raw_pod(
    name: str = "train-0",
    *,
    cores: int = 50,
    spec: dict[str, Any] | None = None,
    status: dict[str, Any] | None = None,
    annotations: dict[str, str] | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    """A pod as the webhook admitted it, 4 minutes ago."""
    amounts = {NAMES.core: str(cores), NAMES.memory: "30"} if cores else {}
    container = {"name": "main", "image": "i", "resources": {"limits": amounts, "requests": amounts}}
    return {
        "metadata": {
            "name": name,
            "namespace": TEAM,
            "uid": "u",
            "creationTimestamp": ago(240),
            "annotations": limits_annotation() if annotations is None else annotations,
            **metadata,
        },
        "spec": {"containers": [container], "schedulerName": SCHEDULER, **(spec or {})},
        "status": {"phase": "Pending", **(status or {})},
    }


def event(reason: str, message: str, component: str = SCHEDULER, *, age_s: int = 120, **fields: Any) -> EventDetails:
    raw = {"reason": reason, "message": message, "source": {"component": component}, "lastTimestamp": ago(age_s)}
    return convert({"type": "Warning", **raw, **fields}, EventDetails)


def failed_scheduling(message: str) -> EventDetails:
    """As kube-scheduler writes it: by the newer API, with the name of its profile."""
    times: dict[str, Any] = {
        "eventTime": ago(200),
        "series": {"count": 3, "lastObservedTime": ago(30)},
        "lastTimestamp": None,
    }
    return event("FailedScheduling", message, "", reportingComponent=SCHEDULER, **times)


def node(*, ready: str = "True", healthy: bool = True) -> Node:
    gpu = Gpu(
        uuid="GPU-1",
        index=3,
        model="A100-SXM4-40GB",
        memory_mib=40960,
        healthy=healthy,
        reason="" if healthy else "XID 79",
    )
    metadata = {"name": "n1", "annotations": {NAMES.inventory: encode_inventory((gpu,))}}
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": ago(600)}
    return convert({"metadata": metadata, "status": {"conditions": [condition]}}, Node)


def facts(pod: dict[str, Any], *events: EventDetails, **changes: Any) -> PodFacts:
    return PodFacts(pod=convert(pod, PodDetails), now=NOW, scheme=SCHEME, events=events, **changes)


def container_status(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "main", **state}]}


FIT = "6 of 8 nodes: no A100; 2 of 8: no GPU with 12 GiB free, the best has 10 GiB"
# As kube-scheduler 1.36 ends its messages.
PREEMPTION = ". no new claims to deallocate, preemption: 0/3 nodes are available: 3 Preemption is not helpful."
KUBELET_REFUSAL = "Allocate failed due to rpc error: desc = Quotient: pod team/train-0, container main: no card"
PENDING = "pod team/train-0: Pending for 4 min"
ASKED = (
    "1. asked    container main: 50 cores, 7680 MiB of one GPU; models: A100",
    "2. charged  namespace team has no GPU quota: nothing is limited",
)
# The column is as wide as its longest word.
ASKED_WIDE = tuple(line[:11] + " " + line[11:] for line in ASKED)
EXPLAINED: dict[str, tuple[PodFacts, list[str]]] = {
    "a pod that fits nowhere is told the numbers of the scheduler": (
        facts(raw_pod(), event("InsufficientGPUs", FIT), quota_status=read_status(QUOTA)),
        [
            PENDING,
            "1. asked    container main: 50 cores, 7680 MiB of one GPU; models: A100",
            (
                "2. charged  50 cores, 7680 MiB of A100 to the quota of the namespace "
                "(A100: 350 used and 25 reserved of 400 cores, 10 used of 90000 MiB)"
            ),
            f"3. placing  {FIT}   (2 min ago, quotient-scheduler)",
            "next: wait until a pod that uses an A100 ends, or ask for less memory (vcuda-memory)",
        ],
    ),
    "the last of several reports counts": (
        facts(raw_pod(), event("InsufficientGPUs", "old", age_s=99), event("InsufficientGPUs", "no A100", age_s=9)),
        [
            PENDING,
            *ASKED,
            "3. placing  no A100   (9 s ago, quotient-scheduler)",
            "next: allow models that the cluster has (annotation use-gputype), or wait for a node with an A100",
        ],
    ),
    "a pod without a charge is told why, once": (
        facts(raw_pod("late"), event("NotCharged", "not charged yet"), quota_status=read_status(QUOTA)),
        [
            "pod team/late: Pending for 4 min",
            "1. asked    container main: 50 cores, 7680 MiB of one GPU; models: A100",
            (
                "2. charged  not yet: team/gpu-quota: types.A100.cores: '50': exceeded quota: short by 25   "
                "(quotient-controller)"
            ),
            "next: wait until pods of the namespace end, or have an administrator raise the quota",
        ],
    ),
    "without the status, the scheduler's event says that the pod is not charged": (
        facts(
            raw_pod(),
            event("NotCharged", "the pod is not charged to the GPU quota of its namespace yet"),
            unread={"quota": "configmaps is forbidden"},
        ),
        [
            PENDING,
            "1. asked    container main: 50 cores, 7680 MiB of one GPU; models: A100",
            (
                "2. charged  not yet: the pod is not charged to the GPU quota of its namespace yet   "
                "(2 min ago, quotient-scheduler)"
            ),
            "3. unknown  quota could not be read: configmaps is forbidden",
            (
                "next: wait some seconds: the controller charges the pod; if it does not, run `quotient "
                "doctor` as an administrator"
            ),
        ],
    ),
    "the controller's event counts like the scheduler's": (
        facts(raw_pod(), event("QuotaExceeded", "not scheduled: exceeded quota: short by 1", CONTROLLER)),
        [
            PENDING,
            "1. asked    container main: 50 cores, 7680 MiB of one GPU; models: A100",
            "2. charged  not yet: not scheduled: exceeded quota: short by 1   (2 min ago, quotient-controller)",
            "next: wait until pods of the namespace end, or have an administrator raise the quota",
        ],
    ),
    "other filters of kube-scheduler are shown beside the extender's": (
        facts(
            raw_pod(),
            event("InsufficientGPUs", "2 of 2 nodes: no unused GPU"),
            failed_scheduling(f"0/3 nodes are available: 1 Insufficient cpu, 2 not enough unused GPUs{PREEMPTION}"),
        ),
        [
            PENDING,
            *ASKED,
            "3. placing  2 of 2 nodes: no unused GPU   (2 min ago, quotient-scheduler)",
            (
                "4. placing  0/3 nodes are available: 1 Insufficient cpu, 2 not enough unused GPUs.   "
                "(30 s ago, kube-scheduler)"
            ),
            "next: wait until the pods on whole GPUs of an A100 end, or ask for part of a GPU",
        ],
    ),
    "the extender's problems are not repeated in kube-scheduler's words": (
        facts(
            raw_pod(),
            event("InsufficientGPUs", "2 of 2 nodes: no unused GPU"),
            failed_scheduling(f"0/2 nodes are available: 2 not enough unused GPUs{PREEMPTION}"),
        ),
        [
            PENDING,
            *ASKED,
            "3. placing  2 of 2 nodes: no unused GPU   (2 min ago, quotient-scheduler)",
            "next: wait until the pods on whole GPUs of an A100 end, or ask for part of a GPU",
        ],
    ),
    "the condition tells what kube-scheduler found after its events have expired": (
        facts(
            raw_pod(
                status={
                    "conditions": [
                        {
                            "type": "PodScheduled",
                            "status": "False",
                            "reason": "Unschedulable",
                            "message": "0/1 nodes are available: 1 node(s) had untolerated taint(s).",
                        }
                    ]
                }
            )
        ),
        [
            PENDING,
            *ASKED,
            "3. placing  0/1 nodes are available: 1 node(s) had untolerated taint(s).   (kube-scheduler)",
            "next: add a toleration for the taint to the pod, or remove the taint",
        ],
    ),
    "an extender that does not answer is not taken for missing GPUs": (
        facts(raw_pod(), failed_scheduling('Post "http://localhost/scheduler/filter": connection refused')),
        [
            PENDING,
            *ASKED,
            '3. placing  Post "http://localhost/scheduler/filter": connection refused   (30 s ago, kube-scheduler)',
            "next: Quotient's extender does not answer kube-scheduler: run `quotient doctor` as an administrator",
        ],
    ),
    "a pod that no scheduler has seen points at the scheduler": (
        facts(raw_pod()),
        [
            PENDING,
            *ASKED,
            "3. placing  no scheduler has reported anything; schedulerName is quotient-scheduler",
            (
                "next: wait some seconds; if nothing is reported, check that Quotient's scheduler runs: run `quotient "
                "doctor` as an administrator"
            ),
        ],
    ),
    "a pod of another scheduler is not Quotient's to place": (
        facts(raw_pod(spec={"schedulerName": "default-scheduler"}, annotations={})),
        [
            PENDING,
            "1. asked      container main: 50 cores, 7680 MiB of one GPU; models: any",
            "2. admitted   not by Quotient's webhook: created before it, in audit mode, or while disarmed",
            "3. charged    namespace team has no GPU quota: nothing is limited",
            "4. scheduler  schedulerName is default-scheduler: Quotient's scheduler does not place this pod",
            "5. placing    no scheduler has reported anything; schedulerName is default-scheduler",
            "next: check that the scheduler default-scheduler runs",
        ],
    ),
    "a scheduling gate comes before every scheduler": (
        facts(raw_pod(spec={"schedulingGates": [{"name": "example/wait"}]})),
        [
            PENDING,
            *ASKED,
            "3. gated    no scheduler considers the pod: gate example/wait",
            "next: the component that set gate example/wait has to remove it from spec.schedulingGates",
        ],
    ),
    "a pod without GPUs is not Quotient's": (
        facts(raw_pod(cores=0, annotations={}, spec={"schedulerName": "default-scheduler"})),
        [
            PENDING,
            "1. asked    no GPU: Quotient decides nothing about this pod",
            "2. placing  no scheduler has reported anything; schedulerName is default-scheduler",
            "next: check that the scheduler default-scheduler runs",
        ],
    ),
    "a placed pod names its GPUs by index and model": (
        facts(raw_pod(spec=BOUND, annotations=limits_annotation() | PLACEMENT), node=node()),
        [
            PENDING,
            *ASKED_WIDE,
            "3. placed    node n1: container main: GPU 3 (A100-SXM4-40GB) 50 cores, 7680 MiB",
            "4. starting  the kubelet has not started the containers yet",
            "next: kubectl describe pod train-0 -n team if it does not start within a minute",
        ],
    ),
    "a tenant who may not read nodes sees UUIDs": (
        facts(
            raw_pod(
                spec=BOUND,
                annotations=limits_annotation() | PLACEMENT,
                status=container_status(state={"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}),
            ),
            event("Failed", "Failed to pull image", "kubelet", age_s=5),
            unread={"node": 'nodes "n1" is forbidden'},
        ),
        [
            PENDING,
            *ASKED_WIDE,
            "3. placed    node n1: container main: GPU-1 50 cores, 7680 MiB",
            "4. starting  container main waits: ImagePullBackOff: no such image",
            "5. kubelet   Failed: Failed to pull image   (5 s ago, kubelet)",
            '6. unknown   node could not be read: nodes "n1" is forbidden',
            "next: check the image's name and the pull secret",
        ],
    ),
    "a refusal of the node plugin at a container's start is what to follow": (
        facts(
            raw_pod(
                spec=BOUND,
                status=container_status(
                    state={"waiting": {"reason": "CreateContainerConfigError", "message": "x: Quotient: wait\x1b[2J"}}
                ),
            ),
            node=node(),
        ),
        [
            PENDING,
            *ASKED_WIDE,
            "3. placed    node n1: the scheduler chose no GPUs; the node plugin does when the containers start",
            "4. starting  container main waits: CreateContainerConfigError: x: Quotient: wait [2J",
            "next: do what the node plugin says: wait [2J",
        ],
    ),
    "a running pod needs nothing": (
        facts(
            raw_pod(
                cores=200,
                spec=BOUND,
                annotations=limits_annotation(replace(HALF, cores=200, memory_mib=None, memory_percent=100), ()),
                status={"phase": "Running", "startTime": ago(7300)},
            ),
            node=node(),
            quota_status={"mode": "audit", "quotas": []},
        ),
        [
            "pod team/train-0: Running for 2 h",
            "1. asked    container main: 2 whole GPUs; models: any",
            "2. charged  200 cores to the quota of the namespace, in audit mode",
            "3. placed   node n1: the scheduler chose no GPUs; the node plugin does when the containers start",
            "4. running  all containers run",
            "next: nothing to do",
        ],
    ),
    "a running pod whose GPU became unhealthy has to move": (
        facts(
            raw_pod(spec=BOUND, annotations=limits_annotation() | PLACEMENT, status={"phase": "Running"}),
            node=node(healthy=False),
        ),
        [
            "pod team/train-0: Running",
            *ASKED,
            "3. placed   node n1: container main: GPU 3 (A100-SXM4-40GB) 50 cores, 7680 MiB",
            "4. node     GPU 3 of n1: XID 79",
            "5. running  all containers run",
            "next: GPU 3 of n1: XID 79: if it does not recover, delete the pod; its controller creates it again",
        ],
    ),
    "a container that is restarted again and again says how it ended": (
        facts(
            raw_pod(
                spec=BOUND,
                status={
                    "phase": "Running",
                    **container_status(
                        restartCount=4,
                        state={"running": {"startedAt": ago(5)}},
                        lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
                    ),
                },
            ),
            node=node(),
        ),
        [
            "pod team/train-0: Running",
            "1. asked       container main: 50 cores, 7680 MiB of one GPU; models: A100",
            "2. charged     namespace team has no GPU quota: nothing is limited",
            "3. placed      node n1: the scheduler chose no GPUs; the node plugin does when the containers start",
            "4. containers  container main was restarted 4 times; it ended with code 137 (OOMKilled)",
            "next: raise the container's memory limit (main memory, not vcuda-memory)",
        ],
    ),
    "a pod that the kubelet rejected has to be replaced": (
        facts(
            raw_pod(
                spec=BOUND,
                status={"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": KUBELET_REFUSAL},
            ),
            node=node(),
        ),
        [
            "pod team/train-0: Failed (UnexpectedAdmissionError)",
            "1. asked   container main: 50 cores, 7680 MiB of one GPU; models: A100",
            "2. placed  node n1: the scheduler chose no GPUs; the node plugin does when the containers start",
            f"3. ended   UnexpectedAdmissionError: {KUBELET_REFUSAL}",
            "next: do what the node plugin says; a pod that the kubelet rejected is not started again, only a new one",
        ],
    ),
    "a pod that has ended tells when and how": (
        facts(
            raw_pod(
                spec=BOUND,
                status={
                    "phase": "Failed",
                    **container_status(state={"terminated": {"exitCode": 1, "reason": "Error", "finishedAt": ago(60)}}),
                },
            )
        ),
        [
            "pod team/train-0: Failed 60 s ago",
            "1. asked   container main: 50 cores, 7680 MiB of one GPU; models: A100",
            "2. placed  node n1: the scheduler chose no GPUs; the node plugin does when the containers start",
            "3. ended   container main: code 1 (Error)",
            "next: see its output: kubectl logs train-0 -n team --all-containers",
        ],
    ),
    "a pod on a lost node cannot be deleted by waiting": (
        facts(
            raw_pod(spec=BOUND, status={"phase": "Running", "startTime": ago(300)}, deletionTimestamp=ago(180)),
            node=node(ready="Unknown"),
        ),
        [
            "pod team/train-0: Running for 4 min, being deleted",
            *ASKED_WIDE,
            "3. placed    node n1: the scheduler chose no GPUs; the node plugin does when the containers start",
            "4. node      n1 is not ready since 10 min",
            "5. deleting  its grace period ended 3 min ago; it counts against the quota until it is gone",
            "next: n1 is not ready since 10 min: if the node is lost for good, delete the Node object",
        ],
    ),
}


@pytest.mark.parametrize(("known", "expected"), EXPLAINED.values(), ids=EXPLAINED.keys())
def test_the_chain_of_a_pod(known: PodFacts, expected: list[str]) -> None:
    assert explain_pod(known).lines() == expected


OPTIONS = PodOptions(models=("A100",), uuids=("GPU-1",))
QUERY = FitQuery(
    PodRequest((ContainerRequest("main", Role.APP, Share(50, 30), "v"),)), 256, OPTIONS, pools=("training",)
)
WHOLE = replace(QUERY, request=PodRequest((ContainerRequest("main", Role.APP, Share(400), "v"),)))
MISSING_MODEL = OTHER_GPU_ADVICE.format(models="an A100")
# Part of the advice for each problem that Quotient's scheduler reports.
ADVICE = {
    NodeProblem.NODE_UNKNOWN: "the node is new",
    NodeProblem.NO_GPUS: "no node has GPUs",
    NodeProblem.POOL: "ask an administrator for a node pool",
    NodeProblem.MODEL: MISSING_MODEL,
    NodeProblem.QUOTA: "name models that the quota grants",
    NodeProblem.UUID: "use-gpuuuid",
    NodeProblem.UNAVAILABLE: "wait until the GPUs recover",
    NodeProblem.ISOLATION: "min-isolation",
    NodeProblem.TOO_FEW: "ask for fewer GPUs per pod",
    NodeProblem.TOO_SMALL: "ask for less memory (vcuda-memory), or allow larger models",
    NodeProblem.MEMBERS: "spread-members",
    NodeProblem.IN_USE: "wait until the pods on whole GPUs",
    NodeProblem.MEMORY: "ends, or ask for less memory",
    NodeProblem.CORES: "ends, or ask for fewer cores",
    NodeProblem.CORES_AND_MEMORY: "ends, or ask for less (",
    NodeProblem.COMBINATION: "give containers less each",
    NodeProblem.NOT_SEARCHED: "tries a part of the nodes",
    NodeProblem.HOST: "ask for less CPU and memory of the node",
    NodeProblem.UNCHARGED: "the controller charges the pod",
}


@pytest.mark.parametrize("problem", [each for each in NodeProblem if each], ids=lambda each: each.name)
def test_every_problem_of_the_scheduler_has_an_advice(problem: NodeProblem) -> None:
    """The advice follows from the texts of the scheduler, so a text that changes must change here, too."""
    query = WHOLE if problem in (NodeProblem.TOO_FEW, NodeProblem.IN_USE) else QUERY
    text = describe_problem(problem, query, BestFree(mib=100, cores=10, unused=1), {})
    assert ADVICE[problem] in next_step(facts(raw_pod(), event("InsufficientGPUs", f"2 of 2 nodes: {text}")))


def owner_event(
    kind: str, name: str, message: str = "denied", component: str = WEBHOOK, age_s: int = 9
) -> EventDetails:
    return event("FailedCreate", message, component, age_s=age_s, involvedObject={"kind": kind, "name": name})


def test_a_missing_pod_shows_why_its_owner_could_not_create_it() -> None:
    refusals = (
        owner_event("Job", "train", "exceeded quota: short by 25"),
        owner_event("Job", "training-2"),
        owner_event("ReplicaSet", "other-5d9", age_s=1),
    )
    known = MissingPodFacts(name="train-x7k2p", namespace=TEAM, now=NOW, refusals=refusals)
    explanation = explain_missing_pod(known)
    assert explanation.lines() == [
        "pod team/train-x7k2p: does not exist",
        "1. refused  Job/train: exceeded quota: short by 25   (9 s ago, quotient-webhook)",
        "next: do what the refusal says; Job/train creates the pod again by itself",
    ]
    assert not explanation.found
    nothing = explain_missing_pod(replace(known, refusals=(), events=(event("Killing", "Stopping", "kubelet"),)))
    assert nothing.lines()[1] == "1. existed  last event, Killing: Stopping   (2 min ago, kubelet)"
    assert nothing.next.startswith("check name and namespace: kubectl get pods -n team")


WORKLOADS: dict[str, tuple[tuple[EventDetails, ...], tuple[str, ...], str]] = {
    "a refusal on its ReplicaSet is its own": (
        (owner_event("ReplicaSet", "train-5d9"),),
        (),
        "do what the refusal says; ReplicaSet/train-5d9 creates the pod again by itself",
    ),
    "a refusal of a workload whose name begins alike is not": (
        (owner_event("ReplicaSet", "train-large-5d9"), owner_event("Job", "train")),
        (),
        "kubectl describe deployment train -n team",
    ),
    "a pod that waits is the next to ask about": ((), ("Running", "Pending"), "quotient why train-1 -n team"),
    "pods that run need nothing": (
        (),
        ("Running",),
        "nothing to do: no pod waits, and none was refused within the time that events are kept",
    ),
}


@pytest.mark.parametrize(("refusals", "phases", "expected"), WORKLOADS.values(), ids=WORKLOADS.keys())
def test_the_next_step_for_a_workload(
    refusals: tuple[EventDetails, ...], phases: tuple[str, ...], expected: str
) -> None:
    kind = workload_kind("deploy")
    assert kind is not None
    own = [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "train-5d9", "uid": "r", "controller": True}]
    pods = [
        convert(raw_pod(f"train-{i}", status={"phase": phase}, ownerReferences=own), PodDetails)
        for i, phase in enumerate(phases)
    ]
    pods.append(convert(raw_pod("with-the-same-labels"), PodDetails))
    known = WorkloadFacts(
        kind=kind,
        name="train",
        namespace=TEAM,
        now=NOW,
        workload=convert({}, DEPLOYMENTS.type),
        pods=pods,
        refusals=refusals,
    )
    assert explain_workload(known).next == expected


class TenantCluster(InMemoryCluster):
    """A cluster as a user sees it who may not read some kinds, and must not list others without a selector."""

    def __init__(self) -> None:
        super().__init__()
        self.forbidden: set[str] = set()

    def get(self, kind: Kind[T], name: str, namespace: str = "") -> T:
        self._check(kind)
        return super().get(kind, name, namespace)

    def list(self, kind: Kind[T], namespace: str = "", selector: Selector = EVERYTHING) -> Listing[T]:
        self._check(kind)
        assert namespace
        assert selector != EVERYTHING, f"all {kind.plural} are listed"
        return super().list(kind, namespace, selector)

    def _check(self, kind: Kind[T]) -> None:
        if kind.plural in self.forbidden:
            raise Rejected(f"{kind.plural} is forbidden", code=403, reason="Forbidden")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> TenantCluster:
    made = TenantCluster()
    made.create(NAMESPACES, {"metadata": {"name": TEAM}})
    monkeypatch.setattr("console.why.connect_cluster", lambda _: made)
    monkeypatch.setattr("console.main.configure_logs", lambda *_: None)
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["why", *arguments])


def reference(pod: Pod) -> Reference:
    return Reference(api_version="v1", kind="Pod", namespace=TEAM, name=pod.metadata.name, uid=pod.metadata.uid)


def test_the_command_reads_a_pod_its_events_its_quota_and_its_node(cluster: TenantCluster) -> None:
    """Events of another pod are not shown, also if that had the same name."""
    cluster.create(NODES, node())
    pod = cluster.create(PODS, raw_pod(annotations=limits_annotation() | PLACEMENT))
    metadata = {"name": "gpu-quota-status", "namespace": TEAM}
    cluster.create(CONFIG_MAPS, {"metadata": metadata, "data": {"status.yaml": QUOTA}})
    recorder = EventRecorder(cluster, SCHEDULER)
    recorder.record(replace(reference(pod), uid="former"), "InsufficientGPUs", "former", type_="Warning")
    recorder.record(reference(pod), "InsufficientGPUs", FIT, type_="Warning")
    done = run("train-0", "-n", TEAM)
    assert done.exit_code == 0, done.output
    assert FIT in done.output
    assert "former" not in done.output
    assert "350 used and 25 reserved of 400 cores" in done.output
    cluster.bind("train-0", TEAM, "n1", uid=pod.metadata.uid, annotations={})
    found = json.loads(run("pod/train-0", "-n", TEAM, "-o", "json").output)
    assert found["state"] == "placed"
    assert [each["step"] for each in found["steps"]] == ["asked", "charged", "placed", "starting"]
    assert "GPU 3 (A100-SXM4-40GB)" in found["steps"][2]["text"]


def test_what_may_not_be_read_is_named_and_the_rest_is_shown(cluster: TenantCluster) -> None:
    pod = cluster.create(PODS, raw_pod())
    cluster.bind("train-0", TEAM, "n1", uid=pod.metadata.uid, annotations={})
    cluster.forbidden = {"nodes", "events", "configmaps"}
    done = run("train-0", "-n", TEAM)
    assert done.exit_code == 0
    for what, kind in (("quota", "configmaps"), ("node", "nodes"), ("events", "events")):
        assert f"unknown   {what} could not be read: {kind} is forbidden" in done.output
    cluster.forbidden = {"pods"}
    done = run("train-0", "-n", TEAM)
    assert done.exit_code == 2
    assert done.output == "Error: pods is forbidden\n"


def test_a_workload_shows_its_refused_and_pending_pods(cluster: TenantCluster) -> None:
    labels = {"app": "train"}
    spec = {"selector": {"matchLabels": labels}, "replicas": 2}
    made = cluster.create(DEPLOYMENTS, {"metadata": {"name": "train", "namespace": TEAM}, "spec": spec})
    own = [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "train-5d9", "uid": "r", "controller": True}]
    cluster.create(PODS, raw_pod("train-5d9-x", labels=labels, ownerReferences=own))
    cluster.create(PODS, raw_pod("other", labels={"app": "other"}))
    about = Reference(api_version="apps/v1", kind="Deployment", namespace=TEAM, name="train", uid=made.metadata.uid)
    EventRecorder(cluster, WEBHOOK).record(about, "QuotaExceeded", "a pod was refused", type_="Warning")
    done = run("deployments/train", "-n", TEAM)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == "Deployment team/train: 1 pod (1 Pending)"
    assert "refused  Deployment/train: a pod was refused" in lines[1]
    assert "pending  train-5d9-x" in lines[2]
    assert lines[-1] == "next: quotient why train-5d9-x -n team"


def test_what_does_not_exist_ends_with_1_and_wrong_usage_with_2(cluster: TenantCluster) -> None:
    assert cluster.get(NAMESPACES, TEAM)
    assert run("none", "-n", TEAM).exit_code == 1
    assert "kubectl get jobs -n team" in run("Job/none", "-n", TEAM).output
    assert run("Job/none", "-n", TEAM).exit_code == 1
    assert run("Node/n1", "-n", TEAM).exit_code == 2
    assert run("Job/", "-n", TEAM).exit_code == 2


def test_the_namespace_is_that_of_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = [
        {"name": name, "context": {"cluster": "c", "user": "u", **({"namespace": name} if name != "plain" else {})}}
        for name in ("mine", "plain", "other")
    ]
    file = tmp_path / "kubeconfig"
    kubeconfig = {
        "current-context": "mine",
        "contexts": contexts,
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1"}}],
        "users": [{"name": "u", "user": {}}],
    }
    file.write_text(json.dumps(kubeconfig))
    assert default_namespace(str(file)) == "mine"
    assert default_namespace(str(file), "other") == "other"
    assert default_namespace(str(file), "plain") == "default"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    for name, text in (("token", "t"), ("ca.crt", "c"), ("namespace", "own\n")):
        (tmp_path / name).write_text(text)
    assert default_namespace(folder=tmp_path) == "own"


def test_events_of_both_apis_have_a_component_and_a_time() -> None:
    """The stored event of kube-scheduler has neither `source` nor `lastTimestamp`."""
    written = failed_scheduling("x")
    assert written.component == SCHEDULER
    assert written.seen_at == NOW - timedelta(seconds=30)

"""What-if questions: whether so many replicas of a pod would be admitted and where they would run, or what is missing.

`what_if` changes nothing. `try_replicas` leaves the replicas on the cluster, for questions that build on each other.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from vcuda.decision import Reason
from vcuda.fit_summary import Problems
from vcuda.node_problem import NodeProblem
from vcuda.placement_annotation import GpuSlice
from vcuda.pod_options import SpreadMembers
from vcuda.trial_cluster import PodPlacement, TrialCluster, TrialPod, TrialRefusal

# More would take long, and no answer has use for all of their nodes.
MAX_REPLICAS = 10_000
NO_NODES = "no node with GPUs takes pods: none has published its GPUs, or all that have are cordoned or not ready"


class Missing(StrEnum):
    """What a pod lacks. Programs match on these."""

    QUOTA = "quota"
    MODEL = "model"
    POOL = "pool"
    ISOLATION = "isolation"
    # Every suitable GPU is in use, at least in part, or no node has so many of them.
    ROOM = "room"
    # The GPUs themselves: unhealthy or cordoned.
    GPUS = "gpus"
    # The nodes' own CPU and memory.
    HOST = "host"
    # There is no node with GPUs that takes pods.
    NODES = "nodes"
    # Nothing is known to be missing: the combinations of the pod's containers were too many to search all nodes.
    UNSEARCHED = "unsearched"


# In the order of how near a node with the problem is to taking the pod: what the nearest nodes lack is missing.
MISSING_BY_PROBLEM = (
    (Missing.UNSEARCHED, (NodeProblem.NOT_SEARCHED,)),
    (Missing.HOST, (NodeProblem.HOST,)),
    (
        Missing.ROOM,
        (
            NodeProblem.IN_USE,
            NodeProblem.MEMORY,
            NodeProblem.CORES,
            NodeProblem.CORES_AND_MEMORY,
            NodeProblem.COMBINATION,
            NodeProblem.MEMBERS,
        ),
    ),
    (Missing.ISOLATION, (NodeProblem.ISOLATION,)),
    (Missing.GPUS, (NodeProblem.UNAVAILABLE,)),
    (Missing.QUOTA, (NodeProblem.QUOTA,)),
    (Missing.POOL, (NodeProblem.POOL,)),
    # The model is there, but on no node so often: a larger node has to become free, or be added.
    (Missing.ROOM, (NodeProblem.TOO_FEW,)),
    (Missing.MODEL, (NodeProblem.MODEL, NodeProblem.UUID, NodeProblem.TOO_SMALL)),
)


class ReplicaPlacement(Struct, frozen=True):
    """Where one replica would run: its node, and its GPUs by container."""

    node: str
    gpus: dict[str, tuple[GpuSlice, ...]]


class Answer(Struct, frozen=True, omit_defaults=True, rename="camel"):
    """How many replicas would be admitted, and where as many as fit would run, in this order.

    If not all do: `missing` is what the next one lacks, with a sentence, and the reasons of the quota if it refuses it.
    `audited` are the reasons of a quota in audit mode, which refuses nothing.
    """

    replicas: int
    admitted: int
    placed: tuple[ReplicaPlacement, ...] = ()
    missing: Missing | None = None
    message: str = ""
    reasons: tuple[Reason, ...] = ()
    audited: tuple[Reason, ...] = ()

    @property
    def is_possible(self) -> bool:
        return len(self.placed) == self.replicas


def what_if(cluster: TrialCluster, pod: TrialPod, replicas: int = 1) -> Answer:
    """Try so many replicas of a pod on a cluster, one after another; the cluster is not changed."""
    return try_replicas(cluster.copy(), pod, replicas)


def try_replicas(cluster: TrialCluster, pod: TrialPod, replicas: int = 1) -> Answer:
    """Place as many of so many replicas of a pod on a cluster as are admitted and fit, one after another."""
    wanted = max(0, min(replicas, MAX_REPLICAS))
    placed: list[ReplicaPlacement] = []
    audited: tuple[Reason, ...] = ()
    refusal: TrialRefusal | None = None
    while len(placed) < wanted and refusal is None:
        result = cluster.place(pod)
        audited = audited or result.audited
        if isinstance(result, PodPlacement):
            placed.append(ReplicaPlacement(result.node, result.placed))
            pod = replace(pod, excluded=excluded_after(pod, result))
        else:
            refusal = result
    answer = Answer(wanted, len(placed), tuple(placed), audited=audited)
    if refusal is None:
        return answer
    if refusal.reasons:
        message = "; ".join(reason.problem for reason in refusal.reasons)
        return replace(answer, missing=Missing.QUOTA, message=message, reasons=refusal.reasons)
    # Beside those that were placed, the quota admits some that wait for room.
    admitted = len(placed) + cluster.count_admitted(pod, wanted - len(placed))
    missing, message = missing_of(cluster, refusal)
    return replace(answer, admitted=admitted, missing=missing, message=message)


def missing_of(cluster: TrialCluster, refusal: TrialRefusal) -> tuple[Missing, str]:
    """Return what a pod lacks that no quota refused, with a sentence."""
    if not len(cluster.table):
        return Missing.NODES, NO_NODES
    message, problems = cluster.explain(refusal)
    return nearest(problems), message


def excluded_after(pod: TrialPod, placed: PodPlacement) -> Mapping[str, Sequence[str] | None]:
    """Return what the next replica may not use, if replicas are to be spread."""
    spread = pod.options.spread_members
    if spread is None:
        return {}
    before = pod.excluded.get(placed.node, ())
    whole_node = spread is SpreadMembers.NODE or before is None
    return {**pod.excluded, placed.node: None if whole_node else (*(before or ()), *placed.usage)}


def nearest(problems: Problems) -> Missing:
    """Return what the nodes lack that are nearest to taking a pod."""
    return next(
        (missing for missing, of in MISSING_BY_PROBLEM if any(each in problems for each in of)),
        Missing.MODEL,
    )

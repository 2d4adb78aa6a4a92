"""Workloads that lack pods, found from their state: how many pods each lacks, and what one of them requests.

Everything here is a pure function of one object as the API server shows it.
"""

from cluster.objects import Object
from cluster.pod_creators import PodCreator
from vcuda.names import JOB_CONTROLLER
from vcuda.pod_options import PodOptions, read_pod_options
from vcuda.request import MAX_GPU_CONTAINERS, PodRequest, request_held_by
from vcuda.scheme import Scheme

# Conditions: of a ReplicaSet or ReplicationController that could not create a pod, and of a Job that creates no more.
REPLICA_FAILURE = "ReplicaFailure"
JOB_HAS_ENDED = ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
PARALLEL = "Parallel"


class WaitingWorkload(Object, frozen=True, kw_only=True):
    """A workload with GPU pods of which some are missing.

    `progress` changes when its controller has created a pod. `has_failed` says that creating one certainly failed; if
    not, its controller may not have come to it yet.
    """

    kind: str = ""
    created: str = ""
    missing: int = 0
    progress: int = 0
    has_failed: bool = False
    request: PodRequest = PodRequest()
    options: PodOptions = PodOptions()


def waiting_workload_of(kind: str, creator: PodCreator, scheme: Scheme) -> WaitingWorkload | None:
    """Reduce a workload of some kind; None if it lacks no pod, or its pods request no GPU."""
    metadata, template = creator.metadata, creator.spec.template
    missing, progress = count_missing(kind, creator)
    if missing <= 0 or metadata.deletion_timestamp or template is None:
        return None
    annotations = template.metadata.annotations or {}
    request = request_held_by(template.spec, annotations, scheme)
    if not 0 < len(request.containers) <= MAX_GPU_CONTAINERS:
        return None
    return WaitingWorkload(
        metadata=metadata.identity(),
        kind=kind,
        created=metadata.creation_timestamp or "",
        missing=missing,
        progress=progress,
        has_failed=creator.status.has(REPLICA_FAILURE),
        request=request,
        options=read_pod_options(annotations, scheme)[0],
    )


def count_missing(kind: str, creator: PodCreator) -> tuple[int, int]:
    """Return how many pods a workload lacks because they were not created, and a number that grows with its pods."""
    status = creator.status
    match kind:
        case "Job":
            return missing_of_job(creator), status.active + status.succeeded + status.failed
        case "DaemonSet":
            return status.desired_number_scheduled - status.current_number_scheduled, status.current_number_scheduled
        case "StatefulSet":
            return missing_of_stateful_set(creator), status.replicas
        case _:
            # Without the condition its controller is still creating pods. What its message says does not matter:
            # Kubernetes keeps that of the first failure, whatever the cause of the later ones.
            missing = desired_replicas(creator) - status.replicas if status.has(REPLICA_FAILURE) else 0
            return missing, status.replicas


def desired_replicas(creator: PodCreator) -> int:
    return 1 if creator.spec.replicas is None else creator.spec.replicas


def missing_of_stateful_set(creator: PodCreator) -> int:
    status = creator.status
    missing = desired_replicas(creator) - status.replicas
    if creator.spec.pod_management_policy == PARALLEL:
        return missing
    # One pod after another: the next one is created when all before it are ready.
    return min(missing, 1) if status.ready_replicas >= status.replicas else 0


def missing_of_job(creator: PodCreator) -> int:
    spec, status = creator.spec, creator.status
    if spec.suspend or status.has(*JOB_HAS_ENDED) or spec.managed_by not in (None, JOB_CONTROLLER):
        return 0
    wanted = 1 if spec.parallelism is None else spec.parallelism
    if spec.completions is not None:
        wanted = min(wanted, spec.completions - status.succeeded)
    elif status.succeeded:
        return 0  # the first success of a Job without completions ends it: no pod is created any more
    replaced_late = (status.terminating or 0) if spec.pod_replacement_policy == "Failed" else 0
    return wanted - status.active - replaced_late

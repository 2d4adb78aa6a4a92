"""GPU pods, reduced to what the scheduler needs: every GPU pod of the cluster is cached."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from math import inf

from msgspec import field

from cluster.objects import Metadata, Object, ObjectReference, Pod, PodStatus
from vcuda.gpu_availability import GpuAvailability, GpuUsage
from vcuda.host import Host, host_requests
from vcuda.inventory import Gpu
from vcuda.ledger import PodKey, pack_uid
from vcuda.limits import admitted_options
from vcuda.names import MIRROR_ANNOTATION
from vcuda.placement import InsufficientGpus, card_uuids, peak_usage, place_pod, slices_on_cards
from vcuda.placement_annotation import GpuSlice, decode_placement
from vcuda.pod import PodSpec
from vcuda.pod_options import PodOptions
from vcuda.predicates import predicate_minors
from vcuda.request import PodRequest, request_held_by
from vcuda.scheme import Scheme

POD_SCHEDULED = "PodScheduled"
# Labels that are kept of a pod: every GPU pod is cached, and tenants write them.
MAX_LABELS = 64
# Of the UID in an owner reference, which the API server does not check; a real one has 36 characters. And of what
# kube-scheduler reports.
MAX_UID, MAX_FAILURE = 64, 2000
# The preemption policy of pods for which no others are evicted.
NEVER = "Never"


class SchedulerPod(Object, frozen=True, kw_only=True):
    """A GPU pod. `node` is empty until it is bound.

    `placed` are the GPUs in its annotation, and `minors` those that gpu-manager gave it. `owner` is the UID of the
    workload it is a member of. `scheduling_failure` is what kube-scheduler reported when it could not place the pod.
    """

    key: PodKey = ""
    request: PodRequest = PodRequest()
    options: PodOptions = PodOptions()
    node: str = ""
    placed: dict[str, tuple[GpuSlice, ...]] | None = None
    minors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    owner: str = ""
    scheduler: str = ""
    priority: int = 0
    created_s: float = 0.0
    has_ended: bool = False
    is_deleting: bool = False
    # When its grace period is over, if it is being deleted; its owner chooses the period.
    ends_s: float = 0.0
    scheduling_failure: str = ""
    # The node on which kube-scheduler, or the preemptor, has made room for it; and whether pods may be evicted for it.
    nominated_node: str = ""
    may_preempt: bool = True
    # When it began to run; and its labels, for PodDisruptionBudgets, None if there are too many.
    started_s: float = 0.0
    labels: dict[str, str] | None = field(default_factory=dict)
    # What it requests of the node's own CPU and memory.
    host: Host = Host()

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def workload(self) -> tuple[str, str]:
        """The workload that the pod is a member of: its namespace and UID, as a tenant could write any UID."""
        return self.metadata.namespace, self.owner

    @property
    def title(self) -> str:
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def queue_position(self) -> tuple[int, float, str]:
        """The order in which waiting pods are served: the highest priority first, then the oldest."""
        return -self.priority, self.created_s, self.uid

    def reference(self) -> ObjectReference:
        """Return what an event about the pod refers to."""
        metadata = self.metadata
        return ObjectReference("v1", "Pod", metadata.namespace, metadata.name, metadata.uid)


class OtherPod(Object, frozen=True, kw_only=True):
    """A bound pod without GPUs: it takes CPU and memory from those with GPUs."""

    node: str
    host: Host
    priority: int = 0
    started_s: float = 0.0
    is_deleting: bool = False


def scheduler_pod_of(pod: Pod, scheme: Scheme) -> SchedulerPod | None:
    """Reduce a pod of the cluster; None if it requests no GPU, or is the mirror of a static pod."""
    return reduce_pod(pod.metadata, pod.spec, pod.status, scheme)


def cached_pod_of(pod: Pod, scheme: Scheme) -> SchedulerPod | OtherPod | None:
    """Reduce a pod of the cluster; None if it neither requests GPUs nor takes anything of a node."""
    gpu_pod = scheduler_pod_of(pod, scheme)
    if gpu_pod is not None:
        return gpu_pod
    if not pod.spec.node_name or pod.status.has_ended:
        return None
    return OtherPod(
        metadata=pod.metadata.identity(),
        node=pod.spec.node_name,
        host=host_requests(pod.spec),
        priority=pod.spec.priority or 0,
        started_s=start_of(pod.status),
        is_deleting=pod.metadata.deletion_timestamp is not None,
    )


def reduce_pod(metadata: Metadata, spec: PodSpec, status: PodStatus, scheme: Scheme) -> SchedulerPod | None:
    annotations = metadata.annotations
    request = request_held_by(spec, annotations, scheme)
    if not request.is_gpu or MIRROR_ANNOTATION in annotations:
        return None
    failures = [each for each in status.conditions if each.type == POD_SCHEDULED and each.status == "False"]
    return SchedulerPod(
        metadata=metadata.identity(),
        # A pod that does not exist yet has none.
        key=pack_uid(metadata.uid) if metadata.uid else "",
        request=request,
        options=admitted_options(annotations, scheme),
        node=spec.node_name or "",
        placed=decode_placement(annotations.get(scheme.names.placement, "")),
        minors=predicate_minors(spec, annotations, scheme) if spec.node_name else {},
        owner=next((each.uid[:MAX_UID] for each in metadata.owner_references if each.controller), ""),
        scheduler=spec.scheduler_name or "",
        priority=spec.priority or 0,
        created_s=seconds_of(metadata.creation_timestamp),
        has_ended=status.has_ended,
        is_deleting=metadata.deletion_timestamp is not None,
        ends_s=seconds_of(metadata.deletion_timestamp),
        scheduling_failure=f"{failures[0].reason}: {failures[0].message}"[:MAX_FAILURE] if failures else "",
        nominated_node=status.nominated_node_name,
        may_preempt=spec.preemption_policy != NEVER,
        started_s=start_of(status),
        labels=metadata.labels if len(metadata.labels) <= MAX_LABELS else None,
        host=host_requests(spec),
    )


def start_of(status: PodStatus) -> float:
    """Return when a pod began to run; one that has not begun is the last, as for kube-scheduler."""
    return seconds_of(status.start_time) if status.start_time else inf


def seconds_of(timestamp: str | None) -> float:
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else 0.0


def bound_usage(pod: SchedulerPod, gpus: Sequence[GpuAvailability], unit_mib: int) -> dict[str, GpuUsage]:
    """Return what a bound pod holds of each GPU of its node, given what is free beside it.

    From its placement, or from gpu-manager's. A pod that has neither yet was bound by another scheduler: the node
    plugin will place it with the same function as here.
    """
    cards = [each.gpu for each in gpus]
    if pod.placed is not None and (usage := usage_on(pod.request, card_uuids(pod.placed), cards, unit_mib)):
        return usage
    by_minor = {gpu.index if gpu.minor is None else gpu.minor: gpu.uuid for gpu in cards}
    by_name = {name: [by_minor.get(minor, "") for minor in minors] for name, minors in pod.minors.items()}
    if usage := usage_on(pod.request, by_name, cards, unit_mib):
        return usage
    try:
        placed = place_pod(pod.request, gpus, unit_mib=unit_mib, options=pod.options)
    except InsufficientGpus:
        return {}
    return peak_usage(pod.request, placed)


def usage_on(
    request: PodRequest, uuids: Mapping[str, Sequence[str]], gpus: Sequence[Gpu], unit_mib: int
) -> dict[str, GpuUsage]:
    """Return what a pod holds of the GPUs that its containers were given, as far as the node has them.

    Only the GPUs are taken from an annotation: with amounts below zero it would free what others hold.
    """
    return peak_usage(request, slices_on_cards(request, uuids, gpus, unit_mib))

"""GPU pods, reduced to what accounting needs: the controller caches every GPU pod of a cluster."""

from collections.abc import Callable
from datetime import datetime

from cluster.gpu_nodes import GpuNode
from cluster.objects import Metadata, Object, Pod
from vcuda.catalogue import memory_in_name_mib
from vcuda.decision import printable
from vcuda.dimensions import CORES, MEMORY
from vcuda.gpu_model import parse_model
from vcuda.ledger import MAX_HOLDER_NAME, PodKey, pack_uid
from vcuda.names import MIRROR_ANNOTATION
from vcuda.placement_annotation import placed_uuids
from vcuda.pod_options import PodOptions, read_pod_options
from vcuda.quota_usage import Charge
from vcuda.request import PodRequest, request_held_by
from vcuda.scheme import Scheme


class PodUsage(Object, frozen=True, kw_only=True):
    """A GPU pod: what it requests, which GPUs it was placed on, and whether it is being deleted.

    `node` is empty until the pod is bound. `delete_by_s` is when its grace period ends, in seconds since 1970; None
    unless it is being deleted. `owner` is the workload that created it, as people know it.
    """

    key: PodKey = ""
    request: PodRequest = PodRequest()
    options: PodOptions = PodOptions()
    node: str = ""
    gpu_uuids: tuple[str, ...] = ()
    is_terminal: bool = False
    delete_by_s: float | None = None
    owner: str = ""
    created: str = ""


def pod_usage_of(pod: Pod, scheme: Scheme) -> PodUsage | None:
    """Reduce a pod; None if it requests no GPU or is a mirror pod, which no webhook admits."""
    request = request_held_by(pod.spec, pod.metadata.annotations, scheme)
    if not request.is_gpu or MIRROR_ANNOTATION in pod.metadata.annotations:
        return None
    metadata = pod.metadata
    options, _ = read_pod_options(metadata.annotations, scheme)
    deletion = metadata.deletion_timestamp
    return PodUsage(
        metadata=metadata.identity(),
        key=pack_uid(metadata.uid),
        request=request,
        options=options,
        node=pod.spec.node_name or "",
        gpu_uuids=tuple(placed_uuids(metadata.annotations.get(scheme.names.placement, ""))),
        is_terminal=pod.status.has_ended,
        # The API server writes the end of the grace period into deletionTimestamp, not the time of the call.
        delete_by_s=datetime.fromisoformat(deletion).timestamp() if deletion else None,
        owner=owner_name(metadata),
        created=metadata.creation_timestamp or "",
    )


def owner_name(metadata: Metadata) -> str:
    """Return the workload that created a pod as Kind/name; the Deployment instead of its ReplicaSet."""
    return printable(full_owner_name(metadata), MAX_HOLDER_NAME)


def full_owner_name(metadata: Metadata) -> str:
    for owner in metadata.owner_references:
        if owner.controller:
            # A Deployment names its ReplicaSets after itself and the hash of their template.
            template_hash = metadata.labels.get("pod-template-hash")
            if owner.kind == "ReplicaSet" and template_hash and owner.name.endswith(f"-{template_hash}"):
                return f"Deployment/{owner.name.removesuffix(f'-{template_hash}')}"
            return f"{owner.kind}/{owner.name}"
    return f"Pod/{metadata.name}"


def counts_against_quota(pod: PodUsage, node: GpuNode | None, now_s: float) -> bool:
    """Whether a pod uses quota.

    A terminal pod uses none. A pod that is being deleted uses quota until it is gone, because its containers may still
    run. On a lost node no kubelet reports its end, so there the quota is free again after the grace period.
    """
    if pod.is_terminal:
        return False
    if pod.delete_by_s is None or not pod.node:
        return True
    is_lost = node is None or node.lost
    return not (is_lost and now_s > pod.delete_by_s)


def actual_charge(
    pod: PodUsage, node: GpuNode | None, unit_mib: int, largest_mib: Callable[[str, str], int] = lambda *_: 0
) -> Charge | None:
    """Return what a bound pod really uses; None if it is not bound, or the model of its GPUs is not known.

    `largest_mib(model, pool)` is used where neither the node nor the model's name tells the memory of its GPUs.
    """
    if not pod.node or node is None:
        return None
    gpus = [gpu for gpu in node.gpus if gpu.uuid in pod.gpu_uuids] or list(node.gpus)
    models = {gpu.model for gpu in gpus} or ({node.model} if node.model else set())
    if len(models) != 1:
        return None
    model = parse_model(models.pop()).name
    known_mib = max((gpu.memory_mib for gpu in gpus), default=node.memory_mib) or memory_in_name_mib(model)
    card_mib = known_mib or largest_mib(model, node.pool)
    amounts = pod.request.demand(card_mib, unit_mib)
    return Charge(model, amounts[CORES], amounts[MEMORY])

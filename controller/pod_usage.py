"""What each pod holds, as far as accounting needs it: small values, made of pods as they are seen.

A cluster has many pods and few of them have GPUs; of those, most of what a pod says does not matter here.
"""

from collections.abc import Callable
from datetime import datetime

from cluster.objects import Metadata, Node, Object, Pod
from vcuda.catalogue import CardModel, memory_in_name_mib
from vcuda.dimensions import CORES, MEMORY
from vcuda.gpu_model import is_model, parse_model
from vcuda.inventory import Gpu, decode_inventory
from vcuda.ledger import PodKey, pack_uid
from vcuda.names import (
    ANCESTOR_MODEL_LABELS,
    ANCESTOR_POOL_LABELS,
    MIRROR_ANNOTATION,
    MIXED_MODELS,
    NVIDIA_MEMORY_LABEL,
    NVIDIA_PRODUCT_LABEL,
)
from vcuda.placement_annotation import placed_uuids
from vcuda.pod_options import PodOptions, read_pod_options
from vcuda.quota_usage import Charge
from vcuda.request import PodRequest, request_held_by
from vcuda.scheme import Scheme

READY, UNKNOWN = "Ready", "Unknown"


class PodUsage(Object, frozen=True, kw_only=True):
    """A pod with GPUs: what it asks for, where it is, and whether it is on its way out.

    Of the metadata only what names it is kept. `owner` is what people know it by: the workload that made it.
    """

    key: PodKey = ""
    request: PodRequest = PodRequest()
    options: PodOptions = PodOptions()
    node: str = ""
    placed: tuple[str, ...] = ()
    is_terminal: bool = False
    due_s: float | None = None
    owner: str = ""
    created: str = ""


def pod_usage_of(pod: Pod, scheme: Scheme) -> PodUsage | None:
    """Read what a pod holds; None if it holds no GPU, or is none of our business."""
    request = request_held_by(pod.spec, pod.metadata.annotations, scheme)
    if not request.is_gpu or MIRROR_ANNOTATION in pod.metadata.annotations:
        return None
    metadata = pod.metadata
    options, _ = read_pod_options(metadata.annotations, scheme)
    due = metadata.deletion_timestamp
    return PodUsage(
        metadata=Metadata(
            name=metadata.name,
            namespace=metadata.namespace,
            uid=metadata.uid,
            resource_version=metadata.resource_version,
        ),
        key=pack_uid(metadata.uid),
        request=request,
        options=options,
        node=pod.spec.node_name or "",
        placed=tuple(placed_uuids(metadata.annotations.get(scheme.names.placement, ""))),
        is_terminal=pod.status.has_ended,
        due_s=datetime.fromisoformat(due).timestamp() if due else None,
        owner=owner_name(metadata),
        created=metadata.creation_timestamp or "",
    )


def owner_name(metadata: Metadata) -> str:
    """Name the workload that made a pod; a ReplicaSet's name ends in what its Deployment's does not."""
    for owner in metadata.owner_references:
        if owner.controller:
            made_by = metadata.labels.get("pod-template-hash")
            if owner.kind == "ReplicaSet" and made_by and owner.name.endswith(f"-{made_by}"):
                return f"Deployment/{owner.name.removesuffix(f'-{made_by}')}"
            return f"{owner.kind}/{owner.name}"
    return f"Pod/{metadata.name}"


class GpuNode(Object, frozen=True, kw_only=True):
    """A node with GPUs. `lost` means that nobody can say what still runs there."""

    gpus: tuple[Gpu, ...] = ()
    model: str = ""
    memory_mib: int = 0
    pool: str = ""
    lost: bool = False

    def cards(self) -> set[CardModel]:
        """Give the kinds of cards it has."""
        found = {CardModel(gpu.model, gpu.memory_mib, self.pool) for gpu in self.gpus}
        return found or ({CardModel(self.model, self.memory_mib, self.pool)} if self.model else set())


def gpu_node_of(node: Node, scheme: Scheme) -> GpuNode:
    """Read what a node has: its inventory, or what labels say of it."""
    labels, annotations = node.metadata.labels, node.metadata.annotations
    try:
        gpus = tuple(gpu for gpu in decode_inventory(annotations[scheme.names.inventory]) if is_model(gpu.model))
    except (KeyError, ValueError):
        gpus = ()
    ready = [each.status for each in node.status.conditions if each.type == READY]
    return GpuNode(
        metadata=Metadata(
            name=node.metadata.name, uid=node.metadata.uid, resource_version=node.metadata.resource_version
        ),
        gpus=gpus,
        model=model_in(labels, scheme),
        memory_mib=int(labels[NVIDIA_MEMORY_LABEL]) if labels.get(NVIDIA_MEMORY_LABEL, "").isdecimal() else 0,
        pool=next((labels[key] for key in (scheme.names.pool_label, *ANCESTOR_POOL_LABELS) if key in labels), ""),
        lost=UNKNOWN in ready,
    )


def model_in(labels: dict[str, str], scheme: Scheme) -> str:
    """Read the model of a node's cards from its labels; nothing if it has several, or none."""
    for key in (scheme.names.model_label, NVIDIA_PRODUCT_LABEL, *ANCESTOR_MODEL_LABELS):
        if labels.get(key, MIXED_MODELS) != MIXED_MODELS and is_model(labels[key]):
            return parse_model(labels[key]).name
    return ""


def counts_against_quota(held: PodUsage, machine: GpuNode | None, now_s: float) -> bool:
    """Tell whether a pod holds anything of its quota.

    One that has ended holds nothing. One that is being deleted holds until it is gone, for its containers may run on;
    but on a lost node nobody can tell, and after the time it was given the quota is free.
    """
    if held.is_terminal:
        return False
    if held.due_s is None or not held.node:
        return True
    is_lost = machine is None or machine.lost
    return not (is_lost and now_s > held.due_s)


def actual_charge(
    held: PodUsage, machine: GpuNode | None, unit_mib: int, largest_mib: Callable[[str, str], int] = lambda *_: 0
) -> Charge | None:
    """Say what a pod on a node really holds; None if it is on none, or nobody knows which cards it has there.

    `largest_mib` is asked where the node does not say how much memory its cards have: of a model, in a pool.
    """
    if not held.node or machine is None:
        return None
    gpus = [gpu for gpu in machine.gpus if gpu.uuid in held.placed] or list(machine.gpus)
    models = {gpu.model for gpu in gpus} or ({machine.model} if machine.model else set())
    if len(models) != 1:
        return None
    model = parse_model(models.pop()).name
    told_mib = max((gpu.memory_mib for gpu in gpus), default=machine.memory_mib) or memory_in_name_mib(model)
    size_mib = told_mib or largest_mib(model, machine.pool)
    amounts = held.request.demand(size_mib, unit_mib)
    return Charge(model, amounts[CORES], amounts[MEMORY])

"""The GPUs of a node, reduced to what accounting needs: a cluster's Node objects are large, and all are cached."""

from collections.abc import Mapping

from cluster.objects import Node, Object
from vcuda.catalogue import CardModel
from vcuda.gpu_model import is_model, parse_model
from vcuda.host import UNLIMITED, Host, allocatable_host, quantity_nanos
from vcuda.inventory import Gpu, decode_inventory
from vcuda.names import (
    ANCESTOR_MODEL_LABELS,
    ANCESTOR_POOL_LABELS,
    MIXED_MODELS,
    NVIDIA_MEMORY_LABEL,
    NVIDIA_PRODUCT_LABEL,
)
from vcuda.scheme import Scheme

READY, UNKNOWN = "Ready", "Unknown"
INTERNAL_IP = "InternalIP"
NANOS = 10**9


class GpuNode(Object, frozen=True, kw_only=True):
    """A node's GPUs from its inventory annotation, and `model` and `memory_mib` from labels for nodes without one.

    `lost` means that the node controller has no heartbeat from the kubelet: what runs there is unknown.
    """

    gpus: tuple[Gpu, ...] = ()
    model: str = ""
    memory_mib: int = 0
    pool: str = ""
    lost: bool = False
    # What the node itself has for pods.
    host: Host = UNLIMITED
    # How many cores and memory units kube-scheduler counts on the node; None if its status does not say.
    counts: tuple[int, int] | None = None
    # Its address inside the cluster.
    address: str = ""

    def cards(self) -> set[CardModel]:
        """Return the distinct models of this node's GPUs; the inventory takes precedence over labels."""
        models = {CardModel(gpu.model, gpu.memory_mib, self.pool) for gpu in self.gpus}
        return models or ({CardModel(self.model, self.memory_mib, self.pool)} if self.model else set())


def gpu_node_of(node: Node, scheme: Scheme) -> GpuNode:
    """Reduce a node. An invalid inventory counts as none, and a GPU whose model is no model name is left out."""
    labels, annotations = node.metadata.labels, node.metadata.annotations
    try:
        gpus = tuple(gpu for gpu in decode_inventory(annotations[scheme.names.inventory]) if is_model(gpu.model))
    except (KeyError, ValueError):
        gpus = ()
    ready = [condition.status for condition in node.status.conditions if condition.type == READY]
    return GpuNode(
        metadata=node.metadata.identity(),
        gpus=gpus,
        model=model_in_labels(labels, scheme),
        memory_mib=int(labels[NVIDIA_MEMORY_LABEL]) if labels.get(NVIDIA_MEMORY_LABEL, "").isdecimal() else 0,
        pool=next((labels[key] for key in (scheme.names.pool_label, *ANCESTOR_POOL_LABELS) if key in labels), ""),
        lost=UNKNOWN in ready,
        host=allocatable_host(node.status.allocatable),
        counts=allocatable_counts(node.status.allocatable, scheme),
        address=next((each.address for each in node.status.addresses if each.type == INTERNAL_IP), ""),
    )


def allocatable_counts(allocatable: Mapping[str, str], scheme: Scheme) -> tuple[int, int] | None:
    """Return the cores and the memory units of a node's status; None if they are not there."""
    cores, units = (quantity_nanos(allocatable.get(name)) for name in (scheme.names.core, scheme.names.memory))
    return None if cores is None or units is None else (cores // NANOS, units // NANOS)


def model_in_labels(labels: dict[str, str], scheme: Scheme) -> str:
    """Return the model of a node's GPUs; empty if no label names one, or if they are mixed."""
    for key in (scheme.names.model_label, NVIDIA_PRODUCT_LABEL, *ANCESTOR_MODEL_LABELS):
        if labels.get(key, MIXED_MODELS) != MIXED_MODELS and is_model(labels[key]):
            return parse_model(labels[key]).name
    return ""

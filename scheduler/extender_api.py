"""The requests and responses of kube-scheduler's extender protocol (k8s.io/kube-scheduler/extender/v1).

The Go types have no JSON tags, so their field names are the keys. Extenders of the Policy file's time used the same,
some of them in lower case.
"""

from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from cluster.objects import Object, PodStatus
from vcuda.decision import BadRequest
from vcuda.decode_errors import DECODE_ERRORS, describe_decode_error
from vcuda.decoding import decoder_for
from vcuda.pod import PodSpec

Body = TypeVar("Body")


class Preferences(Struct, frozen=True, rename="camel"):
    """Node or pod affinity, of which only matters whether it has preferences."""

    preferred: list[msgspec.Raw] | None = field(name="preferredDuringSchedulingIgnoredDuringExecution", default=None)


class Affinity(Struct, frozen=True, rename="camel"):
    node_affinity: Preferences | None = None
    pod_affinity: Preferences | None = None
    pod_anti_affinity: Preferences | None = None


class SpreadConstraint(Struct, frozen=True, rename="camel"):
    when_unsatisfiable: str = ""


class Volume(Struct, frozen=True, rename="camel"):
    persistent_volume_claim: msgspec.Raw | None = None
    ephemeral: msgspec.Raw | None = None


class WorkloadReference(Struct, frozen=True, rename="camel"):
    """The group of a pod in Kubernetes 1.35 and 1.36."""

    name: str = ""
    pod_group: str = ""
    pod_group_replica_key: str = ""


class SchedulingGroup(Struct, frozen=True, rename="camel"):
    """The group of a pod from Kubernetes 1.37 on."""

    pod_group_name: str = ""


class ExtenderPodSpec(PodSpec, frozen=True, rename="camel"):
    """A pod's spec, with what a scheduler reads of it beside the containers."""

    affinity: Affinity | None = None
    topology_spread_constraints: list[SpreadConstraint] | None = None
    volumes: list[Volume] | None = None
    resource_claims: list[msgspec.Raw] | None = None
    workload_ref: WorkloadReference | None = None
    scheduling_group: SchedulingGroup | None = None

    @property
    def has_preferences(self) -> bool:
        """Whether the pod prefers some nodes by affinity, or by spreading that is not required."""
        affinity = self.affinity
        parts = (affinity.node_affinity, affinity.pod_affinity, affinity.pod_anti_affinity) if affinity else ()
        spreads = any(each.when_unsatisfiable == "ScheduleAnyway" for each in self.topology_spread_constraints or ())
        return spreads or any(each is not None and bool(each.preferred) for each in parts)

    @property
    def waits_before_binding(self) -> bool:
        """Whether kube-scheduler may wait for minutes between filtering and binding: for volumes or other devices."""
        return bool(self.resource_claims) or any(
            each.persistent_volume_claim is not None or each.ephemeral is not None for each in self.volumes or ()
        )

    @property
    def group(self) -> str:
        """The pod group, which kube-scheduler places as a whole; empty if there is none."""
        if self.scheduling_group is not None:
            return self.scheduling_group.pod_group_name
        workload = self.workload_ref
        return f"{workload.name}/{workload.pod_group}/{workload.pod_group_replica_key}" if workload else ""


class ExtenderPod(Object, frozen=True, kw_only=True):
    spec: ExtenderPodSpec = ExtenderPodSpec()
    status: PodStatus = PodStatus()


class NodeMetadata(Struct, frozen=True):
    name: str = ""


class NamedNode(Struct, frozen=True):
    metadata: NodeMetadata = NodeMetadata()


class NodeList(Struct, frozen=True):
    """Whole Node objects, as an extender without a cache of its own gets them."""

    items: list[msgspec.Raw] | None = None

    def by_name(self) -> dict[str, msgspec.Raw]:
        return {decoder_for(NamedNode).decode(raw).metadata.name: raw for raw in self.items or ()}


class ExtenderArgs(Struct, frozen=True, rename="pascal"):
    """A pod, and the nodes that passed the scheduler's own filters: by name, or as whole objects."""

    pod: ExtenderPod | None = None
    nodes: NodeList | None = None
    node_names: list[str] | None = None


class LowerCaseArgs(Struct, frozen=True):
    pod: ExtenderPod | None = None
    nodes: NodeList | None = None
    nodenames: list[str] | None = None


class BindingArgs(Struct, frozen=True):
    pod_name: str = field(name="PodName", default="")
    pod_namespace: str = field(name="PodNamespace", default="")
    pod_uid: str = field(name="PodUID", default="")
    node: str = field(name="Node", default="")


class FilterResult(Struct, frozen=True, rename="pascal"):
    """Exactly one of `nodes` and `node_names` is set, like in the request."""

    nodes: dict[str, Any] | None = None
    node_names: list[str] | None = None
    failed_nodes: dict[str, str] = {}
    failed_and_unresolvable_nodes: dict[str, str] = {}
    error: str = ""


class HostPriority(Struct, frozen=True, rename="pascal"):
    host: str
    score: int


class BindingResult(Struct, frozen=True, rename="pascal"):
    error: str = ""


def decode_args(body: bytes) -> ExtenderArgs:
    """Decode the request of filter or prioritize; raises BadRequest."""
    args = decode_body(body, ExtenderArgs)
    if args.pod is None:
        lower = decode_body(body, LowerCaseArgs)
        args = ExtenderArgs(lower.pod, lower.nodes, lower.nodenames)
    if args.pod is None:
        raise BadRequest("Pod: missing; send the pod to be scheduled")
    if args.node_names is None and args.nodes is None:
        raise BadRequest("NodeNames: missing; send the names of the nodes, or the nodes in Nodes")
    return args


def decode_binding(body: bytes) -> BindingArgs:
    """Decode the request of bind; raises BadRequest."""
    args = decode_body(body, BindingArgs)
    for key, value in (("PodName", args.pod_name), ("PodNamespace", args.pod_namespace), ("Node", args.node)):
        if not value:
            raise BadRequest(f"{key}: missing; send the pod and the node to bind it to")
    return args


def decode_body(body: bytes, type_: type[Body]) -> Body:
    try:
        return decoder_for(type_).decode(body)
    except DECODE_ERRORS as error:
        raise BadRequest(f"invalid request: {describe_decode_error(error)}") from None

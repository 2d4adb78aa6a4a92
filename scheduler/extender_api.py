"""The requests and responses of kube-scheduler's extender protocol (k8s.io/kube-scheduler/extender/v1).

The Go types have no JSON tags, so their field names are the keys. Extenders of the Policy file's time used the same,
some of them in lower case.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from cluster.objects import Object, PodStatus
from vcuda.decision import BadRequest
from vcuda.decode_errors import DECODE_ERRORS, describe_decode_error
from vcuda.decoding import decoder_for
from vcuda.json_names import encode_names, node_names, parse_names
from vcuda.pod import PodSpec, Present

Body = TypeVar("Body")
NULL = msgspec.Raw(b"null")


class Preferences(Struct, frozen=True, rename="camel"):
    """Node or pod affinity, of which only matters whether it has preferences."""

    preferred: list[Present] | None = field(name="preferredDuringSchedulingIgnoredDuringExecution", default=None)


class ExtenderAffinity(Struct, frozen=True, rename="camel"):
    node_affinity: Preferences | None = None
    pod_affinity: Preferences | None = None
    pod_anti_affinity: Preferences | None = None


class SpreadConstraint(Struct, frozen=True, rename="camel"):
    when_unsatisfiable: str = ""


class ExtenderVolume(Struct, frozen=True, rename="camel"):
    persistent_volume_claim: Present | None = None
    ephemeral: Present | None = None


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

    affinity: ExtenderAffinity | None = None
    topology_spread_constraints: list[SpreadConstraint] | None = None
    volumes: list[ExtenderVolume] | None = None
    resource_claims: list[Present] | None = None
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


class RawArgs(Struct, frozen=True, rename="pascal"):
    pod: ExtenderPod | None = None
    nodes: NodeList | None = None
    node_names: msgspec.Raw = NULL


class LowerCaseArgs(Struct, frozen=True):
    pod: ExtenderPod | None = None
    nodes: NodeList | None = None
    nodenames: msgspec.Raw = NULL


class ExtenderArgs(Struct, frozen=True):
    """A pod, and the nodes that passed the scheduler's own filters: by name, or as whole objects.

    The names are kept as JSON: prioritize gets those that filter has returned, and need not decode them again. It is
    empty if there are whole objects.
    """

    pod: ExtenderPod
    names_json: bytes
    whole_nodes: dict[str, msgspec.Raw] | None

    def names(self) -> Sequence[str]:
        """Return the names; raises BadRequest if one could not be the name of a node."""
        if self.whole_nodes is not None:
            return [name for name in self.whole_nodes if '"' not in name and "\\" not in name]
        if (names := parse_names(self.names_json)) is not None:
            return names
        # Only an escaped character could make a name invalid, and the answers are built from the names as they are.
        if b"\\" in self.names_json:
            raise BadRequest("NodeNames: a name has an escaped character; send names of nodes")
        return decode_body(self.names_json, list[str])


class BindingArgs(Struct, frozen=True):
    pod_name: str = field(name="PodName", default="")
    pod_namespace: str = field(name="PodNamespace", default="")
    pod_uid: str = field(name="PodUID", default="")
    node: str = field(name="Node", default="")


class MetaPod(Struct, frozen=True):
    uid: str = field(name="UID", default="")


class MetaVictims(Struct, frozen=True):
    """The pods to be evicted from a node, by UID, and how many of them a PodDisruptionBudget protects."""

    pods: list[MetaPod] | None = field(name="Pods", default=None)
    violations: int = field(name="NumPDBViolations", default=0)

    @classmethod
    def of(cls, uids: Sequence[str], violations: int) -> "MetaVictims":
        return cls([MetaPod(uid) for uid in uids], violations)

    @property
    def uids(self) -> list[str]:
        return [pod.uid for pod in self.pods or ()]


class WholeVictims(Struct, frozen=True):
    """The same with whole pods, as an extender without a cache of its own gets it."""

    pods: list[Object] | None = field(name="Pods", default=None)
    violations: int = field(name="NumPDBViolations", default=0)


class PreemptionArgs(Struct, frozen=True):
    """A pod, and the victims that kube-scheduler has found on each node; newer versions send nodes without any, too."""

    pod: ExtenderPod | None = field(name="Pod", default=None)
    meta_victims: dict[str, MetaVictims] | None = field(name="NodeNameToMetaVictims", default=None)
    victims: dict[str, WholeVictims] | None = field(name="NodeNameToVictims", default=None)

    def by_node(self) -> dict[str, MetaVictims]:
        whole = {
            node: MetaVictims.of([pod.metadata.uid for pod in each.pods or ()], each.violations)
            for node, each in (self.victims or {}).items()
        }
        return whole | (self.meta_victims or {})


class LowerCaseMetaPod(Struct, frozen=True):
    uid: str = ""


class LowerCaseMetaVictims(Struct, frozen=True, rename="camel"):
    pods: list[LowerCaseMetaPod] | None = None
    violations: int = field(name="numPDBViolations", default=0)


class LowerCaseVictims(Struct, frozen=True, rename="camel"):
    pods: list[Object] | None = None
    violations: int = field(name="numPDBViolations", default=0)


class LowerCasePreemptionArgs(Struct, frozen=True, rename="camel"):
    """The same as in the Policy file's time."""

    pod: ExtenderPod | None = None
    node_name_to_meta_victims: dict[str, LowerCaseMetaVictims] | None = None
    node_name_to_victims: dict[str, LowerCaseVictims] | None = None

    def plain(self) -> PreemptionArgs:
        meta = {
            node: MetaVictims.of([pod.uid for pod in each.pods or ()], each.violations)
            for node, each in (self.node_name_to_meta_victims or {}).items()
        }
        whole = {
            node: WholeVictims(each.pods, each.violations) for node, each in (self.node_name_to_victims or {}).items()
        }
        return PreemptionArgs(self.pod, meta, whole)


class PreemptionResult(Struct, frozen=True):
    victims: dict[str, MetaVictims] = field(name="NodeNameToMetaVictims")


class FilterResult(Struct, frozen=True):
    """The nodes that fit, and the others by the text that says why not.

    kube-scheduler may evict pods from the nodes in `failed`, to make room; not from those in `unresolvable`.
    """

    fitting: Sequence[str] = ()
    failed: Mapping[str, Sequence[Sequence[str]]] = {}
    unresolvable: Mapping[str, Sequence[Sequence[str]]] = {}
    error: str = ""
    # `fitting` as JSON, if it is known already.
    fitting_json: bytes = b""


class BindingResult(Struct, frozen=True, rename="pascal"):
    error: str = ""


def decode_args(body: bytes) -> ExtenderArgs:
    """Decode the request of filter or prioritize; raises BadRequest."""
    raw = decode_body(body, RawArgs)
    pod, nodes, names = raw.pod, raw.nodes, bytes(raw.node_names)
    if pod is None:
        lower = decode_body(body, LowerCaseArgs)
        pod, nodes, names = lower.pod, lower.nodes, bytes(lower.nodenames)
    if pod is None:
        raise BadRequest("Pod: missing; send the pod to be scheduled")
    if names != b"null":
        if nodes is not None and nodes.items:
            raise BadRequest("NodeNames, Nodes: both are there; send the names of the nodes, or the nodes")
        return ExtenderArgs(pod, names, None)
    if nodes is None:
        raise BadRequest("NodeNames: missing; send the names of the nodes, or the nodes in Nodes")
    return ExtenderArgs(pod, b"", nodes.by_name())


def decode_preemption(body: bytes) -> PreemptionArgs:
    """Decode the request of preempt; raises BadRequest."""
    args = decode_body(body, PreemptionArgs)
    if args.pod is None:
        args = decode_body(body, LowerCasePreemptionArgs).plain()
    if args.pod is None:
        raise BadRequest("Pod: missing; send the pod for which others may be evicted")
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


def encode_filter_result(result: FilterResult, whole: dict[str, msgspec.Raw] | None = None) -> bytes:
    """Encode an ExtenderFilterResult; with whole nodes if the request had them.

    Built by joining names, which are plain, as the API server accepts no others; the texts are ours.
    """
    names, items = result.fitting_json or encode_names(result.fitting), b"null"
    if whole is not None:
        names, items = b"null", b'{"items":[%b]}' % b",".join(bytes(whole[name]) for name in result.fitting)
    return b'{"Nodes":%b,"NodeNames":%b,"FailedNodes":%b,"FailedAndUnresolvableNodes":%b,"Error":%b}' % (
        items,
        names,
        encode_failed(result.failed),
        encode_failed(result.unresolvable),
        msgspec.json.encode(result.error),
    )


def encode_failed(nodes: Mapping[str, Sequence[Sequence[str]]]) -> bytes:
    parts = [
        b'"%b":"%b"' % (node_names(names).joined(f'":"{text}","'), text.encode())
        for text, listed in nodes.items()
        for names in listed
        if names
    ]
    return b"{%b}" % b",".join(parts)


def encode_priorities(names: Sequence[str], scores: NDArray[np.int64]) -> bytes:
    """Encode a HostPriorityList."""
    if not names:
        return b"[]"
    listed = node_names(names).with_scores(scores, '","Score":', '},{"Host":"')
    return b'[{"Host":"%b]' % listed.removesuffix(b',{"Host":"')

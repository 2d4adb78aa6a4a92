"""Kubernetes objects as Quotient reads them: small frozen structs with the fields that it needs.

A kind marked `partial` has no fields for the rest of the object. Such an object is patched and never replaced, so that
the fields which we do not know survive; `check_update` enforces that.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from msgspec import Struct, field

from vcuda.pod import PodSpec


class OwnerReference(Struct, frozen=True, rename="camel", omit_defaults=True):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class Metadata(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The metadata of every object; complete enough for an update."""

    name: str = ""
    generate_name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[OwnerReference] = []
    finalizers: list[str] = []
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    deletion_grace_period_seconds: int | None = None

    def identity(self) -> "Metadata":
        """Return what identifies an object and its version: all that an informer needs of a reduced object."""
        return Metadata(name=self.name, namespace=self.namespace, uid=self.uid, resource_version=self.resource_version)


class Object(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """The common part of all kinds."""

    metadata: Metadata = Metadata()


class ContainerStatus(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The status of a container; its id is `<runtime>://<id>`, empty before it was created."""

    name: str = ""
    container_id: str = field(name="containerID", default="")


class PodCondition(Struct, frozen=True, rename="camel", omit_defaults=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class PodStatus(Struct, frozen=True, rename="camel", omit_defaults=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    pod_ip: str = field(name="podIP", default="")
    nominated_node_name: str = ""
    start_time: str | None = None
    init_container_statuses: list[ContainerStatus] = []
    container_statuses: list[ContainerStatus] = []
    conditions: list[PodCondition] = []

    @property
    def has_ended(self) -> bool:
        """Whether the pod is terminal: no container of it will run again."""
        return self.phase in {"Succeeded", "Failed"}


class Pod(Object, frozen=True, kw_only=True):
    """A pod; partial."""

    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class Taint(Struct, frozen=True, rename="camel", omit_defaults=True):
    key: str
    effect: str
    value: str = ""


class NodeSpec(Struct, frozen=True, rename="camel", omit_defaults=True):
    unschedulable: bool = False
    taints: list[Taint] = []


class NodeCondition(Struct, frozen=True, rename="camel", omit_defaults=True):
    type: str
    status: str
    last_transition_time: str | None = None


class NodeInfo(Struct, frozen=True, rename="camel", omit_defaults=True):
    kubelet_version: str = ""
    container_runtime_version: str = ""


class NodeAddress(Struct, frozen=True, omit_defaults=True):
    type: str = ""
    address: str = ""


class NodeStatus(Struct, frozen=True, rename="camel", omit_defaults=True):
    addresses: list[NodeAddress] = []
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}
    conditions: list[NodeCondition] = []
    node_info: NodeInfo = NodeInfo()


class Node(Object, frozen=True, kw_only=True):
    """A node; partial."""

    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


class NamespaceStatus(Struct, frozen=True, omit_defaults=True):
    phase: str = ""


class Namespace(Object, frozen=True, kw_only=True):
    """A namespace; partial."""

    status: NamespaceStatus = NamespaceStatus()


class ConfigMap(Object, frozen=True, kw_only=True):
    """A ConfigMap with all of its fields."""

    data: dict[str, str] = {}
    binary_data: dict[str, str] = {}
    immutable: bool | None = None


class Secret(Object, frozen=True, kw_only=True):
    """A Secret with all of its fields; the values are base64."""

    type: str = "Opaque"
    data: dict[str, str] = {}
    immutable: bool | None = None


class ServiceReference(Struct, frozen=True, rename="camel", omit_defaults=True):
    name: str = ""
    namespace: str = ""
    path: str = ""


class ClientConfig(Struct, frozen=True, rename="camel", omit_defaults=True):
    """How the API server calls a webhook; `ca_bundle` is base64."""

    service: ServiceReference = ServiceReference()
    url: str = ""
    ca_bundle: str = ""


class RegisteredWebhook(Struct, frozen=True, rename="camel", omit_defaults=True):
    """One entry of a webhook configuration."""

    name: str
    client_config: ClientConfig = ClientConfig()
    failure_policy: str = ""


class WebhookConfiguration(Object, frozen=True, kw_only=True):
    """A MutatingWebhookConfiguration or ValidatingWebhookConfiguration; partial."""

    webhooks: list[RegisteredWebhook] = []


class ContainerImage(Struct, frozen=True, omit_defaults=True):
    image: str = ""


class TemplateSpec(Struct, frozen=True, omit_defaults=True):
    containers: list[ContainerImage] = []


class WorkloadTemplate(Struct, frozen=True, omit_defaults=True):
    spec: TemplateSpec = TemplateSpec()


class LabelExpression(Struct, frozen=True, omit_defaults=True):
    key: str = ""
    operator: str = ""
    values: list[str] = []


class LabelSelector(Struct, frozen=True, rename="camel", omit_defaults=True):
    match_labels: dict[str, str] = {}
    match_expressions: list[LabelExpression] = []


class DisruptionBudgetSpec(Struct, frozen=True, omit_defaults=True):
    selector: LabelSelector | None = None


class DisruptionBudgetStatus(Struct, frozen=True, rename="camel", omit_defaults=True):
    disruptions_allowed: int = 0


class DisruptionBudget(Object, frozen=True, kw_only=True):
    """A PodDisruptionBudget; partial."""

    spec: DisruptionBudgetSpec = DisruptionBudgetSpec()
    status: DisruptionBudgetStatus = DisruptionBudgetStatus()


class WorkloadSpec(Struct, frozen=True, omit_defaults=True):
    # The API's default for a Deployment; a DaemonSet has no such field.
    replicas: int = 1
    selector: LabelSelector = LabelSelector()
    template: WorkloadTemplate = WorkloadTemplate()


class WorkloadStatus(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The first three are of Deployments, the others of DaemonSets."""

    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    desired_number_scheduled: int = 0
    number_ready: int = 0
    updated_number_scheduled: int = 0


class Workload(Object, frozen=True, kw_only=True):
    """A workload: a Deployment, DaemonSet, Job and so on; partial."""

    spec: WorkloadSpec = WorkloadSpec()
    status: WorkloadStatus = WorkloadStatus()


class EndpointConditions(Struct, frozen=True, omit_defaults=True):
    ready: bool | None = None


class Endpoint(Struct, frozen=True, omit_defaults=True):
    conditions: EndpointConditions = EndpointConditions()


class EndpointSlice(Object, frozen=True, kw_only=True):
    """Some or all endpoints of a Service; partial."""

    # The API writes null instead of an empty list.
    endpoints: list[Endpoint] | None = None


class LeaseSpec(Struct, frozen=True, rename="camel", omit_defaults=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None
    strategy: str | None = None
    preferred_holder: str | None = None


class Lease(Object, frozen=True, kw_only=True):
    """A Lease with all of its fields."""

    spec: LeaseSpec = LeaseSpec()


class ObjectReference(Struct, frozen=True, rename="camel", omit_defaults=True):
    """A reference to the object that an event is about."""

    api_version: str = ""
    kind: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    field_path: str = ""


class EventSource(Struct, frozen=True, omit_defaults=True):
    component: str = ""


class Event(Object, frozen=True, kw_only=True):
    """An event of the core API; partial."""

    involved_object: ObjectReference = ObjectReference()
    type: str = "Normal"
    reason: str = ""
    message: str = ""
    count: int = 1
    source: EventSource = EventSource()
    reporting_component: str = ""
    first_timestamp: str | None = None
    last_timestamp: str | None = None


class TokenReviewSpec(Struct, frozen=True):
    token: str = ""


class UserInfo(Struct, frozen=True, omit_defaults=True):
    username: str = ""
    uid: str = ""
    groups: list[str] = []


class TokenReviewStatus(Struct, frozen=True, omit_defaults=True):
    authenticated: bool = False
    user: UserInfo = UserInfo()


class TokenReview(Object, frozen=True, kw_only=True):
    """Asks whose token it is; the answer is in the status of the created object, which is not stored. Partial."""

    spec: TokenReviewSpec = TokenReviewSpec()
    status: TokenReviewStatus = TokenReviewStatus()


class NonResourceAttributes(Struct, frozen=True, omit_defaults=True):
    """A request for a URL path that is not a resource."""

    path: str = ""
    verb: str = ""


class ResourceAttributes(Struct, frozen=True, omit_defaults=True):
    verb: str = ""
    group: str = ""
    resource: str = ""
    namespace: str = ""


class AccessReviewSpec(Struct, frozen=True, rename="camel", omit_defaults=True):
    user: str = ""
    groups: list[str] = []
    non_resource_attributes: NonResourceAttributes = NonResourceAttributes()
    resource_attributes: ResourceAttributes = ResourceAttributes()


class AccessReviewStatus(Struct, frozen=True, omit_defaults=True):
    allowed: bool = False


class AccessReview(Object, frozen=True, kw_only=True):
    """Asks whether a user may do something; answered in the status like a TokenReview. Partial."""

    spec: AccessReviewSpec = AccessReviewSpec()
    status: AccessReviewStatus = AccessReviewStatus()


T = TypeVar("T", bound=Object)


class Kind(Struct, Generic[T], frozen=True):
    """A kind of object: where the API serves it, and the struct it is decoded into."""

    api_version: str
    name: str
    plural: str
    type: type[T]
    namespaced: bool = True
    partial: bool = False
    subresources: tuple[str, ...] = field(default=())

    @property
    def group(self) -> str:
        """The API group; empty for the core group."""
        return self.api_version.rpartition("/")[0]


PODS = Kind("v1", "Pod", "pods", Pod, partial=True, subresources=("status", "binding"))
NODES = Kind("v1", "Node", "nodes", Node, namespaced=False, partial=True, subresources=("status",))
NAMESPACES = Kind("v1", "Namespace", "namespaces", Namespace, namespaced=False, partial=True)
CONFIG_MAPS = Kind("v1", "ConfigMap", "configmaps", ConfigMap)
EVENTS = Kind("v1", "Event", "events", Event, partial=True)
# Their metadata is all that is needed.
REPLICA_SETS = Kind("apps/v1", "ReplicaSet", "replicasets", Object, partial=True)
TOKEN_REVIEWS = Kind(
    "authentication.k8s.io/v1", "TokenReview", "tokenreviews", TokenReview, namespaced=False, partial=True
)
ACCESS_REVIEWS = Kind(
    "authorization.k8s.io/v1",
    "SubjectAccessReview",
    "subjectaccessreviews",
    AccessReview,
    namespaced=False,
    partial=True,
)
SECRETS = Kind("v1", "Secret", "secrets", Secret)
CLUSTER_ROLES = Kind(
    "rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", Object, namespaced=False, partial=True
)
DEPLOYMENTS = Kind("apps/v1", "Deployment", "deployments", Workload, partial=True)
ENDPOINT_SLICES = Kind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices", EndpointSlice, partial=True)
DAEMON_SETS = Kind("apps/v1", "DaemonSet", "daemonsets", Workload, partial=True)
MUTATING_WEBHOOKS = Kind(
    "admissionregistration.k8s.io/v1",
    "MutatingWebhookConfiguration",
    "mutatingwebhookconfigurations",
    WebhookConfiguration,
    namespaced=False,
    partial=True,
)
VALIDATING_WEBHOOKS = Kind(
    "admissionregistration.k8s.io/v1",
    "ValidatingWebhookConfiguration",
    "validatingwebhookconfigurations",
    WebhookConfiguration,
    namespaced=False,
    partial=True,
)
DISRUPTION_BUDGETS = Kind(
    "policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", DisruptionBudget, partial=True, subresources=("status",)
)
LEASES = Kind("coordination.k8s.io/v1", "Lease", "leases", Lease)

# An object as plain JSON values.
Raw = dict[str, Any]
# Returns the owner references of an object that is about to be created.
Owners = Callable[[], list[OwnerReference]]


def eviction(pod: str, namespace: str, uid: str) -> Raw:
    """Return an Eviction; the API server rejects it if the pod has another uid."""
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
        "deleteOptions": {"preconditions": {"uid": uid}},
    }


def binding(pod: str, namespace: str, node: str, uid: str, annotations: Mapping[str, str]) -> Raw:
    """Return a Binding; the API server rejects it if the pod has another uid."""
    return {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": pod, "namespace": namespace, "uid": uid, "annotations": dict(annotations)},
        "target": {"apiVersion": "v1", "kind": "Node", "name": node},
    }

"""Workloads whose controllers create pods themselves, with the fields that tell how many pods they lack.

Of all five, the controller tries at once when the object is updated, however long it would have waited after a failure
(read in kube-controller-manager 1.36). The controller of Jobs waits one second to see further changes.
"""

from msgspec import Struct, field

from cluster.objects import Kind, Object
from vcuda.pod import PodSpec


class TemplateMetadata(Struct, frozen=True, omit_defaults=True):
    annotations: dict[str, str] | None = None


class PodTemplate(Struct, frozen=True, omit_defaults=True):
    metadata: TemplateMetadata = TemplateMetadata()
    spec: PodSpec = PodSpec()


class PodCreatorSpec(Struct, frozen=True, rename="camel", omit_defaults=True):
    """`replicas` and `pod_management_policy` are of sets, the others of Jobs."""

    replicas: int | None = None
    pod_management_policy: str = ""
    parallelism: int | None = None
    completions: int | None = None
    suspend: bool | None = None
    pod_replacement_policy: str = ""
    managed_by: str | None = None
    template: PodTemplate | None = None


class WorkloadCondition(Struct, frozen=True, omit_defaults=True):
    type: str = ""
    status: str = ""


class PodCreatorStatus(Struct, frozen=True, rename="camel", omit_defaults=True):
    """The first two are of sets, then two of DaemonSets, and four of Jobs."""

    replicas: int = 0
    ready_replicas: int = 0
    desired_number_scheduled: int = 0
    current_number_scheduled: int = 0
    active: int = 0
    succeeded: int = 0
    failed: int = 0
    terminating: int | None = None
    conditions: list[WorkloadCondition] | None = None

    def has(self, *types: str) -> bool:
        """Whether one of these conditions is true."""
        return any(each.type in types and each.status == "True" for each in self.conditions or ())


class PodCreator(Object, frozen=True, kw_only=True):
    """A workload that creates pods; partial."""

    spec: PodCreatorSpec = field(default_factory=PodCreatorSpec)
    status: PodCreatorStatus = field(default_factory=PodCreatorStatus)


def pod_creator(api_version: str, name: str) -> Kind[PodCreator]:
    return Kind(api_version, name, f"{name.lower()}s", PodCreator, partial=True, subresources=("status",))


POD_CREATORS = (
    pod_creator("apps/v1", "ReplicaSet"),
    pod_creator("v1", "ReplicationController"),
    pod_creator("apps/v1", "StatefulSet"),
    pod_creator("apps/v1", "DaemonSet"),
    pod_creator("batch/v1", "Job"),
)

"""The objects under review, as far as Quotient decides on them.

Decoding passes over everything else. Nothing is ever written back from these structs: patches are built field by
field, so that fields newer than Quotient survive.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from vcuda.pod import Container, PodSpec

Loose = dict[str, Any]
# Expressions under `matchExpressions`, and under `matchFields`.
Term = dict[str, Sequence[Loose] | None]


class Owner(Struct, frozen=True, rename="camel"):
    """Who made an object."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class Metadata(Struct, frozen=True, rename="camel"):
    """An object's metadata; annotations absent and none at all are the same to a reader, not to a patch."""

    name: str = ""
    generate_name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: Sequence[Owner] | None = None

    @property
    def noted(self) -> dict[str, str]:
        """The annotations, whether or not there are any."""
        return self.annotations or {}

    @property
    def is_controlled(self) -> bool:
        """Whether a controller made the object, and would make it again."""
        return any(owner.controller for owner in self.owner_references or ())


class ConfigMap(Struct, frozen=True, rename="camel"):
    """A ConfigMap that may hold a quota."""

    metadata: Metadata = Metadata()
    data: dict[str, str] | None = None


class Variable(Struct, frozen=True, rename="camel"):
    """An environment variable."""

    name: str = ""
    value: str | None = None
    value_from: Loose | None = None


class Privileges(Struct, frozen=True):
    """What a container may do beyond others."""

    privileged: bool | None = None


class AdmittedContainer(Container, frozen=True, rename="camel"):
    """A container with what may get around its share."""

    env: Sequence[Variable] | None = None
    security_context: Privileges | None = None


class HostPath(Struct, frozen=True):
    """A folder of the node."""

    path: str = ""


class Volume(Struct, frozen=True, rename="camel"):
    """A volume, as far as it reaches into the node."""

    name: str = ""
    host_path: HostPath | None = None


class RequiredNodes(Struct, frozen=True, rename="camel"):
    """The nodes a pod must be on: any of these terms."""

    node_selector_terms: Sequence[Term] | None = None


class NodeAffinity(Struct, frozen=True):
    """Which nodes a pod wants."""

    required: RequiredNodes | None = msgspec.field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)


class Affinity(Struct, frozen=True, rename="camel"):
    """Where a pod wants to be."""

    node_affinity: NodeAffinity | None = None


class AdmittedSpec(PodSpec, frozen=True, rename="camel"):
    """A pod's spec with everything the rules look at."""

    containers: Sequence[AdmittedContainer] | None = None
    init_containers: Sequence[AdmittedContainer] | None = None
    ephemeral_containers: Sequence[AdmittedContainer] | None = None
    host_ipc: bool | None = msgspec.field(name="hostIPC", default=None)
    volumes: Sequence[Volume] | None = None
    affinity: Affinity | None = None
    tolerations: Sequence[Loose] | None = None
    resource_claims: Sequence[Loose] | None = None


class Pod(Struct, frozen=True):
    """A pod, or the template of one."""

    metadata: Metadata
    spec: AdmittedSpec


class Template(Struct, frozen=True):
    """A pod template, whose metadata may be left out."""

    spec: AdmittedSpec = AdmittedSpec()
    metadata: Metadata | None = None

    def as_pod(self) -> Pod:
        """See it as the pod that will be made of it."""
        return Pod(self.metadata or Metadata(), self.spec)


class WorkloadSpec(Struct, frozen=True):
    """What makes pods: how many, and of which template. Raw is kept to tell whether it changed."""

    template: Raw = Raw(b"null")
    replicas: int | None = None
    parallelism: int | None = None


class Workload(Struct, frozen=True):
    """A Deployment, StatefulSet, DaemonSet, ReplicaSet, ReplicationController or Job."""

    metadata: Metadata = Metadata()
    spec: WorkloadSpec = WorkloadSpec()


class CronSpec(Struct, frozen=True, rename="camel"):
    """A CronJob's spec."""

    job_template: Workload | None = None


class CronJob(Struct, frozen=True):
    """A Job with a clock around it."""

    metadata: Metadata = Metadata()
    spec: CronSpec = CronSpec()


class BindingTarget(Struct, frozen=True):
    """The node of a binding."""

    name: str = ""


class Binding(Struct, frozen=True):
    """A pod put on a node; its annotations end up on the pod."""

    metadata: Metadata
    target: BindingTarget = BindingTarget()

"""The objects under review, with the fields that admission reads.

Decoding ignores every other field. Nothing is written back from these structs: patches are built field by field, so
that fields of a newer Kubernetes survive.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from vcuda.pod import Container, PodSpec, Present

JsonObject = dict[str, Any]


# The expressions of a node selector term, under `matchExpressions` and `matchFields`.
Term = dict[str, Sequence[JsonObject] | None]


class Owner(Struct, frozen=True, rename="camel"):
    """An owner reference."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class AdmittedMetadata(Struct, frozen=True, rename="camel"):
    name: str = ""
    generate_name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    # None and {} differ for a patch: a key can only be added to a map that exists.
    annotations: dict[str, str] | None = None
    owner_references: Sequence[Owner] | None = None
    # Left undecoded: few reviews need them (`managed_fields`), and they are long.
    managed_fields: Raw = Raw(b"null")

    @property
    def annotations_or_empty(self) -> dict[str, str]:
        return self.annotations or {}

    @property
    def is_controlled(self) -> bool:
        """Whether a controller owns the object, and would create it again."""
        return any(owner.controller for owner in self.owner_references or ())


class ConfigMap(Struct, frozen=True, rename="camel"):
    metadata: AdmittedMetadata = AdmittedMetadata()
    data: dict[str, str] | None = None


class EnvVar(Struct, frozen=True, rename="camel", omit_defaults=True):
    name: str = ""
    value: str | None = None
    value_from: JsonObject | None = None


class EnvFromSource(Struct, frozen=True):
    """All keys of a ConfigMap or Secret as variables, each after a prefix."""

    prefix: str | None = None


class VolumeMount(Struct, frozen=True, rename="camel"):
    mount_path: str = ""


class SecurityContext(Struct, frozen=True):
    privileged: bool | None = None


class AdmittedContainer(Container, frozen=True, rename="camel"):
    """A container with the fields that could give it GPUs beyond its request."""

    env: Sequence[EnvVar] | None = None
    env_from: Sequence[EnvFromSource] | None = None
    volume_mounts: Sequence[VolumeMount] | None = None
    security_context: SecurityContext | None = None


class HostPath(Struct, frozen=True):
    path: str = ""


class Volume(Struct, frozen=True, rename="camel"):
    name: str = ""
    host_path: HostPath | None = None


class NodeSelector(Struct, frozen=True, rename="camel"):
    """Node selector terms; a node has to match one of them."""

    node_selector_terms: Sequence[Term] | None = None


class NodeAffinity(Struct, frozen=True):
    required: NodeSelector | None = msgspec.field(name="requiredDuringSchedulingIgnoredDuringExecution", default=None)


class Affinity(Struct, frozen=True, rename="camel"):
    node_affinity: NodeAffinity | None = None


class AdmittedSpec(PodSpec, frozen=True, rename="camel"):
    """A pod's spec with every field that admission checks or patches."""

    containers: Sequence[AdmittedContainer] | None = None
    init_containers: Sequence[AdmittedContainer] | None = None
    ephemeral_containers: Sequence[AdmittedContainer] | None = None
    host_ipc: bool | None = msgspec.field(name="hostIPC", default=None)
    volumes: Sequence[Volume] | None = None
    affinity: Affinity | None = None
    tolerations: Sequence[JsonObject] | None = None
    resource_claims: Sequence[Present] | None = None


def affinity_levels(spec: AdmittedSpec) -> tuple[Affinity | None, NodeAffinity | None, NodeSelector | None]:
    """Return the objects that lead to a pod's required node selector terms; None where one is absent."""
    affinity = spec.affinity
    node_affinity = affinity.node_affinity if affinity else None
    return affinity, node_affinity, node_affinity.required if node_affinity else None


def required_terms(spec: AdmittedSpec) -> list[Term]:
    *_, required = affinity_levels(spec)
    return list(required.node_selector_terms or ()) if required else []


class Pod(Struct, frozen=True):
    """A pod, or a pod template seen as the pod that a controller creates from it."""

    metadata: AdmittedMetadata
    spec: AdmittedSpec


class Template(Struct, frozen=True):
    """A pod template; unlike a pod's, its metadata may be absent."""

    spec: AdmittedSpec = AdmittedSpec()
    metadata: AdmittedMetadata | None = None

    def as_pod(self) -> Pod:
        return Pod(self.metadata or AdmittedMetadata(), self.spec)


class AdmittedWorkloadSpec(Struct, frozen=True):
    # Left undecoded, because most updates of a workload do not change its template: comparing bytes is enough.
    template: Raw = Raw(b"null")
    replicas: int | None = None
    parallelism: int | None = None


class AdmittedWorkload(Struct, frozen=True):
    """A Deployment, StatefulSet, DaemonSet, ReplicaSet, ReplicationController or Job."""

    metadata: AdmittedMetadata = AdmittedMetadata()
    spec: AdmittedWorkloadSpec = AdmittedWorkloadSpec()


class CronJobSpec(Struct, frozen=True, rename="camel"):
    job_template: AdmittedWorkload | None = None


class CronJob(Struct, frozen=True):
    metadata: AdmittedMetadata = AdmittedMetadata()
    spec: CronJobSpec = CronJobSpec()


class BindingTarget(Struct, frozen=True):
    """The node of a Binding."""

    name: str = ""


class Binding(Struct, frozen=True):
    """A Binding. The API server copies its annotations to the pod."""

    metadata: AdmittedMetadata
    target: BindingTarget = BindingTarget()

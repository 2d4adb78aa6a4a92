"""A pod as Quotient reads it: the few fields it needs, in Kubernetes' own shape.

Decoding ignores all other fields. Nothing is written back from these structs: a patch built from them would drop
fields that a newer Kubernetes has.
"""

from collections.abc import Sequence

from msgspec import Struct

ResourceList = dict[str, str | int | float]


class Present(Struct, frozen=True):
    """An object of which only matters that it is there."""


class Resources(Struct, frozen=True):
    """The resources of a container, as written in the manifest."""

    limits: ResourceList | None = None
    requests: ResourceList | None = None


class Container(Struct, frozen=True, rename="camel"):
    """A container or an init container; restart policy Always makes an init container a sidecar."""

    name: str = ""
    resources: Resources | None = None
    restart_policy: str | None = None


class PodSpec(Struct, frozen=True, rename="camel"):
    containers: Sequence[Container] | None = None
    init_containers: Sequence[Container] | None = None
    node_name: str | None = None
    scheduler_name: str | None = None
    priority: int | None = None
    preemption_policy: str | None = None

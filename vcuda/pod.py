"""A pod as Quotient reads it: the few fields it needs, in Kubernetes' own shape.

Decoding into these structs passes over everything else; nothing is ever written back from them.
"""

from collections.abc import Sequence

from msgspec import Struct

ResourceList = dict[str, str | int | float]


class Resources(Struct, frozen=True):
    """What a container asks for, as written."""

    limits: ResourceList | None = None
    requests: ResourceList | None = None


class Container(Struct, frozen=True, rename="camel"):
    """A container or an init container; restart policy Always makes an init container a sidecar."""

    name: str = ""
    resources: Resources | None = None
    restart_policy: str | None = None


class PodSpec(Struct, frozen=True, rename="camel"):
    """The part of a pod's spec that Quotient decides on."""

    containers: Sequence[Container] | None = None
    init_containers: Sequence[Container] | None = None
    node_name: str | None = None
    scheduler_name: str | None = None
    priority: int | None = None

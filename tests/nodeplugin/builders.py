"""Builders of cards and bound pods: a test shows only what matters to it."""

from collections.abc import Mapping
from typing import Any

from cluster.objects import Metadata
from nodeplugin.cards import Card
from nodeplugin.device_ids import Resource
from nodeplugin.pods import BoundPod
from vcuda.placement_annotation import GpuSlice
from vcuda.request import ContainerRequest, PodRequest, Role
from vcuda.vocabulary import Share

CARD_MIB = 40960


def card(index: int = 0, **changes: Any) -> Card:
    """A card whose minor number differs from its index."""
    made: dict[str, Any] = {
        "uuid": f"GPU-{index}",
        "index": index,
        "minor": 7 - index,
        "product": "NVIDIA A100-SXM4-40GB",
        "memory_mib": CARD_MIB,
    }
    return Card(**(made | changes))


def mig_part(number: int, parent: int = 0, **changes: Any) -> Card:
    """A MIG device of a card, with this GPU instance ID."""
    made = {
        "uuid": f"MIG-{number}",
        "parent": f"GPU-{parent}",
        "product": "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "memory_mib": 4864,
        "gpu_instance": number,
        "compute_instance": 0,
    }
    return card(parent, **(made | changes))


def requesting(name: str, role: Role, core: int, memory: int) -> tuple[ContainerRequest, dict[Resource, int]]:
    """A container with these amounts of the two resources; 0 means that it does not request one."""
    counts = {Resource.CORE: core, Resource.MEMORY: memory}
    request = ContainerRequest(name, role, Share(core, memory), "")
    return request, {resource: count for resource, count in counts.items() if count}


def app(name: str = "a", core: int = 50, memory: int = 4) -> tuple[ContainerRequest, dict[Resource, int]]:
    return requesting(name, Role.APP, core, memory)


def init(name: str = "i", core: int = 50, memory: int = 4) -> tuple[ContainerRequest, dict[Resource, int]]:
    return requesting(name, Role.INIT, core, memory)


def bound(
    name: str,
    *containers: tuple[ContainerRequest, dict[Resource, int]],
    placed: Mapping[str, tuple[GpuSlice, ...]] | None = None,
    **changes: Any,
) -> BoundPod:
    """A pod bound to this node, with one container unless others are given."""
    made = containers or (app(),)
    return BoundPod(
        metadata=Metadata(name=name, namespace="team", uid=f"uid-{name}"),
        request=PodRequest(tuple(request for request, _ in made)),
        counts={request.name: counts for request, counts in made},
        placed=None if placed is None else dict(placed),
        **changes,
    )

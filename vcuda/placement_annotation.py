"""The annotation `<domain>/gpu-placement`: which GPUs the containers of a pod got, and how much of each.

Written with the pod's binding, and again by the node plugin where it had to choose other GPUs.
"""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from vcuda.decoding import decoder_for

VERSION = 1


class GpuSlice(Struct, frozen=True, rename="camel"):
    """What a container got of one GPU."""

    uuid: str
    cores: int
    memory_mib: int = msgspec.field(name="memoryMiB")


class PlacementDocument(Struct, frozen=True):
    """The annotation: the slices of each GPU container, one for each of its GPUs."""

    v: int
    containers: dict[str, tuple[GpuSlice, ...]]


DECODER = decoder_for(PlacementDocument)


def encode_placement(containers: Mapping[str, Sequence[GpuSlice]]) -> str:
    return msgspec.json.encode(
        PlacementDocument(VERSION, {name: tuple(slices) for name, slices in containers.items()})
    ).decode()


def decode_placement(text: str) -> dict[str, tuple[GpuSlice, ...]] | None:
    """Return the slices by container name; None if the annotation is missing, unreadable or of another version."""
    try:
        document = DECODER.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        # Pods admitted before Quotient was installed may carry any text here: as good as no placement.
        return None
    return document.containers if document.v == VERSION else None


def placed_uuids(text: str) -> list[str]:
    """Return the UUIDs of all GPUs of a pod, sorted; none where `decode_placement` returns None."""
    return sorted({each.uuid for slices in (decode_placement(text) or {}).values() for each in slices})

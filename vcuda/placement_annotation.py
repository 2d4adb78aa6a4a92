"""Which GPUs the containers of a pod got, as it is written on the pod with its binding."""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from vcuda.decoding import decoder_for

VERSION = 1


class GpuSlice(Struct, frozen=True, rename="camel"):
    """What a container got of one card."""

    uuid: str
    cores: int
    memory_mib: int = msgspec.field(name="memoryMiB")


class PlacementDocument(Struct, frozen=True):
    """All GPU containers of a pod, one entry for each card."""

    v: int
    containers: dict[str, tuple[GpuSlice, ...]]


DECODER = decoder_for(PlacementDocument)


def encode_placement(containers: Mapping[str, Sequence[GpuSlice]]) -> str:
    """Write the annotation."""
    return msgspec.json.encode(
        PlacementDocument(VERSION, {name: tuple(given) for name, given in containers.items()})
    ).decode()


def decode_placement(text: str) -> dict[str, tuple[GpuSlice, ...]] | None:
    """Read the annotation; None if it is missing or not one of ours."""
    try:
        found = DECODER.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None
    return found.containers if found.v == VERSION else None


def placed_uuids(text: str) -> list[str]:
    """Give the uuids of the cards a pod got; none if the annotation is missing or not one of ours."""
    return sorted({each.uuid for slices in (decode_placement(text) or {}).values() for each in slices})

"""Which GPUs the containers of a pod got, as it is written on the pod with its binding."""

import msgspec
from msgspec import Struct

VERSION = 1


class Slice(Struct, frozen=True, rename="camel"):
    """What a container got of one card."""

    uuid: str
    cores: int
    memory_mib: int = msgspec.field(name="memoryMiB")


class Placement(Struct, frozen=True):
    """All GPU containers of a pod, one entry for each card."""

    v: int
    containers: dict[str, tuple[Slice, ...]]


DECODER = msgspec.json.Decoder(Placement)


def cards_in(text: str) -> list[str]:
    """Give the uuids of the cards a pod got; none if the annotation is missing or not one of ours."""
    try:
        found = DECODER.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return []
    return sorted({each.uuid for slices in found.containers.values() for each in slices}) if found.v == VERSION else []

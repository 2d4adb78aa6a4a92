"""The GPUs of a node, as the node plugin publishes them in its annotation."""

import msgspec
from msgspec import Struct

from vcuda.decoding import decoder_for
from vcuda.isolation import Isolation

VERSION = 1


class Gpu(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One card, or one MIG device. `links` says how well it reaches the others, by their uuid.

    `memory_mib` is 0 where the driver does not say: such a card is given as a whole only. `cordoned` cards keep their
    pods and take no others. `reason` says what is wrong with one that is not healthy.
    """

    uuid: str
    index: int
    model: str
    memory_mib: int = msgspec.field(name="memoryMiB")
    healthy: bool
    isolation: Isolation = Isolation.NONE
    numa: int | None = None
    links: dict[str, str] = {}
    minor: int | None = None
    capability: str = ""
    cordoned: bool = False
    reason: str = ""


class Inventory(Struct, frozen=True, omit_defaults=True):
    """All cards of a node, and its driver; readers pass over keys they do not know."""

    v: int
    gpus: tuple[Gpu, ...]
    driver: str = ""


def encode_inventory(gpus: tuple[Gpu, ...], driver: str = "") -> str:
    """Write the annotation."""
    return msgspec.json.encode(Inventory(VERSION, gpus, driver)).decode()


def decode_inventory(text: str) -> tuple[Gpu, ...]:
    """Read the annotation; a ValueError says what is wrong with it."""
    found = decoder_for(Inventory).decode(text)
    if found.v != VERSION:
        raise ValueError(f"inventory version {found.v} is not known here, {VERSION} is")
    return found.gpus

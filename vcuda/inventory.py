"""The annotation `<domain>/gpu-inventory`: the GPUs of a node, as its node plugin publishes them."""

import msgspec
from msgspec import Struct

from vcuda.decoding import decoder_for
from vcuda.isolation import Isolation

VERSION = 1


class Gpu(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One GPU, or one MIG device. `links` are the links to the node's other GPUs, by UUID.

    `memory_mib` is 0 where the driver does not report it: such a GPU is only given as a whole. A `cordoned` GPU keeps
    its pods and takes no new ones. `reason` says why a GPU is not healthy, or takes no new pods.
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


def unavailable_reason(gpu: Gpu) -> str:
    """Return why a GPU takes no new containers; empty if it does."""
    if not gpu.healthy:
        return gpu.reason or "unhealthy"
    return (gpu.reason or "cordoned") if gpu.cordoned else ""


class Inventory(Struct, frozen=True, omit_defaults=True):
    """All GPUs of a node, and its driver version. Readers ignore keys they do not know."""

    v: int
    gpus: tuple[Gpu, ...]
    driver: str = ""


def encode_inventory(gpus: tuple[Gpu, ...], driver: str = "") -> str:
    return msgspec.json.encode(Inventory(VERSION, gpus, driver)).decode()


def decode_inventory(text: str) -> tuple[Gpu, ...]:
    """Read the annotation; raises a ValueError that says what is wrong with it."""
    inventory = decoder_for(Inventory).decode(text)
    if inventory.v != VERSION:
        raise ValueError(f"inventory version {inventory.v} is not supported, expected {VERSION}")
    return inventory.gpus

"""The annotation `<domain>/gpu-inventory`: the GPUs of a node, as its node plugin publishes them."""

from typing import Any

import msgspec
from msgspec import Struct

from vcuda.decoding import convert, decoder_for
from vcuda.isolation import NO_ISOLATION, Isolation, isolation_from_word

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
    isolation: Isolation = NO_ISOLATION
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
    try:
        inventory = decoder_for(Inventory).decode(text)
    except msgspec.ValidationError:
        inventory = convert(with_isolation_objects(decoder_for(dict[str, Any]).decode(text)), Inventory)
    if inventory.v != VERSION:
        raise ValueError(f"inventory version {inventory.v} is not supported, expected {VERSION}")
    return inventory.gpus


def with_isolation_objects(inventory: dict[str, Any]) -> dict[str, Any]:
    """Return the inventory of an older node plugin in today's form: its isolation was one word for each GPU."""
    gpus = inventory.get("gpus")
    for gpu in gpus if isinstance(gpus, list) else ():
        if isinstance(gpu, dict) and isinstance(word := gpu.get("isolation"), str):
            gpu["isolation"] = msgspec.to_builtins(isolation_from_word(word))
    return inventory

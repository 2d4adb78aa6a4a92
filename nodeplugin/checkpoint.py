"""What this node has given to whom, in a file that survives restarts: versioned, checksummed, replaced atomically."""

import hashlib
import os
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from nodeplugin.cards import Card
from nodeplugin.device_ids import Resource
from vcuda.decoding import decoder_for
from vcuda.gpu_availability import GpuUsage
from vcuda.placement_annotation import GpuSlice

InjectionMode = Literal["native", "cdi", "nvidia-runtime"]

VERSION = 1
CHECKPOINT_FILE = "allocations.json"


class ContainerAllocation(Struct, frozen=True, rename="camel", omit_defaults=True):
    """What one container got: a token that names its folder, the device ids by which the kubelet knows it, and how.

    One that an ancestor gave has no token.
    """

    token: str
    ids: dict[Resource, tuple[str, ...]] = {}
    way: InjectionMode = "native"


class PodAllocation(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """What one pod holds: all its containers are placed at once, and then get their share one by one.

    `held` is the most it ever has of each card. `chosen_here` says that nobody else had placed it, or not so.
    """

    uid: str
    namespace: str
    name: str
    placed: dict[str, tuple[GpuSlice, ...]]
    held: dict[str, GpuUsage]
    containers: dict[str, ContainerAllocation] = {}
    chosen_here: bool = False

    @property
    def title(self) -> str:
        """Name its pod."""
        return f"{self.namespace}/{self.name}"

    def cards_of(self, container: str) -> list[str]:
        """Name the cards of a container."""
        return [given.uuid for given in self.placed.get(container, ())]


class AllocationCheckpoint(Struct, frozen=True, rename="camel", omit_defaults=True):
    """All holds of this node, by pod; and the cards that it had since it was booted, so that a missing one is known."""

    holds: dict[str, PodAllocation] = {}
    cards: tuple[Card, ...] = ()
    boot: str = ""
    way: InjectionMode | None = None


class CheckpointFile(Struct, frozen=True):
    """The file: the book as it is written, and its checksum."""

    v: int
    sha256: str
    data: msgspec.Raw


class BadCheckpoint(Exception):  # noqa: N818 - not a fault of the program
    """The file is not there or cannot be trusted; the message says why."""


def read_checkpoint(path: Path) -> AllocationCheckpoint:
    """Read the file; BadCheckpoint if there is none that can be trusted."""
    try:
        content = path.read_bytes()
    except OSError as wrong:
        raise BadCheckpoint(f"{path}: {wrong.strerror}") from None
    try:
        file = decoder_for(CheckpointFile).decode(content)
        if file.v != VERSION:
            raise BadCheckpoint(f"{path}: version {file.v} is not known here, {VERSION} is")
        if hashlib.sha256(bytes(file.data)).hexdigest() != file.sha256:
            raise BadCheckpoint(f"{path}: the checksum does not match")
        return decoder_for(AllocationCheckpoint).decode(file.data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as wrong:
        raise BadCheckpoint(f"{path}: {wrong}") from None


def write_checkpoint(path: Path, book: AllocationCheckpoint) -> None:
    """Replace the file, on the disk before this returns."""
    data = msgspec.json.encode(book)
    file = CheckpointFile(VERSION, hashlib.sha256(data).hexdigest(), msgspec.Raw(data))
    replace_file(path, msgspec.json.encode(file), durable=True)


def replace_file(path: Path, content: bytes, *, mode: int = 0o600, durable: bool = False) -> None:
    """Write a file so that readers see the old one or the new one, and a power cut leaves one of them."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), mode)
        if durable:
            os.fsync(file.fileno())
    scratch.replace(path)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

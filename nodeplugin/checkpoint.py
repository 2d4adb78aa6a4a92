"""The allocation checkpoint: which pod has which GPUs of this node, in a file that survives restarts.

The file is versioned, checksummed and replaced atomically. Its JSON keys are fixed; where an attribute has a different
name, the key is given by `field(name=...)`.
"""

import hashlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct, field

from nodeplugin.cards import Card
from nodeplugin.device_ids import Resource
from nodeplugin.isolation_ladder import applied_isolation
from vcuda.decoding import decoder_for
from vcuda.gpu_availability import GpuUsage
from vcuda.injection_modes import InjectionMode
from vcuda.isolation import NO_ISOLATION, Isolation
from vcuda.placement_annotation import GpuSlice

VERSION = 1
CHECKPOINT_FILE = "allocations.json"


class ContainerAllocation(Struct, frozen=True, rename="camel", omit_defaults=True):
    """One container's allocation. `token` names its folder and CDI device; it is empty in adopted allocations.

    `ids` are the device IDs by which the kubelet knows the container, `mode` is how its GPUs were injected, and
    `isolation` what enforces its limits: what its card offered then, which may differ from what it offers now.
    """

    token: str
    ids: dict[Resource, tuple[str, ...]] = {}
    mode: InjectionMode = field(name="way", default="native")
    # Releases before this field enforced nothing.
    isolation: Isolation = NO_ISOLATION


class PodAllocation(Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True):
    """One pod's allocation. All its containers are placed at once, then allocated one by one.

    `usage` is the peak usage of each card over the pod's life. `chosen_here` is set if this node placed the pod,
    because it had no placement or an impossible one: then the placement annotation has to be written.
    """

    uid: str
    namespace: str
    name: str
    placed: dict[str, tuple[GpuSlice, ...]]
    usage: dict[str, GpuUsage] = field(name="held")
    containers: dict[str, ContainerAllocation] = {}
    chosen_here: bool = False

    @property
    def title(self) -> str:
        return f"{self.namespace}/{self.name}"

    def cards_of(self, container: str) -> list[str]:
        """Return the UUIDs of a container's cards; none for an unknown container."""
        return [given.uuid for given in self.placed.get(container, ())]

    def isolation_of(self, container: str) -> Isolation:
        """Return what enforces the limits of a container; nothing for one that was adopted with a part of a card."""
        given = self.containers.get(container)
        return applied_isolation(self.placed.get(container, ()), lambda _: given.isolation if given else NO_ISOLATION)


class AllocationCheckpoint(Struct, frozen=True, rename="camel", omit_defaults=True):
    """All allocations of this node, by pod UID.

    `cards` are those seen since the boot `boot_id`, so that one which disappears is reported as missing. `mode` is the
    injection mode in use; it applies again if the container runtime's version cannot be read at the next start. A new
    checkpoint is `incomplete` until it has been compared with all pods: running ones may be missing.
    """

    pods: dict[str, PodAllocation] = field(name="holds", default_factory=dict)
    cards: tuple[Card, ...] = ()
    boot_id: str = field(name="boot", default="")
    mode: InjectionMode | None = field(name="way", default=None)
    incomplete: bool = False


class CheckpointFile(Struct, frozen=True):
    """The envelope on disk: `sha256` is the checksum of `data` byte for byte, so `data` stays encoded."""

    v: int
    sha256: str
    data: msgspec.Raw


class BadCheckpoint(Exception):  # noqa: N818 - not a fault of the program
    """The checkpoint is missing, damaged or of another version; the message says which."""


def read_checkpoint(path: Path) -> AllocationCheckpoint:
    """Read the checkpoint; raises BadCheckpoint and nothing else, whatever the file contains."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadCheckpoint(f"{path}: {error.strerror}") from None
    try:
        file = decoder_for(CheckpointFile).decode(content)
        if file.v != VERSION:
            raise BadCheckpoint(f"{path}: unsupported version {file.v}, expected {VERSION}")
        if hashlib.sha256(bytes(file.data)).hexdigest() != file.sha256:
            raise BadCheckpoint(f"{path}: checksum mismatch")
        return decoder_for(AllocationCheckpoint).decode(file.data)
    # Text that is not UTF-8, and JSON nested deeper than the decoder's stack, are damage like any other.
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise BadCheckpoint(f"{path}: damaged, not the JSON of an allocation checkpoint") from None


def write_checkpoint(path: Path, checkpoint: AllocationCheckpoint) -> None:
    """Replace the checkpoint; it is on disk when this returns."""
    data = msgspec.json.encode(checkpoint)
    file = CheckpointFile(VERSION, hashlib.sha256(data).hexdigest(), msgspec.Raw(data))
    replace_file(path, msgspec.json.encode(file), durable=True)


def replace_file(path: Path, content: bytes, *, mode: int = 0o600, durable: bool = False) -> None:
    """Write a file atomically: readers see the old content or the new one, never a part.

    With `durable` the same holds after a power failure.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    # A crash may have left one.
    scratch.unlink(missing_ok=True)
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        # The mode given to open() is reduced by the umask.
        os.fchmod(file.fileno(), mode)
        if durable:
            os.fsync(file.fileno())
    scratch.replace(path)
    if durable:
        # Makes the rename durable: it is an entry of the folder, not of the file.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

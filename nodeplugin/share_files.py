"""The two files through which a container's share is enforced in its processes: layouts of preload/formats.h.

The limits are written here, in place and under a sequence lock: processes in the container have mapped the file. What
they have allocated is in the other file, which they write. It is read here and never mapped: a program could cut it
short meanwhile. Nothing in it is trusted; it tells what programs believe, NVML tells what is.
"""

import fcntl
import os
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from nodeplugin.checkpoint import replace_file

# What a context takes until one was measured on this model and driver.
DEFAULT_CONTEXT_MIB = 300
LIMITS_FILE, USAGE_FOLDER, USAGE_FILE = "gpu-limits", "usage", "gpu-usage"
VERSION = 1
LIMITS_MAGIC, USAGE_MAGIC = 0x4C505551, 0x55505551
MAX_CARDS, MAX_SLOTS, MAX_SHARED = 16, 1024, 512
# magic, version, sequence, number of cards, time of the last feedback, driver's version and folder
LIMITS_HEADER = struct.Struct("<IIIIQ32s256s")
# uuid; memory, context and residual in bytes; cores, core limit
CARD_LIMITS = struct.Struct("<64sQQQII")
# Of a card: its context and residual, behind uuid and memory.
MEASURED, MEASURED_OFFSET = struct.Struct("<QQ"), 72
SEQUENCE, SEQUENCE_OFFSET = struct.Struct("<I"), 8
UPDATED, UPDATED_OFFSET = struct.Struct("<Q"), 16
LIMITS_BYTES = LIMITS_HEADER.size + MAX_CARDS * CARD_LIMITS.size
# magic, version, slots used, shared entries used, serial
USAGE_HEADER = struct.Struct("<IIIII44x")
SHARED_MEMORY = struct.Struct(f"<QII64s{MAX_SLOTS // 64}Q")
SLOT = struct.Struct(f"<II{2 * MAX_CARDS}Q")
SLOTS_OFFSET = USAGE_HEADER.size + MAX_SHARED * SHARED_MEMORY.size
USAGE_BYTES = SLOTS_OFFSET + MAX_SLOTS * SLOT.size
# The lock that a process holds as long as it uses a slot: `struct flock` of 64-bit Linux, and fcntl's command for open
# file descriptions, which Python does not name.
OFD_GETLK, FLOCK = 36, struct.Struct("@hhqqi4x")


class CardLimits(Struct, frozen=True):
    """What a container may use of one card."""

    uuid: str
    memory_bytes: int
    context_bytes: int
    cores: int
    core_limit: int
    residual_bytes: int = 0


class AccountedUsage(Struct, frozen=True):
    """What the processes of a container say they have allocated, by card in the order of the limits."""

    card_bytes: tuple[int, ...]
    # In the container's PID namespace.
    pids: tuple[int, ...]


def write_limits(folder: Path, cards: Sequence[CardLimits], driver_version: str, driver_folder: str) -> None:
    """Create the file, or change it in place: what has mapped it sees each card's numbers as they belong together."""
    path = folder / LIMITS_FILE
    content = bytearray(LIMITS_BYTES)
    header = (VERSION, 0, len(cards), time.monotonic_ns(), driver_version.encode(), driver_folder.encode())
    LIMITS_HEADER.pack_into(content, 0, LIMITS_MAGIC, *header)
    for number, card in enumerate(cards):
        numbers = (card.memory_bytes, card.context_bytes, card.residual_bytes, card.cores, card.core_limit)
        CARD_LIMITS.pack_into(content, card_offset(number), card.uuid.encode(), *numbers)
    if not has_size(path, LIMITS_BYTES):
        replace_file(path, bytes(content), mode=0o444)
        return
    after = SEQUENCE_OFFSET + SEQUENCE.size
    change_in_place(path, [(0, bytes(content[:SEQUENCE_OFFSET])), (after, bytes(content[after:]))])


def change_in_place(path: Path, parts: Sequence[tuple[int, bytes]]) -> None:
    """Write parts of the file, by their offsets, under its sequence lock."""
    with path.open("r+b", buffering=0) as file:
        (sequence,) = SEQUENCE.unpack(os.pread(file.fileno(), SEQUENCE.size, SEQUENCE_OFFSET))
        # Odd while the rest changes, also if an earlier writer has ended in between.
        odd = (sequence | 1) & 0xFFFFFFFF
        os.pwrite(file.fileno(), SEQUENCE.pack(odd), SEQUENCE_OFFSET)
        for offset, part in parts:
            os.pwrite(file.fileno(), part, offset)
        os.pwrite(file.fileno(), SEQUENCE.pack((odd + 1) & 0xFFFFFFFF), SEQUENCE_OFFSET)


def read_limits(folder: Path) -> list[CardLimits]:
    """Return the cards of a container's limits; none if the file cannot be read."""
    with suppress(OSError, struct.error):
        content = (folder / LIMITS_FILE).read_bytes()
        count = LIMITS_HEADER.unpack_from(content)[3]
        return [card_limits(CARD_LIMITS.unpack_from(content, card_offset(number))) for number in range(count)]
    return []


def card_offset(number: int) -> int:
    return LIMITS_HEADER.size + number * CARD_LIMITS.size


def card_limits(fields: tuple[Any, ...]) -> CardLimits:
    uuid, memory_bytes, context_bytes, residual_bytes, cores, core_limit = fields
    name = uuid.rstrip(b"\0").decode(errors="replace")
    return CardLimits(name, memory_bytes, context_bytes, cores, core_limit, residual_bytes)


def update_limits(folder: Path, number: int, context_bytes: int, residual_bytes: int) -> None:
    """Tell the library what was measured of one card."""
    numbers = MEASURED.pack(context_bytes, residual_bytes)
    updated = UPDATED.pack(time.monotonic_ns())
    parts = [(UPDATED_OFFSET, updated), (card_offset(number) + MEASURED_OFFSET, numbers)]
    change_in_place(folder / LIMITS_FILE, parts)


def has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def create_usage(folder: Path) -> None:
    """Create the file that the container's processes write, unless it is there: its processes may be running."""
    path = folder / USAGE_FOLDER / USAGE_FILE
    if has_size(path, USAGE_BYTES):
        return
    path.parent.mkdir(exist_ok=True)
    content = bytearray(USAGE_BYTES)
    USAGE_HEADER.pack_into(content, 0, USAGE_MAGIC, VERSION, 0, 0, 0)
    # Any user of the container may run programs on its GPUs.
    replace_file(path, bytes(content), mode=0o666)


def read_usage(folder: Path, card_count: int) -> AccountedUsage | None:
    """Return what live processes have accounted; None if the file cannot be read, as when a program cut it short."""
    with suppress(OSError, struct.error), (folder / USAGE_FOLDER / USAGE_FILE).open("rb", buffering=0) as file:
        content = file.read(USAGE_BYTES)
        slots = [SLOT.unpack_from(content, SLOTS_OFFSET + number * SLOT.size) for number in range(MAX_SLOTS)]
        live = {number for number, slot in enumerate(slots) if slot[0] and is_locked(file.fileno(), 1 + number)}
        granted = [sum(slots[number][2 + 2 * card] for number in live) for card in range(card_count)]
        for card, bytes_ in shared_bytes(content, live):
            if card < card_count:
                granted[card] += bytes_
        return AccountedUsage(tuple(granted), tuple(slots[number][0] for number in sorted(live)))
    return None


def shared_bytes(content: bytes, live: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Yield card and bytes of each entry that a live process holds."""
    held = 0
    for number in live:
        held |= 1 << number
    for number in range(MAX_SHARED):
        size, card, _, _, *holders = SHARED_MEMORY.unpack_from(content, USAGE_HEADER.size + number * SHARED_MEMORY.size)
        mask = sum(word << (64 * index) for index, word in enumerate(holders))
        if size and mask & held:
            yield card, size


def is_locked(file: int, byte: int) -> bool:
    wanted = FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0)
    kind, *_ = FLOCK.unpack(fcntl.fcntl(file, OFD_GETLK, wanted))
    return bool(kind != fcntl.F_UNLCK)

"""The two files through which a container's share is enforced in its processes: layouts of preload/formats.h.

The limits are written here, in place and under a sequence lock: processes in the container have mapped the file. What
they have allocated is in the other file, which they write. It is read here and never mapped: a program could cut it
short meanwhile. Nothing in it is trusted; it tells what programs believe, NVML tells what is.
"""

import fcntl
import os
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct

from nodeplugin.checkpoint import replace_file

# What a context takes until one was measured on this model and driver.
DEFAULT_CONTEXT_MIB = 300
LIMITS_FILE, USAGE_FOLDER, USAGE_FILE = "gpu-limits", "usage", "gpu-usage"
VERSION = 2
LIMITS_MAGIC, USAGE_MAGIC = 0x4C505551, 0x55505551
MAX_CARDS, MAX_SLOTS, MAX_SHARED = 16, 1024, 4096
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


# Guards the sequence of limits files: containers start on other threads than the one that measures them.
WRITING = threading.Lock()


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
    with WRITING, path.open("r+b", buffering=0) as file:
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
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def create_usage(path: Path) -> None:
    """Create the file that the container's processes write, unless it is there: its processes may be running."""
    if has_size(path, USAGE_BYTES):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Any user of the container may run programs on its GPUs.
    replace_file(path, USAGE_HEADER.pack(USAGE_MAGIC, VERSION, 0, 0, 0), mode=0o666)
    # Not written: what its processes touch is their memory, not the plugin's.
    os.truncate(path, USAGE_BYTES)


def read_usage(path: Path, card_count: int) -> AccountedUsage | None:
    """Return what live processes have accounted; None if the file cannot be read, as when a program cut it short."""
    # Whatever programs have made of the file: nothing is followed or waited for, not even a lease.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError, struct.error):
        file = os.open(path, flags)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return None
            return parse_usage(os.pread(file, USAGE_BYTES, 0), card_count, lambda slot: is_locked(file, 1 + slot))
        finally:
            os.close(file)
    return None


def parse_usage(content: bytes, card_count: int, is_live: Callable[[int], bool]) -> AccountedUsage:
    _, _, slots_used, shared_used, _ = USAGE_HEADER.unpack_from(content)
    granted, live, pids = [0] * card_count, 0, []
    for number in range(min(slots_used, MAX_SLOTS)):
        pid, _, *pairs = SLOT.unpack_from(content, SLOTS_OFFSET + number * SLOT.size)
        if pid and is_live(number):
            live |= 1 << number
            pids.append(pid)
            granted = [sum_ + pairs[2 * card] for card, sum_ in enumerate(granted)]
    for number in range(min(shared_used, MAX_SHARED)):
        size, card, _, _, *holders = SHARED_MEMORY.unpack_from(content, USAGE_HEADER.size + number * SHARED_MEMORY.size)
        if size and card < card_count and live & sum(word << (64 * index) for index, word in enumerate(holders)):
            granted[card] += size
    return AccountedUsage(tuple(granted), tuple(pids))


def is_locked(file: int, byte: int) -> bool:
    wanted = FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0)
    kind, *_ = FLOCK.unpack(fcntl.fcntl(file, OFD_GETLK, wanted))
    return bool(kind != fcntl.F_UNLCK)

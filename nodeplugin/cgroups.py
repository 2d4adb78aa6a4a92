"""Which container a process belongs to, from the names of its cgroups.

Runtimes and cgroup drivers write these names in many ways, with cgroup v1 on a line for each controller and with v2 on
one. All of them hold the pod's uid, with dashes, underscores or neither, and after it the container's id. Seen from a
private cgroup namespace the path begins with dots, and its end is the same.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

UID = re.compile(r"pod([0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12})(?![0-9a-f])")
CONTAINER = re.compile(r"(?<![0-9a-f])([0-9a-f]{64})(?![0-9a-f])")
BARE_UID = 32


class ProcessOwner(Struct, frozen=True):
    """Where a process runs: the pod's uid, and the container's id, which may be missing."""

    uid: str
    container_id: str = ""


def place_in(text: str, known: Collection[str] = ()) -> ProcessOwner | None:
    """Find the container in what the kernel says of a process; of nested pods, a known one, else the outermost."""
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        found = list(UID.finditer(path))
        if not found:
            continue
        chosen = next((each for each in found if uid_of(each[1], known) in known), found[0])
        ids = CONTAINER.findall(path, chosen.end())
        return ProcessOwner(uid_of(chosen[1], known), ids[0] if ids else "")
    return None


def uid_of(text: str, known: Collection[str] = ()) -> str:
    """Write a uid as the API server does; that of a static pod has no dashes."""
    bare = text.replace("_", "").replace("-", "")
    if bare == text and bare in known:
        return bare
    return "-".join((bare[:8], bare[8:12], bare[12:16], bare[16:20], bare[20:]))


def place_of(pid: int, known: Collection[str] = (), proc: Path = Path("/proc")) -> ProcessOwner | None:
    """Find the container of a process; None if it is in none, or has ended."""
    with suppress(OSError):
        return place_in((proc / str(pid) / "cgroup").read_text(), known)
    return None


def running_pods(uids: Collection[str], proc: Path = Path("/proc")) -> set[str]:
    """Say which of these pods still have processes on this node."""
    found: set[str] = set()
    for pid in processes(proc):
        if len(found) == len(uids):
            break
        place = place_of(pid, uids, proc)
        if place is not None and place.uid in uids:
            found.add(place.uid)
    return found


def processes(proc: Path) -> Iterator[int]:
    """List the processes of this machine."""
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            yield int(entry.name)

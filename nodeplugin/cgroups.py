"""Maps a process to its pod and container by the names of its cgroups.

Container runtimes and cgroup drivers format these names differently, on one line per controller with cgroup v1 and on a
single line with v2. All of them contain the pod's uid (with dashes, with underscores, or bare) followed by the
container's id. Inside a private cgroup namespace the path starts with "..", but its end is the same.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

UID = re.compile(r"pod([0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12})(?![0-9a-f])")
CONTAINER = re.compile(r"(?<![0-9a-f])([0-9a-f]{64})(?![0-9a-f])")


class ProcessOwner(Struct, frozen=True):
    """The pod and the container of a process; `container_id` is empty for a process in the pod's own cgroup."""

    uid: str
    container_id: str = ""


def parse_owner(text: str, known_uids: Collection[str] = ()) -> ProcessOwner | None:
    """Parse the content of /proc/<pid>/cgroup; None if the process is in no pod."""
    for line in text.splitlines():
        path = line.split(":", 2)[-1]
        matches = list(UID.finditer(path))
        if not matches:
            continue
        # A path holds two pods where nodes run in pods (kind, nested clusters). The pod of this node's kubelet counts:
        # a known one, else the outermost.
        pod = next((match for match in matches if normalize_uid(match[1], known_uids) in known_uids), matches[0])
        ids = CONTAINER.findall(path, pod.end())
        return ProcessOwner(normalize_uid(pod[1], known_uids), ids[0] if ids else "")
    return None


def normalize_uid(text: str, known_uids: Collection[str] = ()) -> str:
    """Format a uid as the API server does, with dashes."""
    bare = text.replace("_", "").replace("-", "")
    # The kubelet names static pods by a hash without dashes, which looks like a bare uid.
    if bare == text and bare in known_uids:
        return bare
    return "-".join((bare[:8], bare[8:12], bare[12:16], bare[16:20], bare[20:]))


def process_owner(pid: int, known_uids: Collection[str] = (), proc: Path = Path("/proc")) -> ProcessOwner | None:
    """Return the owner of a process; None if it is in no pod, or has exited."""
    with suppress(OSError):
        return parse_owner((proc / str(pid) / "cgroup").read_text(), known_uids)
    return None


def running_pods(uids: Collection[str], proc: Path = Path("/proc")) -> set[str]:
    """Return those of the given pods that still have processes on this node."""
    running: set[str] = set()
    for pid in process_ids(proc):
        if len(running) == len(uids):
            break
        owner = process_owner(pid, uids, proc)
        if owner is not None and owner.uid in uids:
            running.add(owner.uid)
    return running


def process_ids(proc: Path) -> Iterator[int]:
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            yield int(entry.name)

"""What a cluster could leave on a machine, compared before and after a test.

Other clusters and other users may be active at the same time. So processes, cgroups and folders are attributed to one
cluster, and of the machine's shared state only the traces that Kubernetes' programs are known to leave are compared.
"""

import os
import re
from pathlib import Path

from msgspec import Struct

from tests.cluster import cgroups
from tests.cluster.layout import MARK, Layout

FOLDERS = ("/", "/etc", "/opt", "/run", "/var", "/var/lib", "/var/log", "/var/run/netns", "/etc/cni", "/usr/libexec")
SUSPECTS = re.compile(r"kube|cni|containerd|pods|containers|netns|etcd|quotient|runc|volume")
SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")


class Machine(Struct, frozen=True):
    """State that all processes of the machine share."""

    mounts: frozenset[str]
    links: frozenset[str]
    folders: frozenset[str]
    sysctls: frozenset[str]


def machine() -> Machine:
    return Machine(
        frozenset(" ".join(line.split()[3:5]) for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        frozenset(listed("/sys/class/net")),
        frozenset(f"{folder}/{name}" for folder in FOLDERS for name in listed(folder) if SUSPECTS.search(name)),
        frozenset(f"{name}={(Path('/proc/sys') / name).read_text().strip()}" for name in SYSCTLS),
    )


def left(before: Machine, place: Layout) -> dict[str, list[str]]:
    """Return what a cluster has left, by category; categories without a trace are omitted."""
    now = machine()
    found = {name: sorted(getattr(now, name) ^ getattr(before, name)) for name in now.__struct_fields__}
    found["processes"] = [f"{pid} {command}" for pid, command in processes(place)]
    found["cgroups"] = [
        folder for root in cgroups.hierarchies() for folder, _, _ in os.walk(root) if place.cgroup in folder
    ]
    found["state"] = [str(place.state)] if place.state.exists() else []
    return {name: differing for name, differing in found.items() if differing}


def processes(place: Layout) -> list[tuple[int, str]]:
    """Return the processes of one cluster: they have its mark in their environment, or run in its cgroup."""
    marks = (f"{MARK}={place.ident}".encode(), place.cgroup.encode())
    found: list[tuple[int, str]] = []
    for entry in Path("/proc").iterdir():
        try:
            text = (entry / "environ").read_bytes() + (entry / "cgroup").read_bytes() if entry.name.isdecimal() else b""
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace") if text else ""
        except OSError:
            continue
        if any(mark in text for mark in marks):
            found.append((int(entry.name), command))
    return found


def listed(folder: str) -> list[str]:
    """Return the names in a folder; none if it does not exist."""
    try:
        return [entry.name for entry in Path(folder).iterdir()]
    except OSError:
        return []

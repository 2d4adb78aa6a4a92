"""What a cluster could leave on a machine: looked at before and after."""

import os
import tempfile
from pathlib import Path

from msgspec import Struct

from tests.cluster import cgroups

FOLDERS = ("/", "/etc", "/opt", "/run", "/var", "/var/lib", "/var/log", "/var/run/netns", "/etc/cni", "/usr/libexec")
SYSCTLS = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")


class Traces(Struct, frozen=True):
    """The machine as others see it."""

    processes: frozenset[str]
    mounts: frozenset[str]
    links: frozenset[str]
    cgroups: frozenset[str]
    folders: frozenset[str]
    sysctls: frozenset[str]

    def beyond(self, before: "Traces") -> dict[str, list[str]]:
        """Say what is here that was not before, or was and is not any more, by kind."""
        found = {name: sorted(getattr(self, name) ^ getattr(before, name)) for name in self.__struct_fields__}
        return {name: differing for name, differing in found.items() if differing}


def look(own_sessions: frozenset[int] = frozenset()) -> Traces:
    """Look at the machine; processes of sessions that were there before belong to somebody else."""
    return Traces(
        frozenset(processes(own_sessions)),
        frozenset(" ".join(line.split()[3:5]) for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        frozenset(listed("/sys/class/net")),
        frozenset(folder for root in cgroups.hierarchies() for folder, _, _ in os.walk(root)),
        frozenset(f"{folder}/{name}" for folder in FOLDERS for name in listed(folder))
        | frozenset(name for name in listed(tempfile.gettempdir()) if name.startswith("quotient")),
        frozenset(f"{name}={(Path('/proc/sys') / name).read_text().strip()}" for name in SYSCTLS),
    )


def sessions() -> frozenset[int]:
    """Give the sessions of all processes."""
    return frozenset(session for _, session, _ in walk())


def processes(others: frozenset[int]) -> list[str]:
    """Name the processes that are neither the kernel's nor of other sessions."""
    return [f"{pid} {command}" for pid, session, command in walk() if command and session not in others]


def walk() -> list[tuple[int, int, str]]:
    """List pid, session and command line of every process."""
    found: list[tuple[int, int, str]] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        found.append((int(entry.name), int(fields[3]), command))
    return found


def listed(folder: str) -> list[str]:
    """List a folder that may not be there."""
    try:
        return [entry.name for entry in Path(folder).iterdir()]
    except OSError:
        return []

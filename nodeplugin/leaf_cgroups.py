"""Finds the cgroup v2 folder of a container, on which the driver's memory limit is set.

That is the cgroup of the container's first process. It is read from the process and not from the runtime's state or the
kubelet's naming scheme, which differ between runtimes and cgroup drivers.
"""

from pathlib import Path

from nodeplugin.cgroups import ProcessOwner, parse_owner

CONTROLLER = "dmem"
CONTROLLERS, SUBTREE = "cgroup.controllers", "cgroup.subtree_control"
UNIFIED = "0::"
# The kernel appends this to the path of a cgroup that was removed.
REMOVED = " (deleted)"


class NoLeafCgroup(Exception):  # noqa: N818 - not a fault of the program
    """A process is in no cgroup that can be limited; the message says why."""


def find_cgroup2(host: Path) -> Path | None:
    """Return the root of the cgroup v2 hierarchy of the host, whose root file system is at `host`; None without one."""
    # Hybrid hosts mount it beside the hierarchies of v1.
    places = (host / "sys/fs/cgroup", host / "sys/fs/cgroup/unified")
    return next((each for each in places if (each / CONTROLLERS).is_file()), None)


def unified_path(text: str) -> str:
    """Return the path within cgroup v2, from the content of /proc/<pid>/cgroup; NoLeafCgroup if there is none."""
    path = next((line.removeprefix(UNIFIED) for line in text.splitlines() if line.startswith(UNIFIED)), "")
    parts = path.split("/")
    if not path.startswith("/") or path == "/":
        raise NoLeafCgroup("the process is in no cgroup of version 2")
    if ".." in parts or "." in parts or "" in parts[1:]:
        # Seen from a cgroup namespace that does not contain the process.
        raise NoLeafCgroup(f"the process has the cgroup {path}, which the node plugin cannot see")
    if path.endswith(REMOVED):
        raise NoLeafCgroup("the process has a cgroup that was removed")
    return path


def read_leaf(pid: int, root: Path, known_uids: frozenset[str], proc: Path) -> tuple[Path, ProcessOwner]:
    """Return the cgroup folder of a process below `root`, and whose it is; NoLeafCgroup says why there is none."""
    try:
        path = unified_path((proc / str(pid) / "cgroup").read_text())
    except (OSError, UnicodeError) as error:
        raise NoLeafCgroup(f"the cgroup of process {pid} cannot be read: {error}") from None
    # Of this line only: on hybrid hosts the others are of version 1, and a process may have another place there.
    owner = parse_owner(UNIFIED + path, known_uids)
    if owner is None or not owner.container_id:
        raise NoLeafCgroup(f"the cgroup {path} of process {pid} is not that of a container of a pod")
    leaf = root / path[1:]
    if not leaf.is_dir():
        raise NoLeafCgroup(f"the cgroup {leaf} of process {pid} does not exist")
    return leaf, owner


def enable_controller(root: Path, leaf: Path) -> None:
    """Enable the kernel's controller of device memory down to a leaf; OSError if that is not possible.

    The kubelet enables only the controllers that it knows. A kernel without this one is left alone.
    """
    for folder in (root, *(root / each for each in reversed(leaf.relative_to(root).parents[:-1]))):
        if CONTROLLER not in read_words(folder / CONTROLLERS):
            return
        if CONTROLLER not in read_words(folder / SUBTREE):
            (folder / SUBTREE).write_text(f"+{CONTROLLER}")


def read_words(file: Path) -> list[str]:
    return file.read_text().split()

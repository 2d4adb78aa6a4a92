"""The cgroups a test cluster makes: they outlive processes and namespaces, so they are removed by name."""

import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def hierarchies() -> list[Path]:
    """Find the roots: one with cgroup v2, one for each set of controllers with v1."""
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT]
    return sorted({folder.resolve() for folder in ROOT.iterdir() if (folder / "cgroup.procs").exists()})


def make(name: str) -> None:
    """Make a cgroup of this name in every hierarchy, all controllers enabled below it."""
    for root in hierarchies():
        (root / name).mkdir(exist_ok=True)
        if (root / "cgroup.controllers").exists():
            enabled = (root / "cgroup.controllers").read_text().split()
            for folder in (root, root / name):
                (folder / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in enabled))


def remove(name: str, timeout_s: float = 10.0) -> None:
    """Remove a cgroup and all below it; the kernel lets go of the last process only a moment after its end."""
    deadline = time.monotonic() + timeout_s
    for root in hierarchies():
        for folder, _, _ in os.walk(root / name, topdown=False):
            while Path(folder).exists():
                try:
                    Path(folder).rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)

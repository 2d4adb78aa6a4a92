"""The cgroups of a test cluster: they outlive processes and namespaces, so they have to be removed by name."""

import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def hierarchies() -> list[Path]:
    """Return the root folders: one with cgroup v2, one for each set of controllers with v1."""
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT]
    return sorted({folder.resolve() for folder in ROOT.iterdir() if (folder / "cgroup.procs").exists()})


def make(name: str) -> None:
    """Create a cgroup in every hierarchy, with all controllers enabled below it."""
    for root in hierarchies():
        (root / name).mkdir(exist_ok=True)
        if (root / "cgroup.controllers").exists():
            enabled = (root / "cgroup.controllers").read_text().split()
            for folder in (root, root / name):
                (folder / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in enabled))


def remove(name: str, timeout_s: float = 10.0) -> None:
    """Remove a cgroup with all below it. Retried, as the kernel releases ended processes with some delay."""
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

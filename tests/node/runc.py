"""Containers of a real runc, without containerd and kubelet: for what depends on the runtime alone."""

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deploy.debian import unpack_packages
from tests.cluster import cgroups
from tests.cluster.layout import DEBIAN_PACKAGES

TIMEOUT_S = 30


class Runc:
    """A runc with state and cgroups of its own, so that it meets no other container of the machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cgroup = folder, f"quotient-runc-{secrets.token_hex(6)}"
        self._debian = unpack_packages(DEBIAN_PACKAGES)

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of runc; its messages are in a file, as a container that is created keeps the streams."""
        libraries = [*self._debian.glob("usr/lib/*-linux-gnu*"), *self._debian.glob("lib/*-linux-gnu*")]
        log = self.folder / "runc.log"
        command = [str(self._debian / "usr/sbin/runc"), "--root", str(self.folder / "state"), *arguments]
        with log.open("w") as stream:
            done = subprocess.run(
                command,
                env=os.environ | {"LD_LIBRARY_PATH": ":".join(map(str, libraries))},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                check=False,
                timeout=TIMEOUT_S,
            )
        return subprocess.CompletedProcess(command, done.returncode, log.read_text())

    def bundle(self, container_id: str, uid: str, hooks: Mapping[str, Any]) -> Path:
        """Write a container of a pod, as containerd configures it; returns the folder for `runc create`."""
        made = self.folder / container_id[:12]
        (made / "rootfs/bin").mkdir(parents=True)
        shutil.copy(self._debian / "bin/busybox", made / "rootfs/bin/busybox")
        config = {
            "ociVersion": "1.0.2",
            "root": {"path": "rootfs"},
            "process": {
                "args": ["/bin/busybox", "sh", "-c", "/bin/busybox touch /started; /bin/busybox sleep 100"],
                "cwd": "/",
                "user": {"uid": 0, "gid": 0},
                "env": ["PATH=/bin"],
            },
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
            "hooks": dict(hooks),
            "linux": {
                "cgroupsPath": self.cgroup_path(container_id, uid),
                "namespaces": [{"type": each} for each in ("pid", "mount", "ipc", "uts")],
            },
        }
        (made / "config.json").write_text(json.dumps(config))
        return made

    def cgroup_path(self, container_id: str, uid: str) -> str:
        return f"/{self.cgroup}/kubepods/burstable/pod{uid}/{container_id}"

    def remove(self) -> None:
        for each in (self.folder / "state").glob("*"):
            self.run("delete", "--force", each.name)
        cgroups.remove(self.cgroup)


@contextmanager
def real_runc(folder: Path) -> Iterator[Runc]:
    """A runc that leaves nothing behind."""
    made = Runc(folder)
    try:
        yield made
    finally:
        made.remove()

"""Links /dev/char/<major>:<minor> to the driver's device nodes, where systemd looks devices up by their numbers.

Where the kubelet uses systemd's cgroup driver, `systemctl daemon-reload` sets the device rules of running containers
again, and leaves out each device without such a link: the container loses its GPU. udev makes the links of other
devices, but NVIDIA's driver does not announce its own to udev.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import structlog

from nodeplugin.rooted_paths import resolve_links

CHAR_FOLDER = "char"
# Cards and control nodes, the capabilities of MIG devices, and channels to the memory of other machines.
NODE_PATTERNS = ("nvidia*", "nvidia-caps/*", "nvidia-caps-imex-channels/*")


class DeviceLinks:
    """Keeps the links in the host's /dev; `host` is the path at which this process sees the host's root."""

    def __init__(self, host: Path) -> None:
        self._host, self._reported = host, ""
        self._log = structlog.get_logger()

    def update(self, dev: Path) -> None:
        """Create links to the nodes in `dev` that have none, and replace those that lead to another device.

        A failure is logged once: containers run without the links, until systemd is reloaded.
        """
        folder = self._host / "dev" / CHAR_FOLDER
        # Without systemd there is no such folder, and no program that would read it.
        if not folder.is_dir():
            return
        try:
            for node, number in nvidia_nodes(dev):
                link = folder / f"{os.major(number)}:{os.minor(number)}"
                if device_number(resolve_links(link, self._host)) != number:
                    replace_link(link, self._target(node))
                    self._log.info("device_link_created", path=str(link), node=str(node))
        except OSError as error:
            if str(error) != self._reported:
                self._log.error(
                    "device_links_not_created",
                    error=str(error),
                    effect="`systemctl daemon-reload` detaches running containers from their GPUs",
                    remedy=f"mount the host's /dev writable at {self._host / 'dev'}, or run on the host: "
                    "nvidia-ctk system create-dev-char-symlinks --create-all",
                )
            self._reported = str(error)
        else:
            self._reported = ""

    def _target(self, node: Path) -> str:
        relative = node.relative_to(self._host)
        # As udev does it; nodes in the root of a driver container are outside of /dev.
        return f"../{relative.relative_to('dev')}" if relative.parts[0] == "dev" else f"/{relative}"


def nvidia_nodes(dev: Path) -> Iterator[tuple[Path, int]]:
    """Yield the driver's device nodes with their device numbers."""
    for pattern in NODE_PATTERNS:
        for path in sorted(dev.glob(pattern)):
            status = path.lstat()
            if stat.S_ISCHR(status.st_mode):
                yield path, status.st_rdev


def device_number(path: Path) -> int | None:
    """Return the number of a device node; None if it is none."""
    with suppress(OSError):
        status = path.lstat()
        return status.st_rdev if stat.S_ISCHR(status.st_mode) else None
    return None


def replace_link(link: Path, target: str) -> None:
    """Point a link to another target. It exists at any moment: systemd may be reading it."""
    scratch = link.with_name(f".quotient-{link.name}")
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(target)
    scratch.replace(link)

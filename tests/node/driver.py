"""A driver for a node without GPUs, laid out as a driver container lays out the real one."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from nodeplugin import fake

MAJOR = 195
VERSION = "550.54.15"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
PROGRAM = Path(__file__).with_name("nvidia-smi.sh")
PRODUCTS = {"H200": ("NVIDIA H200", 196608), "A100": ("NVIDIA A100-SXM4-40GB", 40960), "T4": ("Tesla T4", 15360)}


def cards(*kinds: str, first: int = 0) -> list[dict[str, Any]]:
    """Describe cards; minor numbers are in reverse order of indexes, as on many machines."""
    return [
        {
            "uuid": uuid(first + index),
            "minor": len(kinds) - 1 - index,
            "product": PRODUCTS[kind][0],
            "memoryMiB": PRODUCTS[kind][1],
            "numa": index * 2 // len(kinds),
        }
        for index, kind in enumerate(kinds)
    ]


def uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"


def nvidia_smi(described: list[dict[str, Any]]) -> str:
    """Return a program that prints which of these cards a container has."""
    keys = ("uuid", "index", "minor", "memoryMiB", "product")
    rows = ["|".join(str((card | {"index": index})[key]) for key in keys) for index, card in enumerate(described)]
    return PROGRAM.read_text().replace("@VERSION@", VERSION).replace("@CARDS@", "\n".join(rows))


class FakeDriver:
    """A folder laid out like the root of a driver. `first` numbers its cards, so that two nodes have different ones."""

    def __init__(self, root: Path, first: int = 0) -> None:
        self.root, self._first = root, first
        self.libraries = root / LIBRARIES

    def install(self, *kinds: str, **more: Any) -> "FakeDriver":
        """Create libraries, programs and device nodes."""
        described = cards(*kinds, first=self._first)
        self._description = {"driver": VERSION, "cards": described, **more}
        fake.install_cuda(self.libraries, self._description)
        compiler = f"libnvidia-ptxjitcompiler.so.{VERSION}"
        (self.libraries / compiler).write_text(f"{compiler}\n")
        link = self.libraries / "libnvidia-ptxjitcompiler.so.1"
        link.unlink(missing_ok=True)
        link.symlink_to(compiler)
        program = self.root / "usr/bin/nvidia-smi"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(nvidia_smi(described))
        program.chmod(0o755)
        (self.root / "dev").mkdir(exist_ok=True)
        for card in described:
            self.make_node(f"nvidia{card['minor']}", MAJOR, card["minor"])
        self.make_node("nvidiactl", MAJOR, 255)
        self.make_node("nvidia-uvm", 511, 0)
        self.make_node("nvidia-uvm-tools", 511, 1)
        return self

    def make_node(self, name: str, major: int, minor: int) -> None:
        path = self.root / "dev" / name
        if not path.exists():
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            path.chmod(0o666)

    def describe(self) -> None:
        """Reset the driver to the cards it was installed with; reported errors stay reported."""
        events = yaml.safe_load((self.libraries / fake.DESCRIPTION).read_text()).get("events", [])
        fake.describe(self.libraries, self._description | ({"events": events} if events else {}))

    def change(self, how: Callable[[dict[str, Any]], None]) -> None:
        """Change what the driver reports from now on."""
        described = yaml.safe_load((self.libraries / fake.DESCRIPTION).read_text())
        how(described)
        fake.describe(self.libraries, described)

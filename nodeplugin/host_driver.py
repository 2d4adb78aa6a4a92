"""The driver's files on this node: device nodes, libraries and programs, for containers on a stock runtime.

The driver may be installed on the host, or live in a folder of its own, as a driver in a container does. Its libraries
and programs are laid out once for each version below the plugin's folder and reached through the link `current`, so
that what containers were promised holds across driver upgrades and reboots.
"""

import hashlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import structlog
from msgspec import Struct

from nodeplugin.cards import Card
from nodeplugin.nvml import LIBRARY

# Where a driver is, below the host's root: installed, or put there by a container.
DRIVER_ROOTS = ("", "run/nvidia/driver", "home/kubernetes/bin/nvidia")
LIBRARY_FOLDERS = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/local/nvidia/lib64",
    "lib",
)
PROGRAM_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin", "usr/local/bin", "usr/local/nvidia/bin", "opt/bin")
PROGRAMS = (
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
)
LIBRARIES = re.compile(
    r"lib(cuda|cudadebugger|nvcuvid|nvoptix|vdpau_nvidia|(GLX|EGL|GLESv1_CM|GLESv2)_nvidia"
    r"|nvidia-(ml|cfg|ptxjitcompiler|fatbinaryloader|opencl|compiler|nvvm|gpucomp|allocator|encode|opticalflow|fbc|ifr"
    r"|rtcore|ngx|eglcore|glcore|glsi|tls|glvkspirv|egl-wayland|egl-gbm|pkcs11|pkcs11-openssl3|sandboxutils))"
    r"\.so(\.[0-9.]+)?"
)
CURRENT = "current"
# The numbers of the driver's device nodes; uvm and the capabilities of MIG have theirs from the kernel.
MAJOR, CONTROL_MINOR, MODESET_MINOR = 195, 255, 254
NODE_MODE = 0o666
MODPROBE_S = 20
MOST_LINKS = 40


class DeviceNode(Struct, frozen=True):
    """A device node: where it is on the host, and in the container."""

    host: str
    container: str


class HostDriver:
    """Finds what the driver has put on the host. `host` is where its root is seen from here."""

    def __init__(self, host: Path, driver: str = "", proc: Path = Path("/proc")) -> None:
        self._host, self._proc, self._wanted = host, proc, driver
        self._log = structlog.get_logger()
        self.find()

    def find(self) -> None:
        """Look where the driver is; one in a container comes later than this plugin may."""
        self.root = self._found_root(self._wanted)
        own = self.root / "dev"
        # A driver in a container has device nodes of its own, where it has any.
        self.dev = own if (own / "nvidiactl").exists() else self._host / "dev"

    def _found_root(self, driver: str) -> Path:
        if driver:
            return self._host / driver.lstrip("/")
        for each in DRIVER_ROOTS:
            root = self._host / each
            if any(followed(root / folder / LIBRARY, root).exists() for folder in LIBRARY_FOLDERS):
                return root
        return self._host

    def library(self) -> Path | None:
        """Find NVML; None if it is left to the loader."""
        for folder in self._library_folders():
            named = self.root / folder / LIBRARY
            for each in (named, followed(named, self.root)):
                if each.exists():
                    return each
        return None

    def _library_folders(self) -> Iterator[str]:
        yield from LIBRARY_FOLDERS
        with suppress(OSError):
            for file in sorted((self.root / "etc/ld.so.conf.d").glob("*.conf")):
                for line in file.read_text(errors="replace").splitlines():
                    if line.startswith("/"):
                        yield line.strip().lstrip("/")

    def on_host(self, path: Path) -> str:
        """Say where something is for the kubelet, which sees the host as it is."""
        return "/" + str(path.relative_to(self._host))

    # Device nodes.

    def nodes_of(self, cards: Iterable[Card]) -> list[DeviceNode]:
        """List the device nodes that a container with these cards needs, and make those that are missing."""
        found: dict[str, DeviceNode] = {}
        for card in cards:
            name = f"nvidia{card.minor}"
            self._make(name, MAJOR, card.minor)
            found[name] = self._node(name)
            found |= {each.container: each for each in self._capabilities(card)}
        for name, needed in (
            ("nvidiactl", True),
            ("nvidia-uvm", True),
            ("nvidia-uvm-tools", False),
            ("nvidia-modeset", False),
        ):
            if needed:
                self._make_control(name)
            if (self.dev / name).exists():
                found[name] = self._node(name)
        return list(found.values())

    def _node(self, name: str) -> DeviceNode:
        return DeviceNode(self.on_host(self.dev / name), f"/dev/{name}")

    def _capabilities(self, card: Card) -> Iterator[DeviceNode]:
        """Find the nodes by which a part of a card may be used."""
        if not card.is_mig:
            return
        folder = self._proc / f"driver/nvidia/capabilities/gpu{card.minor}/mig/gi{card.gpu_instance}"
        for file in (folder / "access", folder / f"ci{card.compute_instance}" / "access"):
            with suppress(OSError, StopIteration):
                lines = file.read_text().splitlines()
                minor = int(next(line.split(":")[1] for line in lines if line.startswith("DeviceFileMinor")))
                name = f"nvidia-caps/nvidia-cap{minor}"
                (self.dev / "nvidia-caps").mkdir(exist_ok=True)
                self._make(name, self._major("nvidia-caps"), minor)
                if (self.dev / name).exists():
                    yield self._node(name)

    def _make_control(self, name: str) -> None:
        if name == "nvidiactl":
            self._make(name, MAJOR, CONTROL_MINOR)
            return
        if not (self.dev / name).exists():
            if not self._major("nvidia-uvm"):
                self._load_uvm()
            self._make(name, self._major("nvidia-uvm"), 0)
            self._make("nvidia-uvm-tools", self._major("nvidia-uvm"), 1)

    def _make(self, name: str, major: int, minor: int) -> None:
        path = self.dev / name
        if path.exists() or not major:
            return
        try:
            os.mknod(path, stat.S_IFCHR | NODE_MODE, os.makedev(major, minor))
            path.chmod(NODE_MODE)
        except FileExistsError:
            return
        self._log.info("device_node_made", path=str(path), major=major, minor=minor)

    def _major(self, name: str) -> int:
        """Ask the kernel for the number of a kind of device; 0 if it has none."""
        with suppress(OSError):
            for line in (self._proc / "devices").read_text().splitlines():
                words = line.split()
                if len(words) == 2 and words[1] == name:  # noqa: PLR2004 - number and name
                    return int(words[0])
        return 0

    def _load_uvm(self) -> None:
        """Have the kernel load the module that CUDA needs; drivers do so only when somebody asks."""
        for folder in PROGRAM_FOLDERS:
            program = self.root / folder / "nvidia-modprobe"
            if program.exists():
                command = ["chroot", str(self.root), self.on_root(program), "-u", "-c=0"]
                try:
                    done = subprocess.run(command, capture_output=True, timeout=MODPROBE_S, check=False)  # noqa: S603
                except subprocess.TimeoutExpired:
                    self._log.warning("uvm_not_loaded", cause=f"nvidia-modprobe took longer than {MODPROBE_S} s")
                    return
                self._log.info("uvm_loaded", code=done.returncode, said=done.stderr.decode(errors="replace")[-300:])
                return

    def on_root(self, path: Path) -> str:
        """Say where something is for a program whose root is the driver's."""
        return "/" + str(path.relative_to(self.root))

    # Libraries and programs.

    def files(self) -> dict[str, Path]:
        """Find libraries and programs: where each is to be below the driver's folder, and where it is on the host."""
        found: dict[str, Path] = {}
        for folder in self._library_folders():
            with suppress(OSError):
                for file in sorted((self.root / folder).iterdir()):
                    if LIBRARIES.fullmatch(file.name) and followed(file, self.root).is_file():
                        found.setdefault(f"lib64/{file.name}", file)
        for name in PROGRAMS:
            for folder in PROGRAM_FOLDERS:
                if (self.root / folder / name).is_file():
                    found.setdefault(f"bin/{name}", self.root / folder / name)
        return found

    def lay_out(self, folder: Path, version: str) -> Path | None:
        """Lay the driver's files out below a folder, once for each driver; gives the link to them, None without any."""
        files = self.files()
        if not any(name.startswith("lib64/libcuda") for name in files):
            self._log.warning("no_driver_libraries", root=str(self.root))
        if not files:
            return None
        target = folder / f"{version or 'unknown'}-{fingerprint(files)}"
        if not target.exists():
            copy_all(files, target, self.root)
            self._log.info("driver_laid_out", folder=str(target), files=len(files))
        link = folder / CURRENT
        if link.is_dir() and not link.is_symlink():
            # Where nothing was, a runtime made a folder for a container that started without this plugin.
            shutil.rmtree(link)
        if not link.is_symlink() or link.readlink().name != target.name:
            scratch = folder / f".{CURRENT}.new"
            scratch.unlink(missing_ok=True)
            scratch.symlink_to(target.name)
            scratch.replace(link)
        return link

    @staticmethod
    def remove_old(folder: Path) -> None:
        """Remove the files of drivers before this one; only while no container uses any."""
        current = (folder / CURRENT).readlink().name if (folder / CURRENT).is_symlink() else ""
        for each in folder.iterdir() if folder.is_dir() else ():
            if each.name not in {CURRENT, current}:
                shutil.rmtree(each, ignore_errors=True)


def fingerprint(files: dict[str, Path]) -> str:
    """Tell one set of files from another without reading them."""
    told = hashlib.sha256()
    for name, file in sorted(files.items()):
        found = file.lstat()
        told.update(f"{name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return told.hexdigest()[:8]


def followed(path: Path, root: Path) -> Path:
    """Follow a link as a process would whose root is the driver's: Debian leads its libraries through /etc."""
    for _ in range(MOST_LINKS):
        if not path.is_symlink():
            break
        to = path.readlink()
        path = root / str(to).lstrip("/") if to.is_absolute() else path.parent / to
    return path


def copy_all(files: dict[str, Path], target: Path, root: Path) -> None:
    """Put files into a new folder, at once as a whole: linked where the file system is the same, else copied."""
    scratch = target.with_name(f".{target.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    for folder in ("bin", "lib64"):
        (scratch / folder).mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        if file.is_symlink() and f"lib64/{file.readlink().name}" in files:
            (scratch / name).symlink_to(file.readlink().name)
            continue
        source = followed(file, root)
        try:
            os.link(source, scratch / name)
        except OSError:
            shutil.copy2(source, scratch / name)
    scratch.replace(target)

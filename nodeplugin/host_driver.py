"""The NVIDIA driver's files on the host: device nodes, libraries and programs.

A stock runtime knows nothing of GPUs, so containers get these files as device nodes and mounts. The driver may be
installed on the host, or in a folder of its own by a driver container. Libraries and programs are copied once per
driver version below the plugin's folder and mounted through the symlink `current`: the kubelet stores mount paths, and
they must stay valid across driver upgrades and reboots.
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

# Where a driver may be, below the host's root: installed, or by the driver containers of NVIDIA's operator and of GKE.
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
# Fixed device numbers. The majors of nvidia-uvm and nvidia-caps (MIG) are assigned at load time: see /proc/devices.
MAJOR, CONTROL_MINOR = 195, 255
# Containers run as any user; access is limited by their device cgroup, not by the mode.
NODE_MODE = 0o666
MODPROBE_TIMEOUT_S = 20
# As many symlinks as Linux follows in one path before it fails with ELOOP.
MAX_LINKS = 40


class DeviceNode(Struct, frozen=True):
    """A device node: its path on the host, and its path in the container."""

    host: str
    container: str


class HostDriver:
    """Locates the driver on the host. `host` is the path at which this process sees the host's root.

    `driver_root` is the driver's root on the host; if it is empty, the known places are searched.
    """

    def __init__(self, host: Path, driver_root: str = "", proc: Path = Path("/proc")) -> None:
        self._host, self._proc, self._driver_root = host, proc, driver_root
        self._log = structlog.get_logger()
        self.locate()

    def locate(self) -> None:
        """Search for the driver again: a driver container may start after this plugin."""
        self.root = self._find_root()
        own = self.root / "dev"
        # Some driver containers create device nodes in their own root, some on the host.
        self.dev = own if (own / "nvidiactl").exists() else self._host / "dev"

    def _find_root(self) -> Path:
        if self._driver_root:
            return self._host / self._driver_root.lstrip("/")
        for candidate in DRIVER_ROOTS:
            root = self._host / candidate
            if any(resolve_links(root / folder / LIBRARY, root).exists() for folder in LIBRARY_FOLDERS):
                return root
        return self._host

    def find_library(self) -> Path | None:
        """Return the path of NVML; None leaves the search to the dynamic loader."""
        for folder in self._library_folders():
            path = self.root / folder / LIBRARY
            # The link itself is preferred; its absolute target may exist only below the driver's root.
            for candidate in (path, resolve_links(path, self.root)):
                if candidate.exists():
                    return candidate
        return None

    def _library_folders(self) -> Iterator[str]:
        yield from LIBRARY_FOLDERS
        # Distributions may install the driver elsewhere and configure the dynamic loader accordingly.
        with suppress(OSError):
            for file in sorted((self.root / "etc/ld.so.conf.d").glob("*.conf")):
                for line in file.read_text(errors="replace").splitlines():
                    if line.startswith("/"):
                        yield line.strip().lstrip("/")

    def host_path(self, path: Path) -> str:
        """Convert a path of this process to the host's path, which kubelet and runtime use."""
        return "/" + str(path.relative_to(self._host))

    def device_nodes(self, cards: Iterable[Card]) -> list[DeviceNode]:
        """Return the device nodes that a container with these cards needs; creates those that do not exist."""
        nodes: dict[str, DeviceNode] = {}
        for card in cards:
            name = f"nvidia{card.minor}"
            self._create(name, MAJOR, card.minor)
            nodes[name] = self._node(name)
            nodes |= {node.container: node for node in self._mig_nodes(card)}
        for name, is_required in (
            ("nvidiactl", True),
            ("nvidia-uvm", True),
            ("nvidia-uvm-tools", False),
            ("nvidia-modeset", False),
        ):
            if is_required:
                self._create_control(name)
            if (self.dev / name).exists():
                nodes[name] = self._node(name)
        return list(nodes.values())

    def _node(self, name: str) -> DeviceNode:
        return DeviceNode(self.host_path(self.dev / name), f"/dev/{name}")

    def _mig_nodes(self, card: Card) -> Iterator[DeviceNode]:
        """Yield the nodes that grant access to a MIG device: one of its GPU instance, one of its compute instance."""
        if not card.is_mig:
            return
        folder = self._proc / f"driver/nvidia/capabilities/gpu{card.minor}/mig/gi{card.gpu_instance}"
        for file in (folder / "access", folder / f"ci{card.compute_instance}" / "access"):
            with suppress(OSError, StopIteration):
                lines = file.read_text().splitlines()
                minor = int(next(line.split(":")[1] for line in lines if line.startswith("DeviceFileMinor")))
                name = f"nvidia-caps/nvidia-cap{minor}"
                (self.dev / "nvidia-caps").mkdir(exist_ok=True)
                self._create(name, self._major("nvidia-caps"), minor)
                if (self.dev / name).exists():
                    yield self._node(name)

    def _create_control(self, name: str) -> None:
        if name == "nvidiactl":
            self._create(name, MAJOR, CONTROL_MINOR)
            return
        if not (self.dev / name).exists():
            if not self._major("nvidia-uvm"):
                self._load_uvm()
            self._create(name, self._major("nvidia-uvm"), 0)
            self._create("nvidia-uvm-tools", self._major("nvidia-uvm"), 1)

    def _create(self, name: str, major: int, minor: int) -> None:
        path = self.dev / name
        if path.exists() or not major:
            return
        try:
            os.mknod(path, stat.S_IFCHR | NODE_MODE, os.makedev(major, minor))
            path.chmod(NODE_MODE)  # mknod applies the umask
        except FileExistsError:
            return
        self._log.info("device_node_created", path=str(path), major=major, minor=minor)

    def _major(self, name: str) -> int:
        """Return the kernel's major number of a character device; 0 if its module is not loaded."""
        with suppress(OSError):
            for line in (self._proc / "devices").read_text().splitlines():
                words = line.split()
                if len(words) == 2 and words[1] == name:  # noqa: PLR2004 - number and name
                    return int(words[0])
        return 0

    def _load_uvm(self) -> None:
        """Load the kernel module that CUDA needs; the driver itself loads it only on demand."""
        for folder in PROGRAM_FOLDERS:
            program = self.root / folder / "nvidia-modprobe"
            if program.exists():
                # In the driver's root, where its libraries and /lib/modules are.
                command = ["chroot", str(self.root), self._path_in_root(program), "-u", "-c=0"]
                try:
                    done = subprocess.run(command, capture_output=True, timeout=MODPROBE_TIMEOUT_S, check=False)  # noqa: S603
                except subprocess.TimeoutExpired:
                    self._log.warning("uvm_not_loaded", error=f"nvidia-modprobe timed out after {MODPROBE_TIMEOUT_S} s")
                    return
                stderr = done.stderr.decode(errors="replace")[-300:]
                self._log.info("uvm_load_requested", exit_code=done.returncode, stderr=stderr)
                return

    def _path_in_root(self, path: Path) -> str:
        return "/" + str(path.relative_to(self.root))

    def find_files(self) -> dict[str, Path]:
        """Return libraries and programs: the path of each below the container's driver folder, and its path here."""
        files: dict[str, Path] = {}
        for folder in self._library_folders():
            with suppress(OSError):
                for file in sorted((self.root / folder).iterdir()):
                    if LIBRARIES.fullmatch(file.name) and resolve_links(file, self.root).is_file():
                        files.setdefault(f"lib64/{file.name}", file)
        for name in PROGRAMS:
            for folder in PROGRAM_FOLDERS:
                if (self.root / folder / name).is_file():
                    files.setdefault(f"bin/{name}", self.root / folder / name)
        return files

    def install_files(self, folder: Path, version: str) -> Path | None:
        """Copy the driver's files below a folder, once per driver, and point the link `current` at them.

        Returns the link; None if the host has no driver files.
        """
        files = self.find_files()
        if not any(name.startswith("lib64/libcuda") for name in files):
            self._log.warning("driver_libraries_not_found", root=str(self.root))
        if not files:
            return None
        target = folder / f"{version or 'unknown'}-{fingerprint(files)}"
        if not target.exists():
            copy_files(files, target, self.root)
            self._log.info("driver_files_installed", folder=str(target), files=len(files))
        link = folder / CURRENT
        if link.is_dir() and not link.is_symlink():
            # A runtime creates missing mount sources as directories, here for a container that started without us.
            shutil.rmtree(link)
        if not link.is_symlink() or link.readlink().name != target.name:
            # Renamed over the old link: a container that starts at this moment must find one of the two.
            scratch = folder / f".{CURRENT}.new"
            scratch.unlink(missing_ok=True)
            scratch.symlink_to(target.name)
            scratch.replace(link)
        return link

    @staticmethod
    def remove_old_files(folder: Path) -> None:
        """Remove the copies of earlier drivers; call this only while no container has them mounted."""
        current = (folder / CURRENT).readlink().name if (folder / CURRENT).is_symlink() else ""
        for entry in folder.iterdir() if folder.is_dir() else ():
            if entry.name not in {CURRENT, current}:
                shutil.rmtree(entry, ignore_errors=True)


def fingerprint(files: dict[str, Path]) -> str:
    """Identify a set of files by name, size and modification time, without reading hundreds of MiB of libraries."""
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        status = file.lstat()
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:8]


def resolve_links(path: Path, root: Path) -> Path:
    """Resolve a symlink as a process chrooted to `root` would: Debian links its libraries through /etc/alternatives."""
    for _ in range(MAX_LINKS):
        if not path.is_symlink():
            break
        target = path.readlink()
        path = root / str(target).lstrip("/") if target.is_absolute() else path.parent / target
    return path


def copy_files(files: dict[str, Path], target: Path, root: Path) -> None:
    """Create the folder `target` with these files, atomically: it either does not exist or is complete."""
    scratch = target.with_name(f".{target.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    for folder in ("bin", "lib64"):
        (scratch / folder).mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        # Links between libraries stay links (libcuda.so.1 -> libcuda.so.550.54.15); others become regular files.
        if file.is_symlink() and f"lib64/{file.readlink().name}" in files:
            (scratch / name).symlink_to(file.readlink().name)
            continue
        source = resolve_links(file, root)
        try:
            os.link(source, scratch / name)
        except OSError:  # another file system, or one without hard links
            shutil.copy2(source, scratch / name)
    scratch.replace(target)

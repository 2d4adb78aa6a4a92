"""The NVIDIA driver's files on the host: device nodes, libraries and programs.

A stock runtime knows nothing of GPUs, so containers get these files as device nodes and mounts. The driver may be
installed on the host, or in a folder of its own by a driver container. Libraries and programs are copied once per
driver version below the plugin's folder and mounted through the symlink `current`: the kubelet stores mount paths, and
they must stay valid across driver upgrades and reboots.
"""

import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import structlog
from msgspec import Struct

from nodeplugin.cards import Card
from nodeplugin.device_links import DeviceLinks
from nodeplugin.driver_files import (
    DRIVER_ROOTS,
    LIBRARY_FOLDERS,
    LIBRARY_SUBFOLDERS,
    PROGRAM_FOLDERS,
    PROGRAMS,
    SOCKETS,
    find_descriptions,
    is_library,
)
from nodeplugin.nvml import LIBRARY
from nodeplugin.rooted_paths import resolve_links

CURRENT = "current"
# Fixed device numbers. The majors of nvidia-uvm and nvidia-caps (MIG) are assigned at load time: see /proc/devices.
MAJOR, CONTROL_MINOR = 195, 255
# Containers run as any user; access is limited by their device cgroup, not by the mode.
NODE_MODE = 0o666
MODPROBE_TIMEOUT_S = 20
UVM = "nvidia-uvm"
# Where containers have the driver's programs and libraries.
CONTAINER_FOLDER = "/usr/local/nvidia"
# Below the driver's folder: files that containers have at the same path from their root.
SHARED = "share"
# For ldconfig in a container: at its start by our hook, or whenever its image runs it.
LOADER_FILE, LOADER_TEXT = f"{SHARED}/etc/ld.so.conf.d/00-quotient.conf", f"{CONTAINER_FOLDER}/lib64\n"


class MissingDeviceNode(OSError):  # noqa: N818 - a state of the node
    """A device node without which a container's GPUs do not work, and that cannot be created; the message says why."""


class DeviceNode(Struct, frozen=True):
    """A device node: its path on the host, and its path in the container."""

    host: str
    container: str


class HostDriver:
    """Locates the driver on the host. `host` is the path at which this process sees the host's root.

    `driver_root` is the driver's root on the host; if it is empty, the known places are searched.
    """

    def __init__(self, host: Path, driver_root: str = "", proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._host, self._proc, self._sys, self._driver_root = host, proc, sys, driver_root
        self._links = DeviceLinks(host)
        self._log = structlog.get_logger()
        self.locate()

    @property
    def host(self) -> Path:
        """The path at which this process sees the host's root."""
        return self._host

    def locate(self) -> None:
        """Search for the driver again: a driver container may start after this plugin."""
        self.root = self._find_root()
        own = self.root / "dev"
        # Some driver containers create device nodes in their own root, some on the host.
        self.dev = own if (own / "nvidiactl").exists() else self._host / "dev"

    def _find_root(self) -> Path:
        if self._driver_root:
            return resolve_links(self._host / self._driver_root.lstrip("/"), self._host)
        for candidate in DRIVER_ROOTS:
            root = resolve_links(self._host / candidate, self._host)
            if any(resolve_links(root / folder / LIBRARY, root).exists() for folder in LIBRARY_FOLDERS):
                return root
        return self._host

    def find_library(self, name: str = LIBRARY) -> Path | None:
        """Return the path of a library of the driver, by default NVML; None leaves the search to the dynamic loader."""
        for folder in self._library_folders():
            path = self.root / folder / name
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
        """Return the device nodes that a container with these cards needs; creates those that do not exist.

        Raises MissingDeviceNode: programs in a container without one of them fail, and do not tell the cause.
        """
        nodes: dict[str, DeviceNode] = {}
        for card in cards:
            name = f"nvidia{card.minor}"
            self._create(name, MAJOR, card.minor)
            nodes[name] = self._node(name)
            nodes |= {node.container: node for node in self._mig_nodes(card)}
        for name, is_required in (
            ("nvidiactl", True),
            (UVM, True),
            ("nvidia-uvm-tools", False),
            ("nvidia-modeset", False),
        ):
            if is_required:
                self._create_control(name)
            if (self.dev / name).exists():
                nodes[name] = self._node(name)
            elif is_required:
                raise MissingDeviceNode(
                    f"{self.host_path(self.dev / name)} does not exist and cannot be created: load the kernel module "
                    f"({'modprobe nvidia-uvm' if name == UVM else 'modprobe nvidia'}) on the node"
                )
        self.link_devices()
        return list(nodes.values())

    def link_devices(self) -> None:
        """Link all device nodes in /dev/char, where systemd looks for those of running containers."""
        self._links.update(self.dev)

    def _node(self, name: str) -> DeviceNode:
        return DeviceNode(self.host_path(self.dev / name), f"/dev/{name}")

    def _mig_nodes(self, card: Card) -> Iterator[DeviceNode]:
        """Yield the nodes that grant access to a MIG device: one of its GPU instance, one of its compute instance."""
        if not card.is_mig:
            return
        folder = self._proc / f"driver/nvidia/capabilities/gpu{card.minor}/mig/gi{card.gpu_instance}"
        for file in (folder / "access", folder / f"ci{card.compute_instance}" / "access"):
            try:
                lines = file.read_text().splitlines()
                minor = int(next(line.split(":")[1] for line in lines if line.startswith("DeviceFileMinor")))
            except (OSError, StopIteration, ValueError, IndexError) as error:
                raise MissingDeviceNode(f"{file} does not name the device node of MIG slice {card.uuid}") from error
            name = f"nvidia-caps/nvidia-cap{minor}"
            with suppress(OSError):
                (self.dev / "nvidia-caps").mkdir(exist_ok=True)
            self._create(name, self._major("nvidia-caps"), minor)
            if not (self.dev / name).exists():
                raise MissingDeviceNode(f"{self.host_path(self.dev / name)} of MIG slice {card.uuid} does not exist")
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

    def find_files(self, version: str = "") -> dict[str, Path]:
        """Return the driver's files: the path of each below the container's driver folder, and its path here."""
        files: dict[str, Path] = {}
        for folder in [f"{each}/{inner}" for each in self._library_folders() for inner in LIBRARY_SUBFOLDERS]:
            with suppress(OSError):
                for file in sorted((self.root / folder).iterdir()):
                    # By the target, too: libnvidia-new.so.1 is a link to a file with the driver's version.
                    names = {file.name, file.readlink().name} if file.is_symlink() else {file.name}
                    if any(is_library(name, version) for name in names) and (found := self._find(file)) is not None:
                        files.setdefault(f"lib64/{file.name}", found)
        for name in PROGRAMS:
            for folder in PROGRAM_FOLDERS:
                if (program := self._find(self.root / folder / name)) is not None:
                    files.setdefault(f"bin/{name}", program)
        return files | {f"{SHARED}/{inside}": file for inside, file in find_descriptions(self.root)}

    def _find(self, path: Path) -> Path | None:
        """Return the path itself if it leads to a file in the driver's root, its target if that is on the host."""
        if resolve_links(path, self.root).is_file():
            return path
        # Flatcar's driver is in a folder of its own, from which absolute links lead to the host.
        target = resolve_links(path, self._host)
        return target if target.is_file() else None

    def sockets(self) -> list[tuple[str, str]]:
        """Return the sockets of the driver's daemons that exist: path on the host, and path in the container."""
        found = [(root / name, name) for name in SOCKETS for root in (self.root, self._host)]
        return list(
            {f"/{name}": (self.host_path(path), f"/{name}") for path, name in found if path.is_socket()}.values()
        )

    def graphics_nodes(self, cards: Iterable[Card]) -> list[DeviceNode]:
        """Return the nodes by which graphics programs use these cards; a part of a card cannot be used by them."""
        names = [
            f"dri/{entry.name}"
            for card in cards
            if card.bus_id and not card.is_mig
            for entry in sorted((self._sys / "bus/pci/devices" / sysfs_address(card.bus_id) / "drm").glob("*[0-9]"))
        ]
        dev = self._host / "dev"
        return [DeviceNode(self.host_path(dev / name), f"/dev/{name}") for name in names if (dev / name).exists()]

    def install_files(
        self, folder: Path, version: str, complete: Callable[[Path], None] = lambda _: None
    ) -> Path | None:
        """Copy the driver's files below a folder, once per driver, and point the link `current` at them.

        `complete` adds to the folder of this driver before that. Returns the link; None if the host has no driver.
        """
        link, files = folder / CURRENT, self.find_files(version)
        if not any(name.startswith("lib64/libcuda") for name in files):
            self._log.warning("driver_libraries_not_found", root=str(self.root))
        if not files:
            return None
        # The kubelet replays mounts of containers, so what one driver brought must not be missing in the next one.
        kept = {name: file for name, file in installed_descriptions(link).items() if name != LOADER_FILE}
        files = kept | files
        target = folder / f"{version or 'unknown'}-{fingerprint(files)}"
        if not target.exists():
            copy_files(files, target, self.root)
            self._log.info("driver_files_installed", folder=str(target), files=len(files))
        complete(target)
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


def installed_descriptions(link: Path) -> dict[str, Path]:
    """Return the files that containers may have mounted one by one from the driver folder in use."""
    folder = link / SHARED
    return {str(file.relative_to(link)): file for file in sorted(folder.rglob("*")) if file.is_file()}


def sysfs_address(bus_id: str) -> str:
    """Convert NVML's address of a card, as in 00000000:3B:00.0, to the kernel's, as in 0000:3b:00.0."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def fingerprint(files: dict[str, Path]) -> str:
    """Identify a set of files by name, size and modification time, without reading hundreds of MiB of libraries."""
    digest = hashlib.sha256(LOADER_TEXT.encode())
    for name, file in sorted(files.items()):
        status = file.lstat()
        digest.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:8]


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
        # A file of an earlier driver is outside of the root, and no link.
        source = resolve_links(file, root) if file.is_relative_to(root) else file
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, scratch / name)
        except OSError:  # another file system, or one without hard links
            # Not copy2: it would copy the label as well, which SELinux may not let containers read.
            shutil.copyfile(source, scratch / name)
            shutil.copymode(source, scratch / name)
    loader_file = scratch / LOADER_FILE
    loader_file.parent.mkdir(parents=True, exist_ok=True)
    loader_file.write_text(LOADER_TEXT)
    loader_file.chmod(0o644)  # for any user, whatever the umask
    scratch.replace(target)

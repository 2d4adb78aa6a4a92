"""What a container gets so that its programs keep to a share of memory: a library in front of the driver's.

The library is preloaded into every program by /etc/ld.so.preload, and it also stands where programs look for the
driver's. It reads its limits from the container's folder, which is mounted read-only, and keeps account in a file on a
small tmpfs of its own, which programs may write. A program that replaces either evades the limit: it is cooperative.
"""

import ctypes
import hashlib
import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from msgspec import Struct

from nodeplugin.checkpoint import replace_file
from nodeplugin.host_driver import CONTAINER_FOLDER
from nodeplugin.runtime_hooks import describe_hook, own_program, read_static, write_program
from nodeplugin.selinux import label_for_containers
from nodeplugin.share_files import USAGE_FILE, USAGE_FOLDER, CardLimits, create_usage, write_limits

# Where the library is compiled to at the installation of Quotient, by processor.
COMPILED = "preload-libraries"
CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"
LIBRARIES = (CUDA, NVML)
# The names by which programs open the driver's libraries.
STAND_INS = {"libcuda.so.1": CUDA, "libcuda.so": CUDA, "libnvidia-ml.so.1": NVML, "libnvidia-ml.so": NVML}
HOOK, HOOK_TIMEOUT_S = "merge-preload", 10
PRELOAD_FILE, PRELOAD_PATH = "ld.so.preload", "/etc/ld.so.preload"
CONTAINER_PRELOAD, CONTAINER_LIMITS = f"{CONTAINER_FOLDER}/preload", "/etc/quotient"
# The account file has 1.1 MB, most of it never touched. A program can fill no more than this.
TMPFS_OPTIONS = "size=2m,nr_inodes=8,mode=0755"
MS_NOSUID, MS_NODEV, MS_NOEXEC, MNT_DETACH = 2, 4, 8, 2
FIELDS_BEFORE_OPTIONS = 6


class Mount(Struct, frozen=True):
    """A mount into a container: its path on the host and in the container."""

    host: str
    container: str
    read_only: bool = True


class PreloadFiles:
    """Installs the library on the node, and prepares each container's files. `folder` is the same on the host."""

    def __init__(self, folder: Path, containers: Path, accounts: Path, proc: Path = Path("/proc")) -> None:
        self._folder, self._containers, self._accounts, self._proc = folder, containers, accounts, proc
        self._digest = ""
        self._hook = folder / HOOK
        self._log = structlog.get_logger()

    def install(self) -> None:
        """Copy the library to a path of its own for each version; containers that run keep theirs. Safe to repeat."""
        try:
            contents = {name: (compiled_libraries() / name).read_bytes() for name in LIBRARIES}
        except OSError:
            return
        digest = hashlib.sha256(b"".join(contents.values())).hexdigest()[:12]
        target = self._folder / digest
        try:
            for name, content in contents.items():
                if not has_content(target / name, content):
                    target.mkdir(parents=True, exist_ok=True)
                    replace_file(target / name, content, mode=0o555)
            label_for_containers(self._folder)
        except OSError as error:
            self._log.warning("preload_library_not_installed", folder=str(target), error=str(error))
            return
        self._digest = digest

    def problem(self) -> str:
        """Return why the library cannot be used on this node; empty if it can."""
        if not self._digest:
            return "the library that limits memory is not installed: compiled without zig, or not copied to the node"
        if os.geteuid():
            return "only root can mount the tmpfs on which a container's processes keep account"
        if not reaches_host(self._accounts, self._proc):
            return f"mounts below {self._accounts} do not reach the host: needs mountPropagation Bidirectional"
        return ""

    def versions(self) -> list[str]:
        """Return the versions of the library that are installed; containers may still have mounts of each."""
        return sorted(each.name for each in self._folder.glob("*") if (each / CUDA).exists())

    def remove_old(self) -> None:
        """Remove all versions but the current one; only safe while no container uses them."""
        for version in self.versions():
            if version != self._digest:
                shutil.rmtree(self._folder / version, ignore_errors=True)

    def stand_in(self, driver: Path) -> None:
        """Create, beside the driver's folder of libraries, one in which the library has the driver's names."""
        for version in self.versions():
            target = driver / stand_in_folder(version)
            # A runtime creates missing mount sources as empty folders.
            if (driver / "lib64").is_dir() and not (target / CUDA).exists():
                shutil.rmtree(target, ignore_errors=True)
                link_libraries(driver / "lib64", self._folder / version, target)

    def install_hook(self, folder: Path) -> None:
        """Copy the hook that keeps what images preload to the host's folder of hooks; safe to repeat."""
        content = read_static(own_program(HOOK))
        try:
            if content is not None:
                write_program(folder / HOOK, content)
        except OSError as error:
            self._log.warning("preload_hook_not_installed", folder=str(folder), error=str(error))
        self._hook = folder / HOOK

    def hooks(self, token: str) -> list[dict[str, Any]]:
        """Return the hook as CDI describes it; none if the host cannot run it."""
        if not os.access(self._hook, os.X_OK):
            return []
        merged = str(self._containers / token / PRELOAD_FILE)
        return [describe_hook("createRuntime", self._hook, [merged], HOOK_TIMEOUT_S)]

    def prepare(self, token: str, cards: Sequence[CardLimits], driver_version: str, driver_folder: str) -> None:
        """Create or repair a container's files before its start; OSError if its programs would run without limits."""
        for name in LIBRARIES:
            if not os.access(self._folder / self._digest / name, os.R_OK | os.X_OK):
                raise OSError(f"{self._folder / self._digest / name} cannot be read")
        folder = self._containers / token
        lines = "".join(f"{CONTAINER_PRELOAD}/{name}\n" for name in LIBRARIES)
        if not has_content(folder / PRELOAD_FILE, lines.encode()):
            replace_file(folder / PRELOAD_FILE, lines.encode(), mode=0o444)
        write_limits(folder, cards, driver_version, driver_folder)
        # The file's place in the container, whose folder is read-only.
        (folder / USAGE_FOLDER).mkdir(exist_ok=True)
        (folder / USAGE_FOLDER / USAGE_FILE).touch()
        account = self.account(token)
        account.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.ismount(account.parent):
            mount_tmpfs(account.parent)
        create_usage(account)
        label_for_containers(account.parent)

    def mounts(self, token: str) -> Iterator[Mount]:
        """Yield what a container needs beside its folder and the driver."""
        folder = self._containers / token
        # The file alone: in the folder, a program could put something else in its place.
        account = self.account(token)
        yield Mount(str(account), f"{CONTAINER_LIMITS}/{USAGE_FOLDER}/{USAGE_FILE}", read_only=False)
        yield Mount(str(self._folder / self._digest), CONTAINER_PRELOAD)
        yield Mount(str(folder / PRELOAD_FILE), PRELOAD_PATH)

    @property
    def library_folder(self) -> str:
        """The name of the driver's folder in which the library has the driver's names."""
        return stand_in_folder(self._digest)

    def remove(self, token: str) -> None:
        """Unmount a container's tmpfs, so that its folder can be removed."""
        folder = self.account(token).parent
        while os.path.ismount(folder):
            if unmount(folder):
                return
        with suppress(OSError):
            folder.rmdir()

    def account(self, token: str) -> Path:
        """Return the file in which a container's processes keep account."""
        return self._accounts / token / USAGE_FILE

    def tokens(self) -> set[str]:
        """Return the containers that have such a file, or the remains of one."""
        return {each.name for each in self._accounts.glob("*")}


def compiled_libraries() -> Path:
    """Return where the libraries for this processor are, in this installation."""
    return own_program(COMPILED) / platform.machine()


def stand_in_folder(version: str) -> str:
    return f"limited-{version}"


def link_libraries(driver: Path, preload: Path, target: Path) -> None:
    """Create a folder with links to the driver's libraries, except for those in whose place ours stand."""
    scratch = target.with_name(f".{target.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for file in driver.iterdir():
        if file.name in STAND_INS:
            os.link(preload / STAND_INS[file.name], scratch / file.name)
        elif file.is_symlink():
            (scratch / file.name).symlink_to(file.readlink())
        else:
            os.link(file, scratch / file.name)
    scratch.replace(target)


def has_content(path: Path, content: bytes) -> bool:
    with suppress(OSError):
        return path.read_bytes() == content
    return False


def mount_points(mountinfo: Path) -> Iterable[tuple[Path, Sequence[str]]]:
    """Yield each mount point of this process with its optional fields, of which `shared:` says that others see it."""
    with suppress(OSError):
        for line in mountinfo.read_text().splitlines():
            words = line.split()
            yield Path(words[4].replace("\\040", " ")), words[FIELDS_BEFORE_OPTIONS : words.index("-")]


def reaches_host(folder: Path, proc: Path) -> bool:
    """Whether what is mounted below a folder appears on the host, where container runtimes take mounts from."""
    with suppress(OSError):
        # Not in a container of its own; process 1 is the host's.
        if (proc / "self/ns/mnt").readlink() == (proc / "1/ns/mnt").readlink():
            return True
    points = mount_points(proc / "self/mountinfo")
    above = [(point, fields) for point, fields in points if folder.is_relative_to(point)]
    if not above:
        return False
    _, fields = max(above, key=lambda each: len(each[0].parts))
    return any(each.startswith("shared:") for each in fields)


def libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def mount_tmpfs(folder: Path) -> None:
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    if libc().mount(b"quotient", os.fsencode(folder), b"tmpfs", flags, TMPFS_OPTIONS.encode()):
        code = ctypes.get_errno()
        raise OSError(code, f"cannot mount a tmpfs: {os.strerror(code)}", str(folder))


def unmount(folder: Path) -> int:
    """Unmount, also if a program still has files open there; returns the error, 0 if there is none."""
    return ctypes.get_errno() if libc().umount2(os.fsencode(folder), MNT_DETACH) else 0

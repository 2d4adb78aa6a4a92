"""The programs that Debian has: fetched as packages, unpacked into the cache, never installed.

Unpacking instead of installing starts no daemon, replaces no container runtime that the machine already uses,
and leaves the machine as it was.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deploy.toolchain import BuildError, cache_dir, locked, say

PACKAGES = ("etcd-server", "containerd", "runc", "containernetworking-plugins", "busybox-static", "libseccomp2")
MARK = ".complete-1"
# The release whose containerd is used where one is needed that reads CDI files.
NEWER = "trixie"


def programs(packages: Sequence[str] = PACKAGES, purpose: str = "") -> Path:
    """Give a folder that holds what the packages hold, laid out as on a Debian system."""
    folder = cache_dir() / "debian" / f"{codename()}-{platform.machine()}{purpose}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / ".lock"):
        if not (folder / MARK).exists():
            fetch(folder, packages)
            (folder / MARK).touch()
    return folder


def newer_containerd() -> Path:
    """Give a folder with a containerd that reads CDI files: 1.7 or newer, of the first Debian that has one."""
    folder = cache_dir() / "debian" / f"containerd-{NEWER}-{platform.machine()}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / ".lock"):
        if not (folder / MARK).exists():
            fetch_newer(folder)
            (folder / MARK).touch()
    return folder


def fetch_newer(folder: Path) -> None:
    """Download containerd of a newer release, with lists of its own: the machine's stay as they are."""
    say(f"fetching containerd of Debian {NEWER} into {folder}; once per machine")
    with tempfile.TemporaryDirectory(prefix="quotient-debian-") as scratch:
        place = Path(scratch)
        for part in ("lists/partial", "cache/archives/partial"):
            (place / part).mkdir(parents=True)
        signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
        (place / "sources.list").write_text(f"deb {signed} {mirror()} {NEWER} main\n")
        options = {
            "Dir::Etc::sourcelist": place / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": place / "lists",
            "Dir::Cache": place / "cache",
        }
        apt = ["apt-get", *(part for key, value in options.items() for part in ("-o", f"{key}={value}"))]
        run(*apt, "update")
        run(*apt, "download", "containerd", cwd=scratch)
        for package in place.glob("*.deb"):
            run("dpkg-deb", "--extract", str(package), str(folder))


def mirror() -> str:
    """Find the mirror that this machine takes Debian's packages from; it has the other releases as well."""
    command = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(REPO_URI)", "Created-By: Packages"]
    for _ in range(2):
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        for origin, label, address in (line.split(" ", 2) for line in listed if line.count(" ") > 1):
            if (origin, label) == ("Debian", "Debian"):
                return address
        run("apt-get", "update")  # a new machine has no lists yet
    raise BuildError(f"no mirror of Debian here, from which containerd of {NEWER} could be taken")


def codename() -> str:
    """Name the release of this machine's Debian, so that a new one unpacks anew."""
    release = platform.freedesktop_os_release()
    return release.get("VERSION_CODENAME") or release.get("ID", "linux")


def fetch(folder: Path, packages: Sequence[str]) -> None:
    """Download and unpack packages."""
    if shutil.which("apt-get") is None:
        raise BuildError(f"no apt-get here: unpack {', '.join(packages)} into {folder} and create {folder / MARK}")
    say(f"fetching {', '.join(packages)} into {folder}; once per machine")
    with tempfile.TemporaryDirectory(prefix="quotient-debian-") as scratch:
        download = ["apt-get", "download", *packages]
        if subprocess.run(download, cwd=scratch, capture_output=True, check=False).returncode:
            run("apt-get", "update")
            run(*download, cwd=scratch)
        for package in sorted(Path(scratch).glob("*.deb")):
            run("dpkg-deb", "--extract", str(package), str(folder))


def run(*command: str, cwd: str | None = None) -> None:
    """Run one step; its own words say why it failed."""
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}, check=False
    )
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()}")

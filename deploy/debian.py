"""Programs from Debian packages: downloaded and unpacked into the cache, not installed.

Installing would start daemons and could replace the container runtime that the machine uses; unpacking leaves the
machine as it was.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deploy.toolchain import BuildError, cache_dir, locked, say

# Written when a folder is complete. Increase the number to make every machine unpack again.
COMPLETE = ".complete-1"
# Debian 12 has containerd 1.6, which ignores CDI files; this release has 1.7.
CDI_RELEASE = "trixie"


def unpack_packages(packages: Sequence[str], suffix: str = "") -> Path:
    """Return a folder with the packages' files, laid out as on a Debian system.

    The folder is cached by Debian release, architecture and `suffix`, so every list of packages needs a suffix of its
    own.
    """
    folder = cache_dir() / "debian" / f"{debian_release()}-{platform.machine()}{suffix}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / ".lock"):
        if not (folder / COMPLETE).exists():
            download_and_unpack(packages, folder)
            (folder / COMPLETE).touch()
    return folder


def newer_containerd() -> Path:
    """Return a folder with a containerd that supports CDI (1.7 or newer), from a later Debian release."""
    folder = cache_dir() / "debian" / f"containerd-{CDI_RELEASE}-{platform.machine()}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / ".lock"):
        if not (folder / COMPLETE).exists():
            unpack_newer_containerd(folder)
            (folder / COMPLETE).touch()
    return folder


def unpack_newer_containerd(folder: Path) -> None:
    say(f"downloading containerd of Debian {CDI_RELEASE} to {folder}; once per machine")
    with tempfile.TemporaryDirectory(prefix="quotient-debian-") as scratch:
        apt_dir = Path(scratch)
        for part in ("lists/partial", "cache/archives/partial"):
            (apt_dir / part).mkdir(parents=True)
        signed_by = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
        (apt_dir / "sources.list").write_text(f"deb {signed_by} {debian_mirror()} {CDI_RELEASE} main\n")
        # apt's state is in the scratch folder: the machine's own package lists must not know another release.
        options = {
            "Dir::Etc::sourcelist": apt_dir / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": apt_dir / "lists",
            "Dir::Cache": apt_dir / "cache",
        }
        apt = ["apt-get", *(part for key, value in options.items() for part in ("-o", f"{key}={value}"))]
        run_command(*apt, "update")
        run_command(*apt, "download", "containerd", cwd=scratch)
        for package in apt_dir.glob("*.deb"):
            run_command("dpkg-deb", "--extract", str(package), str(folder))


def debian_mirror() -> str:
    """Return the URL of the mirror that this machine uses; it has the other releases as well."""
    command = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(LABEL) $(REPO_URI)", "Created-By: Packages"]
    for _ in range(2):
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        for origin, label, url in (line.split(" ", 2) for line in lines if line.count(" ") > 1):
            if (origin, label) == ("Debian", "Debian"):
                return url
        run_command("apt-get", "update")  # a new machine has no package lists, and so no known mirror
    raise BuildError(f"apt has no Debian mirror configured; one is needed for containerd of {CDI_RELEASE}")


def debian_release() -> str:
    """Return the code name of this machine's release. It is part of the cache's key, so an upgrade unpacks again."""
    release = platform.freedesktop_os_release()
    return release.get("VERSION_CODENAME") or release.get("ID", "linux")


def download_and_unpack(packages: Sequence[str], folder: Path) -> None:
    if shutil.which("apt-get") is None:
        raise BuildError(
            f"apt-get not found: unpack {', '.join(packages)} into {folder} by hand, then create {folder / COMPLETE}"
        )
    say(f"downloading {', '.join(packages)} to {folder}; once per machine")
    with tempfile.TemporaryDirectory(prefix="quotient-debian-") as scratch:
        download = ["apt-get", "download", *packages]
        # Package lists may be missing or name versions that the mirror has replaced: update them and retry once.
        if subprocess.run(download, cwd=scratch, capture_output=True, check=False).returncode:
            run_command("apt-get", "update")
            run_command(*download, cwd=scratch)
        for package in sorted(Path(scratch).glob("*.deb")):
            run_command("dpkg-deb", "--extract", str(package), str(folder))


def run_command(*command: str, cwd: str | None = None) -> None:
    """Run a command; raises BuildError with its error output if it fails."""
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}, check=False
    )
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed: {done.stderr.strip()}")

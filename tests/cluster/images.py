"""Container images built from static programs, so that pods run without a registry."""

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAUSE = "quotient.test/pause:1"
BUSYBOX = "quotient.test/busybox:1"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
APPLETS = ("sh", "sleep", "cat", "echo", "env", "ls", "true", "false", "wget", "id", "test", "mount", "ip", "nc")


def archive(busybox: Path, target: Path) -> None:
    """Write an archive of both images for `ctr image import`."""
    layer = layer_of(busybox.read_bytes())
    environment = ["PATH=/bin"]
    images = {
        PAUSE: {"Cmd": ["/bin/sleep", "2147483647"], "Env": environment},
        BUSYBOX: {"Cmd": ["/bin/sh"], "Env": environment},
    }
    write_archive(images, layer, target)


def program_archive(program: Path, tag: str, target: Path) -> None:
    """Write an archive of an image with one static program, in the folder where Kubernetes' own images have theirs."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        add(tar, f"usr/local/bin/{program.name}", program.read_bytes(), mode=0o755)
    write_archive({tag: {"Env": ["PATH=/usr/local/bin"]}}, content.getvalue(), target)


def write_archive(images: Mapping[str, Mapping[str, Any]], layer: bytes, target: Path) -> None:
    """Write an archive of images that share a layer, from their configurations by tag."""
    manifests = []
    files = {"layer.tar": layer}
    for tag, settings in images.items():
        config = {
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]},
        }
        content = json.dumps(config).encode()
        name = hashlib.sha256(content).hexdigest() + ".json"
        files[name] = content
        manifests.append({"Config": name, "RepoTags": [tag], "Layers": ["layer.tar"]})
    files["manifest.json"] = json.dumps(manifests).encode()
    with tarfile.open(target, "w") as tar:
        for name, content in files.items():
            add(tar, name, content)


def layer_of(busybox: bytes) -> bytes:
    """Return a root file system: busybox, links to it, and the folders that a container runtime expects."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for folder in ("bin", "etc", "proc", "sys", "dev", "tmp", "run", "var"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        add(tar, "bin/busybox", busybox, mode=0o755)
        for applet in APPLETS:
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    return content.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes, *, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))

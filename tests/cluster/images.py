"""Container images built from a static busybox, so that pods run without a registry."""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

PAUSE = "quotient.test/pause:1"
BUSYBOX = "quotient.test/busybox:1"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
APPLETS = ("sh", "sleep", "cat", "echo", "env", "ls", "true", "false", "wget", "id", "test", "mount", "ip", "nc")


def archive(busybox: Path, target: Path) -> None:
    """Write an archive of both images for `ctr image import`."""
    layer = layer_of(busybox.read_bytes())
    manifests = []
    files = {"layer.tar": layer}
    for tag, command in ((PAUSE, ["/bin/sleep", "2147483647"]), (BUSYBOX, ["/bin/sh"])):
        config = {
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Cmd": command, "Env": ["PATH=/bin"]},
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

"""Makes Quotient's image without a container engine: `deploy/build-image [--tag NAME] [--output FILE]`.

The same as the Dockerfile makes, from Debian's packages and the hashed requirements: Python, the libraries, Quotient;
no shell and no package manager. The archive is an OCI layout that `docker load` takes as well; import it into a node
with `ctr -n k8s.io image import FILE`, or push it with any tool that knows OCI layouts. The same inputs make the same
bytes.
"""

import argparse
import gzip
import hashlib
import io
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deploy.debian import programs
from deploy.toolchain import BuildError, cache_dir, locked, say

ROOT = Path(__file__).parent.parent
TAG = "localhost/quotient:0.1.0"
USER = 65532
PYTHON = "3.11"
PACKAGES = (
    f"python{PYTHON}-minimal",
    f"libpython{PYTHON}-minimal",
    f"libpython{PYTHON}-stdlib",
    "libc6",
    "libgcc-s1",
    "libstdc++6",
    "libssl3",
    "libexpat1",
    "libffi8",
    "libbz2-1.0",
    "liblzma5",
    "libuuid1",
    "libcrypt1",
    "zlib1g",
)
# Of the packages, what nothing at run time reads.
USELESS = ("usr/share", "usr/lib/valgrind", "usr/lib/python3.11/test", "usr/lib/python3.11/idlelib", "usr/bin/pdb3.11")
LIBRARIES, OWN = "opt/libraries", "opt/quotient"
# Folders of the checkout that run in a cluster.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
ACCOUNTS = {
    "etc/passwd": f"root:x:0:0::/:/sbin/nologin\nquotient:x:{USER}:{USER}::/:/sbin/nologin\n",
    "etc/group": f"root:x:0:\nquotient:x:{USER}:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
}
CONFIG = {
    "User": f"{USER}:{USER}",
    "Entrypoint": [f"/usr/bin/python{PYTHON}", "-m", "console.main"],
    "WorkingDir": "/",
    "Env": [
        "PATH=/usr/bin:/bin",
        f"PYTHONPATH=/{OWN}:/{LIBRARIES}",
        "PYTHONDONTWRITEBYTECODE=1",
        "PYTHONUNBUFFERED=1",
        "PYTHONSAFEPATH=1",
        "LANG=C.UTF-8",
    ],
    "Labels": {"org.opencontainers.image.title": "Quotient", "org.opencontainers.image.licenses": "Apache-2.0"},
}
BLOBS = "blobs/sha256"
EPOCH = 0


def build(tag: str, output: Path) -> None:
    """Make the image; what changes seldom stands in layers of its own, and is kept between builds."""
    check_tag(tag)
    if sys.version_info[:2] != tuple(map(int, PYTHON.split("."))):
        raise BuildError(
            f"this is Python {platform.python_version()}; the image has {PYTHON}, and its libraries with it"
        )
    layers = [kept_layer("system", system_key(), system), kept_layer("libraries", libraries_key(), libraries)]
    with tempfile.TemporaryDirectory(prefix="quotient-image-") as scratch:
        layers.append(layer(packed(own(Path(scratch)))))
    output.parent.mkdir(parents=True, exist_ok=True)
    write(tag, layers, output)


def system_key() -> str:
    """Name what the system layer is made of."""
    return digest(json.dumps([platform.machine(), PACKAGES, USELESS, ACCOUNTS]).encode())[:16]


def libraries_key() -> str:
    """Name what the libraries are made of."""
    return digest((ROOT / "requirements.lock").read_bytes() + platform.machine().encode())[:16]


class Layer(NamedTuple):
    """A layer as it is shipped, and the digest of what it unpacks to."""

    diff: str
    small: bytes


def layer(whole: bytes) -> Layer:
    """Make a layer of an archive."""
    return Layer(digest(whole), gzip.compress(whole, 6, mtime=EPOCH))


def kept_layer(name: str, key: str, make: Callable[[Path], Path]) -> Layer:
    """Give a layer, from the cache if it was made before."""
    folder = cache_dir() / "image"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        for kept in folder.glob(f"{name}-{key}-*.tar.gz"):
            return Layer(kept.name.removesuffix(".tar.gz").rpartition("-")[2], kept.read_bytes())
        say(f"making the layer of {name}; once, until its inputs change")
        with tempfile.TemporaryDirectory(prefix="quotient-image-") as scratch:
            made = layer(packed(make(Path(scratch))))
        fresh = folder / f".{name}-{key}"
        fresh.write_bytes(made.small)
        fresh.replace(folder / f"{name}-{key}-{made.diff}.tar.gz")
    return made


def system(folder: Path) -> Path:
    """Lay out Python and what it needs."""
    shutil.copytree(programs(PACKAGES, f"-image-{system_key()}"), folder, symlinks=True, dirs_exist_ok=True)
    for each in USELESS:
        found = folder / each
        shutil.rmtree(found, ignore_errors=True) if found.is_dir() else found.unlink(missing_ok=True)
    for mark in folder.glob(".complete*"):
        mark.unlink()
    for name in ("tmp", "proc", "sys", "dev", "run", "etc"):
        (folder / name).mkdir(exist_ok=True)
    for name, text in ACCOUNTS.items():
        (folder / name).write_text(text)
    compiled(folder / "usr/lib" / f"python{PYTHON}")
    return folder


def libraries(folder: Path) -> Path:
    """Install what Quotient needs, by the lock with its hashes."""
    target = folder / LIBRARIES
    pip("--require-hashes", "--requirement", str(ROOT / "requirements.lock"), target=target)
    compiled(target)
    return folder


def own(folder: Path) -> Path:
    """Install Quotient itself."""
    target = folder / OWN
    pip("--no-deps", "--no-build-isolation", str(ROOT), target=target)
    for told in target.glob("*.dist-info/direct_url.json"):  # where it was built is nobody's business
        told.unlink()
    compiled(target)
    return folder


def pip(*what: str, target: Path) -> None:
    """Install into a folder."""
    options = ["--quiet", "--no-compile", "--disable-pip-version-check", "--no-input", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    if done.returncode:
        raise BuildError(f"pip failed: {done.stderr.strip()}")
    shutil.rmtree(target / "bin", ignore_errors=True)


def compiled(folder: Path) -> None:
    """Compile beforehand: the root is read-only, and a start should not take twice as long for it."""
    options = ["-q", "-j", "2", "--invalidation-mode", "unchecked-hash", "-s", str(folder), "-p", "/"]
    command = [sys.executable, "-m", "compileall", *options, str(folder)]
    subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - what does not compile stays as it is


def packed(folder: Path) -> bytes:
    """Pack a folder as a layer, the same for the same content."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, str(path.relative_to(folder)), recursive=False, filter=plain)
    return whole.getvalue()


def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out of an entry what differs from one machine to another."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = EPOCH
    executable = entry.isdir() or entry.mode & 0o100
    entry.mode = 0o1777 if entry.name == "tmp" else 0o755 if executable else 0o644
    return entry


def digest(content: bytes) -> str:
    """Name content."""
    return hashlib.sha256(content).hexdigest()


def write(tag: str, layers: Sequence[Layer], output: Path) -> None:
    """Write an OCI layout with the manifest that `docker load` wants beside it."""
    diffs = [f"sha256:{each.diff}" for each in layers]
    blobs = {digest(each.small): each.small for each in layers}
    described = [descriptor("application/vnd.oci.image.layer.v1.tar+gzip", each.small) for each in layers]
    architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
    rootfs = {"type": "layers", "diff_ids": diffs}
    config = encoded({"architecture": architecture, "os": "linux", "config": CONFIG, "rootfs": rootfs})
    manifest = encoded(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": described,
        }
    )
    blobs |= {digest(config): config, digest(manifest): manifest}
    names = {"io.containerd.image.name": tag, "org.opencontainers.image.ref.name": tag.rpartition(":")[2]}
    listed = descriptor("application/vnd.oci.image.manifest.v1+json", manifest) | {"annotations": names}
    files = {
        "oci-layout": encoded({"imageLayoutVersion": "1.0.0"}),
        "index.json": encoded({"schemaVersion": 2, "manifests": [listed]}),
        "manifest.json": encoded(
            [
                {
                    "Config": f"{BLOBS}/{digest(config)}",
                    "RepoTags": [tag],
                    "Layers": [f"{BLOBS}/{each['digest'].removeprefix('sha256:')}" for each in described],
                }
            ]
        ),
    }
    scratch = output.with_name(f".{output.name}")
    with tarfile.open(scratch, "w") as tar:
        for name, content in entries(files, blobs):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    scratch.replace(output)


def check_tag(tag: str) -> None:
    """Refuse a name that runtimes would complete with a registry of their own, and then not find."""
    first, slash, _ = tag.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        raise BuildError(f"--tag {tag}: name its registry as well, as in registry.example/quotient:0.1.0")


def entries(files: dict[str, bytes], blobs: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Give the entries of the archive."""
    yield from files.items()
    for name, content in blobs.items():
        yield f"{BLOBS}/{name}", content


def descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    """Say where content stands."""
    return {"mediaType": media_type, "digest": f"sha256:{digest(content)}", "size": len(content)}


def encoded(value: Any) -> bytes:  # noqa: ANN401 - JSON
    """Write JSON, the same for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def main() -> None:
    """Build, and say where it is."""
    parser = argparse.ArgumentParser(
        prog="deploy/build-image", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tag", default=TAG, help=f"its name, {TAG} unless told otherwise")
    parser.add_argument("--output", type=Path, default=Path("quotient-image.tar"), help="where to write it")
    options = parser.parse_args()
    try:
        build(options.tag, options.output)
    except BuildError as wrong:
        sys.exit(f"build-image: {wrong}")
    say(f"{options.output}: {options.tag}, {options.output.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

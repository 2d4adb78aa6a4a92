"""Builds Quotient's image without a container engine: `deploy/build-image [--tag NAME] [--output FILE]`.

It has the same content as the Dockerfile's image: Python, the libraries pinned by requirements.lock, and Quotient, but
no shell and no package manager. Python comes from Debian packages. The output is an OCI image layout, which `docker
load` reads, too; import it into a node with `ctr -n k8s.io image import FILE`, or push it with any tool that reads OCI
layouts. The build is reproducible: the same inputs make the same bytes.
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

from deploy.debian import unpack_packages
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
    # ldconfig, which the node plugin lets run on container images.
    "libc-bin",
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
# Files of these packages that are not read at run time.
UNUSED = ("usr/share", "usr/lib/valgrind", "usr/lib/python3.11/test", "usr/lib/python3.11/idlelib", "usr/bin/pdb3.11")
LIBRARIES_FOLDER, QUOTIENT_FOLDER = "opt/libraries", "opt/quotient"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
SYSTEM_FILES = {
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
        f"PYTHONPATH=/{QUOTIENT_FOLDER}:/{LIBRARIES_FOLDER}",
        "PYTHONDONTWRITEBYTECODE=1",
        "PYTHONUNBUFFERED=1",
        "PYTHONSAFEPATH=1",
        "LANG=C.UTF-8",
    ],
    "Labels": {"org.opencontainers.image.title": "Quotient", "org.opencontainers.image.licenses": "Apache-2.0"},
}
BLOBS = "blobs/sha256"
# Modification time of every file, so that the bytes do not depend on when they were built.
EPOCH = 0


def build_image(tag: str, output: Path) -> None:
    """Build the image and write it to a file. System and libraries change seldom, so their layers are cached."""
    check_tag(tag)
    # pip chooses wheels for the interpreter it runs on.
    if sys.version_info[:2] != tuple(map(int, PYTHON.split("."))):
        raise BuildError(
            f"Python {platform.python_version()} cannot build the image: run this with Python {PYTHON}, as in the image"
        )
    layers = [
        cached_layer("system", system_key(), lay_out_system),
        cached_layer("libraries", libraries_key(), install_libraries),
    ]
    with tempfile.TemporaryDirectory(prefix="quotient-image-") as scratch:
        layers.append(compress_layer(pack_folder(install_quotient(Path(scratch)))))
    output.parent.mkdir(parents=True, exist_ok=True)
    write_archive(tag, layers, output)


def system_key() -> str:
    """Return the cache key of the system layer: a hash of its inputs."""
    return sha256_hex(json.dumps([platform.machine(), PACKAGES, UNUSED, SYSTEM_FILES]).encode())[:16]


def libraries_key() -> str:
    return sha256_hex((ROOT / "requirements.lock").read_bytes() + platform.machine().encode())[:16]


class Layer(NamedTuple):
    """A layer: the digest of the uncompressed archive, which OCI calls its diff ID, and the compressed archive."""

    diff_id: str
    archive: bytes


def compress_layer(archive: bytes) -> Layer:
    return Layer(sha256_hex(archive), gzip.compress(archive, 6, mtime=EPOCH))


def cached_layer(name: str, key: str, fill: Callable[[Path], Path]) -> Layer:
    """Return a layer from the cache; `fill` writes its files into a folder if it is not there."""
    folder = cache_dir() / "image"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        # The file name holds the diff ID, which would otherwise take a decompression to compute.
        for cached in folder.glob(f"{name}-{key}-*.tar.gz"):
            return Layer(cached.name.removesuffix(".tar.gz").rpartition("-")[2], cached.read_bytes())
        say(f"building the {name} layer; it is cached until its inputs change")
        with tempfile.TemporaryDirectory(prefix="quotient-image-") as scratch:
            layer = compress_layer(pack_folder(fill(Path(scratch))))
        partial = folder / f".{name}-{key}"
        partial.write_bytes(layer.archive)
        partial.replace(folder / f"{name}-{key}-{layer.diff_id}.tar.gz")
    return layer


def lay_out_system(folder: Path) -> Path:
    """Copy Python and the C libraries it needs into a root file system."""
    shutil.copytree(unpack_packages(PACKAGES, f"-image-{system_key()}"), folder, symlinks=True, dirs_exist_ok=True)
    for name in UNUSED:
        path = folder / name
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    for marker in folder.glob(".complete*"):
        marker.unlink()
    for name in ("tmp", "proc", "sys", "dev", "run", "etc"):
        (folder / name).mkdir(exist_ok=True)
    for name, text in SYSTEM_FILES.items():
        (folder / name).write_text(text)
    compile_bytecode(folder / "usr/lib" / f"python{PYTHON}")
    return folder


def install_libraries(folder: Path) -> Path:
    target = folder / LIBRARIES_FOLDER
    pip_install("--require-hashes", "--requirement", str(ROOT / "requirements.lock"), target=target)
    compile_bytecode(target)
    return folder


def install_quotient(folder: Path) -> Path:
    target = folder / QUOTIENT_FOLDER
    pip_install("--no-deps", "--no-build-isolation", str(ROOT), target=target)
    # Holds the path of the checkout, which would make the image depend on where it was built.
    for direct_url in target.glob("*.dist-info/direct_url.json"):
        direct_url.unlink()
    compile_bytecode(target)
    return folder


def pip_install(*arguments: str, target: Path) -> None:
    options = ["--quiet", "--no-compile", "--disable-pip-version-check", "--no-input", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed arguments
    if done.returncode:
        raise BuildError(f"pip install failed: {done.stderr.strip()}")
    # Console scripts name this machine's interpreter; the image runs modules.
    shutil.rmtree(target / "bin", ignore_errors=True)


def compile_bytecode(folder: Path) -> None:
    """Compile all modules: the image's root is read-only, so Python could not cache them and would start slowly."""
    # unchecked-hash: timestamps are reset when the layer is packed, and would make Python compile again.
    options = ["-q", "-j", "2", "--invalidation-mode", "unchecked-hash", "-s", str(folder), "-p", "/"]
    command = [sys.executable, "-m", "compileall", *options, str(folder)]
    # Not checked: some files are templates or of another Python version, and are left uncompiled.
    subprocess.run(command, capture_output=True, check=False)  # noqa: S603 - fixed arguments


def pack_folder(folder: Path) -> bytes:
    """Pack a folder as a tar archive; equal content makes equal bytes."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, str(path.relative_to(folder)), recursive=False, filter=normalize_entry)
    return archive.getvalue()


def normalize_entry(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Reset what depends on the machine: owner, time, and the umask's part of the mode."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = EPOCH
    executable = entry.isdir() or entry.mode & 0o100
    entry.mode = 0o1777 if entry.name == "tmp" else 0o755 if executable else 0o644
    return entry


def sha256_hex(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_archive(tag: str, layers: Sequence[Layer], output: Path) -> None:
    """Write an OCI image layout, with the manifest.json that `docker load` reads beside it."""
    layer_descriptors = [descriptor("application/vnd.oci.image.layer.v1.tar+gzip", each.archive) for each in layers]
    architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
    rootfs = {"type": "layers", "diff_ids": [f"sha256:{each.diff_id}" for each in layers]}
    config = encode_json({"architecture": architecture, "os": "linux", "config": CONFIG, "rootfs": rootfs})
    manifest = encode_json(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": layer_descriptors,
        }
    )
    blobs = {sha256_hex(content): content for content in (*(each.archive for each in layers), config, manifest)}
    names = {"io.containerd.image.name": tag, "org.opencontainers.image.ref.name": tag.rpartition(":")[2]}
    index_entry = descriptor("application/vnd.oci.image.manifest.v1+json", manifest) | {"annotations": names}
    files = {
        "oci-layout": encode_json({"imageLayoutVersion": "1.0.0"}),
        "index.json": encode_json({"schemaVersion": 2, "manifests": [index_entry]}),
        "manifest.json": encode_json(
            [
                {
                    "Config": f"{BLOBS}/{sha256_hex(config)}",
                    "RepoTags": [tag],
                    "Layers": [f"{BLOBS}/{each['digest'].removeprefix('sha256:')}" for each in layer_descriptors],
                }
            ]
        ),
    }
    partial = output.with_name(f".{output.name}")
    with tarfile.open(partial, "w") as tar:
        for name, content in archive_entries(files, blobs):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    partial.replace(output)


def check_tag(tag: str) -> None:
    """Reject a name without a registry: container runtimes add docker.io to it, and do not find the image."""
    registry, slash, _ = tag.partition("/")
    if not slash or not ("." in registry or ":" in registry or registry == "localhost"):
        raise BuildError(f"--tag {tag}: no registry; write it as in registry.example/quotient:0.1.0")


def archive_entries(files: dict[str, bytes], blobs: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    yield from files.items()
    for name, content in blobs.items():
        yield f"{BLOBS}/{name}", content


def descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{sha256_hex(content)}", "size": len(content)}


def encode_json(value: Any) -> bytes:  # noqa: ANN401 - JSON
    """Encode with sorted keys: equal values make equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="deploy/build-image", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tag", default=TAG, help=f"name of the image with its registry (default: {TAG})")
    parser.add_argument(
        "--output", type=Path, default=Path("quotient-image.tar"), help="file to write (default: quotient-image.tar)"
    )
    options = parser.parse_args()
    try:
        build_image(options.tag, options.output)
    except BuildError as error:
        sys.exit(f"build-image: {error}")
    say(f"{options.output}: {options.tag}, {options.output.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

"""The archive that `deploy/build-image` writes. tests/deploy/test_install.py runs the image."""

import gzip
import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from deploy.image import CONFIG, build_image, compress_layer, pack_folder, write_archive
from deploy.toolchain import BuildError


def test_an_archive_is_an_oci_layout_with_dockers_manifest(tmp_path: Path) -> None:
    """Every blob is named by its digest, and every blob that a manifest lists is in the archive."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "file").write_text("x")
    layer = compress_layer(pack_folder(tmp_path / "root"))
    write_archive("registry.example/q:1", [layer], tmp_path / "q.tar")
    with tarfile.open(tmp_path / "q.tar") as tar:
        files = {entry.name: (tar.extractfile(entry) or pytest.fail("no file")).read() for entry in tar.getmembers()}
    blobs = {name.rpartition("/")[2]: content for name, content in files.items() if name.startswith("blobs/")}
    assert all(hashlib.sha256(content).hexdigest() == name for name, content in blobs.items())
    (entry,) = json.loads(files["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == "registry.example/q:1"
    manifest = json.loads(blobs[entry["digest"].removeprefix("sha256:")])
    config = json.loads(blobs[manifest["config"]["digest"].removeprefix("sha256:")])
    assert config["config"] == CONFIG
    (layer_entry,) = manifest["layers"]
    unpacked = gzip.decompress(blobs[layer_entry["digest"].removeprefix("sha256:")])
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(unpacked).hexdigest()]
    (docker,) = json.loads(files["manifest.json"])
    assert {docker["Config"], *docker["Layers"]} <= files.keys()


def test_the_same_content_makes_the_same_bytes(tmp_path: Path) -> None:
    """Whatever the owner, time and umask."""
    archives = []
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "tmp").mkdir(parents=True)
        (folder / "file").write_text("x")
        (folder / "file").chmod(0o640 if name == "one" else 0o644)
        archives.append(pack_folder(folder))
    assert archives[0] == archives[1]


@pytest.mark.parametrize("tag", ["quotient:1", "team/quotient:1", "quotient"])
def test_a_tag_without_a_registry_is_rejected(tmp_path: Path, tag: str) -> None:
    """Container runtimes would add docker.io to it, and not find the image."""
    with pytest.raises(BuildError, match=r"no registry; write it as in registry\.example/quotient:0\.1\.0"):
        build_image(tag, tmp_path / "q.tar")

"""The archive that `deploy/build-image` writes; that it runs is tried where it is installed."""

import gzip
import hashlib
import json
import tarfile
from pathlib import Path

import pytest

from deploy.image import CONFIG, build, layer, packed, write
from deploy.toolchain import BuildError


def test_an_archive_is_an_oci_layout_and_dockers_own(tmp_path: Path) -> None:
    """Every blob is named by its content, and what is listed is there."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "file").write_text("x")
    write("registry.example/q:1", [layer(packed(tmp_path / "root"))], tmp_path / "q.tar")
    with tarfile.open(tmp_path / "q.tar") as tar:
        held = {entry.name: (tar.extractfile(entry) or pytest.fail("no file")).read() for entry in tar.getmembers()}
    blobs = {name.rpartition("/")[2]: content for name, content in held.items() if name.startswith("blobs/")}
    assert all(hashlib.sha256(content).hexdigest() == name for name, content in blobs.items())
    (listed,) = json.loads(held["index.json"])["manifests"]
    assert listed["annotations"]["io.containerd.image.name"] == "registry.example/q:1"
    manifest = json.loads(blobs[listed["digest"].removeprefix("sha256:")])
    config = json.loads(blobs[manifest["config"]["digest"].removeprefix("sha256:")])
    assert config["config"] == CONFIG
    (shipped,) = manifest["layers"]
    whole = gzip.decompress(blobs[shipped["digest"].removeprefix("sha256:")])
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(whole).hexdigest()]
    (docker,) = json.loads(held["manifest.json"])
    assert {docker["Config"], *docker["Layers"]} <= held.keys()


def test_the_same_content_makes_the_same_bytes(tmp_path: Path) -> None:
    """Whoever wrote it, and when."""
    made = []
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "tmp").mkdir(parents=True)
        (folder / "file").write_text("x")
        (folder / "file").chmod(0o640 if name == "one" else 0o644)
        made.append(packed(folder))
    assert made[0] == made[1]


@pytest.mark.parametrize("tag", ["quotient:1", "team/quotient:1", "quotient"])
def test_a_name_without_a_registry_is_refused(tmp_path: Path, tag: str) -> None:
    """Runtimes would complete it, and then look for another."""
    with pytest.raises(BuildError, match=r"name its registry as well, as in registry\.example/quotient:0\.1\.0"):
        build(tag, tmp_path / "q.tar")

"""The hook that keeps what a container's image preloads itself."""

import json
import os
import subprocess
from importlib import resources
from pathlib import Path

import pytest

OURS = "/usr/local/nvidia/preload/libcuda.so.1\n"
HOOK = Path(str(resources.files("nodeplugin").joinpath("merge-preload")))


class Bundle:
    """A container before its start, as its runtime describes it, and the file that is mounted over its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder / "bundle", folder / "bundle/rootfs"
        (self.root / "etc").mkdir(parents=True)
        (self.folder / "config.json").write_text(json.dumps({"root": {"path": "rootfs"}}))
        self.own = self.root / "etc/ld.so.preload"
        self.mounted = folder / "ld.so.preload"
        self.mounted.write_text(OURS)

    def run(self) -> "subprocess.CompletedProcess[str]":
        state = json.dumps({"ociVersion": "1.0", "id": "c", "pid": 7, "bundle": str(self.folder)})
        command = [str(HOOK), str(self.mounted)]
        return subprocess.run(command, input=state, capture_output=True, text=True, check=False, timeout=20)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A container whose image preloads nothing."""
    return Bundle(tmp_path)


def test_an_image_without_such_a_file_changes_nothing(bundle: Bundle) -> None:
    assert bundle.run().returncode == 0
    assert bundle.mounted.read_text() == OURS


def test_an_image_without_the_folder_changes_nothing(bundle: Bundle) -> None:
    (bundle.root / "etc").rmdir()
    assert bundle.run().returncode == 0
    assert bundle.mounted.read_text() == OURS


def test_the_images_libraries_come_after_ours(bundle: Bundle) -> None:
    """In the file that is mounted already, so it stays the same one."""
    inode = bundle.mounted.stat().st_ino
    bundle.own.write_text("/usr/lib/libjemalloc.so.2\n")
    assert bundle.run().returncode == 0
    assert bundle.mounted.read_text() == f"{OURS}/usr/lib/libjemalloc.so.2\n"
    assert bundle.mounted.stat().st_ino == inode


def test_links_are_followed_within_the_image_only(bundle: Bundle, tmp_path: Path) -> None:
    """An image must not make a container's file of one of the host's."""
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    bundle.own.symlink_to(secret)
    assert bundle.run().returncode == 0
    assert bundle.mounted.read_text() == OURS
    bundle.own.unlink()
    bundle.own.symlink_to("../../../../../.." + str(secret))
    assert bundle.run().returncode == 0
    assert bundle.mounted.read_text() == OURS
    bundle.own.unlink()
    (bundle.root / "opt").mkdir()
    (bundle.root / "opt/preload").write_text("/opt/own.so\n")
    bundle.own.symlink_to("/opt/preload")
    assert bundle.run().returncode == 0
    assert bundle.mounted.read_text() == f"{OURS}/opt/own.so\n"


REFUSED = {
    "a file that is too large": lambda own: own.write_text("x" * 4097),
    "a folder": lambda own: own.mkdir(),
    "a pipe that nobody writes": os.mkfifo,
    "a link to itself": lambda own: own.symlink_to("ld.so.preload"),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_kept_is_refused_with_a_remedy(bundle: Bundle, make: object) -> None:
    """The container does not start, and its events say why; nothing is waited for."""
    assert callable(make)
    make(bundle.own)
    done = bundle.run()
    assert done.returncode == 1
    assert "what the container's image preloads cannot be kept" in done.stderr
    assert "remove /etc/ld.so.preload from the image" in done.stderr
    assert bundle.mounted.read_text() == OURS

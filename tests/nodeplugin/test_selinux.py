"""Labels of what containers mount, on hosts with SELinux."""

import os
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from nodeplugin.cards import NodeCards
from nodeplugin.host_driver import HostDriver, copy_files
from nodeplugin.injection import Injector
from nodeplugin.selinux import CONTAINER_LABEL, label_for_containers
from vcuda.names import Names

VAR_LIB = b"system_u:object_r:var_lib_t:s0"


class Labels:
    """The labels of files, as a kernel with SELinux keeps them; where it has none, files have none."""

    def __init__(self) -> None:
        self.by_path: dict[Path, bytes] = {}
        self.refuses = False

    def get(self, path: Path, _: str, *, follow_symlinks: bool) -> bytes:
        assert not follow_symlinks
        if path not in self.by_path:
            raise OSError(61, "No data available")
        return self.by_path[path] + b"\0"

    def set(self, path: Path, _: str, label: bytes, *, follow_symlinks: bool) -> None:
        assert not follow_symlinks
        if self.refuses:
            raise OSError(22, "Invalid argument")
        self.by_path[path] = label

    def label_all(self, folder: Path, label: bytes) -> None:
        self.by_path |= dict.fromkeys((folder, *folder.rglob("*")), label)


@pytest.fixture
def labels(monkeypatch: pytest.MonkeyPatch) -> Labels:
    made = Labels()
    monkeypatch.setattr(os, "getxattr", made.get)
    monkeypatch.setattr(os, "setxattr", made.set)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file, a link, and a hard link of one of the host's files."""
    made = tmp_path / "driver"
    (made / "550/lib64").mkdir(parents=True)
    (made / "550/lib64/copied.so").write_text("code")
    (made / "current").symlink_to("550")
    (tmp_path / "of-the-host.so").write_text("code")
    (made / "550/lib64/linked.so").hardlink_to(tmp_path / "of-the-host.so")
    return made


def test_containers_may_read_what_is_labelled_for_them(labels: Labels, folder: Path) -> None:
    """All of it, links included; a hard link keeps the label that the host reads its file by."""
    labels.label_all(folder, VAR_LIB)
    label_for_containers(folder)
    linked = folder / "550/lib64/linked.so"
    assert labels.by_path[linked] == VAR_LIB
    assert {label for path, label in labels.by_path.items() if path != linked} == {CONTAINER_LABEL}
    assert len(labels.by_path) == 6


def test_nothing_is_labelled_where_files_have_no_labels(labels: Labels, folder: Path) -> None:
    """Root could write the attribute although the kernel does not use it."""
    label_for_containers(folder)
    assert labels.by_path == {}


def test_a_policy_without_the_label_is_reported(labels: Labels, folder: Path) -> None:
    """And what containers mount stays as it is."""
    labels.label_all(folder, VAR_LIB)
    labels.refuses = True
    with capture_logs() as logs:
        label_for_containers(folder)
    assert [entry["event"] for entry in logs] == ["selinux_label_not_set"]
    assert set(labels.by_path.values()) == {VAR_LIB}


def test_the_plugin_labels_what_it_lets_containers_mount(labels: Labels, tmp_path: Path) -> None:
    """At its start, before it creates anything in these folders."""
    state = tmp_path / "quotient"
    for name in ("driver", "containers"):
        (state / name / "old").mkdir(parents=True)
        labels.label_all(state / name, VAR_LIB)
    driver = HostDriver(tmp_path / "host")
    Injector("native", state, driver, NodeCards(), names=Names(), cdi=tmp_path / "cdi").start("550")
    assert set(labels.by_path) == {state / each for each in ("driver", "driver/old", "containers", "containers/old")}
    assert set(labels.by_path.values()) == {CONTAINER_LABEL}


def test_copied_driver_files_do_not_keep_the_label_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin sees the host's files under another mount, so it cannot link them; a copy of attributes would."""

    def other_file_system(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    copied: list[str] = []
    monkeypatch.setattr(os, "link", other_file_system)
    monkeypatch.setattr(shutil, "copystat", lambda source, *_, **__: copied.append(str(source)))
    source = tmp_path / "libcuda.so.1"
    source.write_text("code")
    source.chmod(0o755)
    copy_files({"lib64/libcuda.so.1": source}, tmp_path / "target", tmp_path)
    made = tmp_path / "target/lib64/libcuda.so.1"
    assert (made.read_text(), made.stat().st_mode & 0o777) == ("code", 0o755)
    assert copied == []

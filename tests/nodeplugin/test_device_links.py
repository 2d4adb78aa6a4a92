"""Links from /dev/char to NVIDIA's device nodes, which systemd needs to keep them in running containers."""

import os
import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from nodeplugin.device_links import DeviceLinks
from nodeplugin.host_driver import HostDriver
from tests.nodeplugin.builders import card, mig_part

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can create device nodes")


class Dev:
    """A host's /dev in a folder."""

    def __init__(self, host: Path) -> None:
        self.host, self.dev = host, host / "dev"
        (self.dev / "char").mkdir(parents=True)

    def node(self, name: str, major: int, minor: int) -> None:
        path = self.host / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))

    def links(self) -> dict[str, str]:
        return {each.name: str(each.readlink()) for each in (self.dev / "char").iterdir()}


@pytest.fixture
def dev(tmp_path: Path) -> Dev:
    """A /dev with the nodes of a card, of a MIG device, and of another driver."""
    made = Dev(tmp_path / "host")
    made.node("dev/nvidia3", 195, 3)
    made.node("dev/nvidiactl", 195, 255)
    made.node("dev/nvidia-uvm", 511, 0)
    made.node("dev/nvidia-caps/nvidia-cap21", 237, 21)
    made.node("dev/null", 1, 3)
    (made.dev / "nvidia-info").write_text("no device")
    return made


LINKS = {
    "195:3": "../nvidia3",
    "195:255": "../nvidiactl",
    "511:0": "../nvidia-uvm",
    "237:21": "../nvidia-caps/nvidia-cap21",
}


def test_every_node_of_the_driver_gets_a_link(dev: Dev) -> None:
    """And the nodes of other drivers none: udev makes those."""
    DeviceLinks(dev.host).update(dev.dev)
    assert dev.links() == LINKS


def test_links_that_are_right_are_kept(dev: Dev) -> None:
    """Whoever made them, and however they are written."""
    (dev.dev / "char/195:3").symlink_to("/dev/nvidia3")
    DeviceLinks(dev.host).update(dev.dev)
    assert dev.links() == {**LINKS, "195:3": "/dev/nvidia3"}
    before = {each.name: each.lstat().st_ino for each in (dev.dev / "char").iterdir()}
    DeviceLinks(dev.host).update(dev.dev)
    assert {each.name: each.lstat().st_ino for each in (dev.dev / "char").iterdir()} == before


@pytest.mark.parametrize("target", ["../nowhere", "../null", "../nvidia-info"])
def test_links_that_lead_elsewhere_are_replaced(dev: Dev, target: str) -> None:
    """The major number of nvidia-uvm changes from boot to boot, and the kernel gives the old one to another device."""
    (dev.dev / "char/511:0").symlink_to(target)
    DeviceLinks(dev.host).update(dev.dev)
    assert dev.links() == LINKS


def test_nodes_of_a_driver_container_are_linked_by_their_path_on_the_host(dev: Dev) -> None:
    dev.node("run/nvidia/driver/dev/nvidia0", 195, 0)
    for _ in range(2):
        with capture_logs() as logs:
            DeviceLinks(dev.host).update(dev.host / "run/nvidia/driver/dev")
        assert dev.links() == {"195:0": "/run/nvidia/driver/dev/nvidia0"}
    assert logs == []


def test_a_host_without_systemd_gets_no_links(dev: Dev) -> None:
    (dev.dev / "char").rmdir()
    DeviceLinks(dev.host).update(dev.dev)
    assert not (dev.dev / "char").exists()


def test_a_read_only_dev_is_reported_once_with_the_remedy(dev: Dev, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers still get their GPUs; the next update tries again."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    links = DeviceLinks(dev.host)
    with capture_logs() as logs, monkeypatch.context() as patched:
        patched.setattr(Path, "symlink_to", refuse)
        links.update(dev.dev)
        links.update(dev.dev)
    (entry,) = logs
    assert entry["event"] == "device_links_not_created"
    assert "mount the host's /dev writable" in entry["remedy"]
    assert "nvidia-ctk system create-dev-char-symlinks --create-all" in entry["remedy"]
    links.update(dev.dev)
    assert dev.links() == LINKS


def test_nodes_that_the_plugin_creates_are_linked_before_a_container_gets_them(tmp_path: Path) -> None:
    """The nodes of MIG devices as well."""
    dev = Dev(tmp_path / "host")
    proc = tmp_path / "proc"
    for path, minor in (("gi1/access", 21), ("gi1/ci0/access", 22)):
        file = proc / "driver/nvidia/capabilities/gpu3/mig" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"DeviceFileMinor: {minor}\n")
    (proc / "devices").write_text("Character devices:\n237 nvidia-caps\n511 nvidia-uvm\n")
    HostDriver(dev.host, proc=proc).device_nodes([card(0, minor=0), mig_part(1, minor=3)])
    assert dev.links() == {
        "195:0": "../nvidia0",
        "195:3": "../nvidia3",
        "195:255": "../nvidiactl",
        "511:0": "../nvidia-uvm",
        "511:1": "../nvidia-uvm-tools",
        "237:21": "../nvidia-caps/nvidia-cap21",
        "237:22": "../nvidia-caps/nvidia-cap22",
    }

"""What containers find of their GPUs: device nodes, the driver's files, and their limits, in each of three ways."""

import errno
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from msgspec.structs import replace

from nodeplugin.cards import NodeCards
from nodeplugin.checkpoint import ContainerAllocation, InjectionMode
from nodeplugin.host_driver import DeviceNode, HostDriver
from nodeplugin.injection import Injector, detect_mode
from nodeplugin.pods import BoundPod
from tests.nodeplugin.builders import CARD_MIB, bound, card, mig_part
from vcuda.limits import ContainerLimits, LimitSource
from vcuda.names import Names
from vcuda.placement_annotation import GpuSlice

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make device nodes")

LIBRARIES = "usr/lib/x86_64-linux-gnu"
VERSION = "550.54.15"
UVM_MAJOR, CAPS_MAJOR = 511, 237
FOLDER = "0123456789abcdef"
HALF = (GpuSlice("GPU-0", 50, 1024),)
NAMES = Names("example.org")


class Host:
    """A machine below a folder: its root, and what its kernel says."""

    def __init__(self, folder: Path) -> None:
        self.root, self.proc = folder / "host", folder / "proc"
        (self.root / "dev").mkdir(parents=True)
        self.proc.mkdir()
        self.majors(nvidia=195, **{"nvidia-uvm": UVM_MAJOR, "nvidia-caps": CAPS_MAJOR})

    def majors(self, **numbers: int) -> None:
        """Have the kernel know these kinds of devices."""
        listed = "".join(f"{number:3} {name}\n" for name, number in numbers.items())
        (self.proc / "devices").write_text(f"Character devices:\n  1 mem\n{listed}\nBlock devices:\n  8 sd\n")

    def capability(self, path: str, minor: int) -> None:
        """Have the driver say by which node a part of a card may be used."""
        file = self.proc / "driver/nvidia/capabilities" / path / "access"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n")

    def file(self, path: str, content: str = "code") -> Path:
        made = self.root / path
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(content)
        return made

    def link(self, path: str, target: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(target)

    def install(self, version: str = VERSION, below: str = "") -> None:
        """Put a driver there, as its installer does: files with a version, and links to them."""
        for name in ("libcuda", "libnvidia-ml"):
            self.file(f"{below}{LIBRARIES}/{name}.so.{version}", f"{name} {version}")
            (self.root / f"{below}{LIBRARIES}/{name}.so.1").unlink(missing_ok=True)
            self.link(f"{below}{LIBRARIES}/{name}.so.1", f"{name}.so.{version}")
        self.file(f"{below}usr/bin/nvidia-smi", f"program {version}")

    def driver(self, root: str = "") -> HostDriver:
        return HostDriver(self.root, root, self.proc)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A machine without a driver."""
    return Host(tmp_path)


def numbers(path: Path) -> tuple[int, int]:
    """The numbers of a device node that everybody may use."""
    found = path.stat()
    assert stat.S_ISCHR(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o666
    return os.major(found.st_rdev), os.minor(found.st_rdev)


# Device nodes.


@needs_root
def test_missing_device_nodes_are_made(host: Host) -> None:
    """With the numbers that the driver and the kernel give them, and the minor of the card, not its index."""
    nodes = host.driver().device_nodes([card(0, minor=3)])
    assert nodes == [
        DeviceNode(f"/dev/{name}", f"/dev/{name}")
        for name in ("nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
    ]
    made = {each.name: numbers(each) for each in (host.root / "dev").iterdir()}
    assert made == {
        "nvidia3": (195, 3),
        "nvidiactl": (195, 255),
        "nvidia-uvm": (UVM_MAJOR, 0),
        "nvidia-uvm-tools": (UVM_MAJOR, 1),
    }


@needs_root
def test_device_nodes_that_are_there_are_left_alone(host: Host) -> None:
    """Whoever made them had reasons; the one for screens is given along where there is one."""
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        host.file(f"dev/{name}")
    nodes = host.driver().device_nodes([card(0, minor=0)])
    assert [each.container for each in nodes] == [
        "/dev/nvidia0",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-modeset",
    ]
    assert all((host.root / each.host.lstrip("/")).is_file() for each in nodes)


@needs_root
def test_several_cards_share_the_common_nodes(host: Host) -> None:
    """Each node is listed once."""
    nodes = host.driver().device_nodes([card(0), card(1), card(0)])
    assert [each.container for each in nodes] == [
        "/dev/nvidia7",
        "/dev/nvidia6",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    ]


@needs_root
def test_a_kernel_without_the_uvm_module_gets_no_node_for_it(host: Host) -> None:
    """A node with a wrong number would be worse than none."""
    host.majors(nvidia=195)
    nodes = host.driver().device_nodes([card(0)])
    assert [each.container for each in nodes] == ["/dev/nvidia7", "/dev/nvidiactl"]


@needs_root
def test_the_uvm_module_is_loaded_where_the_driver_can(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver's own program, below the driver's root."""
    host.majors(nvidia=195)
    host.file("usr/bin/nvidia-modprobe")
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        host.majors(**{"nvidia-uvm": UVM_MAJOR})
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr(subprocess, "run", run)
    host.driver().device_nodes([card(0)])
    assert commands == [["chroot", str(host.root), "/usr/bin/nvidia-modprobe", "-u", "-c=0"]]
    assert numbers(host.root / "dev/nvidia-uvm") == (UVM_MAJOR, 0)


@needs_root
def test_a_part_of_a_card_needs_the_nodes_of_its_instances(host: Host) -> None:
    """One for the gpu instance and one for the compute instance, found by the minor of the card."""
    host.capability("gpu3/mig/gi1", 21)
    host.capability("gpu3/mig/gi1/ci0", 22)
    nodes = host.driver().device_nodes([mig_part(1, minor=3)])
    assert [each.container for each in nodes][:3] == [
        "/dev/nvidia3",
        "/dev/nvidia-caps/nvidia-cap21",
        "/dev/nvidia-caps/nvidia-cap22",
    ]
    assert numbers(host.root / "dev/nvidia-caps/nvidia-cap21") == (CAPS_MAJOR, 21)
    assert numbers(host.root / "dev/nvidia-caps/nvidia-cap22") == (CAPS_MAJOR, 22)


@needs_root
def test_a_driver_that_does_not_tell_its_capabilities_gives_none(host: Host) -> None:
    """Nor does a file that says something else."""
    host.file("../proc/driver/nvidia/capabilities/gpu3/mig/gi1/access", "nothing to see\n")
    nodes = host.driver().device_nodes([mig_part(1, minor=3)])
    assert not any("caps" in each.container for each in nodes)


@needs_root
def test_a_driver_in_a_container_has_device_nodes_of_its_own(host: Host) -> None:
    """The container sees them where it expects them."""
    host.install(below="run/nvidia/driver/")
    host.file("run/nvidia/driver/dev/nvidiactl")
    nodes = host.driver().device_nodes([card(0, minor=0)])
    assert DeviceNode("/run/nvidia/driver/dev/nvidia0", "/dev/nvidia0") in nodes


# The driver's files.

ROOTS = {
    "installed on the host": ("", "", ""),
    "put there by a container": ("run/nvidia/driver/", "", "run/nvidia/driver"),
    "put there by a cloud": ("home/kubernetes/bin/nvidia/", "", "home/kubernetes/bin/nvidia"),
    "where the configuration says": ("opt/driver/", "/opt/driver", "opt/driver"),
}


@pytest.mark.parametrize(("below", "configured", "expected"), ROOTS.values(), ids=ROOTS.keys())
def test_the_driver_is_found(host: Host, below: str, configured: str, expected: str) -> None:
    """With NVML, which is then loaded from there."""
    host.install(below=below)
    driver = host.driver(configured)
    assert driver.root == host.root / expected
    assert driver.find_library() == host.root / expected / LIBRARIES / "libnvidia-ml.so.1"


def test_a_machine_without_a_driver_has_no_library(host: Host) -> None:
    """The loader may know one."""
    assert host.driver().find_library() is None
    assert host.driver().find_files() == {}


def test_libraries_are_found_where_the_loader_is_told_to_look(host: Host) -> None:
    """Some distributions have folders of their own for a driver."""
    host.file("etc/ld.so.conf.d/nvidia.conf", "# the driver\n/opt/nvidia/lib\n")
    host.file("opt/nvidia/lib/libnvidia-ml.so.1")
    assert host.driver().find_library() == host.root / "opt/nvidia/lib/libnvidia-ml.so.1"


TAKEN = ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.550.54.15", "libnvoptix.so.1")
LEFT = ("libc.so.6", "libcudart.so.12", "libcuda.so.1.bak", "libnvidia-container.so.1", "mylibcuda.so.1")


def test_only_the_drivers_own_libraries_are_taken(host: Host) -> None:
    """Toolkits and the machine's own libraries are the container's business."""
    for name in (*TAKEN, *LEFT):
        host.file(f"{LIBRARIES}/{name}")
    assert set(host.driver().find_files()) == {f"lib64/{name}" for name in TAKEN}


def test_programs_are_found(host: Host) -> None:
    """The first of a name counts."""
    first, second = host.file("usr/bin/nvidia-smi"), host.file("opt/bin/nvidia-smi")
    other = host.file("usr/sbin/nvidia-persistenced")
    found = host.driver().find_files()
    assert found == {"bin/nvidia-smi": first, "bin/nvidia-persistenced": other}
    assert second not in found.values()


def laid_out(host: Host, folder: Path, version: str = VERSION) -> Path:
    """Lay the driver out; gives the folder that is current."""
    folder.mkdir(exist_ok=True)
    link = host.driver().install_files(folder, version)
    assert link == folder / "current"
    return folder / link.readlink()


def test_files_are_laid_out_for_containers(host: Host, tmp_path: Path) -> None:
    """Libraries and programs, and links from name to name as they were."""
    host.install()
    made = laid_out(host, tmp_path / "driver")
    assert made.name.startswith(f"{VERSION}-")
    assert (made / "bin/nvidia-smi").read_text() == f"program {VERSION}"
    assert (made / "lib64/libcuda.so.1").readlink() == Path(f"libcuda.so.{VERSION}")
    assert (made / "lib64/libcuda.so.1").read_text() == f"libcuda {VERSION}"


def test_a_link_into_another_folder_becomes_a_file(host: Host, tmp_path: Path) -> None:
    """The folder is not there in a container."""
    host.file("usr/share/driver/libcuda-real", "deep")
    host.link(f"{LIBRARIES}/libcuda.so.1", "../../share/driver/libcuda-real")
    made = laid_out(host, tmp_path / "driver") / "lib64/libcuda.so.1"
    assert made.read_text() == "deep"
    assert not made.is_symlink()


def test_an_absolute_link_is_followed_from_the_hosts_root(host: Host, tmp_path: Path) -> None:
    """Debian leads libcuda.so.1 through /etc/alternatives."""
    host.file("usr/lib/nvidia/current/libcuda.so.1", "debian")
    host.link("etc/alternatives/libcuda", "/usr/lib/nvidia/current/libcuda.so.1")
    host.link(f"{LIBRARIES}/libcuda.so.1", "/etc/alternatives/libcuda")
    assert (laid_out(host, tmp_path / "driver") / "lib64/libcuda.so.1").read_text() == "debian"


def test_a_link_to_nowhere_is_passed_over(host: Host, tmp_path: Path) -> None:
    """An upgrade leaves such links behind, and they are no reason to do without the driver."""
    host.install()
    host.link(f"{LIBRARIES}/libnvidia-fbc.so.1", "libnvidia-fbc.so.1.removed")
    made = laid_out(host, tmp_path / "driver")
    assert (made / "lib64/libcuda.so.1").read_text() == f"libcuda {VERSION}"


def test_files_on_another_file_system_are_copied(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot be linked."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    host.install()
    monkeypatch.setattr(os, "link", refuse)
    made = laid_out(host, tmp_path / "driver")
    assert (made / "lib64/libcuda.so.1").read_text() == f"libcuda {VERSION}"


def test_the_same_driver_is_laid_out_once(host: Host, tmp_path: Path) -> None:
    """Containers that run use these files."""
    host.install()
    before = laid_out(host, tmp_path / "driver")
    inode = before.stat().st_ino
    assert laid_out(host, tmp_path / "driver") == before
    assert before.stat().st_ino == inode


def test_a_new_driver_replaces_the_link_and_leaves_the_old_files(host: Host, tmp_path: Path) -> None:
    """Until nobody uses them any more; what a crash left behind is removed with them."""
    folder = tmp_path / "driver"
    host.install()
    old = laid_out(host, folder)
    host.install("560.1")
    new = laid_out(host, folder, "560.1")
    assert (folder / "current/lib64/libcuda.so.1").read_text() == "libcuda 560.1"
    assert old.is_dir()
    (folder / ".half.new/lib64").mkdir(parents=True)
    HostDriver.remove_old_files(folder)
    assert {each.name for each in folder.iterdir()} == {"current", new.name}


def test_a_driver_that_was_repaired_is_laid_out_anew(host: Host, tmp_path: Path) -> None:
    """Its version is the same, and its files are not."""
    host.install()
    before = laid_out(host, tmp_path / "driver")
    host.file("usr/bin/nvidia-smi", "a longer program")
    assert laid_out(host, tmp_path / "driver") != before
    assert (tmp_path / "driver/current/bin/nvidia-smi").read_text() == "a longer program"


def test_without_files_there_is_nothing_to_lay_out(host: Host, tmp_path: Path) -> None:
    """Nor is anything removed that is not there."""
    assert host.driver().install_files(tmp_path, VERSION) is None
    HostDriver.remove_old_files(tmp_path / "nowhere")
    assert not (tmp_path / "current").is_symlink()


# Ways.

NODES = {
    "containerd reads CDI files since 2.0": ("containerd://2.0.0", "v1.31.0", "cdi"),
    "later ones as well": ("containerd://2.1.4", "v1.36.4", "cdi"),
    "candidates as well": ("containerd://2.0.0-rc.1", "v1.33.1+k3s1", "cdi"),
    "containerd before does not by itself": ("containerd://1.7.27", "v1.34.0", "native"),
    "CRI-O does since 1.28": ("cri-o://1.28.0", "v1.31.0", "cdi"),
    "CRI-O before does not": ("cri-o://1.27.9", "v1.31.0", "native"),
    "numbers are no text": ("cri-o://1.9.0", "v1.31.0", "native"),
    "the kubelet names CDI devices since 1.31": ("containerd://2.0.0", "v1.30.9", "native"),
    "a new main version is later": ("containerd://3.0.1", "v2.0.0", "cdi"),
    "Docker does not": ("docker://27.1.0", "v1.34.0", "native"),
    "a version that cannot be read": ("containerd://unknown", "v1.34.0", "native"),
    "nothing reported": ("", "", "native"),
}


@pytest.mark.parametrize(("runtime", "kubelet", "expected"), NODES.values(), ids=NODES.keys())
def test_the_way_is_chosen_by_the_nodes_versions(runtime: str, kubelet: str, expected: InjectionMode) -> None:
    """CDI where runtime and kubelet know it, and otherwise what works everywhere."""
    assert detect_mode(runtime, kubelet) == expected


class Ground:
    """An injector on a machine with a driver and two cards."""

    def __init__(self, host: Host, folder: Path, way: InjectionMode) -> None:
        host.install()
        self.folder, self.cdi = folder / "quotient", folder / "cdi"
        self.node_cards = NodeCards()
        self.node_cards.update([card(0), card(1)])
        self.injector = Injector(way, self.folder, host.driver(), self.node_cards, names=NAMES, cdi=self.cdi)
        self.injector.start(VERSION)

    def got(self, token: str = FOLDER) -> ContainerAllocation:
        return ContainerAllocation(token, {}, self.injector.way)

    def limits(self, token: str = FOLDER) -> Any:
        return json.loads((self.folder / "containers" / token / "limits.json").read_text())

    def spec_file(self, token: str = FOLDER) -> Path:
        return self.cdi / f"quotient.dev-gpu_{token}.json"

    def spec(self, token: str = FOLDER) -> Any:
        return json.loads(self.spec_file(token).read_text())


Made = Callable[[InjectionMode], Ground]


@pytest.fixture
def made(host: Host, tmp_path: Path) -> Made:
    """Makes an injector for a way."""
    return lambda way: Ground(host, tmp_path, way)


POD = bound("train")
ANNOTATIONS = {
    "example.org/vcuda-core": "50",
    "example.org/vcuda-memory": str(1024 * 2**20),
    "example.org/vcuda-device": "/dev/nvidia7",
}
MOUNTED = {
    "/etc/quotient": f"containers/{FOLDER}",
    "/usr/local/nvidia/bin": "driver/current/bin",
    "/usr/local/nvidia/lib64": "driver/current/lib64",
}
DEVICES = ["/dev/nvidia7", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]


@needs_root
def test_a_stock_runtime_is_told_devices_mounts_and_environment(made: Made) -> None:
    """Everything is read-only but the devices."""
    ground = made("native")
    answer = ground.injector.answer(POD, "a", ground.got(), HALF)
    assert [(each.host_path, each.container_path, each.permissions) for each in answer.devices] == [
        (path, path, "rw") for path in DEVICES
    ]
    assert {each.container_path: each.host_path for each in answer.mounts} == {
        inside: f"{ground.folder}/{outside}" for inside, outside in MOUNTED.items()
    }
    assert all(each.read_only for each in answer.mounts)
    assert dict(answer.envs) == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-0",
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
    }
    assert not answer.cdi_devices
    assert all(Path(each.host_path).is_dir() for each in answer.mounts)


@needs_root
def test_the_runtime_of_nvidia_brings_the_drivers_files_itself(made: Made) -> None:
    """It is told which cards, and mounts nothing of ours but the limits."""
    ground = made("nvidia-runtime")
    answer = ground.injector.answer(POD, "a", ground.got(), HALF)
    assert [each.container_path for each in answer.mounts] == ["/etc/quotient"]
    assert dict(answer.envs) == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-0",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }
    assert not (ground.folder / "driver").exists()
    assert not ground.cdi.exists()


@needs_root
def test_cdi_names_one_device_and_says_the_rest_in_a_file(made: Made) -> None:
    """The answer holds nothing that a pod's author could override."""
    ground = made("cdi")
    answer = ground.injector.answer(POD, "a", ground.got(), HALF)
    assert [each.name for each in answer.cdi_devices] == [f"quotient.dev/gpu={FOLDER}"]
    assert [len(part) for part in (answer.devices, answer.mounts, answer.envs)] == [0, 0, 0]
    spec = ground.spec()
    assert (spec["cdiVersion"], spec["kind"]) == ("0.5.0", "quotient.dev/gpu")
    (device,) = spec["devices"]
    assert device["name"] == FOLDER
    edits = device["containerEdits"]
    assert edits["env"] == ["LD_LIBRARY_PATH=/usr/local/nvidia/lib64", "NVIDIA_VISIBLE_DEVICES=GPU-0"]
    assert edits["deviceNodes"] == [{"path": path, "hostPath": path, "permissions": "rw"} for path in DEVICES]
    assert {each["containerPath"]: each["hostPath"] for each in edits["mounts"]} == {
        inside: f"{ground.folder}/{outside}" for inside, outside in MOUNTED.items()
    }
    assert all("ro" in each["options"] for each in edits["mounts"])


@needs_root
def test_a_cdi_file_is_replaced_at_once(made: Made) -> None:
    """A runtime that reads it meanwhile sees the old one whole, and nothing else lies there that it would read."""
    ground = made("cdi")
    ground.injector.prepare(POD, "a", ground.got(), HALF)
    with ground.spec_file().open() as reading:
        ground.injector.prepare(POD, "a", ground.got(), (GpuSlice("GPU-1", 50, 1024),))
        assert "GPU-0" in reading.read()
    assert "GPU-1" in ground.spec_file().read_text()
    assert list(ground.cdi.iterdir()) == [ground.spec_file()]
    assert stat.S_IMODE(ground.spec_file().stat().st_mode) == 0o444


@needs_root
@pytest.mark.parametrize("way", ["native", "cdi", "nvidia-runtime"])
def test_every_way_writes_the_ancestors_annotations(made: Made, way: InjectionMode) -> None:
    """Memory in bytes, and the card by its minor number."""
    ground = made(way)
    assert dict(ground.injector.answer(POD, "a", ground.got(), HALF).annotations) == ANNOTATIONS


@needs_root
def test_several_whole_cards_are_all_there(made: Made) -> None:
    """In the order of the placement; amounts are added."""
    ground = made("native")
    two = (GpuSlice("GPU-1", 100, CARD_MIB), GpuSlice("GPU-0", 100, CARD_MIB))
    answer = ground.injector.answer(POD, "a", ground.got(), two)
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == "GPU-1,GPU-0"
    assert [each.container_path for each in answer.devices][:2] == ["/dev/nvidia6", "/dev/nvidia7"]
    assert answer.annotations["example.org/vcuda-core"] == "200"
    assert [each["index"] for each in ground.limits()["cards"]] == [1, 0]


def test_a_driver_without_files_is_not_mounted(host: Host, tmp_path: Path) -> None:
    """A container cannot be started with a mount of what is not there."""
    node_cards = NodeCards()
    injector = Injector("native", tmp_path / "q", host.driver(), node_cards, names=NAMES, cdi=tmp_path / "cdi")
    injector.start(VERSION)
    assert [inside for _, inside in injector._mounts(FOLDER)] == ["/etc/quotient"]


# Limits.


@needs_root
def test_a_container_finds_its_limits(made: Made) -> None:
    """Whose they are, how much, and of which cards; whoever it runs as may read them."""
    ground = made("native")
    ground.injector.prepare(POD, "a", ground.got(), HALF)
    assert ground.limits() == {
        "v": 1,
        "podUID": "uid-train",
        "namespace": "team",
        "pod": "train",
        "container": "a",
        "cores": 50,
        "coreLimit": 50,
        "memoryMiB": 1024,
        "cards": [{"uuid": "GPU-0", "index": 0, "minor": 7, "cores": 50, "memoryMiB": 1024}],
    }
    file = ground.folder / "containers" / FOLDER / "limits.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o755


def bursting(core_limit: int) -> BoundPod:
    limits = ContainerLimits(cores=50, core_limit=core_limit, limit_source=LimitSource.USER)
    return bound("train", limits={"a": limits})


WHOLE_TWO = (GpuSlice("GPU-0", 100, CARD_MIB), GpuSlice("GPU-1", 100, CARD_MIB))
BURSTS: dict[str, tuple[BoundPod, tuple[GpuSlice, ...], int]] = {
    "nothing said, no burst": (POD, HALF, 50),
    "what was granted": (bursting(80), HALF, 80),
    "never less than asked for": (bursting(20), HALF, 50),
    "never more than a card": (bursting(400), HALF, 100),
    "whole cards have all of theirs": (bursting(100), WHOLE_TWO, 200),
}


@needs_root
@pytest.mark.parametrize(("pod", "slices", "expected"), BURSTS.values(), ids=BURSTS.keys())
def test_how_far_a_container_may_burst(made: Made, pod: BoundPod, slices: tuple[GpuSlice, ...], expected: int) -> None:
    """Between what it asked for and one card."""
    ground = made("native")
    ground.injector.prepare(pod, "a", ground.got(), slices)
    assert ground.limits()["coreLimit"] == expected


@needs_root
def test_what_is_right_is_not_written_again_and_what_is_gone_is(made: Made) -> None:
    """Before every start of a container."""
    ground = made("cdi")
    file = ground.folder / "containers" / FOLDER / "limits.json"
    ground.injector.prepare(POD, "a", ground.got(), HALF)
    inode = file.stat().st_ino
    ground.injector.prepare(POD, "a", ground.got(), HALF)
    assert file.stat().st_ino == inode
    content = file.read_bytes()
    file.unlink()
    ground.spec_file().unlink()
    ground.injector.prepare(POD, "a", ground.got(), HALF)
    assert file.read_bytes() == content
    assert ground.spec_file().exists()


@needs_root
def test_what_belongs_to_containers_that_are_gone_is_removed(made: Made) -> None:
    """Folder and file; what belongs to others stays."""
    ground = made("cdi")
    foreign = ground.cdi / "nvidia.json"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("{}")
    for token in ("one", "two"):
        ground.injector.prepare(POD, "a", ground.got(token), HALF)
    assert ground.injector.kept() == {"one", "two"}
    ground.injector.forget(["one", "unknown"])
    assert ground.injector.kept() == {"two"}
    assert set(ground.cdi.iterdir()) == {foreign, ground.spec_file("two")}
    assert not (ground.folder / "containers/one").exists()


@needs_root
def test_a_cdi_file_whose_folder_is_gone_is_still_found(made: Made) -> None:
    """Or nobody would ever remove it."""
    ground = made("cdi")
    ground.injector.prepare(POD, "a", ground.got(), HALF)
    (ground.folder / "containers" / FOLDER / "limits.json").unlink()
    (ground.folder / "containers" / FOLDER).rmdir()
    assert ground.injector.kept() == {FOLDER}


@needs_root
def test_a_program_that_loads_the_uvm_module_may_hang(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hardware is broken; that costs the container its node, and is no fault of the plugin's."""
    host.majors(nvidia=195)
    host.file("usr/bin/nvidia-modprobe")

    def hang(command: list[str], **_: Any) -> NoReturn:
        raise subprocess.TimeoutExpired(command, 20)

    monkeypatch.setattr(subprocess, "run", hang)
    assert [each.container for each in host.driver().device_nodes([card(0)])] == ["/dev/nvidia7", "/dev/nvidiactl"]


@needs_root
def test_a_cdi_file_is_found_where_the_folder_of_all_containers_is_gone(made: Made) -> None:
    """The two may lie on different disks."""
    ground = made("cdi")
    ground.injector.prepare(POD, "a", ground.got(), HALF)
    shutil.rmtree(ground.folder / "containers")
    assert ground.injector.kept() == {FOLDER}


@needs_root
def test_limits_can_be_read_by_whoever_the_container_runs_as(made: Made) -> None:
    """Whatever the plugin's own files are by default."""
    ground = made("native")
    before = os.umask(0o077)
    try:
        ground.injector.prepare(POD, "a", ground.got(), HALF)
    finally:
        os.umask(before)
    assert stat.S_IMODE((ground.folder / "containers" / FOLDER).stat().st_mode) == 0o755


def test_nothing_is_kept_before_the_start(host: Host, tmp_path: Path) -> None:
    """A folder that is not there is no error."""
    injector = Injector("cdi", tmp_path / "q", host.driver(), NodeCards(), names=NAMES, cdi=tmp_path / "cdi")
    assert injector.kept() == set()


@needs_root
def test_a_card_that_is_gone_is_left_out(made: Made) -> None:
    """Of the devices and the limits; the environment still names it, so that the program fails and says so."""
    ground = made("native")
    ground.node_cards.forget(["GPU-0"])
    answer = ground.injector.answer(POD, "a", ground.got(), HALF)
    assert "/dev/nvidia7" not in [each.container_path for each in answer.devices]
    assert ground.limits()["cards"] == []
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == "GPU-0"


@needs_root
@pytest.mark.parametrize("way", ["native", "nvidia-runtime", "cdi"])
def test_an_answer_is_outdated_once_its_card_has_another_number(made: Made, way: InjectionMode) -> None:
    """Numbers are given at each boot; a CDI file is written anew, an answer is not."""
    ground = made(way)
    answer = ground.injector.answer(POD, "a", ground.got(), HALF)
    assert not ground.injector.is_outdated(answer, HALF)
    first, second = ground.node_cards.cards()
    ground.node_cards.update([replace(first, minor=second.minor), replace(second, minor=first.minor)])
    assert ground.injector.is_outdated(answer, HALF) == (way != "cdi")


@needs_root
@pytest.mark.parametrize("how", ["emptied", "made by a runtime"])
def test_a_folder_that_was_emptied_is_filled_again(made: Made, how: str) -> None:
    """Runtimes make what they are to mount and do not find, as empty folders."""
    ground = made("native")
    shutil.rmtree(ground.folder)
    if how == "made by a runtime":
        for part in ("bin", "lib64"):
            (ground.folder / "driver/current" / part).mkdir(parents=True)
    answer = ground.injector.answer(POD, "a", ground.got(), HALF)
    assert {each.container_path for each in answer.mounts} == MOUNTED.keys()
    assert (ground.folder / "driver/current/lib64/libcuda.so.1").exists()
    ground.injector.start(VERSION)

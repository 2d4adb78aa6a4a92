"""What is injected into containers in each mode: device nodes, the driver's files, and limits."""

import contextlib
import errno
import json
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from msgspec.structs import replace

from nodeplugin.cards import NodeCards
from nodeplugin.checkpoint import ContainerAllocation
from nodeplugin.host_driver import DeviceNode, HostDriver, MissingDeviceNode
from nodeplugin.injection import Injector, detect_mode, mode_of
from nodeplugin.pods import BoundPod
from tests.nodeplugin.builders import CARD_MIB, bound, card, mig_part
from vcuda.injection_modes import InjectionMode
from vcuda.isolation import EXCLUSIVE, NO_ISOLATION, Isolation, Rung
from vcuda.limits import ContainerLimits, LimitSource
from vcuda.names import Names
from vcuda.placement_annotation import GpuSlice

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can create device nodes")

LIBRARIES = "usr/lib/x86_64-linux-gnu"
VERSION = "550.54.15"
UVM_MAJOR, CAPS_MAJOR = 511, 237
ALLOCATION = "0123456789abcdef"
HALF = (GpuSlice("GPU-0", 50, 1024),)
BY_DRIVER = Isolation(memory=Rung.DRIVER)
NAMES = Names("example.org")


class Host:
    """A machine in a folder: its root file system, and its /proc."""

    def __init__(self, folder: Path) -> None:
        self.root, self.proc, self.sys = folder / "host", folder / "proc", folder / "sys"
        (self.root / "dev").mkdir(parents=True)
        self.proc.mkdir()
        self.majors(nvidia=195, **{"nvidia-uvm": UVM_MAJOR, "nvidia-caps": CAPS_MAJOR})

    def majors(self, **numbers: int) -> None:
        """Set the major numbers in /proc/devices."""
        listed = "".join(f"{number:3} {name}\n" for name, number in numbers.items())
        (self.proc / "devices").write_text(f"Character devices:\n  1 mem\n{listed}\nBlock devices:\n  8 sd\n")

    def capability(self, path: str, minor: int) -> None:
        """Set the minor number of the device node that gives access to a MIG instance."""
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
        """Install a driver as its installer does: files with a version, and links to them."""
        for name in ("libcuda", "libnvidia-ml"):
            self.file(f"{below}{LIBRARIES}/{name}.so.{version}", f"{name} {version}")
            (self.root / f"{below}{LIBRARIES}/{name}.so.1").unlink(missing_ok=True)
            self.link(f"{below}{LIBRARIES}/{name}.so.1", f"{name}.so.{version}")
        self.file(f"{below}usr/bin/nvidia-smi", f"program {version}")

    def driver(self, root: str = "") -> HostDriver:
        return HostDriver(self.root, root, self.proc, self.sys)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A machine without a driver."""
    return Host(tmp_path)


def device_numbers(path: Path) -> tuple[int, int]:
    """The major and minor numbers of a device node, which must be usable by every user."""
    status = path.stat()
    assert stat.S_ISCHR(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o666
    return os.major(status.st_rdev), os.minor(status.st_rdev)


# Device nodes.


@needs_root
def test_missing_device_nodes_are_created(host: Host) -> None:
    """With the numbers of the driver and the kernel, and the card's minor number, not its index."""
    nodes = host.driver().device_nodes([card(0, minor=3)])
    assert nodes == [
        DeviceNode(f"/dev/{name}", f"/dev/{name}")
        for name in ("nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
    ]
    made = {each.name: device_numbers(each) for each in (host.root / "dev").iterdir()}
    assert made == {
        "nvidia3": (195, 3),
        "nvidiactl": (195, 255),
        "nvidia-uvm": (UVM_MAJOR, 0),
        "nvidia-uvm-tools": (UVM_MAJOR, 1),
    }


@needs_root
def test_existing_device_nodes_are_not_changed(host: Host) -> None:
    """nvidia-modeset is passed on if it exists, and never created."""
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
    """Each node appears once."""
    nodes = host.driver().device_nodes([card(0), card(1), card(0)])
    assert [each.container for each in nodes] == [
        "/dev/nvidia7",
        "/dev/nvidia6",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    ]


@needs_root
def test_without_the_uvm_module_no_container_starts(host: Host) -> None:
    """Every CUDA program in it would fail, and not say why."""
    host.majors(nvidia=195)
    with pytest.raises(MissingDeviceNode, match=r"/dev/nvidia-uvm does not exist .*modprobe nvidia-uvm"):
        host.driver().device_nodes([card(0)])


@needs_root
def test_the_uvm_module_is_loaded_by_the_drivers_own_program(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the driver's folder as its root."""
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
    assert device_numbers(host.root / "dev/nvidia-uvm") == (UVM_MAJOR, 0)


@needs_root
def test_a_mig_device_gets_the_nodes_of_its_instances(host: Host) -> None:
    """One for the GPU instance and one for the compute instance, found by the card's minor number."""
    host.capability("gpu3/mig/gi1", 21)
    host.capability("gpu3/mig/gi1/ci0", 22)
    nodes = host.driver().device_nodes([mig_part(1, minor=3)])
    assert [each.container for each in nodes][:3] == [
        "/dev/nvidia3",
        "/dev/nvidia-caps/nvidia-cap21",
        "/dev/nvidia-caps/nvidia-cap22",
    ]
    assert device_numbers(host.root / "dev/nvidia-caps/nvidia-cap21") == (CAPS_MAJOR, 21)
    assert device_numbers(host.root / "dev/nvidia-caps/nvidia-cap22") == (CAPS_MAJOR, 22)


@needs_root
@pytest.mark.parametrize("content", [None, "nothing to see\n", "DeviceFileMinor: x\n"])
def test_without_the_node_of_its_instance_no_container_starts(host: Host, content: str | None) -> None:
    """It would have no access to its MIG slice."""
    if content is not None:
        host.file("../proc/driver/nvidia/capabilities/gpu3/mig/gi1/access", content)
    with pytest.raises(MissingDeviceNode, match="gi1/access does not name the device node of MIG slice MIG-1"):
        host.driver().device_nodes([mig_part(1, minor=3)])


@needs_root
def test_a_capability_without_a_driver_for_it_starts_no_container(host: Host) -> None:
    host.majors(nvidia=195, **{"nvidia-uvm": UVM_MAJOR})
    host.capability("gpu3/mig/gi1", 21)
    with pytest.raises(MissingDeviceNode, match="nvidia-cap21 of MIG slice MIG-1 does not exist"):
        host.driver().device_nodes([mig_part(1, minor=3)])


@needs_root
def test_a_driver_in_a_container_has_device_nodes_of_its_own(host: Host) -> None:
    """Inside the container they have their usual paths."""
    host.install(below="run/nvidia/driver/")
    host.file("run/nvidia/driver/dev/nvidiactl")
    nodes = host.driver().device_nodes([card(0, minor=0)])
    assert DeviceNode("/run/nvidia/driver/dev/nvidia0", "/dev/nvidia0") in nodes


# The driver's files.

ROOTS = {
    "installed on the host": ("", "", ""),
    "installed by a driver container": ("run/nvidia/driver/", "", "run/nvidia/driver"),
    "installed by GKE": ("home/kubernetes/bin/nvidia/", "", "home/kubernetes/bin/nvidia"),
    "in the configured folder": ("opt/driver/", "/opt/driver", "opt/driver"),
}


@pytest.mark.parametrize(("below", "configured", "expected"), ROOTS.values(), ids=ROOTS.keys())
def test_the_driver_is_found(host: Host, below: str, configured: str, expected: str) -> None:
    """Including NVML, which is then loaded from there."""
    host.install(below=below)
    driver = host.driver(configured)
    assert driver.root == host.root / expected
    assert driver.find_library() == host.root / expected / LIBRARIES / "libnvidia-ml.so.1"


def test_a_machine_without_a_driver_has_no_library(host: Host) -> None:
    """The system's loader may still find one."""
    assert host.driver().find_library() is None
    assert host.driver().find_files() == {}


def test_libraries_are_found_in_the_folders_of_ld_so_conf(host: Host) -> None:
    """Some distributions install drivers in folders of their own."""
    host.file("etc/ld.so.conf.d/nvidia.conf", "# the driver\n/opt/nvidia/lib\n")
    host.file("opt/nvidia/lib/libnvidia-ml.so.1")
    assert host.driver().find_library() == host.root / "opt/nvidia/lib/libnvidia-ml.so.1"


TAKEN = (
    "libcuda.so",
    "libcuda.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-ptxjitcompiler.so.550.54.15",
    "libnvoptix.so.1",
    "libnvidia-nvvm70.so.4",
    "libnvidia-egl-gbm.so.1.1.1",
    "libnvidia-egl-xcb.so.1",
    "libnvidia-vulkan-producer.so",
    "libnvidia-tileiras.so.550.54.15",
)
LEFT = ("libc.so.6", "libcudart.so.12", "libcuda.so.1.bak", "libnvidia-container.so.1", "mylibcuda.so.1")


def test_only_the_drivers_own_libraries_are_taken(host: Host) -> None:
    """The CUDA toolkit and system libraries come with the container's image."""
    for name in (*TAKEN, *LEFT):
        host.file(f"{LIBRARIES}/{name}")
    assert set(host.driver().find_files()) == {f"lib64/{name}" for name in TAKEN}


def test_libraries_that_newer_drivers_add_are_taken_by_their_version(host: Host) -> None:
    """And the links to them. Libraries of other versions are not the driver's."""
    host.file(f"{LIBRARIES}/libnvidia-new.so.{VERSION}")
    host.link(f"{LIBRARIES}/libnvidia-new.so.2", f"libnvidia-new.so.{VERSION}")
    host.file(f"{LIBRARIES}/libnvidia-new.so.1.17.8")
    host.file(f"{LIBRARIES}/vdpau/libvdpau_nvidia.so.{VERSION}")
    assert set(host.driver().find_files(VERSION)) == {
        f"lib64/libnvidia-new.so.{VERSION}",
        "lib64/libnvidia-new.so.2",
        f"lib64/libvdpau_nvidia.so.{VERSION}",
    }


def test_flatcars_driver_is_found_through_its_links(host: Host, tmp_path: Path) -> None:
    """The folder of the current version is an absolute link, and files in it are links out of it."""
    host.install(below="opt/nvidia/550/")
    host.link("opt/nvidia/current", "/opt/nvidia/550")
    (host.root / "opt/nvidia/550/usr/bin/nvidia-smi").unlink()
    host.link("opt/nvidia/550/usr/bin/nvidia-smi", "/opt/bin/nvidia-smi")
    program = host.file("opt/bin/nvidia-smi")
    host.file("opt/lib/libnvidia-cfg.so.1", "elsewhere")
    host.link(f"opt/nvidia/550/{LIBRARIES}/libnvidia-cfg.so.1", "/opt/lib/libnvidia-cfg.so.1")
    driver = host.driver()
    assert driver.root == host.root / "opt/nvidia/550"
    assert driver.find_files()["bin/nvidia-smi"] == program
    made = laid_out(host, tmp_path / "driver")
    assert (made / "lib64/libnvidia-cfg.so.1").read_text() == "elsewhere"
    assert (made / "lib64/libcuda.so.1").read_text() == f"libcuda {VERSION}"


PLACES_OF_OTHERS = {
    "Bottlerocket": ("x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla", "usr/libexec/nvidia/tesla/bin"),
    "Talos": ("usr/local/glibc/usr/lib", "usr/local/bin"),
    "Talos with newer extensions": ("usr/local/lib", "usr/local/bin"),
}


@pytest.mark.parametrize(("libraries", "programs"), PLACES_OF_OTHERS.values(), ids=PLACES_OF_OTHERS.keys())
def test_drivers_are_found_where_other_systems_have_them(host: Host, libraries: str, programs: str) -> None:
    """NVML included, and without a setting."""
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        host.file(f"{libraries}/{name}")
    host.file(f"{programs}/nvidia-smi")
    driver = host.driver()
    assert (driver.root, driver.find_library()) == (host.root, host.root / libraries / "libnvidia-ml.so.1")
    assert set(driver.find_files()) == {"lib64/libcuda.so.1", "lib64/libnvidia-ml.so.1", "bin/nvidia-smi"}


DESCRIBED = {
    "OpenCL": ("etc/OpenCL/vendors/nvidia.icd", "etc/OpenCL/vendors/nvidia.icd"),
    "Vulkan": ("usr/share/vulkan/icd.d/nvidia_icd.json", "etc/vulkan/icd.d/nvidia_icd.json"),
    "Vulkan in RPMs": ("usr/share/vulkan/icd.d/nvidia_icd.x86_64.json", "etc/vulkan/icd.d/nvidia_icd.json"),
    "layers": ("etc/vulkan/implicit_layer.d/nvidia_layers.json", "etc/vulkan/implicit_layer.d/nvidia_layers.json"),
    "EGL": ("usr/share/glvnd/egl_vendor.d/10_nvidia.json", "usr/share/glvnd/egl_vendor.d/10_nvidia.json"),
    "EGL on GBM": (
        "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
        "usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
    ),
    "OptiX": ("usr/share/nvidia/nvoptix.bin", "usr/share/nvidia/nvoptix.bin"),
}


@pytest.mark.parametrize(("on_host", "inside"), DESCRIBED.values(), ids=DESCRIBED.keys())
def test_descriptions_of_the_driver_are_found(host: Host, on_host: str, inside: str) -> None:
    """Loaders of OpenCL, Vulkan and EGL look for them at fixed places."""
    file = host.file(on_host)
    assert host.driver().find_files() == {f"share/{inside}": file}


def test_programs_are_found(host: Host) -> None:
    """Of programs with the same name, the first one counts."""
    first, second = host.file("usr/bin/nvidia-smi"), host.file("opt/bin/nvidia-smi")
    other = host.file("usr/sbin/nvidia-persistenced")
    files = host.driver().find_files()
    assert files == {"bin/nvidia-smi": first, "bin/nvidia-persistenced": other}
    assert second not in files.values()


def laid_out(host: Host, folder: Path, version: str = VERSION) -> Path:
    """Lay the driver out, and return the current folder."""
    folder.mkdir(exist_ok=True)
    link = host.driver().install_files(folder, version)
    assert link == folder / "current"
    return folder / link.readlink()


def test_files_are_laid_out_for_containers(host: Host, tmp_path: Path) -> None:
    """Libraries and programs; links among them stay links."""
    host.install()
    made = laid_out(host, tmp_path / "driver")
    assert made.name.startswith(f"{VERSION}-")
    assert (made / "bin/nvidia-smi").read_text() == f"program {VERSION}"
    assert (made / "lib64/libcuda.so.1").readlink() == Path(f"libcuda.so.{VERSION}")
    assert (made / "lib64/libcuda.so.1").read_text() == f"libcuda {VERSION}"


def test_a_link_into_another_folder_becomes_a_file(host: Host, tmp_path: Path) -> None:
    """The other folder does not exist in a container."""
    host.file("usr/share/driver/libcuda-real", "deep")
    host.link(f"{LIBRARIES}/libcuda.so.1", "../../share/driver/libcuda-real")
    made = laid_out(host, tmp_path / "driver") / "lib64/libcuda.so.1"
    assert made.read_text() == "deep"
    assert not made.is_symlink()


def test_an_absolute_link_is_followed_from_the_hosts_root(host: Host, tmp_path: Path) -> None:
    """Debian links libcuda.so.1 through /etc/alternatives."""
    host.file("usr/lib/nvidia/current/libcuda.so.1", "debian")
    host.link("etc/alternatives/libcuda", "/usr/lib/nvidia/current/libcuda.so.1")
    host.link(f"{LIBRARIES}/libcuda.so.1", "/etc/alternatives/libcuda")
    assert (laid_out(host, tmp_path / "driver") / "lib64/libcuda.so.1").read_text() == "debian"


def test_a_dangling_link_is_skipped(host: Host, tmp_path: Path) -> None:
    """An upgrade leaves such links behind; the rest of the driver is still usable."""
    host.install()
    host.link(f"{LIBRARIES}/libnvidia-fbc.so.1", "libnvidia-fbc.so.1.removed")
    made = laid_out(host, tmp_path / "driver")
    assert (made / "lib64/libcuda.so.1").read_text() == f"libcuda {VERSION}"


def test_files_on_another_file_system_are_copied(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hard links do not work there."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    host.install()
    monkeypatch.setattr(os, "link", refuse)
    made = laid_out(host, tmp_path / "driver")
    assert (made / "lib64/libcuda.so.1").read_text() == f"libcuda {VERSION}"


def test_the_same_driver_is_laid_out_once(host: Host, tmp_path: Path) -> None:
    """Running containers use these files."""
    host.install()
    before = laid_out(host, tmp_path / "driver")
    inode = before.stat().st_ino
    assert laid_out(host, tmp_path / "driver") == before
    assert before.stat().st_ino == inode


def test_a_new_driver_replaces_the_link_and_leaves_the_old_files(host: Host, tmp_path: Path) -> None:
    """They are removed once no container uses them, together with what a crash left."""
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


def test_a_reinstalled_driver_is_laid_out_again(host: Host, tmp_path: Path) -> None:
    """With the same version, but other files."""
    host.install()
    before = laid_out(host, tmp_path / "driver")
    host.file("usr/bin/nvidia-smi", "a longer program")
    assert laid_out(host, tmp_path / "driver") != before
    assert (tmp_path / "driver/current/bin/nvidia-smi").read_text() == "a longer program"


def test_a_description_stays_when_a_new_driver_has_none(host: Host, tmp_path: Path) -> None:
    """Containers from before the upgrade mount it, and would not start again without."""
    folder, name = tmp_path / "driver", "etc/OpenCL/vendors/nvidia.icd"
    host.install()
    host.file(name, "libnvidia-opencl.so.1")
    laid_out(host, folder)
    (host.root / name).unlink()
    host.install("560.1")
    new = laid_out(host, folder, "560.1")
    assert (new / "share" / name).read_text() == "libnvidia-opencl.so.1"
    assert laid_out(host, folder, "560.1") == new
    shutil.rmtree(host.root / "usr")
    assert host.driver().install_files(folder, "") is None, "descriptions alone are no driver"


def test_without_files_there_is_nothing_to_lay_out(host: Host, tmp_path: Path) -> None:
    """And nothing to remove."""
    assert host.driver().install_files(tmp_path, VERSION) is None
    HostDriver.remove_old_files(tmp_path / "nowhere")
    assert not (tmp_path / "current").is_symlink()


# Modes.

NODES = {
    "containerd reads CDI files since 2.0": ("containerd://2.0.0", "v1.31.0", "cdi"),
    "later versions as well": ("containerd://2.1.4", "v1.36.4", "cdi"),
    "release candidates as well": ("containerd://2.0.0-rc.1", "v1.33.1+k3s1", "cdi"),
    "containerd before 2.0 needs configuration": ("containerd://1.7.27", "v1.34.0", "native"),
    "CRI-O reads CDI files since 1.28": ("cri-o://1.28.0", "v1.31.0", "cdi"),
    "CRI-O before 1.28 does not": ("cri-o://1.27.9", "v1.31.0", "native"),
    "versions are compared as numbers": ("cri-o://1.9.0", "v1.31.0", "native"),
    "the kubelet passes CDI devices since 1.31": ("containerd://2.0.0", "v1.30.9", "native"),
    "a new major version is later": ("containerd://3.0.1", "v2.0.0", "cdi"),
    "Docker does not read CDI files": ("docker://27.1.0", "v1.34.0", "native"),
    "an unreadable version": ("containerd://unknown", "v1.34.0", "native"),
    "nothing reported": ("", "", "native"),
}


@pytest.mark.parametrize(("runtime", "kubelet", "expected"), NODES.values(), ids=NODES.keys())
def test_the_mode_is_chosen_by_the_nodes_versions(runtime: str, kubelet: str, expected: InjectionMode) -> None:
    """CDI if both runtime and kubelet support it, else native."""
    assert detect_mode(runtime, kubelet) == expected


class InjectorBench:
    """An injector on a machine with a driver and two cards."""

    def __init__(self, host: Host, folder: Path, mode: InjectionMode) -> None:
        host.install()
        self.folder, self.cdi = folder / "quotient", folder / "cdi"
        self.node_cards = NodeCards()
        self.node_cards.update([card(0), card(1)])
        self.injector = Injector(mode, self.folder, host.driver(), self.node_cards, names=NAMES, cdi=self.cdi)
        self.injector.start(VERSION)

    def allocation(self, token: str = ALLOCATION, isolation: Isolation = NO_ISOLATION) -> ContainerAllocation:
        return ContainerAllocation(token, {}, self.injector.mode, isolation)

    def limits(self, token: str = ALLOCATION) -> Any:
        return json.loads((self.folder / "containers" / token / "limits.json").read_text())

    def spec_file(self, token: str = ALLOCATION) -> Path:
        return self.cdi / f"quotient.dev-gpu_{token}.json"

    def spec(self, token: str = ALLOCATION) -> Any:
        return json.loads(self.spec_file(token).read_text())


MakeBench = Callable[[InjectionMode], InjectorBench]


@pytest.fixture
def make(host: Host, tmp_path: Path) -> MakeBench:
    return lambda mode: InjectorBench(host, tmp_path, mode)


POD = bound("train")
ANNOTATIONS = {
    "example.org/vcuda-core": "50",
    "example.org/vcuda-memory": str(1024 * 2**20),
    "example.org/vcuda-device": "/dev/nvidia7",
}
MOUNTED = {
    "/etc/quotient": f"containers/{ALLOCATION}",
    "/usr/local/nvidia/bin": "driver/current/bin",
    "/usr/local/nvidia/lib64": "driver/current/lib64",
    "/etc/ld.so.conf.d/00-quotient.conf": "driver/current/share/etc/ld.so.conf.d/00-quotient.conf",
}
DEVICES = ["/dev/nvidia7", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]


@needs_root
def test_native_returns_devices_mounts_and_environment(make: MakeBench) -> None:
    """Mounts are read-only."""
    bench = make("native")
    response = bench.injector.build_response(POD, "a", bench.allocation(), HALF)
    assert [(each.host_path, each.container_path, each.permissions) for each in response.devices] == [
        (path, path, "rw") for path in DEVICES
    ]
    assert {each.container_path: each.host_path for each in response.mounts} == {
        inside: f"{bench.folder}/{outside}" for inside, outside in MOUNTED.items()
    }
    assert all(each.read_only for each in response.mounts)
    assert dict(response.envs) == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-0",
        "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
    }
    assert not response.cdi_devices
    assert all(Path(each.host_path).exists() for each in response.mounts)


@needs_root
def test_nvidia_runtime_mounts_nothing_but_the_limits(make: MakeBench) -> None:
    """NVIDIA's runtime adds the driver's files for the visible devices."""
    bench = make("nvidia-runtime")
    response = bench.injector.build_response(POD, "a", bench.allocation(), HALF)
    assert [each.container_path for each in response.mounts] == ["/etc/quotient"]
    assert dict(response.envs) == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-0",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }
    assert not (bench.folder / "driver").exists()
    assert not bench.cdi.exists()


@needs_root
def test_cdi_returns_one_device_and_writes_the_rest_to_a_file(make: MakeBench) -> None:
    """The response has nothing that the pod could override."""
    bench = make("cdi")
    response = bench.injector.build_response(POD, "a", bench.allocation(), HALF)
    assert [each.name for each in response.cdi_devices] == [f"quotient.dev/gpu={ALLOCATION}"]
    assert [len(part) for part in (response.devices, response.mounts, response.envs)] == [0, 0, 0]
    spec = bench.spec()
    assert (spec["cdiVersion"], spec["kind"]) == ("0.5.0", "quotient.dev/gpu")
    (device,) = spec["devices"]
    assert device["name"] == ALLOCATION
    edits = device["containerEdits"]
    assert edits["env"] == ["NVIDIA_VISIBLE_DEVICES=GPU-0"]
    assert [each["hookName"] for each in edits["hooks"]] == ["createContainer"]
    assert edits["deviceNodes"] == [{"path": path, "hostPath": path, "permissions": "rw"} for path in DEVICES]
    assert {each["containerPath"]: each["hostPath"] for each in edits["mounts"]} == {
        inside: f"{bench.folder}/{outside}" for inside, outside in MOUNTED.items()
    }
    assert all("ro" in each["options"] for each in edits["mounts"])


@needs_root
@pytest.mark.parametrize("mode", ["native", "cdi"])
def test_descriptions_are_mounted_one_by_one(host: Host, make: MakeBench, mode: InjectionMode) -> None:
    """The image may have descriptions of other drivers in the same folder."""
    host.file("etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1")
    bench = make(mode)
    response = bench.injector.build_response(POD, "a", bench.allocation(), HALF)
    mounts = {each.container_path: each.host_path for each in response.mounts}
    if mode == "cdi":
        listed = bench.spec()["devices"][0]["containerEdits"]["mounts"]
        mounts = {each["containerPath"]: each["hostPath"] for each in listed}
    mounted = mounts["/etc/OpenCL/vendors/nvidia.icd"]
    assert mounted == f"{bench.folder}/driver/current/share/etc/OpenCL/vendors/nvidia.icd"
    assert Path(mounted).read_text() == "libnvidia-opencl.so.1"


@needs_root
def test_cdi_adds_graphics_nodes_and_sockets_as_they_are_now(host: Host, make: MakeBench) -> None:
    """Not in a response, which the kubelet replays after a boot that may have changed them."""
    bench = make("cdi")
    bench.node_cards.update([replace(card(0), bus_id="00000000:3B:00.0"), replace(card(1), bus_id="00000000:AF:00.0")])
    for address, names in (("0000:3b:00.0", ("card1", "renderD128")), ("0000:af:00.0", ("card2", "renderD129"))):
        for name in names:
            (host.sys / "bus/pci/devices" / address / "drm" / name).mkdir(parents=True)
            host.file(f"dev/dri/{name}")
    path = host.root / "run/nvidia-persistenced/socket"
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):
        listener.bind(path.name)
        bench.injector.prepare(POD, "a", bench.allocation(), HALF)
    edits = bench.spec()["devices"][0]["containerEdits"]
    assert [each["path"] for each in edits["deviceNodes"]] == [*DEVICES, "/dev/dri/card1", "/dev/dri/renderD128"]
    assert "/run/nvidia-persistenced/socket" in {each["containerPath"] for each in edits["mounts"]}
    path.unlink()
    bench.injector.prepare(POD, "a", bench.allocation(), HALF)
    edits = bench.spec()["devices"][0]["containerEdits"]
    assert "/run/nvidia-persistenced/socket" not in {each["containerPath"] for each in edits["mounts"]}


def test_a_part_of_a_card_has_no_graphics_nodes(host: Host) -> None:
    """They would give access to the whole card."""
    (host.sys / "bus/pci/devices/0000:3b:00.0/drm/card1").mkdir(parents=True)
    host.file("dev/dri/card1")
    part = replace(mig_part(1, minor=3), bus_id="00000000:3B:00.0")
    assert host.driver().graphics_nodes([part]) == []


@needs_root
@pytest.mark.parametrize("mode", ["native", "cdi", "nvidia-runtime"])
def test_the_mode_is_recognized_in_a_response(make: MakeBench, mode: InjectionMode) -> None:
    """A lost allocation is rebuilt from the response in the kubelet's checkpoint."""
    bench = make(mode)
    assert mode_of(bench.injector.build_response(POD, "a", bench.allocation(), HALF)) == mode


@needs_root
def test_a_cdi_file_is_replaced_atomically(make: MakeBench) -> None:
    """A runtime that is reading it sees all of the old one; and the folder has no scratch file."""
    bench = make("cdi")
    bench.injector.prepare(POD, "a", bench.allocation(), HALF)
    with bench.spec_file().open() as reading:
        bench.injector.prepare(POD, "a", bench.allocation(), (GpuSlice("GPU-1", 50, 1024),))
        assert "GPU-0" in reading.read()
    assert "GPU-1" in bench.spec_file().read_text()
    assert list(bench.cdi.iterdir()) == [bench.spec_file()]
    assert stat.S_IMODE(bench.spec_file().stat().st_mode) == 0o444


@needs_root
@pytest.mark.parametrize("mode", ["native", "cdi", "nvidia-runtime"])
def test_every_mode_sets_gpu_managers_annotations(make: MakeBench, mode: InjectionMode) -> None:
    """Memory is in bytes, and the device node has the card's minor number."""
    bench = make(mode)
    assert dict(bench.injector.build_response(POD, "a", bench.allocation(), HALF).annotations) == ANNOTATIONS


@needs_root
def test_several_whole_cards_are_all_injected(make: MakeBench) -> None:
    """In the order of the placement; amounts are summed."""
    bench = make("native")
    two = (GpuSlice("GPU-1", 100, CARD_MIB), GpuSlice("GPU-0", 100, CARD_MIB))
    response = bench.injector.build_response(POD, "a", bench.allocation(), two)
    assert response.envs["NVIDIA_VISIBLE_DEVICES"] == "GPU-1,GPU-0"
    assert [each.container_path for each in response.devices][:2] == ["/dev/nvidia6", "/dev/nvidia7"]
    assert response.annotations["example.org/vcuda-core"] == "200"
    assert [each["index"] for each in bench.limits()["cards"]] == [1, 0]


def test_a_driver_without_files_is_not_mounted(host: Host, tmp_path: Path) -> None:
    """A container does not start if the source of a mount is missing."""
    node_cards = NodeCards()
    injector = Injector("native", tmp_path / "q", host.driver(), node_cards, names=NAMES, cdi=tmp_path / "cdi")
    injector.start(VERSION)
    assert [each.container for each in injector._mounts(ContainerAllocation(ALLOCATION))] == ["/etc/quotient"]


# Limits.


@needs_root
def test_the_limits_of_a_container(make: MakeBench) -> None:
    """These keys are a contract with programs in containers, under any user."""
    bench = make("native")
    bench.injector.prepare(POD, "a", bench.allocation(), HALF)
    assert bench.limits() == {
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
    file = bench.folder / "containers" / ALLOCATION / "limits.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o755


def bursting(core_limit: int) -> BoundPod:
    limits = ContainerLimits(cores=50, core_limit=core_limit, limit_source=LimitSource.USER)
    return bound("train", limits={"a": limits})


WHOLE_TWO = (GpuSlice("GPU-0", 100, CARD_MIB), GpuSlice("GPU-1", 100, CARD_MIB))
BURSTS: dict[str, tuple[BoundPod, tuple[GpuSlice, ...], int]] = {
    "no limit set, no burst": (POD, HALF, 50),
    "the limit that was set": (bursting(80), HALF, 80),
    "never less than requested": (bursting(20), HALF, 50),
    "never more than a card": (bursting(400), HALF, 100),
    "whole cards have all of their cores": (bursting(100), WHOLE_TWO, 200),
}


@needs_root
@pytest.mark.parametrize(("pod", "slices", "expected"), BURSTS.values(), ids=BURSTS.keys())
def test_the_core_limit_of_a_container(
    make: MakeBench, pod: BoundPod, slices: tuple[GpuSlice, ...], expected: int
) -> None:
    """Between the request and one card."""
    bench = make("native")
    bench.injector.prepare(pod, "a", bench.allocation(), slices)
    assert bench.limits()["coreLimit"] == expected


@needs_root
def test_missing_files_are_written_again_and_correct_ones_are_not(make: MakeBench) -> None:
    """This runs before every start of a container."""
    bench = make("cdi")
    file = bench.folder / "containers" / ALLOCATION / "limits.json"
    bench.injector.prepare(POD, "a", bench.allocation(), HALF)
    inode = file.stat().st_ino
    bench.injector.prepare(POD, "a", bench.allocation(), HALF)
    assert file.stat().st_ino == inode
    content = file.read_bytes()
    file.unlink()
    bench.spec_file().unlink()
    bench.injector.prepare(POD, "a", bench.allocation(), HALF)
    assert file.read_bytes() == content
    assert bench.spec_file().exists()


@needs_root
def test_files_of_containers_that_are_gone_are_removed(make: MakeBench) -> None:
    """Folder and CDI file; files of other vendors stay."""
    bench = make("cdi")
    foreign = bench.cdi / "nvidia.json"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("{}")
    for token in ("one", "two"):
        bench.injector.prepare(POD, "a", bench.allocation(token), HALF)
    assert bench.injector.existing_tokens() == {"one", "two"}
    bench.injector.remove(["one", "unknown"])
    assert bench.injector.existing_tokens() == {"two"}
    assert set(bench.cdi.iterdir()) == {foreign, bench.spec_file("two")}
    assert not (bench.folder / "containers/one").exists()


@needs_root
def test_a_cdi_file_whose_folder_is_gone_is_still_found(make: MakeBench) -> None:
    """Or it would never be removed."""
    bench = make("cdi")
    bench.injector.prepare(POD, "a", bench.allocation(), HALF)
    (bench.folder / "containers" / ALLOCATION / "limits.json").unlink()
    (bench.folder / "containers" / ALLOCATION).rmdir()
    assert bench.injector.existing_tokens() == {ALLOCATION}


@needs_root
def test_a_modprobe_that_hangs_is_like_none(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can hang on broken hardware."""
    host.majors(nvidia=195)
    host.file("usr/bin/nvidia-modprobe")

    def hang(command: list[str], **_: Any) -> NoReturn:
        raise subprocess.TimeoutExpired(command, 20)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(MissingDeviceNode, match="nvidia-uvm"):
        host.driver().device_nodes([card(0)])


@needs_root
def test_a_cdi_file_is_found_without_the_folder_of_all_containers(make: MakeBench) -> None:
    """The two may be on different disks."""
    bench = make("cdi")
    bench.injector.prepare(POD, "a", bench.allocation(), HALF)
    shutil.rmtree(bench.folder / "containers")
    assert bench.injector.existing_tokens() == {ALLOCATION}


@needs_root
def test_limits_are_readable_under_any_umask(make: MakeBench) -> None:
    """The container may run as any user."""
    bench = make("native")
    before = os.umask(0o077)
    try:
        bench.injector.prepare(POD, "a", bench.allocation(), HALF)
    finally:
        os.umask(before)
    assert stat.S_IMODE((bench.folder / "containers" / ALLOCATION).stat().st_mode) == 0o755


def test_there_are_no_tokens_before_the_start(host: Host, tmp_path: Path) -> None:
    """A missing folder is not an error."""
    injector = Injector("cdi", tmp_path / "q", host.driver(), NodeCards(), names=NAMES, cdi=tmp_path / "cdi")
    assert injector.existing_tokens() == set()


@needs_root
def test_a_missing_card_is_left_out(make: MakeBench) -> None:
    """Of devices and limits; the environment still names it, so that programs fail with a clear error."""
    bench = make("native")
    bench.node_cards.forget(["GPU-0"])
    response = bench.injector.build_response(POD, "a", bench.allocation(), HALF)
    assert "/dev/nvidia7" not in [each.container_path for each in response.devices]
    assert bench.limits()["cards"] == []
    assert response.envs["NVIDIA_VISIBLE_DEVICES"] == "GPU-0"


@needs_root
@pytest.mark.parametrize("mode", ["native", "nvidia-runtime", "cdi"])
def test_a_response_is_outdated_when_its_card_has_another_minor_number(make: MakeBench, mode: InjectionMode) -> None:
    """Numbers can change with each boot; a CDI file is rewritten, a response is not."""
    bench = make(mode)
    response = bench.injector.build_response(POD, "a", bench.allocation(), HALF)
    assert not bench.injector.is_outdated(response, HALF)
    first, second = bench.node_cards.cards()
    bench.node_cards.update([replace(first, minor=second.minor), replace(second, minor=first.minor)])
    assert bench.injector.is_outdated(response, HALF) == (mode != "cdi")


@needs_root
@pytest.mark.parametrize("how", ["emptied", "created by a runtime"])
def test_a_deleted_folder_is_filled_again(make: MakeBench, how: str) -> None:
    """Runtimes create missing mount sources as empty folders."""
    bench = make("native")
    shutil.rmtree(bench.folder)
    if how == "created by a runtime":
        for part in ("bin", "lib64"):
            (bench.folder / "driver/current" / part).mkdir(parents=True)
    response = bench.injector.build_response(POD, "a", bench.allocation(), HALF)
    assert {each.container_path for each in response.mounts} == MOUNTED.keys()
    assert (bench.folder / "driver/current/lib64/libcuda.so.1").exists()
    bench.injector.start(VERSION)


# The driver's memory limit.


@needs_root
def test_a_limited_container_has_the_hook_that_sets_its_limit(make: MakeBench) -> None:
    """With its token; beside the hook for the library cache, and again before each start."""
    bench = make("cdi")
    bench.injector.build_response(POD, "a", bench.allocation(isolation=BY_DRIVER), HALF)
    (hooks,) = (each["containerEdits"]["hooks"] for each in bench.spec()["devices"])
    assert [each["hookName"] for each in hooks] == ["createRuntime", "createContainer"]
    program, socket_path = bench.folder / "hooks/apply-memory-limit", bench.folder / "memory-limits.sock"
    assert hooks[0]["path"] == str(program)
    assert hooks[0]["args"] == ["apply-memory-limit", str(socket_path), ALLOCATION]
    assert os.access(program, os.X_OK)
    bench.spec_file().unlink()
    bench.injector.prepare(POD, "a", bench.allocation(isolation=BY_DRIVER), HALF)
    assert bench.spec()["devices"][0]["containerEdits"]["hooks"] == hooks


BY_LIBRARY = Isolation(memory=Rung.PRELOAD)


@needs_root
def test_a_container_limited_by_the_library_keeps_what_its_image_preloads(make: MakeBench) -> None:
    """By a hook, in the file that is mounted over the image's."""
    bench = make("cdi")
    bench.injector.build_response(POD, "a", bench.allocation(isolation=BY_LIBRARY), HALF)
    (edits,) = (each["containerEdits"] for each in bench.spec()["devices"])
    bench.injector.remove([ALLOCATION])
    assert [each["hookName"] for each in edits["hooks"]] == ["createRuntime", "createContainer"]
    preloaded = f"{bench.folder}/containers/{ALLOCATION}/ld.so.preload"
    assert edits["hooks"][0]["args"] == ["merge-preload", preloaded]
    mounts = {each["containerPath"]: each for each in edits["mounts"]}
    assert mounts["/etc/ld.so.preload"]["hostPath"] == preloaded
    assert mounts["/etc/ld.so.preload"]["options"][0] == "ro"
    assert mounts["/etc/quotient/usage/gpu-usage"]["options"][0] == "rw"
    assert mounts["/usr/local/nvidia/lib64"]["hostPath"].startswith(f"{bench.folder}/driver/current/limited-")


WITHOUT_LIMIT = {
    "no isolation": (HALF, NO_ISOLATION),
    "a whole card": ((GpuSlice("GPU-0", 100, CARD_MIB),), EXCLUSIVE),
    "a MIG device": ((GpuSlice("MIG-1", 50, 1024),), BY_DRIVER),
}


@needs_root
@pytest.mark.parametrize(("slices", "isolation"), WITHOUT_LIMIT.values(), ids=WITHOUT_LIMIT.keys())
def test_other_containers_have_no_such_hook(
    make: MakeBench, host: Host, slices: tuple[GpuSlice, ...], isolation: Isolation
) -> None:
    """Whole cards have nothing to limit, and MIG devices memory of their own."""
    bench = make("cdi")
    host.capability("gpu7/mig/gi1", 21)
    host.capability("gpu7/mig/gi1/ci0", 22)
    bench.node_cards.update([card(0), card(1), mig_part(1)])
    bench.injector.prepare(POD, "a", bench.allocation(isolation=isolation), slices)
    hooks = bench.spec()["devices"][0]["containerEdits"]["hooks"]
    assert [each["hookName"] for each in hooks] == ["createContainer"]


@needs_root
@pytest.mark.parametrize("mode", ["native", "nvidia-runtime"])
def test_a_limit_without_cdi_is_not_promised(make: MakeBench, mode: InjectionMode) -> None:
    """A container that would run without it gets no GPU."""
    bench = make(mode)
    with pytest.raises(OSError, match=f"the driver's memory limit needs CDI, not {mode}"):
        bench.injector.build_response(POD, "a", bench.allocation(isolation=BY_DRIVER), HALF)


@needs_root
def test_a_hook_that_the_host_cannot_run_is_not_promised(make: MakeBench) -> None:
    """No CDI file is written, so the container does not start."""
    bench = make("cdi")
    (bench.folder / "hooks/apply-memory-limit").unlink()
    with pytest.raises(OSError, match="the hook that limits memory cannot be run"):
        bench.injector.build_response(POD, "a", bench.allocation(isolation=BY_DRIVER), HALF)
    assert not bench.spec_file().exists()

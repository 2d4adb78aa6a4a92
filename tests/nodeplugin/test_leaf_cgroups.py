"""The cgroup on which a container's limit is set, from the process that is about to start in it."""

from pathlib import Path

import pytest

from nodeplugin.cgroups import ProcessOwner
from nodeplugin.leaf_cgroups import NoLeafCgroup, enable_controller, find_cgroup2, read_leaf, unified_path
from tests.nodeplugin.limit_bench import ID, OTHER_ID, OTHER_UID, UID, pod_path

UNDERSCORED = UID.replace("-", "_")
SYSTEMD = f"/kubepods.slice/kubepods-pod{UNDERSCORED}.slice"
FOUND = {
    "cgroup v2, cgroupfs driver": pod_path(),
    "cgroup v2, systemd driver": f"{SYSTEMD}/cri-containerd-{ID}.scope",
    "CRI-O with crun, which has a cgroup below the container's": f"{SYSTEMD}/crio-{ID}.scope/container",
    "kind": f"/system.slice/docker-{OTHER_ID}.scope/kubelet.slice{SYSTEMD}/cri-containerd-{ID}.scope",
}


def write_cgroup(proc: Path, text: str) -> Path:
    (proc / "7").mkdir(parents=True)
    (proc / "7/cgroup").write_text(text)
    return proc


@pytest.mark.parametrize("path", FOUND.values(), ids=FOUND.keys())
def test_the_cgroup_of_the_first_process_is_limited(tmp_path: Path, path: str) -> None:
    """Whatever runtimes and cgroup drivers call it."""
    (tmp_path / "root" / path[1:]).mkdir(parents=True)
    proc = write_cgroup(tmp_path / "proc", f"0::{path}\n")
    leaf, owner = read_leaf(7, tmp_path / "root", frozenset({UID}), proc)
    assert (leaf, owner) == (tmp_path / "root" / path[1:], ProcessOwner(UID, ID))


def test_on_a_hybrid_host_only_version_2_counts(tmp_path: Path) -> None:
    """A process may have another place in the hierarchies of version 1."""
    (tmp_path / "root" / pod_path()[1:]).mkdir(parents=True)
    proc = write_cgroup(tmp_path / "proc", f"3:memory:{pod_path(OTHER_UID, OTHER_ID)}\n0::{pod_path()}\n")
    assert read_leaf(7, tmp_path / "root", frozenset(), proc)[1] == ProcessOwner(UID, ID)


REFUSED = {
    "no cgroup v2": (f"3:memory:{pod_path()}\n", "in no cgroup of version 2"),
    "the root": ("0::/\n", "in no cgroup of version 2"),
    "nothing": ("", "in no cgroup of version 2"),
    "a relative path": ("0::kubepods\n", "in no cgroup of version 2"),
    "outside of the plugin's cgroup namespace": (f"0::/../..{pod_path()}\n", "which the node plugin cannot see"),
    "a way out further down": (f"0::/a/../../..{pod_path()}\n", "which the node plugin cannot see"),
    "an empty part": (f"0::/{pod_path()}\n", "which the node plugin cannot see"),
    "a cgroup that was removed": (f"0::{pod_path()} (deleted)\n", "was removed"),
    "a service": ("0::/system.slice/containerd.service\n", "is not that of a container of a pod"),
    "a pod's own cgroup": (f"0::/kubepods/pod{UID}\n", "is not that of a container of a pod"),
    "a cgroup that is not mounted": (f"0::{pod_path()}\n", "does not exist"),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_other_cgroups_are_not_limited(tmp_path: Path, text: str, reason: str) -> None:
    """The reason names what was found instead."""
    (tmp_path / "root").mkdir()
    with pytest.raises(NoLeafCgroup, match=reason):
        read_leaf(7, tmp_path / "root", frozenset({UID}), write_cgroup(tmp_path / "proc", text))


def test_a_process_that_is_gone_has_no_cgroup(tmp_path: Path) -> None:
    with pytest.raises(NoLeafCgroup, match="the cgroup of process 7 cannot be read"):
        read_leaf(7, tmp_path, frozenset(), tmp_path)


def test_names_with_dots_are_ordinary() -> None:
    """Only the parts `.` and `..` lead elsewhere."""
    assert unified_path("0::/a..b/.c/d..\n") == "/a..b/.c/d.."


@pytest.mark.parametrize("place", ["sys/fs/cgroup", "sys/fs/cgroup/unified"])
def test_cgroup_v2_is_found_where_hosts_mount_it(tmp_path: Path, place: str) -> None:
    """Hybrid hosts have it beside version 1."""
    assert find_cgroup2(tmp_path) is None
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "cgroup.controllers").touch()
    assert find_cgroup2(tmp_path) == tmp_path / place


def test_the_controller_is_enabled_down_to_the_leaf(tmp_path: Path) -> None:
    """In every cgroup above it in which it is not yet; in the leaf itself it would forbid processes."""
    leaf = tmp_path / "kubepods/pod/leaf"
    leaf.mkdir(parents=True)
    folders = (tmp_path, tmp_path / "kubepods", tmp_path / "kubepods/pod", leaf)
    for folder in folders:
        (folder / "cgroup.controllers").write_text("cpu dmem\n")
        (folder / "cgroup.subtree_control").write_text("cpu\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu dmem\n")
    enable_controller(tmp_path, leaf)
    written = [(each / "cgroup.subtree_control").read_text() for each in folders]
    assert written == ["cpu dmem\n", "+dmem", "+dmem", "cpu\n"]


def test_a_kernel_without_the_controller_is_left_alone(tmp_path: Path) -> None:
    """The driver then says whether it can limit."""
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    (tmp_path / "leaf").mkdir()
    enable_controller(tmp_path, tmp_path / "leaf")
    assert not (tmp_path / "cgroup.subtree_control").exists()

"""The owner of a process, from the cgroup names of different kernels, cgroup drivers and runtimes."""

from pathlib import Path

import pytest

from nodeplugin.cgroups import ProcessOwner, normalize_uid, parse_owner, process_owner, running_pods

UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
UNDERSCORED = UID.replace("-", "_")
BARE = UID.replace("-", "")
OTHER_UID = "11111111-2222-3333-4444-555555555555"
ID = "0123456789abcdef" * 4
OUTER_ID = "fedcba9876543210" * 4
OWNER = ProcessOwner(UID, ID)


def v1(path: str) -> str:
    """A cgroup v1 file: one line per controller, and one of the unified hierarchy."""
    kinds = ("12:pids", "11:cpuset", "10:cpu,cpuacct", "4:devices", "1:name=systemd")
    return "".join(f"{kind}:{path}\n" for kind in kinds) + "0::/system.slice/containerd.service\n"


SHAPES = {
    "v2, cgroupfs driver, containerd": f"0::/kubepods/burstable/pod{UID}/{ID}",
    "v2, cgroupfs driver, guaranteed": f"0::/kubepods/pod{UID}/{ID}",
    "v2, systemd driver, containerd": (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope"
    ),
    "v2, systemd driver, guaranteed": f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope",
    "v2, systemd slices below a cgroupfs containerd": (
        f"0::/system.slice/containerd.service/kubepods-besteffort-pod{UNDERSCORED}.slice:cri-containerd:{ID}"
    ),
    "v1, systemd slices below a cgroupfs containerd": v1(
        f"/system.slice/containerd.service/kubepods-besteffort-pod{UNDERSCORED}.slice:cri-containerd:{ID}"
    ),
    "v1, cgroupfs driver, containerd": v1(f"/kubepods/besteffort/pod{UID}/{ID}"),
    "v1, systemd driver, containerd": v1(
        f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope"
    ),
    "v2, CRI-O": f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{ID}.scope",
    "v2, CRI-O with a cgroup below its own": (
        f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{ID}.scope/container"
    ),
    "v1, CRI-O, cgroupfs driver": v1(f"/kubepods/burstable/pod{UID}/crio-{ID}"),
    "v2, Docker": f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/docker-{ID}.scope",
    "v1, Docker, cgroupfs driver": v1(f"/kubepods/burstable/pod{UID}/{ID}"),
    "from a private cgroup namespace": f"0::/../../pod{UID}/{ID}",
    "from a private cgroup namespace, systemd driver": (
        f"0::/../../kubepods-burstable-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope"
    ),
    "kind, cgroupfs driver": f"0::/docker/{OUTER_ID}/kubelet/kubepods/burstable/pod{UID}/{ID}",
    "kind, systemd driver": (
        f"0::/system.slice/docker-{OUTER_ID}.scope/kubelet.slice/kubelet-kubepods.slice/"
        f"kubelet-kubepods-pod{UNDERSCORED}.slice/cri-containerd-{ID}.scope"
    ),
    "a container with nested cgroups": f"0::/kubepods/pod{UID}/{ID}/init.scope/worker",
}


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES.keys())
def test_pod_and_container_are_parsed_from_every_format(text: str) -> None:
    """Whether or not the pod is known."""
    assert parse_owner(text) == OWNER
    assert parse_owner(text, {UID}) == OWNER
    assert parse_owner(text, {OTHER_UID}) == OWNER


FOREIGN = {
    "nothing": "",
    "a service": "0::/system.slice/sshd.service\n",
    "the root": "0::/\n",
    "v1 without a pod": v1("/user.slice"),
    "a container without a pod": f"0::/system.slice/docker-{ID}.scope",
    "a container of podman": f"0::/machine.slice/libpod-{ID}.scope",
    "the parent cgroup of all pods": "0::/kubepods.slice/kubepods-burstable.slice",
    "a name that is too short for a uid": "0::/kubepods/pod0f1e2d3c/x",
    "a name that is too long for a uid": f"0::/kubepods/pod{ID}/x",
    "not a cgroup file": "\x00\xff:::",
}


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_process_outside_of_pods_has_no_owner(text: str) -> None:
    assert parse_owner(text, {UID}) is None


@pytest.mark.parametrize(
    "path",
    [f"/kubepods/burstable/pod{BARE}/{ID}", f"/kubepods.slice/kubepods-pod{BARE}.slice/cri-containerd-{ID}.scope"],
    ids=["cgroupfs driver", "systemd driver"],
)
def test_the_uid_of_a_known_static_pod_keeps_its_form_without_dashes(path: str) -> None:
    """An unknown uid is formatted as the API server does."""
    assert parse_owner(f"0::{path}", {BARE}) == ProcessOwner(BARE, ID)
    assert parse_owner(f"0::{path}") == OWNER


def test_a_process_in_the_pods_own_cgroup_has_no_container() -> None:
    assert parse_owner(f"0::/kubepods/pod{UID}") == ProcessOwner(UID)
    assert parse_owner(f"0::/kubepods/pod{UID}/short") == ProcessOwner(UID)


NESTED = f"0::/kubepods/pod{OTHER_UID}/{OUTER_ID}/kubepods/burstable/pod{UID}/{ID}"


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({OTHER_UID}, ProcessOwner(OTHER_UID, OUTER_ID)),
        ({UID}, OWNER),
        ({OTHER_UID, UID}, ProcessOwner(OTHER_UID, OUTER_ID)),
        (set(), ProcessOwner(OTHER_UID, OUTER_ID)),
    ],
    ids=["the outer is known", "the inner is known", "both are known", "neither is known"],
)
def test_a_process_in_nested_pods_is_owned_by_the_known_one(known: set[str], expected: ProcessOwner) -> None:
    """Where nodes run in pods, a process is in two pods; if neither is known, or both, the outer one counts."""
    assert parse_owner(NESTED, known) == expected


@pytest.mark.parametrize("written", [UID, UNDERSCORED, BARE], ids=["dashes", "underscores", "neither"])
def test_uids_are_normalized_to_the_form_with_dashes(written: str) -> None:
    assert normalize_uid(written) == UID


def add_process(proc: Path, pid: int, path: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cgroup").write_text(f"0::{path}\n")


def test_a_process_that_has_exited_has_no_owner(tmp_path: Path) -> None:
    """It may exit between the driver's list and the read of /proc."""
    add_process(tmp_path, 7, f"/kubepods/pod{UID}/{ID}")
    assert process_owner(7, proc=tmp_path) == OWNER
    assert process_owner(8, proc=tmp_path) is None


def test_a_pod_is_running_while_it_has_a_process(tmp_path: Path) -> None:
    """Entries of /proc that are not processes, and processes that exit during the scan, are skipped."""
    add_process(tmp_path, 1, "/init.scope")
    add_process(tmp_path, 20, f"/kubepods/pod{UID}/{ID}")
    add_process(tmp_path, 21, f"/kubepods/pod{BARE}/{ID}")
    (tmp_path / "30").mkdir()
    (tmp_path / "self").mkdir()
    assert running_pods({UID, OTHER_UID}, tmp_path) == {UID}
    assert running_pods({BARE}, tmp_path) == {BARE}
    assert running_pods(set(), tmp_path) == set()

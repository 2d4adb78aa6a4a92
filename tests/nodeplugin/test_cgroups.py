"""Which container a process belongs to, by the names that kernels, drivers and runtimes give its cgroups."""

from pathlib import Path

import pytest

from nodeplugin.cgroups import ProcessOwner, place_in, place_of, running_pods, uid_of

UID = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
UNDERSCORED = UID.replace("-", "_")
BARE = UID.replace("-", "")
OTHER_UID = "11111111-2222-3333-4444-555555555555"
ID = "0123456789abcdef" * 4
OUTER_ID = "fedcba9876543210" * 4
BOTH = ProcessOwner(UID, ID)


def v1(path: str) -> str:
    """Cgroup v1: a line for each controller, with the unified hierarchy beside them."""
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
    "a container that has cgroups of its own": f"0::/kubepods/pod{UID}/{ID}/init.scope/worker",
}


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES.keys())
def test_pod_and_container_are_found(text: str) -> None:
    """Whoever wrote the path, and from wherever it is seen; a pod that is known is found as well."""
    assert place_in(text) == BOTH
    assert place_in(text, {UID}) == BOTH
    assert place_in(text, {OTHER_UID}) == BOTH


FOREIGN = {
    "nothing": "",
    "a service": "0::/system.slice/sshd.service\n",
    "the root": "0::/\n",
    "v1 without a pod": v1("/user.slice"),
    "a container without a pod": f"0::/system.slice/docker-{ID}.scope",
    "a container of podman": f"0::/machine.slice/libpod-{ID}.scope",
    "the folder of all pods": "0::/kubepods.slice/kubepods-burstable.slice",
    "a name that is too short for a uid": "0::/kubepods/pod0f1e2d3c/x",
    "a name that is too long for a uid": f"0::/kubepods/pod{ID}/x",
    "no cgroup file at all": "\x00\xff:::",
}


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_is_in_no_pod_is_in_none(text: str) -> None:
    """A process of the machine's own is nobody's."""
    assert place_in(text, {UID}) is None


@pytest.mark.parametrize(
    "path",
    [f"/kubepods/burstable/pod{BARE}/{ID}", f"/kubepods.slice/kubepods-pod{BARE}.slice/cri-containerd-{ID}.scope"],
    ids=["cgroupfs driver", "systemd driver"],
)
def test_a_static_pod_has_a_uid_without_dashes(path: str) -> None:
    """It is found under the name by which it is known; a stranger is written as the API server would."""
    assert place_in(f"0::{path}", {BARE}) == ProcessOwner(BARE, ID)
    assert place_in(f"0::{path}") == BOTH


def test_a_process_of_the_pod_itself_has_no_container() -> None:
    """Some are put beside the containers."""
    assert place_in(f"0::/kubepods/pod{UID}") == ProcessOwner(UID)
    assert place_in(f"0::/kubepods/pod{UID}/short") == ProcessOwner(UID)


NESTED = f"0::/kubepods/pod{OTHER_UID}/{OUTER_ID}/kubepods/burstable/pod{UID}/{ID}"


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({OTHER_UID}, ProcessOwner(OTHER_UID, OUTER_ID)),
        ({UID}, BOTH),
        ({OTHER_UID, UID}, ProcessOwner(OTHER_UID, OUTER_ID)),
        (set(), ProcessOwner(OTHER_UID, OUTER_ID)),
    ],
    ids=["the outer is ours", "the inner is ours", "both are ours", "neither is known"],
)
def test_of_a_cluster_within_a_pod_the_pod_that_is_ours_counts(known: set[str], expected: ProcessOwner) -> None:
    """Whoever runs nodes in pods has processes that are in two pods."""
    assert place_in(NESTED, known) == expected


@pytest.mark.parametrize("written", [UID, UNDERSCORED, BARE], ids=["dashes", "underscores", "neither"])
def test_uids_are_written_as_the_api_server_does(written: str) -> None:
    """With dashes."""
    assert uid_of(written) == UID


def running(proc: Path, pid: int, path: str) -> None:
    """Have a process run in a cgroup."""
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cgroup").write_text(f"0::{path}\n")


def test_a_process_that_has_ended_is_in_no_container(tmp_path: Path) -> None:
    """Between asking the driver and asking the kernel it may be gone."""
    running(tmp_path, 7, f"/kubepods/pod{UID}/{ID}")
    assert place_of(7, proc=tmp_path) == BOTH
    assert place_of(8, proc=tmp_path) is None


def test_pods_run_while_any_of_their_processes_does(tmp_path: Path) -> None:
    """What is no process, and what ends while it is looked at, is passed over."""
    running(tmp_path, 1, "/init.scope")
    running(tmp_path, 20, f"/kubepods/pod{UID}/{ID}")
    running(tmp_path, 21, f"/kubepods/pod{BARE}/{ID}")
    (tmp_path / "30").mkdir()
    (tmp_path / "self").mkdir()
    assert running_pods({UID, OTHER_UID}, tmp_path) == {UID}
    assert running_pods({BARE}, tmp_path) == {BARE}
    assert running_pods(set(), tmp_path) == set()

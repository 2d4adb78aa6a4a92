"""Injection by CDI, on a containerd that reads CDI files: a pod cannot override any of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeplugin.leaf_cgroups import find_cgroup2
from tests.cluster.layout import CDI, NODE_PLUGIN
from tests.cluster.real import RealCluster
from tests.node.driver import uuid
from tests.node.env_from import admit, greedy_config_map
from tests.node.limited_pods import LimitedPods
from tests.node.node import CONTROL, LOOK, WAIT_S, GpuNode, container, placement
from tests.waiting import eventually

pytestmark = [pytest.mark.node, pytest.mark.timeout(300)]

MIB = 256


@pytest.fixture(scope="module")
def cdi_node(real_cluster_possible: None) -> Iterator[GpuNode]:
    """A node with two cards whose runtime reads CDI files."""
    cluster = RealCluster.start(node=True, cdi=True)
    try:
        yield GpuNode(cluster, "A100", "A100").start()
    finally:
        cluster.stop()


@pytest.fixture
def node(cdi_node: GpuNode) -> Iterator[GpuNode]:
    """The node; afterwards its pods are deleted."""
    yield cdi_node
    cdi_node.clear()


def test_a_container_gets_everything_from_its_cdi_file(node: GpuNode) -> None:
    """Device nodes, driver, limits and environment; a variable of the pod does not override it."""
    own = container("c0", 30, 8) | {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}
    first = container("first", 30, 8, LOOK)
    placed = placement(first=[(uuid(1), 30, 8 * MIB)], c0=[(uuid(1), 30, 8 * MIB)])
    node.run("one", own, placed=placed, initContainers=[first])
    for name in ("first", "c0"):
        seen = node.seen("one", name)
        assert seen.devices.keys() - CONTROL == {"/dev/nvidia0"}
        assert (seen.visible, seen.libraries, seen.writable) == (uuid(1), "", False)
        assert "/usr/local/nvidia/lib64/libcuda.so.1" in seen.files
        assert seen.limits is not None
        assert (seen.limits.container, seen.limits.memory_mib) == (name, 8 * MIB)


def test_the_linker_finds_the_driver_beside_the_libraries_of_the_image(node: GpuNode) -> None:
    """By its cache, written by a hook of the runtime; `LD_LIBRARY_PATH` is left to the image and the pod."""
    own = container("c0", 30, 8) | {"env": [{"name": "LD_LIBRARY_PATH", "value": "/opt/own"}]}
    read_only = container("c1", 30, 8) | {"securityContext": {"readOnlyRootFilesystem": True, "runAsUser": 1000}}
    placed = placement(c0=[(uuid(1), 30, 8 * MIB)], c1=[(uuid(1), 30, 8 * MIB)])
    node.run("one", own, read_only, placed=placed)
    assert node.seen("one").libraries == "/opt/own"
    library = "/usr/local/nvidia/lib64/libnvidia-ml.so.1"
    for name in ("c0", "c1"):
        command = ["exec", "one", "-c", name, "--", "/bin/busybox"]
        node.cluster.kubectl(*command, "grep", "-q", library, "/etc/ld.so.cache")
        configured = node.cluster.kubectl(*command, "cat", "/etc/ld.so.conf.d/00-quotient.conf")
        assert configured == "/usr/local/nvidia/lib64\n"


def test_a_config_map_cannot_change_what_a_container_gets(node: GpuNode) -> None:
    """The CDI file wins over `envFrom`, and over the entry of `env` that hides GPUs from NVIDIA's runtime."""
    with greedy_config_map(node) as sources:
        first, own = admit(container("c0", 30, 8, envFrom=sources), container("first", 30, 8, LOOK, envFrom=sources))
        placed = placement(first=[(uuid(1), 30, 8 * MIB)], c0=[(uuid(1), 30, 8 * MIB)])
        node.run("one", own, placed=placed, initContainers=[first])
        for name in ("first", "c0"):
            seen = node.seen("one", name)
            assert seen.devices.keys() - CONTROL == {"/dev/nvidia0"}
            assert seen.visible == uuid(1)


def test_cdi_files_are_written_again_after_a_reboot_and_removed_with_their_pods(node: GpuNode) -> None:
    """A reboot empties /run, and the kubelet replays responses that name the files."""
    node.run("one", container("c0", 30, 8), placed=placement(c0=[(uuid(0), 30, 8 * MIB)]))
    node.cluster.enter("sh", "-c", f"rm -rf {CDI}")
    node.cluster.restart(NODE_PLUGIN)
    node.wait_offered()
    node.kill_container("one")
    assert node.seen("one").visible == uuid(0)
    files = node.cluster.enter("ls", CDI).stdout.split()
    assert len(files) == 1
    node.clear()
    assert node.cluster.enter("ls", CDI).stdout.split() == []


@pytest.fixture
def limited_pods(node: GpuNode, tmp_path: Path) -> Iterator[LimitedPods]:
    """Pods with the hook of the driver's memory limit."""
    if find_cgroup2(Path("/")) is None:
        pytest.skip("this machine has no cgroup v2")
    made = LimitedPods(node, tmp_path).start()
    yield made
    node.clear()
    made.stop()


def test_pods_start_with_the_drivers_limit_on_their_leaf_and_not_without(
    node: GpuNode, limited_pods: LimitedPods
) -> None:
    """Through kubelet, containerd and runc; a restarted container is limited again, in its new cgroup."""
    pod = node.create("limited", limited_pods.container("c0"))
    limited_pods.allocate(pod)
    node.bind(pod)
    node.wait_phase("limited", "Running")
    first = limited_pods.limited_cgroups()
    assert [Path(each).name for each in first] == [node.container_id("limited").removeprefix("containerd://")]
    assert all(f"pod{pod.metadata.uid}" in each for each in first)
    node.kill_container("limited")
    again = limited_pods.limited_cgroups()
    assert Path(again[-1]).name == node.container_id("limited").removeprefix("containerd://") != Path(first[0]).name


def test_the_events_of_a_pod_show_why_its_limit_cannot_be_set(node: GpuNode, limited_pods: LimitedPods) -> None:
    """And it starts as soon as it can be."""
    pod = node.create("refused", limited_pods.container("c0"))
    node.bind(pod)

    def events() -> str:
        return node.cluster.kubectl("get", "events", "--field-selector=involvedObject.name=refused", "-o=wide")

    eventually(lambda: "no share of GPU memory is allocated for this token" in events(), "the event", WAIT_S, events)
    assert not node.container_id("refused")
    limited_pods.allocate(pod)
    # Not its phase, which is Running while the kubelet tries a container again.
    eventually(lambda: node.container_id("refused"), "the container to run", WAIT_S, events)
    assert len(limited_pods.limited_cgroups()) == 1

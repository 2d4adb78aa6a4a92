"""The same by CDI, on a containerd that reads such files: nothing of it can be overridden from a pod."""

from collections.abc import Iterator

import pytest

from tests.cluster.layout import CDI, NODE_PLUGIN
from tests.cluster.real import RealCluster
from tests.node.driver import uuid
from tests.node.node import CONTROL, LOOK, GpuNode, container, placement

pytestmark = [pytest.mark.node, pytest.mark.timeout(300)]

MIB = 256


@pytest.fixture(scope="module")
def cdi_node(real_cluster_possible: None) -> Iterator[GpuNode]:
    """A node of two cards whose runtime knows CDI."""
    cluster = RealCluster.start(node=True, cdi=True)
    try:
        yield GpuNode(cluster, "A100", "A100").start()
    finally:
        cluster.stop()


@pytest.fixture
def node(cdi_node: GpuNode) -> Iterator[GpuNode]:
    """The same, without pods."""
    yield cdi_node
    cdi_node.clear()


def test_a_container_gets_everything_by_a_file(node: GpuNode) -> None:
    """Device nodes, driver, limits and environment; and a pod's own variable does not win."""
    own = container("c0", 30, 8) | {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}
    first = container("first", 30, 8, LOOK)
    placed = placement(first=[(uuid(1), 30, 8 * MIB)], c0=[(uuid(1), 30, 8 * MIB)])
    node.run("one", own, placed=placed, initContainers=[first])
    for name in ("first", "c0"):
        seen = node.seen("one", name)
        assert seen.devices.keys() - CONTROL == {"/dev/nvidia0"}
        assert (seen.visible, seen.libraries, seen.writable) == (uuid(1), "/usr/local/nvidia/lib64", False)
        assert "/usr/local/nvidia/lib64/libcuda.so.1" in seen.files
        assert seen.limits is not None
        assert (seen.limits.container, seen.limits.memory_mib) == (name, 8 * MIB)


def test_files_come_back_after_a_reboot_and_go_with_their_pods(node: GpuNode) -> None:
    """/run is empty then, and the kubelet names what was written there before."""
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

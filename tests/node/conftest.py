"""A GPU node in a cluster of its own: these tests break things that other tests would share."""

from collections.abc import Iterator

import pytest

from tests.cluster.real import RealCluster
from tests.node.node import GpuNode


@pytest.fixture(scope="session")
def gpu_node(real_cluster_possible: None) -> Iterator[GpuNode]:
    """A node with four cards of 40 GiB, and a running plugin."""
    cluster = RealCluster.start(node=True)
    try:
        yield GpuNode(cluster, "A100", "A100", "A100", "A100").start()
    finally:
        cluster.stop()


@pytest.fixture
def node(gpu_node: GpuNode) -> Iterator[GpuNode]:
    """The GPU node; afterwards its pods are deleted and its driver is reset."""
    yield gpu_node
    gpu_node.clear()
    gpu_node.driver.describe()

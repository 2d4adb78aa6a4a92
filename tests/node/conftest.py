"""A node with GPUs, in a cluster of its own: these tests break what others would share."""

from collections.abc import Iterator

import pytest

from tests.cluster.real import RealCluster
from tests.node.node import GpuNode


@pytest.fixture(scope="session")
def gpu_node(real_cluster_possible: None) -> Iterator[GpuNode]:
    """A node of four cards of 40 GiB, with its plugin."""
    cluster = RealCluster.start(node=True)
    try:
        yield GpuNode(cluster, "A100", "A100", "A100", "A100").start()
    finally:
        cluster.stop()


@pytest.fixture
def node(gpu_node: GpuNode) -> Iterator[GpuNode]:
    """The same, without pods, and whatever happened to its driver before."""
    yield gpu_node
    gpu_node.clear()
    gpu_node.driver.describe()

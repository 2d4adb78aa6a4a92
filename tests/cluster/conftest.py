"""The two implementations of the cluster interface, for the conformance suite."""

import itertools
import json
from collections.abc import Callable, Iterator

import pytest

from cluster.api import connect
from cluster.in_memory import InMemoryCluster
from cluster.in_memory_admission import InMemoryWebhook
from cluster.in_memory_store import VersionedStore
from cluster.interface import Cluster
from cluster.objects import NAMESPACES
from tests.cluster.hooks import RealHooks
from tests.cluster.objects import new_namespace
from tests.cluster.real import RealCluster

IMPLEMENTATIONS = [
    pytest.param("memory", id="memory"),
    pytest.param("kubernetes", marks=pytest.mark.kubernetes, id="kubernetes"),
]
NUMBERS = itertools.count(1)


class Implementation:
    """A cluster under test, with what the suite needs and the interface does not offer."""

    def __init__(
        self, cluster: Cluster, expired_version: Callable[[], str], add_webhook: Callable[[InMemoryWebhook], None]
    ) -> None:
        self.cluster, self.expired_version, self.add_webhook = cluster, expired_version, add_webhook


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    if request.param == "memory":
        memory = InMemoryCluster(VersionedStore(history=500))
        yield Implementation(memory, lambda: forgotten_version(memory), memory.hooks.append)
        return
    real: RealCluster = request.getfixturevalue("control_plane")
    with RealHooks(real) as hooks:
        yield Implementation(connect(str(real.kubeconfig)), lambda: compacted_version(real), hooks.add)


@pytest.fixture
def cluster(implementation: Implementation) -> Cluster:
    return implementation.cluster


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace for one test."""
    name = new_namespace(cluster, f"test-{next(NUMBERS)}")
    yield name
    cluster.delete(NAMESPACES, name)


def compacted_version(real: RealCluster) -> str:
    """Return a version that is too old to watch from, after compacting etcd and restarting the API server.

    Compaction alone is not enough: the watch cache of an API server that started with the cluster goes back to its
    first version. After a restart it begins at the present one.
    """
    now = connect(str(real.kubeconfig)).list(NAMESPACES).resource_version
    request = json.dumps({"revision": now, "physical": True})
    command = ["wget", "-q", "-O-", f"--post-data={request}", "http://127.0.0.1:2379/v3/kv/compaction"]
    done = real.enter(str(real.layout.debian / "bin/busybox"), *command)
    assert done.returncode == 0, done.stderr
    real.restart("kube-apiserver")
    return "1"


def forgotten_version(memory: InMemoryCluster) -> str:
    """Return a version that has left the store's history."""
    version = memory.list(NAMESPACES).resource_version
    for number in range(600):
        memory.patch(NAMESPACES, "default", "", {"metadata": {"annotations": {"n": str(number)}}})
    return version

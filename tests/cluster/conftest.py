"""The two tenants of the cluster interface, for the conformance suite."""

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

TENANTS = [
    pytest.param("memory", id="memory"),
    pytest.param("kubernetes", marks=pytest.mark.kubernetes, id="kubernetes"),
]
NUMBERS = itertools.count(1)


class Tenant:
    """A cluster under test, and what the suite must know to test it."""

    def __init__(
        self, cluster: Cluster, old_version: Callable[[], str], hooks: Callable[[InMemoryWebhook], None]
    ) -> None:
        self.cluster, self.old_version, self.add_hook = cluster, old_version, hooks


@pytest.fixture(params=TENANTS)
def tenant(request: pytest.FixtureRequest) -> Iterator[Tenant]:
    if request.param == "memory":
        memory = InMemoryCluster(VersionedStore(history=500))
        yield Tenant(memory, lambda: forgotten_version(memory), memory.hooks.append)
        return
    real: RealCluster = request.getfixturevalue("control_plane")
    with RealHooks(real) as hooks:
        yield Tenant(connect(str(real.kubeconfig)), lambda: compacted_version(real), hooks.add)


@pytest.fixture
def cluster(tenant: Tenant) -> Cluster:
    return tenant.cluster


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own."""
    name = new_namespace(cluster, f"test-{next(NUMBERS)}")
    yield name
    cluster.delete(NAMESPACES, name)


def compacted_version(real: RealCluster) -> str:
    """Let etcd and the API server forget all but the present.

    etcd alone would not do: an API server whose watch cache goes back to the beginning, as a fresh one's does, still
    answers from there. Restarted, it knows the present only.
    """
    now = connect(str(real.kubeconfig)).list(NAMESPACES).resource_version
    request = json.dumps({"revision": now, "physical": True})
    command = ["wget", "-q", "-O-", f"--post-data={request}", "http://127.0.0.1:2379/v3/kv/compaction"]
    done = real.enter(str(real.layout.debian / "bin/busybox"), *command)
    assert done.returncode == 0, done.stderr
    real.restart("kube-apiserver")
    return "1"


def forgotten_version(memory: InMemoryCluster) -> str:
    """Write until the history has forgotten where we are."""
    version = memory.list(NAMESPACES).resource_version
    for number in range(600):
        memory.patch(NAMESPACES, "default", "", {"metadata": {"annotations": {"n": str(number)}}})
    return version

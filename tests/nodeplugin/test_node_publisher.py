"""The events of the publisher, conflicts with other device plugins, and placements that it writes on pods."""

from typing import Any, cast

import pytest

from cluster.errors import Conflict, NotFound, Rejected
from cluster.in_memory import InMemoryCluster
from cluster.interface import Cluster
from cluster.objects import DAEMON_SETS, NAMESPACES, NODES, Metadata, Node, NodeStatus
from nodeplugin.cards import NodeCards
from nodeplugin.checkpoint import PodAllocation
from nodeplugin.node_publisher import NodePublisher, conflicting_resources
from tests.waiting import eventually
from vcuda.inventory import Gpu
from vcuda.names import NODE_PLUGIN, Names

SYSTEM, NAMES = "quotient-system", Names()
NODE = Node(metadata=Metadata(name="n1"))


class PodServer:
    """Accepts patches of pods, except for those that it is given an error for."""

    def __init__(self, **errors: Exception) -> None:
        self.errors, self.requested, self.written = errors, list[str](), list[str]()

    def with_timeout(self, _: float) -> "PodServer":
        return self

    def patch(self, _kind: Any, name: str, _namespace: str, _changes: Any) -> None:
        self.requested.append(name)
        if name in self.errors:
            raise self.errors[name]
        self.written.append(name)


def publisher(server: PodServer | InMemoryCluster, *names: str) -> NodePublisher:
    """A publisher of a node that placed these pods itself."""
    allocations = [PodAllocation(uid=f"uid-{name}", namespace="team", name=name, placed={}, usage={}) for name in names]
    return NodePublisher(
        cast("Cluster", server),
        "n1",
        Names(),
        NodeCards(),
        on_change=lambda: None,
        unwritten_placements=lambda: allocations,
        driver_version=lambda: "",
        namespace=SYSTEM,
    )


def installed_publisher(cluster: InMemoryCluster) -> NodePublisher:
    """A publisher on a cluster with its DaemonSet and its Node, which has published its cards."""
    cluster.create(NAMESPACES, {"metadata": {"name": SYSTEM}})
    cluster.create(DAEMON_SETS, {"metadata": {"name": NODE_PLUGIN, "namespace": SYSTEM}})
    annotations, labels = {"mine": "1", NAMES.cordon: "0"}, {NAMES.pool_label: "training", NAMES.model_label: "T4"}
    cluster.create(NODES, {"metadata": {"name": "n1", "annotations": annotations, "labels": labels}})
    made = publisher(cluster)
    made.start()
    eventually(lambda: NAMES.inventory in cluster.get(NODES, "n1").metadata.annotations, "the inventory")
    eventually(lambda: made._uninstallation._was_installed, "the DaemonSet")
    return made


@pytest.mark.parametrize("removed", ["DaemonSet", "namespace"])
def test_an_uninstalled_plugin_removes_what_nodes_carry(removed: str) -> None:
    """Annotations and label; the pool stays, because quotas name it, and so does what is not Quotient's."""
    cluster = InMemoryCluster()
    made = installed_publisher(cluster)
    if removed == "namespace":
        # While the plugin still runs: it may not be permitted to when it is stopped.
        cluster.delete(NAMESPACES, SYSTEM)
        eventually(lambda: NAMES.inventory not in cluster.get(NODES, "n1").metadata.annotations, "the Node to be clear")
    else:
        cluster.delete(DAEMON_SETS, NODE_PLUGIN, SYSTEM)
    made.stop()
    metadata = cluster.get(NODES, "n1").metadata
    assert (metadata.annotations, metadata.labels) == ({"mine": "1"}, {NAMES.pool_label: "training"})


@pytest.mark.parametrize(("code", "is_cleared"), [(403, True), (401, False)])
def test_a_plugin_that_may_not_ask_whether_it_is_uninstalled_keeps_cordons(
    code: int, monkeypatch: pytest.MonkeyPatch, *, is_cleared: bool
) -> None:
    """Its role may be deleted with it, or replaced by an upgrade, or its token may have expired."""
    cluster = InMemoryCluster()
    made = installed_publisher(cluster)

    def forbid(*_: Any) -> None:
        raise Rejected("no role", code=code)

    monkeypatch.setattr(cluster, "get", forbid)
    made.stop()
    monkeypatch.undo()
    annotations = cluster.get(NODES, "n1").metadata.annotations
    assert annotations[NAMES.cordon] == "0"
    assert (NAMES.inventory not in annotations) is is_cleared


def test_a_plugin_that_is_restarted_or_was_not_installed_leaves_its_node_as_it_is() -> None:
    """Also a new one, when the API server does not know of a DaemonSet at all."""
    cluster = InMemoryCluster()
    installed_publisher(cluster).stop()
    before = cluster.get(NODES, "n1").metadata.annotations
    assert NAMES.inventory in before
    cluster.delete(DAEMON_SETS, NODE_PLUGIN, SYSTEM)
    by_hand = publisher(cluster)
    by_hand.start()
    eventually(lambda: by_hand._uninstallation._was_installed is False, "the missing DaemonSet")
    by_hand.stop()
    assert cluster.get(NODES, "n1").metadata.annotations == before


def test_a_pod_whose_patch_is_rejected_does_not_delay_others() -> None:
    """An admission policy rejects it: it is retried, and the other pods are written at once."""
    server = PodServer(first=Rejected("a policy says no"))
    made = publisher(server, "first", "last")
    assert not made._write_placements(), "it has to be retried"
    assert server.written == ["last"]


@pytest.mark.parametrize(
    "error", [NotFound("no such pod"), Rejected("metadata.uid: immutable"), Conflict("UID in precondition")], ids=str
)
def test_a_pod_that_is_gone_or_replaced_is_not_retried(error: Exception) -> None:
    server = PodServer(first=error)
    made = publisher(server, "first")
    assert made._write_placements()
    assert made._write_placements()
    assert server.requested == ["first"]


CAPACITIES = {
    "ours": ({"inspur.com/vcuda-core": "400", "cpu": "8"}, []),
    "whole cards of NVIDIA's plugin": ({"nvidia.com/gpu": "4"}, ["nvidia.com/gpu"]),
    "MIG profiles of NVIDIA's plugin": ({"nvidia.com/mig-1g.5gb": "7"}, ["nvidia.com/mig-1g.5gb"]),
    "the vcuda-core of another domain": ({"tencent.com/vcuda-core": "400"}, ["tencent.com/vcuda-core"]),
    "a plugin that is gone": ({"nvidia.com/gpu": "0"}, []),
    "several": (
        {"volcano.sh/vgpu-number": "8", "aliyun.com/gpu-mem": "160"},
        ["aliyun.com/gpu-mem", "volcano.sh/vgpu-number"],
    ),
}


@pytest.mark.parametrize(("capacity", "expected"), CAPACITIES.values(), ids=CAPACITIES.keys())
def test_resources_of_other_plugins_for_the_same_cards_conflict(capacity: dict[str, str], expected: list[str]) -> None:
    node = Node(metadata=Metadata(name="n1"), status=NodeStatus(capacity=capacity))
    assert conflicting_resources(node, Names()) == expected


def gpu(reason: str = "") -> Gpu:
    return Gpu(uuid="GPU-1", index=1, model="A100", memory_mib=40960, healthy=not reason, reason=reason)


def test_every_change_of_a_cards_health_is_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a new reason; but not the same state again, nor a card that has always been healthy."""
    made = publisher(PodServer())
    events: list[tuple[str, str, str]] = []

    def record(_about: object, reason: str, message: str, *, type_: str = "Normal") -> None:
        events.append((type_, reason, message))

    monkeypatch.setattr(made._events, "record", record)
    for state in (gpu(), gpu("XID 79"), gpu("XID 79"), gpu("XID 48"), gpu(), gpu()):
        made._report_health(NODE, state)
    assert events == [
        ("Warning", "GPUUnhealthy", "GPU 1 (GPU-1): XID 79"),
        ("Warning", "GPUUnhealthy", "GPU 1 (GPU-1): XID 48"),
        ("Normal", "GPUHealthy", "GPU 1 (GPU-1) has recovered"),
    ]

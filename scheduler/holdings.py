"""What each pod takes of the nodes in the table: of their GPUs, and of their own CPU and memory."""

from collections.abc import Collection

from msgspec import Struct

from scheduler.host_usage import HostUsage
from scheduler.pods import SchedulerPod
from vcuda.gpu_availability import GpuUsage
from vcuda.gpu_table import GpuTable
from vcuda.host import NOTHING, Host

Usage = dict[str, GpuUsage]


class Holding(Struct, frozen=True):
    """What a pod takes of a node in the table."""

    node: str
    usage: Usage
    host: Host = NOTHING


class Holdings:
    """Keeps the table up to date: a pod holds something of one node at most. Not thread-safe."""

    def __init__(self, table: GpuTable) -> None:
        self._table, self.hosts = table, HostUsage(table)
        self._by_pod: dict[str, Holding] = {}
        self._by_node: dict[str, set[str]] = {}

    def get(self, uid: str) -> Holding | None:
        return self._by_pod.get(uid)

    def pods_on(self, node: str) -> Collection[str]:
        """Return the UIDs of the pods that hold something of a node."""
        return self._by_node.get(node, ())

    def take(self, pod: SchedulerPod, node: str, usage: Usage) -> None:
        self._by_pod[pod.uid] = Holding(node, usage, pod.host)
        self._by_node.setdefault(node, set()).add(pod.uid)
        self._table.take(node, usage)
        self.hosts.take(node, pod.host)

    def take_again(self, uid: str, usage: Usage) -> None:
        """Subtract what a pod holds from the GPUs of its node, which are new in the table."""
        before = self._by_pod[uid]
        self._table.take(before.node, usage)
        self._by_pod[uid] = Holding(before.node, usage, before.host)

    def give_back(self, uid: str) -> str:
        """Give back what a pod holds; returns the node, empty if it holds nothing."""
        holding = self._by_pod.pop(uid, None)
        if holding is None:
            return ""
        uids = self._by_node.get(holding.node, set())
        uids.discard(uid)
        if not uids:
            self._by_node.pop(holding.node, None)
        self._table.give_back(holding.node, holding.usage)
        self.hosts.give_back(holding.node, holding.host)
        return holding.node

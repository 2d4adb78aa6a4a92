"""What pods take of the CPU and memory of nodes with GPUs.

kube-scheduler decides whether a pod fits on a node by these. The extender needs them to estimate what a node will still
take: GPUs of a node without free CPU are of no use.
"""

from vcuda.gpu_table import GpuTable
from vcuda.host import NOTHING, UNLIMITED, Host


class HostUsage:
    """Keeps what is free of each node up to date in the table. Not thread-safe."""

    def __init__(self, table: GpuTable) -> None:
        self._table = table
        self._allocatable: dict[str, Host] = {}
        self._used: dict[str, Host] = {}

    def set_node(self, name: str, allocatable: Host) -> None:
        self._allocatable[name] = allocatable
        self._update(name)

    def remove_node(self, name: str) -> None:
        self._allocatable.pop(name, None)

    def take(self, node: str, host: Host) -> None:
        self._used[node] = self._used.get(node, NOTHING) + host
        self._update(node)

    def give_back(self, node: str, host: Host) -> None:
        used = self._used.get(node, NOTHING) - host
        self._used[node] = used
        if used == NOTHING:
            del self._used[node]
        self._update(node)

    def _update(self, node: str) -> None:
        if node in self._table:
            free = self._allocatable.get(node, UNLIMITED) - self._used.get(node, NOTHING)
            self._table.set_host(node, free.cpu_milli, free.mib)

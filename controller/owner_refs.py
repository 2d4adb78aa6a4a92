"""The owner of what Quotient creates at run time: a ClusterRole without rules that the chart installs.

When Quotient is uninstalled, the ClusterRole goes with it, and Kubernetes' garbage collector deletes what it owned in
all namespaces: ledgers, status, secrets, the lease. No cleanup job has to run, in whatever order parts are removed.
An owner of namespaced objects in several namespaces has to be cluster-scoped, hence a ClusterRole.
"""

import threading
import time
from collections.abc import Callable

from cluster.errors import NotFound
from cluster.interface import Cluster
from cluster.objects import CLUSTER_ROLES, OwnerReference
from vcuda.names import OWNER_CLUSTER_ROLE

# Short: after the ClusterRole was deleted and created again, an object with the old uid as its owner would be
# garbage-collected at once.
CACHE_S = 2.0


class OwnerReferences:
    """Returns the owner references for a new object; none if the ClusterRole is not installed.

    If the API server does not answer, the error is passed on, and the caller creates nothing.
    """

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._clock = cluster, clock
        # Guards the cache; held during the read, so that several workers do not read at the same time.
        self._lock = threading.Lock()
        self._cached: list[OwnerReference] = []
        self._read_at = float("-inf")

    def __call__(self) -> list[OwnerReference]:
        with self._lock:
            if self._clock() - self._read_at > CACHE_S:
                self._cached, self._read_at = self._read(), self._clock()
            return self._cached

    def _read(self) -> list[OwnerReference]:
        try:
            uid = self._cluster.get(CLUSTER_ROLES, OWNER_CLUSTER_ROLE).metadata.uid
        except NotFound:
            return []
        return [OwnerReference(CLUSTER_ROLES.api_version, CLUSTER_ROLES.name, OWNER_CLUSTER_ROLE, uid)]

"""Who owns what Quotient makes at run time: a ClusterRole that grants nothing, and is deleted with Quotient.

Kubernetes then removes what it owned, in every namespace: ledgers, status, secrets, the lease. So nothing is left
behind, in whatever order Quotient is taken away, and no job has to run for it.
"""

import threading
import time
from collections.abc import Callable

from cluster.errors import NotFound
from cluster.interface import Cluster
from cluster.objects import CLUSTER_ROLES, OwnerReference
from vcuda.names import OWNER_CLUSTER_ROLE

# It may be deleted and made again; what is made for one that is gone would be removed at once.
REMEMBERED_S = 2.0


class OwnerReferences:
    """Gives the owner; none where Quotient was not installed with one. Whoever cannot be told makes nothing."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._clock = cluster, clock
        self._lock = threading.Lock()
        self._found: list[OwnerReference] = []
        self._read_at = float("-inf")

    def __call__(self) -> list[OwnerReference]:
        """Give it as an object's metadata has it."""
        with self._lock:
            if self._clock() - self._read_at > REMEMBERED_S:
                self._found, self._read_at = self._read(), self._clock()
            return self._found

    def _read(self) -> list[OwnerReference]:
        try:
            found = self._cluster.get(CLUSTER_ROLES, OWNER_CLUSTER_ROLE)
        except NotFound:
            return []
        return [OwnerReference(CLUSTER_ROLES.api_version, CLUSTER_ROLES.name, OWNER_CLUSTER_ROLE, found.metadata.uid)]

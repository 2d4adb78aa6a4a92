"""Whether this extender is the active one: while the kube-scheduler of its own pod holds the Lease.

The extender takes part in no election of its own. If it did, the leaders of the two could be in different pods.
"""

import threading
import time
from collections.abc import Callable

from cluster.backoff import Backoff
from cluster.informer import Informer, InformerTimings
from cluster.interface import Cluster, Selector
from cluster.objects import LEASES, Lease

# kube-scheduler's identity is the host name, an underscore and a random part.
SEPARATOR = "_"
DEFAULT_DURATION_S = 15.0
# A leader renews its Lease every two seconds: a watch that is silent for longer than this is dead.
LEASE_TIMINGS = InformerTimings(watch_s=60.0, idle_timeout_s=6.0, backoff=Backoff(first_s=0.2, max_s=2.0))


class LeaseObserver:
    """Follows a Lease. `identity` is what the holder must begin with. Thread-safe."""

    def __init__(
        self, cluster: Cluster, name: str, namespace: str, identity: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._identity, self._clock = identity, clock
        self._informer = Informer(
            cluster, LEASES, namespace, Selector(fields=f"metadata.name={name}"), timings=LEASE_TIMINGS
        )
        self._informer.on_change(self._handle)
        # Guards the two fields below, which belong together.
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._seen_at = 0.0

    def start(self) -> None:
        self._informer.start()

    def stop(self) -> None:
        self._informer.stop()

    @property
    def alive(self) -> bool:
        return self._informer.alive

    def _handle(self, _: Lease | None, new: Lease | None) -> None:
        with self._lock:
            self._lease, self._seen_at = new, self._clock()

    @property
    def holder(self) -> str:
        """The holder of the Lease; empty if there is none."""
        with self._lock:
            return (self._lease.spec.holder_identity or "") if self._lease else ""

    def is_active(self) -> bool:
        """Whether the Lease is held by our own pod, and was renewed within its duration as seen by our clock."""
        with self._lock:
            if self._lease is None:
                return False
            spec, age_s = self._lease.spec, self._clock() - self._seen_at
        holder = spec.holder_identity or ""
        is_ours = holder == self._identity or holder.startswith(self._identity + SEPARATOR)
        return is_ours and age_s < float(spec.lease_duration_seconds or DEFAULT_DURATION_S)

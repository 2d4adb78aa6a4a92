"""How long allocations wait for lingering pods: gone from the API server, but with processes that still use cards.

The kubelet allocates for one container of a node at a time, so every wait delays all pods of the node. Therefore it is
counted by lingering pod, for all calls together: processes that do not end (a pod deleted with force keeps its own
grace period) delay the node once. A second limit holds for all of them together, since a tenant can make any number.
"""

import threading
from collections.abc import Callable, Collection

# For the cards of the waiting pod's placement; then, for any cards.
PLACEMENT_WAIT_S = 2.0
MAX_WAIT_S = 10.0
# For all lingering pods: this much at once, and in the long run this part of the time.
NODE_WAIT_S = 20.0
NODE_WAIT_RATIO = 0.1


class LingeringPods:
    """Counts the seconds that were waited for each lingering pod. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Guards the three fields below: a kubelet that restarts calls again while the earlier call still waits.
        self._lock = threading.Lock()
        self._waited_s: dict[str, float] = {}
        self._node_left_s, self._updated_at = NODE_WAIT_S, clock()

    def worth_waiting_for(self, lingering: Collection[str], limit_s: float) -> set[str]:
        """Return the pods for which less than `limit_s` was waited so far; none if the node's limit is reached."""
        with self._lock:
            if self._refill() <= 0:
                return set()
            return {uid for uid in lingering if self._waited_s.get(uid, 0.0) < limit_s}

    def add_wait(self, lingering: Collection[str], seconds: float) -> None:
        """Count a wait for all pods that linger now; those that do not any more are forgotten."""
        with self._lock:
            self._waited_s = {uid: self._waited_s.get(uid, 0.0) + seconds for uid in lingering}
            self._node_left_s = self._refill() - seconds

    def _refill(self) -> float:
        now = self._clock()
        left = self._node_left_s + (now - self._updated_at) * NODE_WAIT_RATIO
        self._node_left_s, self._updated_at = min(NODE_WAIT_S, left), now
        return self._node_left_s

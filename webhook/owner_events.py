"""Records an event on the owner of a refused pod: on the Deployment, where users look, not only on its ReplicaSet.

Best effort, on a thread of its own, so that no decision waits for the API server.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from msgspec import Struct

from cluster.background_queue import BackgroundQueue
from cluster.errors import ApiError
from cluster.events import WARNING, EventRecorder
from cluster.interface import Cluster
from cluster.objects import REPLICA_SETS, ObjectReference
from vcuda.decision import BadRequest, Code, Reason, Unavailable
from webhook.admission import CREATE, POD, AdmissionOutcome, new_pod
from webhook.objects import Owner
from webhook.review import Request

# Refusals that depend on the namespace's quota. Mistakes in the pod itself are refused with the workload already.
REPORTED_CODES = (
    Code.QUOTA_EXCEEDED,
    Code.CARD_UNKNOWN,
    Code.MODEL_NOT_GRANTED,
    Code.POOL_NOT_GRANTED,
    Code.LEDGER_NOT_OPEN,
    Code.TOO_MANY_UNCONFIRMED,
)
MAX_QUEUED = 256
# Controllers retry a refused pod every few seconds at first; one event per owner and reason in this time is enough.
MIN_INTERVAL_S = 30.0
MAX_REMEMBERED = 1024
GET_TIMEOUT_S = 5
# Of a name in Kubernetes; kinds, versions and UIDs are shorter.
MAX_OBJECT_NAME = 253


class RefusedPod(Struct, frozen=True):
    namespace: str
    owner: Owner
    reason: Reason


def may_exist(owner: Owner) -> bool:
    """Whether an owner reference can be that of an object: tenants write it, and the API server checks no length."""
    return max(map(len, (owner.api_version, owner.kind, owner.name, owner.uid))) <= MAX_OBJECT_NAME


class OwnerEventRecorder:
    """Records events on the owners of refused pods, from a queue."""

    def __init__(self, cluster: Cluster, recorder: EventRecorder, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._recorder, self._clock = cluster, recorder, clock
        self._queue: BackgroundQueue[RefusedPod] = BackgroundQueue("owner-events", "event", self._write, MAX_QUEUED)
        # When an event for an owner and field was last enqueued, oldest first. Decisions end on several threads, so the
        # lock makes a check and its update one step.
        self._lock = threading.Lock()
        self._enqueued_at: OrderedDict[tuple[str, str], float] = OrderedDict()

    def start(self) -> "OwnerEventRecorder":
        self._queue.start()
        return self

    def stop(self) -> None:
        self._queue.stop()

    def enqueue(self, request: Request, outcome: AdmissionOutcome) -> None:
        """Enqueue an event if a controller's pod was refused for its quota. Never blocks; a full queue drops it."""
        reasons = [reason for reason in outcome.decision.reasons if reason.code in REPORTED_CODES]
        is_new_pod = (request.kind.group, request.kind.kind) == POD and request.operation == CREATE
        if not reasons or not is_new_pod or request.dry_run:
            return
        try:
            owners = new_pod(request).metadata.owner_references or ()
        except BadRequest:
            return
        owner = next((each for each in owners if each.controller), None)
        if owner is not None and may_exist(owner) and self._is_due(owner, reasons[0]):
            self._queue.enqueue(RefusedPod(request.namespace, owner, reasons[0]), owner=owner.name)

    def _is_due(self, owner: Owner, reason: Reason) -> bool:
        key, now = (owner.uid, reason.field), self._clock()
        with self._lock:
            if now - self._enqueued_at.get(key, float("-inf")) < MIN_INTERVAL_S:
                return False
            self._enqueued_at[key] = now
            self._enqueued_at.move_to_end(key)
            while len(self._enqueued_at) > MAX_REMEMBERED:
                self._enqueued_at.popitem(last=False)
        return True

    def _write(self, refused: RefusedPod) -> None:
        target = self._event_target(refused)
        message = f"a pod of this {target.kind} was refused: {refused.reason}"
        self._recorder.record(target, refused.reason.code, message, type_=WARNING)

    def _event_target(self, refused: RefusedPod) -> ObjectReference:
        """Return the owner; for a ReplicaSet, the Deployment that owns it."""
        owner = refused.owner
        if owner.kind == "ReplicaSet":
            try:
                replica_set = self._cluster.with_timeout(GET_TIMEOUT_S).get(REPLICA_SETS, owner.name, refused.namespace)
                above = next((each for each in replica_set.metadata.owner_references if each.controller), None)
                if above is not None:
                    owner = Owner(above.api_version, above.kind, above.name, above.uid, controller=True)
            except (ApiError, Unavailable):
                pass  # the event goes to the ReplicaSet
        return ObjectReference(
            api_version=owner.api_version, kind=owner.kind, namespace=refused.namespace, name=owner.name, uid=owner.uid
        )

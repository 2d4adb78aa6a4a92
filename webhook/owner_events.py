"""Tells a workload's owner that its pods are refused: on the object that people look at, not only where it happened.

A Deployment's pods are made by a ReplicaSet, and what is refused to that is seen by nobody who looks at the Deployment.
Best effort, on a thread of its own: a decision never waits for it.
"""

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import structlog
from msgspec import Struct

from cluster.errors import ApiError
from cluster.events import WARNING, EventRecorder
from cluster.interface import Cluster
from cluster.objects import REPLICA_SETS, ObjectReference
from vcuda.decision import BadRequest, Code, Reason, Unavailable
from webhook.admission import CREATE, POD, AdmissionOutcome, new_pod
from webhook.objects import Owner
from webhook.review import Request

TOLD = (Code.QUOTA_EXCEEDED, Code.MODEL_NOT_GRANTED, Code.POOL_NOT_GRANTED, Code.LEDGER_NOT_OPEN)
MOST_WAITING = 256
# Controllers try again and again; their users need to read it once in a while.
NOT_AGAIN_S = 30.0
REMEMBERED = 1024


class RefusedPod(Struct, frozen=True):
    """A pod of an owner was refused."""

    namespace: str
    owner: Owner
    reason: Reason


class OwnerEventRecorder:
    """Writes events on the owners of refused pods."""

    def __init__(self, cluster: Cluster, recorder: EventRecorder, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._recorder, self._clock = cluster, recorder, clock
        self._waiting: queue.Queue[RefusedPod | None] = queue.Queue(MOST_WAITING)
        self._told: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._log = structlog.get_logger()
        self._thread = threading.Thread(target=self._run, name="herald", daemon=True)

    def start(self) -> "OwnerEventRecorder":
        """Begin."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """End; what has not been told is not told."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        if self._thread.is_alive():
            self._thread.join(5)

    def note(self, request: Request, outcome: AdmissionOutcome) -> None:
        """Tell the owner of a refused pod, soon; nothing is told of dry runs."""
        refused = [reason for reason in outcome.decision.reasons if reason.code in TOLD]
        is_new_pod = (request.kind.group, request.kind.kind) == POD and request.operation == CREATE
        if not refused or not is_new_pod or request.dry_run:
            return
        try:
            owners = new_pod(request).metadata.owner_references or ()
        except BadRequest:
            return
        owner = next((each for each in owners if each.controller), None)
        if owner is None or not self._is_due(owner, refused[0]):
            return
        try:
            self._waiting.put_nowait(RefusedPod(request.namespace, owner, refused[0]))
        except queue.Full:
            self._log.warning("event_dropped", owner=owner.name)

    def _is_due(self, owner: Owner, reason: Reason) -> bool:
        key, now = (owner.uid, reason.field), self._clock()
        if now - self._told.get(key, float("-inf")) < NOT_AGAIN_S:
            return False
        self._told[key] = now
        self._told.move_to_end(key)
        while len(self._told) > REMEMBERED:
            self._told.popitem(last=False)
        return True

    def _run(self) -> None:
        while (news := self._waiting.get()) is not None:
            try:
                about = self._object_of(news)
                told = f"pods of this {about.kind} are refused: {news.reason}"
                self._recorder.record(about, news.reason.code, told, type_=WARNING)
            except Exception:  # the outermost frame of the thread: it has to go on
                self._log.exception("event_failed", owner=news.owner.name)

    def _object_of(self, news: RefusedPod) -> ObjectReference:
        """Name the owner, or if that is a ReplicaSet, what made it."""
        owner = news.owner
        if owner.kind == "ReplicaSet":
            try:
                made = self._cluster.with_timeout(5).get(REPLICA_SETS, owner.name, news.namespace)
                above = next((each for each in made.metadata.owner_references if each.controller), None)
                if above is not None:
                    owner = Owner(above.api_version, above.kind, above.name, above.uid, controller=True)
            except (ApiError, Unavailable):
                pass  # then it is told on the ReplicaSet
        return ObjectReference(
            api_version=owner.api_version, kind=owner.kind, namespace=news.namespace, name=owner.name, uid=owner.uid
        )

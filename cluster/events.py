"""Kubernetes events, so that `kubectl describe` shows what Quotient did to an object and why."""

import hashlib
import threading
from collections import OrderedDict
from datetime import UTC, datetime

import structlog

from cluster.errors import AlreadyExists, ApiError, NotFound
from cluster.interface import Cluster
from cluster.objects import EVENTS, Event, EventSource, Metadata, ObjectReference
from vcuda.decision import Unavailable

MAX_COUNTS = 4096
# The limit of the events.k8s.io API.
MAX_MESSAGE = 1024
# An event's name begins with the object's, and names have at most 253 characters.
MAX_NAME = 200
NORMAL, WARNING = "Normal", "Warning"


class EventRecorder:
    """Writes events, and counts repetitions in one object instead of writing another. Thread-safe.

    Best effort: an event that cannot be written is logged and counted, and nothing is raised.
    """

    def __init__(self, cluster: Cluster, component: str) -> None:
        self._cluster, self._component = cluster, component
        # Guards the counts; calls to the cluster are made outside of it.
        self._lock = threading.Lock()
        self._counts: OrderedDict[str, int] = OrderedDict()
        self.failures = 0
        self._log = structlog.get_logger().bind(component=component)

    def record(self, about: ObjectReference, reason: str, message: str, *, type_: str = NORMAL) -> None:
        text = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
        name = event_name(about, self._component, type_, reason, text)
        with self._lock:
            count = self._counts[name] = self._counts.pop(name, 0) + 1
            # The one that was counted least recently goes first; its event continues from the stored count.
            if len(self._counts) > MAX_COUNTS:
                self._counts.popitem(last=False)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        event = Event(
            # Events about cluster-wide objects live in the default namespace.
            metadata=Metadata(name=name, namespace=about.namespace or "default"),
            involved_object=about,
            type=type_,
            reason=reason,
            message=text,
            count=count,
            source=EventSource(self._component),
            reporting_component=self._component,
            first_timestamp=now,
            last_timestamp=now,
        )
        try:
            self._write(event)
        except (ApiError, Unavailable) as error:
            self.failures += 1
            self._log.warning("event_not_written", reason=reason, error=str(error))

    def _write(self, event: Event) -> None:
        name, namespace = event.metadata.name, event.metadata.namespace
        if event.count == 1:
            try:
                self._cluster.create(EVENTS, event)
            except AlreadyExists:  # written before this process started: continue its count
                count = self._cluster.get(EVENTS, name, namespace).count + 1
                with self._lock:
                    self._counts[name] = max(count, self._counts.get(name, 0))
                self._cluster.patch(EVENTS, name, namespace, {"count": count, "lastTimestamp": event.last_timestamp})
            return
        try:
            self._cluster.patch(EVENTS, name, namespace, {"count": event.count, "lastTimestamp": event.last_timestamp})
        except NotFound:  # the API server deletes events after an hour
            self._cluster.create(EVENTS, event)


def event_name(about: ObjectReference, *content: str) -> str:
    """Return a name derived from the object and the event's content, so that a repetition finds its predecessor."""
    text = "\0".join((about.kind, about.uid, *content))
    return f"{about.name[:MAX_NAME]}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"

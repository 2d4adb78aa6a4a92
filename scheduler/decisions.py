"""The log of the scheduler's recent decisions, with numbers.

`GET /decisions` on the operations port lists them, newest first; `?namespace=` and `?limit=` filter. The caller needs a
bearer token that RBAC allows to `get` the non-resource URL `/decisions`.
"""

import threading
import time
from collections import deque
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs
from wsgiref.types import WSGIEnvironment

import msgspec

from cluster.authorization import CachedAuthorizer
from scheduler.pods import SchedulerPod
from settings.probes import TEXT
from vcuda.decision import Unavailable

# Older ones are dropped.
MAX_DECISIONS = 1000
PATH = "/decisions"


class PlacementLog:
    """Ring buffer of the last decisions. Thread-safe. The same decision about a pod is not repeated."""

    def __init__(self, max_decisions: int = MAX_DECISIONS) -> None:
        # Guards both fields.
        self._lock = threading.Lock()
        self._ring: deque[dict[str, Any]] = deque(maxlen=max_decisions)
        self._last: dict[str, str] = {}

    def record(self, pod: SchedulerPod, verb: str, outcome: str, message: str, **details: object) -> None:
        said = f"{verb} {outcome} {message}"
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "verb": verb,
            "namespace": pod.metadata.namespace,
            "name": pod.metadata.name,
            "uid": pod.uid,
            "outcome": outcome,
            "message": message,
            **details,
        }
        with self._lock:
            if self._last.get(pod.uid) == said:
                return
            if len(self._last) > MAX_DECISIONS:
                self._last.clear()
            self._last[pod.uid] = said
            self._ring.append(entry)

    def recent(self, namespace: str = "", limit: int = MAX_DECISIONS) -> list[dict[str, Any]]:
        """Return decisions as JSON objects, newest first; an empty namespace matches all."""
        with self._lock:
            entries = list(self._ring)
        return [each for each in reversed(entries) if namespace in ("", each["namespace"])][: max(0, limit)]


def list_decisions(
    decisions: PlacementLog, authorizer: CachedAuthorizer, environ: WSGIEnvironment
) -> tuple[str, str, bytes]:
    """Answer `GET /decisions`; 401 or 403 if the Authorization header does not permit it."""
    try:
        refused = authorizer.failure(environ.get("HTTP_AUTHORIZATION", ""), PATH, environ.get("REMOTE_ADDR", ""))
    except Unavailable as error:
        refused = 503, str(error)
    if refused is not None:
        return f"{refused[0]} {HTTPStatus(refused[0]).phrase}", TEXT, f"{refused[1]}\n".encode()
    query = parse_qs(environ.get("QUERY_STRING", ""))
    limit = query.get("limit", [""])[0]
    recent = decisions.recent(query.get("namespace", [""])[0], int(limit) if limit.isdecimal() else MAX_DECISIONS)
    return "200 OK", "application/json", msgspec.json.encode({"decisions": recent})

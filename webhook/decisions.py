"""The log of recent decisions, to find out later what was decided and why.

`GET /decisions` on the webhook's HTTPS port lists them, newest first; `?namespace=` and `?limit=` filter. The caller
needs a bearer token that RBAC allows to `get` the non-resource URL `/decisions`.
"""

import threading
import time
from collections import deque
from typing import Any

from msgspec.structs import replace

from vcuda.decision import shorten
from webhook.admission import AdmissionOutcome
from webhook.review import MAX_REASON, NULL, GroupVersionKind, Request, User, limit_decision

# Older ones are dropped. On a busy cluster this covers minutes; metrics and events last longer.
MAX_DECISIONS = 1000
# Of a name. Those of the API server are shorter, but a caller of the webhook may send any.
MAX_TEXT = 320
PATH = "/decisions"


class DecisionLog:
    """Ring buffer of the last decisions. Thread-safe."""

    def __init__(self, max_decisions: int = MAX_DECISIONS) -> None:
        # Guards _ring: written by the event loop and the ledger committer, read by Flask's threads.
        self._lock = threading.Lock()
        self._ring: deque[tuple[float, str, Request, AdmissionOutcome]] = deque(maxlen=max_decisions)

    def record(self, route: str, request: Request, outcome: AdmissionOutcome) -> None:
        # A pod that was only mutated is validated a moment later, and would be listed twice.
        if route == "validate" or outcome.decision.reasons:
            with self._lock:
                self._ring.append((time.time(), route, summary_of(request), outcome_shown(outcome)))

    def recent(self, namespace: str = "", limit: int = MAX_DECISIONS) -> list[dict[str, Any]]:
        """Return decisions as JSON objects, newest first; an empty namespace matches all."""
        with self._lock:
            entries = list(self._ring)
        matching = [each for each in reversed(entries) if namespace in ("", each[2].namespace)]
        return [describe_decision(*each) for each in matching[:limit]]


def summary_of(request: Request) -> Request:
    """Return what is shown of a request: without its objects, which may be large, and whose env may hold secrets."""
    return replace(
        request,
        uid="",  # not shown
        kind=GroupVersionKind(kind=shorten(request.kind.kind, MAX_TEXT)),
        sub_resource="",
        operation=shorten(request.operation, MAX_TEXT),
        object=NULL,
        old_object=NULL,
        name=shorten(request.name, MAX_TEXT),
        namespace=shorten(request.namespace, MAX_TEXT),
        user_info=User(shorten(request.user_info.username, MAX_TEXT)),
    )


def outcome_shown(outcome: AdmissionOutcome) -> AdmissionOutcome:
    """Return what is shown of an outcome: an object may have thousands of mistakes."""
    return AdmissionOutcome(limit_decision(outcome.decision), [], limit_decision(outcome.audited))


def describe_decision(decided_at: float, route: str, request: Request, outcome: AdmissionOutcome) -> dict[str, Any]:
    reasons = outcome.decision.reasons or outcome.audited.reasons
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(decided_at)),
        "route": route,
        "operation": request.operation,
        "kind": request.kind.kind,
        "namespace": request.namespace,
        "name": request.name,
        "user": request.user_info.username,
        "dryRun": bool(request.dry_run),
        "allowed": outcome.decision.allowed,
        "audited": bool(outcome.audited.reasons),
        "reasons": [
            {
                "code": reason.code,
                "field": shorten(reason.field, MAX_REASON),
                "message": shorten(str(reason), MAX_REASON),
                "numbers": reason.numbers,
            }
            for reason in reasons
        ],
        "warnings": list(outcome.decision.warnings),
    }

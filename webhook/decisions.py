"""The last decisions, for those who want to know what happened and why: a bounded ring, shown to whoever may see it.

`GET /decisions` on the webhook's own port, with a bearer token whose owner may `get` the path `/decisions` (RBAC on
`nonResourceURLs`). `?namespace=` and `?limit=` narrow it down. The newest come first.
"""

import threading
import time
from collections import deque
from typing import Any

from msgspec.structs import replace

from webhook.admission import AdmissionOutcome
from webhook.review import NULL, Request

REMEMBERED = 1000
PATH = "/decisions"


class DecisionLog:
    """A ring of decisions. What was only rewritten is not in it: the same pod is decided on a moment later."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        # Guards the ring: the event loop writes, Flask's threads read.
        self._lock = threading.Lock()
        self._ring: deque[tuple[float, str, Request, AdmissionOutcome]] = deque(maxlen=remembered)

    def note(self, route: str, request: Request, outcome: AdmissionOutcome) -> None:
        """Remember a decision."""
        if route == "validate" or outcome.decision.reasons:
            # Without the objects under review: they may be large, and hold what is nobody's business.
            about = replace(request, object=NULL, old_object=NULL)
            with self._lock:
                self._ring.append((time.time(), route, about, outcome))

    def shown(self, namespace: str = "", limit: int = REMEMBERED) -> list[dict[str, Any]]:
        """Give the decisions, the newest first."""
        with self._lock:
            found = list(self._ring)
        chosen = [each for each in reversed(found) if namespace in ("", each[2].namespace)]
        return [described(*each) for each in chosen[:limit]]


def described(at: float, route: str, request: Request, outcome: AdmissionOutcome) -> dict[str, Any]:
    """Write a decision for people and programs."""
    reasons = outcome.decision.reasons or outcome.audited.reasons
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)),
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
            {"code": reason.code, "field": reason.field, "message": str(reason), "numbers": reason.numbers}
            for reason in reasons
        ],
        "warnings": list(outcome.decision.warnings),
    }

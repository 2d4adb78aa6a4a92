"""From the body of an admission request to the HTTP reply, for both the short path and Flask.

A decision, allowed or denied, has status 200. A malformed request gets 4xx. If no decision is possible now, the reply
is 5xx and the failurePolicy of the webhook configuration applies. Where that is Fail everywhere, the object is refused
in any case, and the API server would not tell the user why: then the reply is a denial with code 503 and the cause.
"""

import re
import time
from collections.abc import Callable
from enum import Enum
from functools import lru_cache, partial
from typing import Protocol

import structlog
from msgspec import Struct

from ledger.committing import LedgerWriter
from vcuda.decision import BadRequest, Unavailable
from vcuda.ledger import ChargeResult
from vcuda.webhook_paths import MUTATE, VALIDATE
from webhook.admission import Admission, AdmissionOutcome, LedgerRequest, encode_outcome
from webhook.review import Request, decode_review, encode_undecided
from webhook.validating import PodToBind

JSON, TEXT = "application/json", "text/plain; charset=utf-8"
# Subtracted from the caller's deadline: the reply has to be encoded, encrypted and sent within it.
MARGIN_S = 0.2
# Go's time.Duration as text, as in 1m30s or 1.5s.
DURATION = re.compile(r"(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(h|ms|m|s|us|µs|ns))+", re.ASCII)
DURATION_PART = re.compile(r"([0-9.]+)(h|ms|m|s|us|µs|ns)", re.ASCII)
UNIT_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
MAX_DURATION_CHARACTERS = 40

# Namespace, name and timeout in seconds to the pod; None if it does not exist.
FindPod = Callable[[str, str, float], PodToBind | None]


class HttpReply(Struct, frozen=True):
    status: int
    body: bytes
    content_type: str = JSON


class Deferred(Enum):
    """Why `reply_soon` returned no reply.

    CALLBACK: the reply will be passed to the callback. BLOCKING: the request has to be passed to `reply`, on a thread
    that may wait for the API server.
    """

    CALLBACK = "callback"
    BLOCKING = "blocking"


class HttpError(BadRequest):
    """A malformed request with a more specific status than 400."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class DecisionRecorder(Protocol):
    """Counts and logs decisions and failures. Called on any thread."""

    def record_decision(self, route: str, request: Request, outcome: AdmissionOutcome, took_s: float) -> None: ...

    def record_failure(self, route: str, cause: str) -> None: ...


class Responder:
    """Answers requests to the two admission routes. Thread-safe.

    `fails_closed` says whether the API server refuses an object that is not decided on. `is_known` says of a request
    that its caller is an API server (see `callers.py`).
    """

    def __init__(
        self,
        admission: Admission,
        find_pod: FindPod,
        ledgers: LedgerWriter,
        recorder: DecisionRecorder,
        answer_within_s: float,
        *,
        fails_closed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._fails_closed = fails_closed
        self.admission, self._find_pod, self._recorder = admission, find_pod, recorder
        self._ledgers, self._answer_within_s = ledgers, answer_within_s
        self._log = structlog.get_logger()

    def reply(self, route: str, content_type: str, query: str, body: bytes, *, is_known: bool = False) -> HttpReply:
        """Answer a request. Blocks while the ledger is written or a pod is read from the API server."""
        started = time.perf_counter()
        request: Request | None = None
        try:
            request = decode_request(content_type, body)
            within_s = self.budget_s(query)
            pod = self.read_pod_to_bind(request, within_s) if self.needs_pod(route, request) else None
            outcome = self.decide(route, request, pod, is_known=is_known)
            if outcome.ledger_request is not None:
                outcome = self.charge(outcome, outcome.ledger_request, within_s)
            return self.finish(route, request, outcome, started)
        except Exception as error:  # the outermost frame of a request
            return self.failure_reply(route, error, request)

    def reply_soon(
        self,
        route: str,
        content_type: str,
        query: str,
        body: bytes,
        on_reply: Callable[[HttpReply], None],
        *,
        is_known: bool = False,
    ) -> HttpReply | Deferred:
        """Answer a request without blocking the event loop.

        A request that needs the ledger is answered later: `on_reply` is called once, on another thread.
        """
        started = time.perf_counter()
        request: Request | None = None
        try:
            request = decode_request(content_type, body)
            within_s = self.budget_s(query)
            # Nothing is counted or logged yet: `reply` starts again from the body.
            if self.needs_pod(route, request):
                return Deferred.BLOCKING
            outcome = self.decide(route, request, None, is_known=is_known)
            if outcome.ledger_request is None:
                return self.finish(route, request, outcome, started)
            decided, ledger_request = request, outcome.ledger_request

            def on_result(result: ChargeResult | Exception) -> None:
                try:
                    final = combine(outcome, ledger_request, result)
                    on_reply(self.finish(route, decided, final, started))
                # The outermost frame of a request: an error must not end the committer's thread, which others share.
                except Exception as error:
                    on_reply(self.failure_reply(route, error, decided))

            self._ledgers.submit(
                ledger_request.namespace,
                partial(self.admission.apply, ledger_request),
                within_s,
                on_result,
                read_only=ledger_request.is_read_only,
            )
        except Exception as error:  # the outermost frame of a request
            return self.failure_reply(route, error, request)
        return Deferred.CALLBACK

    def charge(self, outcome: AdmissionOutcome, ledger_request: LedgerRequest, within_s: float) -> AdmissionOutcome:
        """Apply a ledger request and wait for the result."""
        try:
            result: ChargeResult | Exception = self._ledgers.apply(
                ledger_request.namespace,
                partial(self.admission.apply, ledger_request),
                within_s,
                read_only=ledger_request.is_read_only,
            )
        except Unavailable as error:
            result = error
        return combine(outcome, ledger_request, result)

    def budget_s(self, query: str) -> float:
        """Return how long a decision may take. The API server sends its own deadline as `?timeout=`."""
        timeout_s = timeout_in(query)
        return min(timeout_s - MARGIN_S if timeout_s is not None else self._answer_within_s, self._answer_within_s)

    def needs_pod(self, route: str, request: Request) -> bool:
        """Whether a pod has to be read from the API server first: a Binding does not tell whether it has GPUs."""
        return route == VALIDATE and self.admission.binding_pod(request) is not None

    def read_pod_to_bind(self, request: Request, within_s: float) -> PodToBind | None:
        pod = self.admission.binding_pod(request)
        if within_s <= 0:
            raise Unavailable("the request's timeout leaves no time to read the pod of this Binding")
        return self._find_pod(*pod, within_s) if pod else None

    def decide(
        self, route: str, request: Request, pod_to_bind: PodToBind | None, *, is_known: bool
    ) -> AdmissionOutcome:
        if route == MUTATE:
            return self.admission.mutate(request)
        return self.admission.validate(request, pod_to_bind, is_known=is_known)

    def finish(self, route: str, request: Request, outcome: AdmissionOutcome, started: float) -> HttpReply:
        body = encode_outcome(request, outcome)
        self._recorder.record_decision(route, request, outcome, time.perf_counter() - started)
        return HttpReply(200, body)

    def failure_reply(self, route: str, error: Exception, request: Request | None) -> HttpReply:
        """Reply that there is no decision, and count the cause. Details of internal errors go to the log only."""
        # Not logged: the reply says what is malformed, and a client could fill the log.
        if isinstance(error, BadRequest):
            self._recorder.record_failure(route, "bad-request")
            return HttpReply(getattr(error, "status", 400), f"{error}\n".encode(errors="replace"), TEXT)
        if isinstance(error, Unavailable):
            self._recorder.record_failure(route, "unavailable")
            self._log.warning("decision_unavailable", route=route, error=str(error))
            message = f"cannot decide now: {error}"
            if request is not None and self._fails_closed():
                return HttpReply(200, encode_undecided(request.uid, f"{message}; try again"))
            return HttpReply(503, f"{message}\n".encode(errors="replace"), TEXT)
        self._recorder.record_failure(route, "fault")
        self._log.error("decision_failed", route=route, exc_info=error)
        return HttpReply(500, b"cannot decide: internal error, see the webhook's log\n", TEXT)


def combine(
    outcome: AdmissionOutcome, ledger_request: LedgerRequest, result: ChargeResult | Exception
) -> AdmissionOutcome:
    """Return the final outcome. If the ledger was needed for a warning only, its failure is ignored."""
    if isinstance(result, Exception):
        # Workloads: their pods are charged when they are created, so nothing is lost but the warning.
        if ledger_request.is_optional and isinstance(result, Unavailable):
            return outcome
        raise result
    return outcome.with_charge(ChargeResult(warnings=result.warnings) if ledger_request.is_optional else result)


def decode_request(content_type: str, body: bytes) -> Request:
    if content_type != JSON and content_type.partition(";")[0].strip().lower() != JSON:
        raise HttpError(415, f"Content-Type {content_type[:100]!r} is not supported: send {JSON}")
    return decode_review(body)


@lru_cache(maxsize=128)  # an API server sends the same timeout with every request
def timeout_in(query: str) -> float | None:
    """Return the deadline in a query string, in Go's duration format; raises BadRequest if it is malformed."""
    for part in query.split("&"):
        if part.startswith("timeout="):
            text = part[len("timeout=") :].replace("%C2%B5", "µ")
            if len(text) > MAX_DURATION_CHARACTERS or not DURATION.fullmatch(text):
                raise BadRequest(f"timeout={text[:MAX_DURATION_CHARACTERS]}: not a duration; write it as in 10s")
            return sum(float(number) * UNIT_S[unit] for number, unit in DURATION_PART.findall(text))
    return None

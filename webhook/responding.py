"""From the bytes of a request to the bytes of an answer, whichever server carries them.

Decided is 200, whether allowed or refused. A call that breaks the protocol is 4xx. What cannot be decided now is 5xx,
and the API server's failure policy says what follows; it is never turned into an allowance or a refusal.
"""

import re
import time
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Protocol

import structlog
from msgspec import Struct

from ledger.committing import LedgerWriter
from vcuda.decision import BadRequest, Unavailable
from vcuda.ledger import ChargeResult
from webhook.admission import Admission, AdmissionOutcome, Wanted, encode_outcome
from webhook.review import Request, decode_review
from webhook.validating import PodToBind

MUTATE, VALIDATE = "mutate", "validate"
ROUTES = {f"/{MUTATE}": MUTATE, f"/{VALIDATE}": VALIDATE}
JSON, TEXT = "application/json", "text/plain; charset=utf-8"
# What is left of the caller's own deadline for the way back.
MARGIN_S = 0.2
DURATION = re.compile(r"(?:([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(h|ms|m|s|us|µs|ns))+", re.ASCII)
PART = re.compile(r"([0-9.]+)(h|ms|m|s|us|µs|ns)", re.ASCII)
SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
MAX_DURATION_TEXT = 40

FindPod = Callable[[str, str, float], PodToBind | None]


class HttpReply(Struct, frozen=True):
    """What goes back to the caller."""

    status: int
    body: bytes
    content_type: str = JSON


class ReplyPath(Enum):
    """What becomes of a call that is not answered at once."""

    LATER = "later"
    LONG = "long"


class HttpError(BadRequest):
    """A breach of the protocol that has a status of its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class DecisionRecorder(Protocol):
    """Counts what was decided."""

    def decided(self, route: str, request: Request, outcome: AdmissionOutcome, took_s: float) -> None:
        """Count a decision."""
        ...

    def failed(self, route: str, cause: str) -> None:
        """Count a call without decision."""
        ...


class Responder:
    """Answers calls to the two admission routes."""

    def __init__(
        self,
        admission: Admission,
        find_pod: FindPod,
        charging: LedgerWriter,
        tally: DecisionRecorder,
        answer_within_s: float,
    ) -> None:
        self.admission, self._find_pod, self._tally = admission, find_pod, tally
        self._charging, self._answer_within_s = charging, answer_within_s
        self._log = structlog.get_logger()

    def reply(self, route: str, content_type: str, query: str, body: bytes) -> HttpReply:
        """Answer one call; may wait for the cluster."""
        started = time.perf_counter()
        try:
            request = self.begin(content_type, body)
            within_s = self.budget_s(query)
            pod_to_bind = self.look_up(request, within_s) if self.needs_look_up(route, request) else None
            outcome = self.decide(route, request, pod_to_bind)
            if outcome.wanted is not None:
                outcome = self.settle(outcome, outcome.wanted, request.namespace, within_s)
            return self.finish(route, request, outcome, started)
        except Exception as broken:  # the outermost frame of a request
            return self.failed(route, broken)

    def reply_soon(
        self, route: str, content_type: str, query: str, body: bytes, later: Callable[[HttpReply], None]
    ) -> HttpReply | ReplyPath:
        """Answer one call at once, or later from another thread; or say that it has to go the long way."""
        started = time.perf_counter()
        try:
            request = self.begin(content_type, body)
            within_s = self.budget_s(query)
            if self.needs_look_up(route, request):
                return ReplyPath.LONG
            outcome = self.decide(route, request, None)
            if outcome.wanted is None:
                return self.finish(route, request, outcome, started)
            wanted = outcome.wanted

            def settled(verdict: ChargeResult | Exception) -> None:
                try:
                    final = self.settled(outcome, wanted, verdict)
                    later(self.finish(route, request, final, started))
                except Exception as broken:  # the outermost frame of a request
                    later(self.failed(route, broken))

            self._charging.submit(request.namespace, wanted.change, within_s, settled, only_looks=wanted.only_looks)
        except Exception as broken:  # the outermost frame of a request
            return self.failed(route, broken)
        return ReplyPath.LATER

    def settle(self, outcome: AdmissionOutcome, wanted: Wanted, namespace: str, within_s: float) -> AdmissionOutcome:
        """Do to the ledger what a decision wants."""
        try:
            verdict: ChargeResult | Exception = self._charging.apply(
                namespace, wanted.change, within_s, only_looks=wanted.only_looks
            )
        except Unavailable as broken:
            verdict = broken
        return self.settled(outcome, wanted, verdict)

    @staticmethod
    def settled(outcome: AdmissionOutcome, wanted: Wanted, verdict: ChargeResult | Exception) -> AdmissionOutcome:
        """Decide, after the ledger has spoken; where only advice was wanted, its silence changes nothing."""
        if isinstance(verdict, Exception):
            if wanted.is_advice and isinstance(verdict, Unavailable):
                return outcome
            raise verdict
        return outcome.settled(ChargeResult(warnings=verdict.warnings) if wanted.is_advice else verdict)

    def begin(self, content_type: str, body: bytes) -> Request:
        """Read the question."""
        if content_type != JSON and content_type.partition(";")[0].strip().lower() != JSON:
            raise HttpError(415, f"Content-Type {content_type[:100]!r} is not read here: send {JSON}")
        return decode_review(body)

    def budget_s(self, query: str) -> float:
        """Say how long an answer may take: the caller tells its own deadline in `?timeout=`."""
        told = timeout_in(query)
        return min(told - MARGIN_S if told is not None else self._answer_within_s, self._answer_within_s)

    def needs_look_up(self, route: str, request: Request) -> bool:
        """Tell whether the cluster has to be asked first: for bindings only."""
        return route == VALIDATE and self.admission.pod_to_bind(request) is not None

    def look_up(self, request: Request, within_s: float) -> PodToBind | None:
        """Ask the cluster for the pod of a binding."""
        wanted = self.admission.pod_to_bind(request)
        if within_s <= 0:
            raise Unavailable("no time is left to look the pod up")
        return self._find_pod(*wanted, within_s) if wanted else None

    def decide(self, route: str, request: Request, pod_to_bind: PodToBind | None) -> AdmissionOutcome:
        """Decide, but for what the ledger has to say."""
        return self.admission.mutate(request) if route == MUTATE else self.admission.validate(request, pod_to_bind)

    def finish(self, route: str, request: Request, outcome: AdmissionOutcome, started: float) -> HttpReply:
        """Write the answer."""
        body = encode_outcome(request, outcome)
        self._tally.decided(route, request, outcome, time.perf_counter() - started)
        return HttpReply(200, body)

    def failed(self, route: str, broken: Exception) -> HttpReply:
        """Say that there is no decision, and whose fault that is."""
        if isinstance(broken, BadRequest):
            self._tally.failed(route, "bad-request")
            return HttpReply(getattr(broken, "status", 400), f"{broken}\n".encode(errors="replace"), TEXT)
        if isinstance(broken, Unavailable):
            self._tally.failed(route, "unavailable")
            self._log.warning("cannot_decide", route=route, cause=str(broken))
            return HttpReply(503, f"cannot decide now: {broken}\n".encode(errors="replace"), TEXT)
        self._tally.failed(route, "fault")
        self._log.error("decision_failed", route=route, exc_info=broken)
        return HttpReply(500, b"cannot decide: a fault of Quotient, see its log\n", TEXT)


@lru_cache(maxsize=128)  # every call of an API server says the same
def timeout_in(query: str) -> float | None:
    """Find the deadline in a query, as Go writes durations; a BadRequest if it is none."""
    for part in query.split("&"):
        if part.startswith("timeout="):
            text = part[len("timeout=") :].replace("%C2%B5", "µ")
            if len(text) > MAX_DURATION_TEXT or not DURATION.fullmatch(text):
                raise BadRequest(f"timeout={text[:MAX_DURATION_TEXT]!r} is no duration: write it as 10s")
            return sum(float(number) * SECONDS[unit] for number, unit in PART.findall(text))
    return None

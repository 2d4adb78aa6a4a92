"""What the webhook counts, under the names that stand here and nowhere else."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vcuda.decision import Decision
from webhook.admission import Outcome
from webhook.review import Request

# The API server's own buckets for webhooks, and finer ones below, where we mean to be.
BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0)
# Kinds come from callers: whatever is not here is counted together, or anybody could fill the memory with series.
KINDS = frozenset(
    (
        "Pod",
        "Binding",
        "Deployment",
        "StatefulSet",
        "DaemonSet",
        "ReplicaSet",
        "ReplicationController",
        "Job",
        "CronJob",
    )
)
OPERATIONS = frozenset(("CREATE", "UPDATE", "DELETE", "CONNECT"))
OTHER = "other"


class Metrics:
    """The series of one webhook process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.decisions = Counter(
            "quotient_admission_decisions",
            "Reviews decided, by what became of them: allowed, patched, denied, audited (would be denied)",
            ("route", "kind", "operation", "decision"),
            registry=self.registry,
        )
        self.reasons = Counter(
            "quotient_admission_reasons", "Reasons given in denials and audits", ("code",), registry=self.registry
        )
        self.failures = Counter(
            "quotient_admission_failures",
            "Calls without decision: bad-request, unavailable, fault",
            ("route", "cause"),
            registry=self.registry,
        )
        self.duration = Histogram(
            "quotient_admission_duration_seconds",
            "From the whole request to its answer",
            ("route",),
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.certificate_until = Gauge(
            "quotient_certificate_not_after_seconds",
            "When the serving certificate in use expires, in seconds since 1970",
            registry=self.registry,
        )
        self.certificate_failures = Gauge(
            "quotient_certificate_refused",
            "Pairs of certificate and key that were not taken, since the start",
            registry=self.registry,
        )
        self.quotas_invalid = Gauge(
            "quotient_quotas_invalid", "Quotas that do not parse; the last good one is in force", registry=self.registry
        )
        self._timed = {route: self.duration.labels(route) for route in ("mutate", "validate")}
        # Looking a child up by its labels takes as long as counting; there are few of them.
        self._counted: dict[tuple[str, str, str, str], Counter] = {}

    def decided(self, route: str, request: Request, outcome: Outcome, took_s: float) -> None:
        """Count a decision."""
        kind = request.kind.kind if request.kind.kind in KINDS else OTHER
        operation = request.operation if request.operation in OPERATIONS else OTHER
        key = (route, kind, operation, verdict(outcome))
        if key not in self._counted:
            self._counted[key] = self.decisions.labels(*key)
        self._counted[key].inc()
        self._timed[route].observe(took_s)
        for reason in explained(outcome).reasons:
            self.reasons.labels(reason.code).inc()

    def failed(self, route: str, cause: str) -> None:
        """Count a call without decision."""
        self.failures.labels(route, cause).inc()


def verdict(outcome: Outcome) -> str:
    """Name what became of a review."""
    if outcome.audited.reasons:
        return "audited"
    if not outcome.decision.allowed:
        return "denied"
    return "patched" if outcome.operations else "allowed"


def explained(outcome: Outcome) -> Decision:
    """Give the decision with the reasons, whether or not they were enforced."""
    return outcome.audited if outcome.audited.reasons else outcome.decision

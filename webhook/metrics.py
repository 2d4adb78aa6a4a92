"""Metrics of the webhook; their names are in this module only.

Counting is part of every decision, so it updates plain numbers under one lock. They are converted to Prometheus'
metric families only when `/metrics` is read.
"""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from ledger.committing import CommitCounts
from vcuda.workload_kinds import BY_KIND
from webhook.admission import AdmissionOutcome
from webhook.review import Request

# Upper bounds in seconds. From 5 ms on these are the API server's own buckets for webhooks; the finer ones below are
# for decisions without a ledger write, which take about 50 microseconds.
BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0)
BUCKET_LABELS = (*map(str, BUCKETS_S), "+Inf")
# Label values come from the request. All others are counted as OTHER, or a caller could create any number of series.
KINDS = frozenset(("Pod", "Binding", *BY_KIND))
OPERATIONS = frozenset(("CREATE", "UPDATE", "DELETE", "CONNECT"))
OTHER = "other"
BATCH_SIZES = (1, 2, 5, 10, 20, 50, 100, 200)


class DurationHistogram:
    """A histogram of durations. Not thread-safe: the caller holds a lock."""

    def __init__(self) -> None:
        self._counts = [0] * len(BUCKET_LABELS)
        self._sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        self._counts[bisect_left(BUCKETS_S, duration_s)] += 1
        self._sum_s += duration_s

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """Return the buckets in Prometheus' form, each including all smaller ones, and the sum in seconds."""
        total, buckets = 0, []
        for label, count in zip(BUCKET_LABELS, self._counts, strict=True):
            total += count
            buckets.append((label, float(total)))
        return buckets, self._sum_s


class Metrics:
    """The series of one webhook process. Thread-safe."""

    def __init__(self, counts: CommitCounts | None = None) -> None:
        self._commits = counts or CommitCounts()
        self.connections = 0
        self.registry = CollectorRegistry()
        self.certificate_not_after = Gauge(
            "quotient_certificate_not_after_seconds",
            "Expiry of the serving certificate in use, as a Unix timestamp in seconds; 0 if there is none.",
            registry=self.registry,
        )
        self.certificates_rejected = Gauge(
            "quotient_certificate_refused",
            "Number of invalid certificate and key pairs found since the start; the previous pair stays in use.",
            registry=self.registry,
        )
        self.quotas_invalid = Gauge(
            "quotient_quotas_invalid",
            "Number of quotas that do not parse; the last valid version of each stays in force.",
            registry=self.registry,
        )
        # Guards all counters below: the event loop, Flask's threads and the ledger committer update them.
        self._lock = threading.Lock()
        self._decisions: dict[tuple[str, str, str, str], int] = {}
        self._reasons: Counter[str] = Counter()
        self._failures: Counter[tuple[str, str]] = Counter()
        self._durations = {"mutate": DurationHistogram(), "validate": DurationHistogram()}
        self.registry.register(self)

    def record_decision(self, route: str, request: Request, outcome: AdmissionOutcome, took_s: float) -> None:
        kind = request.kind.kind if request.kind.kind in KINDS else OTHER
        operation = request.operation if request.operation in OPERATIONS else OTHER
        key = (route, kind, operation, decision_label(outcome))
        with self._lock:
            self._decisions[key] = self._decisions.get(key, 0) + 1
            self._durations[route].observe(took_s)
            for reason in outcome.audited.reasons or outcome.decision.reasons:
                self._reasons[reason.code] += 1

    def record_failure(self, route: str, cause: str) -> None:
        with self._lock:
            self._failures[route, cause] += 1

    def collect(self) -> Iterator[Metric]:
        """Implement Prometheus' collector interface; called for every read of `/metrics`."""
        decisions = CounterMetricFamily(
            "quotient_admission_decisions",
            "Number of admission reviews decided, by decision: allowed, patched, denied or audited (allowed in audit "
            "mode, denied otherwise).",
            labels=("route", "kind", "operation", "decision"),
        )
        reasons = CounterMetricFamily(
            "quotient_admission_reasons",
            "Number of reasons given for denied and audited reviews, by code.",
            labels=("code",),
        )
        failures = CounterMetricFamily(
            "quotient_admission_failures",
            "Number of requests without a decision, by cause: bad-request (malformed), unavailable (cannot decide now) "
            "or fault (internal error).",
            labels=("route", "cause"),
        )
        durations = HistogramMetricFamily(
            "quotient_admission_duration_seconds",
            "Time from the complete request to its decision, in seconds, ledger write included.",
            labels=("route",),
        )
        with self._lock:
            for labels, count in self._decisions.items():
                decisions.add_metric(labels, count)
            for code, count in self._reasons.items():
                reasons.add_metric((code,), count)
            for cause, count in self._failures.items():
                failures.add_metric(cause, count)
            for route, histogram in self._durations.items():
                buckets, sum_s = histogram.cumulative()
                durations.add_metric((route,), buckets, sum_s)
        yield from (decisions, reasons, failures, durations)
        yield from self._collect_commits()
        yield CounterMetricFamily(
            "quotient_connections", "Number of TLS connections accepted since the start.", self.connections
        )

    def _collect_commits(self) -> Iterator[Metric]:
        commits = self._commits
        yield CounterMetricFamily("quotient_ledger_writes", "Number of ledger writes.", commits.writes)
        yield CounterMetricFamily(
            "quotient_ledger_conflicts",
            "Number of ledger writes rejected because another replica wrote first; they are retried.",
            commits.conflicts,
        )
        sizes = HistogramMetricFamily("quotient_ledger_batch_size", "Number of changes committed in one ledger write.")
        # A copy: the committer's threads add sizes while this one iterates.
        batches = dict(commits.batches)
        buckets = [
            (str(bound), float(sum(count for size, count in batches.items() if size <= bound))) for bound in BATCH_SIZES
        ]
        buckets.append(("+Inf", float(sum(batches.values()))))
        sizes.add_metric((), buckets, sum(size * count for size, count in batches.items()))
        yield sizes


def decision_label(outcome: AdmissionOutcome) -> str:
    """Return the value of the label `decision`. In audit mode the decision is allowed, so that is checked first."""
    if outcome.audited.reasons:
        return "audited"
    if outcome.decision.reasons:
        return "denied"
    return "patched" if outcome.operations else "allowed"

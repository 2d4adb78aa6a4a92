"""What the webhook counts, under the names that stand here and nowhere else.

Counting is a part of every decision, so it is done in plain numbers under one lock, and put into Prometheus' form only
when somebody looks.
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

# The API server's own buckets for webhooks, and finer ones below, where we mean to be.
BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10.0)
BOUNDS = (*map(str, BUCKETS), "+Inf")
# Kinds come from callers: whatever is not here is counted together, or anybody could fill the memory with series.
KINDS = frozenset(("Pod", "Binding", *BY_KIND))
OPERATIONS = frozenset(("CREATE", "UPDATE", "DELETE", "CONNECT"))
OTHER = "other"
BATCH_SIZES = (1, 2, 5, 10, 20, 50, 100, 200)


class Durations:
    """How long something took, in buckets."""

    def __init__(self) -> None:
        self._counts = [0] * len(BOUNDS)
        self._sum = 0.0

    def add(self, took_s: float) -> None:
        """Count one."""
        self._counts[bisect_left(BUCKETS, took_s)] += 1
        self._sum += took_s

    def shown(self) -> tuple[list[tuple[str, float]], float]:
        """Give the buckets as Prometheus wants them, each with all below it, and the sum."""
        total, buckets = 0, []
        for bound, count in zip(BOUNDS, self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets, self._sum


class Metrics:
    """The series of one webhook process."""

    def __init__(self, counts: CommitCounts | None = None) -> None:
        self._ledger = counts or CommitCounts()
        self.connections = 0
        self.registry = CollectorRegistry()
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
        # Guards all that is counted: the event loop counts, and so do Flask's threads.
        self._lock = threading.Lock()
        self._decisions: dict[tuple[str, str, str, str], int] = {}
        self._reasons: Counter[str] = Counter()
        self._failures: Counter[tuple[str, str]] = Counter()
        self._durations = {"mutate": Durations(), "validate": Durations()}
        self.registry.register(self)

    def decided(self, route: str, request: Request, outcome: AdmissionOutcome, took_s: float) -> None:
        """Count a decision."""
        kind = request.kind.kind if request.kind.kind in KINDS else OTHER
        operation = request.operation if request.operation in OPERATIONS else OTHER
        key = (route, kind, operation, verdict(outcome))
        with self._lock:
            self._decisions[key] = self._decisions.get(key, 0) + 1
            self._durations[route].add(took_s)
            for reason in outcome.audited.reasons or outcome.decision.reasons:
                self._reasons[reason.code] += 1

    def failed(self, route: str, cause: str) -> None:
        """Count a call without decision."""
        with self._lock:
            self._failures[route, cause] += 1

    def collect(self) -> Iterator[Metric]:
        """Show what was counted, to Prometheus."""
        decisions = CounterMetricFamily(
            "quotient_admission_decisions",
            "Reviews decided, by what became of them: allowed, patched, denied, audited (would be denied)",
            labels=("route", "kind", "operation", "decision"),
        )
        reasons = CounterMetricFamily(
            "quotient_admission_reasons", "Reasons given in denials and audits", labels=("code",)
        )
        failures = CounterMetricFamily(
            "quotient_admission_failures",
            "Calls without decision: bad-request, unavailable, fault",
            labels=("route", "cause"),
        )
        durations = HistogramMetricFamily(
            "quotient_admission_duration_seconds", "From the whole request to its answer", labels=("route",)
        )
        with self._lock:
            for labels, count in self._decisions.items():
                decisions.add_metric(labels, count)
            for code, count in self._reasons.items():
                reasons.add_metric((code,), count)
            for cause, count in self._failures.items():
                failures.add_metric(cause, count)
            for route, taken in self._durations.items():
                buckets, total = taken.shown()
                durations.add_metric((route,), buckets, total)
        yield from (decisions, reasons, failures, durations)
        yield from self._of_ledgers()
        yield CounterMetricFamily(
            "quotient_connections", "Connections that were made to this process", self.connections
        )

    def _of_ledgers(self) -> Iterator[Metric]:
        """Show how charging goes."""
        ledger = self._ledger
        yield CounterMetricFamily("quotient_ledger_writes", "Writes of ledgers", ledger.writes)
        yield CounterMetricFamily("quotient_ledger_conflicts", "Writes lost to another writer", ledger.conflicts)
        sizes = HistogramMetricFamily("quotient_ledger_batch_size", "Pods that were charged in one write")
        batches = dict(ledger.batches)
        buckets = [
            (str(bound), float(sum(count for size, count in batches.items() if size <= bound))) for bound in BATCH_SIZES
        ]
        buckets.append(("+Inf", float(sum(batches.values()))))
        sizes.add_metric((), buckets, sum(size * count for size, count in batches.items()))
        yield sizes


def verdict(outcome: AdmissionOutcome) -> str:
    """Name what became of a review."""
    if outcome.audited.reasons:
        return "audited"
    if outcome.decision.reasons:
        return "denied"
    return "patched" if outcome.operations else "allowed"

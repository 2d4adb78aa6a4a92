"""The controller's metrics; their names are defined here and nowhere else."""

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from controller.certificate_controller import CertificateStatus
from vcuda.ledger import Ledger, LedgerState

LABELS = ("namespace", "quota", "type", "resource")


class RetryCounts(Protocol):
    """How many workloads wait for pods, and how often one was retried."""

    retries: int

    @property
    def waiting(self) -> int: ...


class Metrics:
    """Computes the series from the ledgers at each scrape."""

    def __init__(
        self,
        ledgers: Callable[[], Mapping[str, Ledger]],
        lag_s: Callable[[], float],
        is_leading: Callable[[], bool],
        certificates: Callable[[], CertificateStatus],
        retries: RetryCounts | None = None,
    ) -> None:
        self._retries = retries
        self._ledgers, self._lag_s, self._is_leading, self._certificates = ledgers, lag_s, is_leading, certificates
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the series. Only the leader exports quotas and certificates: sums over replicas count them once."""
        leading = self._is_leading()
        yield GaugeMetricFamily(
            "quotient_controller_leading", "1 if this process is the leader, 0 if it is a standby", float(leading)
        )
        yield GaugeMetricFamily(
            "quotient_controller_lag_seconds",
            "Age of the oldest change in a namespace that has not been reconciled yet",
            self._lag_s(),
        )
        if leading:
            yield from certificate_series(self._certificates())
        if leading and self._retries is not None:
            yield from retry_series(self._retries)
        ledgers = self._ledgers() if leading else {}
        closed = sum(ledger.state is not LedgerState.OPEN for ledger in ledgers.values())
        yield GaugeMetricFamily("quotient_ledgers", "Namespaces that have a ledger", float(len(ledgers)))
        yield GaugeMetricFamily(
            "quotient_ledgers_closed", "Ledgers that were lost and are being rebuilt; they admit no pod", float(closed)
        )
        hard = GaugeMetricFamily("quotient_quota_hard", "Limit of a quota (cores, MiB or pods)", labels=LABELS)
        used = GaugeMetricFamily("quotient_quota_used", "Charged for pods that exist", labels=LABELS)
        reserved = GaugeMetricFamily(
            "quotient_quota_reserved", "Charged for admitted pods that have not been seen yet", labels=LABELS
        )
        for namespace, ledger in ledgers.items():
            usage = ledger.usage
            for key, limit in usage.hard.items():
                labels = (namespace, *key)
                hard.add_metric(labels, limit)
                used.add_metric(labels, usage.used[key])
                reserved.add_metric(labels, usage.reserved[key])
        yield from (hard, used, reserved)


def retry_series(counts: RetryCounts) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "quotient_workloads_waiting", "Workloads with GPU pods that lack some of them", float(counts.waiting)
    )
    yield CounterMetricFamily(
        "quotient_workload_retries", "Updates of workloads that made Kubernetes create pods at once", counts.retries
    )


def certificate_series(status: CertificateStatus) -> Iterator[Metric]:
    if status.certificates.current is not None:
        yield GaugeMetricFamily(
            "quotient_ca_not_after_seconds",
            "When the CA that signs serving certificates expires, in seconds since 1970",
            status.certificates.current.not_after.timestamp(),
        )
    step = GaugeMetricFamily(
        "quotient_certificates_step",
        "1 for the last step of certificate rotation; rest: nothing to do, wait: waiting for callers or replicas",
        labels=["step"],
    )
    step.add_metric([status.last_step.step.value], 1.0)
    yield step

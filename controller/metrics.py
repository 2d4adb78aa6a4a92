"""What the controller measures, under the names that stand here and nowhere else."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from controller.certificate_controller import CertificateStatus
from vcuda.ledger import Ledger, LedgerState

LABELS = ("namespace", "quota", "type", "resource")


class Metrics:
    """The series of one controller, made of its ledgers when somebody looks."""

    def __init__(
        self,
        ledgers: Callable[[], Mapping[str, Ledger]],
        lag_s: Callable[[], float],
        is_leading: Callable[[], bool],
        certificates: Callable[[], CertificateStatus],
    ) -> None:
        self._ledgers, self._lag_s, self._is_leading, self._certificates = ledgers, lag_s, is_leading, certificates
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Show how things stand; quotas are shown by the leader alone, so that they are not counted twice."""
        leading = self._is_leading()
        yield GaugeMetricFamily("quotient_controller_leading", "Whether this process is the leader", float(leading))
        yield GaugeMetricFamily(
            "quotient_controller_lag_seconds", "How long the oldest change waits to be accounted for", self._lag_s()
        )
        if leading:
            yield from certificate_series(self._certificates())
        ledgers = self._ledgers() if leading else {}
        closed = sum(ledger.state is not LedgerState.OPEN for ledger in ledgers.values())
        yield GaugeMetricFamily("quotient_ledgers", "Namespaces that have a ledger", float(len(ledgers)))
        yield GaugeMetricFamily("quotient_ledgers_closed", "Ledgers that are being rebuilt", float(closed))
        hard = GaugeMetricFamily("quotient_quota_hard", "What a quota allows", labels=LABELS)
        used = GaugeMetricFamily("quotient_quota_used", "What pods use of it", labels=LABELS)
        reserved = GaugeMetricFamily("quotient_quota_reserved", "What is reserved for pods to come", labels=LABELS)
        for namespace, ledger in ledgers.items():
            usage = ledger.usage
            for key, most in usage.hard.items():
                labels = (namespace, *key)
                hard.add_metric(labels, most)
                used.add_metric(labels, usage.used[key])
                reserved.add_metric(labels, usage.reserved[key])
        yield from (hard, used, reserved)


def certificate_series(found: CertificateStatus) -> Iterator[Metric]:
    """Show how long the CA is good, and what is being done about certificates."""
    if found.kept.current is not None:
        yield GaugeMetricFamily(
            "quotient_ca_not_after_seconds",
            "When the CA that signs now expires, in seconds since 1970",
            found.kept.current.not_after.timestamp(),
        )
    step = GaugeMetricFamily(
        "quotient_certificates_step",
        "The last step of keeping certificates; rest and wait are no step",
        labels=["step"],
    )
    step.add_metric([found.last.step.value], 1.0)
    yield step

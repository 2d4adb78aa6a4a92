"""What the controller measures, under the names that stand here and nowhere else."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from vcuda.ledger import Ledger, State

LABELS = ("namespace", "quota", "type", "resource")


class Metrics:
    """The series of one controller, made of its ledgers when somebody looks."""

    def __init__(
        self, ledgers: Callable[[], Mapping[str, Ledger]], lag_s: Callable[[], float], is_leading: Callable[[], bool]
    ) -> None:
        self._ledgers, self._lag_s, self._is_leading = ledgers, lag_s, is_leading
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Show how things stand; quotas are shown by the leader alone, so that they are not counted twice."""
        leading = self._is_leading()
        yield GaugeMetricFamily("quotient_controller_leading", "Whether this process is the leader", float(leading))
        yield GaugeMetricFamily(
            "quotient_controller_lag_seconds", "How long the oldest change waits to be accounted for", self._lag_s()
        )
        ledgers = self._ledgers() if leading else {}
        closed = sum(ledger.state is not State.OPEN for ledger in ledgers.values())
        yield GaugeMetricFamily("quotient_ledgers", "Namespaces that have a ledger", float(len(ledgers)))
        yield GaugeMetricFamily("quotient_ledgers_closed", "Ledgers that are being rebuilt", float(closed))
        hard = GaugeMetricFamily("quotient_quota_hard", "What a quota allows", labels=LABELS)
        used = GaugeMetricFamily("quotient_quota_used", "What pods use of it", labels=LABELS)
        reserved = GaugeMetricFamily("quotient_quota_reserved", "What is reserved for pods to come", labels=LABELS)
        for namespace, ledger in ledgers.items():
            standing = ledger.standing
            for key, most in standing.hard.items():
                labels = (namespace, *key)
                hard.add_metric(labels, most)
                used.add_metric(labels, standing.used[key])
                reserved.add_metric(labels, standing.reserved[key])
        yield from (hard, used, reserved)

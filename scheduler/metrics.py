"""The scheduler's metrics. Series are documented in docs/scheduler.md."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# Filter takes a millisecond for 1,000 nodes; a binding some, and seconds when the API server is slow.
BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 20.0)

# Returns the present value of each gauge, by name.
Gauges = Callable[[], dict[str, float]]
GAUGE_HELP = {
    "quotient_scheduler_active": "1 if this extender answers: the kube-scheduler of its pod holds the Lease",
    "quotient_scheduler_nodes": "nodes with GPUs",
    "quotient_scheduler_claims": "pods that hold GPUs and are not known to be bound",
    "quotient_scheduler_waiting_pods": "pods that fitted on no node when they were last filtered",
    "quotient_scheduler_longest_wait_seconds": "how long the pod has waited that was refused first",
    "quotient_scheduler_free_cores": "cores of usable GPUs that no pod holds",
    "quotient_scheduler_learning": "1 while the estimate of the workload is loaded or computed again",
}


class Metrics:
    def __init__(self, gauges: Gauges) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "quotient_scheduler_requests",
            "requests of kube-scheduler, by verb and result",
            ["verb", "result"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "quotient_scheduler_request_seconds",
            "time to answer a request, by verb",
            ["verb"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.requeued = Counter(
            "quotient_scheduler_requeued_pods", "pods requeued because there was room", registry=self.registry
        )
        self.registry.register(GaugeCollector(gauges))


class GaugeCollector(Collector):
    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(name, GAUGE_HELP[name], value=value)

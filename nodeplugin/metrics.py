"""The Prometheus metrics of the node plugin; their names appear in this module only.

The first four are those of gpu-manager, with its names, labels and units (MiB, percent), so that its dashboards keep
working. All others are named `quotient_*` and use base units (bytes, ratios).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nodeplugin.limit_checks import limits_hold
from nodeplugin.sampling import CardSample, ContainerSample, Sample
from vcuda.isolation import COMPUTE, MEMORY, Rung
from vcuda.memory_units import MIB
from vcuda.vocabulary import CORES_PER_CARD

POD_LABELS = ("pod_name", "namespace", "node", "container_name")
CARD_LABELS = ("node", "uuid", "index", "model")
CONTAINER_LABELS = ("namespace", "pod", "container", "node", "uuid")
# Seconds. Fine around 20 ms, the target for all calls of one container.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.5)
TOTAL = "total"


class Metrics:
    """The metrics of one node. The functions are called on every scrape; `residual_of` returns None if not known."""

    def __init__(
        self,
        node: str,
        sample: Callable[[], Sample],
        xids: Callable[[], Mapping[tuple[str, int], int]],
        status: Callable[[], Mapping[str, float]],
        residual_of: Callable[[ContainerSample], int | None] = lambda _: None,
    ) -> None:
        self._residual_of = residual_of
        self._node, self._sample, self._xids, self._status = node, sample, xids, status
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._seconds = Histogram(
            "quotient_allocation_seconds",
            "Duration of the kubelet's device plugin calls, in seconds",
            ["step"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._refused = Counter(
            "quotient_allocations_refused",
            "Device plugin calls of the kubelet that returned an error",
            ["step"],
            registry=self.registry,
        )

    def observe(self, step: str, seconds: float, succeeded: bool) -> None:  # noqa: FBT001 - passed as a plain callable
        """Record one call of the kubelet; `step` is prefer, allocate or start."""
        self._seconds.labels(step).observe(seconds)
        if not succeeded:
            self._refused.labels(step).inc()

    def collect(self) -> Iterator[Metric]:
        """Compute the current values; the registry calls this on every scrape."""
        sample = self._sample()
        yield from gpu_manager_metrics(self._node, sample.containers)
        yield from card_metrics(self._node, sample)
        yield from container_metrics(self._node, sample.containers)
        yield from limit_metrics(self._node, sample.containers)
        yield residual_metric(self._node, sample.containers, self._residual_of)
        xids = CounterMetricFamily(
            "quotient_gpu_xid_errors", "XID errors that the driver reported", labels=["node", "uuid", "xid"]
        )
        for (uuid, xid), count in sorted(self._xids().items()):
            xids.add_metric([self._node, uuid, str(xid)], count)
        yield xids
        for name, value in self._status().items():
            yield GaugeMetricFamily(f"quotient_nodeplugin_{name}", STATUS_HELP[name], value)


STATUS_HELP = {
    "registered": "1 if the kubelet watches the devices of both resources, else 0",
    "registrations": "Registrations with the kubelet since the plugin started",
    "api_age_seconds": "Seconds since the last contact with the API server",
    "health_age_seconds": "Seconds since all cards were last checked",
    "pods": "Pods with allocated GPUs on this node",
}


def residual_metric(
    node: str, samples: Iterable[ContainerSample], residual_of: Callable[[ContainerSample], int | None]
) -> Metric:
    residual = GaugeMetricFamily(
        "quotient_container_memory_residual_bytes",
        "Memory that NVML shows of a container beyond what its preloaded library has accounted",
        labels=CONTAINER_LABELS,
    )
    for each in samples:
        add_known(residual, container_labels(node, each), residual_of(each))
    return residual


def gpu_manager_metrics(node: str, samples: Iterable[ContainerSample]) -> Iterator[Metric]:
    used = GaugeMetricFamily(
        "container_gpu_utilization", "GPU utilization of a container, in percent of a card", labels=[*POD_LABELS, "gpu"]
    )
    used_memory = GaugeMetricFamily(
        "container_gpu_memory_total", "GPU memory used by a container, in MiB", labels=[*POD_LABELS, "gpu_memory"]
    )
    allocated = GaugeMetricFamily(
        "container_request_gpu_utilization",
        "GPU share allocated to a container, in cards",
        labels=[*POD_LABELS, "req_of_gpu"],
    )
    allocated_memory = GaugeMetricFamily(
        "container_request_gpu_memory",
        "GPU memory allocated to a container, in MiB",
        labels=[*POD_LABELS, "req_of_gpu_memory"],
    )
    for labels, parts in group_by_container(node, samples).items():
        for each in parts:
            card = f"gpu{each.card.index}"
            add_known(used, [*labels, card], each.utilization)
            add_known(used_memory, [*labels, card], each.measured_mib)
        add_known(used, [*labels, TOTAL], known_sum(each.utilization for each in parts))
        add_known(used_memory, [*labels, TOTAL], known_sum(each.measured_mib for each in parts))
        allocated.add_metric([*labels, TOTAL], sum(each.allocated.cores for each in parts) / CORES_PER_CARD)
        allocated_memory.add_metric([*labels, TOTAL], sum(each.allocated.memory_mib for each in parts))
    yield from (used, used_memory, allocated, allocated_memory)


def add_known(family: GaugeMetricFamily, labels: Sequence[str], value: float | None) -> None:
    """Add a series, but for None: 0 would claim a measurement that does not exist."""
    if value is not None:
        family.add_metric(labels, value)


def known_sum(values: Iterable[int | None]) -> int | None:
    """Return the sum of values, None if one of them is not known."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def group_by_container(node: str, samples: Iterable[ContainerSample]) -> dict[tuple[str, ...], list[ContainerSample]]:
    """Group the samples of a container on its cards, by the values of POD_LABELS."""
    groups: dict[tuple[str, ...], list[ContainerSample]] = {}
    for each in samples:
        metadata = each.pod.metadata
        groups.setdefault((metadata.name, metadata.namespace, node, each.container), []).append(each)
    return groups


# Name, help, and the value of a card; None if it is not known.
CARD_METRICS: dict[str, tuple[str, Callable[[CardSample], float | None]]] = {
    "quotient_gpu_healthy": ("1 if a card is healthy, else 0", lambda each: float(each.condition.healthy)),
    "quotient_gpu_cordoned": (
        "1 if a card is cordoned and takes no new containers, else 0",
        lambda each: float(bool(each.condition.cordon)),
    ),
    "quotient_gpu_cores_allocated": (
        "Cores of a card allocated to pods, in hundredths of the card",
        lambda each: each.allocated_cores,
    ),
    "quotient_gpu_memory_bytes": (
        "Memory of a card, in bytes; 0 if the driver does not report it",
        lambda each: each.card.memory_mib * MIB,
    ),
    "quotient_gpu_memory_allocated_bytes": (
        "Memory of a card allocated to pods, in bytes",
        lambda each: each.allocated_mib * MIB,
    ),
    "quotient_gpu_memory_used_bytes": (
        "Memory of a card in use, in bytes",
        lambda each: None if each.usage.used_mib is None else each.usage.used_mib * MIB,
    ),
    "quotient_gpu_utilization_ratio": (
        "Utilization of a card, from 0 to 1",
        lambda each: None if each.usage.utilization is None else each.usage.utilization / 100,
    ),
    "quotient_gpu_temperature_celsius": (
        "Temperature of a card, in degrees Celsius",
        lambda each: each.usage.temperature_c,
    ),
    "quotient_gpu_power_watts": ("Power draw of a card, in watts", lambda each: each.usage.power_w),
}


def card_metrics(node: str, sample: Sample) -> Iterator[Metric]:
    for name, (text, value_of) in CARD_METRICS.items():
        family = GaugeMetricFamily(name, text, labels=CARD_LABELS)
        for each in sample.cards:
            add_known(family, [node, each.card.uuid, str(each.card.index), each.card.model], value_of(each))
        yield family
    foreign = GaugeMetricFamily(
        "quotient_gpu_foreign_processes",
        "Processes on a card that belong to no container to which the card is allocated",
        labels=CARD_LABELS,
    )
    for each in sample.cards:
        count = sum(card.uuid == each.card.uuid for card, _ in sample.foreign_processes)
        is_known = each.usage.processes is not None
        labels = [node, each.card.uuid, str(each.card.index), each.card.model]
        add_known(foreign, labels, count if is_known else None)
    yield foreign


def container_metrics(node: str, samples: Iterable[ContainerSample]) -> Iterator[Metric]:
    """Yield one series per container and card."""
    families = {
        name: GaugeMetricFamily(name, text, labels=CONTAINER_LABELS)
        for name, text in {
            "quotient_container_cores": "Cores of a card allocated to a container, in hundredths of the card",
            "quotient_container_memory_bytes": "Memory of a card allocated to a container, in bytes",
            "quotient_container_memory_used_bytes": "Memory of a card used by a container, in bytes",
            "quotient_container_utilization_ratio": "Utilization of a card by a container, from 0 to 1",
        }.items()
    }
    isolated = GaugeMetricFamily(
        "quotient_container_isolated",
        "1 if the memory limit of a container is enforced, by the mechanism in the label isolation, else 0",
        labels=[*CONTAINER_LABELS, "isolation"],
    )
    for each in samples:
        labels = container_labels(node, each)
        values = (
            each.allocated.cores,
            each.allocated.memory_mib * MIB,
            None if each.measured_mib is None else each.measured_mib * MIB,
            None if each.utilization is None else each.utilization / 100,
        )
        for family, value in zip(families.values(), values, strict=True):
            add_known(family, labels, value)
        mechanism = each.isolation.memory
        isolated.add_metric([*labels, mechanism], float(mechanism is not Rung.NONE))
    yield from (*families.values(), isolated)


def limit_metrics(node: str, samples: Iterable[ContainerSample]) -> Iterator[Metric]:
    """Yield whether the limits of containers hold; what is not known is omitted."""
    holds = GaugeMetricFamily(
        "quotient_container_limit_holds",
        "1 if a limit of a container holds now, as NVML shows it, else 0; by what it is enforced is the label rung",
        labels=[*CONTAINER_LABELS, "dimension", "rung"],
    )
    over = GaugeMetricFamily(
        "quotient_container_memory_over_limit_bytes",
        "Memory of a card that a container uses beyond its limit, in bytes",
        labels=CONTAINER_LABELS,
    )
    for each in samples:
        labels, checks = container_labels(node, each), limits_hold(each)
        for dimension, check in ((MEMORY, checks.memory), (COMPUTE, checks.compute)):
            if check.holds is not None:
                holds.add_metric([*labels, dimension, check.rung], float(check.holds))
        if checks.memory.over_mib is not None:
            over.add_metric(labels, checks.memory.over_mib * MIB)
    yield from (holds, over)


def container_labels(node: str, sample: ContainerSample) -> list[str]:
    """Return the values of CONTAINER_LABELS."""
    metadata = sample.pod.metadata
    return [metadata.namespace, metadata.name, sample.container, node, sample.card.uuid]

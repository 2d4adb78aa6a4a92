"""What the node plugin measures, under the names that stand here and nowhere else.

The first four are gpu-manager's, with its labels: dashboards of its time go on working. Memory is in MiB there, and in
bytes everywhere else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nodeplugin.sampling import CardSample, ContainerSample, Sample
from vcuda.memory_units import MIB
from vcuda.vocabulary import CORES_PER_CARD

POD_LABELS = ("pod_name", "namespace", "node", "container_name")
CARD_LABELS = ("node", "uuid", "index", "model")
CONTAINER_LABELS = ("namespace", "pod", "container", "node", "uuid")
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.5)
TOTAL = "total"


class Metrics:
    """The series of one node."""

    def __init__(
        self,
        node: str,
        sample: Callable[[], Sample],
        xids: Callable[[], Mapping[tuple[str, int], int]],
        standing: Callable[[], Mapping[str, float]],
        isolation: str = "none",
    ) -> None:
        self._node, self._sample, self._xids, self._standing, self._isolation = node, sample, xids, standing, isolation
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._seconds = Histogram(
            "quotient_allocation_seconds",
            "How long the kubelet's calls took",
            ["step"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._refused = Counter(
            "quotient_allocations_refused", "The kubelet's calls that were refused", ["step"], registry=self.registry
        )

    def observe(self, step: str, seconds: float, went_well: bool) -> None:  # noqa: FBT001 - the only thing to say of it
        """Note a call of the kubelet's."""
        self._seconds.labels(step).observe(seconds)
        if not went_well:
            self._refused.labels(step).inc()

    def collect(self) -> Iterator[Metric]:
        """Measure now."""
        sample = self._sample()
        yield from ancestors_series(self._node, sample.containers)
        yield from card_series(self._node, sample)
        yield from container_series(self._node, sample.containers, self._isolation)
        xids = CounterMetricFamily(
            "quotient_gpu_xid_errors", "Errors that the driver reported", labels=["node", "uuid", "xid"]
        )
        for (uuid, xid), count in sorted(self._xids().items()):
            xids.add_metric([self._node, uuid, str(xid)], count)
        yield xids
        for name, value in self._standing().items():
            yield GaugeMetricFamily(f"quotient_nodeplugin_{name}", STANDING[name], value)


STANDING = {
    "registered": "Whether the kubelet listens to both resources",
    "registrations": "How often the kubelet was registered with since the start",
    "api_age_seconds": "How long ago the API server was heard of",
    "health_age_seconds": "How long ago the cards were looked at",
    "pods": "Pods that hold GPUs here",
}


def ancestors_series(node: str, containers: Iterable[ContainerSample]) -> Iterator[Metric]:
    """Give gpu-manager's series."""
    used = GaugeMetricFamily(
        "container_gpu_utilization", "Percent of a card's time that a container uses", labels=[*POD_LABELS, "gpu"]
    )
    memory = GaugeMetricFamily(
        "container_gpu_memory_total", "MiB that a container uses", labels=[*POD_LABELS, "gpu_memory"]
    )
    wanted = GaugeMetricFamily(
        "container_request_gpu_utilization", "Cards that a container was given", labels=[*POD_LABELS, "req_of_gpu"]
    )
    wanted_memory = GaugeMetricFamily(
        "container_request_gpu_memory", "MiB that a container was given", labels=[*POD_LABELS, "req_of_gpu_memory"]
    )
    for labels, parts in by_container(node, containers).items():
        for each in parts:
            card = f"gpu{each.card.index}"
            used.add_metric([*labels, card], each.utilization)
            memory.add_metric([*labels, card], each.used_mib)
        used.add_metric([*labels, TOTAL], sum(each.utilization for each in parts))
        memory.add_metric([*labels, TOTAL], sum(each.used_mib for each in parts))
        wanted.add_metric([*labels, TOTAL], sum(each.given.cores for each in parts) / CORES_PER_CARD)
        wanted_memory.add_metric([*labels, TOTAL], sum(each.given.memory_mib for each in parts))
    yield from (used, memory, wanted, wanted_memory)


def by_container(node: str, samples: Iterable[ContainerSample]) -> dict[tuple[str, ...], list[ContainerSample]]:
    """Put the cards of each container together, under its labels."""
    found: dict[tuple[str, ...], list[ContainerSample]] = {}
    for each in samples:
        metadata = each.pod.metadata
        found.setdefault((metadata.name, metadata.namespace, node, each.container), []).append(each)
    return found


CARD_SERIES: dict[str, tuple[str, Callable[[CardSample], float | None]]] = {
    "quotient_gpu_healthy": ("Whether a card is well", lambda each: float(each.condition.healthy)),
    "quotient_gpu_cordoned": ("Whether a card takes nothing new", lambda each: float(bool(each.condition.cordon))),
    "quotient_gpu_cores_allocated": ("Hundredths of a card that pods hold", lambda each: each.cores_held),
    "quotient_gpu_memory_bytes": ("A card's memory", lambda each: each.card.memory_mib * MIB),
    "quotient_gpu_memory_allocated_bytes": ("Memory that pods hold of a card", lambda each: each.held_mib * MIB),
    "quotient_gpu_memory_used_bytes": (
        "Memory of a card that is in use",
        lambda each: None if each.usage.used_mib is None else each.usage.used_mib * MIB,
    ),
    "quotient_gpu_utilization_ratio": (
        "Part of its time in which a card works",
        lambda each: None if each.usage.utilization is None else each.usage.utilization / 100,
    ),
    "quotient_gpu_temperature_celsius": ("How warm a card is", lambda each: each.usage.temperature_c),
    "quotient_gpu_power_watts": ("What a card draws", lambda each: each.usage.power_w),
}


def card_series(node: str, sample: Sample) -> Iterator[Metric]:
    """Give the series of cards."""
    for name, (told, value) in CARD_SERIES.items():
        family = GaugeMetricFamily(name, told, labels=CARD_LABELS)
        for each in sample.cards:
            if (found := value(each)) is not None:
                family.add_metric([node, each.card.uuid, str(each.card.index), each.card.model], found)
        yield family
    strangers = GaugeMetricFamily(
        "quotient_gpu_foreign_processes",
        "Processes on a card that belong to no container which has a part of it",
        labels=CARD_LABELS,
    )
    for each in sample.cards:
        count = sum(card.uuid == each.card.uuid for card, _ in sample.strangers)
        strangers.add_metric([node, each.card.uuid, str(each.card.index), each.card.model], count)
    yield strangers


def container_series(node: str, containers: Iterable[ContainerSample], isolation: str) -> Iterator[Metric]:
    """Give the series of containers, on each of their cards."""
    series = {
        name: GaugeMetricFamily(name, told, labels=CONTAINER_LABELS)
        for name, told in {
            "quotient_container_cores": "Hundredths of a card that a container was given",
            "quotient_container_memory_bytes": "Memory of a card that a container was given",
            "quotient_container_memory_used_bytes": "Memory of a card that a container uses",
            "quotient_container_utilization_ratio": "Part of a card's time that a container uses",
        }.items()
    }
    limited = GaugeMetricFamily(
        "quotient_container_isolated",
        "Whether a container's limits really hold, and by what; whole cards need nothing to hold them",
        labels=[*CONTAINER_LABELS, "isolation"],
    )
    for each in containers:
        metadata = each.pod.metadata
        labels = [metadata.namespace, metadata.name, each.container, node, each.card.uuid]
        values = (each.given.cores, each.given.memory_mib * MIB, each.used_mib * MIB, each.utilization / 100)
        for family, value in zip(series.values(), values, strict=True):
            family.add_metric(labels, value)
        holds = isolation_of(each, isolation)
        limited.add_metric([*labels, holds], float(holds != "none"))
    yield from (*series.values(), limited)


def isolation_of(each: ContainerSample, isolation: str) -> str:
    """Say what holds a container to its share."""
    return "exclusive" if each.given.cores >= CORES_PER_CARD else isolation

"""The controller's informers, and lookups that combine them."""

from typing import cast

from cluster.gpu_nodes import GpuNode, gpu_node_of
from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import CONFIG_MAPS, NAMESPACES, NODES, PODS, ConfigMap, Kind, Namespace
from controller.pod_usage import PodUsage, actual_charge, pod_usage_of
from ledger.ledger_store import LEDGER_SELECTOR
from ledger.quota_cache import QuotaCache
from vcuda.catalogue import CardModel
from vcuda.gpu_model import matches, parse_model
from vcuda.ledger import LedgerState, PodKey
from vcuda.names import CATALOGUE, LEDGER_KEY, LEDGER_PREFIX, STATUS_LABEL
from vcuda.quota_usage import Charge
from vcuda.scheme import Scheme

BY_NAMESPACE = "namespace"
# As it is in the JSON of a ledger: to find it, thousands of ledgers need not be decoded.
WANTED = f'"state":"{LedgerState.REQUESTED}"'


class ControllerCaches:
    """Caches of GPU pods, nodes, namespaces, ledgers, statuses and the catalogue, and the quota cache.

    Its caller starts and stops the quota cache.
    """

    def __init__(self, cluster: Cluster, scheme: Scheme, system_namespace: str, quotas: QuotaCache) -> None:
        self.quotas = quotas
        self._system_namespace, self._unit_mib = system_namespace, scheme.unit_mib
        # The casts: an informer with `convert` caches other objects than the API server sends for its kind.
        self.pods: Informer[PodUsage] = Informer(
            cluster,
            cast("Kind[PodUsage]", PODS),
            convert=lambda pod: pod_usage_of(pod, scheme),
            indexes={BY_NAMESPACE: lambda pod: pod.metadata.namespace},
        )
        self.nodes: Informer[GpuNode] = Informer(
            cluster, cast("Kind[GpuNode]", NODES), convert=lambda node: gpu_node_of(node, scheme)
        )
        self.namespaces = Informer(cluster, NAMESPACES)
        self.ledgers = Informer(cluster, CONFIG_MAPS, system_namespace, LEDGER_SELECTOR)
        self.statuses = Informer(cluster, CONFIG_MAPS, selector=Selector(labels=STATUS_LABEL))
        self.catalogue = Informer(cluster, CONFIG_MAPS, system_namespace, Selector(fields=f"metadata.name={CATALOGUE}"))
        # Charges of bound pods, each with the pod and the node it was computed from. No lock: only the worker that has
        # the pod's namespace writes an entry, and losing one costs a computation.
        self._charges: dict[PodKey, tuple[PodUsage, GpuNode, Charge | None]] = {}
        self.pods.on_change(self._on_pod_change)

    @property
    def informers(
        self,
    ) -> tuple[Informer[PodUsage] | Informer[GpuNode] | Informer[Namespace] | Informer[ConfigMap], ...]:
        """All informers but those of the quota cache."""
        return self.pods, self.nodes, self.namespaces, self.ledgers, self.statuses, self.catalogue

    @property
    def synced(self) -> bool:
        return self.quotas.synced and all(informer.synced for informer in self.informers)

    @property
    def alive(self) -> bool:
        return all(informer.alive for informer in self.informers)

    def start(self) -> None:
        for informer in self.informers:
            informer.start()

    def stop(self) -> None:
        for informer in self.informers:
            informer.stop()

    def pods_in(self, namespace: str) -> list[PodUsage]:
        """Return the GPU pods of a namespace, ended ones included."""
        return self.pods.by_index(BY_NAMESPACE, namespace)

    def namespaces_on(self, node: str) -> set[str]:
        """Return the namespaces that have GPU pods on a node."""
        return {pod.metadata.namespace for pod in self.pods.all() if pod.node == node}

    def ledger_of(self, namespace: str) -> ConfigMap | None:
        return self.ledgers.get(LEDGER_PREFIX + namespace, self._system_namespace)

    def has_ledgers(self) -> bool:
        """Whether the cluster has any ledger; one that is only requested does not count."""
        return any(WANTED not in config_map.data.get(LEDGER_KEY, "") for config_map in self.ledgers.all())

    def needs_ledger(self, namespace: str) -> bool:
        """Whether a namespace without a ledger should get one: it has a quota, an invalid one, or GPU pods."""
        quotas = self.quotas.namespace_quotas(namespace)
        return bool(quotas.quotas or quotas.mistakes or self.pods_in(namespace))

    def node_of(self, pod: PodUsage) -> GpuNode | None:
        """Return the node of a bound pod; None if it is not bound, or its node is not cached."""
        return self.nodes.get(pod.node) if pod.node else None

    def charge_of(self, pod: PodUsage) -> Charge | None:
        """Return what a bound pod really uses; computed once for each version of the pod and its node."""
        node = self.node_of(pod)
        if node is None:
            return None
        cached = self._charges.get(pod.key)
        if cached is not None and cached[0] is pod and cached[1] is node:
            return cached[2]
        charge = actual_charge(pod, node, self._unit_mib, self._largest_mib)
        self._charges[pod.key] = pod, node, charge
        return charge

    def _largest_mib(self, model: str, pool: str) -> int:
        """Return the memory of the largest GPU of a model, in the pool if it has one: what admission charges."""
        matching = [card for card in self.cards() if matches(model, parse_model(card.model))]
        return max((card.memory_mib for card in matching if card.pool == pool), default=0) or max(
            (card.memory_mib for card in matching), default=0
        )

    def cards(self) -> set[CardModel]:
        """Return the distinct GPU models of the cluster, by memory and pool."""
        return {card for node in self.nodes.all() for card in node.cards()}

    def _on_pod_change(self, old: PodUsage | None, new: PodUsage | None) -> None:
        if new is None and old is not None:
            self._charges.pop(old.key, None)

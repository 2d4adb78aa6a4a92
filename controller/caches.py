"""What the controller sees of the cluster: a cache of each kind it has to know, and what follows from them."""

from typing import cast

from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import CONFIG_MAPS, NAMESPACES, NODES, PODS, ConfigMap, Kind, Namespace
from controller.pod_usage import GpuNode, PodUsage, actual_charge, gpu_node_of, pod_usage_of
from ledger.ledger_store import LEDGER_SELECTOR
from ledger.quota_cache import QuotaCache
from vcuda.catalogue import CardModel
from vcuda.charging import Charge
from vcuda.gpu_model import matches, parse_model
from vcuda.ledger import LedgerState, PodKey
from vcuda.names import CATALOGUE, LEDGER_KEY, LEDGER_PREFIX, STATUS_LABEL
from vcuda.scheme import Scheme

BY_NAMESPACE = "namespace"
WANTED = f'"state":"{LedgerState.WANTED}"'


class ControllerCaches:
    """Follows pods, nodes, namespaces, ledgers and what is shown of them; and knows the quotas."""

    def __init__(self, cluster: Cluster, scheme: Scheme, system_namespace: str, quotas: QuotaCache) -> None:
        self.quotas = quotas
        self._system_namespace, self._unit_mib = system_namespace, scheme.unit_mib
        self.pods: Informer[PodUsage] = Informer(
            cluster,
            cast("Kind[PodUsage]", PODS),
            convert=lambda pod: pod_usage_of(pod, scheme),
            indexes={BY_NAMESPACE: lambda held: held.metadata.namespace},
        )
        self.nodes: Informer[GpuNode] = Informer(
            cluster, cast("Kind[GpuNode]", NODES), convert=lambda node: gpu_node_of(node, scheme)
        )
        self.namespaces = Informer(cluster, NAMESPACES)
        self.ledgers = Informer(cluster, CONFIG_MAPS, system_namespace, LEDGER_SELECTOR)
        self.statuses = Informer(cluster, CONFIG_MAPS, selector=Selector(labels=STATUS_LABEL))
        self.catalogue = Informer(cluster, CONFIG_MAPS, system_namespace, Selector(fields=f"metadata.name={CATALOGUE}"))
        self._actual: dict[PodKey, tuple[PodUsage, GpuNode, Charge | None]] = {}
        self.pods.on_change(self._pod_changed)

    @property
    def informers(
        self,
    ) -> tuple[Informer[PodUsage] | Informer[GpuNode] | Informer[Namespace] | Informer[ConfigMap], ...]:
        """What is followed, beside the quotas."""
        return self.pods, self.nodes, self.namespaces, self.ledgers, self.statuses, self.catalogue

    @property
    def synced(self) -> bool:
        """Whether everything is known."""
        return self.quotas.synced and all(informer.synced for informer in self.informers)

    @property
    def alive(self) -> bool:
        """Whether everything is still followed."""
        return all(each.alive for each in self.informers)

    def start(self) -> None:
        """Begin to follow."""
        for informer in self.informers:
            informer.start()

    def stop(self) -> None:
        """End."""
        for informer in self.informers:
            informer.stop()

    def pods_in(self, namespace: str) -> list[PodUsage]:
        """Give the GPU pods of a namespace."""
        return self.pods.by_index(BY_NAMESPACE, namespace)

    def namespaces_on(self, node: str) -> set[str]:
        """Name the namespaces that have GPU pods on a node."""
        return {held.metadata.namespace for held in self.pods.all() if held.node == node}

    def ledger_of(self, namespace: str) -> ConfigMap | None:
        """Give a ledger as it was last heard of."""
        return self.ledgers.get(LEDGER_PREFIX + namespace, self._system_namespace)

    def has_ledgers(self) -> bool:
        """Tell whether any ledger was ever begun; one that is only wanted was not."""
        return any(WANTED not in found.data.get(LEDGER_KEY, "") for found in self.ledgers.all())

    def needs_ledger(self, namespace: str) -> bool:
        """Tell whether a namespace without a ledger should have one."""
        governed = self.quotas.namespace_quotas(namespace)
        return bool(governed.quotas or governed.mistakes or self.pods_in(namespace))

    def node_of(self, held: PodUsage) -> GpuNode | None:
        """Give the node that a pod is on, if it is known."""
        return self.nodes.get(held.node) if held.node else None

    def charge_of(self, held: PodUsage) -> Charge | None:
        """Give what a pod really holds; worked out once, until it or its node changes."""
        machine = self.node_of(held)
        if machine is None:
            return None
        before = self._actual.get(held.key)
        if before is not None and before[0] is held and before[1] is machine:
            return before[2]
        charge = actual_charge(held, machine, self._unit_mib, self._largest_mib)
        self._actual[held.key] = held, machine, charge
        return charge

    def _largest_mib(self, model: str, pool: str) -> int:
        """Give the memory of the largest card of a model, in a pool if that has one: as admission charges it."""
        alike = [card for card in self.cards() if matches(model, parse_model(card.model))]
        return max((card.memory_mib for card in alike if card.pool == pool), default=0) or max(
            (card.memory_mib for card in alike), default=0
        )

    def cards(self) -> set[CardModel]:
        """Give the kinds of cards there are."""
        return {card for machine in self.nodes.all() for card in machine.cards()}

    def _pod_changed(self, old: PodUsage | None, new: PodUsage | None) -> None:
        if new is None and old is not None:
            self._actual.pop(old.key, None)

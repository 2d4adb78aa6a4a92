"""What the controller sees of the cluster: a cache of each kind it has to know, and what follows from them."""

from typing import cast

from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import CONFIG_MAPS, NAMESPACES, NODES, PODS, ConfigMap, Kind, Namespace
from controller.holdings import Holding, Machine, charge_of, holding_of, machine_of
from ledger.books import LEDGERS
from ledger.following import QuotaFollower
from vcuda.catalogue import Card
from vcuda.charging import Charge
from vcuda.language import Language
from vcuda.ledger import Key, State
from vcuda.model import matches, parse_model
from vcuda.names import CATALOGUE, LEDGER_KEY, LEDGER_PREFIX, STATUS_LABEL

BY_NAMESPACE = "namespace"
WANTED = f'"state":"{State.WANTED}"'


class Sight:
    """Follows pods, nodes, namespaces, ledgers and what is shown of them; and knows the quotas."""

    def __init__(self, cluster: Cluster, spoken: Language, system_namespace: str, quotas: QuotaFollower) -> None:
        self.quotas = quotas
        self._system_namespace, self._unit_mib = system_namespace, spoken.unit_mib
        self.pods: Informer[Holding] = Informer(
            cluster,
            cast("Kind[Holding]", PODS),
            convert=lambda pod: holding_of(pod, spoken),
            indexes={BY_NAMESPACE: lambda held: held.metadata.namespace},
        )
        self.nodes: Informer[Machine] = Informer(
            cluster, cast("Kind[Machine]", NODES), convert=lambda node: machine_of(node, spoken)
        )
        self.namespaces = Informer(cluster, NAMESPACES)
        self.ledgers = Informer(cluster, CONFIG_MAPS, system_namespace, LEDGERS)
        self.statuses = Informer(cluster, CONFIG_MAPS, selector=Selector(labels=STATUS_LABEL))
        self.catalogue = Informer(cluster, CONFIG_MAPS, system_namespace, Selector(fields=f"metadata.name={CATALOGUE}"))
        self._actual: dict[Key, tuple[Holding, Machine, Charge | None]] = {}
        self.pods.on_change(self._pod_changed)

    @property
    def informers(
        self,
    ) -> tuple[Informer[Holding] | Informer[Machine] | Informer[Namespace] | Informer[ConfigMap], ...]:
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

    def held_in(self, namespace: str) -> list[Holding]:
        """Give the GPU pods of a namespace."""
        return self.pods.indexed(BY_NAMESPACE, namespace)

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
        governed = self.quotas.governance(namespace)
        return bool(governed.quotas or governed.mistakes or self.held_in(namespace))

    def machine_of(self, held: Holding) -> Machine | None:
        """Give the node that a pod is on, if it is known."""
        return self.nodes.get(held.node) if held.node else None

    def charge_of(self, held: Holding) -> Charge | None:
        """Give what a pod really holds; worked out once, until it or its node changes."""
        machine = self.machine_of(held)
        if machine is None:
            return None
        before = self._actual.get(held.key)
        if before is not None and before[0] is held and before[1] is machine:
            return before[2]
        charge = charge_of(held, machine, self._unit_mib, self._largest_mib)
        self._actual[held.key] = held, machine, charge
        return charge

    def _largest_mib(self, model: str, pool: str) -> int:
        """Give the memory of the largest card of a model, in a pool if that has one: as admission charges it."""
        alike = [card for card in self.cards() if matches(model, parse_model(card.model))]
        return max((card.memory_mib for card in alike if card.pool == pool), default=0) or max(
            (card.memory_mib for card in alike), default=0
        )

    def cards(self) -> set[Card]:
        """Give the kinds of cards there are."""
        return {card for machine in self.nodes.all() for card in machine.cards()}

    def _pod_changed(self, old: Holding | None, new: Holding | None) -> None:
        if new is None and old is not None:
            self._actual.pop(old.key, None)

"""The pods that a cluster has already, charged to ledgers as the controller charges them."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from cluster.gpu_nodes import gpu_node_of
from cluster.objects import Node, Pod
from console.errors import CommandError
from controller.accounting import NamespaceView, reconcile_ledger
from controller.pod_usage import PodUsage, actual_charge, counts_against_quota, pod_usage_of
from settings.configuration import Configuration
from vcuda.catalogue import card_sizes_mib
from vcuda.decision import Reason, printable
from vcuda.ledger import Ledger, PodKey
from vcuda.quota_refusals import RemedyContext
from vcuda.scheme import Scheme
from webhook.service import admission_config_of

T = TypeVar("T")


class ExistingPods:
    """The GPU pods of a cluster by namespace, and its nodes. Each object is decoded once, whatever is asked later."""

    def __init__(self, pods: Iterable[Pod], nodes: Iterable[Node], configuration: Configuration) -> None:
        self._configuration, self._config = configuration, admission_config_of(configuration)
        scheme = self._config.scheme
        self._nodes = {node.metadata.name: gpu_node_of(node, scheme) for node in nodes}
        self._cards = {card for node in self._nodes.values() for card in node.cards()}
        self._pods: dict[str, dict[PodKey, PodUsage]] = {}
        for pod in pods:
            if (usage := reduced(pod, pod_usage_of, scheme)) is not None:
                self._pods.setdefault(usage.metadata.namespace, {})[usage.key] = usage

    @property
    def namespaces(self) -> list[str]:
        return list(self._pods)

    def of(self, namespace: str) -> Mapping[PodKey, PodUsage]:
        return self._pods.get(namespace, {})

    def charge(
        self, ledger: Ledger, namespace: str, *, only_bound: bool = False
    ) -> Mapping[PodKey, tuple[Reason, ...]]:
        """Charge the pods of a namespace, also beyond its quota; returns which of those that wait do not fit, and why.

        With `only_bound`, pods without a node are left out.
        """
        now_s, unit_mib, nodes = time.time(), self._configuration.memory_unit_mib, self._nodes
        pods = {key: pod for key, pod in self.of(namespace).items() if pod.node or not only_bound}
        view = NamespaceView(
            pods={key: pod for key, pod in pods.items() if counts_against_quota(pod, nodes.get(pod.node), now_s)},
            gone=frozenset(),
            actual_charge=lambda pod: actual_charge(pod, nodes.get(pod.node), unit_mib),
            cards=card_sizes_mib(self._cards, ledger.policy.pools),
            unit_mib=unit_mib,
            cluster_mode=self._configuration.mode,
            remedies=RemedyContext(self._config.names.use_models, unit_mib),
        )
        return reconcile_ledger(ledger, view, now_s, lambda *_: False).waiting


def reduced(pod: Pod, reduce: Callable[[Pod, Scheme], T], scheme: Scheme) -> T:
    """Reduce a pod; raises CommandError where a dump has what no API server would write: a UID or time of no form."""
    try:
        return reduce(pod, scheme)
    except ValueError as error:
        title = f"Pod {printable(pod.metadata.namespace)}/{printable(pod.metadata.name)}"
        raise CommandError(f"{title}: {error}; dump it with: kubectl get pods -A -o yaml") from None

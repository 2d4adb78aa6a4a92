"""Where admission gets quotas and card models: from the cluster, or fixed ones for offline checks and tests."""

from collections.abc import Mapping, Sequence

from cluster.interface import Cluster
from ledger.catalogue_cache import CatalogueCache
from ledger.ledger_store import LedgerStore
from ledger.quota_cache import QuotaCache
from vcuda.catalogue import CardModel
from vcuda.namespace_policy import NamespacePolicy, combine_policies
from vcuda.quota import Quota
from vcuda.scheme import Scheme


class ClusterQuotaSource:
    """The quotas and card models of a cluster, from caches that informers keep up to date.

    `default` is the quota of namespaces that have none.
    """

    def __init__(self, cluster: Cluster, scheme: Scheme, system_namespace: str, default: Quota | None = None) -> None:
        self._quota_cache = QuotaCache(cluster, scheme, default, LedgerStore(cluster, system_namespace))
        self._catalogue = CatalogueCache(cluster, system_namespace)

    def start(self) -> "ClusterQuotaSource":
        self._quota_cache.start()
        self._catalogue.start()
        return self

    def stop(self) -> None:
        self._quota_cache.stop()
        self._catalogue.stop()

    @property
    def synced(self) -> bool:
        return self._quota_cache.synced and self._catalogue.synced

    @property
    def invalid(self) -> int:
        """The number of quotas that do not parse; the last valid version of each applies."""
        return self._quota_cache.invalid

    @property
    def cards(self) -> Sequence[CardModel]:
        return self._catalogue.cards

    def policy(self, namespace: str) -> NamespacePolicy:
        return self._quota_cache.policy(namespace)

    def quotas(self, namespace: str) -> tuple[Sequence[Quota], Mapping[str, int]]:
        cached = self._quota_cache.namespace_quotas(namespace)
        return cached.quotas, cached.versions


class FixedQuotaSource:
    """Quotas and card models that never change; none by default."""

    def __init__(self, quotas: dict[str, list[Quota]] | None = None, cards: Sequence[CardModel] = ()) -> None:
        self._quotas, self.cards = quotas or {}, cards

    def policy(self, namespace: str) -> NamespacePolicy:
        return combine_policies([quota.policy for quota in self._quotas.get(namespace, ())])

    def quotas(self, namespace: str) -> tuple[Sequence[Quota], Mapping[str, int]]:
        return tuple(self._quotas.get(namespace, ())), {}

"""What admission has to know of the cluster beside the review: quotas, and the cards there are."""

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
    """Quotas and cards, followed in the cluster."""

    def __init__(self, cluster: Cluster, scheme: Scheme, system_namespace: str, default: Quota | None = None) -> None:
        self._follower = QuotaCache(cluster, scheme, default, LedgerStore(cluster, system_namespace))
        self._catalogue = CatalogueCache(cluster, system_namespace)

    def start(self) -> "ClusterQuotaSource":
        """Begin to follow."""
        self._follower.start()
        self._catalogue.start()
        return self

    def stop(self) -> None:
        """End."""
        self._follower.stop()
        self._catalogue.stop()

    @property
    def synced(self) -> bool:
        """Whether everything is known."""
        return self._follower.synced and self._catalogue.synced

    @property
    def invalid(self) -> int:
        """How many quotas do not parse."""
        return self._follower.invalid

    @property
    def cards(self) -> Sequence[CardModel]:
        """The kinds of cards that the cluster has."""
        return self._catalogue.cards

    def policy(self, namespace: str) -> NamespacePolicy:
        """Give what the namespace's quotas say together."""
        return self._follower.policy(namespace)

    def quotas(self, namespace: str) -> tuple[Sequence[Quota], Mapping[str, int]]:
        """Give the namespace's quotas, and the version of each."""
        found = self._follower.namespace_quotas(namespace)
        return found.quotas, found.versions


class FixedQuotaSource:
    """Quotas and cards that are known beforehand: from files, or in a test; none unless given."""

    def __init__(self, quotas: dict[str, list[Quota]] | None = None, cards: Sequence[CardModel] = ()) -> None:
        self._quotas, self.cards = quotas or {}, cards

    def policy(self, namespace: str) -> NamespacePolicy:
        """Give what the namespace's quotas say together."""
        return combine_policies([quota.policy for quota in self._quotas.get(namespace, ())])

    def quotas(self, namespace: str) -> tuple[Sequence[Quota], Mapping[str, int]]:
        """Give the namespace's quotas."""
        return tuple(self._quotas.get(namespace, ())), {}

"""What admission has to know of the cluster beside the review: quotas, and the cards there are."""

from collections.abc import Mapping, Sequence

from cluster.interface import Cluster
from ledger.books import Books
from ledger.cards import CatalogueFollower
from ledger.following import QuotaFollower
from vcuda.catalogue import Card
from vcuda.language import Language
from vcuda.policy import Policy, joined
from vcuda.quota import Quota


class ClusterPolicies:
    """Quotas and cards, followed in the cluster."""

    def __init__(self, cluster: Cluster, spoken: Language, system_namespace: str, default: Quota | None = None) -> None:
        self._follower = QuotaFollower(cluster, spoken, default, Books(cluster, system_namespace))
        self._catalogue = CatalogueFollower(cluster, system_namespace)

    def start(self) -> "ClusterPolicies":
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
    def cards(self) -> Sequence[Card]:
        """The kinds of cards that the cluster has."""
        return self._catalogue.cards

    def policy(self, namespace: str) -> Policy:
        """Give what the namespace's quotas say together."""
        return self._follower.policy(namespace)

    def quotas(self, namespace: str) -> tuple[Sequence[Quota], Mapping[str, int]]:
        """Give the namespace's quotas, and the version of each."""
        found = self._follower.governance(namespace)
        return found.quotas, found.versions


class FixedPolicies:
    """Quotas and cards that are known beforehand: from files, or in a test; none unless given."""

    def __init__(self, quotas: dict[str, list[Quota]] | None = None, cards: Sequence[Card] = ()) -> None:
        self._quotas, self.cards = quotas or {}, cards

    def policy(self, namespace: str) -> Policy:
        """Give what the namespace's quotas say together."""
        return joined([quota.policy for quota in self._quotas.get(namespace, ())])

    def quotas(self, namespace: str) -> tuple[Sequence[Quota], Mapping[str, int]]:
        """Give the namespace's quotas."""
        return tuple(self._quotas.get(namespace, ())), {}

"""Which cards the cluster has, as the controller wrote it down."""

import structlog

from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import CONFIG_MAPS, ConfigMap
from vcuda.catalogue import CardModel, decode_catalogue
from vcuda.names import CATALOGUE, CATALOGUE_KEY


class CatalogueCache:
    """The catalogue of cards, always at hand; empty until there is one."""

    def __init__(self, cluster: Cluster, system_namespace: str) -> None:
        self._informer = Informer(cluster, CONFIG_MAPS, system_namespace, Selector(fields=f"metadata.name={CATALOGUE}"))
        self._informer.on_change(self._changed)
        self.cards: tuple[CardModel, ...] = ()
        self._log = structlog.get_logger()

    def start(self) -> "CatalogueCache":
        """Begin to follow."""
        self._informer.start()
        return self

    def stop(self) -> None:
        """End."""
        self._informer.stop()

    @property
    def synced(self) -> bool:
        """Whether the catalogue is known, if there is one."""
        return self._informer.synced

    def _changed(self, _: ConfigMap | None, after: ConfigMap | None) -> None:
        if after is None:
            return  # the cards are still there; the controller writes them down again
        try:
            self.cards = decode_catalogue(after.data.get(CATALOGUE_KEY, ""))
        except ValueError as wrong:
            self._log.error("catalogue_invalid", wrong=str(wrong))

"""The GPU models of the cluster, cached from the catalogue ConfigMap that the controller writes."""

import structlog

from cluster.informer import Informer
from cluster.interface import Cluster, Selector
from cluster.objects import CONFIG_MAPS, ConfigMap
from vcuda.catalogue import CardModel, decode_catalogue
from vcuda.names import CATALOGUE, CATALOGUE_KEY


class CatalogueCache:
    """`cards` is empty until there is a catalogue."""

    def __init__(self, cluster: Cluster, system_namespace: str) -> None:
        self._informer = Informer(cluster, CONFIG_MAPS, system_namespace, Selector(fields=f"metadata.name={CATALOGUE}"))
        self._informer.on_change(self._on_change)
        self.cards: tuple[CardModel, ...] = ()
        self._log = structlog.get_logger()

    def start(self) -> "CatalogueCache":
        self._informer.start()
        return self

    def stop(self) -> None:
        self._informer.stop()

    @property
    def synced(self) -> bool:
        return self._informer.synced

    def _on_change(self, _: ConfigMap | None, new: ConfigMap | None) -> None:
        if new is None:
            return  # deleting the ConfigMap removes no GPU from the cluster; the controller writes it again
        try:
            self.cards = decode_catalogue(new.data.get(CATALOGUE_KEY, ""))
        except ValueError as error:
            self._log.error("catalogue_invalid", error=str(error))

"""Stores what was learned of the workload in a ConfigMap of the system namespace, so that it survives restarts."""

from contextlib import suppress

import structlog

from cluster.errors import NotFound
from cluster.interface import Cluster
from cluster.objects import CONFIG_MAPS, ConfigMap, Metadata
from vcuda.names import WORKLOAD_CONFIG_MAP, WORKLOAD_KEY
from vcuda.workload import WorkloadHistory, decode_history

CALL_TIMEOUT_S = 5.0


class WorkloadStore:
    """Reads and writes the ConfigMap. Raises ApiError or Unavailable."""

    def __init__(self, cluster: Cluster, system_namespace: str) -> None:
        self._cluster, self._namespace = cluster.with_timeout(CALL_TIMEOUT_S), system_namespace
        # As it was read or written last; None if there was none.
        self._stored: ConfigMap | None = None
        self._log = structlog.get_logger()

    def load(self) -> WorkloadHistory | None:
        """Return what was stored; None if there is nothing, or it cannot be read."""
        try:
            self._stored = self._cluster.get(CONFIG_MAPS, WORKLOAD_CONFIG_MAP, self._namespace)
        except NotFound:
            self._stored = None
            return None
        if WORKLOAD_KEY not in self._stored.data:
            # As the chart creates it.
            return None
        try:
            return decode_history(self._stored.data[WORKLOAD_KEY])
        except ValueError as error:
            # It only delays what is learned again.
            self._log.warning("workload_invalid", error=str(error))
            return None

    def store(self, text: str, *, creates: bool = True) -> None:
        """Write what was learned; raises Conflict if another replica has written since it was loaded.

        A process that ends does not create anything: its release may be uninstalled.
        """
        metadata = Metadata(name=WORKLOAD_CONFIG_MAP, namespace=self._namespace)
        data = {WORKLOAD_KEY: text}
        if self._stored is not None:
            with suppress(NotFound):
                config_map = ConfigMap(metadata=self._stored.metadata, data=data)
                self._stored = self._cluster.update(CONFIG_MAPS, config_map)
                return
        if creates:
            self._stored = self._cluster.create(CONFIG_MAPS, ConfigMap(metadata=metadata, data=data))

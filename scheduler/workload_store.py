"""Stores what was learned of the workload in a ConfigMap of the system namespace, so that it survives restarts."""

import structlog

from cluster.errors import Conflict, NotFound
from cluster.interface import Cluster
from cluster.objects import CONFIG_MAPS, ConfigMap, Metadata
from vcuda.names import WORKLOAD_CONFIG_MAP, WORKLOAD_KEY
from vcuda.workload import WorkloadHistory, decode_history

CALL_TIMEOUT_S = 5.0


class WorkloadStore:
    """Reads and writes the ConfigMap. Raises ApiError or Unavailable."""

    def __init__(self, cluster: Cluster, system_namespace: str) -> None:
        self._cluster, self._namespace = cluster.with_timeout(CALL_TIMEOUT_S), system_namespace
        self._log = structlog.get_logger()

    def load(self) -> WorkloadHistory | None:
        """Return what was stored; None if there is nothing, or it cannot be read."""
        try:
            stored = self._cluster.get(CONFIG_MAPS, WORKLOAD_CONFIG_MAP, self._namespace)
        except NotFound:
            return None
        if WORKLOAD_KEY not in stored.data:
            # As the chart creates it.
            return None
        try:
            return decode_history(stored.data[WORKLOAD_KEY])
        except ValueError as error:
            # It only delays what is learned again.
            self._log.warning("workload_invalid", error=str(error))
            return None

    def store(self, text: str, *, creates: bool = True) -> None:
        """Write what was learned. A process that ends does not create anything: its release may be uninstalled."""
        metadata = Metadata(name=WORKLOAD_CONFIG_MAP, namespace=self._namespace)
        data = {WORKLOAD_KEY: text}
        try:
            stored = self._cluster.get(CONFIG_MAPS, WORKLOAD_CONFIG_MAP, self._namespace)
        except NotFound:
            if creates:
                self._cluster.create(CONFIG_MAPS, ConfigMap(metadata=metadata, data=data))
            return
        try:
            self._cluster.update(CONFIG_MAPS, ConfigMap(metadata=stored.metadata, data=data))
        except Conflict:
            # Another replica leads by now.
            self._log.info("workload_not_stored", reason="written by another replica")

"""Writes ConfigMaps that no other component writes."""

from msgspec.structs import replace

from cluster.errors import AlreadyExists
from cluster.interface import Cluster
from cluster.objects import CONFIG_MAPS, ConfigMap


def write_config_map(cluster: Cluster, desired: ConfigMap, cached: ConfigMap | None = None) -> None:
    """Create or update a ConfigMap, unless its data and labels are right. `cached` saves the read of an existing one.

    Raises Conflict if the cached version is stale.
    """
    existing = cached
    if existing is None:
        try:
            cluster.create(CONFIG_MAPS, desired)
        except AlreadyExists:
            existing = cluster.get(CONFIG_MAPS, desired.metadata.name, desired.metadata.namespace)
        else:
            return
    if (existing.data, existing.metadata.labels) != (desired.data, desired.metadata.labels):
        metadata = replace(existing.metadata, labels=desired.metadata.labels)
        cluster.update(CONFIG_MAPS, replace(existing, metadata=metadata, data=desired.data))

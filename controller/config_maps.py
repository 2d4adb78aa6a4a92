"""Writing ConfigMaps that are ours alone."""

from msgspec.structs import replace

from cluster.errors import AlreadyExists
from cluster.interface import Cluster
from cluster.objects import CONFIG_MAPS, ConfigMap


def write_config_map(cluster: Cluster, wanted: ConfigMap, found: ConfigMap | None = None) -> None:
    """Write a ConfigMap if it is not so already; `found` is what was last heard of it."""
    if found is None:
        try:
            cluster.create(CONFIG_MAPS, wanted)
        except AlreadyExists:
            found = cluster.get(CONFIG_MAPS, wanted.metadata.name, wanted.metadata.namespace)
        else:
            return
    if (found.data, found.metadata.labels) != (wanted.data, wanted.metadata.labels):
        labels = replace(found.metadata, labels=wanted.metadata.labels)
        cluster.update(CONFIG_MAPS, replace(found, metadata=labels, data=wanted.data))

"""Builders of objects for the conformance suite."""

import contextlib
from typing import Any

from cluster.errors import AlreadyExists
from cluster.interface import Cluster
from cluster.objects import NAMESPACES, ConfigMap, Kind, Metadata, Object

SERVICE_ACCOUNTS = Kind("v1", "ServiceAccount", "serviceaccounts", Object, partial=True)


def new_namespace(cluster: Cluster, name: str) -> str:
    """Create a namespace in which pods can be created at once.

    Without its default service account no pod is admitted. The controller manager would create it, but needs a while to
    reconnect to an API server that was just restarted.
    """
    cluster.create(NAMESPACES, {"metadata": {"name": name}})
    with contextlib.suppress(AlreadyExists):
        cluster.create(SERVICE_ACCOUNTS, {"metadata": {"name": "default", "namespace": name}})
    return name


def pod(namespace: str, name: str = "", **changes: Any) -> dict[str, Any]:
    """Return a pod's manifest, with a generated name if none is given."""
    metadata = {"namespace": namespace, **({"name": name} if name else {"generateName": "pod-"})}
    metadata |= changes.pop("metadata", {})
    spec = {"containers": [{"name": "c0", "image": "example/image"}]} | changes.pop("spec", {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, **changes}


def gpu_pod(namespace: str, name: str = "", **limits: Any) -> dict[str, Any]:
    """Return the manifest of a pod whose container has these limits."""
    container = {"name": "c0", "image": "example/image", "resources": {"limits": limits}}
    return pod(namespace, name, spec={"containers": [container]})


def config_map(namespace: str, name: str, **data: str) -> ConfigMap:
    return ConfigMap(metadata=Metadata(name=name, namespace=namespace), data=data)

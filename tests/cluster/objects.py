"""Builders of the objects that the conformance suite works on."""

import contextlib
from typing import Any

from cluster.errors import AlreadyExists
from cluster.interface import Cluster
from cluster.objects import NAMESPACES, ConfigMap, Kind, Metadata, Object

SERVICE_ACCOUNTS = Kind("v1", "ServiceAccount", "serviceaccounts", Object, partial=True)


def new_namespace(cluster: Cluster, name: str) -> str:
    """Make a namespace that takes pods at once.

    Its account is made here: the controller manager, which would make it, may be busy finding an API server again that
    was just restarted, and without the account no pod is admitted.
    """
    cluster.create(NAMESPACES, {"metadata": {"name": name}})
    with contextlib.suppress(AlreadyExists):
        cluster.create(SERVICE_ACCOUNTS, {"metadata": {"name": "default", "namespace": name}})
    return name


def pod(namespace: str, name: str = "", **changes: Any) -> dict[str, Any]:
    """Make a pod; `name` may be left out for a generated one."""
    metadata = {"namespace": namespace, **({"name": name} if name else {"generateName": "pod-"})}
    metadata |= changes.pop("metadata", {})
    spec = {"containers": [{"name": "c0", "image": "example/image"}]} | changes.pop("spec", {})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, **changes}


def gpu_pod(namespace: str, name: str = "", **limits: Any) -> dict[str, Any]:
    """Make a pod whose container has these limits."""
    container = {"name": "c0", "image": "example/image", "resources": {"limits": limits}}
    return pod(namespace, name, spec={"containers": [container]})


def config_map(namespace: str, name: str, **data: str) -> ConfigMap:
    """Make a ConfigMap."""
    return ConfigMap(metadata=Metadata(name=name, namespace=namespace), data=data)

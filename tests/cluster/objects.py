"""Builders of the objects that the conformance suite works on."""

from typing import Any

from cluster.objects import ConfigMap, Metadata


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

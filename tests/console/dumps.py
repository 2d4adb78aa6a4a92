"""Objects of a cluster as kubectl dumps them, and manifests to ask about."""

import json
from typing import Any

from click.testing import Result

from tests.scheduler.world import NAMES, gpu
from vcuda.inventory import encode_inventory
from vcuda.placement_annotation import GpuSlice, encode_placement

QUOTA = "types: {T4: {cores: 200}, A100: {cores: 800}}"


def node(name: str, model: str, gpus: int, cpu: str = "64") -> dict[str, Any]:
    listed = tuple(gpu(name, index, model) for index in range(gpus))
    return {
        "kind": "Node",
        "metadata": {"name": name, "annotations": {NAMES.inventory: encode_inventory(listed)}},
        "status": {"allocatable": {"cpu": cpu, "memory": "256Gi"}},
    }


def running(
    name: str, on: str, cores: int, namespace: str = "team", model: str = "T4", index: int = 0
) -> dict[str, Any]:
    amounts = {NAMES.core: str(cores), NAMES.memory: "8"}
    placed = {"c": [GpuSlice(f"GPU-{on}-{index}", cores, 2048)]}
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"705ab4f5-6393-11e8-b7cc-{int.from_bytes(name.encode(), 'big') % 10**12:012}",
            "annotations": {NAMES.placement: encode_placement(placed), NAMES.use_models: model},
        },
        "spec": {"nodeName": on, "containers": [{"name": "c", "resources": {"limits": amounts, "requests": amounts}}]},
        "status": {"phase": "Running"},
    }


def waiting(name: str, cores: int, namespace: str = "team", **annotations: str) -> dict[str, Any]:
    """Return a pod without a node; annotations are under Quotient's domain, without its prefix."""
    made = running(name, "t", cores, namespace)
    del made["spec"]["nodeName"]
    made["status"]["phase"] = "Pending"
    made["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    written = {f"{NAMES.domain}/{key.replace('_', '-')}": value for key, value in annotations.items()}
    made["metadata"]["annotations"] = written
    return made


def quota(text: str = QUOTA, namespace: str = "team", name: str = "q") -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "labels": {NAMES.quota_label: "true"}}
    return {"kind": "ConfigMap", "metadata": metadata, "data": {"quota.yaml": text}}


def manifest(cores: int, memory: int | None = 8, kind: str = "Pod", **options: Any) -> dict[str, Any]:
    limits = {NAMES.core: cores, **({} if memory is None else {NAMES.memory: memory}), **options.get("requests", {})}
    spec = {"containers": [{"name": "c", "image": "i", "resources": {"limits": limits}}]}
    annotations = {f"{NAMES.domain}/{key}": value for key, value in options.get("annotations", {}).items()}
    metadata = {"name": "asked", "namespace": options.get("namespace", "team")}
    if kind == "Pod":
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "annotations": annotations}, "spec": spec}
    template = {"metadata": {"labels": {"a": "b"}, "annotations": annotations}, "spec": spec}
    selected = {"selector": {"matchLabels": {"a": "b"}}}
    body = {"replicas": options.get("replicas", 2), **selected, "template": template}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": metadata, "spec": body}


def answer(result: Result) -> Any:
    return json.loads(result.stdout)


JSON = ("-o", "json")
T4, A100 = node("t", "T4", 1), node("a", "A100-SXM4-40GB", 2)

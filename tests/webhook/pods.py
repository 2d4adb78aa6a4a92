"""Builders of pods and workloads, and accessors for them."""

import json
from typing import Any

from vcuda.names import Names

NAMES = Names()
CORE, MEMORY, CARDS = NAMES.core, NAMES.memory, NAMES.cards

Obj = dict[str, Any]


def container(name: str = "c0", limits: Obj | None = None, **more: Any) -> Obj:
    """Return a container with requests equal to its limits, as the API server's defaulting makes them."""
    resources = {"resources": {"limits": dict(limits), "requests": dict(limits)}} if limits else {}
    return {"name": name, "image": "registry.example.org/image", **resources, **more}


def gpu(name: str = "c0", core: Any = "50", memory: Any = "30", **more: Any) -> Obj:
    """Return a container with canonical GPU resources; None leaves one out."""
    amounts = {CORE: core, MEMORY: memory}
    return container(name, {key: value for key, value in amounts.items() if value is not None}, **more)


def pod(*containers: Obj, annotations: dict[str, str] | None = None, init: list[Obj] | None = None, **spec: Any) -> Obj:
    """Return a pod as a mutating webhook gets it, with defaults set."""
    metadata: Obj = {"name": "p", "namespace": "default", "labels": {"app": "x"}}
    if annotations is not None:
        metadata["annotations"] = annotations
    init_containers = {"initContainers": init} if init else {}
    merged = {
        "containers": list(containers or (gpu(),)),
        **init_containers,
        "schedulerName": "default-scheduler",
        **spec,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": merged}


def workload(template: Obj, kind: str = "Deployment", api_version: str = "apps/v1", **spec: Any) -> Obj:
    """Return a workload with a pod as its template."""
    inner = {"metadata": {"labels": {"app": "x"}, **template["metadata"]}, "spec": template["spec"]}
    inner["metadata"] = {key: value for key, value in inner["metadata"].items() if key in ("labels", "annotations")}
    metadata = {"name": "w", "namespace": "default"}
    if kind == "CronJob":
        workload_spec: Obj = {"jobTemplate": {"spec": {"template": inner}}, **spec}
    else:
        workload_spec = {"template": inner, **spec}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": workload_spec}


def managed(obj: Obj, *fields: str, operation: str = "Apply", manager: str = "kubectl") -> Obj:
    """Return an object with one field manager, which has declared the fields at these paths (steps after `>`)."""
    tree: Obj = {}
    for path in fields:
        below = tree
        for step in path.split(">"):
            below = below.setdefault(step if step.startswith("k:") else f"f:{step}", {})
    entry = {"manager": manager, "operation": operation, "fieldsType": "FieldsV1", "fieldsV1": tree}
    return {**obj, "metadata": {**obj["metadata"], "managedFields": [entry]}}


def limits_in(pod: Obj, index: int = 0, part: str = "limits") -> Obj:
    """Return the limits of a container, or with `part` its requests."""
    amounts: Obj = pod["spec"]["containers"][index]["resources"][part]
    return amounts


def annotation_in(pod: Obj, key: str) -> Any:
    """Return an annotation, None if it is absent; the limits are decoded."""
    text = pod["metadata"].get("annotations", {}).get(key)
    return json.loads(text) if text is not None and key == NAMES.limits else text

"""Builders of the objects under review."""

import json
from typing import Any

from vcuda.names import Names

NAMES = Names()
CORE, MEMORY, CARDS = NAMES.core, NAMES.memory, NAMES.cards

Obj = dict[str, Any]


def container(name: str = "c0", limits: Obj | None = None, **more: Any) -> Obj:
    """Make a container; the API server has copied its limits to its requests."""
    resources = {"resources": {"limits": dict(limits), "requests": dict(limits)}} if limits else {}
    return {"name": name, "image": "registry.example.org/image", **resources, **more}


def gpu(name: str = "c0", core: Any = "50", memory: Any = "30", **more: Any) -> Obj:
    """Make a container that asks in the canonical vocabulary."""
    amounts = {CORE: core, MEMORY: memory}
    return container(name, {key: value for key, value in amounts.items() if value is not None}, **more)


def pod(*containers: Obj, annotations: dict[str, str] | None = None, init: list[Obj] | None = None, **spec: Any) -> Obj:
    """Make a pod as a mutating webhook sees it."""
    metadata: Obj = {"name": "p", "namespace": "default", "labels": {"app": "x"}}
    if annotations is not None:
        metadata["annotations"] = annotations
    initial = {"initContainers": init} if init else {}
    own = {"containers": list(containers or (gpu(),)), **initial, "schedulerName": "default-scheduler", **spec}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": own}


def workload(template: Obj, kind: str = "Deployment", api_version: str = "apps/v1", **spec: Any) -> Obj:
    """Make a workload of a pod."""
    inner = {"metadata": {"labels": {"app": "x"}, **template["metadata"]}, "spec": template["spec"]}
    inner["metadata"] = {key: value for key, value in inner["metadata"].items() if key in ("labels", "annotations")}
    metadata = {"name": "w", "namespace": "default"}
    if kind == "CronJob":
        made: Obj = {"jobTemplate": {"spec": {"template": inner}}, **spec}
    else:
        made = {"template": inner, **spec}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": made}


def limits_in(made: Obj, index: int = 0, part: str = "limits") -> Obj:
    """Give what a container of a pod asks for."""
    found: Obj = made["spec"]["containers"][index]["resources"][part]
    return found


def note(made: Obj, key: str) -> Any:
    """Give an annotation, decoded if it is JSON of ours."""
    text = made["metadata"].get("annotations", {}).get(key)
    return json.loads(text) if text is not None and key == NAMES.limits else text

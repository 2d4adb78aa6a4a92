"""Builders of workloads that lack pods."""

from typing import Any

from vcuda.names import Names

NAMES = Names()
Obj = dict[str, Any]

FAILED = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota"}


def template(core: int = 100, models: str = "A100") -> Obj:
    limits = {NAMES.core: str(core), NAMES.memory: "1"} if core else {}
    return {
        "metadata": {"labels": {"app": "x"}, "annotations": {NAMES.use_models: models}},
        "spec": {"containers": [{"name": "c", "image": "i", "resources": {"limits": limits}}]},
    }


def workload(
    name: str = "w", *, core: int = 100, namespace: str = "team", status: Obj | None = None, **spec: Any
) -> Obj:
    """Return a workload whose pods request this many cores of an A100."""
    metadata = {"name": name, "namespace": namespace}
    return {"metadata": metadata, "spec": {"template": template(core), **spec}, "status": status or {}}


def failed_set(name: str = "w", *, replicas: int = 1, has: int = 0, core: int = 100, namespace: str = "team") -> Obj:
    """Return a ReplicaSet of which the last pods could not be created."""
    status = {"replicas": has, "conditions": [FAILED]}
    return workload(name, core=core, namespace=namespace, status=status, replicas=replicas)

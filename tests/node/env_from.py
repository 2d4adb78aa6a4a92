"""A ConfigMap whose variables would give a container every GPU, and what the webhook makes of a pod that reads it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.objects import CONFIG_MAPS
from tests.node.node import GpuNode
from tests.webhook.pods import pod
from tests.webhook.reviews import caller

NAME = "greedy"


@contextmanager
def greedy_config_map(node: GpuNode) -> Iterator[list[dict[str, Any]]]:
    """Create the ConfigMap, and yield what containers have as `envFrom` to read it."""
    data = {"NVIDIA_VISIBLE_DEVICES": "all", "LD_LIBRARY_PATH": "/elsewhere"}
    node.api.create(CONFIG_MAPS, {"metadata": {"name": NAME, "namespace": "default"}, "data": data})
    try:
        yield [{"configMapRef": {"name": NAME}}]
    finally:
        node.api.delete(CONFIG_MAPS, NAME, "default")


def admit(main: dict[str, Any], *init: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a container and its init containers as the webhook rewrites them, the init containers first."""
    spec = caller("short").mutate(pod(main, init=list(init))).patched()["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]

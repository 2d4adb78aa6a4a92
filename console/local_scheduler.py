"""The scheduler of `quotient local`: Quotient's real extender, called over HTTP as kube-scheduler calls it."""

import http.client
import json
from typing import Any

import msgspec
from msgspec.structs import replace

from cluster.interface import Cluster
from cluster.objects import NODES, Pod
from scheduler.extender_api import BindingArgs
from scheduler.service import Service
from settings.configuration import Configuration

TIMEOUT_S = 30.0
LOOPBACK = "127.0.0.1"


class LocalScheduler:
    """Filters, ranks and binds one pod after another."""

    def __init__(self, cluster: Cluster, configuration: Configuration) -> None:
        self._cluster = cluster
        # There is no kube-scheduler that holds a Lease; any free ports, so that they cannot collide.
        settings = replace(
            configuration.scheduler, lease="", port=0, address=LOOPBACK, ops_port=0, ops_address=LOOPBACK
        )
        self._service = Service(replace(configuration, scheduler=settings), cluster)

    def start(self) -> None:
        self._service.start()

    def stop(self) -> None:
        self._service.stop()

    def knows(self, pod: Pod) -> bool:
        """Whether the scheduler has seen the pod, and what it is charged."""
        return self._service.synced and self._service.state.pod(pod.metadata.uid) is not None

    def knows_node(self, name: str) -> bool:
        return self._service.state.node(name) is not None

    def schedule(self, pod: Pod) -> str:
        """Bind a pod to the best node; returns why that is not possible, empty if it was bound."""
        names = [node.metadata.name for node in self._cluster.list(NODES).items]
        answer = self._call("filter", {"Pod": pod, "NodeNames": names})
        fitting = answer["NodeNames"]
        if not fitting:
            waiting = self._service.waiting.get(pod.metadata.uid)
            return str(answer["Error"]) or (waiting.summary if waiting else "no node fits")
        scores = {each["Host"]: each["Score"] for each in self._call("prioritize", {"Pod": pod, "NodeNames": fitting})}
        node = max(fitting, key=lambda name: scores.get(name, 0))
        metadata = pod.metadata
        return str(self._call("bind", BindingArgs(metadata.name, metadata.namespace, metadata.uid, node))["Error"])

    def _call(self, verb: str, body: object) -> Any:  # noqa: ANN401 - any JSON value
        connection = http.client.HTTPConnection(LOOPBACK, self._service.server.port, timeout=TIMEOUT_S)
        try:
            connection.request("POST", f"/scheduler/{verb}", msgspec.json.encode(body))
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

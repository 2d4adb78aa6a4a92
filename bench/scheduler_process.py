"""An extender process for benchmarks, with a cluster that is given to it instead of watched.

    python -m bench.scheduler_process NODES PODS [POLICY]

It prints the port of its extender. Its cluster answers every binding at once, so that only the decision is measured.
"""

import random
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from cluster.gpu_nodes import GpuNode
from cluster.in_memory import InMemoryCluster
from cluster.objects import NAMESPACES, Metadata, Pod
from scheduler.pods import scheduler_pod_of
from scheduler.service import Service
from settings.configuration import Configuration, SchedulerSettings
from settings.logs import configure_logs
from vcuda.decoding import convert
from vcuda.host import Host
from vcuda.inventory import Gpu
from vcuda.names import DEFAULT_SYSTEM_NAMESPACE, Names
from vcuda.namespace_policy import Mode
from vcuda.placement_annotation import GpuSlice, encode_placement
from vcuda.placement_strategies import PlacementStrategy
from vcuda.scheme import build_scheme

GPUS_PER_NODE = 8
MODELS = (("A100-SXM4-40GB", 40960), ("T4", 15360), ("V100-SXM2-16GB", 16384))
NAMES = Names()
# Cores and memory units of the pods that run, and of those that arrive.
SHAPES = ((10, 4), (20, 8), (25, 12), (50, 28), (50, 4), (100, 1))
ARRIVING = (*SHAPES, (200, 2), (400, 4), (800, 8))


class InstantCluster(InMemoryCluster):
    """A cluster that binds every pod without looking at it."""

    def bind(self, pod: str, namespace: str, node: str, *, uid: str, annotations: Mapping[str, str]) -> None:
        pass


def node_name(number: int) -> str:
    return f"gpu-node-{number:05}"


def pod_manifest(
    number: int,
    shape: tuple[int, int],
    cpu: str = "4",
    **changes: Any,  # noqa: ANN401 - any field
) -> dict[str, Any]:
    """Return a pod as kube-scheduler sends it."""
    amounts = {NAMES.core: str(shape[0]), NAMES.memory: str(shape[1]), "cpu": cpu, "memory": "16Gi"}
    resources = {"limits": amounts, "requests": amounts}
    mounts = [{"name": "token", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": True}]
    return {
        "metadata": {
            "name": f"pod-{number}",
            "namespace": "team",
            "uid": str(uuid.UUID(int=10**9 + number)),
            "resourceVersion": str(number + 10),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"app": "train"},
            "annotations": changes.pop("annotations", {}),
        },
        "spec": {
            "schedulerName": "quotient-scheduler",
            "containers": [{"name": "c", "image": "example/train:1", "resources": resources, "volumeMounts": mounts}],
            "volumes": [{"name": "token", "projected": {}}],
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}],
            **changes,
        },
        "status": {"phase": "Running" if "nodeName" in changes else "Pending"},
    }


def fill(service: Service, nodes: int, pods: int) -> None:
    """Add nodes, and pods that run on them."""
    scheme, choose = build_scheme(), random.Random(1)
    for number in range(nodes):
        model, memory_mib = MODELS[number % len(MODELS)]
        gpus = tuple(
            Gpu(
                uuid=f"GPU-{uuid.UUID(int=number * GPUS_PER_NODE + index)}",
                index=index,
                model=model,
                memory_mib=memory_mib,
                healthy=True,
            )
            for index in range(GPUS_PER_NODE)
        )
        metadata = Metadata(name=node_name(number), uid=node_name(number), resource_version="1")
        # No two nodes are alike, so nothing that is computed for one can be used for another.
        host = Host(64_000 + 8 * number, 512_000 + number)
        service.state.handle_node(None, GpuNode(metadata=metadata, gpus=gpus, host=host))
    for number in range(pods):
        node = node_name(number % nodes)
        gpu = service.state.table.gpus(node)[number // nodes % GPUS_PER_NODE]
        cores, units = choose.choice(SHAPES)
        taken = GpuSlice(gpu.uuid, cores, gpu.memory_mib if cores == SHAPES[-1][0] else units * 256)
        annotations = {NAMES.placement: encode_placement({"c": [taken]})}
        made = pod_manifest(number, (cores, units), annotations=annotations, nodeName=node)
        service.state.handle_pod(None, scheduler_pod_of(convert(made, Pod), scheme))


def main() -> None:
    nodes, pods = map(int, sys.argv[1:3])
    policy = PlacementStrategy(sys.argv[3]) if len(sys.argv) > 3 else SchedulerSettings().policy  # noqa: PLR2004
    configure_logs("error", "json")
    cluster = InstantCluster()
    cluster.create(NAMESPACES, {"metadata": {"name": DEFAULT_SYSTEM_NAMESPACE}})
    settings = SchedulerSettings(port=0, ops_port=0, ops_address="127.0.0.1", lease="", policy=policy)
    # Without ledgers: what they cost is measured on a real API server.
    service = Service(replace(Configuration(), mode=Mode.AUDIT, scheduler=settings), cluster).start()
    while not service.synced:
        time.sleep(0.01)
    fill(service, nodes, pods)
    print(service.server.port, flush=True)  # noqa: T201 - for the benchmark
    service.ending.wait()


if __name__ == "__main__":
    main()

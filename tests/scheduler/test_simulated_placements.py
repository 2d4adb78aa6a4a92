"""The cluster gets what the simulator promises: the same pods on the same nodes and GPUs."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.objects import NODES, PODS
from simulator.experiment import PlacedRow, Scenario, run_scenario
from simulator.replay import simulated_gpus, table_of
from simulator.synthetic import synthetic_nodes, synthetic_tasks
from simulator.trace_files import Task, TraceNode, read_nodes, read_tasks
from tests.cluster.real import RealCluster
from tests.scheduler.real import NAMES, SchedulerCluster
from tests.waiting import eventually
from vcuda.inventory import encode_inventory
from vcuda.placement_annotation import decode_placement
from vcuda.placement_strategies import PlacementStrategy

pytestmark = pytest.mark.kubernetes

SEED, UNIT_MIB = 42, 256
MIN_EQUAL = 0.95
# A learned estimate takes effect 16 arrivals after it is begun, as in a simulation, if it is ready by then: so pods are
# created in batches that are smaller, and a batch waits for the estimate.
BATCH = 8


@pytest.fixture
def scheduled(real_cluster_possible: None) -> Iterator[SchedulerCluster]:
    """A cluster with one replica of the scheduler, which has learned nothing yet."""
    made = SchedulerCluster(RealCluster.start(), "a")
    eventually(lambda: made.holder() == "a", "the leader", 60)
    yield made
    made.stop()


def add_node(cluster: SchedulerCluster, node: TraceNode) -> None:
    gpus = simulated_gpus(node)
    memory_units = sum(gpu.memory_mib for gpu in gpus) // UNIT_MIB
    resources = {
        "cpu": f"{node.cpu_milli}m",
        "memory": f"{node.memory_mib}Mi",
        "pods": "500",
        NAMES.core: str(100 * node.gpus),
        NAMES.memory: str(memory_units),
    }
    metadata = {"name": node.name, "annotations": {NAMES.inventory: encode_inventory(gpus)}}
    cluster.cluster.create(NODES, {"metadata": metadata})
    conditions = [{"type": "Ready", "status": "True", "lastHeartbeatTime": "2038-01-01T00:00:00Z"}]
    status = {"capacity": resources, "allocatable": resources, "conditions": conditions}
    cluster.cluster.patch(NODES, node.name, "", {"status": status}, subresource="status")
    cluster.cluster.patch(NODES, node.name, "", {"spec": {"taints": None}})


def pod_of(task: Task, name: str, namespace: str) -> dict[str, Any]:
    is_share = task.cores < 100
    units = -(-task.gpu_memory_mib // UNIT_MIB) if task.gpu_memory_mib and is_share else max(1, task.gpus)
    amounts = {
        "cpu": f"{task.cpu_milli}m",
        "memory": f"{task.memory_mib}Mi",
        NAMES.core: str(task.demand),
        NAMES.memory: str(units),
    }
    annotations = {NAMES.use_models: ",".join(task.models)} if task.models else {}
    if is_share and not task.gpu_memory_mib:
        annotations[NAMES.memory_follows_core] = "c"
    containers = [{"name": "c", "image": "i", "resources": {"limits": amounts, "requests": amounts}}]
    metadata = {"name": name, "namespace": namespace, "annotations": annotations}
    return {"metadata": metadata, "spec": {"containers": containers, "terminationGracePeriodSeconds": 0}}


def placed_rows(cluster: SchedulerCluster, namespace: str) -> dict[str, PlacedRow]:
    rows = {}
    for pod in cluster.pods(namespace):
        placed = decode_placement(pod.metadata.annotations.get(NAMES.placement, "")) or {}
        gpus = tuple(each.uuid for slices in placed.values() for each in slices)
        rows[pod.metadata.name] = PlacedRow(pod.metadata.name, pod.spec.node_name or "", gpus)
    return rows


def check_placements(cluster: SchedulerCluster, nodes: Sequence[TraceNode], tasks: Sequence[Task]) -> None:
    namespace = cluster.namespace("simulated")
    for node in nodes:
        add_node(cluster, node)
    eventually(lambda: cluster.metric("a", "nodes") == len(nodes), "all nodes")
    eventually(lambda: cluster.metric("a", "learning") == 0, "the scheduler to look for what it has learned")
    scenario = Scenario(table_of(nodes), tasks, demand=1.0)
    expected = run_scenario(scenario, PlacementStrategy.FRAGMENTATION, SEED).rows
    by_name = {task.name: task for task in tasks}
    count = sum(bool(row.node) for row in expected)

    def is_decided(number: int) -> bool:
        """Whether a pod is bound, or has a condition that says why not. They are placed one after another."""
        pod = cluster.cluster.get(PODS, f"p-{number:05}", namespace)
        return bool(pod.spec.node_name or pod.status.conditions)

    for number, row in enumerate(expected):
        cluster.cluster.create(PODS, pod_of(by_name[row.task], f"p-{number:05}", namespace))
        if number % BATCH == BATCH - 1 or number == len(expected) - 1:
            eventually(functools.partial(is_decided, number), f"pod {number}", 120)
            eventually(lambda: cluster.metric("a", "learning") == 0, "the estimate", 120)
    rows = placed_rows(cluster, namespace)
    found = [rows[f"p-{number:05}"] for number in range(len(expected))]
    equal = sum(
        (row.node, set(row.gpus)) == (own.node, set(own.gpus)) for row, own in zip(expected, found, strict=True)
    )
    print(f"{equal} of {len(expected)} pods as simulated, {count} placed on {len(nodes)} nodes")
    assert equal >= MIN_EQUAL * len(expected)


def with_gpus(tasks: Sequence[Task]) -> list[Task]:
    """Leave out tasks without GPUs: those are not placed by this scheduler."""
    return [task for task in tasks if task.gpus]


def test_pods_are_placed_as_simulated(scheduled: SchedulerCluster) -> None:
    check_placements(scheduled, synthetic_nodes()[::6], with_gpus(synthetic_tasks(0)))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_pods_of_a_real_workload_are_placed_as_simulated(
    scheduled: SchedulerCluster, request: pytest.FixtureRequest
) -> None:
    """A sample of 120 nodes, filled to all its capacity; our own workload if the trace is not there."""
    folder: Path | None = request.config.getoption("--traces")
    if folder is None:
        print("--traces is not set: with a workload of our own instead")
        check_placements(scheduled, synthetic_nodes(), with_gpus(synthetic_tasks(0)))
        return
    nodes = read_nodes(folder / "openb_node_list_gpu_node.csv")
    step = len(nodes) // 120
    check_placements(scheduled, nodes[::step][:120], with_gpus(read_tasks(folder / "openb_pod_list_default.csv")))

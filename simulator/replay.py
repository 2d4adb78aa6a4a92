"""Places tasks one after another on simulated nodes, with the functions that the scheduler uses."""

from collections.abc import Iterable, Mapping

from simulator.trace_files import Task, TraceNode
from vcuda.compiled_workload import CompiledWorkload
from vcuda.gpu_table import GpuTable
from vcuda.host import Host
from vcuda.inventory import Gpu
from vcuda.learning import WorkloadLearner
from vcuda.memory_units import DEFAULT_UNIT_MIB
from vcuda.namespace_policy import Mode
from vcuda.placement_strategies import PlacementStrategy
from vcuda.pod_options import PodOptions
from vcuda.quota_usage import QuotaUsage
from vcuda.request import ContainerRequest, PodRequest, Role
from vcuda.trial_cluster import PodPlacement, TrialCluster, TrialPod, TrialRefusal
from vcuda.vocabulary import CORES_PER_CARD, Share
from vcuda.workload import TaskShape

# The memory of GPUs where a file has none: only the ratio to what tasks request counts, and they request none.
GPU_MEMORY_MIB = 16_384
CONTAINER = "task"


def simulated_gpus(node: TraceNode) -> tuple[Gpu, ...]:
    memory_mib = node.gpu_memory_mib or GPU_MEMORY_MIB
    return tuple(
        Gpu(
            uuid=f"GPU-{node.name}-{index}",
            index=index,
            model=node.model,
            memory_mib=memory_mib,
            healthy=True,
            isolation=node.isolation,
        )
        for index in range(node.gpus)
    )


def table_of(nodes: Iterable[TraceNode]) -> GpuTable:
    table = GpuTable()
    add_nodes(table, nodes)
    return table


def add_nodes(table: GpuTable, nodes: Iterable[TraceNode]) -> None:
    for node in nodes:
        table.set_node(node.name, simulated_gpus(node), node.pool)
        table.set_host(node.name, node.cpu_milli, node.memory_mib)


def request_of(task: Task, unit_mib: int) -> PodRequest:
    if task.pod is not None:
        return task.pod.request
    if not task.gpus:
        return PodRequest()
    # Of whole GPUs it is the least memory that each of them must have.
    units = -(-task.gpu_memory_mib // unit_mib) * task.gpus
    share = Share(task.demand, units, memory_follows_cores=task.cores < CORES_PER_CARD and not units)
    return PodRequest((ContainerRequest(CONTAINER, Role.APP, share, "vcuda"),))


def options_of(task: Task) -> PodOptions:
    return task.pod.options if task.pod is not None else PodOptions(models=task.models)


def shape_of(task: Task) -> TaskShape:
    if task.pod is not None:
        return task.pod.shape
    memory_mib = task.gpu_memory_mib if task.cores < CORES_PER_CARD else 0
    return TaskShape(task.cpu_milli, task.gpus, task.cores, memory_mib, task.models)


def held_cores(placement: PodPlacement) -> int:
    """Return what a placement takes of the GPUs: with init containers on other GPUs, more than the pod ever needs."""
    return sum(cores for cores, _ in placement.usage.values())


class SimulatedCluster:
    """Nodes and the tasks that run on them."""

    def __init__(
        self,
        table: GpuTable,
        strategy: PlacementStrategy,
        learner: WorkloadLearner,
        *,
        seed: int = 0,
        unit_mib: int = DEFAULT_UNIT_MIB,
        usages: Mapping[str, QuotaUsage] | None = None,
        cluster_mode: Mode = Mode.ENFORCE,
    ) -> None:
        self._strategy, self._learner, self._seed, self._unit_mib = strategy, learner, seed, unit_mib
        self.table = table
        self._trial = TrialCluster(
            self.table,
            learner.estimate,
            unit_mib=unit_mib,
            strategy=strategy,
            usages=usages,
            cluster_mode=cluster_mode,
        )
        self.capacity = self.table.usable_gpus() * CORES_PER_CARD
        self.allocated = self.capacity - self.table.free_cores()
        self._pending: CompiledWorkload | None = None

    def arrive(self, task: Task) -> PodPlacement | None:
        """Place a task where the strategy prefers it; returns None if it is refused or fits nowhere."""
        self._learn(task)
        # A task may arrive more than once.
        is_random = self._strategy is PlacementStrategy.RANDOM
        pod = TrialPod(
            request_of(task, self._unit_mib),
            task.namespace,
            options_of(task),
            Host(task.cpu_milli, task.memory_mib),
            seed=f"{self._seed} {task.name} {self._learner.estimate.arrivals}" if is_random else "",
        )
        result = self._trial.place(pod)
        if isinstance(result, TrialRefusal):
            return None
        self.allocated += held_cores(result)
        return result

    def _learn(self, task: Task) -> None:
        learner = self._learner
        learner.note_arrival(shape_of(task), task.memory_mib)
        if self._pending is not None and learner.is_effective:
            learner.replace_workload(self._pending)
            self._pending = None
        if learner.is_due:
            self._pending = CompiledWorkload(learner.begin())

    def depart(self, placement: PodPlacement) -> None:
        self._learner.note_departure()
        self._trial.remove(placement)
        self.allocated -= held_cores(placement)

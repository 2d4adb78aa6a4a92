"""One simulation: tasks arrive on nodes one after another, and perhaps leave again, under one policy and one seed."""

import copy
import heapq
import random
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct, field

from simulator.arrivals import check_count, draw_arrivals, total_demand
from simulator.replay import SimulatedCluster, shape_of
from simulator.trace_files import Task
from vcuda.compiled_workload import CompiledWorkload
from vcuda.gpu_table import GpuTable
from vcuda.learning import WorkloadLearner
from vcuda.memory_units import DEFAULT_UNIT_MIB
from vcuda.namespace_policy import Mode
from vcuda.placement_costs import fragmentation_gpus
from vcuda.placement_strategies import PlacementStrategy
from vcuda.quota_usage import QuotaUsage
from vcuda.trial_cluster import PodPlacement
from vcuda.vocabulary import CORES_PER_CARD
from vcuda.workload import WorkloadHistory, given_history

EXPONENTIAL, FROM_TRACE = "exponential", "trace"
# With departures: how often as much demand arrives as the cluster has capacity, and which part is left out at first.
# The run begins with as many tasks as the load amounts to.
TURNOVERS, WARM_UP = 2.5, 0.5


class Scenario(Struct, frozen=True):
    """What all runs of a comparison have in common. `demand` and `load` are multiples of the capacity.

    `table` has the nodes, with what is held of them from the beginning; `first` are tasks that arrive before those that
    are drawn from `tasks`. With `lifetimes`, tasks leave again: `exponential` draws how long they run, `trace` takes it
    from the file, in proportion.
    """

    table: GpuTable
    tasks: Sequence[Task]
    first: Sequence[Task] = ()
    demand: float = 1.3
    lifetimes: str = ""
    load: float = 0.95
    # Whether policies know the workload from the beginning, instead of learning it from what arrives.
    is_given: bool = False
    # By namespace; those that have none are not limited.
    usages: Mapping[str, QuotaUsage] = {}
    unit_mib: int = DEFAULT_UNIT_MIB
    # Applies where quotas set no mode: in audit mode they refuse nothing.
    cluster_mode: Mode = Mode.ENFORCE

    def check_length(self) -> None:
        """Raise TooManyArrivalsError if a run would not end."""
        turnovers = TURNOVERS + self.load if self.lifetimes else self.demand
        check_count(self.tasks, turnovers * self.table.usable_gpus() * CORES_PER_CARD)


class ClusterSample(Struct, frozen=True):
    """The state of a cluster, in per cent of its capacity: what has arrived, is allocated, and is free but unusable."""

    arrived: float
    allocated: float
    fragmentation: float


class PlacedRow(Struct, frozen=True):
    """Where a task was placed; no node if nowhere."""

    task: str
    node: str = ""
    gpus: tuple[str, ...] = ()


class Outcome(Struct, frozen=True, omit_defaults=True):
    """The result of one run. `allocated_percent` is by the demand that had arrived, in per cent of the capacity."""

    policy: str
    seed: int
    allocated_percent: dict[str, float]
    placed: int
    refused: int
    seconds: float
    # With departures: which part of the demand that arrived after the warm-up was placed.
    accepted_percent: float | None = None
    samples: tuple[ClusterSample, ...] = field(default=())
    rows: tuple[PlacedRow, ...] = field(default=())

    def summary(self) -> dict[str, object]:
        """Return what is printed as JSON."""
        names = ("policy", "seed", "allocated_percent", "placed", "refused", "seconds")
        accepted = {} if self.accepted_percent is None else {"accepted_percent": self.accepted_percent}
        return {name: getattr(self, name) for name in names} | accepted


# Called with how many tasks of how many have arrived.
OnProgress = Callable[[int, int], None]


def run_scenario(
    scenario: Scenario, policy: PlacementStrategy, seed: int, on_progress: OnProgress = lambda *_: None
) -> Outcome:
    return Run(scenario, policy, seed).run(on_progress)


class Run:
    """The state of one run."""

    def __init__(self, scenario: Scenario, policy: PlacementStrategy, seed: int) -> None:
        self._scenario, self._policy, self._seed = scenario, policy, seed
        # Shallow: amounts are values.
        usages = {name: copy.copy(usage) for name, usage in scenario.usages.items()}
        self._cluster = SimulatedCluster(
            scenario.table.copy(),
            policy,
            learner_for(scenario, policy),
            seed=seed,
            unit_mib=scenario.unit_mib,
            usages=usages,
            cluster_mode=scenario.cluster_mode,
        )
        self._yardstick = CompiledWorkload(known_workload(scenario.tasks).typical(with_largest=False))
        self._arrived = self._cluster.allocated
        self._placed = self._refused = 0
        self._samples: list[ClusterSample] = []
        self._rows: list[PlacedRow] = []

    def run(self, on_progress: OnProgress) -> Outcome:
        began = time.monotonic()
        self._scenario.check_length()
        accepted: float | None = None
        if self._scenario.lifetimes:
            accepted = self._run_departures(on_progress)
        else:
            self._fill(on_progress)
        return Outcome(
            str(self._policy),
            self._seed,
            self._allocated_percent(),
            self._placed,
            self._refused,
            round(time.monotonic() - began, 2),
            accepted,
            tuple(self._samples),
            tuple(self._rows),
        )

    def _fill(self, on_progress: OnProgress) -> None:
        scenario, capacity = self._scenario, self._cluster.capacity
        wanted = scenario.demand * capacity - self._arrived - total_demand(scenario.first)
        arrivals = [*scenario.first, *draw_arrivals(scenario.tasks, wanted, self._seed)]
        for number, task in enumerate(arrivals):
            self._sample_until(self._arrived + task.demand)
            self._arrive(task)
            on_progress(number + 1, len(arrivals))
        self._sample_until(scenario.demand * capacity + 1)

    def _run_departures(self, on_progress: OnProgress) -> float:
        """Have tasks arrive and leave at a constant load; returns which part of the demand was accepted."""
        scenario, capacity = self._scenario, self._cluster.capacity
        lives = Lifetimes(scenario, capacity, self._seed)
        ends: list[tuple[float, int, PodPlacement]] = []
        offered = accepted = 0
        first, last = round(-scenario.load * lives.per_turnover), round(TURNOVERS * lives.per_turnover)
        # Time is counted in arrivals; before 0 are those that run at the beginning.
        for number in range(first, last):
            now = max(number, 0)
            while ends and ends[0][0] <= now:
                self._cluster.depart(heapq.heappop(ends)[-1])
            task, lifetime = lives.draw(is_running=number < 0)
            is_measured = number >= WARM_UP * lives.per_turnover
            offered += task.demand * is_measured
            if (placed := self._arrive(task)) is not None:
                accepted += task.demand * is_measured
                heapq.heappush(ends, (now + lifetime, number, placed))
            on_progress(number - first + 1, last - first)
            if number >= 0 and number % max(1, lives.per_turnover // 25) == 0:
                self._samples.append(self._sample(100 * number / lives.per_turnover))
        return round(100 * accepted / offered, 2) if offered else 0.0

    def _arrive(self, task: Task) -> PodPlacement | None:
        self._arrived += task.demand
        placed = self._cluster.arrive(task)
        self._placed += placed is not None
        self._refused += placed is None
        gpus = tuple(each.uuid for slices in placed.placed.values() for each in slices) if placed else ()
        self._rows.append(PlacedRow(task.name, placed.node if placed else "", gpus))
        return placed

    def _sample_until(self, arrived: float) -> None:
        """Take a sample for every per cent of the capacity that the next task passes, without that task."""
        capacity = self._cluster.capacity
        first = len(self._samples)
        for percent in range(first, int(100 * self._scenario.demand + 1e-9) + 1):
            if arrived * 100 <= percent * capacity:
                return
            self._samples.append(self._sample(percent))

    def _sample(self, percent: float) -> ClusterSample:
        capacity = self._cluster.capacity
        unusable = fragmentation_gpus(self._cluster.table, self._yardstick) * CORES_PER_CARD
        return ClusterSample(percent, 100 * self._cluster.allocated / capacity, 100 * unusable / capacity)

    def _allocated_percent(self) -> dict[str, float]:
        if self._scenario.lifetimes:
            measured = [each.allocated for each in self._samples if each.arrived >= 100 * WARM_UP]
            return {"mean": round(sum(measured) / len(measured), 2)} if measured else {}
        last = int(100 * self._scenario.demand + 1e-9)
        return {str(percent): round(self._samples[percent].allocated, 2) for percent in sorted({min(100, last), last})}


class Lifetimes:
    """Draws tasks and how long they run, in arrivals: so long that the load is reached if all are placed."""

    def __init__(self, scenario: Scenario, capacity: int, seed: int) -> None:
        self._tasks, self._kind, self._choose = scenario.tasks, scenario.lifetimes, random.Random(seed)
        self._relative = relative_lifetimes(scenario.tasks, scenario.lifetimes)
        weight = sum(task.demand * each for task, each in zip(self._tasks, self._relative, strict=True))
        self._scale = scenario.load * capacity * len(self._tasks) / weight
        # How many tasks request as much as the cluster has.
        self.per_turnover = max(1, round(capacity * len(self._tasks) / total_demand(self._tasks)))

    def draw(self, *, is_running: bool) -> tuple[Task, float]:
        """Return a task and how long it will run. One that runs already is rather a long one, somewhere in its life."""
        number = range(len(self._tasks))
        (at,) = self._choose.choices(number, self._relative if is_running else None)
        lifetime = self._scale * self._relative[at]
        if self._kind == EXPONENTIAL:
            return self._tasks[at], lifetime * self._choose.expovariate(1)
        return self._tasks[at], lifetime * (self._choose.random() if is_running else 1)


def relative_lifetimes(tasks: Sequence[Task], kind: str) -> list[float]:
    """Return how long each task runs, in proportion; one that has not ended runs until the end of the file."""
    if kind == EXPONENTIAL:
        return [1.0] * len(tasks)
    end = max((task.created_s + (task.lifetime_s or 0.0) for task in tasks), default=0.0)
    return [end - task.created_s if task.lifetime_s is None else task.lifetime_s for task in tasks]


def learner_for(scenario: Scenario, policy: PlacementStrategy) -> WorkloadLearner:
    """Return what a policy knows of the workload. FGD's typical tasks are those of the whole list, as in the paper."""
    is_fgd = policy is PlacementStrategy.FGD
    if scenario.is_given or is_fgd:
        return WorkloadLearner(known_workload(scenario.tasks), is_fixed=True, with_largest=not is_fgd)
    return WorkloadLearner()


def known_workload(tasks: Sequence[Task]) -> WorkloadHistory:
    return given_history((shape_of(task), task.memory_mib) for task in tasks)

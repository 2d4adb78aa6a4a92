"""The workload of a cluster as placement sees it: which tasks arrive, and how often.

Placement keeps room for what is likely to come. It begins with a prior and learns from the pods that arrive: equal ones
are counted, old ones lose weight, and the rare ones are left out.
"""

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from vcuda.decoding import decoder_for
from vcuda.pod_options import PodOptions
from vcuda.vocabulary import CORES_PER_CARD

VERSION = 1
# Typical are the most frequent tasks, up to this part of all tasks, and the largest, up to this part of all demand.
COVERED = 0.95
# All counts are halved when there are this many: what arrived long ago counts less and less.
MAX_ARRIVALS = 20_000
# Different tasks that are counted: pods are written by tenants, and the history is stored in a ConfigMap.
MAX_SHAPES = 1000
# How many of each: the cost of a placement grows with them, and tenants can create pods of which no two are alike.
MAX_FREQUENT, MAX_LARGEST = 128, 32
# How far back departures are compared with arrivals.
TURNOVER_ARRIVALS = 2000


class TaskShape(Struct, frozen=True, order=True, omit_defaults=True, array_like=True):
    """What equal tasks have in common. `gpus` is 0 for pods without GPUs; of whole GPUs `cores` is 100.

    `memory_mib` is that of one GPU; 0 if it follows the cores, or the GPU is a whole one.
    """

    host_cpu_milli: int
    gpus: int
    cores: int
    memory_mib: int = 0
    models: tuple[str, ...] = ()
    avoided_models: tuple[str, ...] = ()

    @property
    def demand(self) -> int:
        """The cores of all its GPUs."""
        return self.gpus * self.cores

    def options(self) -> PodOptions:
        return PodOptions(models=self.models, avoided_models=self.avoided_models)


class TypicalTask(Struct, frozen=True):
    """A task that is likely to arrive; `frequency` is its part of all tasks, and the host memory a mean."""

    shape: TaskShape
    frequency: float
    host_mib: int


class Counted(Struct, array_like=True):
    """How often a task arrived, and the host memory of all of them together."""

    count: float
    host_mib: float


def prior_tasks() -> dict[TaskShape, Counted]:
    """Return what is assumed before anything has arrived: ten tasks, with 8 CPUs and 32,000 MiB for each GPU."""
    parts = {(1, 100): 5.0, (1, 50): 2.5, (1, 25): 1.0, (2, 100): 0.5, (4, 100): 0.5, (8, 100): 0.5}
    return {
        TaskShape(80 * gpus * cores, gpus, cores): Counted(count, count * 320 * gpus * cores)
        for (gpus, cores), count in parts.items()
    }


class WorkloadHistory:
    """Counts the tasks that arrived. Not thread-safe."""

    def __init__(self, counted: Mapping[TaskShape, Counted] | None = None) -> None:
        self._counted = dict(prior_tasks() if counted is None else counted)
        self.total = sum(each.count for each in self._counted.values())
        # All arrivals ever, which never decrease.
        self.arrivals = 0
        self._recent_arrivals = self._recent_departures = 0.0

    @property
    def turnover(self) -> float:
        """How many tasks end for each one that arrives, at most 1: 0 while a cluster fills up."""
        return min(1.0, self._recent_departures / self._recent_arrivals) if self._recent_arrivals else 0.0

    def add(self, shape: TaskShape, host_mib: int) -> None:
        """Count a task that arrives."""
        counted = self._counted.setdefault(shape, Counted(0.0, 0.0))
        counted.count += 1
        counted.host_mib += host_mib
        self.total += 1
        self.note_arrival()
        if self.total > MAX_ARRIVALS or len(self._counted) > MAX_SHAPES:
            self._reduce()

    def note_arrival(self) -> None:
        """Note that some task arrives, whose shape is not counted."""
        self.arrivals += 1
        kept = 1 - 1 / TURNOVER_ARRIVALS
        self._recent_arrivals = self._recent_arrivals * kept + 1
        self._recent_departures *= kept

    def note_departure(self) -> None:
        self._recent_departures += 1

    def _reduce(self) -> None:
        """Halve all counts if there are too many, and leave out the rarest tasks."""
        factor = 0.5 if self.total > MAX_ARRIVALS else 1.0
        kept = sorted(self._counted.items(), key=lambda each: (-each[1].count, each[0]))[: MAX_SHAPES // 2]
        self._counted = {
            shape: Counted(each.count * factor, each.host_mib * factor)
            for shape, each in (kept if len(self._counted) > MAX_SHAPES else self._counted.items())
        }
        self.total = sum(each.count for each in self._counted.values())

    def typical(self, *, with_largest: bool = True) -> tuple[TypicalTask, ...]:
        """Return the typical tasks, the most frequent first."""
        by_count = sorted(self._counted, key=lambda shape: (-self._counted[shape].count, shape))
        chosen = covering(by_count[:MAX_FREQUENT], {shape: self._counted[shape].count for shape in by_count})
        if with_largest:
            demand = {shape: self._counted[shape].count * shape.demand for shape in by_count}
            by_demand = sorted(by_count, key=lambda shape: (-demand[shape], shape))
            largest = covering(by_demand, demand) - chosen
            chosen |= set(sorted(largest, key=lambda shape: (-demand[shape], shape))[:MAX_LARGEST])
        return tuple(
            TypicalTask(shape, each.count / self.total, round(each.host_mib / each.count))
            for shape in by_count
            if shape in chosen
            for each in [self._counted[shape]]
        )

    def encode(self) -> str:
        """Return the history as JSON, to be stored."""
        turnover = (self._recent_arrivals, self._recent_departures)
        stored = StoredHistory(VERSION, self.arrivals, turnover, sorted(self._counted.items()))
        return msgspec.json.encode(stored).decode()


class StoredHistory(Struct, frozen=True):
    v: int
    arrivals: int
    turnover: tuple[float, float]
    tasks: list[tuple[TaskShape, Counted]]


def decode_history(text: str) -> WorkloadHistory:
    """Read a stored history; raises a ValueError that says what is wrong with it."""
    stored = decoder_for(StoredHistory).decode(text)
    if stored.v != VERSION:
        raise ValueError(f"workload version {stored.v} is not supported, expected {VERSION}")
    tasks = {shape: counted for shape, counted in stored.tasks if counted.count > 0}
    if not tasks:
        raise ValueError("the workload has no tasks")
    history = WorkloadHistory(tasks)
    history.arrivals = stored.arrivals
    history._recent_arrivals, history._recent_departures = stored.turnover  # noqa: SLF001 - of the same module
    return history


def covering(ordered: Iterable[TaskShape], amounts: Mapping[TaskShape, float]) -> set[TaskShape]:
    """Return the first of these tasks that have the covered part of all amounts together."""
    total, covered = sum(amounts.values()), 0.0
    chosen: set[TaskShape] = set()
    for shape in ordered:
        if covered >= COVERED * total:
            break
        chosen.add(shape)
        covered += amounts[shape]
    return chosen


def given_history(tasks: Iterable[tuple[TaskShape, int]]) -> WorkloadHistory:
    """Return the history of a workload that is known beforehand: its tasks with their host memory, without a prior."""
    counted: dict[TaskShape, Counted] = {}
    for shape, host_mib in tasks:
        each = counted.setdefault(shape, Counted(0.0, 0.0))
        each.count += 1
        each.host_mib += host_mib
    return WorkloadHistory(counted)


def whole_or_share(cores: int) -> tuple[int, int]:
    """Return the number of GPUs and the cores of each that a number of cores stands for."""
    return (cores // CORES_PER_CARD, CORES_PER_CARD) if cores >= CORES_PER_CARD else (int(cores > 0), cores)

"""Typical tasks and the offers drawn from them, as arrays for the kernel: for each GPU model what its nodes see."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vcuda.allowed_gpus import may_use_model
from vcuda.offers import SEQUENCES, Offers, draw_offers
from vcuda.vocabulary import CORES_PER_CARD
from vcuda.workload import TypicalTask

# Memory and CPU are counted in steps of so many MiB and thousandths, as in the kernel.
MIB_STEP, CPU_STEP = 64, 20
# The largest amount in steps. No node has as much CPU, so it marks the end of a sequence.
MAX_STEPS = 2**15 - 1
# The largest amount of anything: more than any node has.
MAX_AMOUNT = 2**30
# A model and the memory of its largest GPU.
ModelSize = tuple[str, int]
# How scarce something may be counted at most.
MAX_SCARCITY = 50.0


class CompiledWorkload:
    """The typical tasks and their offers. What it depends on the models of a cluster is built when first asked for."""

    def __init__(self, tasks: Sequence[TypicalTask]) -> None:
        self.tasks = tuple(tasks)
        self._offers = draw_offers(self.tasks)
        shapes = [task.shape for task in self.tasks]
        self.host_cpu = amounts_of(shape.host_cpu_milli for shape in shapes)
        self.host_mib = amounts_of(task.host_mib for task in self.tasks)
        self.cores = amounts_of(shape.cores for shape in shapes)
        self.count = amounts_of((shape.gpus for shape in shapes), MAX_STEPS)
        self.memory_mib = amounts_of(shape.memory_mib for shape in shapes)
        self.frequency = np.array([task.frequency for task in self.tasks])
        self._models: dict[ModelSize, ModelTasks] = {}

    def for_model(self, model: ModelSize) -> "ModelTasks":
        if model not in self._models:
            self._models[model] = ModelTasks(self, model, self._offers)
        return self._models[model]


def amounts_of(amounts: Iterable[int], most: int = MAX_AMOUNT) -> NDArray[np.int32]:
    """Return an array of amounts. Pods may request what no node has, up to numbers that no array holds."""
    return np.array([min(max(each, 0), most) for each in amounts], np.int32)


class ModelTasks:
    """The tasks and offers as nodes of one model see them, in the layout of the kernel."""

    def __init__(self, workload: CompiledWorkload, model: ModelSize, offers: Offers) -> None:
        name, card_mib = model
        tasks = workload.tasks
        # The first model of a table is that of slots without a GPU.
        flags = [bool(name) and may_use_model(task.shape.options(), name) for task in tasks]
        self.allowed = np.array(flags, np.uint8)
        follows = workload.cores.astype(np.int64) * card_mib // CORES_PER_CARD // MIB_STEP
        absolute = -(-workload.memory_mib // MIB_STEP)
        needed = np.where(workload.memory_mib > 0, absolute, follows)
        # Whole GPUs are exclusive, whatever their memory.
        self.mib = np.minimum(np.where(workload.cores == CORES_PER_CARD, 0, needed), MAX_STEPS).astype(np.int32)
        may_fit = self.allowed.astype(np.bool_) & (self.mib <= max(card_mib, MIB_STEP) // MIB_STEP)
        self.typical = (
            workload.host_cpu,
            workload.host_mib,
            workload.cores,
            self.mib,
            workload.count,
            self.allowed,
            workload.frequency,
        )
        self.offered = self._offered(workload, offers, may_fit)

    def _offered(
        self, workload: CompiledWorkload, offers: Offers, may_fit: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int16], ...]:
        """Return the offers without those that no GPU of the model can take: steps by sequences."""
        kept = [sequence[may_fit[sequence]] for sequence in offers]
        steps = max(1, *(len(each) for each in kept))
        positions = np.zeros((steps, SEQUENCES), np.int64)
        is_offer = np.zeros((steps, SEQUENCES), np.bool_)
        for lane, sequence in enumerate(kept):
            positions[: len(sequence), lane] = sequence
            is_offer[: len(sequence), lane] = True
        host_cpu = np.where(is_offer, steps_of(workload.host_cpu, CPU_STEP)[positions], MAX_STEPS)
        host_mib = steps_of(workload.host_mib, MIB_STEP)[positions]
        others = (array[positions] for array in (workload.cores, self.mib, workload.count))
        return tuple(np.ascontiguousarray(each, np.int16) for each in (host_cpu, host_mib, *others))


def steps_of(amounts: NDArray[np.int32], step: int) -> NDArray[np.int32]:
    """Return amounts in steps, rounded up."""
    return np.minimum(-(-amounts // step), MAX_STEPS - 1)


class Prices:
    """How scarce things are in a cluster: of each GPU model, and of each task of several GPUs. 0 until they are set."""

    def __init__(self, workload: CompiledWorkload, models: Sequence[ModelSize]) -> None:
        self.workload, self.models = workload, tuple(models)
        self.parts = [workload.for_model(model) for model in self.models]
        # The kernel keeps the addresses of both, so they are changed in place.
        self.of_tasks, self.of_models = np.zeros(len(workload.tasks)), np.zeros(len(self.models))
        # For the kernel: where all of these are.
        self.packed: Any = None

    def set_prices(self, slots: NDArray[np.int64], free_gpus: NDArray[np.float64]) -> None:
        """Set the prices, given how many of each task fit, and how much of each model is free."""
        workload, total = self.workload, float(free_gpus.sum())
        scarcity = np.minimum(MAX_SCARCITY, (total + 1) / (workload.count * slots + 1))
        several = workload.count > 1
        self.of_tasks[:] = np.where(several, workload.frequency * workload.count * scarcity**2, 0.0)
        self.of_models[:] = self._model_prices(free_gpus, total)

    def _model_prices(self, free_gpus: NDArray[np.float64], total: float) -> NDArray[np.float64]:
        workload = self.workload
        demand = workload.frequency * workload.count * workload.cores
        allowed = np.array([part.allowed for part in self.parts], np.bool_)
        prices = np.zeros(len(self.models))
        if not demand.sum():
            return prices
        sets: dict[bytes, float] = {}
        for task, share in enumerate(demand / demand.sum()):
            key = allowed[:, task].tobytes()
            sets[key] = sets.get(key, 0.0) + float(share)
        for key, share in sets.items():
            members = np.frombuffer(key, np.bool_)
            prices[members] += share * min(MAX_SCARCITY, (total + 1) / (float(free_gpus[members].sum()) + 1))
        return prices

"""The same as the compiled kernel, in Python: where it was not built, and to test it against.

fill_kernel.c says what each of these computes and why.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from vcuda.compiled_workload import CPU_STEP, MAX_STEPS, MIB_STEP, ModelTasks, Prices
from vcuda.cost_terms import CostArrays, Demand, Factors
from vcuda.gpu_table import NO_GPU, GpuArrays
from vcuda.offers import SEQUENCES
from vcuda.vocabulary import CORES_PER_CARD

MAX_GPUS = 16
MAX_HOST = 2**30 - 1


class NodeState(Struct):
    """What is free of the usable GPUs of one model on a node, and of the node itself; memory of GPUs in steps."""

    slots: list[int]
    cores: list[int]
    mib: list[int]
    host_cpu: int
    host_mib: int

    def placed(self, demand: Demand, first: int, mib: Sequence[int], fits: Sequence[bool]) -> "NodeState":
        """Return the state after a placement on the GPUs that fit, beginning with position `first`."""
        cores, free_mib, left = list(self.cores), list(self.mib), demand.count
        for gpu in range(first, len(cores)):
            if left and fits[gpu]:
                cores[gpu] = clamp(cores[gpu] - demand.cores, MAX_STEPS)
                free_mib[gpu] = clamp(free_mib[gpu] - mib[gpu], MAX_STEPS)
                left -= 1
        host_cpu = clamp(self.host_cpu - demand.host_cpu, MAX_HOST)
        return NodeState(self.slots, cores, free_mib, host_cpu, clamp(self.host_mib - demand.host_mib, MAX_HOST))


class Worth(Struct):
    """What each part of a cost is before or after a placement."""

    fill: float
    slots: float
    fragmentation: float


def clamp(value: int, most: int) -> int:
    return max(0, min(value, most))


def read_state(gpus: GpuArrays, column: int, model: int) -> NodeState:
    free_cores, free_mib, _, models, usable, host_cpu, host_mib = gpus
    slots = np.flatnonzero(usable[:, column] & (models[:, column] == model)).tolist()[:MAX_GPUS]
    return NodeState(
        slots,
        [clamp(int(free_cores[slot, column]), MAX_STEPS) for slot in slots],
        [clamp(int(free_mib[slot, column]) // MIB_STEP, MAX_STEPS) for slot in slots],
        clamp(int(host_cpu[column]), MAX_HOST),
        clamp(int(host_mib[column]), MAX_HOST),
    )


def expected_fill(state: NodeState, offered: Sequence[NDArray[np.int16]]) -> int:
    """Return the cores filled in all sequences together; the sequences are elements of arrays."""
    cores = np.repeat(np.array(state.cores, np.int64)[:, None], SEQUENCES, 1)
    mib = np.repeat(np.array(state.mib, np.int64)[:, None], SEQUENCES, 1)
    host_cpu = np.full(SEQUENCES, min(state.host_cpu // CPU_STEP, MAX_STEPS - 1))
    host_mib = np.full(SEQUENCES, min(state.host_mib // MIB_STEP, MAX_STEPS - 1))
    filled = 0
    for cpu_needed, host_needed, cores_needed, mib_needed, wanted in zip(*offered, strict=True):
        fits = (cores >= cores_needed) & (mib >= mib_needed)
        best = np.where(fits, cores, MAX_STEPS).min(axis=0)
        taken = (host_cpu >= cpu_needed) & (host_mib >= host_needed) & (fits.sum(axis=0) >= wanted)
        left = np.where(taken, wanted, 0)
        host_cpu -= np.where(taken, cpu_needed, 0)
        host_mib -= np.where(taken, host_needed, 0)
        filled += int((cores_needed.astype(np.int64) * left).sum())
        for gpu in range(len(cores)):
            given = fits[gpu] & (cores[gpu] == best) & (left > 0)
            left -= given
            cores[gpu] -= np.where(given, cores_needed, 0)
            mib[gpu] -= np.where(given, mib_needed, 0)
    return filled


def fragmentation(state: NodeState, part: ModelTasks) -> float:
    total, result = sum(state.cores), 0.0
    for host_cpu, host_mib, cores, mib, wanted, allowed, weight in zip(*part.typical, strict=True):
        fits = [free >= cores and left >= mib for free, left in zip(state.cores, state.mib, strict=True)]
        has_host = state.host_cpu >= host_cpu and state.host_mib >= host_mib
        unusable = sum(free for free, each in zip(state.cores, fits, strict=True) if not each)
        result += float(weight) * (unusable if allowed and wanted and sum(fits) >= wanted and has_host else total)
    return result


def slots_of(state: NodeState, part: ModelTasks, task: int) -> int:
    """Return how many of a typical task of several GPUs a node could take, if it took nothing else."""
    host_cpu, host_mib, _, _, wanted, allowed, _ = (int(each[task]) for each in part.typical)
    if not allowed:
        return 0
    count = state.cores.count(CORES_PER_CARD) // wanted
    if host_cpu:
        count = min(count, state.host_cpu // host_cpu)
    return min(count, state.host_mib // host_mib) if host_mib else count


class FillReference:
    """As `vcuda.fill_kernel.FillKernel`."""

    def placement_costs(
        self, gpus: GpuArrays, prices: Prices, demand: Demand, factors: Factors, arrays: CostArrays
    ) -> NDArray[np.float64]:
        costs = np.full(arrays.fitting.shape, np.inf)
        for at, column in enumerate(arrays.columns.tolist()):
            models = gpus[3][:, column].tolist()
            for model in dict.fromkeys(models):
                if model != NO_GPU:
                    node = NodeCosts(gpus, prices, demand, factors, arrays)
                    node.add(costs, at, model, models.index(model))
        return costs

    def cluster_slots(self, gpus: GpuArrays, prices: Prices, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        sums = np.zeros(len(prices.of_tasks), np.int64)
        several = np.flatnonzero(prices.workload.count > 1).tolist()
        for column in columns.tolist():
            for model in range(1, len(prices.models)):
                state = read_state(gpus, column, model)
                for task in several:
                    sums[task] += slots_of(state, prices.parts[model], task)
        return sums

    def cluster_fragmentation(self, gpus: GpuArrays, prices: Prices, columns: NDArray[np.int64]) -> float:
        models = range(1, len(prices.models))
        return sum(
            fragmentation(read_state(gpus, column, model), prices.parts[model])
            for column in columns.tolist()
            for model in models
        )


class NodeCosts(Struct):
    """What the costs on one node are computed from."""

    gpus: GpuArrays
    prices: Prices
    demand: Demand
    factors: Factors
    arrays: CostArrays

    def add(self, costs: NDArray[np.float64], at: int, model: int, first_slot: int) -> None:
        """Fill in the costs of the GPUs of one model."""
        demand, factors, arrays, column = self.demand, self.factors, self.arrays, int(self.arrays.columns[at])
        state, part = read_state(self.gpus, column, model), self.prices.parts[model]
        mib = [self._needed_steps(int(self.gpus[2][slot, column])) for slot in state.slots]
        fits = [bool(demand.count and arrays.fitting[slot, at]) for slot in state.slots]
        if not state.slots or sum(fits) < demand.count:
            return
        before = self._worth(state, part, arrays.fill_before, (first_slot, column))
        seen: set[tuple[int, int]] = set()
        for gpu, slot in enumerate(state.slots):
            kind = state.cores[gpu], state.mib[gpu]
            if kind in seen or not (fits[gpu] if demand.count else gpu == 0):
                continue
            seen.add(kind)
            after = self._worth(state.placed(demand, gpu, mib, fits), part, arrays.fill_after, (slot, column))
            costs[slot, at] = (
                factors.fill * (before.fill - after.fill)
                + factors.slots * (before.slots - after.slots)
                + factors.fragmentation * (after.fragmentation - before.fragmentation)
                + factors.free * sum(state.cores) / CORES_PER_CARD
                + factors.model * self.prices.of_models[model] * demand.count * demand.cores / CORES_PER_CARD
            )
            if demand.count > 1 or demand.cores == CORES_PER_CARD:
                return

    def _needed_steps(self, card_mib: int) -> int:
        if self.demand.cores == CORES_PER_CARD:
            return MAX_STEPS
        mib = card_mib * self.demand.cores // CORES_PER_CARD if self.demand.follows else self.demand.mib
        return clamp(-(-mib // MIB_STEP), MAX_STEPS)

    def _worth(self, state: NodeState, part: ModelTasks, known: NDArray[np.float32], place: tuple[int, int]) -> Worth:
        worth = Worth(0.0, 0.0, 0.0)
        if self.factors.fill:
            if np.isnan(known[place]):
                known[place] = expected_fill(state, part.offered)
            worth.fill = float(known[place]) / (SEQUENCES * CORES_PER_CARD)
        if self.factors.slots:
            for task in np.flatnonzero(self.prices.workload.count > 1).tolist():
                worth.slots += float(self.prices.of_tasks[task]) * slots_of(state, part, task)
        if self.factors.fragmentation:
            worth.fragmentation = fragmentation(state, part) / CORES_PER_CARD
        return worth

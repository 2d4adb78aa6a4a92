"""What it costs the cluster to place a pod on a node: how much less the node will then take of what is likely to come.

The cost of placing a task on some GPUs of a node is the sum of
- what the node is expected to take before, minus after, in GPUs (see `vcuda.offers`);
- for each typical task of several GPUs, how many fewer of them fit on the node, times their price;
- the price of the model for each GPU of the task;
- a little for each free GPU of the node, so that used nodes are filled first;
- where pods end as often as they arrive, the fragmentation that it adds: how much more of what is free a typical task
  cannot use.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from vcuda.compiled_workload import CompiledWorkload, Prices
from vcuda.cost_terms import CostArrays, Demand, Factors, factors_at
from vcuda.fill_kernel import load_kernel
from vcuda.fill_reference import FillReference
from vcuda.gpu_availability import GpuAvailability
from vcuda.gpu_table import Columns, Flags, GpuTable, TableView
from vcuda.host import Host
from vcuda.recent import keep_recent
from vcuda.vocabulary import CORES_PER_CARD
from vcuda.workload import WorkloadHistory

# Prices and turnover are computed again after this many arrivals: a three-hundredth of the cluster's GPUs.
GPUS_PER_REFRESH = 300
MAX_CLASSES = 128
KERNEL = load_kernel() or FillReference()

Costs = NDArray[np.float64]


class WorkloadEstimate(Struct):
    """What is known of the workload: its typical tasks, how many tasks have arrived, and how many end for each."""

    workload: CompiledWorkload
    arrivals: int = 0
    turnover: float = 0.0
    # Counts the changes of `workload`.
    version: int = 0


@cache  # many a trial placement has no other estimate
def prior_workload() -> CompiledWorkload:
    return CompiledWorkload(WorkloadHistory().typical())


def prior_estimate() -> WorkloadEstimate:
    return WorkloadEstimate(prior_workload())


def fragmentation_gpus(table: GpuTable, workload: CompiledWorkload) -> float:
    """Return how much free GPU of all nodes a task of a workload cannot use, in the mean."""
    columns = np.flatnonzero(table.node_cores() > 0)
    prices = Prices(workload, table.models())
    return KERNEL.cluster_fragmentation(table.kernel_arrays(), prices, columns) / CORES_PER_CARD


class PlacementCosts:
    """The costs on the nodes of one table; what it takes to compute them is kept. Not thread-safe."""

    def __init__(self, table: GpuTable, estimate: WorkloadEstimate) -> None:
        self._table, self._estimate = table, estimate
        self._prices: Prices | None = None
        self._workload_version, self._priced_at = -1, 0
        self._factors = Factors()
        # Changes when costs on nodes that did not change may be others.
        self.version = 0
        self._before = FillCache((0, 0))
        self._after: dict[object, FillCache] = {}

    def refresh(self) -> Prices:
        """Take over a new workload, and compute the prices again if enough tasks have arrived."""
        estimate, models, prices = self._estimate, self._table.models(), self._prices
        interval = max(1, self._table.gpu_count() // GPUS_PER_REFRESH)
        if prices is None or estimate.version != self._workload_version or prices.models != models:
            prices = self._prices = Prices(estimate.workload, models)
            self._workload_version = estimate.version
            self._before, self._after = FillCache((0, 0)), {}
            self._set_prices(prices)
        elif estimate.arrivals - self._priced_at >= interval:
            self._set_prices(prices)
        return prices

    def _set_prices(self, prices: Prices) -> None:
        columns = np.flatnonzero(self._table.node_cores() > 0)
        slots = KERNEL.cluster_slots(self._table.kernel_arrays(), prices, columns)
        prices.set_prices(slots, self._table.free_gpus_by_model())
        self._factors = factors_at(self._estimate.turnover)
        self._priced_at = self._estimate.arrivals
        self.version += 1

    def attach(self, table: GpuTable, estimate: WorkloadEstimate) -> None:
        """Continue with the table of which the present one is a copy, and with an estimate of the same workload."""
        self._table, self._estimate, self._workload_version = table, estimate, estimate.version
        # As for a workload that was not prepared.
        if self._prices is not None and self._prices.models == table.models():
            self._set_prices(self._prices)
        else:
            # A model was added meanwhile.
            self._prices = None

    def costs(
        self,
        view: TableView,
        fitting: Flags,
        demand: Demand,
        key: object = None,
        factors: Factors | None = None,
    ) -> Costs:
        """Return what it costs to place a demand on each of the GPUs that fit: slots by nodes, infinity elsewhere.

        Of equal GPUs of a node only the first one has a cost. For a demand of several GPUs that is the first of them.
        `key` is equal for equal demands.
        """
        prices = self.refresh()
        shape = self._table.kernel_arrays()[0].shape
        self._before = self._before.renewed(self._table, shape)
        after = self._after.get(key, FillCache((0, 0))).renewed(self._table, shape)
        if key is not None:
            keep_recent(self._after, key, after, MAX_CLASSES)
        arrays = CostArrays(
            np.ascontiguousarray(view.columns, np.int64), np.ascontiguousarray(fitting), self._before.fills, after.fills
        )
        gpus = self._table.kernel_arrays()
        return KERNEL.placement_costs(gpus, prices, demand, factors or self._factors, arrays)

    def gpu_costs(
        self,
        gpus: Sequence[GpuAvailability],
        fits: Sequence[bool],
        host: Host,
        demand: Demand,
        factors: Factors | None = None,
    ) -> list[float]:
        """Return what it costs to place a demand on each of the GPUs of one model of a node."""
        prices, model = self.refresh(), gpus[0].gpu.model
        if model not in dict(prices.models):
            # A node that is not in the table: nothing is scarce as far as is known.
            prices = Prices(prices.workload, (("", 0), (model, gpus[0].gpu.memory_mib)))
        number = next(at for at, (name, _) in enumerate(prices.models) if name == model)
        column = (
            np.array([[each.free_cores] for each in gpus], np.int32),
            np.array([[each.free_memory_mib] for each in gpus], np.int32),
            np.array([[each.gpu.memory_mib] for each in gpus], np.int32),
            np.full((len(gpus), 1), number, np.int32),
            np.array([[not each.unavailable_reason] for each in gpus], np.bool_),
            np.array([host.cpu_milli]),
            np.array([host.mib]),
        )
        unknown = np.full((2, len(gpus), 1), np.nan, np.float32)
        arrays = CostArrays(np.zeros(1, np.int64), np.array([[each] for each in fits], np.bool_), *unknown)
        costs = KERNEL.placement_costs(column, prices, demand, factors or self._factors, arrays)
        result: list[float] = costs[:, 0].tolist()
        return result


class FillCache:
    """What nodes are expected to take, as of a change of the table: slots by columns, NaN where it is not known."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.fills = np.full(shape, np.nan, np.float32)
        self.change = 0

    def renewed(self, table: GpuTable, shape: tuple[int, ...]) -> "FillCache":
        """Forget what has changed since; returns another cache if the table has grown."""
        if self.fills.shape != shape:
            other = FillCache(shape)
            other.change = table.changes
            return other
        changed: Columns = table.changed_since(self.change)
        if len(changed):
            self.fills[:, changed] = np.nan
        self.change = table.changes
        return self

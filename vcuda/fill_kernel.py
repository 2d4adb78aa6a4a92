"""Calls of the compiled library, see fill_kernel.c: the memory layout of its arguments, and nothing else.

The library is built when Quotient is installed. Without it the same results come from `vcuda.fill_reference`, some
hundred times slower.
"""

import ctypes
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from vcuda.compiled_workload import Prices
from vcuda.cost_terms import CostArrays, Demand, Factors
from vcuda.gpu_table import GpuArrays
from vcuda.native_library import load_library, pointers


def fields(kind: type[Any], *names: str) -> tuple[tuple[str, type[Any]], ...]:
    return tuple((name, kind) for name in names)


class COffers(Structure):
    _fields_ = (("steps", c_int64), *fields(c_void_p, "host_cpu", "host_mib", "cores", "mib", "count"))


class CTasks(Structure):
    _fields_ = (
        ("length", c_int64),
        *fields(c_void_p, "host_cpu", "host_mib", "cores", "mib", "count", "allowed", "weight", "price"),
    )


class CModelWorkload(Structure):
    _fields_ = (("offered", COffers), ("typical", CTasks), ("price", c_void_p))


class CTable(Structure):
    _fields_ = (
        *fields(c_int64, "slots", "width"),
        *fields(c_void_p, "free_cores", "free_mib", "card_mib", "model", "usable", "host_cpu", "host_mib"),
    )


class CDemand(Structure):
    _fields_ = fields(c_int32, "count", "cores", "mib", "follows", "host_cpu", "host_mib")


class CFactors(Structure):
    _fields_ = fields(c_double, "fill", "slots", "model", "free", "fragmentation")


class FillKernel:
    """The functions of the library. Calls release Python's global lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._costs, self._slots = library.placement_costs, library.cluster_slots
        self._fragmentation = library.cluster_fragmentation
        self._costs.restype = self._slots.restype = None
        pointed: list[Any] = [POINTER(CTable), POINTER(CModelWorkload), POINTER(CDemand), POINTER(CFactors)]
        self._costs.argtypes = [*pointed, c_int64, *[c_void_p] * 5]
        self._slots.argtypes = [*pointed[:2], c_int64, c_int64, c_void_p, c_void_p]
        self._fragmentation.argtypes, self._fragmentation.restype = self._slots.argtypes[:-1], c_double

    def placement_costs(
        self, gpus: GpuArrays, prices: Prices, demand: Demand, factors: Factors, arrays: CostArrays
    ) -> NDArray[np.float64]:
        """Return what it costs to place a demand: slots by columns, infinity where it does not fit."""
        costs = np.empty(arrays.fitting.shape)
        addresses = pointers((arrays.columns, arrays.fitting, arrays.fill_before, arrays.fill_after, costs))
        self._costs(
            packed_table(gpus),
            self._workloads(prices),
            CDemand(*astuple(demand)),
            CFactors(*astuple(factors)),
            len(arrays.columns),
            *addresses,
        )
        return costs

    def cluster_slots(self, gpus: GpuArrays, prices: Prices, columns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of each typical task of several GPUs fit on all of these nodes together."""
        sums = np.zeros(len(prices.of_tasks), np.int64)
        workloads = self._workloads(prices)
        self._slots(packed_table(gpus), workloads, len(workloads), len(columns), *pointers((columns, sums)))
        return sums

    def cluster_fragmentation(self, gpus: GpuArrays, prices: Prices, columns: NDArray[np.int64]) -> float:
        """Return the cores of these nodes that a typical task cannot use, in the mean."""
        workloads = self._workloads(prices)
        sum_: float = self._fragmentation(
            packed_table(gpus), workloads, len(workloads), len(columns), columns.ctypes.data
        )
        return sum_

    def _workloads(self, prices: Prices) -> "ctypes.Array[CModelWorkload]":
        # Packed once: the arrays stay where they are.
        if prices.packed is None:
            parts = [packed_model(prices, number) for number in range(len(prices.parts))]
            prices.packed = (CModelWorkload * len(parts))(*parts)
        packed: ctypes.Array[CModelWorkload] = prices.packed
        return packed


def packed_table(gpus: GpuArrays) -> CTable:
    return CTable(*gpus[0].shape, *pointers(gpus))


def packed_model(prices: Prices, number: int) -> CModelWorkload:
    part, tasks = prices.parts[number], len(prices.of_tasks)
    return CModelWorkload(
        COffers(len(part.offered[0]), *pointers(part.offered)),
        CTasks(tasks, *pointers((*part.typical, prices.of_tasks))),
        prices.of_models[number:].ctypes.data,
    )


def load_kernel() -> FillKernel | None:
    """Return the functions, None if the library was not built for this machine."""
    library = load_library()
    return FillKernel(library) if library is not None else None

"""Placement strategies: in which order the models of a node, and the GPUs of a model, are tried for a pod.

A new strategy is a class here, a member of `PlacementStrategy` (its name in the configuration) and an entry in
`RANKINGS`. A strategy only decides what is tried first; whether a container fits on a GPU is decided in
`vcuda.placement`.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from vcuda.gpu_availability import GpuAvailability

# The smallest is tried first. Equal ranks are tried in the order of model names and GPU indexes, so that a placement
# never depends on the order in which a node lists its GPUs.
Rank = tuple[int, ...]


class PlacementStrategy(StrEnum):
    BINPACK = "binpack"
    SPREAD = "spread"


class Ranking(Protocol):
    def rank_model(self, gpus: Sequence[GpuAvailability]) -> Rank:
        """Rank a model by what is free of all its GPUs on the node."""
        ...

    def rank_gpu(self, gpu: GpuAvailability) -> Rank:
        """Rank a GPU for a fraction. What the pod's other containers take of it is not counted as free."""
        ...


class BinPack:
    """Prefer the fullest: fractions share GPUs, and whole GPUs stay free."""

    def rank_model(self, gpus: Sequence[GpuAvailability]) -> Rank:
        return (total_free_cores(gpus),)

    def rank_gpu(self, gpu: GpuAvailability) -> Rank:
        return gpu.free_cores, gpu.free_memory_mib


class Spread:
    """Prefer the emptiest: each container has as little competition on its GPU as possible."""

    def rank_model(self, gpus: Sequence[GpuAvailability]) -> Rank:
        return (-total_free_cores(gpus),)

    def rank_gpu(self, gpu: GpuAvailability) -> Rank:
        return -gpu.free_cores, -gpu.free_memory_mib


RANKINGS: dict[PlacementStrategy, Ranking] = {
    PlacementStrategy.BINPACK: BinPack(),
    PlacementStrategy.SPREAD: Spread(),
}


def total_free_cores(gpus: Sequence[GpuAvailability]) -> int:
    return sum(each.free_cores for each in gpus if not each.unavailable_reason)

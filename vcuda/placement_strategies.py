"""Placement strategies: in which order the models of a node, and the GPUs of a model, are tried for a pod.

A strategy only decides what is tried first; whether a container fits on a GPU is decided in `vcuda.placement`. Here are
those that look at each GPU alone; `vcuda.cost_ranking` has those that look at what the node will still take. The order
of nodes is in `vcuda.node_ranking`. A new strategy is a member of `PlacementStrategy` (its name in the configuration
and in annotations), and a ranking of GPUs and one of nodes.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from vcuda.gpu_availability import GpuAvailability
from vcuda.vocabulary import Share

# The smallest is tried first. Equal ranks are tried in the order of model names and GPU indexes, so that a placement
# never depends on the order in which a node lists its GPUs.
Rank = tuple[int, ...]


class PlacementStrategy(StrEnum):
    # Keep the most room for what is likely to come.
    FRAGMENTATION = "fragmentation"
    # Fill the fullest GPU.
    BINPACK = "binpack"
    # Use the emptiest GPU.
    SPREAD = "spread"
    # Use the GPUs with the fastest links, for pods with several; otherwise as `fragmentation`.
    TOPOLOGY = "topology"
    # Only to compare with: the policies of other schedulers.
    FGD = "fgd"
    BESTFIT = "bestfit"
    RANDOM = "random"


# Those that a quota or a pod may set; the others only the configuration.
SETTABLE_STRATEGIES = (
    PlacementStrategy.FRAGMENTATION,
    PlacementStrategy.BINPACK,
    PlacementStrategy.SPREAD,
    PlacementStrategy.TOPOLOGY,
)


class Ranking(Protocol):
    def rank_model(self, share: Share, gpus: Sequence[GpuAvailability]) -> Rank:
        """Rank a model by what is free of all its GPUs on the node, for a pod's largest share."""
        ...

    def rank_gpus(self, share: Share, gpus: Sequence[GpuAvailability], fits: Sequence[bool]) -> Sequence[Rank]:
        """Rank the GPUs of one model for a fraction, which fits on some of them.

        What the pod's other containers take of them is not counted as free.
        """
        ...


class BinPack:
    """Prefer the fullest: fractions share GPUs, and whole GPUs stay free."""

    def rank_model(self, _: Share, gpus: Sequence[GpuAvailability]) -> Rank:
        return (total_free_cores(gpus),)

    def rank_gpus(self, _: Share, gpus: Sequence[GpuAvailability], _fits: Sequence[bool]) -> Sequence[Rank]:
        return [(each.free_cores, each.free_memory_mib) for each in gpus]


class Spread:
    """Prefer the emptiest: each container has as little competition on its GPU as possible."""

    def rank_model(self, _: Share, gpus: Sequence[GpuAvailability]) -> Rank:
        return (-total_free_cores(gpus),)

    def rank_gpus(self, _: Share, gpus: Sequence[GpuAvailability], _fits: Sequence[bool]) -> Sequence[Rank]:
        return [(-each.free_cores, -each.free_memory_mib) for each in gpus]


class BusyLast:
    """Prefer what another ranking prefers, but GPUs that are not busy before those that are."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking

    def rank_model(self, share: Share, gpus: Sequence[GpuAvailability]) -> Rank:
        return int(all(each.is_busy for each in gpus)), *self._ranking.rank_model(share, gpus)

    def rank_gpus(self, share: Share, gpus: Sequence[GpuAvailability], fits: Sequence[bool]) -> Sequence[Rank]:
        ranks = self._ranking.rank_gpus(share, gpus, fits)
        return [(int(each.is_busy), *rank) for each, rank in zip(gpus, ranks, strict=True)]


def total_free_cores(gpus: Sequence[GpuAvailability]) -> int:
    return sum(each.free_cores for each in gpus if not each.unavailable_reason)

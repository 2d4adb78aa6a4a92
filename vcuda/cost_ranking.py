"""The order of GPUs for the strategies that compare costs, see `vcuda.placement_costs`."""

import zlib
from collections.abc import Callable, Sequence
from math import exp, inf

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from vcuda.cost_terms import FRAGMENTATION_ONLY, Factors, demand_of
from vcuda.gpu_availability import GpuAvailability
from vcuda.gpu_table import GpuTable
from vcuda.host import UNLIMITED, Host
from vcuda.placement_costs import PlacementCosts, prior_estimate
from vcuda.placement_strategies import BinPack, PlacementStrategy, Rank, Ranking, Spread
from vcuda.vocabulary import Share

# Costs are compared as whole numbers: in units of this part of a GPU.
STEPS_PER_GPU = 2**20
# Where GPUs are so scarce that costs are higher, nodes count as equal.
MAX_COST = 2**14


def cost_steps(cost: float) -> int:
    return round(min(cost, MAX_COST) * STEPS_PER_GPU)


def fgd_steps(cost: float) -> int:
    """Return FGD's rank: a whole number of per cents, as in the paper's program; the ties are part of the policy."""
    return 0 if cost == inf else -int(100 / (1 + exp(cost)))


class RankingContext(Struct, frozen=True):
    """What a strategy knows beside the GPUs of one node: its free CPU and memory, and what the pod requests of them.

    `seed` is that of the strategy `random`.
    """

    costs: PlacementCosts | None = None
    free: Host = UNLIMITED
    requested: Host = Host()
    unit_mib: int = 1
    seed: str = ""


NO_CONTEXT = RankingContext()


class CostRanking:
    """Prefer the GPU with the lowest cost."""

    def __init__(
        self, context: RankingContext, factors: Factors | None = None, steps: Callable[[float], int] = cost_steps
    ) -> None:
        self._context, self._factors, self._steps = context, factors, steps
        self._costs = context.costs or PlacementCosts(GpuTable(), prior_estimate())

    def rank_model(self, share: Share, gpus: Sequence[GpuAvailability]) -> Rank:
        fits = [each.is_unused if share.whole_cards else each.free_cores >= share.cores for each in gpus]
        return min(self.rank_gpus(share, gpus, fits))

    def rank_gpus(self, share: Share, gpus: Sequence[GpuAvailability], fits: Sequence[bool]) -> Sequence[Rank]:
        context = self._context
        demand = demand_of(share, context.unit_mib, context.requested)
        costs = self._costs.gpu_costs(gpus, fits, context.free, demand, self._factors)
        return [(self._steps(cost),) for cost in costs]


class RandomRanking:
    """Prefer any GPU: in an order that depends on a seed and the GPUs, and on nothing else."""

    def __init__(self, context: RankingContext) -> None:
        self._seed = context.seed

    def rank_model(self, _: Share, gpus: Sequence[GpuAvailability]) -> Rank:
        return (random_number(self._seed, gpus[0].gpu.model),)

    def rank_gpus(self, _: Share, gpus: Sequence[GpuAvailability], _fits: Sequence[bool]) -> Sequence[Rank]:
        return [(random_number(self._seed, each.gpu.uuid),) for each in gpus]


def random_number(seed: str, name: str) -> int:
    """Return a number below 2**32 that is always the same for a seed and a name."""
    return int(mixed(seed, np.array([zlib.crc32(name.encode())], np.uint64))[0])


def mixed(seed: str, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a number below 2**32 for each of these, in an order of its own for every seed."""
    # Multiplied after the checksums: those of equally long texts differ by the same bits for every seed.
    product = (np.uint64(zlib.crc32(seed.encode()) << 32) | numbers) * np.uint64(0x9E3779B97F4A7C15)
    product = (product ^ product >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    result: NDArray[np.uint64] = product >> np.uint64(32)
    return result


def ranking_for(strategy: PlacementStrategy, context: RankingContext = NO_CONTEXT) -> Ranking:
    """Return the order of GPUs of a strategy."""
    match strategy:
        case PlacementStrategy.FRAGMENTATION | PlacementStrategy.TOPOLOGY:
            return CostRanking(context)
        case PlacementStrategy.FGD:
            return CostRanking(context, FRAGMENTATION_ONLY, fgd_steps)
        case PlacementStrategy.SPREAD:
            return Spread()
        case PlacementStrategy.RANDOM:
            return RandomRanking(context)
        case _:
            return BinPack()

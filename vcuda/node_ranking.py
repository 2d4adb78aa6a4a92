"""In which order nodes are preferred for a pod: the node side of the strategies in `vcuda.placement_strategies`.

A new strategy is a function here and an entry in `NODE_RANKINGS`.
"""

from collections.abc import Callable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from vcuda.cost_ranking import MAX_COST, STEPS_PER_GPU, mixed
from vcuda.cost_terms import FRAGMENTATION_ONLY, Factors, demand_of
from vcuda.fit_query import FitQuery, class_key
from vcuda.gpu_table import Flags, GpuTable, Numbers, TableView
from vcuda.link_ranking import best_link_ranks
from vcuda.placement_costs import PlacementCosts
from vcuda.placement_strategies import PlacementStrategy
from vcuda.vocabulary import CORES_PER_CARD, Share

# A key is the number of free cores of the chosen GPU, then of the node, then the free memory of the GPU in steps of 64
# MiB; the factors keep the parts apart. No node has 81 GPUs, and no GPU 32 TiB. Keys of nodes that fit have 40 bits.
NODE_FACTOR, GPU_FACTOR = 2**19, 2**32
MIB_STEP, MAX_MIB = 64, np.int32(2**25 - 64)
# More than any GPU has.
NONE_FITS = np.int32(2**10)
# BestFit compares with the largest node of the paper: 128 CPUs and 8 GPUs. Its score is a whole number up to 100.
BESTFIT_CPU, BESTFIT_CORES = 128_000, 800
# Keys of costs have 34 bits; the rank of the slowest link between the GPUs, which has 5, comes before them.
LINK_FACTOR = 2**35


class Ranked(Struct, frozen=True):
    """Nodes to be ranked: a view of the table, which of their GPUs fit the pod's largest container, and its share."""

    table: GpuTable
    view: TableView
    fitting: Flags
    share: Share | None
    query: FitQuery
    costs: PlacementCosts


# From nodes to a key for each of them: the smallest is preferred.
NodeRanking = Callable[[Ranked], Numbers]


def rank_binpack(ranked: Ranked) -> Numbers:
    """Prefer the GPU that is left with the fewest cores, so that whole GPUs stay free; then the fullest node."""
    view = ranked.view
    keys: Numbers = view.node_cores * NODE_FACTOR
    if ranked.share is None or ranked.share.whole_cards:
        return keys
    # Sums are much faster than numpy's `where`.
    cores = view.free_cores + ~ranked.fitting * NONE_FITS
    left = cores.min(axis=0)
    mib = (view.free_mib + (cores != left) * MAX_MIB).min(axis=0)
    keys += left.astype(np.int64) * GPU_FACTOR + mib // MIB_STEP
    return keys


def rank_spread(ranked: Ranked) -> Numbers:
    """Prefer the GPU that is left with the most cores, so that pods compete as little as possible; then the node."""
    view = ranked.view
    keys: Numbers = view.node_cores * -NODE_FACTOR
    if ranked.share is None or ranked.share.whole_cards:
        return keys
    cores = view.free_cores * ranked.fitting
    left = cores.max(axis=0)
    mib = (view.free_mib * (ranked.fitting & (cores == left))).max(axis=0)
    keys -= left.astype(np.int64) * GPU_FACTOR + mib // MIB_STEP
    return keys


def least_costs(ranked: Ranked, factors: Factors | None = None) -> NDArray[np.float64]:
    """Return the cost of the best GPU of each node; infinity where none fits."""
    query = ranked.query
    demand = demand_of(ranked.share, query.unit_mib, query.host)
    key = None if query.excluded else (class_key(query), factors)
    costs = ranked.costs.costs(ranked.view, ranked.fitting, demand, key, factors)
    least: NDArray[np.float64] = costs.min(axis=0)
    return least


def rank_fragmentation(ranked: Ranked) -> Numbers:
    """Prefer the node where the pod costs the least of what is likely to come."""
    keys: Numbers = np.rint(np.minimum(least_costs(ranked), MAX_COST) * STEPS_PER_GPU).astype(np.int64)
    return keys


def rank_topology(ranked: Ranked) -> Numbers:
    """For several GPUs, prefer those with the fastest links; then as `rank_fragmentation`."""
    keys = rank_fragmentation(ranked)
    if ranked.share is None or ranked.share.whole_cards <= 1:
        return keys
    return keys - best_link_ranks(ranked.table, ranked.view, ranked.fitting, ranked.share.whole_cards) * LINK_FACTOR


def rank_fgd(ranked: Ranked) -> Numbers:
    """Prefer the node whose fragmentation grows the least, as a whole number of per cents like the paper's program."""
    with np.errstate(over="ignore"):
        return -(100 / (1 + np.exp(least_costs(ranked, FRAGMENTATION_ONLY)))).astype(np.int64)


def rank_bestfit(ranked: Ranked) -> Numbers:
    """Prefer the node that is left with the least CPU and GPU, each as a part of the largest node's."""
    view, query = ranked.view, ranked.query
    cores = ranked.share.cores if ranked.share is not None else 0
    cpu_left = (view.host_cpu - query.host.cpu_milli) / BESTFIT_CPU
    left = 0.5 * cpu_left + 0.5 * (view.node_cores - cores) / BESTFIT_CORES
    return -np.floor((1 - left) * CORES_PER_CARD).astype(np.int64)


def rank_random(ranked: Ranked) -> Numbers:
    """Prefer any node: in an order that depends on a seed and the names of nodes, and on nothing else."""
    numbers = mixed(ranked.query.seed, ranked.table.name_numbers()[ranked.view.columns])
    return numbers.astype(np.int64)


NODE_RANKINGS: dict[PlacementStrategy, NodeRanking] = {
    PlacementStrategy.FRAGMENTATION: rank_fragmentation,
    PlacementStrategy.BINPACK: rank_binpack,
    PlacementStrategy.SPREAD: rank_spread,
    PlacementStrategy.TOPOLOGY: rank_topology,
    PlacementStrategy.FGD: rank_fgd,
    PlacementStrategy.BESTFIT: rank_bestfit,
    PlacementStrategy.RANDOM: rank_random,
}

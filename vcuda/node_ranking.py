"""In which order nodes are preferred for a pod: the node side of the strategies in `vcuda.placement_strategies`.

A new strategy is a function here and an entry in `NODE_RANKINGS`.
"""

from collections.abc import Callable

import numpy as np

from vcuda.gpu_table import Flags, Numbers, TableView
from vcuda.placement_strategies import PlacementStrategy
from vcuda.vocabulary import Share

# A key is the number of free cores of the chosen GPU, then of the node, then the free memory of the GPU in steps of 64
# MiB; the factors keep the parts apart. No node has 81 GPUs, and no GPU 32 TiB. Keys of nodes that fit have 40 bits.
NODE_FACTOR, GPU_FACTOR = 2**19, 2**32
MIB_STEP, MAX_MIB = 64, np.int32(2**25 - 64)
# More than any GPU has.
NONE_FITS = np.int32(2**10)

# From the nodes, which of their GPUs fit the pod's largest container, and its share, to a key for each node: the
# smallest is preferred.
NodeRanking = Callable[[TableView, Flags, Share], Numbers]


def rank_binpack(view: TableView, fitting: Flags, share: Share) -> Numbers:
    """Prefer the GPU that is left with the fewest cores, so that whole GPUs stay free; then the fullest node."""
    keys: Numbers = view.node_cores * NODE_FACTOR
    if share.whole_cards:
        return keys
    # Sums are much faster than numpy's `where`.
    cores = view.free_cores + ~fitting * NONE_FITS
    left = cores.min(axis=0)
    mib = (view.free_mib + (cores != left) * MAX_MIB).min(axis=0)
    keys += left.astype(np.int64) * GPU_FACTOR + mib // MIB_STEP
    return keys


def rank_spread(view: TableView, fitting: Flags, share: Share) -> Numbers:
    """Prefer the GPU that is left with the most cores, so that pods compete as little as possible; then the node."""
    keys: Numbers = view.node_cores * -NODE_FACTOR
    if share.whole_cards:
        return keys
    cores = view.free_cores * fitting
    left = cores.max(axis=0)
    mib = (view.free_mib * (fitting & (cores == left))).max(axis=0)
    keys -= left.astype(np.int64) * GPU_FACTOR + mib // MIB_STEP
    return keys


NODE_RANKINGS: dict[PlacementStrategy, NodeRanking] = {
    PlacementStrategy.BINPACK: rank_binpack,
    PlacementStrategy.SPREAD: rank_spread,
}

"""What a cost is computed from, see `vcuda.placement_costs`: what is to be placed, and how much each part counts."""

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from vcuda.host import Host
from vcuda.vocabulary import CORES_PER_CARD, Share
from vcuda.workload import whole_or_share


class Factors(Struct, frozen=True):
    """The factors of the parts of a cost."""

    fill: float = 1.0
    slots: float = 0.3
    model: float = 1.0
    free: float = 0.006
    fragmentation: float = 0.0


# How much more fragmentation and room for several GPUs count where as many tasks leave as arrive. While a cluster
# fills, what a node will still take says all; where tasks leave, GPUs become free here and there, and nodes with
# several free ones are rare. Chosen among eight variants on the trace multigpu50, which was below FGD without them, and
# then tried on four of the other traces of docs/placement.md.
TURNOVER_FRAGMENTATION, TURNOVER_SLOTS = 2.0, 5.0


def factors_at(turnover: float) -> Factors:
    """Return the factors where so many tasks leave for each one that arrives."""
    base = Factors()
    return Factors(slots=base.slots + TURNOVER_SLOTS * turnover, fragmentation=TURNOVER_FRAGMENTATION * turnover)


# FGD's: the growth of fragmentation alone.
FRAGMENTATION_ONLY = Factors(0.0, 0.0, 0.0, 0.0, 1.0)


class Demand(Struct, frozen=True):
    """What is to be placed: `count` GPUs with `cores` of each; 0 GPUs if only the node's own CPU and memory.

    With `follows` the memory is the same share of a GPU as the cores.
    """

    count: int
    cores: int
    mib: int
    follows: bool
    host_cpu: int
    host_mib: int


def demand_of(share: Share | None, unit_mib: int, host: Host) -> Demand:
    """Return what a container takes, with the CPU and memory of its whole pod; None is a pod without GPUs."""
    if share is None:
        return Demand(0, 0, 0, False, host.cpu_milli, host.mib)  # noqa: FBT003 - follows nothing
    count, cores = whole_or_share(share.cores)
    follows = share.memory_follows_cores or cores == CORES_PER_CARD
    return Demand(count, cores, 0 if follows else share.memory_units * unit_mib, follows, host.cpu_milli, host.mib)


class CostArrays(Struct, frozen=True):
    """Which nodes and GPUs costs are computed for, and what is known of them.

    `columns` are those of the table, and `fitting` flags the GPUs that fit: slots by columns. The fills are what nodes
    are expected to take before and after: slots by all columns of the table, NaN where that is not known. Before, it is
    kept in the slot of the first GPU of each model. They are filled in.
    """

    columns: NDArray[np.int64]
    fitting: NDArray[np.bool_]
    fill_before: NDArray[np.float32]
    fill_after: NDArray[np.float32]

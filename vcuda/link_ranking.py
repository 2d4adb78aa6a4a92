"""How well the free GPUs of each node are connected, for pods with several GPUs."""

from functools import lru_cache

import numpy as np

from vcuda.gpu_table import Flags, GpuTable, Numbers, TableView
from vcuda.gpu_topology import LinkRanks, slowest_link


def best_link_ranks(table: GpuTable, view: TableView, fitting: Flags, wanted: int) -> Numbers:
    """Return the rank of the slowest link of the best connected set of GPUs on each node; 0 where there is no set."""
    ranks = np.zeros(len(view.columns), np.int64)
    for at in np.flatnonzero(fitting.sum(axis=0) >= wanted).tolist():
        links = table.link_ranks(int(view.columns[at]))
        models = view.model[:, at]
        for model in np.unique(models[fitting[:, at]]):
            slots = tuple(np.flatnonzero(fitting[:, at] & (models == model)).tolist())
            if len(slots) >= wanted:
                ranks[at] = max(ranks[at], cached_slowest_link(links, slots, wanted))
    return ranks


@lru_cache(maxsize=4096)  # most nodes of a cluster are built alike
def cached_slowest_link(links: LinkRanks, slots: tuple[int, ...], wanted: int) -> int:
    return slowest_link(tuple(tuple(links[one][other] for other in slots) for one in slots), wanted)

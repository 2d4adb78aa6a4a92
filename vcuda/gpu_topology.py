"""How the GPUs of a node are connected, and which sets of them a container with several whole GPUs should get.

Links come from the node's inventory: NVLink, or the PCIe path between two GPUs, in the terms of `nvidia-smi topo`.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations, islice
from math import comb

from vcuda.inventory import Gpu

# PCIe paths, slowest first. NVLink is faster than all of them, and the faster the more links there are.
PATHS = ("sys", "node", "phb", "pxb", "pix", "board")
NVLINK = "nvlink"
# How many sets are ranked for one container: 2000 take 15 ms. All 12870 sets of 8 of 16 GPUs would take 160 ms.
MAX_SETS = 2000

# The rank of the link between every two of some GPUs, which are known by their positions.
LinkRanks = tuple[tuple[int, ...], ...]


def best_sets(gpus: Sequence[Gpu], wanted: int) -> Iterable[tuple[Gpu, ...]]:
    """Return sets of `wanted` GPUs, the best connected first; among equals, those that leave the others best connected.

    All sets, or the first `MAX_SETS` where all GPUs are connected alike. Where more sets than that differ, one set
    grown from each GPU.
    """
    return (tuple(gpus[each] for each in chosen) for chosen in GpuTopology(link_ranks(gpus)).best_sets(wanted))


def link_ranks(gpus: Sequence[Gpu]) -> LinkRanks:
    return tuple(
        tuple(link_rank(link_between(one, other)) if one is not other else 0 for other in gpus) for one in gpus
    )


def slowest_link(ranks: LinkRanks, wanted: int) -> int:
    """Return the rank of the slowest link of the best set of GPUs."""
    best = next(iter(GpuTopology(ranks).best_sets(wanted)))
    return min((ranks[one][other] for one, other in combinations(best, 2)), default=0)


class GpuTopology:
    """The links between some GPUs, which are known by their positions."""

    def __init__(self, ranks: LinkRanks) -> None:
        self._ranks = ranks
        self._sums = [sum(row) for row in self._ranks]
        self._total = sum(self._sums) // 2

    def best_sets(self, wanted: int) -> Iterable[tuple[int, ...]]:
        """Return sets of positions, the best first; see the function of this name."""
        positions = range(len(self._ranks))
        if self.is_uniform:
            # As behind an NVSwitch: there is nothing to compare, so the lowest indexes come first.
            return islice(combinations(positions, wanted), MAX_SETS)
        sets: Iterable[tuple[int, ...]]
        if comb(len(positions), wanted) <= MAX_SETS:
            sets = combinations(positions, wanted)
        else:
            sets = {self.grow_set(seed, wanted) for seed in positions}
        return sorted(sets, key=self.rank_set)

    @property
    def is_uniform(self) -> bool:
        ranks = {rank for position, row in enumerate(self._ranks) for rank in row[:position]}
        return len(ranks) <= 1

    def rank_set(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """Rank a set, the smallest best: its slowest link, the sum of its links, the sum of the links it leaves."""
        # A collective operation is as fast as its slowest link, so that one counts before the sum.
        inside = [self._ranks[one][other] for one, other in combinations(chosen, 2)]
        # The sums of the chosen GPUs count each link between two of them twice.
        left = self._total - sum(self._sums[each] for each in chosen) + sum(inside)
        return (-min(inside, default=0), -sum(inside), -left, *chosen)

    def grow_set(self, seed: int, wanted: int) -> tuple[int, ...]:
        """Grow a set from one GPU, each time by the GPU that is best connected to those already chosen."""
        chosen = [seed]
        while len(chosen) < wanted:
            rest = [each for each in range(len(self._ranks)) if each not in chosen]
            chosen.append(max(rest, key=lambda each: (*self._links_to(each, chosen), -each)))
        return tuple(sorted(chosen))

    def _links_to(self, one: int, chosen: Sequence[int]) -> tuple[int, int]:
        links = [self._ranks[one][other] for other in chosen]
        return min(links), sum(links)


def link_between(one: Gpu, other: Gpu) -> str:
    """Return the link between two GPUs; where none is known, "node" if they share a NUMA node, and "sys" otherwise."""
    # A driver may report a link for one of its two ends only.
    known = one.links.get(other.uuid) or other.links.get(one.uuid)
    if known:
        return known
    return "node" if one.numa is not None and one.numa == other.numa else "sys"


def link_rank(link: str) -> int:
    """Return how fast a link is compared to others, the largest fastest; 0 for a link of an unknown kind."""
    if link.startswith(NVLINK):
        count = link.removeprefix(NVLINK)
        return len(PATHS) + (int(count) if count.isdecimal() else 1)
    return PATHS.index(link) if link in PATHS else 0

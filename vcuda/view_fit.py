"""Which nodes of a table a pod fits on, by array operations over all of them at once.

For a pod with one container the result is exact; for others it is a necessary condition, see `vcuda.node_fit`.
"""

from functools import partial

import numpy as np
from msgspec import Struct

from vcuda.allowed_gpus import may_use_model
from vcuda.fit_query import FitQuery
from vcuda.gpu_table import Amounts, Flags, GpuTable, Numbers, TableView
from vcuda.node_problem import NodeProblem
from vcuda.node_ranking import NODE_RANKINGS, Ranked
from vcuda.placement import largest_share, peak_cores
from vcuda.placement_costs import PlacementCosts
from vcuda.vocabulary import CORES_PER_CARD, Share

# Added to the keys of nodes on which only busy GPUs fit; no key of a strategy has as many bits.
BUSY_FACTOR = 2**41
# Shares of a pod that are checked by array operations; more only take longer.
MAX_CHECKED = 8


class BestFree(Struct, frozen=True):
    """The most free cores and memory of a GPU that a pod may share, and the most unused GPUs of a node."""

    cores: int = 0
    mib: int = 0
    unused: int = 0


def largest_shares(query: FitQuery) -> list[Share]:
    """Return the shares to be checked: the largest in some respect, if there are many different ones.

    Where one of these does not fit, the pod does not fit. Where they do, a search decides.
    """
    shares = list(dict.fromkeys(each.share for each in query.request.containers))
    if len(shares) <= MAX_CHECKED:
        return shares
    by_cores = sorted(shares, key=lambda share: share.cores, reverse=True)
    return [*by_cores[: MAX_CHECKED - 1], max(shares, key=lambda share: share.memory_units)]


def fit_view(table: GpuTable, view: TableView, query: FitQuery, costs: PlacementCosts) -> tuple[Numbers, Numbers]:
    """Return the problem and the key of each node of a view; keys of nodes that do not fit mean nothing."""
    problems, fitting, share = fit_gpus(table, view, query) if query.request.containers else fit_without_gpus(view)
    if query.checks_host:
        lacks_host = (view.host_cpu < query.host.cpu_milli) | (view.host_mib < query.host.mib)
        problems[(problems == NodeProblem.NONE) & lacks_host] = NodeProblem.HOST
    ranked = Ranked(table, view, fitting, share, query, costs)
    keys = NODE_RANKINGS[query.strategy](ranked)
    if query.avoids_busy and share is not None and not share.whole_cards:
        keys = keys + ~on_any_gpu(fitting & ~view.busy) * BUSY_FACTOR
    return problems, keys


def fit_gpus(table: GpuTable, view: TableView, query: FitQuery) -> tuple[Numbers, Flags, Share]:
    """Return the problem of each node, the GPUs on which the largest share fits, and this share."""
    fit = ViewFit(table, view, query)
    for share in largest_shares(query):
        fit.check_share(share)
    if len(query.request.containers) > 1:
        fit.check_total(peak_cores(query.request))
    largest = largest_share(query.request)
    return fit.problems, fit.fitting(largest), largest


def fit_without_gpus(view: TableView) -> tuple[Numbers, Flags, None]:
    problems = np.where(on_any_gpu(view.present), NodeProblem.NONE, NodeProblem.NO_GPUS)
    return problems.astype(np.int64), np.zeros(view.present.shape, np.bool_), None


class ViewFit:
    """Narrows down the nodes of a view, problem by problem; a node keeps the first problem that is found."""

    def __init__(self, table: GpuTable, view: TableView, query: FitQuery) -> None:
        self._view, self._query, options = view, query, query.options
        self.problems = np.zeros(len(view.columns), np.int64)
        self._allowed: Flags = view.present
        self._require(self._allowed, NodeProblem.NO_GPUS)
        if query.pools is not None:
            self._require_nodes(table.pool_flags(query.pools, view), NodeProblem.POOL)
        if options.models or options.avoided_models:
            self._narrow(table.model_flags(partial(may_use_model, options), view), NodeProblem.MODEL)
        if query.granted is not None:
            self._narrow(table.model_flags(query.granted.__contains__, view), NodeProblem.QUOTA)
        if options.uuids:
            self._narrow(table.gpu_flags(options.uuids, view), NodeProblem.UUID)
        if options.avoided_uuids:
            self._narrow(~table.gpu_flags(options.avoided_uuids, view), NodeProblem.UUID)
        # Those that the pod may use, whether they are usable now or not.
        self._wanted = self._allowed
        self._narrow(view.usable, NodeProblem.UNAVAILABLE)
        if query.excluded:
            self._exclude_members(table)

    def _exclude_members(self, table: GpuTable) -> None:
        nodes = [name for name, uuids in self._query.excluded.items() if uuids is None]
        self._require_nodes(~np.isin(self._view.columns, table.columns_of(nodes)), NodeProblem.MEMBERS)
        uuids = [uuid for each in self._query.excluded.values() for uuid in each or ()]
        self._narrow(~table.gpu_flags(uuids, self._view), NodeProblem.MEMBERS)

    def _narrow(self, flags: Flags, problem: NodeProblem) -> None:
        self._allowed = self._allowed & flags
        self._require(self._allowed, problem)

    def _require(self, flags: Flags, problem: NodeProblem) -> None:
        """Give the problem to nodes without a GPU that has the flag."""
        self._require_nodes(on_any_gpu(flags), problem)

    def _require_nodes(self, flags: Flags, problem: NodeProblem) -> None:
        self.problems[(self.problems == NodeProblem.NONE) & ~flags] = problem

    def check_share(self, share: Share) -> None:
        """Check the share of one container, as if it were the only one of the pod."""
        if share.whole_cards:
            self._check_whole(share.whole_cards)
        else:
            self._check_fraction(share)

    def check_total(self, cores: int) -> None:
        """Check that all containers together do not need more cores than there are."""
        free = (np.maximum(self._view.free_cores, 0) * self._allowed).sum(axis=0)
        self._require_nodes(free >= cores, NodeProblem.COMBINATION)

    def _check_whole(self, wanted: int) -> None:
        self._require_nodes(self._largest_count(self._wanted) >= wanted, NodeProblem.TOO_FEW)
        self._require_nodes(self._largest_count(self._wanted & self._view.usable) >= wanted, NodeProblem.UNAVAILABLE)
        self._require_nodes(self._largest_count(self._allowed) >= wanted, NodeProblem.MEMBERS)
        self._require_nodes(self._largest_count(self._allowed & self._view.unused) >= wanted, NodeProblem.IN_USE)

    def _largest_count(self, flags: Flags) -> Amounts:
        """Count the GPUs with a flag on each node; of a node with several models, those of one model."""
        counts: Amounts = flags.sum(axis=0, dtype=np.int32)
        model, present = self._view.model, self._view.present
        if ((model != model[:1]) & present).any():
            counts = np.max([(flags & (model == each)).sum(axis=0) for each in np.unique(model[present])], axis=0)
        return counts

    def _check_fraction(self, share: Share) -> None:
        view, allowed, needed_mib = self._view, self._isolated(), self._needed_mib(share)
        self._require(allowed, NodeProblem.ISOLATION)
        # Without a known size, a GPU is only available as a whole.
        allowed = allowed & (view.card_mib > 0) & (view.card_mib >= needed_mib)
        self._require(allowed, NodeProblem.TOO_SMALL)
        has_cores = allowed & (view.free_cores >= share.cores)
        has_memory = allowed & (view.free_mib >= needed_mib)
        fits = on_any_gpu(has_cores & has_memory)
        self._require_nodes(fits | on_any_gpu(has_memory), NodeProblem.MEMORY)
        self._require_nodes(fits | on_any_gpu(has_cores), NodeProblem.CORES)
        self._require_nodes(fits, NodeProblem.CORES_AND_MEMORY)

    def _isolated(self) -> Flags:
        """Return the GPUs that are isolated well enough to be shared; whole ones are exclusive."""
        minimum = self._query.options.min_isolation
        if not minimum:
            return self._allowed
        has_memory = self._view.memory_rung >= minimum.memory.strength
        isolated: Flags = self._allowed & has_memory & (self._view.compute_rung >= minimum.compute.strength)
        return isolated

    def _needed_mib(self, share: Share) -> Amounts | int:
        if share.memory_follows_cores:
            needed: Amounts = share.cores * self._view.card_mib // CORES_PER_CARD
            return needed
        return share.memory_units * self._query.unit_mib

    def fitting(self, share: Share) -> Flags:
        """Return the GPUs on which a share fits."""
        view = self._view
        if share.whole_cards:
            return self._allowed & view.unused
        has_cores, has_memory = view.free_cores >= share.cores, view.free_mib >= self._needed_mib(share)
        flags: Flags = self._isolated() & has_cores & has_memory & (view.card_mib > 0)
        return flags

    def best_free(self) -> BestFree:
        view, shared = self._view, self._isolated() & (self._view.card_mib > 0)
        for share in largest_shares(self._query):
            if not share.whole_cards:
                shared = shared & (view.card_mib >= self._needed_mib(share))
        cores, mib = ((free * shared).max(initial=0) for free in (view.free_cores, view.free_mib))
        unused = (self._allowed & self._view.unused).sum(axis=0).max(initial=0)
        return BestFree(max(0, int(cores)), max(0, int(mib)), int(unused))


def on_any_gpu(flags: Flags) -> Flags:
    """Return for each node whether any of its GPUs has the flag."""
    nodes: Flags = np.any(flags, axis=0)
    return nodes

"""On which nodes of a cluster a pod fits, and what is wrong with each of the others.

The same rules as `vcuda.placement.place_pod`, for all nodes at once. Pods with one GPU container, which are most, are
decided by array operations alone. For others these exclude most nodes, and `place_pod` is tried on the rest, best nodes
first, until a limit of search steps: a pod of many containers must not hold up all pods after it.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import partial

import numpy as np
from msgspec import Struct

from vcuda.gpu_availability import GpuAvailability
from vcuda.gpu_table import STRENGTH, Amounts, Columns, Flags, GpuTable, Numbers, TableView
from vcuda.isolation import Isolation
from vcuda.node_ranking import NODE_RANKINGS, NodeRanking
from vcuda.placement import InsufficientGpus, may_use_model, place_pod, required_memory_mib
from vcuda.placement_strategies import PlacementStrategy
from vcuda.pod_options import NO_OPTIONS, PodOptions
from vcuda.request import ContainerRequest, PodRequest
from vcuda.vocabulary import CORES_PER_CARD, Share

# How many nodes are searched for one pod with several containers; a search takes some 100 microseconds.
MAX_SEARCHED = 50
MAX_KNOWN = 100_000


class NodeProblem(IntEnum):
    """Why a pod does not fit on a node. Kubernetes groups nodes by equal texts, so each problem has a constant one."""

    NONE = 0
    NODE_UNKNOWN = 1
    NO_GPUS = 2
    POOL = 3
    MODEL = 4
    QUOTA = 5
    UUID = 6
    UNAVAILABLE = 7
    ISOLATION = 8
    TOO_FEW = 9
    TOO_SMALL = 10
    MEMBERS = 11
    IN_USE = 12
    MEMORY = 13
    CORES = 14
    CORES_AND_MEMORY = 15
    COMBINATION = 16
    NOT_SEARCHED = 17
    UNCHARGED = 18

    @property
    def text(self) -> str:
        return TEXTS[self]

    @property
    def is_resolvable(self) -> bool:
        """Whether eviction of other pods could make room: only then kube-scheduler may look for pods to preempt."""
        return NodeProblem.IN_USE <= self <= NodeProblem.NOT_SEARCHED


TEXTS = {
    NodeProblem.NONE: "",
    NodeProblem.NODE_UNKNOWN: "node not known to the GPU scheduler yet",
    NodeProblem.NO_GPUS: "no GPUs on this node",
    NodeProblem.POOL: "node pool not allowed for this namespace",
    NodeProblem.MODEL: "model not on this node",
    NodeProblem.QUOTA: "GPU quota does not grant the models of this node",
    NodeProblem.UUID: "requested GPUs not on this node",
    NodeProblem.UNAVAILABLE: "GPUs unhealthy or cordoned",
    NodeProblem.ISOLATION: "isolation weaker than requested",
    NodeProblem.TOO_FEW: "not enough GPUs on this node",
    NodeProblem.TOO_SMALL: "no GPU with enough memory",
    NodeProblem.MEMBERS: "used by other pods of the workload",
    NodeProblem.IN_USE: "not enough unused GPUs",
    NodeProblem.MEMORY: "no GPU with enough free memory",
    NodeProblem.CORES: "no GPU with enough free cores",
    NodeProblem.CORES_AND_MEMORY: "no GPU with enough free cores and memory",
    NodeProblem.COMBINATION: "containers do not fit on the free GPUs together",
    NodeProblem.NOT_SEARCHED: "not searched yet",
    NodeProblem.UNCHARGED: "pod not charged to the GPU quota of its namespace",
}


class FitQuery(Struct, frozen=True):
    """A pod to be placed. `granted` are the models that its quota allows; None allows all, like `pools`.

    `excluded` are nodes, or some of their GPUs, that other members of its workload use: by node, None for all GPUs.
    """

    request: PodRequest
    unit_mib: int
    options: PodOptions = NO_OPTIONS
    granted: frozenset[str] | None = None
    pools: tuple[str, ...] | None = None
    excluded: Mapping[str, Sequence[str] | None] = {}
    strategy: PlacementStrategy = PlacementStrategy.BINPACK


class NodeFits(Struct, frozen=True):
    """The result for each of the nodes asked about, in their order: a `NodeProblem`, and a key to rank by.

    The smallest key is best. `best_cores` and `best_mib` are the most that is free of a GPU which the pod may use, over
    all nodes, and `best_unused` the most unused GPUs of a node.
    """

    names: Sequence[str]
    problems: Numbers
    keys: Numbers
    name_order: Numbers
    best_cores: int = 0
    best_mib: int = 0
    best_unused: int = 0

    def ranked(self) -> Columns:
        """Return the positions of the nodes that fit, the best first. Equal ones are in the order of their names."""
        fitting = np.flatnonzero(self.problems == NodeProblem.NONE)
        by_name = fitting[np.argsort(self.name_order[fitting])]
        return by_name[np.argsort(self.keys[by_name], kind="stable")]


def allowed_gpus(query: FitQuery, name: str, gpus: Sequence[GpuAvailability]) -> list[GpuAvailability]:
    """Return the GPUs of a node that quota and workload leave to a pod; `place_pod` checks the pod's own options."""
    excluded = query.excluded.get(name, ())
    return [
        each
        for each in gpus
        if excluded is not None
        and each.gpu.uuid not in excluded
        and (query.granted is None or each.gpu.model in query.granted)
    ]


class NodeSearch:
    """Tries `place_pod` on nodes, and remembers the results for as long as a node does not change."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], bool] = {}

    def narrow(self, table: GpuTable, query: FitQuery, fits: NodeFits) -> None:
        """Search the nodes that may fit, the best first, and set the problems of those that do not."""
        candidates = np.flatnonzero(fits.problems == NodeProblem.NONE)
        searched = 0
        for position in candidates[np.argsort(fits.keys[candidates], kind="stable")]:
            name = fits.names[position]
            result = self._known.get(search_key(table, name, query))
            if result is None:
                searched += 1
                if searched > MAX_SEARCHED:
                    fits.problems[position] = NodeProblem.NOT_SEARCHED
                    continue
                result = self._search(table, name, query)
            if not result:
                fits.problems[position] = NodeProblem.COMBINATION

    def _search(self, table: GpuTable, name: str, query: FitQuery) -> bool:
        gpus = allowed_gpus(query, name, table.available_gpus(name))
        try:
            place_pod(query.request, gpus, unit_mib=query.unit_mib, options=query.options, strategy=query.strategy)
            fits = True
        except InsufficientGpus:
            fits = False
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[search_key(table, name, query)] = fits
        return fits


def search_key(table: GpuTable, name: str, query: FitQuery) -> tuple[object, ...]:
    excluded = query.excluded.get(name, ())
    members = None if excluded is None else tuple(excluded)
    return query.request, query.options, query.granted, members, name, table.version(name)


def fit_nodes(table: GpuTable, names: Sequence[str], query: FitQuery, search: NodeSearch | None = None) -> NodeFits:
    """Decide about all of these nodes."""
    columns = table.columns_of(names)
    problems = np.full(len(names), NodeProblem.NODE_UNKNOWN, np.int64)
    keys, name_order = np.zeros(len(names), np.int64), np.zeros(len(names), np.int64)
    known = np.flatnonzero(columns >= 0)
    if not len(known):
        return NodeFits(names, problems, keys, name_order)
    view, positions = table.view(columns[known])
    fit = ViewFit(table, view, query)
    for container in query.request.containers:
        fit.check_container(container)
    problems[known], keys[known] = fit.problems[positions], fit.keys(NODE_RANKINGS[query.strategy])[positions]
    name_order[known] = table.name_order()[columns[known]]
    fits = NodeFits(names, problems, keys, name_order, *fit.best_free())
    if needs_search(query):
        (search or NodeSearch()).narrow(table, query, fits)
    return fits


def needs_search(query: FitQuery) -> bool:
    """Whether the array operations are only a necessary condition."""
    first, *others = query.request.containers
    return bool(others) or required_memory_mib(first, query.unit_mib) > 0


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

    def check_container(self, container: ContainerRequest) -> None:
        """Check one container, as if it were the only one of the pod."""
        if container.share.whole_cards:
            self._check_whole(container.share.whole_cards)
        else:
            self._check_fraction(container.share)

    def _check_whole(self, wanted: int) -> None:
        self._require_nodes(self._largest_count(self._allowed) >= wanted, NodeProblem.TOO_FEW)
        self._require_nodes(self._largest_count(self._allowed & self._view.unused) >= wanted, NodeProblem.IN_USE)

    def _largest_count(self, flags: Flags) -> Amounts:
        """Count the GPUs with a flag on each node; of a node with several models, those of one model."""
        counts: Amounts = flags.sum(axis=0, dtype=np.int32)
        model, present = self._view.model, self._view.present
        if ((model != model[:1]) & present).any():
            counts = np.max([(flags & (model == each)).sum(axis=0) for each in np.unique(model[present])], axis=0)
        return counts

    def _check_fraction(self, share: Share) -> None:
        view, allowed, minimum = self._view, self._allowed, self._query.options.min_isolation
        if minimum is not Isolation.NONE:
            allowed = allowed & (view.isolation >= STRENGTH[minimum])
            self._require(allowed, NodeProblem.ISOLATION)
        needed_mib = self._needed_mib(share)
        # Without a known size, a GPU is only available as a whole.
        allowed = allowed & (view.card_mib > 0) & (view.card_mib >= needed_mib)
        self._require(allowed, NodeProblem.TOO_SMALL)
        has_cores = allowed & (view.free_cores >= share.cores)
        has_memory = allowed & (view.free_mib >= needed_mib)
        fits = on_any_gpu(has_cores & has_memory)
        self._require_nodes(fits | on_any_gpu(has_memory), NodeProblem.MEMORY)
        self._require_nodes(fits | on_any_gpu(has_cores), NodeProblem.CORES)
        self._require_nodes(fits, NodeProblem.CORES_AND_MEMORY)

    def _needed_mib(self, share: Share) -> Amounts | int:
        if share.memory_follows_cores:
            needed: Amounts = share.cores * self._view.card_mib // CORES_PER_CARD
            return needed
        return share.memory_units * self._query.unit_mib

    def keys(self, ranking: NodeRanking) -> Numbers:
        view = self._view
        share = max((each.share for each in self._query.request.containers), key=lambda share: share.cores)
        if share.whole_cards:
            return ranking(view, self._allowed & view.unused, share)
        has_cores, has_memory = view.free_cores >= share.cores, view.free_mib >= self._needed_mib(share)
        return ranking(view, self._allowed & has_cores & has_memory & (view.card_mib > 0), share)

    def best_free(self) -> tuple[int, int, int]:
        """Return the most free cores and memory of a GPU that the pod may use, and the most unused GPUs of a node."""
        if not self._allowed.any():
            return 0, 0, 0
        cores, mib = ((free * self._allowed).max() for free in (self._view.free_cores, self._view.free_mib))
        return max(0, int(cores)), max(0, int(mib)), int((self._allowed & self._view.unused).sum(axis=0).max())


def on_any_gpu(flags: Flags) -> Flags:
    """Return for each node whether any of its GPUs has the flag."""
    nodes: Flags = np.any(flags, axis=0)
    return nodes

"""On which nodes of a cluster a pod fits, and what is wrong with each of the others.

The same rules as `vcuda.placement.place_pod`, for all nodes at once. Pods with one GPU container, which are most, are
decided by array operations alone. For others these exclude most nodes, and `place_pod` is tried on the rest, up to a
limit of search steps: a pod of many containers must not hold up all pods after it.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import partial

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from vcuda.gpu_availability import GpuAvailability
from vcuda.gpu_table import SMALL_PART, STRENGTH, Amounts, Columns, Flags, GpuTable, Names, Numbers, TableView
from vcuda.isolation import Isolation
from vcuda.node_ranking import NODE_RANKINGS, NodeRanking
from vcuda.placement import (
    InsufficientGpus,
    PlacedSlices,
    SearchBudget,
    may_use_model,
    place_pod,
    required_memory_mib,
)
from vcuda.placement_strategies import PlacementStrategy
from vcuda.pod_options import NO_OPTIONS, PodOptions
from vcuda.request import ContainerRequest, PodRequest, Role
from vcuda.vocabulary import CORES_PER_CARD, Share

# Search steps for one pod with several containers, on all nodes together and on one: a step takes some 50 microseconds,
# and all other pods wait meanwhile.
MAX_STEPS, MAX_NODE_STEPS = 300, 200
# Kinds of pods with several containers whose results are kept, for each node.
MAX_SEARCHED_CLASSES = 32
# Ties are broken by the order of names: for up to a million nodes.
NAME_BITS = 20
# Kinds of pods whose results are kept; with 20,000 nodes each takes 300 kB.
MAX_CLASSES = 128


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
    """The result for each of the nodes in `names`: a `NodeProblem`, and a key to rank by; the smallest key is best.

    `columns` are their columns in the table; -1 for those that are not in it.
    """

    names: Names
    columns: Columns
    problems: Numbers
    keys: Numbers
    name_order: Numbers

    def by_problem(self) -> dict[NodeProblem, list[str]]:
        """Return the names of the nodes with each problem that occurs; those that fit have the problem NONE."""
        if not self.problems.any():
            return {NodeProblem.NONE: self.names.tolist()}
        found = np.flatnonzero(np.bincount(self.problems)).tolist()
        return {NodeProblem(code): self.names[self.problems == code].tolist() for code in found}

    def ranked(self) -> Columns:
        """Return the positions of the nodes that fit, the best first. Equal ones are in the order of their names."""
        fitting = np.flatnonzero(self.problems == NodeProblem.NONE)
        return fitting[np.argsort((self.keys[fitting] << NAME_BITS) | self.name_order[fitting])]


def place_on_node(
    query: FitQuery, name: str, gpus: Sequence[GpuAvailability], budget: SearchBudget | None = None
) -> PlacedSlices:
    """Choose GPUs of a node, of those that quota and workload leave to the pod; raises InsufficientGpus."""
    excluded = query.excluded.get(name, ())
    allowed = [
        each
        for each in gpus
        if excluded is not None
        and each.gpu.uuid not in excluded
        and (query.granted is None or each.gpu.model in query.granted)
    ]
    return place_pod(
        query.request,
        allowed,
        unit_mib=query.unit_mib,
        options=query.options,
        strategy=query.strategy,
        budget=budget,
    )


class BestFree(Struct, frozen=True):
    """The most free cores and memory of a GPU that a pod may share, and the most unused GPUs of a node."""

    cores: int = 0
    mib: int = 0
    unused: int = 0


class ClassFits(Struct):
    """What equal pods get on every column of a table, as of a change of the table."""

    problems: Numbers
    keys: Numbers
    change: int


class NodeFitter:
    """Decides about the nodes of a table, and keeps the results of nodes that do not change. Not thread-safe."""

    def __init__(self, table: GpuTable) -> None:
        self._table = table
        self._classes: dict[tuple[object, ...], ClassFits] = {}
        self._searched: dict[tuple[object, ...], dict[str, SearchResult]] = {}
        self._searches = 0

    def fit(self, names: Sequence[str], query: FitQuery) -> NodeFits:
        """Decide about all of these nodes; the result has them in an order of its own."""
        resolved, columns = self._table.resolve(names)
        fits = self._fit(query, columns, resolved)
        if needs_search(query):
            merged = merge_containers(query)
            is_sure = self._fit(merged, columns, resolved).problems == NodeProblem.NONE if merged else None
            self._search(query, fits, is_sure)
        return fits

    def _fit(self, query: FitQuery, columns: Columns, names: Names) -> NodeFits:
        if SMALL_PART * len(columns) > len(self._table):
            return self._fit_all(query, columns, names)
        return self._fit_few(query, columns, names)

    def _fit_few(self, query: FitQuery, columns: Columns, names: Names) -> NodeFits:
        known = columns >= 0
        problems, keys, order = (np.zeros(len(names), np.int64) for _ in range(3))
        problems[~known] = NodeProblem.NODE_UNKNOWN
        problems[known], keys[known] = fit_view(self._table, self._table.view(columns[known]), query)
        order[known] = self._table.name_order()[columns[known]]
        return NodeFits(names, columns, problems, keys, order)

    def _fit_all(self, query: FitQuery, columns: Columns, names: Names) -> NodeFits:
        found = self._class_fits(query)
        problems, keys, order = found.problems[columns], found.keys[columns], self._table.name_order()[columns]
        # Where a node is not in the table, the column is -1, and the values are those of another node.
        problems[columns < 0] = NodeProblem.NODE_UNKNOWN
        return NodeFits(names, columns, problems, keys, order)

    def _class_fits(self, query: FitQuery) -> ClassFits:
        """Return the results of all columns; only those that changed since the last equal pod are computed."""
        table = self._table
        if query.excluded:
            return ClassFits(*fit_view(table, table.view(), query), table.changes)
        key = class_key(query)
        # Every use moves a class to the end: the first one is the least recently used.
        found = self._classes.pop(key, None)
        changed = table.changed_since(found.change if found is not None else 0)
        if found is None or SMALL_PART * len(changed) > table.width or len(found.keys) < table.width:
            found = ClassFits(*fit_view(table, table.view(), query), table.changes)
        elif len(changed):
            found.problems[changed], found.keys[changed] = fit_view(table, table.view(changed), query)
            found.change = table.changes
        self._classes[key] = found
        while len(self._classes) > MAX_CLASSES:
            del self._classes[next(iter(self._classes))]
        return found

    def best_free(self, query: FitQuery, fits: NodeFits) -> dict[NodeProblem, BestFree]:
        """Return what is free at best on the nodes with each of the problems that a lack of it causes."""
        best = {}
        for problem in (NodeProblem.IN_USE, NodeProblem.MEMORY, NodeProblem.CORES):
            columns = fits.columns[fits.problems == problem]
            if len(columns):
                best[problem] = ViewFit(self._table, self._table.view(columns), query).best_free()
        return best

    def _search(self, query: FitQuery, fits: NodeFits, is_sure: Flags | None) -> None:
        """Search the nodes that may fit, and set the problems of those that do not, or were not searched.

        `is_sure` are those that fit without a search.
        """
        known = self._results_of(query)
        may_fit = fits.problems == NodeProblem.NONE
        candidates = np.flatnonzero(may_fit if is_sure is None else may_fit & ~is_sure).tolist()
        # Those that were searched longest ago first: on a busy cluster nodes change faster than they are searched, and
        # one that is free all the time must have its turn.
        names = [str(fits.names[at]) for at in candidates]
        numbers = [known[name].number if name in known else 0 for name in names]
        left = MAX_STEPS
        for _, _, at, name in sorted(zip(numbers, fits.keys[candidates].tolist(), candidates, names, strict=True)):
            state = (self._table.version(name), query.excluded.get(name, ()))
            result = known.get(name)
            if result is None or result.state != state:
                is_placed, left = self._try_node(query, name, left) if left > 0 else (None, 0)
                if is_placed is None:
                    fits.problems[at] = NodeProblem.NOT_SEARCHED
                    continue
                self._searches += 1
                result = known[name] = SearchResult(state, is_placed, self._searches)
            if not result.is_placed:
                fits.problems[at] = NodeProblem.COMBINATION

    def _results_of(self, query: FitQuery) -> dict[str, "SearchResult"]:
        """Return the known results of equal pods, by node."""
        key = class_key(query)
        known = self._searched.pop(key, None) or {}
        self._searched[key] = known
        while len(self._searched) > MAX_SEARCHED_CLASSES:
            del self._searched[next(iter(self._searched))]
        return known

    def _try_node(self, query: FitQuery, name: str, left: int) -> tuple[bool | None, int]:
        """Return whether a pod can be placed on a node, None if that is not known, and the steps that are left."""
        budget = SearchBudget(min(left, MAX_NODE_STEPS))
        is_placed: bool | None = True
        try:
            place_on_node(query, name, self._table.available_gpus(name), budget)
        except InsufficientGpus:
            is_cut_short = budget.left < 0 and left < MAX_NODE_STEPS
            is_placed = None if is_cut_short else False
        return is_placed, left - (min(left, MAX_NODE_STEPS) - max(0, budget.left)) - 1


class SearchResult(Struct, frozen=True):
    """Whether a pod could be placed on a node in a state; `number` counts searches."""

    state: tuple[int, object]
    is_placed: bool
    number: int


def class_key(query: FitQuery) -> tuple[object, ...]:
    """Return what equal pods have in common; the names of their containers may differ."""
    shape = tuple((each.role, each.share) for each in query.request.containers)
    return shape, query.options, query.granted, query.pools, query.strategy


def merge_containers(query: FitQuery) -> FitQuery | None:
    """Return a query for a pod with one container that takes as much as all together; None if that is no fraction.

    Where it fits, all of them fit on the same GPU, so that most pods with several containers need no search.
    """
    shares = [each.share for each in query.request.containers]
    cores, follows = sum(share.cores for share in shares), {share.memory_follows_cores for share in shares}
    if cores >= CORES_PER_CARD or len(follows) > 1:
        return None
    merged = Share(cores, sum(share.memory_units for share in shares), memory_follows_cores=follows == {True})
    first = query.request.containers[0]
    return replace(query, request=PodRequest((ContainerRequest(first.name, Role.APP, merged, first.vocabulary),)))


def merged_shortage(query: FitQuery) -> NodeProblem:
    """Return the problem that every node has on which only other pods are in the way of this one."""
    (first, *others) = query.request.containers
    return NodeProblem.COMBINATION if others or first.share.whole_cards else NodeProblem.CORES_AND_MEMORY


def needs_search(query: FitQuery) -> bool:
    """Whether the array operations are only a necessary condition."""
    first, *others = query.request.containers
    return bool(others) or required_memory_mib(first, query.unit_mib) > 0


def fit_view(table: GpuTable, view: TableView, query: FitQuery) -> tuple[Numbers, Numbers]:
    """Return the problem and the key of each node of a view."""
    fit = ViewFit(table, view, query)
    for container in query.request.containers:
        fit.check_container(container)
    return fit.problems, fit.keys(NODE_RANKINGS[query.strategy])


def fit_nodes(table: GpuTable, names: Sequence[str], query: FitQuery) -> NodeFits:
    """Decide about nodes once, without keeping results."""
    return NodeFitter(table).fit(names, query)


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

    def check_container(self, container: ContainerRequest) -> None:
        """Check one container, as if it were the only one of the pod."""
        if container.share.whole_cards:
            self._check_whole(container.share.whole_cards)
        else:
            self._check_fraction(container.share)

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
        if minimum is Isolation.NONE:
            return self._allowed
        isolated: Flags = self._allowed & (self._view.isolation >= STRENGTH[minimum])
        return isolated

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
        return ranking(view, self._isolated() & has_cores & has_memory & (view.card_mib > 0), share)

    def best_free(self) -> BestFree:
        view, shared = self._view, self._isolated() & (self._view.card_mib > 0)
        cores, mib = ((free * shared).max(initial=0) for free in (view.free_cores, view.free_mib))
        unused = (self._allowed & self._view.unused).sum(axis=0).max(initial=0)
        return BestFree(max(0, int(cores)), max(0, int(mib)), int(unused))


def on_any_gpu(flags: Flags) -> Flags:
    """Return for each node whether any of its GPUs has the flag."""
    nodes: Flags = np.any(flags, axis=0)
    return nodes

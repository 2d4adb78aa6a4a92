"""On which nodes of a cluster a pod fits, and what is wrong with each of the others.

The same rules as `vcuda.placement.place_pod`, for all nodes at once. Pods with one GPU container, which are most, are
decided by array operations alone. For others these exclude most nodes, and `place_pod` is tried on the rest, up to a
limit of search steps: a pod of many containers must not hold up all pods after it.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from vcuda.fit_query import FitQuery, class_key, merge_containers, needs_search, place_on_node
from vcuda.gpu_availability import GpuAvailability
from vcuda.gpu_table import SMALL_PART, Columns, Flags, GpuTable, Numbers
from vcuda.host import Host
from vcuda.json_names import Names, NodeNames
from vcuda.node_problem import NodeProblem
from vcuda.placement import InsufficientGpus, PlacedSlices, SearchBudget
from vcuda.placement_costs import PlacementCosts, WorkloadEstimate, prior_estimate
from vcuda.placement_strategies import PlacementStrategy
from vcuda.recent import keep_recent
from vcuda.request import MAX_GPU_CONTAINERS
from vcuda.view_fit import BestFree, ViewFit, fit_view

# Search steps for one pod with several containers, on all nodes together and on one: a step takes some 50 microseconds,
# and all other pods wait meanwhile.
MAX_STEPS, MAX_NODE_STEPS = 300, 200
CONTAINERS_PER_STEP = 4
# Kinds of pods with several containers whose results are kept, for each node.
MAX_SEARCHED_CLASSES = 32
# Ties are broken by the order of names: for up to a million nodes.
NAME_BITS = 20
# Strategies whose keys change with the workload.
USES_COSTS = (PlacementStrategy.FRAGMENTATION, PlacementStrategy.TOPOLOGY, PlacementStrategy.FGD)
# Kinds of pods whose results are kept; with 20,000 nodes each takes 300 kB.
MAX_CLASSES = 128


class NodeFits(Struct, frozen=True):
    """The result for each of these nodes: a `NodeProblem`, and a key to rank by; the smallest key is best.

    `columns` are their columns in the table; -1 for those that are not in it.
    """

    nodes: NodeNames
    columns: Columns
    problems: Numbers
    keys: Numbers
    name_order: Numbers

    @property
    def names(self) -> Names:
        return self.nodes.array

    def by_problem(self) -> dict[NodeProblem, NodeNames]:
        """Return the names of the nodes with each problem that occurs; those that fit have the problem NONE."""
        if not self.problems.any():
            return {NodeProblem.NONE: self.nodes}
        found = np.flatnonzero(np.bincount(self.problems)).tolist()
        return {NodeProblem(code): self.nodes.take(np.flatnonzero(self.problems == code)) for code in found}

    def ranked(self) -> Columns:
        """Return the positions of the nodes that fit, the best first. Equal ones are in the order of their names."""
        fitting = np.flatnonzero(self.problems == NodeProblem.NONE)
        return fitting[np.argsort((self.keys[fitting] << NAME_BITS) | self.name_order[fitting])]


class ClassFits(Struct):
    """What equal pods get on every column of a table, as of a change of the table."""

    problems: Numbers
    keys: Numbers
    change: int
    # The version of the costs that the keys depend on.
    costs: int
    query: FitQuery


class NodeFitter:
    """Decides about the nodes of a table, and keeps the results of nodes that do not change. Not thread-safe."""

    def __init__(self, table: GpuTable, estimate: WorkloadEstimate | None = None) -> None:
        self._table, self._estimate = table, estimate or prior_estimate()
        self._costs = PlacementCosts(table, self._estimate)
        self._classes: dict[tuple[object, ...], ClassFits] = {}
        self._searched: dict[tuple[object, ...], ClassSearch] = {}
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

    def queries(self) -> list[FitQuery]:
        """Return a query of each kind of pods whose results are kept, those that were used last first."""
        return [each.query for each in reversed(self._classes.values())]

    def prepare(self, query: FitQuery) -> None:
        """Compute the results for a kind of pods."""
        self._class_fits(query)

    def adopt(self, prepared: "NodeFitter") -> None:
        """Take over what was prepared on a copy of the table, for the workload that the estimate has now."""
        self._classes, self._costs = prepared._classes, prepared._costs  # noqa: SLF001 - of the same class
        self._costs.attach(self._table, self._estimate)

    def best_node(self, query: FitQuery) -> str:
        """Return the best of all nodes for a pod with at most one container; empty if none fits."""
        found, order = self._class_fits(query), self._table.name_order()
        fitting = np.flatnonzero(found.problems == NodeProblem.NONE)
        if not len(fitting):
            return ""
        best = fitting[np.argmin((found.keys[fitting] << NAME_BITS) | order[fitting])]
        return self._table.name_in(int(best))

    def place(
        self,
        query: FitQuery,
        name: str,
        gpus: Sequence[GpuAvailability] | None = None,
        *,
        budget: SearchBudget | None = None,
    ) -> PlacedSlices:
        """Choose GPUs of a node; raises InsufficientGpus. `gpus` are what is free there, if not what the table says."""
        available = self._table.available_gpus(name) if gpus is None else gpus
        free = Host(*self._table.host(name)) if name in self._table else Host()
        return place_on_node(query, name, available, budget, costs=self._costs, free=free)

    def _fit(self, query: FitQuery, columns: Columns, names: NodeNames) -> NodeFits:
        if SMALL_PART * len(columns) > len(self._table):
            return self._fit_all(query, columns, names)
        return self._fit_few(query, columns, names)

    def _fit_few(self, query: FitQuery, columns: Columns, names: NodeNames) -> NodeFits:
        known = columns >= 0
        problems, keys, order = (np.zeros(len(names), np.int64) for _ in range(3))
        problems[~known] = NodeProblem.NODE_UNKNOWN
        problems[known], keys[known] = fit_view(self._table, self._table.view(columns[known]), query, self._costs)
        order[known] = self._table.name_order()[columns[known]]
        return NodeFits(names, columns, problems, keys, order)

    def _fit_all(self, query: FitQuery, columns: Columns, names: NodeNames) -> NodeFits:
        found = self._class_fits(query)
        problems, keys, order = found.problems[columns], found.keys[columns], self._table.name_order()[columns]
        # Where a node is not in the table, the column is -1, and the values are those of another node.
        problems[columns < 0] = NodeProblem.NODE_UNKNOWN
        return NodeFits(names, columns, problems, keys, order)

    def _class_fits(self, query: FitQuery) -> ClassFits:
        """Return the results of all columns; only those that changed since the last equal pod are computed."""
        table = self._table
        if query.excluded:
            return ClassFits(*fit_view(table, table.view(), query, self._costs), table.changes, 0, query)
        uses_costs = query.strategy in USES_COSTS
        if uses_costs:
            self._costs.refresh()
        key = class_key(query)
        found = self._classes.get(key)
        changed = table.changed_since(found.change if found is not None else 0)
        version = self._costs.version if uses_costs else 0
        is_outdated = found is None or found.costs != version or len(found.keys) < table.width
        if found is None or is_outdated or SMALL_PART * len(changed) > table.width:
            found = ClassFits(*fit_view(table, table.view(), query, self._costs), table.changes, version, query)
        elif len(changed):
            found.problems[changed], found.keys[changed] = fit_view(table, table.view(changed), query, self._costs)
            found.change = table.changes
        keep_recent(self._classes, key, found, MAX_CLASSES)
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
        may_fit = fits.problems == NodeProblem.NONE
        candidates = np.flatnonzero(may_fit if is_sure is None else may_fit & ~is_sure)
        if len(query.request.containers) > MAX_GPU_CONTAINERS:
            fits.problems[candidates] = NodeProblem.COMBINATION
            return
        search = self._class_search(query)
        columns = fits.columns[candidates]
        # What members of a workload exclude is different for each pod.
        is_known = search.is_known(self._table, columns) if not query.excluded else np.zeros(len(columns), np.bool_)
        fits.problems[candidates[is_known & ~search.is_placed[columns]]] = NodeProblem.COMBINATION
        left = MAX_STEPS
        # Those that were searched longest ago first: on a busy cluster nodes change faster than they are searched, and
        # one that is free all the time must have its turn.
        order = np.lexsort((fits.keys[candidates], search.numbers[columns]))
        unknown = candidates[order[~is_known[order]]]
        fits.problems[unknown] = NodeProblem.NOT_SEARCHED
        for at in unknown.tolist():
            is_placed, left = self._try_node(query, fits.names[at], left)
            if is_placed is None:
                return
            self._searches += 1
            fits.problems[at] = NodeProblem.NONE if is_placed else NodeProblem.COMBINATION
            column = fits.columns[at]
            search.numbers[column] = self._searches
            if not query.excluded:
                search.is_placed[column], search.versions[column] = is_placed, self._table.versions()[column]

    def _class_search(self, query: FitQuery) -> "ClassSearch":
        """Return what is known of equal pods."""
        key = class_key(query)
        known = self._searched.get(key)
        if known is None or len(known.numbers) < self._table.width:
            known = ClassSearch(self._table.width)
        keep_recent(self._searched, key, known, MAX_SEARCHED_CLASSES)
        return known

    def _try_node(self, query: FitQuery, name: str, left: int) -> tuple[bool | None, int]:
        """Return whether a pod can be placed on a node, None if that is not known, and the steps that are left."""
        # To begin a search takes some time as well.
        left -= 1 + len(query.request.containers) // CONTAINERS_PER_STEP
        steps = min(left, MAX_NODE_STEPS)
        if steps <= 0:
            return None, 0
        budget = SearchBudget(steps)
        is_placed: bool | None = True
        try:
            self.place(query, name, budget=budget)
        except InsufficientGpus:
            is_cut_short = budget.left < 0 and steps < MAX_NODE_STEPS
            is_placed = None if is_cut_short else False
        return is_placed, left - (steps - max(0, budget.left))


class ClassSearch:
    """Whether equal pods could be placed on each column: by the version of the node, and the number of the search."""

    def __init__(self, width: int) -> None:
        self.is_placed = np.zeros(width, np.bool_)
        self.versions, self.numbers = np.full(width, -1, np.int64), np.zeros(width, np.int64)

    def is_known(self, table: GpuTable, columns: Columns) -> Flags:
        flags: Flags = self.versions[columns] == table.versions()[columns]
        return flags


def fit_nodes(table: GpuTable, names: Sequence[str], query: FitQuery) -> NodeFits:
    """Decide about nodes once, without keeping results."""
    return NodeFitter(table).fit(names, query)

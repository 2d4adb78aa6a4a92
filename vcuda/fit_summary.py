"""Why a pod fits on no node, in one sentence with numbers: for events, the decision log and `quotient why`.

The texts that kube-scheduler gets for each node are constant, see `vcuda.node_fit`. The numbers are here.
"""

from collections.abc import Callable, Mapping

import numpy as np

from vcuda.allowed_gpus import may_use_model
from vcuda.decision import Reason
from vcuda.fit_query import FitQuery
from vcuda.memory_units import describe_mib
from vcuda.node_fit import NodeFits
from vcuda.node_problem import NodeProblem
from vcuda.request import ContainerRequest, share_memory_mib
from vcuda.view_fit import BestFree

# How many nodes have each problem.
Problems = dict[NodeProblem, int]
# The reasons of the quota against each GPU model.
Refusals = Mapping[str, tuple[Reason, ...]]


def count_problems(fits: NodeFits) -> Problems:
    """Return how many nodes have each problem, the most frequent first."""
    codes, counts = np.unique(fits.problems, return_counts=True)
    found = {NodeProblem(int(code)): int(count) for code, count in zip(codes, counts, strict=True)}
    found.pop(NodeProblem.NONE, None)
    return dict(sorted(found.items(), key=lambda each: (-each[1], each[0])))


def describe_fits(
    query: FitQuery,
    fits: NodeFits,
    best: Mapping[NodeProblem, BestFree],
    refusals: Refusals | None = None,
) -> str:
    """Return a text such as "6 of 8 nodes: no GPU with 12 GiB free, the best has 10 GiB; 2 of 8: no A100".

    `best` is what is free on the nodes with each problem.
    """
    total = len(fits.names)
    if not total:
        return "no node passed the scheduler's other filters"
    parts: list[str] = []
    for problem, count in count_problems(fits).items():
        nodes = f"{count} of {total} nodes" if not parts else f"{count} of {total}"
        parts.append(f"{nodes}: {describe_problem(problem, query, best.get(problem, BestFree()), refusals or {})}")
    return "; ".join(parts)


def describe_problem(problem: NodeProblem, query: FitQuery, best: BestFree, refusals: Refusals) -> str:
    describe = DETAILS.get(problem)
    if problem is NodeProblem.QUOTA and refusals:
        wanted = [reasons for model, reasons in refusals.items() if may_use_model(query.options, model)]
        return "; ".join(sorted({reason.problem for reasons in wanted for reason in reasons})) or problem.text
    return describe(query, best) if describe else problem.text


def largest_fraction(query: FitQuery) -> ContainerRequest | None:
    """Return the container that shares a GPU and needs most of it."""
    fractions = [each for each in query.request.containers if not each.share.whole_cards]
    return max(fractions, key=lambda each: (each.share.memory_units, each.share.cores), default=None)


def needed_mib(query: FitQuery) -> int:
    container = largest_fraction(query)
    return share_memory_mib(container.share, 0, query.unit_mib) if container else 0


def needed_cores(query: FitQuery) -> int:
    return max((each.share.cores for each in query.request.containers if not each.share.whole_cards), default=0)


def needed_gpus(query: FitQuery) -> int:
    return max(each.share.whole_cards for each in query.request.containers)


def describe_memory(query: FitQuery, best: BestFree) -> str:
    container = largest_fraction(query)
    free = describe_mib(best.mib)
    if container is not None and container.share.memory_follows_cores:
        return f"no GPU with {container.share.cores} % of its memory free, the best has {free}"
    return f"no GPU with {describe_mib(needed_mib(query))} free, the best has {free}"


def describe_cores(query: FitQuery, best: BestFree) -> str:
    return f"no GPU with {needed_cores(query)} cores free, the best has {best.cores}"


def describe_both(query: FitQuery, _: BestFree) -> str:
    return f"no GPU with {needed_cores(query)} cores and {describe_mib(needed_mib(query))} free together"


def describe_unused(query: FitQuery, best: BestFree) -> str:
    wanted = needed_gpus(query)
    return f"no {wanted} unused GPUs, the best node has {best.unused}" if wanted > 1 else "no unused GPU"


def describe_too_few(query: FitQuery, _: BestFree) -> str:
    return f"fewer than {needed_gpus(query)} GPUs of a model that the pod may use"


def describe_too_small(query: FitQuery, _: BestFree) -> str:
    return f"no GPU has {describe_mib(needed_mib(query))}"


def describe_model(query: FitQuery, _: BestFree) -> str:
    if query.options.models:
        return f"no {' or '.join(query.options.models)}"
    return f"only {' and '.join(query.options.avoided_models)}, which the pod excludes"


def describe_pool(query: FitQuery, _: BestFree) -> str:
    return f"not in a node pool of the namespace ({', '.join(query.pools or ()) or 'it has none'})"


def describe_isolation(query: FitQuery, _: BestFree) -> str:
    return f"no GPU with isolation {query.options.min_isolation} or stronger"


DETAILS: dict[NodeProblem, Callable[[FitQuery, BestFree], str]] = {
    NodeProblem.MEMORY: describe_memory,
    NodeProblem.CORES: describe_cores,
    NodeProblem.CORES_AND_MEMORY: describe_both,
    NodeProblem.IN_USE: describe_unused,
    NodeProblem.TOO_FEW: describe_too_few,
    NodeProblem.TOO_SMALL: describe_too_small,
    NodeProblem.MODEL: describe_model,
    NodeProblem.POOL: describe_pool,
    NodeProblem.ISOLATION: describe_isolation,
}

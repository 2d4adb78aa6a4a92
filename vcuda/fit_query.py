"""A pod to be placed, and what can be said about it before any node is looked at."""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from vcuda.cost_ranking import RankingContext, ranking_for
from vcuda.gpu_availability import GpuAvailability
from vcuda.host import UNLIMITED, Host
from vcuda.node_problem import NodeProblem
from vcuda.placement import InsufficientGpus, PlacedSlices, SearchBudget, place_pod, required_memory_mib
from vcuda.placement_costs import PlacementCosts
from vcuda.placement_strategies import BusyLast, PlacementStrategy
from vcuda.pod_options import NO_OPTIONS, PodOptions
from vcuda.request import ContainerRequest, PodRequest, Role
from vcuda.vocabulary import CORES_PER_CARD, Share


class FitQuery(Struct, frozen=True):
    """A pod to be placed. `granted` are the models that its quota allows; None allows all, like `pools`.

    `excluded` are nodes, or some of their GPUs, that other members of its workload use: by node, None for all GPUs.
    `host` is what the pod requests of the node's own CPU and memory, and `seed` that of the strategy `random`.
    """

    request: PodRequest
    unit_mib: int
    options: PodOptions = NO_OPTIONS
    granted: frozenset[str] | None = None
    pools: tuple[str, ...] | None = None
    excluded: Mapping[str, Sequence[str] | None] = {}
    strategy: PlacementStrategy = PlacementStrategy.BINPACK
    host: Host = Host()
    # Whether nodes without so much CPU and memory are excluded: kube-scheduler has done that for those it asks about.
    checks_host: bool = False
    seed: str = ""
    # Whether GPUs that are measured to be busy come last.
    avoids_busy: bool = False

    def excludes(self, node: str, placed: PlacedSlices) -> bool:
        """Whether other members of the workload use the node, or GPUs of this placement."""
        excluded = self.excluded.get(node, ())
        return excluded is None or any(each.uuid in excluded for slices in placed.values() for each in slices)


def class_key(query: FitQuery) -> tuple[object, ...]:
    """Return what equal pods have in common; the names of their containers may differ."""
    shape = tuple((each.role, each.share) for each in query.request.containers)
    how = query.strategy, query.checks_host, query.seed, query.avoids_busy
    return shape, query.options, query.granted, query.pools, query.host, *how


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


def place_on_node(
    query: FitQuery,
    name: str,
    gpus: Sequence[GpuAvailability],
    budget: SearchBudget | None = None,
    *,
    costs: PlacementCosts | None = None,
    free: Host = UNLIMITED,
) -> PlacedSlices:
    """Choose GPUs of a node, of those that quota and workload leave to the pod; raises InsufficientGpus.

    `free` is what is free of the node's own CPU and memory.
    """
    excluded = query.excluded.get(name, ())
    allowed = [
        each
        for each in gpus
        if excluded is not None
        and each.gpu.uuid not in excluded
        and (query.granted is None or each.gpu.model in query.granted)
    ]
    if gpus and not allowed:
        raise InsufficientGpus((NodeProblem.QUOTA if excluded == () else NodeProblem.MEMBERS).text)
    context = RankingContext(costs, free, query.host, query.unit_mib, query.seed)
    ranking = ranking_for(query.strategy, context)
    return place_pod(
        query.request,
        allowed,
        unit_mib=query.unit_mib,
        options=query.options,
        ranking=BusyLast(ranking) if query.avoids_busy else ranking,
        budget=budget,
    )

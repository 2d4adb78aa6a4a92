"""Which pods of a node have to be evicted so that another one of higher priority gets GPUs there.

kube-scheduler chooses by counts alone: enough cores on the node, whatever GPU they are on. The pods that are chosen
here free GPUs on which the preemptor fits. As in kube-scheduler, all pods of lower priority are removed first, and then
as many as possible are kept, those with a PodDisruptionBudget and the most important ones before others.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from vcuda.fit_query import FitQuery, place_on_node
from vcuda.gpu_availability import NO_USAGE, GpuAvailability, GpuUsage, sum_usage
from vcuda.host import Host
from vcuda.placement import MAX_STEPS, InsufficientGpus, SearchBudget
from vcuda.placement_strategies import PlacementStrategy

# Priorities are 32-bit numbers.
PRIORITY_OFFSET = 2**31


class PreemptablePod(Struct, frozen=True):
    """A pod that could be evicted. `budgets` are the PodDisruptionBudgets that apply to it.

    One without GPUs frees CPU and memory of the node.
    """

    uid: str
    title: str
    priority: int
    started_s: float
    usage: Mapping[str, GpuUsage]
    host: Host = Host()
    budgets: tuple[str, ...] = ()

    @property
    def importance(self) -> tuple[int, float, str]:
        """The higher the priority and the longer it has run, the more important is a pod."""
        return self.priority, -self.started_s, self.uid


class NodeRoom(Struct, frozen=True):
    """What is free on a node: of its GPUs, and of its own CPU and memory."""

    name: str
    gpus: Sequence[GpuAvailability]
    host: Host


class Victims(Struct, frozen=True):
    """The pods to be evicted from a node. `violations` is how many of them their budgets protect."""

    node: str
    pods: tuple[PreemptablePod, ...]
    violations: int = 0

    @property
    def harm(self) -> tuple[int, int, int, int, float, str]:
        """The least is preferred, in the order of kube-scheduler's own criteria."""
        priorities = [pod.priority for pod in self.pods]
        # The later the most important of the victims was started, the less is lost.
        top = [pod.started_s for pod in self.pods if pod.priority == max(priorities)]
        started = -min(top, default=0.0)
        # With an offset, as in kube-scheduler: else more pods of a negative priority would be less harm than one.
        total = sum(priority + PRIORITY_OFFSET for priority in priorities)
        return self.violations, max(priorities, default=0), total, len(self.pods), started, self.node


class Constraints(Struct, frozen=True):
    """What a choice of victims has to respect.

    `required` are evicted in any case: kube-scheduler needs them for a reason that is not known here, and
    `required_violations` of them have a PodDisruptionBudget. `budgets` says how many pods of each one may be evicted;
    with `is_strict`, never more.
    """

    budgets: Mapping[str, int] = {}
    required: frozenset[str] = frozenset()
    required_violations: int = 0
    checks_host: bool = True
    is_strict: bool = False

    def forbids(self, pod: PreemptablePod) -> bool:
        """Whether a pod may not be evicted, whatever happens to others."""
        return self.is_strict and any(self.budgets.get(budget, 0) <= 0 for budget in pod.budgets)


def select_victims(
    query: FitQuery,
    room: NodeRoom,
    candidates: Iterable[PreemptablePod],
    constraints: Constraints,
    budget: SearchBudget | None = None,
) -> Victims | None:
    """Return the pods to evict so that the pod of a query fits on a node; None if that does not help.

    Nothing is returned either if the pod fits without an eviction, or if the budget does not suffice to say so.
    """
    budget = budget or SearchBudget(MAX_STEPS)
    evictable = [pod for pod in candidates if not constraints.forbids(pod)]
    evicted = {pod.uid: pod for pod in evictable}
    if not constraints.required <= evicted.keys() or not fits_without(
        query, room, evicted.values(), constraints, budget
    ):
        return None
    protected = protected_pods(evictable, constraints.budgets)
    # Those that are protected first, then the most important ones.
    for pod in sorted(evictable, key=lambda pod: (pod.uid not in protected, -pod.priority, pod.started_s, pod.uid)):
        if pod.uid in constraints.required:
            continue
        kept = {uid: each for uid, each in evicted.items() if uid != pod.uid}
        if fits_without(query, room, kept.values(), constraints, budget):
            evicted = kept
    # Without steps left, pods may be among them that need not be evicted.
    if not evicted or budget.left < 0:
        return None
    violations = len(protected_pods(evicted.values(), constraints.budgets))
    if violations and constraints.is_strict:
        return None
    chosen = tuple(sorted(evicted.values(), key=lambda pod: pod.importance, reverse=True))
    return Victims(room.name, chosen, violations + constraints.required_violations)


def protected_pods(pods: Iterable[PreemptablePod], budgets: Mapping[str, int]) -> set[str]:
    """Return the pods whose eviction would violate a budget, if the least important ones are evicted first."""
    left, protected = dict(budgets), set()
    for pod in sorted(pods, key=lambda pod: pod.importance):
        if any(left.get(budget, 0) <= 0 for budget in pod.budgets):
            protected.add(pod.uid)
            continue
        for budget in pod.budgets:
            left[budget] -= 1
    return protected


def fits_without(
    query: FitQuery,
    room: NodeRoom,
    evicted: Iterable[PreemptablePod],
    constraints: Constraints,
    budget: SearchBudget,
) -> bool:
    gpus, host = room_without(room, evicted)
    if constraints.checks_host and not host.covers(query.host):
        return False
    try:
        # It only matters whether there is a placement, and this strategy is found the fastest.
        place_on_node(replace(query, strategy=PlacementStrategy.BINPACK), room.name, gpus, budget)
    except InsufficientGpus:
        return False
    return True


def room_without(room: NodeRoom, evicted: Iterable[PreemptablePod]) -> tuple[list[GpuAvailability], Host]:
    """Return what is free on a node without some of its pods."""
    pods, gpus = list(evicted), []
    freed = sum_usage(pod.usage for pod in pods)
    for each in room.gpus:
        cores, mib = freed.get(each.gpu.uuid, NO_USAGE)
        gpus.append(
            GpuAvailability(each.gpu, each.free_cores + cores, each.free_memory_mib + mib, each.unavailable_reason)
        )
    return gpus, sum((pod.host for pod in pods), room.host)

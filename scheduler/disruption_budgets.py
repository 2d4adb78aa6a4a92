"""PodDisruptionBudgets, as the preemptor reads them: which apply to a pod, and how many evictions each allows now."""

from collections.abc import Callable, Mapping

from msgspec import Struct

from cluster.informer import Informer
from cluster.interface import Cluster
from cluster.objects import DISRUPTION_BUDGETS, DisruptionBudget, LabelSelector
from scheduler.pods import SchedulerPod

# Tenants write budgets, and the GPU pods of a namespace are compared with them while all requests wait. Those with a
# `matchLabels` are found by one of their labels; of the others, this many are compared one by one.
MAX_BUDGETS, MAX_COMPARED = 1000, 16
# How many expressions a selector may have, and values in them.
MAX_VALUES = 100
# The name of a budget that allows nothing, for pods of which not all budgets are known.
UNKNOWN = "?"
NAMESPACE = "namespace"


class DisruptionBudgets:
    """Follows the budgets of all namespaces."""

    def __init__(self, cluster: Cluster) -> None:
        self.informer: Informer[DisruptionBudget] = Informer(
            cluster, DISRUPTION_BUDGETS, indexes={NAMESPACE: lambda budget: budget.metadata.namespace}
        )

    def snapshot(self) -> "BudgetSnapshot":
        return BudgetSnapshot(lambda namespace: self.informer.by_index(NAMESPACE, namespace))


class BudgetSnapshot:
    """The budgets of the namespaces that are asked about. `read` returns those of one."""

    def __init__(self, read: Callable[[str], list[DisruptionBudget]]) -> None:
        self._read, self._indexes = read, dict[str, BudgetIndex]()
        # How many evictions each budget allows, of those that apply to a pod that was asked about.
        self.allowed: dict[str, int] = {}

    def of(self, pod: SchedulerPod) -> tuple[str, ...]:
        """Return the budgets that apply to a pod; one that allows nothing if that is not known."""
        index = self._index(pod.metadata.namespace)
        if not index.by_label and not index.others:
            return ()
        # The Eviction API reads all labels and all budgets.
        if pod.labels is None or not index.is_complete:
            return (UNKNOWN,)
        found = [each for label in pod.labels.items() for each in index.by_label.get(label, ())]
        selected = [each for each in (*found, *index.others) if selects(each.spec.selector, pod.labels)]
        self.allowed |= {budget_key(each): each.status.disruptions_allowed for each in selected}
        return tuple(map(budget_key, selected))

    def _index(self, namespace: str) -> "BudgetIndex":
        if namespace not in self._indexes:
            self._indexes[namespace] = budget_index(self._read(namespace))
        return self._indexes[namespace]

    def as_evicted(self, pod: SchedulerPod) -> tuple[str, ...]:
        """Return the budgets that apply to a pod, as for the Eviction API: it evicts no pod that has several."""
        budgets = self.of(pod)
        return (UNKNOWN,) if len(budgets) > 1 else budgets


class BudgetIndex(Struct, frozen=True):
    """The budgets of a namespace, by one label that they select, and those that do not select a label and its value."""

    by_label: dict[tuple[str, str], list[DisruptionBudget]]
    others: list[DisruptionBudget]
    # Whether all budgets of the namespace are in it.
    is_complete: bool


def budget_index(budgets: list[DisruptionBudget]) -> BudgetIndex:
    by_label: dict[tuple[str, str], list[DisruptionBudget]] = {}
    others = []
    for budget in budgets[:MAX_BUDGETS]:
        selector = budget.spec.selector
        if selector is not None and selector.match_labels:
            by_label.setdefault(next(iter(selector.match_labels.items())), []).append(budget)
        elif selector is not None:
            others.append(budget)
    most_compared = max(map(len, by_label.values()), default=0) + len(others)
    largest = max((selector_size(each.spec.selector) for each in budgets[:MAX_BUDGETS]), default=0)
    is_complete = len(budgets) <= MAX_BUDGETS and most_compared <= MAX_COMPARED and largest <= MAX_VALUES
    return BudgetIndex(by_label, others, is_complete)


def selector_size(selector: LabelSelector | None) -> int:
    """Return how many expressions a selector has, and values in them."""
    return sum(1 + len(each.values) for each in selector.match_expressions) if selector else 0


def budget_key(budget: DisruptionBudget) -> str:
    return f"{budget.metadata.namespace}/{budget.metadata.name}"


def selects(selector: LabelSelector | None, labels: Mapping[str, str]) -> bool:
    """Whether a selector matches labels; none matches nothing, and an empty one everything."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in selector.match_labels.items()):
        return False
    for each in selector.match_expressions:
        value = labels.get(each.key)
        is_matched = {
            "In": value in each.values,
            "NotIn": value not in each.values,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }.get(each.operator, False)
        if not is_matched:
            return False
    return True

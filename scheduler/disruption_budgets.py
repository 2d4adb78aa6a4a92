"""PodDisruptionBudgets, as the preemptor reads them: which apply to a pod, and how many evictions each allows now."""

from collections.abc import Iterable

from cluster.informer import Informer
from cluster.interface import Cluster
from cluster.objects import DISRUPTION_BUDGETS, DisruptionBudget, LabelSelector
from scheduler.pods import SchedulerPod

# Budgets of a namespace that are read: every pod of it is compared with all of them, and tenants write them. The
# Eviction API reads all.
MAX_BUDGETS = 100


class DisruptionBudgets:
    """Follows the budgets of all namespaces."""

    def __init__(self, cluster: Cluster) -> None:
        self.informer: Informer[DisruptionBudget] = Informer(cluster, DISRUPTION_BUDGETS)

    def snapshot(self) -> "BudgetSnapshot":
        return BudgetSnapshot(self.informer.all())


class BudgetSnapshot:
    """The budgets at one time."""

    def __init__(self, budgets: Iterable[DisruptionBudget]) -> None:
        self._by_namespace: dict[str, list[DisruptionBudget]] = {}
        for budget in budgets:
            of_namespace = self._by_namespace.setdefault(budget.metadata.namespace, [])
            if len(of_namespace) < MAX_BUDGETS:
                of_namespace.append(budget)
        self.allowed = {
            budget_key(budget): budget.status.disruptions_allowed
            for each in self._by_namespace.values()
            for budget in each
        }

    def of(self, pod: SchedulerPod) -> tuple[str, ...]:
        """Return the budgets that apply to a pod."""
        budgets = self._by_namespace.get(pod.metadata.namespace, ())
        return tuple(budget_key(each) for each in budgets if selects(each.spec.selector, pod.labels))


def budget_key(budget: DisruptionBudget) -> str:
    return f"{budget.metadata.namespace}/{budget.metadata.name}"


def selects(selector: LabelSelector | None, labels: dict[str, str]) -> bool:
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

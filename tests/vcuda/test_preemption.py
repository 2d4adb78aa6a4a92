"""Which pods are evicted for another one."""

from typing import Any

from msgspec.structs import replace

from vcuda.fit_query import FitQuery
from vcuda.gpu_availability import GpuAvailability
from vcuda.host import UNLIMITED, Host
from vcuda.inventory import Gpu
from vcuda.placement import SearchBudget
from vcuda.preemption import Constraints, NodeRoom, PreemptablePod, select_victims
from vcuda.request import ContainerRequest, PodRequest, Role
from vcuda.vocabulary import Share

FREE = Constraints()


def wants(cores: int, **changes: Any) -> FitQuery:
    share = Share(cores, 4 if cores < 100 else cores // 100)
    query = FitQuery(PodRequest((ContainerRequest("c", Role.APP, share, "vcuda"),)), 256)
    return replace(query, **changes)


def running(
    name: str, card: int, cores: int = 50, priority: int = 0, started: float = 0.0, **changes: Any
) -> PreemptablePod:
    pod = PreemptablePod(name, f"team/{name}", priority, started, {f"GPU-{card}": (cores, 10 * cores)})
    return replace(pod, **changes)


def node_with(*pods: PreemptablePod, cards: int = 2, host: Host = UNLIMITED, others: int = 0) -> NodeRoom:
    """A node with these pods; `others` cores of GPU 0 are held by pods that cannot be evicted."""
    room = []
    for index in range(cards):
        card = Gpu(uuid=f"GPU-{index}", index=index, model="T4", memory_mib=16384, healthy=True)
        held = [pod.usage.get(card.uuid, (0, 0)) for pod in pods]
        cores, mib = sum(each[0] for each in held), sum(each[1] for each in held)
        fixed = others if index == 0 else 0
        room.append(GpuAvailability(card, 100 - cores - fixed, 16384 - mib - 10 * fixed))
    return NodeRoom("n", room, host)


def victims(query: FitQuery, *pods: PreemptablePod, constraints: Constraints = FREE, **node: Any) -> list[str] | None:
    found = select_victims(query, node_with(*pods, **node), pods, constraints)
    return sorted(pod.uid for pod in found.pods) if found else None


def test_only_pods_that_free_one_gpu_are_evicted() -> None:
    """By counts, one pod of each GPU would do: 100 of 200 cores are free then, but no GPU is."""
    pods = [running("a", 0, priority=1), running("b", 0, priority=1), running("c", 1), running("d", 1, priority=2)]
    assert victims(wants(100), *pods) == ["a", "b"]


def test_as_few_pods_as_possible_are_evicted() -> None:
    assert victims(wants(50), running("a", 0), running("b", 0), running("c", 1), running("d", 1)) == ["d"]


def test_the_least_important_pod_is_evicted() -> None:
    pods = [running("old", 0, 100, started=1), running("new", 1, 100, started=2)]
    assert victims(wants(100), *pods) == ["new"]
    assert victims(wants(100), running("low", 0, 100, started=1), running("high", 1, 100, 5, started=2)) == ["low"]


def test_pods_that_cannot_be_evicted_stay() -> None:
    """The other half of GPU 0 is held by a pod of higher priority."""
    assert victims(wants(100), running("a", 0), others=50, cards=1) is None
    assert victims(wants(50), running("a", 0), others=50, cards=1) == ["a"]


def test_nothing_is_evicted_where_the_pod_fits_already() -> None:
    assert victims(wants(50), running("a", 0)) is None


def test_a_budget_is_respected_if_another_pod_can_be_evicted() -> None:
    guarded = running("a", 0, 100, budgets=("team/b",))
    other = running("b", 1, 100, priority=5)
    assert victims(wants(100), guarded, other, constraints=Constraints({"team/b": 0})) == ["b"]
    assert victims(wants(100), guarded, other, constraints=Constraints({"team/b": 1})) == ["a"]


def test_a_budget_is_violated_only_where_that_is_allowed() -> None:
    guarded = running("a", 0, 100, budgets=("team/b",))
    found = select_victims(wants(100), node_with(guarded, cards=1), [guarded], Constraints({"team/b": 0}))
    assert found is not None
    assert found.violations == 1
    assert victims(wants(100), guarded, cards=1, constraints=Constraints({"team/b": 0}, is_strict=True)) is None


def test_a_budget_counts_for_all_its_pods_together() -> None:
    pods = [running(name, at, 100, budgets=("team/b",)) for at, name in enumerate("ab")]
    assert victims(wants(200), *pods, constraints=Constraints({"team/b": 1}, is_strict=True)) is None
    assert victims(wants(200), *pods, constraints=Constraints({"team/b": 2}, is_strict=True)) == ["a", "b"]


def test_cpu_of_the_node_counts() -> None:
    """The pod on GPU 1 has to go as well, because of its CPU."""
    pods = [running("a", 0, 100, host=Host(1000, 0)), running("b", 1, 100, 1, host=Host(3000, 0))]
    query = wants(100, host=Host(3000, 0))
    assert victims(query, *pods, host=Host(0, 0)) == ["b"]
    assert victims(replace(query, host=Host(4000, 0)), *pods, host=Host(0, 0)) == ["a", "b"]


def test_victims_of_kube_scheduler_are_kept_if_they_are_required() -> None:
    pods = [running("a", 0, 100), running("b", 1, 100)]
    assert victims(wants(100), *pods, constraints=Constraints(required=frozenset({"a"}))) == ["a"]
    assert victims(wants(100), *pods, constraints=Constraints(required=frozenset({"unknown"}))) is None


def test_the_node_with_the_least_harm_is_preferred() -> None:
    """No violations first, then low priorities, then few pods, then pods that began late."""
    low, high = running("low", 0, 100), running("high", 0, 100, 9)
    guarded = running("guarded", 0, 100, budgets=("team/b",))
    late = running("late", 0, 100, started=9)
    budgets = Constraints({"team/b": 0})
    harm = {}
    for pod in (low, high, guarded, late):
        found = select_victims(wants(100), node_with(pod, cards=1), [pod], budgets)
        assert found is not None
        harm[pod.uid] = found.harm
    assert sorted(harm, key=harm.__getitem__) == ["late", "low", "high", "guarded"]


def test_fewer_pods_of_a_negative_priority_are_less_harm() -> None:
    one = select_victims(wants(100), node_with(running("a", 0, 100, -10), cards=1), [running("a", 0, 100, -10)], FREE)
    pods = [running(name, 0, 50, -10) for name in "bc"]
    two = select_victims(wants(100), node_with(*pods, cards=1), pods, FREE)
    assert one is not None
    assert two is not None
    assert one.harm < two.harm


def test_without_steps_left_nothing_is_chosen() -> None:
    """Pods may be among the victims that need not be evicted."""
    pods = [running(name, at // 2, 50) for at, name in enumerate("abcd")]
    assert select_victims(wants(50), node_with(*pods), pods, FREE, SearchBudget(2)) is None
    assert select_victims(wants(50), node_with(*pods), pods, FREE, SearchBudget(100)) is not None

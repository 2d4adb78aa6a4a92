"""Whom a preemptor has evicted, where several nodes and pods are possible."""

from typing import Any

import pytest
from msgspec.structs import replace

from cluster.objects import DISRUPTION_BUDGETS, NODES, PODS, Metadata, Pod
from scheduler.node_candidates import Preemptor
from scheduler.pods import SchedulerPod
from scheduler.preemption import MAX_LOOKED_AT_ALONE
from tests.scheduler.test_preemption import HIGH, evicting, is_deleting, preempt, uids
from tests.scheduler.world import TEAM, World, container, gpu
from tests.waiting import eventually
from vcuda.fit_query import FitQuery

__all__ = ["evicting"]
NEVER_S = 10**6


def add_budget(world: World, allowed: int, name: str = "guarded", **selector: Any) -> None:
    """Add a PodDisruptionBudget, by default of the pods with the label guarded."""
    body = {
        "metadata": {"name": name, "namespace": TEAM},
        "spec": {"selector": selector or {"matchLabels": {"guarded": "yes"}}},
        "status": {"disruptionsAllowed": allowed},
    }
    before = len(world.service.budgets.informer)
    world.cluster.create(DISRUPTION_BUDGETS, body)
    eventually(lambda: len(world.service.budgets.informer) > before, "the budget")


def run_on(world: World, node: str, name: str, cores: int = 100, memory: int = 0, **spec: Any) -> Pod:
    labels = spec.pop("labels", {})
    pod = world.add_pod(name, container(cores=cores, memory=memory or (1 if cores == 100 else 8)), **spec)
    if labels:
        world.cluster.patch(PODS, name, TEAM, {"metadata": {"labels": labels}})
    assert world.schedule(pod, [node]) == node
    eventually(lambda: len(world.service.state.pod(pod.metadata.uid).labels or {}) == len(labels), "the labels")  # type: ignore[union-attr]
    return pod


def wanting(world: World, cores: int = 100, memory: int = 0, name: str = "wanted") -> Pod:
    return world.add_pod(name, container(cores=cores, memory=memory or (1 if cores == 100 else 8)), **HIGH)


def evict(world: World, pod: Pod) -> set[str]:
    """Have the pod refused and others evicted for it; returns the names of the pods that are being deleted."""
    assert not world.filter(pod)["NodeNames"]
    world.service.evictor.run_once(0)
    return {each.metadata.name for each in world.cluster.list(PODS, TEAM).items if each.metadata.deletion_timestamp}


@pytest.mark.parametrize("is_asked", [True, False], ids=["kube-scheduler asks", "it does not"])
def test_a_node_with_a_protected_pod_does_not_hide_the_others(evicting: World, *, is_asked: bool) -> None:
    """Also if the pods of all others are more important."""
    add_budget(evicting, 0)
    for node in "ab":
        evicting.add_node(node)
    guarded = run_on(evicting, "a", "guarded", labels={"guarded": "yes"})
    other = run_on(evicting, "b", "other", priority=10)
    wanted = wanting(evicting)
    if is_asked:
        assert preempt(evicting, wanted, a=[guarded], b=[other]) == {"b": uids(other)}
    else:
        assert evict(evicting, wanted) == {"other"}


def test_pods_whose_end_does_not_help_use_up_no_budget(evicting: World) -> None:
    add_budget(evicting, 1)
    evicting.add_node("n", 2)
    labels = {"guarded": "yes"}
    run_on(evicting, "n", "fixed", 70, **HIGH)
    helps = run_on(evicting, "n", "helps", 60, priority=1, labels=labels)
    run_on(evicting, "n", "does-not", 30, labels=labels)
    assert evict(evicting, wanting(evicting, 80)) == {helps.metadata.name}


@pytest.mark.parametrize(
    "budgets",
    [
        [{"matchLabels": {"guarded": "yes"}}, {"matchExpressions": [{"key": "guarded", "operator": "Exists"}]}],
        [{"matchExpressions": [{"key": f"k{number}", "operator": "DoesNotExist"}]} for number in range(17)],
        [{"matchExpressions": [{"key": "other", "operator": "In", "values": [f"v{n}" for n in range(101)]}]}],
    ],
    ids=["two budgets, which the Eviction API does not support", "too many budgets", "a selector that is too large"],
)
def test_pods_whose_budgets_are_not_clear_are_not_evicted(evicting: World, budgets: list[dict[str, Any]]) -> None:
    for number, selector in enumerate(budgets):
        add_budget(evicting, 5, f"b{number}", **selector)
    evicting.add_node("a")
    run_on(evicting, "a", "guarded", 60, labels={"guarded": "yes"})
    assert evict(evicting, wanting(evicting, 80)) == set()


def test_memory_counts_as_kube_scheduler_counts_it(world: World) -> None:
    """It names pods of two GPUs: there is enough memory then, but not on one of them."""
    world.add_node("n", 2)
    pods = [run_on(world, "n", f"low-{number}", 10, 30) for number in range(4)]
    first, second = ([pod for pod in pods if world.placed(pod)["c0"][0].uuid == f"GPU-n-{at}"] for at in range(2))
    found = preempt(world, wanting(world, 10, 60), n=[first[0], second[0]])
    assert found in ({"n": uids(*first)}, {"n": uids(*second)})


def test_unhealthy_gpus_do_not_count(world: World) -> None:
    world.add_node("n", [gpu("n", 0), gpu("n", 1), gpu("n", 2, healthy=False)])
    pods = [run_on(world, "n", f"low-{number}", 50) for number in range(4)]
    first, second = ([pod for pod in pods if world.placed(pod)["c0"][0].uuid == f"GPU-n-{at}"] for at in range(2))
    found = preempt(world, wanting(world), n=[first[0], second[0]])
    assert found in ({"n": uids(*first)}, {"n": uids(*second)})


def add_plain_pod(world: World, name: str, node: str, cpu: str = "1", priority: int = 0) -> Pod:
    resources = {"requests": {"cpu": cpu}}
    spec = {"nodeName": node, "priority": priority, "containers": [{"name": "c", "image": "i", "resources": resources}]}
    pod = world.cluster.create(PODS, {"metadata": {"name": name, "namespace": TEAM}, "spec": spec})
    eventually(lambda: world.service.state.other_pod(pod.metadata.uid), "the pod")
    return pod


def set_cpu(world: World, node: str, cpu: str) -> None:
    status = {"status": {"allocatable": {"cpu": cpu, "memory": "8Gi"}}}
    world.cluster.patch(NODES, node, "", status, subresource="status")


def test_victims_without_gpus_are_harm_as_well(world: World) -> None:
    """Four pods of a high priority with a budget, or one of the lowest without."""
    for node in "ab":
        world.add_node(node)
    low = run_on(world, "b", "low")
    set_cpu(world, "a", "4")
    plain = [add_plain_pod(world, f"web-{number}", "a", priority=90) for number in range(4)]
    wanted = wanting(world)
    victims = {"a": {"Pods": [{"UID": each.metadata.uid} for each in plain], "NumPDBViolations": 4}}
    asked = victims | {"b": {"Pods": [{"UID": low.metadata.uid}]}}
    answer = world.call("preempt", {"Pod": world.raw(wanted), "NodeNameToMetaVictims": asked})
    assert answer["NodeNameToMetaVictims"] == {"b": {"Pods": [{"UID": low.metadata.uid}], "NumPDBViolations": 0}}


@pytest.mark.parametrize("names_gpu_pod", [True, False])
def test_pods_without_gpus_are_evicted_for_their_cpu(world: World, *, names_gpu_pod: bool) -> None:
    """kube-scheduler knows whose CPU is missing; the GPU pods that it names stay victims if their end suffices."""
    world.add_node("n", 2)
    first, second = run_on(world, "n", "first", 60), run_on(world, "n", "second", 60)
    plain = add_plain_pod(world, "web", "n", "3")
    set_cpu(world, "n", "4")
    amounts = container(cores=80) | {}
    amounts["resources"] = {kind: of | {"cpu": "2"} for kind, of in amounts["resources"].items()}
    wanted = world.add_pod("wanted", amounts, **HIGH)
    found = preempt(world, wanted, n=[first, plain] if names_gpu_pod else [plain])
    possible = [{"n": uids(first, plain)}, {"n": uids(second, plain)}]
    assert found in (possible[:1] if names_gpu_pod else possible)


def test_an_overcommitted_node_suits_a_pod_that_requests_no_cpu(world: World) -> None:
    world.add_node("n", 2)
    low = [run_on(world, "n", f"low-{number}", 60) for number in range(2)]
    add_plain_pod(world, "web", "n", "4")
    set_cpu(world, "n", "2")
    eventually(lambda: world.service.state.table.host("n")[0] < 0, "the overcommitment")
    found = preempt(world, wanting(world, 80), n=[])
    assert len(found["n"]) == 1
    assert found["n"] < uids(*low)


def test_nothing_is_evicted_if_a_pod_of_the_node_has_ended_meanwhile(world: World) -> None:
    """kube-scheduler's watch may be behind ours."""
    world.add_node("n", 2)
    first, second = (run_on(world, "n", name) for name in ("first", "second"))
    wanted = wanting(world)
    assert not world.filter(wanted)["NodeNames"]
    world.end(first)
    assert preempt(world, wanted, n=[second]) == {}
    assert world.schedule(wanted) == "n"


def test_nothing_is_evicted_for_a_pod_that_is_gone(world: World) -> None:
    world.add_node("n")
    low = run_on(world, "n", "low")
    wanted = wanting(world)
    raw = world.raw(wanted)
    world.cluster.delete(PODS, "wanted", TEAM, grace_s=0)
    eventually(lambda: world.service.state.is_gone(wanted.metadata.uid), "the deletion")
    asked = {"n": {"Pods": [{"UID": low.metadata.uid}]}}
    assert world.call("preempt", {"Pod": raw, "NodeNameToMetaVictims": asked})["NodeNameToMetaVictims"] == {}
    assert not world.service.state.nominations()


def test_a_pod_that_takes_long_to_end_is_not_waited_for(evicting: World) -> None:
    """Its owner chooses how long; another pod can be evicted."""
    for node in "ab":
        evicting.add_node(node)
    slow, other = run_on(evicting, "a", "slow", 60), run_on(evicting, "b", "other", 60)
    evicting.cluster.delete(PODS, "slow", TEAM, grace_s=NEVER_S)
    eventually(lambda: is_deleting(evicting, slow), "the deletion")
    assert evict(evicting, wanting(evicting, 80)) == {"slow", other.metadata.name}


def test_every_node_of_a_large_cluster_has_its_turn(world: World) -> None:
    """Not all are looked at each time, as all requests wait meanwhile."""
    state, pod = world.service.state, wanting(world, 80)
    for number in range(2 * MAX_LOOKED_AT_ALONE + 1):
        world.add_node(f"n{number:03}")
        # By counts a candidate, but it does not help.
        run_on(world, f"n{number:03}", f"low-{number}", 10)
        run_on(world, f"n{number:03}", f"high-{number}", 90 if number else 15, **HIGH)
    known = state.pod(pod.metadata.uid)
    assert known is not None
    grant = world.service.extender.grant(known)
    preemptor = Preemptor(known, world.service.extender.query(known, grant), evicts=True)
    with state.lock:
        found = [world.service.planner.plan(preemptor, state.node_names()) for _ in range(4)]
    assert {each.victims.node for each in found if each is not None} == {"n000"}


def test_a_request_of_the_policy_files_time_is_understood(world: World) -> None:
    world.add_node("n")
    low = run_on(world, "n", "low")
    wanted = wanting(world)
    for victims in (
        {"nodeNameToMetaVictims": {"n": {"pods": [{"uid": low.metadata.uid}]}}},
        {"nodeNameToVictims": {"n": {"pods": [world.raw(low)]}}},
    ):
        answer = world.call("preempt", {"pod": world.raw(wanted), **victims})
        assert answer["NodeNameToMetaVictims"]["n"]["Pods"] == [{"UID": low.metadata.uid}]
        world.service.state.end_nomination(wanted.metadata.uid)
    world.call("preempt", {}, status=400)


def test_the_choice_of_kube_scheduler_stays_where_it_suffices(world: World) -> None:
    """Its victim may be in the way for another reason as well, such as a port."""
    world.add_node("n", 2)
    for victim in [run_on(world, "n", name) for name in ("first", "second")]:
        assert preempt(world, wanting(world, name=f"for-{victim.metadata.name}"), n=[victim]) == {"n": uids(victim)}


def test_a_pod_that_does_not_end_is_not_waited_for(world: World) -> None:
    """Its grace period is over: a process may hang in the driver."""
    for node in "ab":
        world.add_node(node)
    hanging, other = run_on(world, "a", "hanging"), run_on(world, "b", "other")
    world.cluster.delete(PODS, "hanging", TEAM, grace_s=1)
    eventually(lambda: is_deleting(world, hanging), "the deletion")
    known = world.service.state.pod(hanging.metadata.uid)
    assert known is not None
    world.service.state.handle_pod(known, newer(known, ends_s=known.ends_s - 120))
    assert preempt(world, wanting(world), a=[hanging], b=[other]) == {"b": uids(other)}


def newer(pod: SchedulerPod, **changes: Any) -> SchedulerPod:
    metadata = replace(pod.metadata, resource_version=str(10**9))
    return replace(pod, metadata=metadata, **changes)


def test_a_pod_is_told_only_once_that_room_has_appeared(world: World) -> None:
    """If it asks again something else is in its way, however often other pods of the node end."""
    world.add_node("n", 2)
    low = run_on(world, "n", "low", 100)
    wanted, answers = wanting(world, 50), []
    for number in range(2):
        world.end(run_on(world, "n", f"small-{number}", 10))
        answers.append(preempt(world, wanted, n=[low]))
    assert answers == [{}, {"n": uids(low)}]


def test_pods_that_are_about_to_be_bound_count(world: World) -> None:
    """kube-scheduler counts them as well, so that it is not another reason for which its victims are in the way."""
    world.add_node("n", 3)
    low = [run_on(world, "n", f"low-{number}", 50) for number in range(4)]
    first, second = (
        [pod for pod in low if world.placed(pod)["c0"][0].uuid == uuid]
        for uuid in sorted({world.placed(pod)["c0"][0].uuid for pod in low})
    )
    claimed = world.add_pod("claimed", container(cores=100, memory=1), **HIGH)
    assert world.filter(claimed)["NodeNames"] == ["n"]
    found = preempt(world, wanting(world), n=[first[0], second[0]])
    assert found in ({"n": uids(*first)}, {"n": uids(*second)})


def test_of_equal_pods_the_one_that_has_not_begun_is_evicted(world: World) -> None:
    world.add_node("n", 2)
    runs, waits = run_on(world, "n", "runs"), run_on(world, "n", "waits")
    status = {"status": {"startTime": "2026-01-01T00:00:00Z"}}
    world.cluster.patch(PODS, "runs", TEAM, status, subresource="status")
    state = world.service.state
    eventually(lambda: (state.pod(runs.metadata.uid) or never()).started_s < 2**40, "the status")
    assert preempt(world, wanting(world), n=[]) == {"n": uids(waits)}


def never() -> SchedulerPod:
    raise AssertionError


def test_preemptors_that_take_turns_see_all_nodes(world: World) -> None:
    names = [f"n{number}" for number in range(2 * MAX_LOOKED_AT_ALONE)]
    planner = world.service.planner
    seen: dict[str, set[str]] = {"one": set(), "two": set()}
    for _ in range(3):
        for name, nodes in seen.items():
            pod = SchedulerPod(metadata=Metadata(name=name, uid=name))
            nodes.update(planner.nodes_in_turn(names, Preemptor(pod, FitQuery(pod.request, 256), evicts=True)))
    assert seen == {"one": set(names), "two": set(names)}

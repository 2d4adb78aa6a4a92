"""For whom the GPUs of evicted pods are kept, and for how long."""

from typing import Any

import pytest

from cluster.errors import ApiError
from cluster.objects import PODS, Pod
from scheduler.cluster_state import REJECTED_AFTER_S
from tests.scheduler.test_preemption import HIGH, evicting, fill, is_deleting, left, preempt, uids
from tests.scheduler.test_victims import NEVER_S, add_plain_pod, run_on, set_cpu
from tests.scheduler.world import TEAM, World, container
from tests.waiting import eventually
from vcuda.decision import Unavailable

__all__ = ["evicting"]


def nominated(world: World) -> set[str]:
    return {each.pod.metadata.name for each in world.service.state.nominations()}


def delete(world: World, pod: Pod, grace_s: int) -> None:
    world.cluster.delete(PODS, pod.metadata.name, TEAM, grace_s=grace_s)
    state = world.service.state
    eventually(lambda: is_deleting(world, pod) if grace_s else state.holding(pod.metadata.uid) is None, "the deletion")


def store_nominated_node(world: World, pod: Pod, node: str) -> None:
    """Write the node to the pod's status, as kube-scheduler does."""
    status = {"status": {"nominatedNodeName": node}}
    world.cluster.patch(PODS, pod.metadata.name, TEAM, status, subresource="status")


def test_two_preemptors_wait_for_two_parts_of_one_gpu(world: World) -> None:
    """Each is filtered again meanwhile; neither loses its nomination, and no newcomer gets the room."""
    first, second = fill(world, 1)
    preemptors = [world.add_pod(name, container(cores=50), **HIGH) for name in ("one", "two")]
    found = [preempt(world, pod, n=[victim]) for pod, victim in zip(preemptors, (first, second), strict=True)]
    assert found[0]["n"] | found[1]["n"] == uids(first, second)
    for pod in preemptors:
        assert not world.filter(pod)["NodeNames"]
    assert nominated(world) == {"one", "two"}
    for victim in (first, second):
        world.end(victim)
    assert not world.filter(world.add_pod("newcomer", container(cores=10)))["NodeNames"]
    assert [world.schedule(pod) for pod in preemptors] == ["n", "n"]


def test_a_more_important_preemptor_takes_over_the_victims_of_another(world: World) -> None:
    """They end already: nobody else is evicted, and no pod between the two gets the GPU."""
    (low,) = fill(world, 1, cores=100)
    middle = world.add_pod("middle", container(cores=100, memory=1), priority=50)
    assert preempt(world, middle, n=[low])
    delete(world, low, NEVER_S)
    top = world.add_pod("top", container(cores=100, memory=1), priority=100)
    assert not world.filter(top)["NodeNames"]
    assert preempt(world, top, n=[low]) == {}
    assert nominated(world) == {"top"}
    delete(world, low, 0)
    between = world.add_pod("between", container(cores=100, memory=1), priority=75)
    assert not world.filter(between)["NodeNames"]
    assert world.schedule(top) == "n"


def test_victims_that_never_end_are_not_waited_for_forever(world: World) -> None:
    (low,) = fill(world, 1, cores=100)
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    assert preempt(world, wanted, n=[low])
    delete(world, low, NEVER_S)
    nomination = world.service.state.nomination(wanted.metadata.uid)
    assert nomination is not None
    nomination.last_at = nomination.expires_at = 0.0
    eventually(lambda: not nominated(world), "the end of the nomination")
    assert preempt(world, wanted, n=[]) == {}


def test_room_that_is_ready_is_not_given_up_for_another_node(world: World) -> None:
    """kube-scheduler, whose watch is behind, names victims on another one."""
    for node in "ab":
        world.add_node(node)
    first, second = run_on(world, "a", "first"), run_on(world, "b", "second")
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    (node,) = preempt(world, wanted, a=[first], b=[second])
    victim, other = (first, second) if node == "a" else (second, first)
    world.end(victim)
    assert preempt(world, wanted, **{"b" if node == "a" else "a": [other]}) == {}
    assert world.schedule(wanted) == node


def test_a_nomination_is_restored_when_the_last_victim_is_evicted(world: World) -> None:
    """The process was restarted between the first eviction and the second."""
    first, second = fill(world, 1)
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    assert preempt(world, wanted, n=[first, second]) == {"n": uids(first, second)}
    store_nominated_node(world, wanted, "n")
    delete(world, first, NEVER_S)
    world.restart()
    assert not nominated(world)
    delete(world, second, NEVER_S)
    eventually(lambda: nominated(world) == {"high"}, "the nomination")
    for victim in (first, second):
        delete(world, victim, 0)
    assert not world.filter(world.add_pod("newcomer", container(cores=10)))["NodeNames"]
    assert world.schedule(wanted) == "n"


def test_a_nomination_that_has_ended_is_not_restored(world: World) -> None:
    (low,) = fill(world, 1, cores=100)
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    assert preempt(world, wanted, n=[low])
    store_nominated_node(world, wanted, "n")
    eventually(lambda: (world.service.state.pod(wanted.metadata.uid) or wanted).nominated_node, "the status")  # type: ignore[union-attr]
    nomination = world.service.state.nomination(wanted.metadata.uid)
    assert nomination is not None
    nomination.expires_at = 0.0
    eventually(lambda: not nominated(world), "the end of the nomination")
    assert world.service.state.unrestored() == []


def test_a_pod_that_was_bound_meanwhile_is_not_nominated_again(world: World) -> None:
    """At the end of that nomination its GPUs would be free for others."""
    world.add_node("n")
    pod = world.add_pod("p", container(cores=100, memory=1), **HIGH)
    store_nominated_node(world, pod, "n")
    state = world.service.state
    eventually(lambda: (state.pod(pod.metadata.uid) or pod).nominated_node, "the status")  # type: ignore[union-attr]
    known = state.pod(pod.metadata.uid)
    assert known is not None
    assert world.schedule(pod) == "n"
    assert not world.service.planner.restore(known)
    assert not world.service.state.nominations()


def test_a_preemptor_does_not_count_on_what_another_one_only_waits_for(world: World) -> None:
    """The first eviction never happens; the second pod had waited for it, and must not keep the first one waiting."""
    world.add_node("n")
    low = run_on(world, "n", "low")
    first, second = (world.add_pod(name, container(cores=40), **HIGH) for name in ("one", "two"))
    assert preempt(world, first, n=[low]) == {"n": uids(low)}
    assert preempt(world, second, n=[low]) == {}
    assert nominated(world) == {"one", "two"}
    world.service.state.end_nomination(first.metadata.uid)
    assert preempt(world, first, n=[low]) == {"n": uids(low)}


def test_a_nomination_ends_if_one_of_its_victims_is_not_evicted(world: World) -> None:
    """The others may take long to end."""
    low = fill(world, 1)
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    assert preempt(world, wanted, n=low) == {"n": uids(*low)}
    delete(world, low[0], NEVER_S)
    nomination = world.service.state.nomination(wanted.metadata.uid)
    assert nomination is not None
    nomination.expires_at = 0.0
    eventually(lambda: not nominated(world), "the end of the nomination")


def test_another_node_is_tried_if_kube_scheduler_does_not_accept_the_nominated_one(world: World) -> None:
    """It was cordoned, say, while the victims end."""
    for node in "ab":
        world.add_node(node)
    first, second = run_on(world, "a", "first"), run_on(world, "b", "second")
    wanted = world.add_pod("high", container(cores=100, memory=1), **HIGH)
    assert preempt(world, wanted, a=[first])
    delete(world, first, NEVER_S)
    nomination = world.service.state.nomination(wanted.metadata.uid)
    assert nomination is not None
    assert preempt(world, wanted, b=[second]) == {}
    nomination.since -= REJECTED_AFTER_S
    assert preempt(world, wanted, b=[second]) == {"b": uids(second)}


def test_victims_without_gpus_are_waited_for(world: World) -> None:
    world.add_node("n")
    set_cpu(world, "n", "4")
    plain = add_plain_pod(world, "web", "n", "4")
    amounts = container(cores=50)
    amounts["resources"] = {kind: of | {"cpu": "2"} for kind, of in amounts["resources"].items()}
    wanted = world.add_pod("high", amounts, **HIGH)
    assert preempt(world, wanted, n=[plain]) == {"n": uids(plain)}
    state = world.service.state
    state.expire_nominations()
    nomination = state.nomination(wanted.metadata.uid)
    assert nomination is not None
    assert not nomination.is_free
    world.cluster.delete(PODS, "web", TEAM, grace_s=0)
    eventually(lambda: state.expire_nominations() == [] and nomination.is_free, "the end of the victim")


class Evictions:
    """Records the evictions of a scheduler, and has some fail."""

    def __init__(self, world: World) -> None:
        cluster: Any = world.service.evictor._cluster
        self._evict, self.evicted, self.refused = cluster.evict, list[str](), set[str]()
        self.is_available = True
        self.after: dict[int, Any] = {}
        cluster.evict = self.evict

    def evict(self, name: str, namespace: str, *, uid: str, dry_run: bool = False) -> None:
        if not self.is_available:
            raise Unavailable("connection refused")
        if name in self.refused:
            raise ApiError("This pod has more than one PodDisruptionBudget", code=500, reason="InternalError")
        self._evict(name, namespace, uid=uid, dry_run=dry_run)
        if not dry_run:
            self.evicted.append(name)
            self.after.get(len(self.evicted), lambda: None)()


@pytest.mark.parametrize("how", ["deleted", "no longer nominated"])
def test_no_more_pods_are_evicted_for_a_pod_that_does_not_wait_any_more(evicting: World, how: str) -> None:
    evicting.add_node("n")
    low = [run_on(evicting, "n", f"low-{number}", 20) for number in range(4)]
    wanted = evicting.add_pod("high", container(cores=100, memory=1), **HIGH)
    state, evictions = evicting.service.state, Evictions(evicting)

    def end_wait() -> None:
        if how == "deleted":
            evicting.cluster.delete(PODS, "high", TEAM, grace_s=0)
            eventually(lambda: state.is_gone(wanted.metadata.uid), "the deletion")
        else:
            state.end_nomination(wanted.metadata.uid)

    evictions.after[1] = end_wait
    assert not evicting.filter(wanted)["NodeNames"]
    evicting.service.evictor.run_once(0)
    assert len(evictions.evicted) == 1
    assert len(left(evicting, [pod.metadata.name for pod in low])) == 4


def test_other_pods_are_evicted_where_the_api_server_refuses(evicting: World) -> None:
    for node in "ab":
        evicting.add_node(node, 2)
        for number in range(2):
            run_on(evicting, node, f"low-{node}{number}", 60)
    evictions = Evictions(evicting)
    evictions.refused = {"low-a0", "low-a1"}
    wanted = evicting.add_pod("high", container(cores=80), **HIGH)
    assert not evicting.filter(wanted)["NodeNames"]
    evicting.service.evictor.run_once(0)
    assert len(evictions.evicted) == 1
    assert evictions.evicted[0].startswith("low-b")


def test_pods_are_evicted_as_soon_as_the_api_server_is_back(evicting: World) -> None:
    """What failed for a moment is no refusal."""
    evicting.add_node("n", 2)
    for number in range(2):
        run_on(evicting, "n", f"low-{number}", 60)
    evictions = Evictions(evicting)
    wanted = evicting.add_pod("high", container(cores=80), **HIGH)
    for evictions.is_available in (False, True):
        assert not evicting.filter(wanted)["NodeNames"]
        evicting.service.evictor.run_once(0)
        assert len(evictions.evicted) == evictions.is_available

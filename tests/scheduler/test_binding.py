"""Binding: only with free GPUs and a charge, once, and without a trace if it fails."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from cluster.errors import Conflict, NotFound, Rejected
from cluster.objects import PODS, Pod
from tests.scheduler.world import NAMES, TEAM, World, container, gpu
from tests.waiting import eventually
from vcuda.decision import Unavailable
from vcuda.placement_annotation import encode_placement


@pytest.fixture
def mixed() -> Iterator[World]:
    """A node with a T4 and one with a V100, in a namespace with quotas for both."""
    world = World(quota="types: {T4: {cores: 100}, V100: {cores: 100}}").start()
    world.add_node("t4", 1)
    world.add_node("v100", 1, "V100")
    yield world
    world.stop()


def count_calls(world: World, name: str) -> list[str]:
    """Record the calls of a method of the cluster from now on."""
    calls: list[str] = []
    original = getattr(world.cluster, name)

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(str(args[0]))
        return original(*args, **kwargs)

    setattr(world.cluster, name, record)
    return calls


def fail_binding(world: World, *failures: Exception, takes_effect: bool = False) -> None:
    """Let the next bindings fail, before or after they take effect."""
    original = world.cluster.bind
    remaining = list(failures)

    def bind(pod: str, namespace: str, node: str, *, uid: str, annotations: Mapping[str, str]) -> None:
        if remaining and not takes_effect:
            raise remaining.pop(0)
        original(pod, namespace, node, uid=uid, annotations=annotations)
        if remaining:
            raise remaining.pop(0)

    world.cluster.bind = bind  # type: ignore[method-assign]


def is_untouched(world: World, pod: Pod) -> bool:
    """Whether a pod holds nothing, and its node's GPUs are free."""
    return world.service.state.holding(pod.metadata.uid) is None and world.service.state.free_cores() == 200


def test_placement_and_node_are_one_write(mixed: World) -> None:
    """Nothing else is written to the pod, and the ledger is not written at all."""
    pod = mixed.add_pod("p")
    writes = [count_calls(mixed, name) for name in ("bind", "patch", "update", "create")]
    assert mixed.schedule(pod) == "t4"
    assert [len(each) for each in writes] == [1, 0, 0, 0]
    (slices,) = mixed.placed(pod).values()
    assert [(each.uuid, each.cores, each.memory_mib) for each in slices] == [("GPU-t4-0", 50, 2048)]


def test_a_pod_is_bound_to_the_node_it_is_given(mixed: World) -> None:
    """kube-scheduler's own plugins may prefer another one than we claimed."""
    pod = mixed.add_pod("p")
    mixed.filter(pod)
    assert not mixed.bind(pod, "v100")
    assert mixed.read(pod).spec.node_name == "v100"
    eventually(lambda: mixed.service.state.claim(pod.metadata.uid) is None, "the watch")
    assert mixed.service.state.free_cores() == 150


def test_a_charge_moves_with_its_pod_and_holds_both_models_until_the_controller_saw_it(mixed: World) -> None:
    pod = mixed.add_pod("p")
    assert mixed.schedule(pod, ["v100"]) == "v100"
    charge = mixed.charge_of(pod)
    assert charge is not None
    assert (charge.model, charge.moved_from and charge.moved_from.model) == ("V100", "T4")


def test_a_missing_charge_is_obtained_or_the_pod_is_not_bound(mixed: World) -> None:
    """A pod that got in without the webhook."""
    pod, second = mixed.add_pod("p", charged_for=None), mixed.add_pod("q", container(cores=60), charged_for=None)
    assert not mixed.bind(pod, "t4")
    assert mixed.charge_of(pod) is not None
    eventually(lambda: mixed.service.state.claim(pod.metadata.uid) is None, "the watch")
    mixed.add_node("more", 1)
    error = mixed.bind(second, "more")
    assert "short by 10" in error
    assert not mixed.read(second).spec.node_name
    eventually(lambda: "QuotaExceeded: not bound to more" in str(mixed.events(second)), "the event")


def test_a_model_that_was_refused_is_left_out_until_the_ledger_changes(mixed: World) -> None:
    """Otherwise filter and bind would repeat for ever."""
    pod = mixed.add_pod("p")
    mixed.service.extender.refuse_model(mixed.service.state.pod(pod.metadata.uid), "T4")  # type: ignore[arg-type]
    assert mixed.filter(pod)["NodeNames"] == ["v100"]
    mixed.add_pod("other", container(cores=1))
    assert mixed.filter(pod)["NodeNames"] == ["t4", "v100"]


FAILURES: dict[str, Callable[[], Exception]] = {
    "gone": lambda: NotFound("pods p not found", code=404),
    "refused": lambda: Rejected("admission denied the request", code=403),
    "in conflict": lambda: Conflict("the object has been modified", code=409),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_a_binding_that_fails_leaves_no_trace(mixed: World, failure: Callable[[], Exception]) -> None:
    """Neither a claim nor a moved charge, and the pod can be scheduled again."""
    pod = mixed.add_pod("p")
    before = mixed.charge_of(pod)
    fail_binding(mixed, failure())
    mixed.filter(pod, ["v100"])
    assert mixed.bind(pod, "v100")
    assert is_untouched(mixed, pod)
    eventually(lambda: mixed.charge_of(pod) == before, "the former charge")
    assert mixed.schedule(pod) in {"t4", "v100"}


def test_a_binding_is_repeated_until_the_api_server_answers(mixed: World) -> None:
    pod = mixed.add_pod("p")
    fail_binding(mixed, Unavailable("timeout"), Unavailable("timeout"))
    assert mixed.schedule(pod) == "t4"


def test_a_binding_whose_answer_was_lost_is_a_success_on_the_same_node(mixed: World) -> None:
    """The repetition finds the pod assigned: to the same node, and with the same UID."""
    pod = mixed.add_pod("p")
    fail_binding(mixed, Unavailable("connection reset"), takes_effect=True)
    assert mixed.schedule(pod) == "t4"


def test_already_assigned_to_another_node_is_a_failure(mixed: World) -> None:
    pod = mixed.add_pod("p")
    mixed.filter(pod)
    mixed.cluster.bind("p", TEAM, "elsewhere", uid=pod.metadata.uid, annotations={})
    assert "already" in mixed.bind(pod, "t4")
    eventually(lambda: is_untouched(mixed, pod) or mixed.service.state.free_cores() == 200, "no claim")


def test_an_outcome_that_stays_unknown_keeps_its_claim_until_a_read_settles_it(mixed: World) -> None:
    """Meanwhile the pod is not filtered: it could be bound twice."""
    pod = mixed.add_pod("p")
    original_get = mixed.cluster.get
    mixed.service.binder._late_s = 3.0
    mixed.filter(pod)
    fail_binding(mixed, *[Unavailable("timeout")] * 1000)

    def fail_get(*args: Any, **kwargs: Any) -> Any:
        raise Unavailable("timeout")

    mixed.cluster.get = fail_get  # type: ignore[method-assign]
    assert "binding to node t4" in mixed.bind(pod, "t4")
    assert mixed.service.state.free_cores() == 150, "the claim is kept"
    assert "it is not known yet" in mixed.filter(pod)["Error"]
    mixed.cluster.get = original_get  # type: ignore[method-assign]
    eventually(lambda: is_untouched(mixed, pod), "the read that settles it")
    assert mixed.filter(pod)["NodeNames"]


def test_a_binding_is_idempotent(mixed: World) -> None:
    """kube-scheduler may repeat a call whose answer it did not get."""
    pod = mixed.add_pod("p")
    assert mixed.schedule(pod) == "t4"
    assert not mixed.bind(pod, "t4")
    assert "already bound to node t4" in mixed.bind(pod, "v100")


def test_a_pod_that_was_created_again_under_the_same_name_is_not_bound(mixed: World) -> None:
    pod = mixed.add_pod("p")
    mixed.filter(pod)
    mixed.cluster.delete(PODS, "p", TEAM, grace_s=0)
    again = mixed.add_pod("p")
    assert mixed.bind(pod, "t4")
    assert not mixed.read(again).spec.node_name
    eventually(lambda: is_untouched(mixed, pod), "no claim")


def test_two_pods_are_never_bound_to_the_same_share(mixed: World) -> None:
    """A pod that lost its claim, after its time was over, claims again or fails."""
    first, second = (mixed.add_pod(name, container(cores=100, memory=1)) for name in ("a", "b"))
    mixed.filter(first, ["t4"])
    mixed.service.state.release_claim(first.metadata.uid)
    mixed.filter(second, ["t4"])
    assert "insufficient GPUs" in mixed.bind(first, "t4")
    assert not mixed.bind(second, "t4")


def test_a_gpu_that_became_unhealthy_before_the_binding_is_not_used(mixed: World) -> None:
    mixed.add_node("two", 2)
    pod = mixed.add_pod("p")
    mixed.filter(pod, ["two"])
    mixed.add_node("two", [gpu("two", 0, healthy=False), gpu("two", 1)])
    assert not mixed.bind(pod, "two")
    (slices,) = mixed.placed(pod).values()
    assert [each.uuid for each in slices] == ["GPU-two-1"]


def test_what_a_node_chose_instead_is_followed(mixed: World) -> None:
    """The node plugin is the arbiter of its GPUs: it may write another placement."""
    mixed.add_node("two", 2)
    pod = mixed.add_pod("p")
    mixed.schedule(pod, ["two"])
    (slices,) = mixed.placed(pod).values()
    moved = {"c0": [type(slices[0])("GPU-two-1", 50, 2048)]}
    names = mixed.service.extender._scheme.names
    mixed.cluster.patch(PODS, "p", TEAM, {"metadata": {"annotations": {names.placement: encode_placement(moved)}}})
    eventually(lambda: list(mixed.service.state.holding(pod.metadata.uid).usage) == ["GPU-two-1"], "the new placement")  # type: ignore[union-attr]


def test_a_binding_that_takes_effect_late_finds_its_gpus_still_claimed(mixed: World) -> None:
    """A read right after a lost answer shows the pod unbound, while the request is still under way."""
    pod, other = mixed.add_pod("p", container(cores=100, memory=1)), mixed.add_pod("q", container(cores=100, memory=1))
    original = mixed.cluster.bind
    mixed.filter(pod, ["t4"])
    fail_binding(mixed, *[Unavailable("timeout")] * 1000)
    assert mixed.bind(pod, "t4")
    assert not mixed.filter(other, ["t4"])["NodeNames"]
    placed = {"c0": [each for slices in mixed.service.state.claim(pod.metadata.uid).placed.values() for each in slices]}  # type: ignore[union-attr]
    names = mixed.service.extender._scheme.names
    original("p", TEAM, "t4", uid=pod.metadata.uid, annotations={names.placement: encode_placement(placed)})
    eventually(lambda: mixed.service.state.claim(pod.metadata.uid) is None, "the binding in the watch")
    assert not mixed.filter(other, ["t4"])["NodeNames"]


def test_an_unexpected_error_leaves_no_claim_for_ever(mixed: World) -> None:
    pod = mixed.add_pod("p")
    mixed.filter(pod, ["v100"])
    original = mixed.service.committer.apply

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("broken")

    mixed.service.committer.apply = fail  # type: ignore[method-assign]
    args = {"PodName": "p", "PodNamespace": TEAM, "PodUID": pod.metadata.uid, "Node": "v100"}
    assert "broken" in mixed.call("bind", args, status=500)
    mixed.service.committer.apply = original  # type: ignore[method-assign]
    assert mixed.schedule(pod) in {"t4", "v100"}


def test_a_replica_that_lost_the_lease_binds_no_more(mixed: World) -> None:
    """It checks before each attempt."""
    pod = mixed.add_pod("p")
    mixed.filter(pod)
    mixed.service.binder._is_active = lambda: False
    assert "another replica leads" in mixed.bind(pod, "t4")
    assert is_untouched(mixed, pod)


def test_a_deleted_pod_is_not_filtered(mixed: World) -> None:
    """kube-scheduler's watch may be behind ours: nothing would end its claim."""
    pod = mixed.add_pod("p")
    raw = mixed.raw(pod)
    mixed.cluster.delete(PODS, "p", TEAM, grace_s=0)
    eventually(lambda: mixed.service.state.pod(pod.metadata.uid) is None, "the deletion")
    assert "was deleted" in mixed.call("filter", {"Pod": raw, "NodeNames": ["t4"]})["Error"]


def test_a_charge_by_which_another_replica_bound_the_pod_is_not_reverted(mixed: World) -> None:
    """Its Binding took effect after the Lease was lost: the pod runs on that model."""
    mixed.add_node("other", 1, "V100")
    pod = mixed.add_pod("p")
    mixed.filter(pod, ["v100"])
    original = mixed.cluster.bind

    def bind_elsewhere_first(*args: Any, **kwargs: Any) -> None:
        original("p", pod.metadata.namespace, "other", uid=pod.metadata.uid, annotations={})
        original(*args, **kwargs)

    mixed.cluster.bind = bind_elsewhere_first  # type: ignore[method-assign]
    assert "already" in mixed.bind(pod, "v100")
    charge = mixed.charge_of(pod)
    assert charge is not None
    assert charge.model == "V100"


def test_members_that_are_bound_at_once_do_not_share_a_node(world: World) -> None:
    """kube-scheduler may choose the same node for both, whatever they claimed."""
    for name in ("a", "b", "c"):
        world.add_node(name, 1)
    spread = {NAMES.spread_members: "node"}
    first, second = (world.add_pod(name, container(cores=10), owner="job", annotations=spread) for name in ("m1", "m2"))
    for pod in (first, second):
        world.filter(pod)
    assert not world.bind(first, "c")
    assert "used by other pods of the workload" in world.bind(second, "c")

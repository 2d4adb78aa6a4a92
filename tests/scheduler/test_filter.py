"""Filter and prioritize over HTTP, as kube-scheduler calls them."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from cluster.objects import NAMESPACES, NODES, PODS
from tests.scheduler.world import ADMITTED, NAMES, TEAM, World, container, gpu
from tests.waiting import eventually
from vcuda.isolation import Isolation, Rung
from vcuda.limits import PodLimits, encode_limits
from vcuda.node_problem import NodeProblem
from vcuda.placement_annotation import GpuSlice, encode_placement
from vcuda.quota import parse_quota


def test_every_node_is_answered_for(world: World) -> None:
    """In one of three places; kube-scheduler evicts pods only for nodes in FailedNodes."""
    world.add_node("free", 1)
    world.add_node("busy", 1)
    world.add_node("sick", [gpu("sick", 0, healthy=False)])
    world.schedule(world.add_pod("first", container(cores=100)), ["busy"])
    answer = world.filter(world.add_pod("second"))
    assert answer["NodeNames"] == ["free"]
    assert answer["FailedNodes"] == {"busy": "no GPU with enough free memory"}
    assert answer["FailedAndUnresolvableNodes"] == {"sick": "GPUs unhealthy or cordoned"}
    assert answer["Error"] == ""


def test_a_pod_that_requests_no_gpu_may_run_anywhere(world: World) -> None:
    spec = {"containers": [{"name": "c", "image": "i"}]}
    pod = world.cluster.create(PODS, {"metadata": {"name": "p", "namespace": TEAM}, "spec": spec})
    assert world.filter(pod, ["a", "b"])["NodeNames"] == ["a", "b"]
    assert world.prioritize(pod, ["a", "b"]) == {"a": 0, "b": 0}


def test_a_pod_without_a_charge_fits_nowhere_and_says_why(world: World) -> None:
    """Unresolvable, or kube-scheduler would evict other pods for it."""
    world.add_node("n", 1)
    pod = world.add_pod("p", charged_for=None)
    answer = world.filter(pod)
    assert answer["FailedAndUnresolvableNodes"] == {"n": NodeProblem.UNCHARGED.text}
    assert not answer["FailedNodes"]
    eventually(lambda: "NotCharged: the pod is not charged" in str(world.events(pod)), "an event")


def test_a_charge_that_arrives_while_the_pod_is_filtered_counts(world: World) -> None:
    """Ledger and pod come by different watches."""
    world.add_node("n", 1)
    pod = world.add_pod("p", charged_for=None)
    service = world.service
    original = service.ledgers.snapshot

    def charge_late(namespace: str) -> Any:
        service.ledgers.snapshot = original  # type: ignore[method-assign]
        before = original(namespace)
        world.charge(pod, ADMITTED)
        return before

    service.ledgers.snapshot = charge_late  # type: ignore[method-assign]
    assert world.filter(pod)["NodeNames"] == ["n"]


def test_nodes_whose_model_the_quota_does_not_grant_are_unresolvable() -> None:
    """Moving the charge there would exceed the quota: eviction does not help."""
    world = World(quota="types: {T4: {cores: 100}, V100: {cores: 20}}").start()
    try:
        world.add_node("t4", 1)
        world.add_node("v100", 1, "V100")
        world.add_node("a100", 1, "A100-SXM4-40GB")
        answer = world.filter(world.add_pod("p"))
        assert answer["NodeNames"] == ["t4"]
        assert set(answer["FailedAndUnresolvableNodes"]) == {"v100", "a100"}
        second = world.add_pod("second", container(cores=60))
        assert not world.filter(second)["NodeNames"]
        eventually(lambda: "does not list this GPU model" in str(world.events(second)), "an event with the reasons")
    finally:
        world.stop()


def test_the_pools_of_the_quota_limit_the_nodes() -> None:
    world = World(quota="types: {T4: {cores: 100}}\npools: [training]").start()
    try:
        world.add_node("inside", 1, pool="training")
        world.add_node("outside", 1)
        answer = world.filter(world.add_pod("p"))
        assert (answer["NodeNames"], list(answer["FailedAndUnresolvableNodes"])) == (["inside"], ["outside"])
    finally:
        world.stop()


OPTIONS = {
    "a model": ({NAMES.use_models: "V100"}, ["v100"]),
    "no model of a list": ({NAMES.avoid_models: "V100,A100"}, ["t4"]),
    "a uuid": ({NAMES.use_uuids: "GPU-v100-0,GPU-none"}, ["v100"]),
    "not a uuid": ({NAMES.avoid_uuids: "GPU-v100-0,GPU-t4-0"}, ["a100"]),
    "isolation": ({NAMES.min_isolation: "mps"}, ["a100"]),
    "isolation that a quota required": (
        {NAMES.limits: encode_limits(PodLimits(v=1, models=(), min_isolation=Isolation(Rung.MPS), containers={}))},
        ["a100"],
    ),
    "isolation of compute, which memory does not replace": ({NAMES.min_isolation: "compute=preload"}, []),
    "a model in the vocabulary of an ancestor": ({"tencent.com/use-gputype": "A100"}, ["a100"]),
}


@pytest.mark.parametrize(("annotations", "fitting"), OPTIONS.values(), ids=OPTIONS)
def test_a_pods_options_limit_its_nodes(world: World, annotations: Mapping[str, str], fitting: list[str]) -> None:
    world.add_node("t4", 1)
    world.add_node("v100", 1, "V100")
    world.add_node("a100", [gpu("a100", 0, "A100-SXM4-40GB", isolation=Isolation(memory=Rung.MPS))])
    assert world.filter(world.add_pod("p", annotations=annotations))["NodeNames"] == fitting


REQUESTS: dict[str, tuple[dict[str, Any], bool]] = {
    "two containers on one gpu": ({"containers": [container("a", 40), container("b", 60)]}, True),
    "two containers on different gpus": ({"containers": [container("a", 60), container("b", 70)]}, True),
    "three containers that do not fit": ({"containers": [container(name, 60) for name in "abc"]}, False),
    "all gpus": ({"containers": [container("a", 200, 2)]}, True),
    "more gpus than there are": ({"containers": [container("a", 300, 3)]}, False),
    "whole gpus with enough memory": ({"containers": [container("a", 200, 2 * 60)]}, True),
    "whole gpus with too little memory": ({"containers": [container("a", 200, 2 * 61)]}, False),
    "init containers one after another": (
        {"containers": [container("a", 50)], "init": [container("i", 200, 2), container("j", 100, 1)]},
        True,
    ),
    "a sidecar beside an init container": (
        {"containers": [container("a", 10)], "init": [container("s", 100, 1, sidecar=True), container("j", 200, 2)]},
        False,
    ),
    "a following share": (
        {"containers": [container("a", 50, 1)], "annotations": {NAMES.memory_follows_core: "a"}},
        True,
    ),
}


@pytest.mark.parametrize(("spec", "fits"), REQUESTS.values(), ids=REQUESTS)
def test_requests_of_all_shapes(world: World, spec: dict[str, Any], *, fits: bool) -> None:
    """On a node with two cards of 15360 MiB; what is answered is what can be bound."""
    world.add_node("n", 2)
    containers = spec.pop("containers")
    pod = world.add_pod("p", *containers, **spec)
    assert world.schedule(pod) == ("n" if fits else "")
    if fits:
        assert set(world.placed(pod)) == {each["name"] for each in (*containers, *spec.get("init", ()))}


@pytest.mark.parametrize(("spread", "expected"), [("gpu", 4), ("node", 2)])
def test_members_of_a_workload_are_spread(world: World, spread: str, expected: int) -> None:
    """Members of one gang on the same GPU slow each other down."""
    for name in ("a", "b"):
        world.add_node(name, 2)
    annotations = {NAMES.spread_members: spread}
    pods = [
        world.add_pod(f"p{number}", container(cores=10), annotations=annotations, owner="gang") for number in range(6)
    ]
    placed = [pod for pod in pods if world.schedule(pod)]
    assert len(placed) == expected
    gpus = [each.uuid for pod in placed for slices in world.placed(pod).values() for each in slices]
    assert len(set(gpus)) == len(gpus)
    assert world.schedule(world.add_pod("other", container(cores=10), annotations=annotations, owner="another"))


def test_what_runs_on_a_node_is_counted_however_it_was_placed(world: World) -> None:
    """By Quotient, by gpu-manager, or by the node plugin, whose annotation is still to come."""
    world.add_node("n", 3)
    slices = {"c0": (GpuSlice("GPU-n-0", 50, 2048),)}
    world.add_pod("ours", annotations={NAMES.placement: encode_placement(slices)}, nodeName="n")
    ancestors = {f"{NAMES.domain}/predicate-gpu-idx-0": "1"}
    world.add_pod("theirs", container(cores=60), annotations=ancestors, nodeName="n")
    world.add_pod("unplaced", container(cores=100, memory=1), nodeName="n")
    free = {each.gpu.index: each.free_cores for each in world.service.state.table.available_gpus("n")}
    assert free == {0: 50, 1: 40, 2: 0}


def test_a_gpu_that_vanishes_does_not_set_free_the_others_of_its_pod(world: World) -> None:
    """The containers still run on them."""
    world.add_node("n", 2)
    assert world.schedule(world.add_pod("p", container(cores=200, memory=2))) == "n"
    world.add_node("n", [gpu("n", 0)])
    answer = world.filter(world.add_pod("q", container(cores=10)))
    assert answer["FailedNodes"] == {"n": NodeProblem.MEMORY.text}


def test_ranks_order_all_nodes_without_ties(world: World) -> None:
    """Equal totals are drawn at random by kube-scheduler, which fragments the cluster."""
    for name in ("a", "b", "c", "d"):
        world.add_node(name, 1)
    world.schedule(world.add_pod("used", container(cores=30)), ["c"])
    pod = world.add_pod("p")
    scores = world.prioritize(pod, world.filter(pod)["NodeNames"])
    assert sorted(scores, key=lambda name: -scores[name]) == ["c", "a", "b", "d"]
    assert len(set(scores.values())) == 4


PREFERENCES: dict[str, dict[str, Any]] = {
    "preferred node affinity": {
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}}
    },
    "preferred pod anti-affinity": {
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}}
    },
    "spreading that is not required": {"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]},
}


@pytest.mark.parametrize("spec", PREFERENCES.values(), ids=PREFERENCES)
def test_a_pods_own_preferences_decide_among_equally_good_nodes(world: World, spec: dict[str, Any]) -> None:
    """The nodes get a few levels, and kube-scheduler's own scores decide within a level."""
    for name in ("a", "b", "c", "d"):
        world.add_node(name, 1)
    world.schedule(world.add_pod("used", container(cores=30)), ["c"])
    pod = world.add_pod("p", **spec)
    scores = world.prioritize(pod, world.filter(pod)["NodeNames"])
    assert scores["a"] == scores["b"] == scores["d"] < scores["c"]


def test_prioritize_answers_for_a_part_of_the_nodes(world: World) -> None:
    """Another extender may have excluded nodes after us; what the pod claims itself does not count against it."""
    for name in ("a", "b", "c"):
        world.add_node(name, 1)
    pod = world.add_pod("p", container(cores=100, memory=1))
    assert world.filter(pod)["NodeNames"] == ["a", "b", "c"]
    assert world.prioritize(pod, ["c", "a"]) == {"a": 1, "c": 0}


def test_prioritize_answers_without_a_filter_before(world: World) -> None:
    world.add_node("a", 1)
    world.add_node("b", 1)
    pod = world.add_pod("p")
    assert world.prioritize(pod, ["a", "b"]) == {"a": 1, "b": 0}


def test_a_refusal_is_summed_up_with_numbers(world: World) -> None:
    """In one event and in the log of decisions; the answer itself has constant texts."""
    for name in ("a", "b"):
        world.add_node(name, 1)
        world.schedule(world.add_pod(f"on-{name}", container(cores=10, memory=40)), [name])
    world.add_node("c", 1, "V100")
    annotations = {NAMES.use_models: "T4"}
    pod = world.add_pod("p", container(cores=50, memory=48), annotations=annotations)
    for _ in range(3):
        world.filter(pod)
    expected = "2 of 3 nodes: no GPU with 12 GiB free, the best has 5 GiB; 1 of 3: no T4"
    eventually(lambda: world.events(pod) == [f"InsufficientGPUs: {expected}"], "the event")
    decisions = [each for each in world.service.decisions.recent(TEAM) if each["name"] == "p"]
    assert [each["message"] for each in decisions] == [expected]


def test_what_pods_that_come_and_go_take_does_not_change_the_texts_again_and_again(world: World) -> None:
    """kube-scheduler writes a changed text to the pod, and that requeues it."""
    for name in ("a", "b"):
        world.add_node(name, 1)
    short_of_cores, short_of_memory = container(cores=60, memory=4), container(cores=10, memory=48)
    world.schedule(world.add_pod("a1", short_of_cores), ["a"])
    world.schedule(world.add_pod("b1", short_of_cores), ["b"])
    waiting = world.add_pod("waiting", container(cores=50, memory=16))
    assert set(world.filter(waiting)["FailedNodes"].values()) == {NodeProblem.CORES.text}
    texts = []
    for ending, beginning in (("b1", short_of_memory), ("b2", short_of_cores), ("b3", short_of_memory)):
        world.cluster.delete(PODS, ending, TEAM, grace_s=0)
        eventually(lambda: world.service.state.free_cores() == 140, "room")
        world.schedule(world.add_pod(f"b{int(ending[1:]) + 1}", beginning), ["b"])
        texts.append(world.filter(waiting)["FailedNodes"])
    assert texts == [dict.fromkeys("ab", NodeProblem.CORES_AND_MEMORY.text)] * 3
    assert len(world.events(waiting)) == 1
    assert "the best has 40" in world.service.decisions.recent()[0]["message"]


def test_requests_of_the_policy_files_time_are_answered(world: World) -> None:
    """gpu-admission got whole nodes, under the verb predicates; keys were in lower case in some versions."""
    world.add_node("a", 1)
    world.add_node("b", [])
    pod = world.add_pod("p")
    nodes = [json.loads(json.dumps(world.cluster._existing(("nodes", "", name)))) for name in ("a", "b")]
    for args in (
        {"Pod": world.raw(pod), "Nodes": {"items": nodes}},
        {"pod": world.raw(pod), "nodes": {"items": nodes}},
    ):
        answer = world.call("predicates", args)
        assert [each["metadata"]["name"] for each in answer["Nodes"]["items"]] == ["a"]
        assert answer["Nodes"]["items"][0] == nodes[0]
        assert answer["NodeNames"] is None
        assert list(answer["FailedAndUnresolvableNodes"]) == ["b"]
    scores = world.call("priorities", {"pod": world.raw(pod), "nodenames": ["a", "b"]})
    assert {"Host": "a", "Score": 0} in scores


INVALID = {
    "no json": (b"{", "invalid request"),
    "no pod": (b'{"NodeNames":[]}', "Pod: missing"),
    "no nodes": (b'{"Pod":{"metadata":{"name":"p"}}}', "NodeNames: missing"),
    "an escaped name": (b'{"Pod":{"metadata":{"name":"p"}},"NodeNames":["a\\"b"]}', "NodeNames: a name has"),
}


@pytest.mark.parametrize(("body", "message"), INVALID.values(), ids=INVALID)
def test_an_invalid_request_names_what_is_wrong(world: World, body: bytes, message: str) -> None:
    assert message in world.call("filter", body, status=400)


def test_a_change_of_a_nodes_gpus_is_seen(world: World) -> None:
    """A GPU that becomes unhealthy, a cordoned one, a new one, and a node that is deleted."""
    world.add_node("n", 1)
    first = world.add_pod("first")
    assert world.schedule(first) == "n"
    world.add_node("n", [gpu("n", 0, healthy=False)])
    pod = world.add_pod("p")
    assert not world.filter(pod)["NodeNames"]
    world.add_node("n", [gpu("n", 0, healthy=False), gpu("n", 1, cordoned=True)])
    assert not world.filter(pod)["NodeNames"]
    world.add_node("n", [gpu("n", 0)])
    assert world.schedule(pod) == "n", "what the first pod holds is still counted"
    assert not world.filter(world.add_pod("third"))["NodeNames"]
    world.cluster.delete(NODES, "n")
    eventually(lambda: "n" not in world.service.state.table, "the deleted node")


def test_sizes_of_cards_differ(world: World) -> None:
    """Memory is counted by card, not as an average of the node."""
    world.add_node("n", [gpu("n", 0), gpu("n", 1, memory_mib=8192)])
    big, small = container(cores=10, memory=40), container(cores=10, memory=30)
    assert world.schedule(world.add_pod("a", small, annotations={NAMES.placement_policy: "binpack"})) == "n"
    assert world.schedule(world.add_pod("b", big)) == "n"
    assert not world.schedule(world.add_pod("c", big))
    assert world.schedule(world.add_pod("d", container(cores=10, memory=2))) == "n"


def test_audit_mode_binds_without_a_charge() -> None:
    world = World().start()
    try:
        world.open_ledger("audited", [parse_quota("types: {T4: {cores: 10}}\nmode: audit", "audited/q")])
        world.cluster.create(NAMESPACES, {"metadata": {"name": "audited"}})
        world.add_node("n", 1)
        pod = world.add_pod("p", charged_for=None, namespace="audited")
        eventually(lambda: world.service.ledgers.snapshot("audited") is not None, "the ledger")
        assert world.schedule(pod) == "n"
    finally:
        world.stop()


def test_a_pod_that_kube_scheduler_refuses_by_itself_is_explained_as_well(world: World) -> None:
    """On a full cluster it counts resources, and never asks the extender."""
    world.add_node("n", 1)
    world.schedule(world.add_pod("first", container(cores=100, memory=1)))
    pod = world.add_pod("p", schedulerName="quotient-scheduler")
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient cores"}
    world.cluster.patch(PODS, "p", TEAM, {"status": {"conditions": [condition]}}, subresource="status")
    expected = "InsufficientGPUs: 1 of 1 nodes: no GPU with 2 GiB free, the best has 0 MiB"
    eventually(lambda: world.events(pod) == [expected], "the event")

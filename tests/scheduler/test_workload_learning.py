"""The scheduler learns from the pods that arrive, and keeps what it has learned."""

import pytest

from cluster.objects import CONFIG_MAPS, NODES, PODS
from tests.scheduler.world import NAMES, SYSTEM, TEAM, World, container
from tests.waiting import eventually
from vcuda.learning import DELAY, FIRST
from vcuda.names import WORKLOAD_CONFIG_MAP, WORKLOAD_KEY
from vcuda.workload import TaskShape, decode_history

# Of a pod with 30 cores and 8 units of memory.
SHAPE = TaskShape(0, 1, 30, 8 * 256)


def arrivals(world: World) -> int:
    return world.service.learning.learner.history.arrivals


def is_stored(world: World) -> bool:
    return any(each.metadata.name == WORKLOAD_CONFIG_MAP for each in world.cluster.list(CONFIG_MAPS, SYSTEM).items)


def stored(world: World) -> str:
    return world.cluster.get(CONFIG_MAPS, WORKLOAD_CONFIG_MAP, SYSTEM).data[WORKLOAD_KEY]


def test_a_pod_is_counted_when_it_is_filtered_first(world: World) -> None:
    world.add_node("n", 1)
    pod = world.add_pod("p", container(cores=30))
    hopeless = world.add_pod("hopeless", container(cores=200, memory=2))
    before = arrivals(world)
    for _ in range(3):
        world.filter(pod)
        world.filter(hopeless)
    assert arrivals(world) == before + 2


def test_pods_without_gpus_count_on_nodes_with_gpus(world: World) -> None:
    world.add_node("n", 1)
    before = arrivals(world)
    plain = {"name": "c", "resources": {"requests": {"cpu": "3", "memory": "1Gi"}}}
    world.cluster.create(
        PODS, {"metadata": {"name": "plain", "namespace": TEAM}, "spec": {"containers": [plain], "nodeName": "n"}}
    )
    eventually(lambda: arrivals(world) == before + 1, "the pod without GPUs")


def test_cpu_and_memory_of_nodes_are_followed(world: World) -> None:
    """Those of all pods on the node, with GPUs or without."""
    world.cluster.create(NODES, {"metadata": {"name": "n"}, "status": {"allocatable": {"cpu": "8", "memory": "32Gi"}}})
    world.add_node("n", 1)
    table = world.service.state.table
    eventually(lambda: table.host("n") == (8000, 32 * 1024), "the node's own resources")
    plain = {"name": "c", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}}
    spec = {"containers": [plain], "nodeName": "n"}
    world.cluster.create(PODS, {"metadata": {"name": "plain", "namespace": TEAM}, "spec": spec})
    eventually(lambda: table.host("n") == (7500, 31 * 1024), "the pod without GPUs")
    gpu = container(cores=30)
    gpu["resources"]["requests"] = gpu["resources"]["requests"] | {"cpu": "2", "memory": "2Gi"}
    pod = world.add_pod("p", gpu)
    assert world.schedule(pod) == "n"
    assert table.host("n") == (5500, 29 * 1024)
    world.end(pod)
    world.cluster.delete(PODS, "plain", TEAM, grace_s=0)
    eventually(lambda: table.host("n") == (8000, 32 * 1024), "all of the node's resources")


def test_what_was_learned_survives_a_restart(world: World) -> None:
    world.add_node("n", 8)
    for number in range(21):
        world.filter(world.add_pod(f"p{number}", container(cores=30)))
    eventually(lambda: is_stored(world), "the stored workload")
    world.restart()
    learner = world.service.learning.learner
    eventually(lambda: learner.history.arrivals == 21, "the workload that was stored")
    eventually(lambda: learner.estimate.version == 1, "the estimate from it")
    assert SHAPE in [task.shape for task in learner.estimate.workload.tasks]


def test_an_estimate_takes_effect_some_arrivals_later(world: World) -> None:
    """As in a simulation, which has to place pods as the scheduler does."""
    world.add_node("n", 8)
    learner = world.service.learning.learner
    for number in range(FIRST):
        world.filter(world.add_pod(f"p{number}", container(cores=30)))
    eventually(lambda: world.service.learning.is_prepared, "the prepared estimate")
    for number in range(FIRST, FIRST + DELAY):
        assert learner.estimate.version == 0
        world.filter(world.add_pod(f"p{number}", container(cores=30)))
    assert learner.estimate.version == 1
    assert SHAPE in [task.shape for task in learner.estimate.workload.tasks]


def test_running_pods_are_counted_if_nothing_was_stored(world: World) -> None:
    world.add_node("n", 1)
    assert world.schedule(world.add_pod("p", container(cores=30))) == "n"
    world.service.stop()
    assert not is_stored(world), "a process that ends creates nothing: its release may be uninstalled"
    world.restart()
    eventually(lambda: arrivals(world) == 1, "the running pod")


def test_an_invalid_stored_workload_is_replaced() -> None:
    world = World()
    metadata = {"name": WORKLOAD_CONFIG_MAP, "namespace": SYSTEM}
    world.cluster.create(CONFIG_MAPS, {"metadata": metadata, "data": {WORKLOAD_KEY: "{"}})
    world.start()
    try:
        world.add_node("n", 1)
        for number in range(FIRST):
            world.filter(world.add_pod(f"p{number}", container(cores=30)))
        eventually(lambda: stored(world) != "{", "the stored workload")
        assert decode_history(stored(world)).arrivals == FIRST
    finally:
        world.stop()


@pytest.mark.parametrize("policy", ["binpack", "spread"])
def test_the_policy_of_a_pod_counts_before_that_of_the_cluster(world: World, policy: str) -> None:
    world.add_node("n", 2)
    first = world.add_pod("first", container(cores=10))
    assert world.schedule(first) == "n"
    second = world.add_pod("second", container(cores=10), annotations={NAMES.placement_policy: policy})
    assert world.schedule(second) == "n"
    shared = world.placed(first)["c0"][0].uuid == world.placed(second)["c0"][0].uuid
    assert shared == (policy == "binpack")


def test_a_model_that_is_added_before_an_estimate_takes_effect(world: World) -> None:
    world.add_node("n", 8)
    for number in range(FIRST):
        world.filter(world.add_pod(f"p{number}", container(cores=30)))
    eventually(lambda: world.service.learning.is_prepared, "the prepared estimate")
    world.add_node("other", 1, "V100")
    for number in range(FIRST, FIRST + DELAY + 1):
        assert world.filter(world.add_pod(f"p{number}", container(cores=30)))["Error"] == ""
    assert world.service.learning.learner.estimate.version == 1


def test_pods_that_no_node_could_hold_do_not_stop_learning(world: World) -> None:
    world.add_node("n", 8)
    plain = {"name": "c", "resources": {"requests": {"cpu": "3M", "memory": "3Pi"}}}
    for number in range(FIRST):
        spec = {"containers": [plain], "nodeName": "n"}
        world.cluster.create(PODS, {"metadata": {"name": f"odd-{number}", "namespace": TEAM}, "spec": spec})
    eventually(lambda: arrivals(world) >= FIRST, "the odd pods")
    for number in range(2 * DELAY):
        world.filter(world.add_pod(f"p{number}", container(cores=30)))
    eventually(lambda: world.service.learning.learner.estimate.version >= 1, "the estimate")


def test_a_replica_that_is_active_again_continues_what_another_one_learned() -> None:
    """It does not overwrite it with what it knew itself."""
    world = World(lease="quotient-scheduler").start()
    try:
        world.hold_lease("own-pod")
        world.add_node("n", 8)
        eventually(world.service.is_active, "the lease")
        eventually(lambda: world.service.learning.is_loaded, "the first load")
        for number in range(FIRST):
            world.filter(world.add_pod(f"p{number}", container(cores=30)))
        eventually(lambda: is_stored(world), "the stored workload")
        world.hold_lease("other-pod")
        eventually(lambda: not world.service.learning.is_loaded, "the end of the lease")
        other = decode_history(stored(world))
        other.arrivals += 5000
        data = {"data": {WORKLOAD_KEY: other.encode()}}
        world.cluster.patch(CONFIG_MAPS, WORKLOAD_CONFIG_MAP, SYSTEM, data)
        world.hold_lease("own-pod")
        eventually(lambda: arrivals(world) == FIRST + 5000, "what the other replica learned")
        world.filter(world.add_pod("last", container(cores=30)))
        assert arrivals(world) == FIRST + 5001
    finally:
        world.stop()


def test_what_another_replica_stored_is_not_overwritten(world: World) -> None:
    """Also if this one has not noticed that it was not active meanwhile."""
    world.add_node("n", 8)
    learning = world.service.learning
    for number in range(FIRST):
        world.filter(world.add_pod(f"p{number}", container(cores=30)))
    eventually(lambda: is_stored(world), "the stored workload")
    other = decode_history(stored(world))
    other.arrivals += 5000
    world.cluster.patch(CONFIG_MAPS, WORKLOAD_CONFIG_MAP, SYSTEM, {"data": {WORKLOAD_KEY: other.encode()}})
    world.filter(world.add_pod("last", container(cores=30)))
    learning.store_soon()
    eventually(lambda: arrivals(world) == FIRST + 5000, "what the other replica learned")
    assert decode_history(stored(world)).arrivals == FIRST + 5000


def test_amounts_that_no_array_holds_disturb_nobody(world: World) -> None:
    """A tenant may write such a request, and the node that it names."""
    world.add_node("n", 1)
    plain = {"name": "c", "resources": {"requests": {"cpu": "9E", "memory": "9E"}}}
    spec = {"containers": [plain, plain | {"name": "d"}], "nodeName": "n"}
    for number in range(3):
        odd = world.cluster.create(PODS, {"metadata": {"name": f"odd-{number}", "namespace": TEAM}, "spec": spec})
    eventually(lambda: world.service.state.other_pod(odd.metadata.uid), "the odd pods")
    amounts = container(cores=30)
    amounts["resources"] = {kind: of | {"cpu": "9E", "memory": "9E"} for kind, of in amounts["resources"].items()}
    for policy in ("fragmentation", "binpack", "topology"):
        pod = world.add_pod(policy, amounts, annotations={NAMES.placement_policy: policy})
        assert world.filter(pod)["NodeNames"] == ["n"]
        world.service.state.release_claim(pod.metadata.uid)

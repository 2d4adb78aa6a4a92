"""Which container gets which cards: the allocator against a kubelet that calls, lists and forgets as the real one."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster.objects import Pod
from nodeplugin.checkpoint import CHECKPOINT_FILE, PodAllocation
from nodeplugin.device_ids import Resource
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from nodeplugin.refusal import RECREATE, AllocationRefused
from tests.nodeplugin.simulated import A100_MIB, CARDS, NAMES, Machine, PodRejected, card, container, pod
from vcuda.isolation import Isolation, Rung
from vcuda.placement_annotation import GpuSlice
from vcuda.request import iter_containers

MIB = 256


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def on(index: int, cores: int = 10, units: int = 1) -> tuple[GpuSlice, ...]:
    """A container's placement on one card."""
    return (GpuSlice(f"GPU-{index}", cores, units * MIB),)


def share(name: str, index: int, *, cores: int = 10, units: int = 1, **more: Any) -> Pod:
    """A pod with one container, placed on one card."""
    return pod(name, container("c0", cores, units), placed={"c0": on(index, cores, units)}, **more)


def test_equal_pods_in_any_order_each_get_their_own_cards(tmp_path: Path) -> None:
    """Pods that differ only in their placement, in twenty orders."""
    for seed in range(20):
        machine = Machine(tmp_path, seed=seed)
        pods = [share(f"p{number}", number % 4) for number in range(12)]
        machine.pods.put(*pods)
        for each in sorted(pods, key=lambda each: hash((seed, each.metadata.name))):
            machine.kubelet.admit(each)
        assert all(machine.cards(f"uid-p{number}") == [f"GPU-{number % 4}"] for number in range(12))
        assert machine.kubelet.lists_during_allocate == 0, "the kubelet would lose the IDs of the call in flight"
        for each in pods:
            machine.delete(each.metadata.uid)
        assert machine.allocations.all() == {}


def test_the_response_carries_the_annotations_from_which_an_allocation_is_rebuilt(machine: Machine) -> None:
    """Their names and values are stored in kubelets' checkpoints, so they never change."""
    machine.admit(share("one", 2))
    (token,) = machine.injector.prepared
    (annotations,) = [
        dict(response.annotations) for _, response in machine.kubelet.devices.values() if response.annotations
    ]
    assert annotations == {
        "quotient.dev/allocation": token,
        "quotient.dev/container": "uid-one/c0",
        "quotient.dev/placement": '{"v":1,"containers":{"c0":[{"uuid":"GPU-2","cores":10,"memoryMiB":256}]}}',
    }


def test_a_plugin_killed_between_the_two_calls_continues(machine: Machine) -> None:
    """It needs no memory of the first call: the kubelet lists the container with the IDs of it."""
    machine.kubelet.between_calls = machine.start
    machine.admit(share("one", 2), share("two", 3))
    assert machine.cards("uid-one") == ["GPU-2"]
    assert machine.cards("uid-two") == ["GPU-3"]


def test_a_pod_that_is_not_in_the_cache_yet_is_fetched(machine: Machine) -> None:
    late = share("late", 1)
    machine.pods.put(late, cached=False)
    machine.kubelet.admit(late)
    assert machine.cards("uid-late") == ["GPU-1"]


def test_bound_pods_are_served_while_the_api_server_is_down(machine: Machine) -> None:
    """Also by a plugin that starts in the meantime, from the pods that the previous one saved."""
    machine.pods.put(share("bound", 1))
    machine.pods.is_server_down = True
    machine.pods.synced = False
    machine.start()
    machine.kubelet.admit(machine.pods.in_cache["uid-bound"])
    assert machine.cards("uid-bound") == ["GPU-1"]


def test_init_containers_are_identified_by_both_counts(machine: Machine) -> None:
    """Two pods whose init containers request equal cores and different memory."""
    one = pod("one", container("c0", 10, 1), inits=[container("i", 20, 2)], placed={"i": on(0, 20, 2), "c0": on(0)})
    two = pod("two", container("c0", 10, 1), inits=[container("i", 20, 3)], placed={"i": on(1, 20, 3), "c0": on(1)})
    machine.pods.put(one, two)
    for each in (two, one):
        machine.kubelet.admit(each)
    for name, index in (("one", 0), ("two", 1)):
        assert machine.cards(f"uid-{name}", "i") == machine.cards(f"uid-{name}") == [f"GPU-{index}"]


def test_a_repeated_call_gets_the_same_response(machine: Machine) -> None:
    """A kubelet that lost its checkpoint calls again for containers that are allocated."""
    machine.admit(share("one", 2))
    machine.kubelet.remove_pod("uid-one")
    machine.kubelet.admit(machine.pods.in_cache["uid-one"])
    assert machine.cards("uid-one") == ["GPU-2"]
    assert len(machine.allocations.all()) == 1


def test_a_container_with_the_response_of_another_one_does_not_start(machine: Machine) -> None:
    """The kubelet's checkpoint is compared with ours."""
    machine.admit(share("one", 0), share("two", 1))
    one, two = (("uid-one", "c0", NAMES.memory), ("uid-two", "c0", NAMES.memory))
    cores = [(uid, "c0", NAMES.core) for uid in ("uid-one", "uid-two")]
    devices = machine.kubelet.devices
    for first, second in ((one, two), (cores[0], cores[1])):
        (ids, response), (other_ids, other) = devices[first], devices[second]
        devices[first], devices[second] = (ids, other), (other_ids, response)
    with pytest.raises(AllocationRefused) as refusal:
        machine.kubelet.start_container("uid-one", "c0")
    assert str(refusal.value) == (
        "pod default/one, container c0: the kubelet's checkpoint has the allocation of another container for it; "
        "delete the pod; its controller creates it again"
    )


def test_a_container_with_unknown_ids_does_not_start(machine: Machine) -> None:
    with pytest.raises(AllocationRefused, match=f"^these 2 {NAMES.core} devices belong to no allocation on this node"):
        machine.allocator.check_start(Resource.CORE, ["core-7", "core-8"])


@pytest.mark.parametrize("rung", [Rung.PRELOAD, Rung.DRIVER])
def test_a_container_with_limits_does_not_start_before_its_pod_is_known(tmp_path: Path, rung: Rung) -> None:
    """As after a reboot without the API server, when its files are gone: without them it would run without limits."""
    machine = Machine(tmp_path, isolation=Isolation(rung))
    machine.admit(share("one", 2))
    one = machine.pods.on_server["uid-one"]
    machine.pods.remove("uid-one")
    machine.pods.is_server_down = True
    with pytest.raises(AllocationRefused, match="its pod is not known yet, and its limits depend on it"):
        machine.kubelet.start_container("uid-one", "c0")
    machine.pods.is_server_down = False
    machine.pods.put(one, cached=False)
    machine.kubelet.start_container("uid-one", "c0")


def test_a_container_on_an_unhealthy_card_starts_when_the_card_has_recovered(machine: Machine) -> None:
    machine.admit(share("one", 2))
    machine.node_cards.set_fault("GPU-2", "XID 79")
    with pytest.raises(
        AllocationRefused, match=r"pod default/one, container c0: its GPU GPU-2 is unhealthy: XID 79; it starts when"
    ):
        machine.kubelet.start_container("uid-one", "c0")
    machine.node_cards.set_fault("GPU-2", "")
    machine.kubelet.start_container("uid-one", "c0")


def test_a_pod_without_a_placement_does_not_take_cards_promised_to_another(machine: Machine) -> None:
    """Pods that are bound with a placement, but not allocated yet, keep their share."""
    promised = pod("promised", container("c0", 100, 1), placed={"c0": (GpuSlice("GPU-0", 100, A100_MIB),)})
    machine.pods.put(promised)
    machine.admit(pod("free", container("c0", 50, 1)))
    assert machine.cards("uid-free") != ["GPU-0"]
    machine.kubelet.admit(promised)
    assert machine.cards("uid-promised") == ["GPU-0"]
    assert machine.unwritten_placements() == ["free"], "only placements chosen by the node are written"


def test_cards_of_a_pod_that_ended_are_released_before_a_pod_is_refused(machine: Machine) -> None:
    """The cache does not have the end yet, but the scheduler saw it and bound the next pod."""
    machine.admit(pod("old", container("c0", 400, 4)))
    machine.kubelet.remove_pod("uid-old")
    machine.pods.put(pod("old", container("c0", 400, 4), phase="Succeeded"), cached=False)
    machine.pods.put(pod("new", container("c0", 400, 4)))
    machine.kubelet.admit(machine.pods.on_server["uid-new"])
    assert len(machine.cards("uid-new")) == 4


def test_a_force_deleted_pod_keeps_its_cards_until_its_processes_end(machine: Machine) -> None:
    """It is gone from the API server while it still uses the card."""
    machine.admit(pod("forced", container("c0", 100, 1)))
    machine.running.add("uid-forced")
    machine.pods.remove("uid-forced")
    assert machine.allocations.release_ended().dying == {"uid-forced"}
    assert "uid-forced" in machine.allocations.all()
    machine.running.clear()
    assert not machine.allocations.release_ended()
    assert machine.allocations.all() == {}


def test_a_pod_is_kept_and_asked_about_again_while_the_api_server_does_not_answer(machine: Machine) -> None:
    """It was deleted while no plugin ran, so the cache never had it."""
    machine.admit(share("one", 2))
    machine.pods.remove("uid-one")
    machine.pods.is_server_down = True
    assert machine.allocations.release_ended().unknown == {"uid-one"}
    assert "uid-one" in machine.allocations.all()
    machine.pods.is_server_down = False
    assert not machine.allocations.release_ended()
    assert machine.allocations.all() == {}


def test_nothing_is_released_before_the_informer_has_synced(machine: Machine) -> None:
    """An empty cache does not mean that all pods are gone."""
    machine.admit(share("one", 2))
    machine.pods.remove("uid-one")
    machine.pods.synced = False
    machine.allocations.release_ended()
    assert "uid-one" in machine.allocations.all()


def test_a_running_pod_of_gpu_manager_keeps_its_card(machine: Machine) -> None:
    """Its annotations name cards by minor number."""
    annotations = {"tencent.com/predicate-gpu-idx-0": "5", "tencent.com/gpu-assigned": "true"}
    limits = {"tencent.com/vcuda-core": "100", "tencent.com/vcuda-memory": "60"}
    old = pod("old", {"name": "c0", "resources": {"limits": limits}}, annotations=annotations, phase="Running")
    machine.pods.put(old)
    machine.allocations.release_ended()
    assert machine.allocations.all()["uid-old"].usage == {"GPU-1": (100, A100_MIB)}
    machine.admit(pod("three", container("c0", 300, 3)))
    assert sorted(machine.cards("uid-three")) == ["GPU-0", "GPU-2", "GPU-3"]


def populate(machine: Machine) -> Mapping[str, PodAllocation]:
    """Run pods of many shapes, and return their allocations."""
    machine.admit(
        share("one", 0, cores=3, units=2),
        pod("two", container("a", 2, 2), container("b", 2, 2)),
        pod("four", container("c0", 1, 1), inits=[container("i", 3, 4), container("s", 5, 1, sidecar=True)]),
    )
    return machine.allocations.all()


def without_origin(allocations: Mapping[str, PodAllocation]) -> dict[str, Any]:
    """The allocations without `chosen_here`, which the kubelet's checkpoint does not have."""
    return {uid: (each.placed, each.usage, each.containers) for uid, each in allocations.items()}


def test_a_checkpoint_truncated_at_any_byte_is_rebuilt(machine: Machine, tmp_path: Path) -> None:
    """The kubelet's checkpoint has everything that ours had."""
    before = populate(machine)
    content = (tmp_path / CHECKPOINT_FILE).read_bytes()
    for length in range(len(content)):
        (tmp_path / CHECKPOINT_FILE).write_bytes(content[:length])
        machine.start()
        assert without_origin(machine.allocations.all()) == without_origin(before), f"truncated at {length}"
    (tmp_path / CHECKPOINT_FILE).unlink()
    machine.start()
    assert without_origin(machine.allocations.all()) == without_origin(before)


def test_nothing_is_allocated_while_the_checkpoint_cannot_be_written(machine: Machine, tmp_path: Path) -> None:
    """A full disk refuses pods and loses nothing."""
    machine.admit(share("one", 0))
    (tmp_path / f".{CHECKPOINT_FILE}.new").mkdir()
    with pytest.raises(PodRejected) as rejection:
        machine.admit(share("two", 1))
    assert str(rejection.value) == (
        f"pod default/two, container c0: {tmp_path}/allocations.json cannot be written: Is a directory; "
        "check the disk of this node, then delete the pod; its controller creates it again"
    )
    assert set(machine.allocations.all()) == {"uid-one"}
    (tmp_path / f".{CHECKPOINT_FILE}.new").rmdir()
    machine.kubelet.admit(machine.pods.in_cache["uid-two"])
    assert machine.cards("uid-two") == ["GPU-1"]


def test_device_ids_assigned_twice_do_no_harm(machine: Machine) -> None:
    """A kubelet that lost an allocation in flight assigns its IDs again; the placement counts, not the IDs."""
    machine.admit(share("one", 0))
    machine.kubelet.in_use = {}
    machine.admit(share("two", 1))
    assert (machine.cards("uid-one"), machine.cards("uid-two")) == (["GPU-0"], ["GPU-1"])
    machine.kubelet.start_container("uid-one", "c0")
    machine.kubelet.start_container("uid-two", "c0")


def test_a_pod_gets_cards_of_one_model_and_shares_only_of_known_memory(tmp_path: Path) -> None:
    """A card whose driver does not report its memory is allocated as a whole only."""
    machine = Machine(
        tmp_path, card(0), card(1, 15360, "Tesla T4"), card(2, 0, "NVIDIA GB10"), card(3, 15360, "Tesla T4")
    )
    machine.admit(pod("pair", container("c0", 200, 2)))
    assert sorted(machine.cards("uid-pair")) == ["GPU-1", "GPU-3"]
    machine.admit(pod("part", container("c0", 10, 1)))
    assert machine.cards("uid-part") == ["GPU-0"]
    machine.admit(pod("all", container("c0", 100, 1)))
    assert machine.cards("uid-all") == ["GPU-2"]


# Attribution: a call is for a pod that the kubelet lists and that still waits, and for no other.


def test_waiting_pods_with_equal_init_containers_each_get_their_own_cards(tmp_path: Path) -> None:
    """Replicas with a GPU init container, bound at the same time: the kubelet admits one after another."""
    for seed in range(10):
        machine = Machine(tmp_path, seed=seed)
        pods = [
            pod(
                f"p{n}",
                container("c0", 40, 2),
                inits=[container("i", 40, 2)],
                placed={"i": on(n, 40, 2), "c0": on(n, 40, 2)},
            )
            for n in range(4)
        ]
        machine.pods.put(*pods)
        for number in (2, 0, 3, 1):
            machine.kubelet.admit(pods[number])
        for number, each in enumerate(pods):
            uid = each.metadata.uid
            assert machine.cards(uid, "i") == machine.cards(uid) == [f"GPU-{number}"]
            machine.kubelet.start_container(uid, "i")
            machine.kubelet.start_container(uid, "c0")
            machine.delete(uid)


def test_a_pod_with_one_resource_is_told_from_one_with_two(machine: Machine) -> None:
    """A pod that bypassed the webhook with one resource, beside a pod with the same count of it."""
    good, bypassed = share("good", 1, cores=100, units=1), pod("bypassed", container("c0", 100, 0))
    machine.pods.put(good, bypassed)
    machine.kubelet.admit(bypassed)
    machine.kubelet.admit(good)
    assert machine.cards("uid-good") == ["GPU-1"]
    assert machine.cards("uid-bypassed") == ["GPU-0"]
    machine.kubelet.start_container("uid-good", "c0")
    machine.kubelet.start_container("uid-bypassed", "c0")


def test_a_stale_cache_does_not_give_a_running_pods_card_to_another(machine: Machine) -> None:
    """An equal pod that is not in the cache is fetched, not mistaken for the cached one."""
    machine.admit(
        pod("x", container("c0", 60, 2), inits=[container("i", 60, 2)], placed={"i": on(0, 60, 2), "c0": on(0, 60, 2)})
    )
    late = pod(
        "y", container("c0", 60, 2), inits=[container("i", 60, 2)], placed={"i": on(1, 60, 2), "c0": on(1, 60, 2)}
    )
    machine.pods.put(late, cached=False)
    machine.kubelet.admit(late)
    assert machine.cards("uid-y", "i") == machine.cards("uid-y") == ["GPU-1"]


def test_a_new_pod_of_the_same_name_is_another_pod(machine: Machine) -> None:
    """A StatefulSet recreated its pod, on another card, and the cache still has the old one."""
    machine.admit(share("web-0", 0, uid="u1"))
    machine.kubelet.remove_pod("u1")
    machine.pods.remove("u1", cached=False)
    recreated = share("web-0", 1, uid="u2")
    machine.pods.put(recreated, cached=False)
    machine.kubelet.admit(recreated)
    assert machine.cards("u2") == ["GPU-1"]
    machine.kubelet.start_container("u2", "c0")
    machine.pods.in_cache = {"u2": recreated}
    machine.allocations.release_ended()
    assert {uid for uid, _, _ in machine.injector.prepared.values()} == {"u2"}


def test_a_pod_allocated_before_it_is_cached_is_not_released(machine: Machine) -> None:
    """Not in the cache yet does not mean gone."""
    late = share("late", 1, cores=60)
    machine.pods.put(late, cached=False)
    machine.kubelet.admit(late)
    machine.allocations.release_ended()
    assert "uid-late" in machine.allocations.all()
    machine.admit(pod("next", container("c0", 60, 1), placed={"c0": on(1, 60)}))
    assert machine.cards("uid-next") != ["GPU-1"]


def test_a_lost_allocation_is_not_rebuilt_on_a_card_that_is_full(machine: Machine) -> None:
    """Its share was allocated to another pod since, so the container does not start."""
    machine.admit(share("one", 0, cores=60))
    lost = machine.kubelet.devices.copy()
    machine.kubelet.remove_pod("uid-one")
    machine.pods.remove("uid-one")
    machine.allocations.release_ended()
    machine.admit(share("two", 0, cores=60))
    machine.pods.put(share("one", 0, cores=60))
    machine.kubelet.devices |= lost
    with pytest.raises(
        AllocationRefused, match=f"pod default/one, container c0: no GPU is allocated to it; {RECREATE}"
    ):
        machine.kubelet.start_container("uid-one", "c0")
    assert sum(each.usage["GPU-0"][0] for each in machine.allocations.all().values()) == 60


def test_without_pod_resources_no_container_is_guessed(machine: Machine) -> None:
    """A first call needs no container. For a second one single pods are asked for; if that fails, it is refused."""
    machine.pods.put(share("one", 0), share("two", 1))
    machine.kubelet.has_list = False
    machine.kubelet.admit(machine.pods.in_cache["uid-one"])
    assert machine.cards("uid-one") == ["GPU-0"]
    machine.kubelet.has_get = False
    with pytest.raises(PodRejected, match="the kubelet's PodResources API does not answer"):
        machine.kubelet.admit(machine.pods.in_cache["uid-two"])
    assert "uid-two" not in machine.allocations.all()


def test_a_pod_that_is_not_bound_to_this_node_is_refused(machine: Machine) -> None:
    """A static pod is on no API server."""
    static = share("static", 0)
    with pytest.raises(PodRejected, match=r"^no pod on this node is waiting for \d+ .*; static pods cannot use GPUs"):
        machine.kubelet.admit(static)


@pytest.mark.parametrize(("cores", "units"), [(60, 2), (30, 1)], ids=["as large as the init container", "smaller"])
def test_kubelets_without_get_are_served(machine: Machine, cores: int, units: int) -> None:
    """Before 1.34: reused IDs tell the pod, and its next container is meant."""
    machine.kubelet.has_get = False
    placed = {"i": on(0, 60, 2), "c0": on(1, cores, units)}
    machine.admit(pod("old", container("c0", cores, units), inits=[container("i", 60, 2)], placed=placed))
    assert machine.cards("uid-old", "i") == ["GPU-0"]
    assert machine.cards("uid-old") == ["GPU-1"]


def test_a_first_call_without_a_second_is_not_paired_with_another_pods_call(machine: Machine) -> None:
    """The kubelet had no IDs for the second call of a pod; the next call is the first one of another pod."""
    hopeless = share("hopeless", 0, cores=10, units=1)
    waits = pod(
        "waits", container("c0", 5, 5), inits=[container("i", 10, 7)], placed={"i": on(1, 10, 7), "c0": on(1, 5, 5)}
    )
    machine.pods.put(hopeless, waits)
    machine.kubelet.active["uid-hopeless"] = hopeless
    machine.allocator.choose_ids(Resource.CORE, [f"core-{number}" for number in range(20)], [], 10)
    machine.allocator.allocate(Resource.CORE, [f"core-{number}" for number in range(10)])
    machine.kubelet.remove_pod("uid-hopeless")
    machine.admit(share("unrelated", 2, cores=50, units=7))
    machine.kubelet.admit(waits)
    assert machine.cards("uid-unrelated") == ["GPU-2"]
    assert machine.cards("uid-waits", "i") == ["GPU-1"]


def test_a_plugin_started_between_the_calls_of_an_init_container_refuses_the_pod(machine: Machine) -> None:
    """It cannot know that the call was a second one; a refused pod is recreated, instead of waiting without end."""
    placed = {"i": on(0, 60, 2), "c0": on(0, 60, 2)}
    unlucky = pod("unlucky", container("c0", 60, 2), inits=[container("i", 60, 2)], placed=placed)
    machine.pods.put(unlucky)
    killed = False

    def kill_once() -> None:
        nonlocal killed
        if not killed:
            killed = True
            machine.start()

    machine.kubelet.between_calls = kill_once
    with pytest.raises(PodRejected) as rejection:
        machine.kubelet.admit(unlucky)
    assert str(rejection.value) == (
        "pod default/unlucky, init container i: got no GPU, because the node plugin was restarted during its "
        "allocation; delete the pod; its controller creates it again"
    )


def test_amounts_in_other_pods_placements_are_not_trusted(machine: Machine) -> None:
    """A negative promise must not add to what is free."""
    machine.admit(*(share(f"full-{index}", index, cores=80) for index in range(4)))
    machine.pods.put(pod("liar", container("c0", 10, 1), placed={"c0": (GpuSlice("GPU-0", -1000, -1000),)}))
    with pytest.raises(PodRejected, match=f"^pod default/next, container c0: insufficient GPUs .*; {RECREATE}$"):
        machine.admit(pod("next", container("c0", 60, 1)))


def test_a_pod_of_gpu_manager_under_our_own_domain_is_adopted(machine: Machine) -> None:
    """Its device IDs stay on offer, and it has no folder to remove."""
    old = pod("old", container("c0", 100, 1), annotations={f"{NAMES.domain}/predicate-gpu-idx-0": "4"}, phase="Running")
    machine.pods.put(old)
    ids = frozenset(f"{NAMES.core}-{number}" for number in range(100))
    machine.kubelet.devices["uid-old", "c0", NAMES.core] = (ids, api.ContainerAllocateResponse())
    machine.allocations.release_ended()
    assert machine.allocations.all()["uid-old"].usage == {"GPU-0": (100, A100_MIB)}
    assert ids <= machine.allocator.devices(Resource.CORE).keys()
    machine.admit(pod("three", container("c0", 300, 3)))
    assert "GPU-0" not in machine.cards("uid-three")
    machine.kubelet.start_container("uid-old", "c0")
    machine.delete("uid-old")
    assert "" not in machine.injector.removed, "an empty token would be the folder of all containers"


def test_a_placement_chosen_here_is_still_to_be_written_after_a_restart(machine: Machine) -> None:
    """Until the pod has it."""
    machine.admit(pod("free", container("c0", 50, 1)))
    machine.start()
    assert machine.unwritten_placements() == ["free"]
    placed = machine.allocations.all()["uid-free"].placed
    machine.pods.put(pod("free", container("c0", 50, 1), placed=placed))
    assert machine.unwritten_placements() == []


@pytest.mark.parametrize("lost", ["container", "init container"])
def test_a_kubelet_that_lost_a_response_calls_again(tmp_path: Path, lost: str) -> None:
    """It was killed before it wrote its checkpoint; the next container has the same counts and is not meant."""
    for seed in range(8):
        machine = Machine(tmp_path / str(seed), seed=seed)
        inits = [container("a", 20, 4)] if lost == "init container" else []
        containers = [container("b", 20, 4)] if inits else [container("a", 20, 4), container("b", 20, 4)]
        placed = {"a": on(2, 20, 4), "b": on(2, 20, 4)}
        twins = pod("twins", *containers, inits=inits, placed=placed)
        machine.pods.put(twins)
        machine.kubelet.crash_before_checkpoint(twins, next(each for _, _, each in iter_containers(twins.spec)))
        machine.kubelet.admit(twins)
        for name in ("a", "b"):
            machine.kubelet.start_container("uid-twins", name)
            assert machine.cards("uid-twins", name) == ["GPU-2"]


def test_a_container_with_an_empty_response_does_not_start(machine: Machine) -> None:
    """It would run without a GPU and without limits."""
    machine.admit(share("one", 1))
    for key, (ids, _) in list(machine.kubelet.devices.items()):
        machine.kubelet.devices[key] = ids, api.ContainerAllocateResponse()
    with pytest.raises(
        AllocationRefused,
        match=f"^pod default/one, container c0: the kubelet's checkpoint has an empty allocation for it; {RECREATE}$",
    ):
        machine.kubelet.start_container("uid-one", "c0")


def test_a_container_whose_card_has_a_new_device_node_does_not_start(machine: Machine) -> None:
    """After a reboot the kubelet replays a response with the old one."""
    machine.admit(share("one", 1))
    for key, (ids, response) in list(machine.kubelet.devices.items()):
        if response.envs:
            response.envs[CARDS] = "GPU-3"
            machine.kubelet.devices[key] = ids, response
    with pytest.raises(AllocationRefused, match=f"the device node of its GPU has changed with a reboot; {RECREATE}"):
        machine.kubelet.start_container("uid-one", "c0")


def test_the_two_calls_may_be_an_hour_apart(machine: Machine) -> None:
    """The plugin was paused between them: the kubelet makes no other call before the second."""

    def wait() -> None:
        machine.now += 3600

    machine.kubelet.between_calls = wait
    machine.admit(pod("slow", container("c", 20, 4), inits=[container("i", 20, 4)]))
    assert machine.cards("uid-slow", "i") == machine.cards("uid-slow", "c") == ["GPU-0"]


def test_a_container_with_an_init_containers_ids_does_not_start_on_an_unhealthy_card(machine: Machine) -> None:
    """The IDs do not tell which of the two starts; both have the card."""
    machine.admit(
        pod("one", container("c", 20, 4), inits=[container("i", 20, 4)], placed={"i": on(1, 20, 4), "c": on(1, 20, 4)})
    )
    machine.node_cards.set_fault("GPU-1", "XID 79")
    with pytest.raises(AllocationRefused, match=r"its GPU GPU-1 is unhealthy: XID 79"):
        machine.kubelet.start_container("uid-one", "c")


def test_a_checkpoint_whose_folder_was_deleted_is_written_again(machine: Machine, tmp_path: Path) -> None:
    """The last error is reported until a write succeeds."""
    shutil.rmtree(tmp_path)
    machine.admit(share("one", 0))
    assert (tmp_path / CHECKPOINT_FILE).exists()
    shutil.rmtree(tmp_path)
    tmp_path.write_text("not a folder")
    with pytest.raises(PodRejected, match="cannot be written"):
        machine.admit(share("two", 0))
    assert "cannot be written" in machine.allocations.write_error
    tmp_path.unlink()
    machine.admit(share("three", 0))
    assert machine.allocations.write_error == ""


def test_a_placement_is_followed_once_the_end_of_a_pod_is_known(machine: Machine) -> None:
    """The scheduler saw the end before this node did."""
    machine.admit(share("before", 1, cores=100, units=160))
    machine.pods.remove("uid-before", cached=False)
    machine.kubelet.remove_pod("uid-before")
    machine.admit(share("after", 1, cores=100, units=160))
    assert machine.cards("uid-after") == ["GPU-1"]
    assert machine.unwritten_placements() == []

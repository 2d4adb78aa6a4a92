"""Who gets what: the allocator against a kubelet that calls, lists and forgets as the real one does."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from nodeplugin.allocating import AllocationRefused
from nodeplugin.checkpoint import CHECKPOINT_FILE
from nodeplugin.device_ids import Resource
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from tests.nodeplugin.simulated import A100_MIB, NAMES, Machine, Refusal, asking, card, pod
from vcuda.placement_annotation import GpuSlice
from vcuda.request import iter_containers

MIB = 256


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def on(index: int, cores: int = 10, units: int = 1) -> tuple[GpuSlice, ...]:
    """Place a container on one card."""
    return (GpuSlice(f"GPU-{index}", cores, units * MIB),)


def share(name: str, index: int, *, cores: int = 10, units: int = 1, **more: Any) -> Any:
    """Make a pod with one share on a card."""
    return pod(name, asking("c0", cores, units), placed={"c0": on(index, cores, units)}, **more)


def test_equal_pods_in_any_order_each_get_their_own(tmp_path: Path) -> None:
    """Equal counts and other cards: whichever comes first, nobody gets another's."""
    for seed in range(20):
        machine = Machine(tmp_path, seed=seed)
        pods = [share(f"p{number}", number % 4) for number in range(12)]
        machine.view.put(*pods)
        for each in sorted(pods, key=lambda each: hash((seed, each.metadata.name))):
            machine.kubelet.admit(each)
        assert all(machine.cards(f"uid-p{number}") == [f"GPU-{number % 4}"] for number in range(12))
        assert machine.kubelet.lost == [], "PodResources was listed while an allocation was being answered"
        for each in pods:
            machine.end(each.metadata.uid)
        assert machine.book.holds() == {}


def test_a_plugin_killed_between_the_two_calls_goes_on_where_it_was(machine: Machine) -> None:
    """Nothing needs to be remembered: the kubelet lists the container with its first ids."""
    machine.kubelet.between = machine.start
    machine.admit(share("one", 2), share("two", 3))
    assert machine.cards("uid-one") == ["GPU-2"]
    assert machine.cards("uid-two") == ["GPU-3"]


def test_a_pod_that_is_not_known_yet_is_asked_for(machine: Machine) -> None:
    """The kubelet may hear of a pod before we do."""
    late = share("late", 1)
    machine.view.put(late, seen=False)
    machine.kubelet.admit(late)
    assert machine.cards("uid-late") == ["GPU-1"]


def test_while_the_api_server_is_away_bound_pods_are_served(machine: Machine) -> None:
    """Also by a plugin that was started meanwhile, from what the last one knew."""
    machine.view.put(share("bound", 1))
    machine.view.is_away = True
    machine.view.synced = False
    machine.start()
    machine.kubelet.admit(machine.view.seen["uid-bound"])
    assert machine.cards("uid-bound") == ["GPU-1"]


def test_init_containers_are_told_by_both_counts(machine: Machine) -> None:
    """Two pods with init containers of equal cores and other memory."""
    one = pod("one", asking("c0", 10, 1), inits=[asking("i", 20, 2)], placed={"i": on(0, 20, 2), "c0": on(0)})
    two = pod("two", asking("c0", 10, 1), inits=[asking("i", 20, 3)], placed={"i": on(1, 20, 3), "c0": on(1)})
    machine.view.put(one, two)
    for each in (two, one):
        machine.kubelet.admit(each)
    for name, index in (("one", 0), ("two", 1)):
        assert machine.cards(f"uid-{name}", "i") == machine.cards(f"uid-{name}") == [f"GPU-{index}"]


def test_asked_again_the_answer_is_the_same(machine: Machine) -> None:
    """A kubelet that lost its memory asks for what was given before."""
    machine.admit(share("one", 2))
    machine.kubelet.forget("uid-one")
    machine.kubelet.admit(machine.view.seen["uid-one"])
    assert machine.cards("uid-one") == ["GPU-2"]
    assert len(machine.book.holds()) == 1


def test_a_start_with_another_containers_answer_is_refused(machine: Machine) -> None:
    """What the kubelet keeps is checked against what was given."""
    machine.admit(share("one", 0), share("two", 1))
    one, two = (("uid-one", "c0", NAMES.memory), ("uid-two", "c0", NAMES.memory))
    cores = [(uid, "c0", NAMES.core) for uid in ("uid-one", "uid-two")]
    devices = machine.kubelet.devices
    for first, second in ((one, two), (cores[0], cores[1])):
        (ids, answer), (other_ids, other) = devices[first], devices[second]
        devices[first], devices[second] = (ids, other), (other_ids, answer)
    with pytest.raises(AllocationRefused, match="another container's answer"):
        machine.kubelet.start("uid-one", "c0")


def test_a_sick_card_starts_nobody_and_a_well_one_does(machine: Machine) -> None:
    """A container on a sick card is refused its start, with the reason, until the card is well."""
    machine.admit(share("one", 2))
    machine.node_cards.fault("GPU-2", "XID 79")
    with pytest.raises(AllocationRefused, match=r"its GPU GPU-2 cannot be used: XID 79"):
        machine.kubelet.start("uid-one", "c0")
    machine.node_cards.fault("GPU-2", "")
    machine.kubelet.start("uid-one", "c0")


def test_a_pod_promised_a_card_is_not_robbed_by_one_that_nobody_placed(machine: Machine) -> None:
    """Pods that are bound and have not come yet keep their room."""
    promised = pod("promised", asking("c0", 100, 1), placed={"c0": (GpuSlice("GPU-0", 100, A100_MIB),)})
    machine.view.put(promised)
    machine.admit(pod("free", asking("c0", 50, 1)))
    assert machine.cards("uid-free") != ["GPU-0"]
    machine.kubelet.admit(promised)
    assert machine.cards("uid-promised") == ["GPU-0"]
    assert machine.deviating() == ["free"], "only what the node chose itself is written"


def test_room_of_an_ended_pod_is_found_by_asking(machine: Machine) -> None:
    """The end has not reached us, but the scheduler saw it and bound the next."""
    machine.admit(pod("old", asking("c0", 400, 4)))
    machine.kubelet.forget("uid-old")
    machine.view.put(pod("old", asking("c0", 400, 4), phase="Succeeded"), seen=False)
    machine.view.put(pod("new", asking("c0", 400, 4)))
    machine.kubelet.admit(machine.view.there["uid-new"])
    assert len(machine.cards("uid-new")) == 4


def test_processes_of_a_pod_deleted_by_force_hold_its_cards(machine: Machine) -> None:
    """Gone from the API server, still running: nobody else gets the card."""
    machine.admit(pod("forced", asking("c0", 100, 1)))
    machine.running.add("uid-forced")
    machine.view.remove("uid-forced")
    assert machine.book.collect() == {"uid-forced"}
    assert "uid-forced" in machine.book.holds()
    machine.running.clear()
    assert machine.book.collect() == set()
    assert machine.book.holds() == {}


def test_nothing_is_let_go_of_while_the_api_server_has_not_been_heard(machine: Machine) -> None:
    """A plugin that knows nothing yet must not think that all pods are gone."""
    machine.admit(share("one", 2))
    machine.view.remove("uid-one")
    machine.view.synced = False
    machine.book.collect()
    assert "uid-one" in machine.book.holds()


def test_an_ancestors_pod_keeps_its_card(machine: Machine) -> None:
    """Cards that gpu-manager gave away are read from its annotations, by minor number."""
    annotations = {"tencent.com/predicate-gpu-idx-0": "5", "tencent.com/gpu-assigned": "true"}
    limits = {"tencent.com/vcuda-core": "100", "tencent.com/vcuda-memory": "60"}
    old = pod("old", {"name": "c0", "resources": {"limits": limits}}, annotations=annotations, phase="Running")
    machine.view.put(old)
    machine.book.collect()
    assert machine.book.holds()["uid-old"].held == {"GPU-1": (100, A100_MIB)}
    machine.admit(pod("three", asking("c0", 300, 3)))
    assert sorted(machine.cards("uid-three")) == ["GPU-0", "GPU-2", "GPU-3"]


def populated(machine: Machine) -> dict[str, Any]:
    """Run pods of many shapes, and give the book."""
    machine.admit(
        share("one", 0, cores=3, units=2),
        pod("two", asking("a", 2, 2), asking("b", 2, 2)),
        pod("four", asking("c0", 1, 1), inits=[asking("i", 3, 4), asking("s", 5, 1, sidecar=True)]),
    )
    return dict(machine.book.holds())


def test_a_book_cut_off_anywhere_is_rebuilt_the_same(machine: Machine, tmp_path: Path) -> None:
    """Truncated at every byte: the kubelet's record has everything that the book had."""
    before = populated(machine)
    content = (tmp_path / CHECKPOINT_FILE).read_bytes()
    for length in range(len(content)):
        (tmp_path / CHECKPOINT_FILE).write_bytes(content[:length])
        machine.start()
        assert essence(machine.book.holds()) == essence(before), f"cut at {length}"
    (tmp_path / CHECKPOINT_FILE).unlink()
    machine.start()
    assert essence(machine.book.holds()) == essence(before)


def essence(holds: Any) -> dict[str, Any]:
    """Give what matters of a book: who has what; not who chose it."""
    return {uid: (hold.placed, hold.held, hold.containers) for uid, hold in holds.items()}


def test_a_book_that_cannot_be_written_gives_nothing_away(machine: Machine, tmp_path: Path) -> None:
    """What is not on the disk is not given: a full disk refuses pods, and loses nothing."""
    machine.admit(share("one", 0))
    (tmp_path / f".{CHECKPOINT_FILE}.new").mkdir()
    with pytest.raises(Refusal, match="cannot be written"):
        machine.admit(share("two", 1))
    assert set(machine.book.holds()) == {"uid-one"}
    (tmp_path / f".{CHECKPOINT_FILE}.new").rmdir()
    machine.kubelet.admit(machine.view.seen["uid-two"])
    assert machine.cards("uid-two") == ["GPU-1"]


def test_duplicate_ids_do_not_matter(machine: Machine) -> None:
    """A kubelet that forgot an allocation in flight gives its ids to the next; the placement is the truth."""
    machine.admit(share("one", 0))
    machine.kubelet.in_use = {}
    machine.admit(share("two", 1))
    assert (machine.cards("uid-one"), machine.cards("uid-two")) == (["GPU-0"], ["GPU-1"])
    machine.kubelet.start("uid-one", "c0")
    machine.kubelet.start("uid-two", "c0")


def test_mixed_cards_and_unknown_memory(tmp_path: Path) -> None:
    """A pod gets cards of one model; one whose memory nobody knows is given as a whole only."""
    machine = Machine(
        tmp_path, card(0), card(1, 15360, "Tesla T4"), card(2, 0, "NVIDIA GB10"), card(3, 15360, "Tesla T4")
    )
    machine.admit(pod("pair", asking("c0", 200, 2)))
    assert sorted(machine.cards("uid-pair")) == ["GPU-1", "GPU-3"]
    machine.admit(pod("part", asking("c0", 10, 1)))
    assert machine.cards("uid-part") == ["GPU-0"]
    machine.admit(pod("all", asking("c0", 100, 1)))
    assert machine.cards("uid-all") == ["GPU-2"]


# Whoever waits and was taken up by the kubelet is meant, and nobody else.


def test_equal_init_containers_of_pods_that_wait_each_get_their_own(tmp_path: Path) -> None:
    """Replicas with a GPU init container, bound at once, on other cards: the kubelet takes up one after another."""
    for seed in range(10):
        machine = Machine(tmp_path, seed=seed)
        pods = [
            pod(
                f"p{n}", asking("c0", 40, 2), inits=[asking("i", 40, 2)], placed={"i": on(n, 40, 2), "c0": on(n, 40, 2)}
            )
            for n in range(4)
        ]
        machine.view.put(*pods)
        for number in (2, 0, 3, 1):
            machine.kubelet.admit(pods[number])
        for number, each in enumerate(pods):
            uid = each.metadata.uid
            assert machine.cards(uid, "i") == machine.cards(uid) == [f"GPU-{number}"]
            machine.kubelet.start(uid, "i")
            machine.kubelet.start(uid, "c0")
            machine.end(uid)


def test_one_resource_beside_two_is_told_by_its_turn(machine: Machine) -> None:
    """A container that slipped past with one resource, beside a pod of the same count that asks for both."""
    good, slipped = share("good", 1, cores=100, units=1), pod("slipped", asking("c0", 100, 0))
    machine.view.put(good, slipped)
    machine.kubelet.admit(slipped)
    machine.kubelet.admit(good)
    assert machine.cards("uid-good") == ["GPU-1"]
    assert machine.cards("uid-slipped") == ["GPU-0"]
    machine.kubelet.start("uid-good", "c0")
    machine.kubelet.start("uid-slipped", "c0")


def test_a_stale_view_does_not_give_a_running_pods_card_to_another(machine: Machine) -> None:
    """A pod of the same shape that has not reached us yet is asked for, not taken for the one we know."""
    machine.admit(
        pod("x", asking("c0", 60, 2), inits=[asking("i", 60, 2)], placed={"i": on(0, 60, 2), "c0": on(0, 60, 2)})
    )
    late = pod("y", asking("c0", 60, 2), inits=[asking("i", 60, 2)], placed={"i": on(1, 60, 2), "c0": on(1, 60, 2)})
    machine.view.put(late, seen=False)
    machine.kubelet.admit(late)
    assert machine.cards("uid-y", "i") == machine.cards("uid-y") == ["GPU-1"]


def test_another_pod_under_the_same_name_is_another_pod(machine: Machine) -> None:
    """A StatefulSet's pod that was made again, on another card, before we heard of it."""
    machine.admit(share("web-0", 0, uid="u1"))
    machine.kubelet.forget("u1")
    machine.view.remove("u1", seen=False)
    again = share("web-0", 1, uid="u2")
    machine.view.put(again, seen=False)
    machine.kubelet.admit(again)
    assert machine.cards("u2") == ["GPU-1"]
    machine.kubelet.start("u2", "c0")
    machine.view.seen = {"u2": again}
    machine.book.collect()
    assert {uid for uid, _, _ in machine.notes.prepared.values()} == {"u2"}


def test_a_pod_that_was_served_before_we_heard_of_it_is_not_let_go_of(machine: Machine) -> None:
    """It is not in our view yet, which does not mean that it is gone."""
    late = share("late", 1, cores=60)
    machine.view.put(late, seen=False)
    machine.kubelet.admit(late)
    machine.book.collect()
    assert "uid-late" in machine.book.holds()
    machine.admit(pod("next", asking("c0", 60, 1), placed={"c0": on(1, 60)}))
    assert machine.cards("uid-next") != ["GPU-1"]


def test_a_start_is_refused_that_would_fill_a_card_beyond_its_size(machine: Machine) -> None:
    """A hold that was lost is made again from the kubelet's record only if it is this pod's, and there is room."""
    machine.admit(share("one", 0, cores=60))
    lost = machine.kubelet.devices.copy()
    machine.kubelet.forget("uid-one")
    machine.view.remove("uid-one")
    machine.book.collect()
    machine.admit(share("two", 0, cores=60))
    machine.view.put(share("one", 0, cores=60))
    machine.kubelet.devices |= lost
    with pytest.raises(AllocationRefused, match="no GPU was given to it"):
        machine.kubelet.start("uid-one", "c0")
    assert sum(hold.held["GPU-0"][0] for hold in machine.book.holds().values()) == 60


def test_without_a_list_nobody_is_guessed_at(machine: Machine) -> None:
    """A first call needs no name. For a second the kubelet is asked about single pods; if that fails, it is refused."""
    machine.view.put(share("one", 0), share("two", 1))
    machine.kubelet.has_list = False
    machine.kubelet.admit(machine.view.seen["uid-one"])
    assert machine.cards("uid-one") == ["GPU-0"]
    machine.kubelet.has_get = False
    with pytest.raises(Refusal, match="does not list its containers"):
        machine.kubelet.admit(machine.view.seen["uid-two"])
    assert "uid-two" not in machine.book.holds()


@pytest.mark.parametrize(("cores", "units"), [(60, 2), (30, 1)], ids=["as large as the init container", "smaller"])
def test_kubelets_that_cannot_be_asked_about_one_pod(machine: Machine, cores: int, units: int) -> None:
    """Before 1.34: where ids are used again, it is the pod whose they were, and its next container."""
    machine.kubelet.has_get = False
    placed = {"i": on(0, 60, 2), "c0": on(1, cores, units)}
    machine.admit(pod("old", asking("c0", cores, units), inits=[asking("i", 60, 2)], placed=placed))
    assert machine.cards("uid-old", "i") == ["GPU-0"]
    assert machine.cards("uid-old") == ["GPU-1"]


def test_a_first_call_without_a_second_is_nobody_elses_half(machine: Machine) -> None:
    """The kubelet found no ids for the second call of a pod; the next pod's first call must not complete a pair."""
    hopeless = share("hopeless", 0, cores=10, units=1)
    waits = pod("waits", asking("c0", 5, 5), inits=[asking("i", 10, 7)], placed={"i": on(1, 10, 7), "c0": on(1, 5, 5)})
    machine.view.put(hopeless, waits)
    machine.kubelet.active["uid-hopeless"] = hopeless
    machine.allocator.preferred(Resource.CORE, [f"core-{number}" for number in range(20)], [], 10)
    machine.allocator.allocate(Resource.CORE, [f"core-{number}" for number in range(10)])
    machine.kubelet.forget("uid-hopeless")
    stranger = share("stranger", 2, cores=50, units=7)
    machine.admit(stranger)
    machine.kubelet.admit(waits)
    assert machine.cards("uid-stranger") == ["GPU-2"]
    assert machine.cards("uid-waits", "i") == ["GPU-1"]


def test_a_plugin_that_began_between_the_calls_of_an_init_container_has_the_pod_made_again(machine: Machine) -> None:
    """It cannot know that the call was a second one; the pod ends, instead of waiting for ever."""
    placed = {"i": on(0, 60, 2), "c0": on(0, 60, 2)}
    unlucky = pod("unlucky", asking("c0", 60, 2), inits=[asking("i", 60, 2)], placed=placed)
    machine.view.put(unlucky)
    killed = False

    def kill_once() -> None:
        nonlocal killed
        if not killed:
            killed = True
            machine.start()

    machine.kubelet.between = kill_once
    with pytest.raises(Refusal, match="was given nothing; make the pod again"):
        machine.kubelet.admit(unlucky)


def test_numbers_in_other_pods_placements_are_not_believed(machine: Machine) -> None:
    """A promise of less than nothing must not make room."""
    machine.admit(*(share(f"full-{index}", index, cores=80) for index in range(4)))
    machine.view.put(pod("liar", asking("c0", 10, 1), placed={"c0": (GpuSlice("GPU-0", -1000, -1000),)}))
    with pytest.raises(Refusal, match="insufficient GPUs"):
        machine.admit(pod("next", asking("c0", 60, 1)))


def test_an_ancestor_in_our_own_domain_is_inherited(machine: Machine) -> None:
    """Pods that gpu-manager started under the configured domain; their ids stay offered."""
    old = pod("old", asking("c0", 100, 1), annotations={f"{NAMES.domain}/predicate-gpu-idx-0": "4"}, phase="Running")
    machine.view.put(old)
    ids = frozenset(f"{NAMES.core}-{number}" for number in range(100))
    machine.kubelet.devices["uid-old", "c0", NAMES.core] = (ids, api.ContainerAllocateResponse())
    machine.book.collect()
    assert machine.book.holds()["uid-old"].held == {"GPU-0": (100, A100_MIB)}
    assert ids <= machine.allocator.devices(Resource.CORE).keys()
    machine.admit(pod("three", asking("c0", 300, 3)))
    assert "GPU-0" not in machine.cards("uid-three")
    machine.kubelet.start("uid-old", "c0")
    machine.end("uid-old")
    assert "" not in machine.notes.forgotten, "without a name it would be the folder of all containers"


def test_what_the_node_chose_is_written_again_after_a_restart(machine: Machine) -> None:
    """Until the pod says so."""
    machine.admit(pod("free", asking("c0", 50, 1)))
    machine.start()
    assert machine.deviating() == ["free"]
    placed = machine.book.holds()["uid-free"].placed
    machine.view.put(pod("free", asking("c0", 50, 1), placed=placed))
    assert machine.deviating() == []


@pytest.mark.parametrize("lost", ["container", "init container"])
def test_an_answer_that_the_kubelet_lost_is_asked_for_again(tmp_path: Path, lost: str) -> None:
    """It died before it wrote the answer down; the next container asks for as much, and is not meant."""
    for seed in range(8):
        machine = Machine(tmp_path / str(seed), seed=seed)
        inits = [asking("a", 20, 4)] if lost == "init container" else []
        containers = [asking("b", 20, 4)] if inits else [asking("a", 20, 4), asking("b", 20, 4)]
        placed = {"a": on(2, 20, 4), "b": on(2, 20, 4)}
        made = pod("twins", *containers, inits=inits, placed=placed)
        machine.view.put(made)
        machine.kubelet.die_unwritten(made, next(each for _, _, each in iter_containers(made.spec)))
        machine.kubelet.admit(made)
        for name in ("a", "b"):
            machine.kubelet.start("uid-twins", name)
            assert machine.cards("uid-twins", name) == ["GPU-2"]


def test_a_container_that_holds_an_empty_answer_does_not_start(machine: Machine) -> None:
    """Whatever the book says: it would run without a GPU and without limits."""
    machine.admit(share("one", 1))
    for key, (ids, _) in list(machine.kubelet.devices.items()):
        machine.kubelet.devices[key] = ids, api.ContainerAllocateResponse()
    with pytest.raises(
        AllocationRefused, match=r"default/one container c0: the kubelet holds an empty answer for it; delete"
    ):
        machine.kubelet.start("uid-one", "c0")


def test_a_container_whose_card_has_another_node_does_not_start(machine: Machine) -> None:
    """After a boot the kubelet gives a container what it was answered before."""
    machine.admit(share("one", 1))
    for key, (ids, answer) in list(machine.kubelet.devices.items()):
        if answer.envs:
            answer.envs["CARDS"] = "GPU-3"
            machine.kubelet.devices[key] = ids, answer
    with pytest.raises(AllocationRefused, match="its GPU has another device node since the last boot; delete the pod"):
        machine.kubelet.start("uid-one", "c0")


def test_two_calls_may_be_far_apart(machine: Machine) -> None:
    """The plugin was held up between them: nobody else can have asked meanwhile."""

    def wait() -> None:
        machine.now += 3600

    machine.kubelet.between = wait
    machine.admit(pod("slow", asking("c", 20, 4), inits=[asking("i", 20, 4)]))
    assert machine.cards("uid-slow", "i") == machine.cards("uid-slow", "c") == ["GPU-0"]


def test_a_sick_card_keeps_a_container_from_starting_whose_ids_were_an_init_containers(machine: Machine) -> None:
    """The ids alone do not tell which of the two is meant; neither may start."""
    machine.admit(
        pod("one", asking("c", 20, 4), inits=[asking("i", 20, 4)], placed={"i": on(1, 20, 4), "c": on(1, 20, 4)})
    )
    machine.node_cards.fault("GPU-1", "XID 79")
    with pytest.raises(AllocationRefused, match=r"its GPU GPU-1 cannot be used: XID 79"):
        machine.kubelet.start("uid-one", "c")


def test_a_book_whose_folder_was_deleted_is_written_all_the_same(machine: Machine, tmp_path: Path) -> None:
    """And what keeps it from being written is said until it is written."""
    shutil.rmtree(tmp_path)
    machine.admit(share("one", 0))
    assert (tmp_path / CHECKPOINT_FILE).exists()
    shutil.rmtree(tmp_path)
    tmp_path.write_text("not a folder")
    with pytest.raises(Refusal, match="cannot be written"):
        machine.admit(share("two", 0))
    assert "cannot be written" in machine.book.failure
    tmp_path.unlink()
    machine.admit(share("three", 0))
    assert machine.book.failure == ""


def test_a_placement_is_obeyed_once_it_is_known_who_has_ended(machine: Machine) -> None:
    """The scheduler heard of the end before us."""
    machine.admit(share("before", 1, cores=100, units=160))
    machine.view.remove("uid-before", seen=False)
    machine.kubelet.forget("uid-before")
    machine.admit(share("after", 1, cores=100, units=160))
    assert machine.cards("uid-after") == ["GPU-1"]
    assert machine.deviating() == []

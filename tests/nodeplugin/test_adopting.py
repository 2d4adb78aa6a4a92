"""Pods that run without an allocation in either checkpoint keep the cards that their placement annotation names."""

from pathlib import Path
from typing import Any

import pytest

from cluster.objects import Pod
from nodeplugin.checkpoint import CHECKPOINT_FILE
from nodeplugin.refusal import AllocationRefused
from tests.nodeplugin.simulated import A100_MIB, Machine, PodRejected, card, container, pod
from vcuda.placement_annotation import GpuSlice

FIRST, SECOND = (GpuSlice("GPU-0", 100, A100_MIB),), (GpuSlice("GPU-1", 100, A100_MIB),)


def whole(name: str, placed: tuple[GpuSlice, ...] = FIRST, **more: Any) -> Pod:
    """A pod with whole cards."""
    return pod(name, container("c0", 100 * len(placed), len(placed)), placed={"c0": placed}, **more)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A node of two cards, the first of which a pod has; both checkpoints are lost and the plugin starts again."""
    machine = Machine(tmp_path, card(0), card(1))
    machine.admit(whole("runs"))
    machine.pods.put(whole("runs", phase="Running"))
    lose_checkpoints(machine, tmp_path)
    return machine


def lose_checkpoints(machine: Machine, folder: Path) -> None:
    (folder / CHECKPOINT_FILE).write_text("damaged")
    machine.kubelet.is_checkpoint_readable = False
    machine.start()


def cards_held(machine: Machine) -> list[str]:
    return sorted(uuid for each in machine.allocations.all().values() for uuid in each.usage)


def test_a_placement_on_the_card_of_a_running_pod_is_not_obeyed(machine: Machine) -> None:
    """The pod is placed on the card that is free, and refused once there is none."""
    machine.admit(whole("next"))
    assert machine.cards("uid-next") == ["GPU-1"]
    # The kubelet lost its allocations too, and so assigns the devices again.
    machine.kubelet.in_use = {}
    with pytest.raises(PodRejected, match="in use, not available as a whole GPU"):
        machine.admit(whole("third"))
    assert cards_held(machine) == ["GPU-0", "GPU-1"]


@pytest.mark.parametrize("is_server_down", [False, True], ids=["asks the API server", "has a saved list of pods"])
def test_the_running_pods_are_known_before_the_first_allocation(machine: Machine, *, is_server_down: bool) -> None:
    """The kubelet calls as soon as the plugin is registered, which may be before the informer has its list."""
    machine.pods.synced = False
    machine.pods.is_server_down = is_server_down
    if not is_server_down:
        machine.pods.in_cache.clear()
    following = whole("next")
    machine.pods.put(following, cached=is_server_down)
    machine.kubelet.admit(following)
    assert machine.cards("uid-next") == ["GPU-1"]


def test_a_pod_whose_init_container_runs_has_started(tmp_path: Path) -> None:
    """It is pending, but the kubelet has allocated for all its containers."""
    machine = Machine(tmp_path, card(0), card(1))
    machine.admit(whole("starting"))
    machine.pods.put(whole("starting", created=["i"]))
    lose_checkpoints(machine, tmp_path)
    machine.admit(whole("next"))
    assert machine.cards("uid-next") == ["GPU-1"]


def test_a_pod_that_waits_for_its_allocation_is_not_adopted(machine: Machine) -> None:
    """Its placement is a plan, which another pod with a placement may have come before."""
    machine.pods.put(whole("waits", SECOND))
    machine.allocations.release_ended()
    assert set(machine.allocations.all()) == {"uid-runs"}


def test_amounts_in_the_placement_are_not_trusted(tmp_path: Path) -> None:
    """Cores below zero must not free what others hold, nor more cards than requested be held."""
    machine = Machine(tmp_path, card(0), card(1))
    lies = (GpuSlice("GPU-0", -1000, -1000), GpuSlice("GPU-1", 100, A100_MIB))
    machine.pods.put(pod("liar", container("c0", 10, 4), placed={"c0": lies}, phase="Running"))
    lose_checkpoints(machine, tmp_path)
    machine.allocations.release_ended()
    assert machine.allocations.all()["uid-liar"].usage == {"GPU-0": (10, 1024)}


def test_a_card_that_is_listed_late_is_held_as_well(tmp_path: Path) -> None:
    """The driver may list a card only after the pod was adopted."""
    machine = Machine(tmp_path, card(0))
    machine.pods.put(whole("runs", (*FIRST, *SECOND), phase="Running"))
    lose_checkpoints(machine, tmp_path)
    machine.allocations.release_ended()
    assert cards_held(machine) == ["GPU-0"]
    machine.node_cards.update([card(0), card(1)])
    with pytest.raises(PodRejected, match="insufficient GPUs"):
        machine.admit(whole("next", SECOND))
    assert cards_held(machine) == ["GPU-0", "GPU-1"]


def test_an_adopted_pod_gets_its_own_cards_again(machine: Machine) -> None:
    """From a kubelet that lost its checkpoint as well and allocates for the pods that run."""
    machine.kubelet.remove_pod("uid-runs")
    machine.allocations.release_ended()
    machine.kubelet.admit(machine.pods.in_cache["uid-runs"])
    assert machine.cards("uid-runs") == ["GPU-0"]
    machine.kubelet.start_container("uid-runs", "c0")


def test_of_two_pods_that_claim_one_card_none_gets_it(machine: Machine) -> None:
    """One of the annotations is wrong: neither pod may have the card, nor any other."""
    machine.pods.put(whole("claims", phase="Running"))
    machine.kubelet.remove_pod("uid-runs")
    for name in ("runs", "claims"):
        with pytest.raises(PodRejected, match="the GPUs on which it ran have been allocated to other pods"):
            machine.kubelet.admit(machine.pods.in_cache[f"uid-{name}"])


def test_a_container_of_an_adopted_pod_does_not_start_without_its_response(machine: Machine) -> None:
    """The kubelet's response says what it was given; without it, it might run without its limits."""
    machine.allocations.release_ended()
    with pytest.raises(AllocationRefused, match="belong to no allocation on this node"):
        machine.kubelet.start_container("uid-runs", "c0")
    machine.kubelet.is_checkpoint_readable = True
    machine.kubelet.start_container("uid-runs", "c0")


def test_an_adopted_pod_is_released_when_it_ends(machine: Machine) -> None:
    machine.allocations.release_ended()
    machine.delete("uid-runs")
    assert machine.allocations.all() == {}


def test_a_plugin_that_starts_again_adopts_what_the_one_before_did_not(tmp_path: Path) -> None:
    """A checkpoint that was lost stays incomplete until it was compared with all pods and cards."""
    machine = Machine(tmp_path, card(1))
    machine.pods.put(whole("runs", phase="Running"))
    machine.admit(whole("other", SECOND))
    machine.allocations.release_ended()
    machine.node_cards.update([card(0), card(1)])
    machine.start()
    with pytest.raises(PodRejected, match="insufficient GPUs"):
        machine.admit(whole("next"))


def test_a_plugin_with_its_checkpoint_adopts_no_placement(tmp_path: Path) -> None:
    """Once complete, it has every pod that runs: one that is not in it has ended, and the cache lags behind."""
    machine = Machine(tmp_path, card(0), card(1))
    machine.admit(whole("other", SECOND))
    machine.allocations.release_ended()
    machine.start()
    machine.pods.put(whole("ended", phase="Running"))
    machine.allocations.release_ended()
    assert set(machine.allocations.all()) == {"uid-other"}

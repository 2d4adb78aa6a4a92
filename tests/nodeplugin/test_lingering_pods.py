"""How long pods wait for cards of deleted pods whose processes still run: the kubelet allocates nothing meanwhile."""

from pathlib import Path

import pytest

from nodeplugin.allocating import POLL_S
from nodeplugin.lingering_pods import (
    MAX_WAIT_S,
    NODE_WAIT_RATIO,
    NODE_WAIT_S,
    PLACEMENT_WAIT_S,
    LingeringPods,
)
from tests.nodeplugin.simulated import Machine, PodRejected, card, container, pod
from vcuda.placement_annotation import GpuSlice

WHOLE = (GpuSlice("GPU-0", 100, 40960),)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A node with one card."""
    return Machine(tmp_path, card(0))


def delete_by_force(machine: Machine, name: str) -> None:
    """Delete a pod whose processes go on."""
    machine.running.add(f"uid-{name}")
    machine.pods.remove(f"uid-{name}")
    machine.kubelet.remove_pod(f"uid-{name}")


def reject(machine: Machine, name: str, cores: int = 100) -> str:
    """Have a pod rejected, and return the kubelet's message."""
    with pytest.raises(PodRejected) as rejection:
        machine.admit(pod(name, container("c0", cores, 1)))
    machine.pods.remove(f"uid-{name}")
    return str(rejection.value)


def test_all_pods_behind_a_lingering_pod_wait_once_in_all(machine: Machine) -> None:
    """The kubelet allocates one container at a time: four pods that wait one after another delay the whole node."""
    machine.admit(pod("forced", container("c0", 100, 1)))
    delete_by_force(machine, "forced")
    messages = [reject(machine, f"p{number}") for number in range(4)]
    assert MAX_WAIT_S <= machine.slept_s <= MAX_WAIT_S + 2 * POLL_S
    assert set(messages) == {
        f"pod default/p{number}, container c0: insufficient GPUs for c0 (1 whole GPU): "
        "GPU 0 (A100-SXM4-40GB): 0 cores and 0 MiB free; "
        "deleted, but still running processes and so holding GPUs: default/forced; "
        "delete the pod; its controller creates it again"
        for number in range(4)
    }


def test_a_pod_with_room_does_not_wait(machine: Machine) -> None:
    machine.admit(pod("forced", container("c0", 50, 1)))
    delete_by_force(machine, "forced")
    machine.admit(pod("next", container("c0", 50, 1)))
    assert machine.slept_s == 0


def test_a_pod_waits_until_the_processes_end(machine: Machine) -> None:
    """A later pod may wait for as long as the first one left."""
    machine.admit(pod("forced", container("c0", 100, 1)))
    delete_by_force(machine, "forced")
    machine.on_sleep = lambda: machine.running.clear() if machine.now > 3 else None
    machine.admit(pod("next", container("c0", 100, 1)))
    assert machine.cards("uid-next") == ["GPU-0"]
    assert 3 < machine.slept_s < 4
    assert set(machine.allocations.all()) == {"uid-next"}


def test_a_pod_that_would_not_fit_beside_the_others_does_not_wait(machine: Machine) -> None:
    """The end of the lingering pod would not help it, and the refusal does not blame that pod."""
    machine.admit(pod("stays", container("c0", 60, 1)), pod("forced", container("c0", 20, 1)))
    delete_by_force(machine, "forced")
    assert "forced" not in reject(machine, "next", cores=50)
    assert machine.slept_s == 0


def test_pods_wait_for_their_placement_once_in_all(tmp_path: Path) -> None:
    """After that, other cards are as good."""
    machine = Machine(tmp_path, *(card(index) for index in range(4)))
    machine.admit(pod("forced", container("c0", 100, 1), placed={"c0": WHOLE}))
    delete_by_force(machine, "forced")
    machine.admit(*(pod(f"p{number}", container("c0", 100, 1), placed={"c0": WHOLE}) for number in range(3)))
    assert PLACEMENT_WAIT_S <= machine.slept_s <= PLACEMENT_WAIT_S + 2 * POLL_S
    assert sorted(machine.cards(f"uid-p{number}")[0] for number in range(3)) == ["GPU-1", "GPU-2", "GPU-3"]


def test_a_pod_whose_placement_is_held_by_others_too_is_placed_elsewhere_at_once(tmp_path: Path) -> None:
    machine = Machine(tmp_path, card(0), card(1))
    half = {"c0": (GpuSlice("GPU-0", 50, 256),)}
    machine.admit(pod("stays", container("c0", 50, 1), placed=half), pod("forced", container("c0", 50, 1), placed=half))
    delete_by_force(machine, "forced")
    machine.admit(pod("next", container("c0", 100, 1), placed={"c0": WHOLE}))
    assert (machine.cards("uid-next"), machine.slept_s) == (["GPU-1"], 0)


def test_many_lingering_pods_delay_the_node_by_a_bounded_part_of_the_time(machine: Machine) -> None:
    """A tenant may delete one pod after another by force, and start one that would fit without the last of them."""
    for number in range(50):
        machine.admit(pod(f"forced{number}", container("c0", 1, 1)))
        delete_by_force(machine, f"forced{number}")
        reject(machine, f"next{number}", cores=100 - number)
        machine.now += 2
    assert machine.slept_s <= NODE_WAIT_S + NODE_WAIT_RATIO * machine.now + POLL_S


def test_waits_are_counted_by_pod_and_forgotten_with_it() -> None:
    """A pod is waited for within its own limit; a new one has a new limit; together they have the node's."""
    now = 0.0
    lingering = LingeringPods(lambda: now)
    lingering.add_wait({"a"}, 9.0)
    assert lingering.worth_waiting_for({"a", "b"}, 10.0) == {"a", "b"}
    assert lingering.worth_waiting_for({"a", "b"}, 2.0) == {"b"}
    lingering.add_wait({"a", "b"}, 1.5)
    assert lingering.worth_waiting_for({"a", "b"}, 10.0) == {"b"}
    lingering.add_wait({"b"}, 9.6)
    assert lingering.worth_waiting_for({"a", "c"}, 10.0) == set(), "the node's limit"
    now = 3600.0
    assert lingering.worth_waiting_for({"a", "b"}, 10.0) == {"a"}, "a was gone meanwhile"

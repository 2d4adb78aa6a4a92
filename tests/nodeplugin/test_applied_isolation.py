"""What enforces the limits of a container: required before it is allocated, and recorded with the allocation."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.objects import Pod
from nodeplugin.device_ids import Resource
from nodeplugin.isolation_ladder import CardLadder
from nodeplugin.proto import deviceplugin_v1beta1_pb2 as api
from tests.nodeplugin.simulated import NAMES, Machine, PodRejected, container, pod
from vcuda.isolation import EXCLUSIVE, NO_ISOLATION, Isolation, Rung
from vcuda.limits import VERSION, PodLimits, encode_limits
from vcuda.placement_annotation import GpuSlice

PRELOAD = Isolation(Rung.PRELOAD, Rung.PRELOAD)
DRIVER = Isolation(Rung.DRIVER, Rung.PRELOAD)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def offer(machine: Machine, isolation: Isolation, *others: Isolation) -> None:
    """Have the cards offer this; each further one is of the next card."""
    by_index = dict(enumerate((isolation, *others)))
    machine.node_cards.ladder_of = lambda card: CardLadder(by_index.get(card.index, isolation))


def requiring(minimum: Isolation, name: str = "one", *, cores: int = 10, placed: int | None = None) -> Pod:
    """A pod whose limits require an isolation, as the webhook has recorded it."""
    limits = encode_limits(PodLimits(v=VERSION, models=(), min_isolation=minimum, containers={}))
    slices = None if placed is None else {"c0": (GpuSlice(f"GPU-{placed}", cores, 256),)}
    return pod(name, container("c0", cores, 1), annotations={NAMES.limits: limits}, placed=slices)


def recorded(machine: Machine, uid: str = "uid-one") -> Isolation:
    return machine.allocations.all()[uid].isolation_of("c0")


def test_an_allocation_records_what_its_card_offered(machine: Machine) -> None:
    """It stays so when the card offers something else, and over a restart of the plugin."""
    offer(machine, PRELOAD)
    machine.admit(requiring(NO_ISOLATION))
    offer(machine, DRIVER)
    assert recorded(machine) == PRELOAD
    machine.start()
    assert recorded(machine) == PRELOAD
    machine.admit(requiring(NO_ISOLATION, "two"))
    assert recorded(machine, "uid-two") == DRIVER


def test_a_lost_record_is_rebuilt_from_the_kubelets_checkpoint(machine: Machine, tmp_path: Path) -> None:
    offer(machine, PRELOAD)
    machine.admit(requiring(NO_ISOLATION))
    offer(machine, NO_ISOLATION)
    (tmp_path / "allocations.json").unlink()
    machine.start()
    assert recorded(machine) == PRELOAD


@pytest.mark.parametrize("placed", [None, 0], ids=["placed here", "placed by the scheduler"])
def test_a_share_is_refused_where_less_is_offered_than_required(machine: Machine, placed: int | None) -> None:
    """Whatever placed it."""
    offer(machine, PRELOAD)
    with pytest.raises(PodRejected, match="this node has no GPU with isolation memory=driver or stronger"):
        machine.admit(requiring(Isolation(Rung.DRIVER), placed=placed))
    assert machine.allocations.all() == {}


def test_a_share_gets_the_card_that_offers_what_it_requires(machine: Machine) -> None:
    offer(machine, PRELOAD, PRELOAD, DRIVER, PRELOAD)
    machine.admit(requiring(Isolation(Rung.DRIVER)))
    assert machine.cards("uid-one") == ["GPU-2"]


def test_whole_cards_satisfy_every_requirement(machine: Machine) -> None:
    offer(machine, NO_ISOLATION)
    machine.admit(requiring(DRIVER, cores=100))
    assert recorded(machine) == EXCLUSIVE


def test_a_later_container_is_refused_when_its_card_offers_less_by_then(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod was placed with its first container, when the card still offered enough."""
    offer(machine, PRELOAD)
    allocate = machine.allocator.allocate

    def allocate_and_weaken(resource: Resource, ids: Sequence[str]) -> api.ContainerAllocateResponse:
        response = allocate(resource, ids)
        if response.annotations:
            offer(machine, NO_ISOLATION)
        return response

    monkeypatch.setattr(machine.allocator, "allocate", allocate_and_weaken)
    annotations = requiring(Isolation(Rung.PRELOAD)).metadata.annotations
    with pytest.raises(PodRejected, match="container c1: isolation none, at least memory=preload required"):
        machine.admit(pod("one", container("c0", 10, 1), container("c1", 10, 1), annotations=annotations))

"""What the node plugin remembers of the previous run, and what of a node decides by what its shares are limited."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cluster.in_memory import InMemoryCluster
from nodeplugin.checkpoint import AllocationCheckpoint, ContainerAllocation, PodAllocation
from nodeplugin.memory_limits import LimitedContainer, MemoryLimitFacts
from nodeplugin.service import Service, previous_cards
from settings.configuration import Configuration, MonitorSettings
from tests.nodeplugin.builders import card, mig_part
from vcuda.isolation import Isolation, Rung
from vcuda.placement_annotation import GpuSlice


def test_a_card_that_disappears_while_the_machine_runs_is_missing() -> None:
    checkpoint = AllocationCheckpoint({}, (card(0), card(1)), "boot-1")
    assert previous_cards(checkpoint, "boot-1") == (card(0), card(1))


def test_a_card_that_disappears_with_a_reboot_is_missing_only_while_a_pod_holds_it() -> None:
    """Otherwise it was removed from the machine."""
    allocation = PodAllocation(uid="u", namespace="team", name="train", placed={}, usage={"GPU-1": (50, 1024)})
    checkpoint = AllocationCheckpoint({"u": allocation}, (card(0), card(1)), "boot-1")
    assert previous_cards(checkpoint, "boot-2") == (card(1),)


NEW_NODE = MemoryLimitFacts("615.42", "cdi", has_hook=True, controllers=frozenset({"dmem"}))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A node plugin on a node without a driver."""
    folders = {name: str(tmp_path / name) for name in ("folder", "device_plugins", "pod_resources", "host_root", "cdi")}
    settings = replace(Configuration().node_plugin, node_name="node-1", injection="cdi", **folders)
    monitor = MonitorSettings(address="127.0.0.1", port=0)
    made = Service(replace(Configuration(), node_plugin=settings, monitor=monitor), InMemoryCluster()).start()
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        pytest.param(NEW_NODE, Rung.DRIVER, id="the driver can"),
        pytest.param(replace(NEW_NODE, driver="580.65"), Rung.NONE, id="the driver is older"),
        pytest.param(replace(NEW_NODE, controllers=frozenset({"cpu"})), Rung.NONE, id="the kernel cannot"),
        pytest.param(replace(NEW_NODE, has_hook=False), Rung.NONE, id="the hook is not there"),
    ],
)
def test_a_card_offers_the_drivers_limit_where_the_node_has_it(
    service: Service, monkeypatch: pytest.MonkeyPatch, facts: MemoryLimitFacts, expected: Rung
) -> None:
    """Of MIG devices never; without it there is the library, which this node does not have."""
    monkeypatch.setattr(service.injector.preload, "problem", lambda: "not installed")
    monkeypatch.setattr("nodeplugin.share_enforcement.read_facts", lambda *_, **__: facts)
    assert service.enforcement.ladder_of(card(0)).isolation.memory is expected
    assert service.enforcement.ladder_of(mig_part(1)).isolation.memory is Rung.NONE


def test_the_driver_limits_the_containers_that_were_started_so(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the card offers by now."""
    half: tuple[GpuSlice, ...] = (GpuSlice("GPU-0", 50, 1024),)
    containers = {
        name: ContainerAllocation(f"token-{name}", isolation=Isolation(rung))
        for name, rung in (("a", Rung.DRIVER), ("b", Rung.PRELOAD), ("c", Rung.NONE))
    }
    placed = dict.fromkeys(containers, half)
    allocation = PodAllocation(uid="u", namespace="team", name="train", placed=placed, usage={}, containers=containers)
    monkeypatch.setattr(service.enforcement, "_allocations", lambda: {"u": allocation})
    assert service.enforcement.limited_by_driver() == {
        "token-a": LimitedContainer("u", "team/train", "a", {"GPU-0": 1024})
    }

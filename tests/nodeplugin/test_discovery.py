"""A plugin beside a driver that is slow, hangs or is absent: it serves the cards of the last run meanwhile."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.in_memory import InMemoryCluster
from cluster.objects import NODES
from nodeplugin import discovery, fake, nvml
from nodeplugin.cards import MISSING, NO_DRIVER, Card, NodeCards
from nodeplugin.checkpoint import CHECKPOINT_FILE, AllocationCheckpoint, write_checkpoint
from nodeplugin.discovery import CannotServe, CardDiscovery
from nodeplugin.host_driver import HostDriver
from nodeplugin.nvml import CardList, Driver, DriverError
from nodeplugin.service import Service, boot_id
from settings.configuration import Configuration, MonitorSettings, NodePluginSettings
from tests.nodeplugin.builders import card, mig_part
from tests.running import HOST, free_port
from tests.waiting import eventually


class SlowDriver(Driver):
    """A driver that lists its cards once it may answer, unless it fails."""

    def __init__(self, *cards: Card) -> None:
        super().__init__()
        self.listed, self.error = cards, ""
        self.unreadable: dict[int, str] = {}
        self.may_answer = threading.Event()

    def open(self) -> "SlowDriver":
        return self

    def close(self) -> None: ...

    def version(self) -> str:
        return "550.54.15"

    def count_cards(self) -> int:
        assert self.may_answer.wait(60)
        if self.error:
            raise DriverError(self.error)
        return len(self.listed)

    def read_cards(self, count: int) -> CardList:  # noqa: ARG002 - as many as there are
        return CardList(self.listed, self.unreadable)


class Found:
    """A discovery with its cards, and what it reported."""

    def __init__(self, driver: Driver, folder: Path, known: tuple[Card, ...] = ()) -> None:
        self.now, self.versions, self.failures = 1000.0, list[str](), list[str]()
        self.forgotten: set[str] = set()
        self.node_cards = NodeCards(known)
        self.discovery = CardDiscovery(
            driver,
            HostDriver(folder),
            self.node_cards,
            256,
            cards_in_use=set,
            on_version=lambda: self.versions.append(self.discovery.version),
            on_change=lambda: None,
            on_forget=self.forgotten.update,
            on_failure=self.failures.append,
            clock=lambda: self.now,
        )

    def faults(self) -> dict[str, str]:
        return {each.uuid: self.node_cards.condition(each.uuid).fault for each in self.node_cards.cards()}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDriver]:
    monkeypatch.setattr(discovery, "FIRST_LIST_S", 0.05)
    driver = SlowDriver(card(0), card(2))
    yield driver
    driver.may_answer.set()


def test_cards_of_the_last_run_are_served_until_the_driver_answers(driver: SlowDriver, tmp_path: Path) -> None:
    """Then those that it lists count."""
    found = Found(driver, tmp_path, (card(0), card(1)))
    found.discovery.start()
    assert found.faults() == {"GPU-0": "", "GPU-1": ""}
    assert found.discovery.problem() == "the NVIDIA driver is not loaded yet"
    driver.may_answer.set()
    eventually(lambda: found.faults() == {"GPU-0": "", "GPU-1": MISSING, "GPU-2": ""}, "the list")
    eventually(lambda: found.discovery.problem() == "", "the driver to be known")
    assert found.versions == ["550.54.15"]
    found.discovery.stop()


def test_cards_of_the_last_run_are_not_offered_for_long_beside_a_driver_that_hangs(
    driver: SlowDriver, tmp_path: Path
) -> None:
    found = Found(driver, tmp_path, (card(0),))
    found.discovery.start()
    found.now += discovery.HANG_TIMEOUT_S - 1
    found.discovery.detect_hang()
    assert found.faults() == {"GPU-0": ""}
    found.now += 2
    found.discovery.detect_hang()
    assert found.faults() == {"GPU-0": NO_DRIVER}
    assert found.discovery.problem() == "no answer from the NVIDIA driver for 31 s"
    assert found.discovery.alive
    driver.may_answer.set()
    eventually(lambda: found.faults() == {"GPU-0": "", "GPU-2": ""}, "the list at last")
    found.discovery.stop()


def test_without_a_driver_the_cards_of_the_last_run_are_missing(driver: SlowDriver, tmp_path: Path) -> None:
    driver.error = "not loaded"
    driver.may_answer.set()
    found = Found(driver, tmp_path, (card(0),))
    found.discovery.start()
    eventually(lambda: found.faults() == {"GPU-0": NO_DRIVER}, "the card to be missing")
    assert found.discovery.problem() == "not loaded"
    found.discovery.stop()


def test_a_failure_after_a_list_changes_no_card(driver: SlowDriver, tmp_path: Path) -> None:
    driver.may_answer.set()
    found = Found(driver, tmp_path)
    found.discovery.start()
    eventually(lambda: len(found.faults()) == 2, "the list")
    driver.error = "unloaded"
    found.discovery.list_cards()
    assert found.faults() == {"GPU-0": "", "GPU-2": ""}
    found.discovery.stop()


def test_a_node_that_cannot_be_served_ends_the_plugin(driver: SlowDriver, tmp_path: Path) -> None:
    driver.listed = tuple(card(number, memory_mib=1 << 30) for number in range(8))
    driver.may_answer.set()
    found = Found(driver, tmp_path)
    with pytest.raises(CannotServe, match="memoryUnitMiB"):
        found.discovery.list_cards()
    found.discovery.start()
    eventually(lambda: bool(found.failures), "the failure")
    assert "memoryUnitMiB" in found.failures[0]


def test_slices_that_were_removed_are_forgotten_and_reported(driver: SlowDriver, tmp_path: Path) -> None:
    """A card that is missing beside them is broken, and stays."""
    driver.may_answer.set()
    driver.listed = (mig_part(2),)
    found = Found(driver, tmp_path, (card(1), mig_part(1), mig_part(2)))
    found.discovery.list_cards()
    assert found.faults() == {"MIG-2": "", "GPU-1": MISSING}
    assert found.forgotten == {"MIG-1"}


def test_a_card_that_cannot_be_read_is_unhealthy_and_not_missing(driver: SlowDriver, tmp_path: Path) -> None:
    """Nor are slices forgotten beside which one could not be read."""
    driver.may_answer.set()
    driver.listed, driver.unreadable = (mig_part(2),), {0: "driver error: Timeout", 1: "driver error: Unknown Error"}
    found = Found(driver, tmp_path, (card(1), mig_part(1), mig_part(2)))
    found.discovery.list_cards()
    assert found.faults() == {"MIG-1": "driver error: Timeout", "MIG-2": "", "GPU-1": "driver error: Unknown Error"}
    assert found.node_cards.missing() == set()
    assert not found.forgotten


def test_a_card_that_hangs_takes_no_other_off_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the plugin wait for it longer than for a driver that hangs as a whole."""
    monkeypatch.setattr(nvml, "CARD_ANSWER_S", 1.0)
    cards = [
        {"uuid": f"GPU-{index}", "minor": index, "product": "NVIDIA A100", "memoryMiB": 1024} for index in range(4)
    ]
    hanging = [each | ({"delayMs": 10_000_000} if each["uuid"] == "GPU-1" else {}) for each in cards]
    library = fake.install(tmp_path / "driver", {"cards": hanging})
    found = Found(Driver(library, nvml.load_bindings()), tmp_path, tuple(card(index) for index in range(4)))
    monkeypatch.setattr(found.discovery, "_check_library", lambda: None)
    found.discovery.start()
    no_answer = {"GPU-0": "", "GPU-1": "no answer from the driver for 1 s", "GPU-2": "", "GPU-3": ""}
    eventually(lambda: found.faults() == no_answer, "the other cards to be listed")
    found.now += 10 * discovery.HANG_TIMEOUT_S
    found.discovery.detect_hang()
    assert found.faults() == no_answer
    assert found.discovery.problem() == ""
    fake.describe(tmp_path / "driver", {"cards": cards})
    found.discovery.stop()


def service_on(folder: Path, driver: Driver) -> Service:
    cluster = InMemoryCluster()
    cluster.create(NODES, {"metadata": {"name": "node-1"}})
    settings: dict[str, Any] = {name: str(folder / name) for name in ("folder", "device_plugins", "host_root", "cdi")}
    configuration = Configuration(
        node_plugin=NodePluginSettings(node_name="node-1", pod_resources=str(folder / "none"), **settings),
        monitor=MonitorSettings(address=HOST, port=free_port()),
    )
    return Service(configuration, cluster, driver)


def test_the_plugin_starts_beside_a_driver_that_hangs(driver: SlowDriver, tmp_path: Path) -> None:
    """It is alive, registers with the kubelet, and has the cards of the last run; it says what it waits for."""
    write_checkpoint(tmp_path / "folder" / CHECKPOINT_FILE, AllocationCheckpoint({}, (card(0),), boot_id()))
    service = service_on(tmp_path, driver)
    assert service.not_live() == []
    service.start()
    try:
        assert service.registrar.alive
        assert service.not_live() == []
        assert service.node_cards.condition("GPU-0").healthy
        assert "the NVIDIA driver is not loaded yet" in service.not_ready()
        driver.may_answer.set()
        eventually(lambda: service.discovery.problem() == "", "the driver")
        eventually(lambda: [each.uuid for each in service.node_cards.cards()] == ["GPU-0", "GPU-2"], "its cards")
    finally:
        driver.may_answer.set()
        service.stop()
    assert "the registrar is not running" in service.not_live()

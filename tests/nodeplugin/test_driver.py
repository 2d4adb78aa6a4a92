"""The driver as read with NVIDIA's own bindings, and the fake NVML library that implements it from a file."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import yaml

from nodeplugin import fake, nvml
from nodeplugin.cards import Card
from nodeplugin.nvml import (
    NO_LIMIT,
    CardCheck,
    CardList,
    Driver,
    DriverError,
    GpuProcess,
    MeasuredUsage,
    MemoryLimits,
    XidEvent,
    load_bindings,
)
from tests.waiting import eventually

Described = Mapping[str, Any]

HOURS = 10_000_000


def gpu(index: int, **changes: Any) -> dict[str, Any]:
    """The description of a card; `None` removes a key."""
    described = {
        "uuid": f"GPU-{index}",
        "product": "NVIDIA A100-SXM4-40GB",
        "memoryMiB": 40960,
        # No machine has this PCI domain, so the NUMA node comes from the fake driver and never from the kernel.
        "bus": f"0000EEEE:{index + 1:02X}:00.0",
    } | changes
    return {key: value for key, value in described.items() if value is not None}


def machine(*cards: Described, **others: Any) -> dict[str, Any]:
    return {"cards": list(cards), **others}


class Bench:
    """A folder with a fake library, and a driver that loads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.driver = Driver(folder / "libnvidia-ml.so.1")

    def open(self, description: Described | str) -> Driver:
        self.change(description)
        return self.driver.open()

    def change(self, description: Described | str) -> None:
        fake.install(self.folder, description)

    def cards(self, *cards: Described, **others: Any) -> list[Card]:
        """The cards that the driver lists for a described machine."""
        return self.cards_of(machine(*cards, **others))

    def cards_of(self, description: Described | str) -> list[Card]:
        self.open(description)
        return list(self.list_cards().cards)

    def list_cards(self) -> CardList:
        return self.driver.read_cards(self.driver.count_cards())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.delenv("QUOTIENT_FAKE_GPUS", raising=False)
    # The bindings load one library per process, and cache its functions.
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    bench = Bench(tmp_path / "driver")
    yield bench
    bench.driver.close()


# Discovery of cards.


def test_a_card_is_read_with_all_its_attributes(bench: Bench) -> None:
    """The number of its device node is not its index."""
    (read,) = bench.cards(gpu(0, minor=5, capability="9.0", numa=1))
    assert read == Card(
        uuid="GPU-0",
        index=0,
        minor=5,
        product="NVIDIA A100-SXM4-40GB",
        memory_mib=40960,
        capability="9.0",
        numa=1,
        bus_id="0000EEEE:01:00.0",
    )
    assert read.model == "A100-SXM4-40GB"


def test_index_and_minor_are_independent(bench: Bench) -> None:
    """The driver orders cards by bus, the kernel numbers device nodes in the order of detection."""
    assert [(each.index, each.minor) for each in bench.cards(gpu(0, minor=1), gpu(1, minor=0))] == [(0, 1), (1, 0)]


@pytest.mark.parametrize(
    ("product", "model"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA", "unknown"),
    ],
    ids=["with the brand", "with an older brand", "with a series", "with only the brand"],
)
def test_the_model_is_the_product_without_its_brand(bench: Bench, product: str, model: str) -> None:
    """As quotas name it; a product without a model is listed as unknown."""
    (read,) = bench.cards(gpu(0, product=product))
    assert (read.product, read.model) == (product, model)


UNREPORTED = {
    "memory is not described": (gpu(0, memoryMiB=None), "memory_mib", 0),
    "the call for memory fails": (gpu(0, failures={"memory": "not_supported"}), "memory_mib", 0),
    "the call for capability fails": (gpu(0, failures={"capability": "not_supported"}), "capability", ""),
    "the call for bus fails": (gpu(0, failures={"pci": "no_permission"}), "bus_id", ""),
    "the NUMA node is not described": (gpu(0), "numa", None),
}


@pytest.mark.parametrize(("described", "attribute", "expected"), UNREPORTED.values(), ids=UNREPORTED.keys())
def test_an_unreported_attribute_has_its_default(
    bench: Bench, described: Described, attribute: str, expected: object
) -> None:
    """The card is listed anyway."""
    (read,) = bench.cards(described)
    assert getattr(read, attribute) == expected


def test_a_card_without_a_uuid_is_not_listed(bench: Bench) -> None:
    """The others keep their indexes."""
    listed = bench.cards(gpu(0, lost=True), gpu(1), gpu(2, failures={"uuid": "unknown"}), gpu(3))
    assert [(each.uuid, each.index) for each in listed] == [("GPU-1", 1), ("GPU-3", 3)]


def test_a_machine_may_have_cards_of_several_models(bench: Bench) -> None:
    listed = bench.cards(gpu(0), gpu(1, product="Tesla T4", memoryMiB=15109, capability="7.5"))
    assert [(each.model, each.memory_mib) for each in listed] == [("A100-SXM4-40GB", 40960), ("T4", 15109)]


def test_a_card_that_hangs_is_left_out_and_holds_up_no_other(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for once, and listed when it answers at last."""
    monkeypatch.setattr(nvml, "CARD_ANSWER_S", 1.0)
    bench.open(machine(*(gpu(index, delayMs=HOURS if index == 1 else None) for index in range(4))))
    listed = bench.list_cards()
    assert [each.uuid for each in listed.cards] == ["GPU-0", "GPU-2", "GPU-3"]
    assert listed.unreadable == {1: "no answer from the driver for 1 s"}
    assert listed.cards[0].links.keys() == {"GPU-2", "GPU-3"}
    monkeypatch.setattr(nvml, "CARD_ANSWER_S", 3600)
    assert bench.list_cards().cards == listed.cards
    bench.change(machine(*(gpu(index) for index in range(4))))
    eventually(lambda: len(bench.list_cards().cards) == 4, "the card to be listed")


def test_a_machine_may_have_no_card(bench: Bench) -> None:
    """This is not an error."""
    assert bench.cards() == []


def test_cards_are_listed_again_on_every_call(bench: Bench) -> None:
    bench.cards(gpu(0))
    bench.change(machine(gpu(0), gpu(1)))
    assert [each.uuid for each in bench.list_cards().cards] == ["GPU-0", "GPU-1"]


# Links.


def links_between(bench: Bench, one: Described, other: Described, **link: Any) -> tuple[str, str]:
    """The link between two cards, as each of them reports it."""
    first, second = bench.cards(one, other, links=[{"a": 0, "b": 1, **link}] if link else [])
    return first.links.get("GPU-1", ""), second.links.get("GPU-0", "")


@pytest.mark.parametrize("path", ["board", "pix", "pxb", "phb", "node", "sys"])
def test_pcie_paths_are_read(bench: Bench, path: str) -> None:
    """From the same board to another socket."""
    assert links_between(bench, gpu(0), gpu(1), path=path) == (path, path)


@pytest.mark.parametrize("count", [1, 4, 18])
def test_nvlinks_are_counted(bench: Bench, count: int) -> None:
    """They take precedence over the PCIe path."""
    assert links_between(bench, gpu(0), gpu(1), nvlink=count, path="pix") == (f"nvlink{count}",) * 2


def test_the_path_of_undescribed_links_follows_from_the_numa_nodes(bench: Bench) -> None:
    assert links_between(bench, gpu(0, numa=0), gpu(1, numa=0)) == ("node", "node")
    bench.change(machine(gpu(2, numa=0), gpu(3, numa=1)))
    assert [each.links for each in bench.list_cards().cards] == [{"GPU-3": "sys"}, {"GPU-2": "sys"}]


def test_cards_reach_each_other_through_an_nvswitch(bench: Bench) -> None:
    """With the link count of the card that has fewer; a card without links to the switch is reached over PCIe."""
    first, second, third = bench.cards(gpu(0, nvswitchLinks=12), gpu(1, nvswitchLinks=6), gpu(2, numa=0))
    assert first.links == {"GPU-1": "nvlink6", "GPU-2": "sys"}
    assert second.links == {"GPU-0": "nvlink6", "GPU-2": "sys"}
    assert third.links == {"GPU-0": "sys", "GPU-1": "sys"}


def test_nvlinks_are_attributed_to_the_card_at_the_other_end(bench: Bench) -> None:
    """By its bus id."""
    wired = [{"a": 0, "b": 1, "nvlink": 1}, {"a": 0, "b": 2, "nvlink": 2}, {"a": 1, "b": 2, "path": "pix"}]
    first, second, third = bench.cards(gpu(0), gpu(1), gpu(2), links=wired)
    assert first.links == {"GPU-1": "nvlink1", "GPU-2": "nvlink2"}
    assert second.links == {"GPU-0": "nvlink1", "GPU-2": "pix"}
    assert third.links == {"GPU-0": "nvlink2", "GPU-1": "pix"}


def test_cards_that_do_not_report_links_have_none(bench: Bench) -> None:
    """Placement then falls back to their NUMA nodes."""
    one, other = (gpu(index, failures={"nvlink": "not_supported", "topology": "not_supported"}) for index in range(2))
    assert links_between(bench, one, other, nvlink=4) == ("", "")


def test_a_value_that_two_cards_share_is_written_for_both(bench: Bench) -> None:
    """A shared Python object would become a YAML alias, which the library does not support."""
    failing = {"memory": "not_supported"}
    assert [each.memory_mib for each in bench.cards(gpu(0, failures=failing), gpu(1, failures=failing))] == [0, 0]


# MIG devices.


def part(number: int) -> dict[str, Any]:
    return {"uuid": f"MIG-{number}", "profile": "1g.5gb", "memoryMiB": 4864, "gi": 7 + number, "ci": number}


def test_a_card_in_mig_mode_is_listed_as_its_mig_devices(bench: Bench) -> None:
    """With the minor number of the card and the ids of the instances; other cards are listed whole."""
    first, second, whole = bench.cards(gpu(0, minor=4, mig=[part(0), part(1)], numa=1), gpu(1, migCapable=True))
    assert first == Card(
        uuid="MIG-0",
        index=0,
        minor=4,
        product="NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        memory_mib=4864,
        capability="8.0",
        numa=1,
        bus_id="0000EEEE:01:00.0",
        parent="GPU-0",
        gpu_instance=7,
        compute_instance=0,
    )
    assert first.model == "A100-SXM4-40GB-MIG-1g.5gb"
    assert (second.uuid, second.gpu_instance, second.compute_instance) == ("MIG-1", 8, 1)
    assert (whole.uuid, whole.is_mig) == ("GPU-1", False)


def test_a_card_in_mig_mode_without_mig_devices_is_not_listed(bench: Bench) -> None:
    """It cannot be used as a whole card any more."""
    assert bench.cards(gpu(0, migMode=True)) == []


@pytest.mark.parametrize("call", ["uuid", "name"])
def test_a_mig_device_that_cannot_be_read_hides_no_other(bench: Bench, call: str) -> None:
    """Neither of its card nor of others."""
    broken = part(0) | {"failures": {call: "gpu_is_lost"}}
    assert [each.uuid for each in bench.cards(gpu(0, mig=[broken, part(1)]), gpu(1))] == ["MIG-1", "GPU-1"]


def test_a_mig_device_fails_with_its_card(bench: Bench) -> None:
    """Checks include the card, and XIDs are reported for the card."""
    first, _ = bench.cards(gpu(0, mig=[part(0), part(1)]))
    assert bench.driver.check_card(first).error == ""
    bench.change(machine(gpu(0, mig=[part(0), part(1)], lost=True)))
    assert "GPU is lost" in bench.driver.check_card(first).error
    bench.change(machine(gpu(0, mig=[part(0), part(1)])))
    bench.driver.subscribe([first])
    bench.change(machine(gpu(0, mig=[part(0), part(1)]), events=[{"card": 0, "xid": 79}]))
    assert bench.driver.wait_for_xid(0) == XidEvent("GPU-0", 79)


def test_the_check_of_a_removed_mig_device_fails(bench: Bench) -> None:
    """MIG devices can be reconfigured while the plugin runs."""
    first, second = bench.cards(gpu(0, mig=[part(0), part(1)]))
    bench.change(machine(gpu(0, mig=[part(1)])))
    assert bench.driver.check_card(second).error == ""
    assert bench.driver.check_card(first).error != ""


# Checks and usage.


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (machine(gpu(0), gpu(1)), CardCheck()),
        (machine(gpu(0), gpu(1, lost=True)), CardCheck("driver error: GPU is lost", is_away=True)),
        (
            machine(gpu(0), gpu(1, failures={"uuid": "16"})),
            CardCheck("driver error: GPU requires restart", is_away=True),
        ),
        (machine(gpu(0)), CardCheck("driver error: Not Found", is_away=True)),
        (machine(gpu(1), gpu(0)), CardCheck()),
        (machine(gpu(0), gpu(1, failures={"uuid": "timeout"})), CardCheck("driver error: Timeout")),
        (
            machine(gpu(0), gpu(1), failures={"handle": "driver_not_loaded"}),
            CardCheck("driver error: Driver Not Loaded"),
        ),
    ],
    ids=[
        "it responds",
        "it has fallen off the bus",
        "it has to be reset",
        "it was removed",
        "it has another index now",
        "it does not report its uuid in time",
        "the driver was unloaded",
    ],
)
def test_a_check_returns_the_drivers_error(bench: Bench, after: Described, expected: CardCheck) -> None:
    """And whether the card is away, as it is while it is reset."""
    _, card = bench.cards(gpu(0), gpu(1))
    bench.change(after)
    assert bench.driver.check_card(card) == expected


def test_the_check_of_a_card_succeeds_again_after_a_reset(bench: Bench) -> None:
    (card,) = bench.cards(gpu(0))
    bench.change(machine(gpu(0, lost=True)))
    assert bench.driver.check_card(card).error != ""
    bench.change(machine(gpu(0)))
    assert bench.driver.check_card(card).error == ""


BUSY = gpu(
    0,
    usedMiB=512,
    utilization=35,
    temperature=51,
    powerW=210,
    processes=[{"pid": 4711, "memoryMiB": 2048, "sm": 30}, {"pid": 42, "memoryMiB": 100, "sm": 0}],
)


def test_usage_is_measured(bench: Bench) -> None:
    """Processes are ordered by pid."""
    (card,) = bench.cards(BUSY)
    assert bench.driver.usage(card) == MeasuredUsage(
        utilization=35,
        used_mib=512 + 2048 + 100,
        temperature_c=51,
        power_w=210.0,
        processes=(GpuProcess(42, 100, 0), GpuProcess(4711, 2048, 30)),
    )


CALLS = ("utilization", "memory", "temperature", "power", "processes")


def test_unreported_usage_is_none_and_not_zero(bench: Bench) -> None:
    (card,) = bench.cards(BUSY | {"failures": dict.fromkeys(CALLS, "not_supported")})
    assert bench.driver.usage(card) == MeasuredUsage()


def test_processes_are_listed_without_their_utilization(bench: Bench) -> None:
    """Virtual machines often do not report it."""
    (card,) = bench.cards(BUSY | {"failures": {"processUtilization": "not_supported"}})
    assert [each.utilization for each in bench.driver.usage(card).processes or ()] == [0, 0]


def test_a_process_without_a_number_is_not_one_without_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings return None for it, as in some virtual machines."""
    (card,) = bench.cards(gpu(0))
    process = SimpleNamespace(pid=7, usedGpuMemory=None)
    monkeypatch.setattr(bench.driver, "_list_processes", lambda _, kind: [process] if kind == "Compute" else None)
    assert bench.driver.usage(card).processes == (GpuProcess(7, None, 0),)


def test_a_card_that_is_lost_or_was_never_listed_has_no_usage(bench: Bench) -> None:
    (card,) = bench.cards(gpu(0))
    bench.change(machine(gpu(0, lost=True)))
    assert bench.driver.usage(card) == MeasuredUsage()
    assert bench.driver.usage(Card(uuid="GPU-9", index=9, minor=9, product="")) == MeasuredUsage()


def test_a_card_that_was_removed_has_no_usage_of_another(bench: Bench) -> None:
    """The next card may have its handle."""
    first, second = bench.cards(gpu(0), gpu(1, usedMiB=100))
    bench.change(machine(gpu(1, usedMiB=100)))
    bench.list_cards()
    assert bench.driver.usage(first) == MeasuredUsage()
    assert bench.driver.usage(second).used_mib == 100


# XID events.


def subscribe(bench: Bench, *cards: Described, **others: Any) -> list[Card]:
    """Describe a machine, and subscribe to the XIDs of all its cards."""
    listed = bench.cards(*cards, **others)
    bench.driver.subscribe(listed)
    return listed


def test_xids_are_reported_in_order(bench: Bench) -> None:
    """Those before the subscription are not."""
    old = {"card": 0, "xid": 13}
    subscribe(bench, gpu(0), gpu(1), events=[old])
    assert bench.driver.wait_for_xid(0) is None
    bench.change(machine(gpu(0), gpu(1), events=[old, {"card": 1, "xid": 79}, {"card": 0, "xid": 48}]))
    assert [bench.driver.wait_for_xid(0) for _ in range(3)] == [XidEvent("GPU-1", 79), XidEvent("GPU-0", 48), None]


def test_an_xid_of_a_lost_card_has_its_uuid(bench: Bench) -> None:
    """The card no longer reports it, but it was known before."""
    subscribe(bench, gpu(0), gpu(1))
    bench.change(machine(gpu(0), gpu(1, lost=True), events=[{"card": 1, "xid": 79}]))
    assert bench.driver.wait_for_xid(0) == XidEvent("GPU-1", 79)


def test_only_xids_of_subscribed_cards_are_reported(bench: Bench) -> None:
    """A card that does not support events is skipped."""
    mute = gpu(1, failures={"events": "not_supported"})
    subscribe(bench, gpu(0), mute)
    bench.change(machine(gpu(0), mute, events=[{"card": 1, "xid": 79}, {"card": 0, "xid": 62}]))
    assert bench.driver.wait_for_xid(0) == XidEvent("GPU-0", 62)


def test_subscribing_again_neither_loses_nor_repeats_an_xid(bench: Bench) -> None:
    """Those after `unsubscribe` are lost."""
    (first,) = subscribe(bench, gpu(0))
    events = [{"card": 0, "xid": 79}]
    bench.change(machine(gpu(0), events=events))
    bench.driver.subscribe([first])
    assert [bench.driver.wait_for_xid(0) for _ in range(2)] == [XidEvent("GPU-0", 79), None]
    bench.driver.unsubscribe()
    bench.change(machine(gpu(0), events=events * 2))
    bench.driver.subscribe([first])
    assert bench.driver.wait_for_xid(0) is None


def test_cards_that_were_not_listed_yet_can_be_subscribed_later(bench: Bench) -> None:
    """A restarted plugin knows its cards before the driver has listed them."""
    cards = bench.cards(gpu(0), gpu(1))
    restarted = Driver(bench.folder / "libnvidia-ml.so.1", load_bindings()).open()
    restarted.subscribe(cards)
    restarted.read_cards(1)
    restarted.subscribe(cards)
    restarted.read_cards(2)
    restarted.subscribe(cards)
    bench.change(machine(gpu(0), gpu(1), events=[{"card": 0, "xid": 48}, {"card": 1, "xid": 79}]))
    assert [restarted.wait_for_xid(0) for _ in range(2)] == [XidEvent("GPU-0", 48), XidEvent("GPU-1", 79)]
    restarted.close()


def test_a_subscription_that_failed_is_tried_again(bench: Bench) -> None:
    (first,) = subscribe(bench, gpu(0, failures={"events": "timeout"}))
    bench.change(machine(gpu(0)))
    bench.driver.subscribe([first])
    bench.change(machine(gpu(0), events=[{"card": 0, "xid": 79}]))
    assert bench.driver.wait_for_xid(0) == XidEvent("GPU-0", 79)


def test_xids_of_other_cards_are_reported_beside_one_that_hangs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own are reported once it answers."""
    monkeypatch.setattr(nvml, "REGISTER_S", 1.0)
    cards = bench.cards(gpu(0), gpu(1))
    hanging, events = gpu(0, delayMs=HOURS), [{"card": 1, "xid": 79}, {"card": 0, "xid": 48}]
    bench.change(machine(hanging, gpu(1)))
    bench.driver.subscribe(cards)
    bench.change(machine(hanging, gpu(1), events=events[:1]))
    assert bench.driver.wait_for_xid(0) == XidEvent("GPU-1", 79)
    bench.change(machine(gpu(0), gpu(1), events=events[:1]))

    def is_subscribed() -> bool:
        bench.driver.subscribe(cards)
        return len(bench.driver._subscribed) == len(cards)

    eventually(is_subscribed, "the card to be subscribed")
    bench.change(machine(gpu(0), gpu(1), events=events))
    assert bench.driver.wait_for_xid(0) == XidEvent("GPU-0", 48)


def test_a_failing_wait_raises_a_driver_error(bench: Bench) -> None:
    """The caller has to subscribe again."""
    subscribe(bench, gpu(0))
    bench.change(machine(gpu(0), failures={"wait": "unknown"}))
    with pytest.raises(DriverError, match="no longer reports XID errors"):
        bench.driver.wait_for_xid(0)


def test_waiting_without_a_subscription_returns_none(bench: Bench) -> None:
    bench.cards(gpu(0))
    assert bench.driver.wait_for_xid(0) is None


# Without a driver.


def test_the_version_is_read(bench: Bench) -> None:
    """Empty if the driver does not report it."""
    assert bench.open(machine(driver="570.1")).version() == "570.1"
    bench.change(machine(failures={"driverVersion": "unknown"}))
    assert bench.driver.version() == ""


@pytest.mark.parametrize("failure", ["driver_not_loaded", "no_permission", "unknown"])
def test_an_init_error_names_the_remedy(bench: Bench, failure: str) -> None:
    """The program to try, and the setting to check."""
    with pytest.raises(DriverError) as refused:
        bench.open(machine(gpu(0), failures={"init": failure}))
    for word in ("does not respond", "nvidia-smi", "libnvidia-ml.so.1", "nodePlugin.driverRoot"):
        assert word in str(refused.value)


def test_opening_can_be_retried(bench: Bench) -> None:
    """A driver container may start after the plugin."""
    with pytest.raises(DriverError):
        bench.open(machine(gpu(0), failures={"init": "driver_not_loaded"}))
    assert [each.uuid for each in bench.cards(gpu(0))] == ["GPU-0"]


def test_a_missing_library_is_an_error_that_names_the_file(bench: Bench) -> None:
    with pytest.raises(DriverError, match=r"cannot load .*libnvidia-ml\.so\.1"):
        bench.driver.open()


def test_a_driver_that_does_not_report_its_cards_is_an_error(bench: Bench) -> None:
    """It must not be taken for a machine without cards."""
    bench.open(machine(gpu(0), failures={"count": "unknown"}))
    with pytest.raises(DriverError, match="number of cards"):
        bench.list_cards()


# The YAML of the description.

PLAIN = """\
cards:
  - uuid: GPU-0
    product: NVIDIA A100
    memoryMiB: 1024
    minor: 3
"""
SHAPES = {
    "blocks": PLAIN,
    "lists that are not indented": """\
cards:
- uuid: GPU-0
  minor: 3
  mig:
  - uuid: MIG-0
    memoryMiB: 10
  - uuid: MIG-1
    memoryMiB: 20
  numa: 1
- uuid: GPU-1
  minor: 2
""",
    "flows": "cards: [{uuid: GPU-0, minor: 3, product: NVIDIA A100}, {uuid: GPU-1, memoryMiB: 1024}]\n",
    "flows within blocks": "cards:\n  - {uuid: GPU-0, mig: [{uuid: MIG-0, memoryMiB: 10}]}\n  - {uuid: GPU-1}\n",
    "comments": """\
# cards: []
cards:  # all of them
  # the first
  - uuid: GPU-0#1   # is its name
    product: "NVIDIA #1"  # in quotes
    memoryMiB: 1024 #

""",
    "quotes": """\
cards:
  - 'uuid': "GPU-0"
    "product": 'NVIDIA: A100'
    memoryMiB: "1024"
  - {"uuid": 'GPU, 1', 'product': "{A100}", "minor": "5"}
""",
    "a list item on a line of its own": "cards:\n  -\n    uuid: GPU-0\n    minor: 3\n",
    "wide list items": "cards:\n  -   uuid: GPU-0\n      minor: 3\n",
    "the start of a document": f"---\n{PLAIN}",
    "Windows line endings": PLAIN.replace("\n", "\r\n"),
    "empty lines": PLAIN.replace("\n", "\n\n"),
    "no newline at the end": PLAIN.rstrip("\n"),
    "keys in another order": "driver: '1'\nlinks: []\ncards:\n  - minor: 3\n    uuid: GPU-0\nevents: []\n",
    "as Python writes it": yaml.safe_dump(machine(gpu(0, capability="8.0", mig=[part(0)]), gpu(1, lost=False))),
    "spaces before colons": "cards:\n  - uuid : GPU-0\n    minor : 3\n",
    "spaces before colons in flows": "cards: [{uuid : GPU-0, minor : 3}]\n",
    "quotes within quotes": "cards:\n  - uuid: GPU-0\n    product: 'NVIDIA ''A100'''\n",
    "an apostrophe before a comment": "cards:\n  - uuid: GPU-0\n    product: NVIDIA's A100  # one\n",
    "null": "cards:\n  - uuid: GPU-0\n    numa: null\n",
    "capitalized booleans": "cards:\n  - uuid: GPU-0\n    lost: True\n  - uuid: GPU-1\n",
}
FOR_DESCRIBE = {
    "flows over several lines": "cards: [\n  {uuid: GPU-0,\n   minor: 3},\n  {uuid: GPU-1}]\n",
    "a whole document as a flow": "{cards: [{uuid: GPU-0, minor: 3}]}\n",
}

# Uuid, minor, memory in MiB, NUMA node and product of each listed card.
Listing = list[tuple[str, int, int, int | None, str]]


def expected_listing(described: Any) -> Listing:
    """What the driver should list for a description, as PyYAML reads it."""
    listing: Listing = []
    for index, card in enumerate(described["cards"]):
        if card.get("lost"):
            continue
        product, minor = card.get("product", "NVIDIA T4"), int(card.get("minor", index))
        for each in card.get("mig") or [card]:
            name = product if each is card else f"{product} MIG {each.get('profile', '')}"
            listing.append((str(each["uuid"]), minor, int(each.get("memoryMiB", 0)), card.get("numa"), name))
    return listing


ListCards = Callable[[str], Listing]


@pytest.fixture
def list_cards(bench: Bench) -> ListCards:
    """A function that returns what the driver lists for a YAML text, which is not converted by `describe`."""

    def read(text: str) -> Listing:
        bench.change(machine(gpu(0)))
        (bench.folder / fake.DESCRIPTION).write_text(text)
        bench.driver.open()
        cards = bench.list_cards().cards
        return [(each.uuid, each.minor, each.memory_mib, each.numa, each.product) for each in cards]

    return read


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES.keys())
def test_descriptions_are_read_as_yaml(list_cards: ListCards, text: str) -> None:
    """The library has its own parser, and must agree with PyYAML."""
    assert list_cards(text) == expected_listing(yaml.safe_load(text))


@pytest.mark.parametrize("text", FOR_DESCRIBE.values(), ids=FOR_DESCRIBE.keys())
def test_install_converts_other_yaml_to_the_supported_form(bench: Bench, text: str) -> None:
    listed = [(card.uuid, card.minor) for card in bench.cards_of(text)]
    assert listed == [(uuid, minor) for uuid, minor, *_ in expected_listing(yaml.safe_load(text))]


def test_the_example_is_a_valid_description(bench: Bench) -> None:
    text = Path(fake.__file__).with_name("gpus.yaml").read_text()
    cards = bench.cards_of(text)
    described = yaml.safe_load(text)
    assert [each.uuid for each in cards] == [described["cards"][0]["uuid"], "MIG-1"]
    assert bench.driver.version() == described["driver"]
    assert bench.driver.usage(cards[0]).processes == (GpuProcess(4711, 2048, 30),)


def test_the_environment_can_name_another_description(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.change(machine(gpu(0)))
    (tmp_path / "other.yaml").write_text("cards: [{uuid: GPU-elsewhere}]\n")
    monkeypatch.setenv("QUOTIENT_FAKE_GPUS", str(tmp_path / "other.yaml"))
    bench.driver.open()
    assert [each.uuid for each in bench.list_cards().cards] == ["GPU-elsewhere"]


# Drivers before r510, and what is asked once.


def test_a_driver_of_r470_is_measured_by_its_own_functions(bench: Bench) -> None:
    """The bindings' unversioned functions raise an exception there that is no NVMLError."""
    (card,) = bench.cards(gpu(0, usedMiB=100, processes=[{"pid": 7, "memoryMiB": 300, "sm": 20}]), driver="470.223.02")
    assert not hasattr(pynvml.nvmlLib, "nvmlDeviceGetComputeRunningProcesses_v3")
    assert card.memory_mib == 40960
    usage = bench.driver.usage(card)
    assert usage.processes == (GpuProcess(7, 300, 20),)
    assert usage.used_mib == 400
    assert bench.driver.needs_reset(card) is None


def test_memory_that_the_driver_reserves_is_not_offered(bench: Bench) -> None:
    (card,) = bench.cards(gpu(0, reservedMiB=424))
    assert card.memory_mib == 40960 - 424


def test_nvlinks_behind_an_unused_one_are_counted(bench: Bench) -> None:
    first, _ = bench.cards(*(gpu(index, nvswitchLinks=12, unusedNvlinks=2) for index in range(2)))
    assert first.links == {"GPU-1": "nvlink12"}


def test_what_cannot_change_is_asked_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen cards at a switch took 9,873 calls every 30 s."""
    bench.open(machine(*(gpu(index, nvswitchLinks=12) for index in range(16))))
    calls = count_calls(monkeypatch)
    cards = bench.list_cards()
    first = len(calls)
    assert first < 16 * (36 + 2 * 12 + 11) + 16 * 15
    assert bench.list_cards() == cards
    assert len(calls) - first <= 1 + (4 + 36) * 16


@pytest.mark.parametrize("call", ["minor", "memory", "name", "mig"])
def test_a_card_that_cannot_be_read_once_is_left_out_and_not_guessed(bench: Bench, call: str) -> None:
    """The minor number 0 is that of the other card: containers of both would get the same device node."""
    bench.open(machine(gpu(0, minor=1, failures={call: "timeout"}), gpu(1, minor=0)))
    listed = bench.list_cards()
    assert [each.uuid for each in listed.cards] == ["GPU-1"]
    assert listed.unreadable == {0: "driver error: Timeout"}
    bench.change(machine(gpu(0, minor=1), gpu(1, minor=0)))
    listed = bench.list_cards()
    assert [(each.uuid, each.minor, each.memory_mib) for each in listed.cards] == [
        ("GPU-0", 1, 40960),
        ("GPU-1", 0, 40960),
    ]
    assert listed.unreadable == {}


def test_an_attribute_that_could_not_be_read_is_asked_again(bench: Bench) -> None:
    failing = gpu(0, numa=1, failures={"capability": "timeout", "numa": "timeout", "pci": "timeout"})
    (first,) = bench.cards(failing)
    assert (first.capability, first.bus_id, first.numa) == ("", "", None)
    bench.change(machine(gpu(0, numa=1)))
    (second,) = bench.list_cards().cards
    assert (second.capability, second.bus_id, second.numa) == ("8.0", "0000EEEE:01:00.0", 1)


def test_a_card_that_gets_another_device_node_is_listed_with_it(bench: Bench) -> None:
    bench.cards(gpu(0, minor=0))
    bench.change(machine(gpu(0, minor=3)))
    assert [each.minor for each in bench.list_cards().cards] == [3]


@pytest.mark.parametrize("link", [{"nvlink": 4}, {"path": "pix"}], ids=["trained late", "timed out"])
def test_links_that_appear_later_are_listed(bench: Bench, link: Described) -> None:
    """The Fabric Manager may start after the plugin."""
    failures = {"topology": "timeout"} if "path" in link else None
    assert links_between(bench, gpu(0, failures=failures), gpu(1, failures=failures))[0] == ("" if failures else "sys")
    bench.change(machine(gpu(0), gpu(1), links=[{"a": 0, "b": 1, **link}]))
    expected = "nvlink4" if "nvlink" in link else "pix"
    assert [list(each.links.values()) for each in bench.list_cards().cards] == [[expected], [expected]]


def test_links_whose_state_cannot_be_read_stay_as_they_were(bench: Bench) -> None:
    links = [{"a": 0, "b": 1, "nvlink": 4}]
    assert links_between(bench, gpu(0), gpu(1), nvlink=4) == ("nvlink4", "nvlink4")
    bench.change(machine(gpu(0, failures={"nvlink": "timeout"}), gpu(1), links=links))
    assert [list(each.links.values()) for each in bench.list_cards().cards] == [["nvlink4"], ["nvlink4"]]


def test_a_mig_device_whose_instance_cannot_be_read_is_left_out_until_it_can(bench: Bench) -> None:
    broken = part(0) | {"failures": {"mig": "timeout"}}
    assert [each.uuid for each in bench.cards(gpu(0, mig=[broken, part(1)]))] == ["MIG-1"]
    assert bench.list_cards().unreadable == {0: "driver error: Timeout"}
    bench.change(machine(gpu(0, mig=[part(0), part(1)])))
    assert [each.gpu_instance for each in bench.list_cards().cards] == [7, 8]


def test_a_replaced_card_is_read_again(bench: Bench) -> None:
    bench.cards(gpu(0), gpu(1))
    bench.change(machine(gpu(0), gpu(2, product="Tesla T4", memoryMiB=15360)))
    assert [(each.uuid, each.memory_mib) for each in bench.list_cards().cards] == [("GPU-0", 40960), ("GPU-2", 15360)]


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    find = pynvml._nvmlGetFunctionPointer

    def find_counted(name: str) -> Any:
        calls.append(name)
        return find(name)

    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", find_counted)
    return calls


def test_an_xid_of_a_mig_device_names_its_instances(bench: Bench) -> None:
    bench.open(machine(gpu(0, mig=[part(0), part(1)])))
    bench.driver.subscribe(bench.list_cards().cards)
    bench.change(machine(gpu(0, mig=[part(0), part(1)]), events=[{"card": 0, "xid": 94, "gi": 8, "ci": 1}]))
    assert bench.driver.wait_for_xid(5.0) == XidEvent("GPU-0", 94, 8, 1)


@pytest.mark.parametrize(("action", "needs"), [(0, False), (1, True), (2, True), (None, None)])
def test_the_driver_tells_whether_a_card_has_to_be_reset(
    bench: Bench, action: int | None, *, needs: bool | None
) -> None:
    (card,) = bench.cards(gpu(0, recoveryAction=action))
    assert bench.driver.needs_reset(card) is needs


# Memory limits of cgroups.

R615 = "615.20.01"
HALF = MemoryLimits(0, 20 * 2**30)


def open_r615(bench: Bench, *cards: Described, **others: Any) -> Driver:
    bench.cards(*cards, driver=R615, **others)
    return bench.driver


def test_memory_is_limited_for_each_cgroup_and_card(bench: Bench, tmp_path: Path) -> None:
    """And programs beside the driver can read in a file what was set."""
    driver = open_r615(bench, gpu(0), gpu(1))
    one, other = tmp_path / "one", tmp_path / "other cgroup"
    for cgroup in (one, other):
        cgroup.mkdir()
        assert driver.memory_limits("GPU-0", cgroup) == MemoryLimits(0, NO_LIMIT)
    driver.set_memory_limits("GPU-0", one, MemoryLimits(1, 2))
    driver.set_memory_limits("GPU-0", one, HALF)
    driver.set_memory_limits("GPU-1", other, MemoryLimits(5, 6))
    assert driver.memory_limits("GPU-0", one) == HALF
    assert driver.memory_limits("GPU-1", one) == MemoryLimits(0, NO_LIMIT)
    assert driver.memory_limits("GPU-1", other) == MemoryLimits(5, 6)
    lines = (bench.folder / "memory-limits.txt").read_text().splitlines()
    assert lines == [
        f"GPU-0 0 {HALF.hard_bytes} {one.stat().st_ino} {one}",
        f"GPU-1 5 6 {other.stat().st_ino} {other}",
    ]
    driver.clear_memory_limits("GPU-0", one)
    assert driver.memory_limits("GPU-0", one) == MemoryLimits(0, NO_LIMIT)
    assert len((bench.folder / "memory-limits.txt").read_text().splitlines()) == 1


def test_a_removed_cgroup_has_no_limits(bench: Bench, tmp_path: Path) -> None:
    """Nor has a new one at its path."""
    driver, cgroup = open_r615(bench, gpu(0)), tmp_path / "cgroup"
    cgroup.mkdir()
    driver.set_memory_limits("GPU-0", cgroup, HALF)
    cgroup.rename(tmp_path / "kept, so that its inode is not used again")
    with pytest.raises(DriverError, match="does not limit the memory of GPU GPU-0: Not Found"):
        driver.memory_limits("GPU-0", cgroup)
    with pytest.raises(DriverError, match="Not Found"):
        driver.set_memory_limits("GPU-0", cgroup, HALF)
    cgroup.mkdir()
    assert driver.memory_limits("GPU-0", cgroup) == MemoryLimits(0, NO_LIMIT)


UNLIMITED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a driver before r615": ({"driver": "610.43"}, "GPU-0", "Function Not Found"),
    "a MIG device": ({}, "MIG-7", "Not Supported"),
    "a card in MIG mode": ({}, "GPU-1", "Not Supported"),
    "a card that the driver does not have": ({}, "GPU-9", "Not Found"),
    "a call that fails": ({"failures": {"setMemoryLimits": "no_permission"}}, "GPU-0", "Insufficient Permissions"),
}


@pytest.mark.parametrize(("others", "uuid", "reason"), UNLIMITED.values(), ids=UNLIMITED.keys())
def test_a_limit_that_cannot_be_set_is_an_error(
    bench: Bench, tmp_path: Path, others: dict[str, Any], uuid: str, reason: str
) -> None:
    """It names the card, and the driver's own reason."""
    bench.cards(gpu(0), gpu(1, mig=[part(0)]), **({"driver": R615} | others))
    uuid = bench.list_cards().cards[1].uuid if uuid.startswith("MIG") else uuid
    with pytest.raises(DriverError, match=f"memory of GPU {uuid}: .*{reason}"):
        bench.driver.set_memory_limits(uuid, tmp_path, HALF)


def test_a_card_may_ignore_its_limits(bench: Bench, tmp_path: Path) -> None:
    """The fake driver can succeed without effect, so that it is tested who notices."""
    driver = open_r615(bench, gpu(0, ignoresMemoryLimits=True))
    driver.set_memory_limits("GPU-0", tmp_path, HALF)
    assert driver.memory_limits("GPU-0", tmp_path) == MemoryLimits(0, NO_LIMIT)

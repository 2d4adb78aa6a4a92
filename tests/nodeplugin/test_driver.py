"""What is read from the driver, with NVIDIA's own bindings and a library that answers from a file."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pynvml
import pytest
import yaml

from nodeplugin import fake
from nodeplugin.cards import Card
from nodeplugin.nvml import Driver, DriverError, GpuProcess, MeasuredUsage, XidEvent

Described = Mapping[str, Any]


def gpu(index: int, **changes: Any) -> dict[str, Any]:
    """A card as it is described; its bus is one that no machine has, so that only the driver knows about it."""
    made = {
        "uuid": f"GPU-{index}",
        "product": "NVIDIA A100-SXM4-40GB",
        "memoryMiB": 40960,
        "bus": f"0000EEEE:{index + 1:02X}:00.0",
    } | changes
    return {key: value for key, value in made.items() if value is not None}


def machine(*cards: Described, **others: Any) -> dict[str, Any]:
    return {"cards": list(cards), **others}


class Bench:
    """A library of its own, and a driver that has loaded it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.driver = Driver(folder / "libnvidia-ml.so.1")

    def begin(self, description: Described | str) -> Driver:
        """Describe a machine and begin to ask."""
        self.change(description)
        return self.driver.open()

    def change(self, description: Described | str) -> None:
        fake.install(self.folder, description)

    def cards(self, *cards: Described, **others: Any) -> list[Card]:
        """Describe a machine, and give the cards that are read."""
        self.begin(machine(*cards, **others))
        return list(self.driver.cards())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench; the bindings keep one library for ever, so they are made to forget it."""
    monkeypatch.delenv("QUOTIENT_FAKE_GPUS", raising=False)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    made = Bench(tmp_path / "driver")
    yield made
    made.driver.close()


# Which cards there are.


def test_a_card_is_read_with_all_that_the_driver_says(bench: Bench) -> None:
    """Its device node's number is not its index."""
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


def test_indexes_and_minors_may_cross(bench: Bench) -> None:
    """The driver lists cards by their bus, and the kernel numbers nodes by when they were found."""
    assert [(each.index, each.minor) for each in bench.cards(gpu(0, minor=1), gpu(1, minor=0))] == [(0, 1), (1, 0)]


def test_a_driver_that_does_not_say_the_minor_is_taken_by_index(bench: Bench) -> None:
    """As it is on nearly all machines."""
    cards = (gpu(index, minor=5, failures={"minor": "not_supported"}) for index in range(2))
    assert [each.minor for each in bench.cards(*cards)] == [0, 1]


@pytest.mark.parametrize(
    ("product", "model"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA", "unknown"),
    ],
    ids=["with the brand", "with an older brand", "with a series", "with nothing but the brand"],
)
def test_products_are_named_without_their_brand(bench: Bench, product: str, model: str) -> None:
    """As quotas name them; what names no model is unknown, and a card all the same."""
    (read,) = bench.cards(gpu(0, product=product))
    assert (read.product, read.model) == (product, model)


UNKNOWN = {
    "memory is not said": (gpu(0, memoryMiB=None), "memory_mib", 0),
    "memory cannot be asked for": (gpu(0, failures={"memory": "not_supported"}), "memory_mib", 0),
    "capability cannot be asked for": (gpu(0, failures={"capability": "not_supported"}), "capability", ""),
    "bus cannot be asked for": (gpu(0, failures={"pci": "no_permission"}), "bus_id", ""),
    "the NUMA node is not said": (gpu(0), "numa", None),
}


@pytest.mark.parametrize(("described", "attribute", "expected"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_what_the_driver_does_not_say_is_left_out(
    bench: Bench, described: Described, attribute: str, expected: object
) -> None:
    """The card is there all the same."""
    (read,) = bench.cards(described)
    assert getattr(read, attribute) == expected


def test_a_card_that_cannot_say_its_name_is_left_out_alone(bench: Bench) -> None:
    """The others keep their indexes."""
    found = bench.cards(gpu(0, lost=True), gpu(1), gpu(2, failures={"uuid": "unknown"}), gpu(3))
    assert [(each.uuid, each.index) for each in found] == [("GPU-1", 1), ("GPU-3", 3)]


def test_cards_of_several_models_are_told_apart(bench: Bench) -> None:
    """Machines are extended over the years."""
    found = bench.cards(gpu(0), gpu(1, product="Tesla T4", memoryMiB=15109, capability="7.5"))
    assert [(each.model, each.memory_mib) for each in found] == [("A100-SXM4-40GB", 40960), ("T4", 15109)]


def test_a_machine_may_have_no_card(bench: Bench) -> None:
    """That is no error."""
    assert bench.cards() == []


def test_more_cards_are_found_when_asked_again(bench: Bench) -> None:
    """What the driver shows now counts."""
    bench.cards(gpu(0))
    bench.change(machine(gpu(0), gpu(1)))
    assert [each.uuid for each in bench.driver.cards()] == ["GPU-0", "GPU-1"]


# Links.


def links_between(bench: Bench, one: Described, other: Described, **link: Any) -> tuple[str, str]:
    """How two cards reach each other, seen from both sides."""
    first, second = bench.cards(one, other, links=[{"a": 0, "b": 1, **link}] if link else [])
    return first.links.get("GPU-1", ""), second.links.get("GPU-0", "")


@pytest.mark.parametrize("path", ["board", "pix", "pxb", "phb", "node", "sys"])
def test_paths_over_pcie_are_read(bench: Bench, path: str) -> None:
    """From the same board to another socket."""
    assert links_between(bench, gpu(0), gpu(1), path=path) == (path, path)


@pytest.mark.parametrize("count", [1, 4, 18])
def test_nvlinks_are_counted(bench: Bench, count: int) -> None:
    """They come before whatever path there is over PCIe."""
    assert links_between(bench, gpu(0), gpu(1), nvlink=count, path="pix") == (f"nvlink{count}",) * 2


def test_cards_without_a_known_path_are_told_by_their_numa_nodes(bench: Bench) -> None:
    """The driver knows that much of every machine."""
    assert links_between(bench, gpu(0, numa=0), gpu(1, numa=0)) == ("node", "node")
    bench.change(machine(gpu(0, numa=0), gpu(1, numa=1)))
    assert [each.links for each in bench.driver.cards()] == [{"GPU-1": "sys"}, {"GPU-0": "sys"}]


def test_behind_a_switch_every_card_reaches_every_other(bench: Bench) -> None:
    """With as many links as the one that has fewer; one that is not behind the switch is reached otherwise."""
    first, second, third = bench.cards(gpu(0, nvswitchLinks=12), gpu(1, nvswitchLinks=6), gpu(2, numa=0))
    assert first.links == {"GPU-1": "nvlink6", "GPU-2": "sys"}
    assert second.links == {"GPU-0": "nvlink6", "GPU-2": "sys"}
    assert third.links == {"GPU-0": "sys", "GPU-1": "sys"}


def test_links_to_each_of_several_cards_are_told_apart(bench: Bench) -> None:
    """By the bus of the other end."""
    wired = [{"a": 0, "b": 1, "nvlink": 1}, {"a": 0, "b": 2, "nvlink": 2}, {"a": 1, "b": 2, "path": "pix"}]
    first, second, third = bench.cards(gpu(0), gpu(1), gpu(2), links=wired)
    assert first.links == {"GPU-1": "nvlink1", "GPU-2": "nvlink2"}
    assert second.links == {"GPU-0": "nvlink1", "GPU-2": "pix"}
    assert third.links == {"GPU-0": "nvlink2", "GPU-1": "pix"}


def test_cards_that_do_not_tell_their_links_have_none(bench: Bench) -> None:
    """Then their NUMA nodes tell whoever places pods."""
    one, other = (gpu(index, failures={"nvlink": "not_supported", "topology": "not_supported"}) for index in range(2))
    assert links_between(bench, one, other, nvlink=4) == ("", "")


def test_what_is_described_once_for_two_cards_holds_for_both(bench: Bench) -> None:
    """Whoever describes a machine in Python may share parts of it."""
    failing = {"memory": "not_supported"}
    assert [each.memory_mib for each in bench.cards(gpu(0, failures=failing), gpu(1, failures=failing))] == [0, 0]


# Parts of cards.


def part(number: int) -> dict[str, Any]:
    return {"uuid": f"MIG-{number}", "profile": "1g.5gb", "memoryMiB": 4864, "gi": 7 + number, "ci": number}


def test_a_divided_card_is_read_as_its_parts(bench: Bench) -> None:
    """Each with the number of its card's device node and those of its instances; beside cards that are whole."""
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


def test_a_card_that_is_to_be_divided_and_is_not_yet_offers_nothing(bench: Bench) -> None:
    """As a whole it cannot be used any more."""
    assert bench.cards(gpu(0, migMode=True)) == []


def test_a_part_is_asked_about_through_its_card(bench: Bench) -> None:
    """Errors of a card are those of its parts."""
    first, _ = bench.cards(gpu(0, mig=[part(0), part(1)]))
    assert bench.driver.fault_of(first) == ""
    bench.change(machine(gpu(0, mig=[part(0), part(1)], lost=True)))
    assert "GPU is lost" in bench.driver.fault_of(first)
    bench.change(machine(gpu(0, mig=[part(0), part(1)])))
    bench.driver.listen([first])
    bench.change(machine(gpu(0, mig=[part(0), part(1)]), events=[{"card": 0, "xid": 79}]))
    assert bench.driver.wait(0) == XidEvent("GPU-0", 79)


def test_a_part_that_was_removed_is_noticed(bench: Bench) -> None:
    """Its card may be divided anew while the plugin runs."""
    first, second = bench.cards(gpu(0, mig=[part(0), part(1)]))
    bench.change(machine(gpu(0, mig=[part(1)])))
    assert bench.driver.fault_of(second) == ""
    assert bench.driver.fault_of(first) != ""


# How they are.


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (machine(gpu(0), gpu(1)), ""),
        (machine(gpu(0), gpu(1, lost=True)), "the driver says: GPU is lost"),
        (machine(gpu(0)), "the driver says: Not Found"),
        (machine(gpu(1), gpu(0)), ""),
        (machine(gpu(0), gpu(1, failures={"uuid": "unknown"})), "the driver says: Unknown Error"),
        (machine(gpu(0), gpu(1), failures={"handle": "driver_not_loaded"}), "the driver says: Driver Not Loaded"),
    ],
    ids=[
        "it answers",
        "it fell off the bus",
        "it was removed",
        "it has another index now",
        "it cannot say its name",
        "the driver was unloaded",
    ],
)
def test_a_card_is_looked_at(bench: Bench, after: Described, expected: str) -> None:
    """What is wrong is said in the driver's own words."""
    _, card = bench.cards(gpu(0), gpu(1))
    bench.change(after)
    assert bench.driver.fault_of(card) == expected


def test_a_card_that_comes_back_answers_again(bench: Bench) -> None:
    """After a reset."""
    (card,) = bench.cards(gpu(0))
    bench.change(machine(gpu(0, lost=True)))
    assert bench.driver.fault_of(card) != ""
    bench.change(machine(gpu(0)))
    assert bench.driver.fault_of(card) == ""


BUSY = gpu(
    0,
    usedMiB=512,
    utilization=35,
    temperature=51,
    powerW=210,
    processes=[{"pid": 4711, "memoryMiB": 2048, "sm": 30}, {"pid": 42, "memoryMiB": 100, "sm": 0}],
)


def test_what_a_card_does_is_measured(bench: Bench) -> None:
    """Its processes come by their number, with memory and time."""
    (card,) = bench.cards(BUSY)
    assert bench.driver.usage(card) == MeasuredUsage(
        utilization=35,
        used_mib=512 + 2048 + 100,
        temperature_c=51,
        power_w=210.0,
        processes=(GpuProcess(42, 100, 0), GpuProcess(4711, 2048, 30)),
    )


CALLS = ("utilization", "memory", "temperature", "power", "processes")


def test_what_cannot_be_measured_is_unknown(bench: Bench) -> None:
    """And not zero."""
    (card,) = bench.cards(BUSY | {"failures": dict.fromkeys(CALLS, "not_supported")})
    assert bench.driver.usage(card) == MeasuredUsage()


def test_processes_are_listed_where_their_time_cannot_be_measured(bench: Bench) -> None:
    """Virtual machines often do not tell."""
    (card,) = bench.cards(BUSY | {"failures": {"processUtilization": "not_supported"}})
    assert [each.utilization for each in bench.driver.usage(card).processes] == [0, 0]


def test_a_card_that_is_lost_or_was_never_seen_has_no_usage(bench: Bench) -> None:
    """Asking does no harm."""
    (card,) = bench.cards(gpu(0))
    bench.change(machine(gpu(0, lost=True)))
    assert bench.driver.usage(card) == MeasuredUsage()
    assert bench.driver.usage(Card(uuid="GPU-9", index=9, minor=9, product="")) == MeasuredUsage()


# Errors that it reports.


def listening(bench: Bench, *cards: Described, **others: Any) -> list[Card]:
    found = bench.cards(*cards, **others)
    bench.driver.listen(found)
    return found


def test_errors_are_reported_in_their_order(bench: Bench) -> None:
    """Those that were there before nobody listened are not."""
    old = {"card": 0, "xid": 13}
    listening(bench, gpu(0), gpu(1), events=[old])
    assert bench.driver.wait(0) is None
    bench.change(machine(gpu(0), gpu(1), events=[old, {"card": 1, "xid": 79}, {"card": 0, "xid": 48}]))
    assert [bench.driver.wait(0) for _ in range(3)] == [XidEvent("GPU-1", 79), XidEvent("GPU-0", 48), None]


def test_an_error_of_a_card_that_is_lost_is_still_its_own(bench: Bench) -> None:
    """It cannot say its name any more, but it was known before."""
    listening(bench, gpu(0), gpu(1))
    bench.change(machine(gpu(0), gpu(1, lost=True), events=[{"card": 1, "xid": 79}]))
    assert bench.driver.wait(0) == XidEvent("GPU-1", 79)


def test_only_cards_that_are_listened_to_are_heard(bench: Bench) -> None:
    """One that does not report errors is passed over."""
    mute = gpu(1, failures={"events": "not_supported"})
    listening(bench, gpu(0), mute)
    bench.change(machine(gpu(0), mute, events=[{"card": 1, "xid": 79}, {"card": 0, "xid": 62}]))
    assert bench.driver.wait(0) == XidEvent("GPU-0", 62)


def test_listening_again_begins_anew(bench: Bench) -> None:
    """With the cards that there are now."""
    (first,) = listening(bench, gpu(0))
    bench.change(machine(gpu(0), events=[{"card": 0, "xid": 79}]))
    bench.driver.listen([first])
    assert bench.driver.wait(0) is None


def test_a_driver_that_does_not_report_any_more_says_so(bench: Bench) -> None:
    """Whoever listens has to begin again."""
    listening(bench, gpu(0))
    bench.change(machine(gpu(0), failures={"wait": "unknown"}))
    with pytest.raises(DriverError, match="does not report errors any more"):
        bench.driver.wait(0)


def test_nothing_is_heard_before_anybody_listens(bench: Bench) -> None:
    """That is no error."""
    bench.cards(gpu(0))
    assert bench.driver.wait(0) is None


# No driver.


def test_the_version_is_said(bench: Bench) -> None:
    """Empty where it is not."""
    assert bench.begin(machine(driver="570.1")).version() == "570.1"
    bench.change(machine(failures={"driverVersion": "unknown"}))
    assert bench.driver.version() == ""


@pytest.mark.parametrize("failure", ["driver_not_loaded", "no_permission", "unknown"])
def test_a_driver_that_does_not_start_is_an_error_with_a_remedy(bench: Bench, failure: str) -> None:
    """It names the program to try and the setting to look at."""
    with pytest.raises(DriverError) as refused:
        bench.begin(machine(gpu(0), failures={"init": failure}))
    for word in ("does not answer", "nvidia-smi", "libnvidia-ml.so.1", "nodePlugin.driverRoot"):
        assert word in str(refused.value)


def test_a_driver_may_come_later(bench: Bench) -> None:
    """Its containers start when they start."""
    with pytest.raises(DriverError):
        bench.begin(machine(gpu(0), failures={"init": "driver_not_loaded"}))
    assert [each.uuid for each in bench.cards(gpu(0))] == ["GPU-0"]


def test_a_library_that_is_not_there_is_an_error(bench: Bench) -> None:
    """It names the file."""
    with pytest.raises(DriverError, match=r"libnvidia-ml\.so\.1 cannot be loaded"):
        bench.driver.open()


def test_a_driver_that_does_not_count_its_cards_is_an_error(bench: Bench) -> None:
    """Nobody may take that for a machine without cards."""
    bench.begin(machine(gpu(0), failures={"count": "unknown"}))
    with pytest.raises(DriverError, match="how many cards"):
        bench.driver.cards()


# How the file may be written.

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
    "lines that end as on Windows": PLAIN.replace("\n", "\r\n"),
    "empty lines": PLAIN.replace("\n", "\n\n"),
    "no end of the last line": PLAIN.rstrip("\n"),
    "keys in another order": "driver: '1'\nlinks: []\ncards:\n  - minor: 3\n    uuid: GPU-0\nevents: []\n",
    "as Python writes it": yaml.safe_dump(machine(gpu(0, capability="8.0", mig=[part(0)]), gpu(1, lost=False))),
    "spaces before colons": "cards:\n  - uuid : GPU-0\n    minor : 3\n",
    "spaces before colons in flows": "cards: [{uuid : GPU-0, minor : 3}]\n",
    "quotes within quotes": "cards:\n  - uuid: GPU-0\n    product: 'NVIDIA ''A100'''\n",
    "an apostrophe before a comment": "cards:\n  - uuid: GPU-0\n    product: NVIDIA's A100  # one\n",
    "nothing": "cards:\n  - uuid: GPU-0\n    numa: null\n",
    "truth in another case": "cards:\n  - uuid: GPU-0\n    lost: True\n  - uuid: GPU-1\n",
}
FOR_DESCRIBE = {
    "flows over several lines": "cards: [\n  {uuid: GPU-0,\n   minor: 3},\n  {uuid: GPU-1}]\n",
    "a whole document as a flow": "{cards: [{uuid: GPU-0, minor: 3}]}\n",
}

Told = list[tuple[str, int, int, int | None, str]]


def told_by(described: Any) -> Told:
    """What the driver should say of a description, as PyYAML reads it."""
    found: Told = []
    for index, card in enumerate(described["cards"]):
        if card.get("lost"):
            continue
        product, minor = card.get("product", "NVIDIA T4"), int(card.get("minor", index))
        for each in card.get("mig") or [card]:
            name = product if each is card else f"{product} MIG {each.get('profile', '')}"
            found.append((str(each["uuid"]), minor, int(each.get("memoryMiB", 0)), card.get("numa"), name))
    return found


Said = Callable[[str], Told]


@pytest.fixture
def said(bench: Bench) -> Said:
    """Gives what the driver says of a text."""

    def read(text: str) -> Told:
        bench.change(machine(gpu(0)))
        (bench.folder / fake.DESCRIPTION).write_text(text)
        cards = bench.driver.open().cards()
        return [(each.uuid, each.minor, each.memory_mib, each.numa, each.product) for each in cards]

    return read


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES.keys())
def test_descriptions_are_read_as_yaml(said: Said, text: str) -> None:
    """The library reads them by itself, and to the same effect as everybody else."""
    assert said(text) == told_by(yaml.safe_load(text))


@pytest.mark.parametrize("text", FOR_DESCRIBE.values(), ids=FOR_DESCRIBE.keys())
def test_other_forms_are_written_in_one_that_the_library_reads(bench: Bench, text: str) -> None:
    """Whoever describes cards to `install` may use all of YAML."""
    found = [(card.uuid, card.minor) for card in bench.begin(text).cards()]
    assert found == [(uuid, minor) for uuid, minor, *_ in told_by(yaml.safe_load(text))]


def test_the_example_shows_what_a_description_may_say(bench: Bench) -> None:
    """It is read as it stands, by both."""
    text = Path(fake.__file__).with_name("gpus.yaml").read_text()
    cards = bench.begin(text).cards()
    described = yaml.safe_load(text)
    assert [each.uuid for each in cards] == [described["cards"][0]["uuid"], "MIG-1"]
    assert bench.driver.version() == described["driver"]
    assert bench.driver.usage(cards[0]).processes == (GpuProcess(4711, 2048, 30),)


def test_a_description_elsewhere_can_be_named(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the environment."""
    bench.change(machine(gpu(0)))
    (tmp_path / "other.yaml").write_text("cards: [{uuid: GPU-elsewhere}]\n")
    monkeypatch.setenv("QUOTIENT_FAKE_GPUS", str(tmp_path / "other.yaml"))
    assert [each.uuid for each in bench.driver.open().cards()] == ["GPU-elsewhere"]

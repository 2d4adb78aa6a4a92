"""The device IDs on offer: always as many as there are units, and those in use never taken away."""

import re
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nodeplugin.cards import Card, CardCondition
from nodeplugin.device_ids import MAX_LIST_BYTES, CardDevices, Resource, device_list_problem, offered_devices
from nodeplugin.device_plugin import encode_devices
from tests.nodeplugin.builders import card
from vcuda.names import Names

UNHEALTHY, CORDONED = CardCondition(fault="XID 79"), CardCondition(cordon="maintenance")
HEALTHY = CardCondition()
CONDITIONS = (HEALTHY, UNHEALTHY, CORDONED, CardCondition("XID 79", "maintenance"))
REMEDY = re.compile(r"set memoryUnitMiB to at least (\d+)$")


def devices(units: int, in_use: Iterable[str] = (), condition: CardCondition = HEALTHY) -> CardDevices:
    return CardDevices(units, condition, frozenset(in_use))


def offered(*cards: CardDevices) -> dict[str, bool]:
    return offered_devices(Resource.CORE, cards)


def core_ids(count: int, start: int = 0) -> set[str]:
    return {f"core-{number}" for number in range(start, start + count)}


def healthy(offer: dict[str, bool]) -> set[str]:
    return {each for each, is_healthy in offer.items() if is_healthy}


def unhealthy(offer: dict[str, bool]) -> set[str]:
    return {each for each, is_healthy in offer.items() if not is_healthy}


def test_ids_are_numbered_through_all_cards() -> None:
    """An ID does not show its card."""
    assert list(offered(devices(2), devices(3)).items()) == [(f"core-{number}", True) for number in range(5)]
    assert set(offered_devices(Resource.MEMORY, [devices(1)])) == {"memory-0"}


def test_an_unhealthy_card_takes_out_its_ids_in_use_and_its_free_units() -> None:
    """The other card keeps all of its units."""
    offer = offered(devices(4, ["core-1", "core-2"], UNHEALTHY), devices(4, ["core-5"]))
    assert {"core-1", "core-2"} <= unhealthy(offer)
    assert "core-5" in healthy(offer)
    assert (len(unhealthy(offer)), len(healthy(offer))) == (4, 4)


def test_an_unhealthy_card_without_containers_takes_out_free_ids() -> None:
    """As many as it has units."""
    offer = offered(devices(4, condition=UNHEALTHY), devices(4, core_ids(3)))
    assert healthy(offer) == core_ids(4)
    assert len(unhealthy(offer)) == 4


def test_a_cordoned_card_keeps_its_ids_in_use_and_offers_no_more() -> None:
    """Its pods keep running."""
    offer = offered(devices(4, ["core-0", "core-3"], CORDONED), devices(2, ["core-9"]))
    assert {"core-0", "core-3", "core-9"} <= healthy(offer)
    assert (len(unhealthy(offer)), len(healthy(offer))) == (2, 4)


def test_an_id_in_use_on_two_cards_is_healthy_if_one_of_them_is() -> None:
    """The kubelet assigned it twice; the container on the healthy card must not be affected."""
    offer = offered(devices(2, ["core-0"], UNHEALTHY), devices(2, ["core-0"]))
    assert offer["core-0"]
    assert (len(unhealthy(offer)), len(healthy(offer))) == (2, 2)


def test_ids_in_use_of_another_plugin_stay_on_offer() -> None:
    """After a restart the kubelet would reject their pods; new IDs have our names."""
    offer = offered(devices(3, ["GPU-1::7", "core-0"]), devices(1))
    assert healthy(offer) == {"GPU-1::7", "core-0", "core-1", "core-2"}


def test_ids_in_use_stay_on_offer_if_a_card_has_fewer_units() -> None:
    """The memory unit may have been raised since."""
    in_use = core_ids(5)
    assert healthy(offered(devices(2, in_use))) == in_use
    assert unhealthy(offered(devices(2, in_use, UNHEALTHY))) == in_use


@pytest.mark.parametrize(
    ("resource", "made", "expected"),
    [
        (Resource.CORE, card(), 100),
        (Resource.MEMORY, card(), 160),
        (Resource.MEMORY, card(memory_mib=0), 1),
        (Resource.MEMORY, card(memory_mib=100), 1),
        (Resource.MEMORY, card(memory_mib=15109), 59),
    ],
    ids=[
        "a card has 100 cores",
        "and its memory in units",
        "one unit if its memory is unknown",
        "one unit if it has less than one",
        "an incomplete last unit is not offered",
    ],
)
def test_the_units_of_a_card(resource: Resource, made: Card, expected: int) -> None:
    """At least one of each resource, or no container could request the card."""
    assert resource.units_of(made, 256) == expected


def test_each_resource_has_a_name_and_a_counterpart() -> None:
    """Names are under the configured domain."""
    names = Names("example.org")
    assert [each.name_in(names) for each in Resource] == ["example.org/vcuda-core", "example.org/vcuda-memory"]
    assert [each.other for each in Resource] == [Resource.MEMORY, Resource.CORE]


@st.composite
def consistent_devices(draw: st.DrawFn) -> list[CardDevices]:
    """Cards with no more IDs in use than units, our IDs and other plugins', none of them on two cards."""
    sizes = draw(st.lists(st.integers(1, 12), max_size=5))
    ours = draw(st.permutations([f"core-{number}" for number in range(40)]))
    ids = iter([*ours[:30], *(f"foreign-{number}" for number in range(30))])
    return [
        devices(size, [next(ids) for _ in range(draw(st.integers(0, size)))], draw(st.sampled_from(CONDITIONS)))
        for size in sizes
    ]


@given(consistent_devices())
def test_there_are_always_as_many_ids_as_units(cards: list[CardDevices]) -> None:
    """Healthy are the IDs of healthy cards, and those in use of cordoned cards; all others are unhealthy."""
    offer = offered(*cards)
    usable = sum(
        0 if each.condition.fault else len(each.in_use) if each.condition.cordon else each.units for each in cards
    )
    assert len(offer) == sum(each.units for each in cards)
    assert len(healthy(offer)) == usable


@given(consistent_devices())
def test_an_id_in_use_is_as_healthy_as_its_card(cards: list[CardDevices]) -> None:
    offer = offered(*cards)
    for each in cards:
        assert {offer[device_id] for device_id in each.in_use} <= {each.condition.healthy}


@given(st.lists(st.integers(1, 20), max_size=5), st.lists(st.integers(1, 20), max_size=2))
def test_another_card_adds_ids_and_changes_none(sizes: list[int], more: list[int]) -> None:
    """While none is in use."""
    small, large = offered(*map(devices, sizes)), offered(*map(devices, [*sizes, *more]))
    assert list(small) == list(large)[: len(small)]
    assert set(small) == core_ids(sum(sizes))


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.sampled_from("abcdefgh")), st.sampled_from(CONDITIONS))))
def test_ids_in_use_are_always_offered(cards: Sequence[tuple[int, set[str], CardCondition]]) -> None:
    """Also if they are in use twice, or if there are more of them than units."""
    offer = offered(*(devices(units, in_use, condition) for units, in_use, condition in cards))
    assert set().union(*(in_use for _, in_use, _ in cards)) <= set(offer)
    assert len(offer) >= sum(units for units, _, _ in cards)


# The size of the list.


def largest_machine() -> list[Card]:
    return [card(index, memory_mib=192 * 1024) for index in range(16)]


def list_size(cards: Iterable[Card], unit_mib: int) -> int:
    """The bytes that the kubelet receives if every device has the longer health, Unhealthy."""
    by_card = [devices(each.units(unit_mib), condition=UNHEALTHY) for each in cards]
    return len(encode_devices(offered_devices(Resource.MEMORY, by_card)).SerializeToString())


def test_the_largest_machine_fits_with_the_default_unit() -> None:
    """16 cards of 192 GiB in units of 256 MiB."""
    assert device_list_problem(largest_machine(), 256) == ""
    assert list_size(largest_machine(), 256) < MAX_LIST_BYTES


def test_a_unit_that_is_too_small_is_refused_with_one_that_fits() -> None:
    """The message has the field, its value, and a remedy that works."""
    problem = device_list_problem(largest_machine(), 1)
    assert problem.startswith("memoryUnitMiB: 1: too small for this node: its GPUs would be 3145728 devices")
    remedy = REMEDY.search(problem)
    assert remedy is not None
    least = int(remedy[1])
    assert device_list_problem(largest_machine(), least) == ""
    assert list_size(largest_machine(), least) < MAX_LIST_BYTES


def test_what_is_not_refused_fits() -> None:
    """The estimate is an upper bound, up to the last device."""
    few, many = 1, MAX_LIST_BYTES
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if device_list_problem([card(memory_mib=middle)], 1) else (middle, many)
    assert list_size([card(memory_mib=few)], 1) < MAX_LIST_BYTES


@given(
    st.lists(st.integers(1, 2**20), min_size=1, max_size=16),
    st.integers(1, 64),
)
@example(sizes=[1, 1048575, 1048575], unit_mib=4)
def test_the_remedy_always_fits(sizes: list[int], unit_mib: int) -> None:
    """The unit in the message is not refused in turn."""
    cards = [card(index, memory_mib=mib) for index, mib in enumerate(sizes)]
    problem = device_list_problem(cards, unit_mib)
    if remedy := REMEDY.search(problem):
        assert device_list_problem(cards, int(remedy[1])) == ""
    else:
        assert problem == ""

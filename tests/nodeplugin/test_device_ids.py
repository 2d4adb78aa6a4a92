"""The ids that are offered to the kubelet: always as many as there are units, and held ones never taken away."""

import re
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nodeplugin.cards import Card, CardCondition
from nodeplugin.device_ids import MOST_BYTES, CardDevices, Resource, offered_devices, too_many
from nodeplugin.device_plugin import listing
from tests.nodeplugin.builders import card
from vcuda.names import Names

SICK, CORDONED = CardCondition(fault="XID 79"), CardCondition(cordon="maintenance")
WELL = CardCondition()
CONDITIONS = (WELL, SICK, CORDONED, CardCondition("XID 79", "maintenance"))


def stock(units: int, held: Iterable[str] = (), condition: CardCondition = WELL) -> CardDevices:
    return CardDevices(units, condition, frozenset(held))


def offered(*stocks: CardDevices) -> dict[str, bool]:
    return offered_devices(Resource.CORE, stocks)


def first(count: int, start: int = 0) -> set[str]:
    """The ids from this number on."""
    return {f"core-{number}" for number in range(start, start + count)}


def healthy(offer_: dict[str, bool]) -> set[str]:
    return {each for each, well in offer_.items() if well}


def sick(offer_: dict[str, bool]) -> set[str]:
    return {each for each, well in offer_.items() if not well}


def test_ids_are_numbered_through_all_cards() -> None:
    """Which card an id stands for is not to be seen in it."""
    assert list(offered(stock(2), stock(3)).items()) == [(f"core-{number}", True) for number in range(5)]
    assert set(offered_devices(Resource.MEMORY, [stock(1)])) == {"memory-0"}


def test_a_sick_card_takes_out_what_is_held_on_it_and_as_much_more_as_it_has() -> None:
    """Its containers fail, and nothing of it is given to others; the other card stays whole."""
    found = offered(stock(4, ["core-1", "core-2"], SICK), stock(4, ["core-5"]))
    assert {"core-1", "core-2"} <= sick(found)
    assert "core-5" in healthy(found)
    assert (len(sick(found)), len(healthy(found))) == (4, 4)


def test_a_sick_card_that_nobody_uses_takes_out_free_ids() -> None:
    """As many as it has units."""
    found = offered(stock(4, condition=SICK), stock(4, first(3)))
    assert healthy(found) == first(4)
    assert len(sick(found)) == 4


def test_a_cordoned_card_keeps_what_is_held_and_offers_nothing_beyond() -> None:
    """Its pods run on."""
    found = offered(stock(4, ["core-0", "core-3"], CORDONED), stock(2, ["core-9"]))
    assert {"core-0", "core-3", "core-9"} <= healthy(found)
    assert (len(sick(found)), len(healthy(found))) == (2, 4)


def test_an_id_that_two_containers_hold_is_the_well_ones() -> None:
    """By a fault of the kubelet's; the container on the well card works, whatever became of the other."""
    found = offered(stock(2, ["core-0"], SICK), stock(2, ["core-0"]))
    assert found["core-0"]
    assert (len(sick(found)), len(healthy(found))) == (2, 2)


def test_ids_that_were_named_otherwise_stay_offered() -> None:
    """A kubelet would refuse their pods after a restart; new ones have our names."""
    found = offered(stock(3, ["GPU-1::7", "core-0"]), stock(1))
    assert healthy(found) == {"GPU-1::7", "core-0", "core-1", "core-2"}


def test_held_ids_stay_offered_where_a_card_has_fewer_units_than_are_held() -> None:
    """The unit of memory may have been raised since."""
    held = first(5)
    assert healthy(offered(stock(2, held))) == held
    assert sick(offered(stock(2, held, SICK))) == held


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
        "one unit where nobody knows its memory",
        "one unit where it has less than one",
        "what is beyond the last unit is not offered",
    ],
)
def test_what_a_card_offers(resource: Resource, made: Card, expected: int) -> None:
    """Every card offers something of both, or no container could ask for it."""
    assert resource.units_of(made, 256) == expected


def test_each_resource_names_itself_and_the_other() -> None:
    """As pods do, under the configured domain."""
    names = Names("example.org")
    assert [each.name_in(names) for each in Resource] == ["example.org/vcuda-core", "example.org/vcuda-memory"]
    assert [each.other for each in Resource] == [Resource.MEMORY, Resource.CORE]


@st.composite
def consistent_stocks(draw: st.DrawFn) -> list[CardDevices]:
    """Cards of which no more is held than they have, by ids of ours and foreign ones, none of them twice."""
    sizes = draw(st.lists(st.integers(1, 12), max_size=5))
    ours = draw(st.permutations([f"core-{number}" for number in range(40)]))
    free = iter([*ours[:30], *(f"foreign-{number}" for number in range(30))])
    return [
        stock(size, [next(free) for _ in range(draw(st.integers(0, size)))], draw(st.sampled_from(CONDITIONS)))
        for size in sizes
    ]


@given(consistent_stocks())
def test_there_are_always_as_many_ids_as_units(stocks: list[CardDevices]) -> None:
    """Healthy are those of well cards and the held ones of cordoned cards; all others are there and sick."""
    found = offered(*stocks)
    usable = sum(
        0 if each.condition.fault else len(each.held) if each.condition.cordon else each.units for each in stocks
    )
    assert len(found) == sum(each.units for each in stocks)
    assert len(healthy(found)) == usable


@given(consistent_stocks())
def test_a_held_id_is_as_its_card_is(stocks: list[CardDevices]) -> None:
    """Held ids of sick cards are sick, and those of all others healthy."""
    found = offered(*stocks)
    for each in stocks:
        assert {found[held] for held in each.held} <= {each.condition.healthy}


@given(st.lists(st.integers(1, 20), max_size=5), st.lists(st.integers(1, 20), max_size=2))
def test_ids_are_the_same_every_time_while_none_is_held(sizes: list[int], more: list[int]) -> None:
    """Another card adds ids and changes none."""
    small, large = offered(*map(stock, sizes)), offered(*map(stock, [*sizes, *more]))
    assert list(small) == list(large)[: len(small)]
    assert set(small) == first(sum(sizes))


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.sampled_from("abcdefgh")), st.sampled_from(CONDITIONS))))
def test_held_ids_are_offered_whatever_happens(written: Sequence[tuple[int, set[str], CardCondition]]) -> None:
    """Ids held twice and more ids than units change nothing of that."""
    found = offered(*(stock(units, held, condition) for units, held, condition in written))
    assert set().union(*(held for _, held, _ in written)) <= set(found)
    assert len(found) >= sum(units for units, _, _ in written)


# The size of the message.


def largest_machine() -> list[Card]:
    return [card(index, memory_mib=192 * 1024) for index in range(16)]


def size_of(cards: Iterable[Card], unit_mib: int) -> int:
    """What the kubelet has to read, with the longer word for every device."""
    stocks = [stock(each.units(unit_mib), condition=SICK) for each in cards]
    return len(listing(offered_devices(Resource.MEMORY, stocks)).SerializeToString())


def test_the_largest_machine_fits_with_the_usual_unit() -> None:
    """16 cards of 192 GiB in units of 256 MiB."""
    assert too_many(largest_machine(), 256) == ""
    assert size_of(largest_machine(), 256) < MOST_BYTES


def test_a_unit_that_makes_too_many_devices_is_refused_with_one_that_does_not() -> None:
    """The message names the field, its value, and a remedy that helps."""
    told = too_many(largest_machine(), 1)
    assert told.startswith("memoryUnitMiB: 1: ")
    remedy = re.search(r"at least (\d+) MiB", told)
    assert remedy is not None
    least = int(remedy[1])
    assert too_many(largest_machine(), least) == ""
    assert size_of(largest_machine(), least) < MOST_BYTES


def test_whatever_is_not_refused_fits() -> None:
    """The estimate is never below what is really sent, up to the last device."""
    few, many = 1, MOST_BYTES
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if too_many([card(memory_mib=middle)], 1) else (middle, many)
    assert size_of([card(memory_mib=few)], 1) < MOST_BYTES


@given(
    st.lists(st.integers(1, 2**20), min_size=1, max_size=16),
    st.integers(1, 64),
)
@example(sizes=[1, 1048575, 1048575], unit_mib=4)
def test_the_remedy_always_helps(sizes: list[int], unit_mib: int) -> None:
    """Whoever writes the unit that the message names is not refused again."""
    cards = [card(index, memory_mib=mib) for index, mib in enumerate(sizes)]
    if remedy := re.search(r"at least (\d+) MiB", too_many(cards, unit_mib)):
        assert too_many(cards, int(remedy[1])) == ""
